"""What the commands of the benchmarks share: names that a user gives, and what to say of those that nothing has."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any


def check_names(what: str, given: Sequence[str], known: Iterable[str], error: Callable[[str], Any]) -> None:
    """Ends a command, with the names that there are, where it is given another.

    Args:
        what: What the names are of, for the message.
        given: Those that were given.
        known: Those that there are.
        error: Ends the command with a message, such as `ArgumentParser.error`.
    """
    known = [*known]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            error(f"unknown {what} {name!r}: expected one of {', '.join(known)}.{meant}")
