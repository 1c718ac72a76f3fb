"""The scale of a value: the power of two by which numbers that half cannot hold make it larger than data is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jamp._dtypes import Pair

_FEW = 64  # Numbers that are remembered one by one.


def is_few(shape: Sequence[int]) -> bool:
    """Whether an array of a shape has so few elements that they are remembered one by one."""
    return all(type(size) is int for size in shape) and 0 < math.prod(shape) <= _FEW


class Range(NamedTuple):
    """The smallest and the largest of some numbers that the program writes, or computes from such: often one number.

    Attributes:
        low: The smallest.
        high: The largest.
        elements: All of them, in order, where they are few and not all the same.

    None where one of them is no number stands for what is not known.
    """

    low: float
    high: float
    elements: tuple[float, ...] = ()

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Range | None:
        """The range of some numbers."""
        return None if any(map(math.isnan, numbers)) else cls(min(numbers), max(numbers))

    @classmethod
    def of_array(cls, numbers: np.ndarray) -> Range | None:
        """The range of the elements of an array, and these if they are few."""
        if numbers.ndim == 0:
            number = float(numbers)
            return None if math.isnan(number) else cls(number, number)
        found = cls.of((float(numbers.min()), float(numbers.max()))) if numbers.size else None
        if found is None or found.low == found.high or not is_few(numbers.shape):
            return found
        return found._replace(elements=tuple(numbers.ravel().tolist()))

    def array(self, shape: tuple[int, ...]) -> np.ndarray | None:
        """All elements of an array of that shape; None where they are not known, or many."""
        if not is_few(shape):
            return None
        if self.low == self.high:
            return np.full(shape, self.low)
        # What is known of an array is known of its slices, in which a loop reads it, but for their elements.
        return np.reshape(self.elements, shape) if len(self.elements) == math.prod(shape) else None

    @property
    def largest(self) -> float:
        """The largest finite magnitude: where it is infinite, the program masks."""
        return max((abs(end) for end in (self.low, self.high) if math.isfinite(end)), default=0.0)

    def times(self, counts: Iterable[int]) -> Range | None:
        """The range of sums of so many numbers."""
        return self.of([end * count for count in counts for end in (self.low, self.high)])

    def power(self, counts: Iterable[int]) -> Range | None:
        """The range of products of so many numbers."""
        try:
            ends = [end**count for count in counts for end in (self.low, self.high)]
        except OverflowError:
            return None
        return self.of([sign * end for end in ends for sign in ((1, -1) if self.low < 0 else (1,))])

    def within(self, wide: np.dtype) -> Range:
        """The same in a dtype, which has infinities and no numbers that are smaller than its normal ones."""
        info = np.finfo(wide)
        least, most = float(info.smallest_normal), float(info.max)

        def rounded(number: float) -> float:
            if abs(number) < least:
                return 0.0
            return math.copysign(math.inf, number) if abs(number) > most else number

        return Range(rounded(self.low), rounded(self.high), tuple(map(rounded, self.elements)))


def enclosing(ranges: Iterable[Range | None]) -> Range | None:
    """The range of what is one of several, or all of them put together; None where one is not known."""
    known = list(ranges)
    found = [each for each in known if each is not None]
    if not found or len(found) < len(known):
        return None
    return Range(min(each.low for each in found), max(each.high for each in found))


def exponent(magnitude: float, pair: Pair) -> int:
    """The power of two that a number beyond the half range is next to; zero for one that half holds."""
    if not math.isfinite(magnitude) or pair.holds(magnitude):
        return 0
    most = np.finfo(pair.wide).maxexp - 2  # A loop that scales its carry in each iteration comes to an end here.
    return min(max(round(math.log2(magnitude)), -most), most)


def largest(scales: Iterable[int]) -> int:
    """Of several scales the one that is farthest off."""
    return max(scales, key=lambda scale: (abs(scale), scale), default=0)
