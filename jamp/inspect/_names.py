"""Names that are too long for their place, shortened so that they still differ."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def shortened(names: Sequence[str], width: int) -> list[str]:
    """Names that stand beside each other, each with at most `width` letters.

    Scopes of one model begin alike, and often end alike: what tells them apart may be anywhere. So of names that are
    too long that part is kept in which they differ, and an ellipsis stands for the others.

    Args:
        names: The names, alike ones too.
        width: The letters that there is room for, 3 or more.
    """
    long = list(dict.fromkeys(name for name in names if len(name) > width))
    start, end = _alike(long) if len(long) > 1 else (0, 0)
    return [name if len(name) <= width else _part(name, start, len(name) - end, width) for name in names]


def _alike(names: Sequence[str]) -> tuple[int, int]:
    """How many letters different names have in common, at the beginning and then at the end."""
    start = _beginning(names)
    return start, _beginning([name[start:][::-1] for name in names])


def _beginning(names: Sequence[str]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False)))


def _part(name: str, start: int, end: int, width: int) -> str:
    """A part of a name around the letters from `start` to `end`, or its beginning and its end if these are too many."""
    room = width - 2
    if not start < end or end - start > room:
        head = (width - 1) // 2
        return f"{name[:head]}…{name[len(name) - (width - 1 - head) :]}"
    left = min(max((start + end - room) // 2, 0), len(name) - room)
    right = left + room
    if left <= 1:  # Room for an ellipsis is room for a letter.
        return f"{name[: width - 1]}…"
    return f"…{name[1 - width :]}" if right >= len(name) - 1 else f"…{name[left:right]}…"
