"""A value in two precisions."""

from __future__ import annotations

from typing import Any, NamedTuple


class Pair(NamedTuple):
    """A value in float32 and, raised to float32, at the precision of the program."""

    wide: Any
    half: Any
