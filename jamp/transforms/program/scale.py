"""The scale of a value: the power of two by which numbers that half cannot hold make it larger than data is."""

from __future__ import annotations

import math
from collections.abc import Iterable

from jamp._dtypes import Pair

_MOST = 126  # Of float32's own range. A loop that scales its carry in each iteration comes to an end here.


def exponent(magnitude: float, pair: Pair) -> int:
    """The power of two that a number beyond the half range is next to; zero for one that half holds."""
    if not math.isfinite(magnitude) or pair.holds(magnitude):
        return 0
    return min(max(round(math.log2(magnitude)), -_MOST), _MOST)


def largest(scales: Iterable[int]) -> int:
    """Of several scales the one that is farthest off."""
    return max(scales, key=lambda scale: (abs(scale), scale), default=0)
