"""What to do when gradients overflow step after step: by default nothing, on demand raise or call back."""

import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr, tree_leaves_with_path

from jamp._tree import AxisName, all_finite
from jamp._warnings import PrecisionWarning
from jamp.scalers._base import is_inexact

# Without numbers, so that Python shows it once.
_WARNING = (
    "Steps are skipped without end, the last because of {path}. jamp.first_nonfinite(grad_fn, params, batch) names the "
    "operation that the first infinity or NaN comes from."
)

OnAbort = Literal["raise", "warn"] | Callable[["NonFiniteGradientsError"], Any]
Watch = Callable[[Callable[[], Any], jax.Array, jax.Array], None]


class NonFiniteGradientsError(FloatingPointError):
    """Gradients were not finite for too many steps in a row, so a smaller loss scale is not the cure.

    Attributes:
        path: Path of the first gradient that is not finite, as `jax.tree_util.keystr` writes it. None where all of them
            are finite, and the argument `grads_finite` made the step be skipped.
        consecutive_skipped: Number of steps skipped in a row.
        loss_scale: The loss scale of the last of them.
    """

    def __init__(self, path: str | None, consecutive_skipped: int, loss_scale: float) -> None:
        if path is None:
            message = (
                f"{consecutive_skipped} steps in a row were skipped, the last of them because the argument "
                "`grads_finite` was false: these gradients are finite. Look at what made the flag."
            )
        else:
            message = (
                f"Gradients were not finite for {consecutive_skipped} steps in a row; the first of them is "
                f"{path or 'the only leaf'}. The last loss scale was {loss_scale:g}. A loss that is NaN or inf by "
                "itself does this whatever the scale: look at the data, at the learning rate, and at what computes "
                "this gradient. jamp.first_nonfinite(grad_fn, params, batch) names the operation."
            )
        super().__init__(message)
        self.path, self.consecutive_skipped, self.loss_scale = path, consecutive_skipped, loss_scale


def make_watch(abort_after: int | None, on_abort: OnAbort, axis_name: AxisName | None) -> Watch:
    """What `loss_scaled` calls at every step, with a function for the gradients, the skips in a row, and the scale."""
    if on_abort not in ("raise", "warn") and not callable(on_abort):
        raise ValueError(
            f"`on_abort` is {on_abort!r}: expected 'raise', 'warn', or a function of a NonFiniteGradientsError."
        )
    if abort_after is None:
        if on_abort != "raise":
            raise ValueError(
                "`on_abort` is never called without `abort_after`: add a number of skipped steps in a row, such as "
                "abort_after=20."
            )
        return lambda make_grads, consecutive_skipped, loss_scale: None
    if isinstance(abort_after, bool) or not isinstance(abort_after, int) or abort_after < 1:
        raise ValueError(f"`abort_after` is {abort_after!r}: expected a number of steps, 1 or more, or None.")

    def watch(make_grads: Callable[[], Any], consecutive_skipped: jax.Array, loss_scale: jax.Array) -> None:
        paths: list[str] = []

        def on_host(*values: jax.Array) -> None:
            # As numpy arrays: a computation of jax would wait for the one that waits for this callback.
            flags, count, scale = map(np.asarray, values)
            # Asked again because a `cond` under `vmap` runs both of its branches.
            if count >= abort_after:
                bad = [path for path, flag in zip(paths, flags, strict=True) if not flag]
                _abort(NonFiniteGradientsError(bad[0] if bad else None, int(count), float(scale)), on_abort)

        def call_host() -> None:
            leaves = [(keystr(path), x) for path, x in tree_leaves_with_path(make_grads()) if is_inexact(x)]
            paths[:] = [path for path, _ in leaves]
            flags = jnp.array([all_finite(x, axis_name) for _, x in leaves])  # Bad on any device.
            jax.debug.callback(on_host, flags, consecutive_skipped, loss_scale)

        # In a branch, so that a step on which all is well does not talk to the host.
        lax.cond(consecutive_skipped >= abort_after, call_host, lambda: None)

    return watch


def _abort(error: NonFiniteGradientsError, on_abort: OnAbort) -> None:
    if on_abort == "raise":
        raise error
    if on_abort == "warn":
        warnings.warn(_WARNING.format(path=error.path or "a flag"), PrecisionWarning, stacklevel=2)
    else:
        on_abort(error)
