"""What a term is a product of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from jamp.transforms.analysis.reading.flat import Flat, Source, Value


class Factors(NamedTuple):
    """What a term is a product of.

    Attributes:
        of: Its factors, each as often as it is multiplied.
        products: The matrix products and convolutions that multiply them.
        outer: The factors in front of the last of these: what they multiply may be products itself.
        last: These last products.
        whole: The factors in front of any of these products.
        is_sum: Whether it was added up, by one of these or by a reduction.
        is_part: Whether it is a part of that, as the diagonal of a Gram matrix is.
        of_parts: Whether a part of one value is a side of one of these products, as `diag(a.sum(1))` is.
        sides: The two values of which it is a product, whatever these are made of, in front of numbers that scale them.
        on_both: What both sides of one of these products multiply.
        summed: What was squared when it was added up: a sum of squares, and no square of a sum.
    """

    of: tuple[Value, ...] = ()
    products: tuple[Flat, ...] = ()
    outer: tuple[Value, ...] = ()
    last: tuple[Flat, ...] = ()
    whole: tuple[Value, ...] = ()
    is_sum: bool = False
    is_part: bool = False
    of_parts: bool = False
    sides: tuple[Source, ...] = ()
    on_both: frozenset[Value] = frozenset()
    summed: frozenset[Value] = frozenset()

    @classmethod
    def only(cls, value: Value) -> Factors:
        """Those of a value that is no product."""
        return cls((value,), (), (value,), (), (value,))

    def times(self, other: Factors) -> Factors:
        """The factors of a product of two terms."""
        return Factors(
            self.of + other.of,
            self.products + other.products,
            self.outer + other.outer,
            self.last + other.last,
            self.whole + other.whole,
            self.is_sum or other.is_sum,
            self.is_part or other.is_part,
            self.of_parts or other.of_parts,
            () if self.of and other.of else self.sides or other.sides,  # A number changes nothing.
            self.on_both | other.on_both,
            self.summed | other.summed,
        )

    def contracted(self, other: Factors, product: Flat) -> Factors:
        """The factors of the matrix product of two terms."""
        both = _shared(self.of, other.of) | _shared(self.whole, other.whole)
        return Factors(
            self.of + other.of,
            (*self.products, *other.products, product),
            self.whole + other.whole,
            (product,),
            product.outs,
            True,
            of_parts=any(side.of_parts or (side.is_part and len(side.of) == 1) for side in (self, other)),
            on_both=self.on_both | other.on_both | both,
            summed=self.summed | other.summed | self.squares | other.squares | both,
        )

    def joined(self, other: Factors) -> Factors:
        """The factors of the sum of two terms that have the same ones."""
        return self._replace(products=self.products + other.products, last=self.last + other.last, sides=())

    @property
    def shallow(self) -> Factors:
        """The same, but for products that are multiplied by products."""
        return self._replace(of=self.outer, products=self.last)

    @property
    def own(self) -> tuple[Flat, ...]:
        """The matrix product or convolution that multiplies its sides, if it is one."""
        return self.last if len(self.last) == 1 and self.whole == self.last[0].outs else ()

    @property
    def squared(self) -> frozenset[Value]:
        """The factors that it has more than once."""
        return repeated(self.of)

    @property
    def squares(self) -> frozenset[Value]:
        """The same, and those that products of products have more than once."""
        return repeated(self.of) | repeated(self.whole)

    def added(self) -> Factors:
        """The factors of a sum over axes."""
        return self._replace(is_sum=True, summed=self.summed | self.squares)

    @property
    def forms(self) -> frozenset[Value]:
        """The factors that it is a quadratic form of, as a Gram matrix is: no gate that multiplies elements is one."""
        return self.on_both & self.squared


def _shared(one: Iterable[Value], other: Iterable[Value]) -> frozenset[Value]:
    """What two sides share, if one side is all of that: `k.T @ v` of two layers of the same data is no form of it."""
    left, right = frozenset(one), frozenset(other)
    return left & right if left <= right or right <= left else frozenset()


def repeated(values: Iterable[Value]) -> frozenset[Value]:
    """What is there more than once."""
    return frozenset(value for value, times in Counter(values).items() if times > 1)


class Cancelled(NamedTuple):
    """Products that cancel.

    Attributes:
        products: These.
        parts: What they multiply, as it was before it was moved.
        left: What is left of them.
    """

    products: tuple[Flat, ...]
    parts: frozenset[Value] = frozenset()
    left: frozenset[Value] = frozenset()
