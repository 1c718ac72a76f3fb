"""One category for every warning about a misuse, given at the line of the user's code that it is about."""

import sys
import warnings
from types import FrameType

# The rest of the call stack while a train step is traced: no line in them is one that a user could change.
_LIBRARIES = {"jamp", "jax", "jaxlib", "optax", "flax", "haiku", "equinox", "keras", "functools", "contextlib"}


class PrecisionWarning(UserWarning):
    """Code that runs and trains wrongly, told with the code to write instead.

    Each is given when a step is traced, and not when it runs; Python shows each once for a line of code. None of them
    is given for code that is right, so tests may turn them into errors.

    Example:
        >>> import warnings, jamp
        >>> warnings.simplefilter("error", jamp.PrecisionWarning)
    """


def warn_user(message: str) -> None:
    """Gives a `PrecisionWarning` at the innermost line of the call stack that belongs to the user."""
    frame: FrameType | None = sys._getframe(1)
    while frame.f_back is not None and _package(frame) in _LIBRARIES:
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})  # Where Python keeps what it has shown.
    place = (frame.f_code.co_filename, frame.f_lineno)
    warnings.warn_explicit(message, PrecisionWarning, *place, frame.f_globals.get("__name__"), registry)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
