"""The sides of products: what they are products of themselves, or sums of products, and how a matrix stands in them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jamp._primitives import PRODUCTS, SCALES, SHOWN, Trait, has
from jamp.transforms.analysis.products.unfolded import Unfolded
from jamp.transforms.analysis.reading.axes import Axes
from jamp.transforms.analysis.reading.flat import Flat, Opened, Value
from jamp.transforms.program.attention import Layout

_SUMS = SHOWN | Trait.ADDS
_MOST = 16  # Values between a product and what it is a term of.


class Factor(NamedTuple):
    """How a side of a product has a factor.

    Attributes:
        products: The products that multiply it; none if it is the side.
        sign: Of the term that it is in, -1 or 1.
        weights: What else multiplies that element by element, or divides it.
    """

    products: tuple[Flat, ...] = ()
    sign: int = 1
    weights: tuple[Value, ...] = ()


_Factors = dict[Value, Factor]


class Sides:
    """What sides of products are.

    Args:
        opened: A jaxpr, with its loops opened.
        unfolded: Its values as sums of products.
    """

    def __init__(self, opened: Opened, unfolded: Unfolded) -> None:
        self._opened = opened
        self._unfolded = unfolded

    def unscaled(self, values: Iterable[Value]) -> frozenset[Value]:
        """What values were before they were scaled, or shown in another shape; of those computed alike the first."""
        return frozenset(map(self._unfolded.unscaled, values))

    def factors(self, *sides: Value) -> tuple[_Factors, _Factors, bool]:
        """What two sides are products of, and sums of such only where they would have nothing in common otherwise.

        Returns:
            The factors of both, and whether a sum was looked into.
        """
        of_both = ([self._factors(side, {side: 1}), self._factors(side, self.summed(side))] for side in sides)
        for (left, one), (right, other) in itertools.product(*map(enumerate, of_both)):
            if one.keys() & other.keys():
                return one, other, bool(left or right)
        return {}, {}, False

    def _factors(self, side: Value, terms: Mapping[Value, int]) -> _Factors:
        """What the terms of one side of a product are products of, and by which."""
        found: _Factors = {self._unfolded.unscaled(side): Factor()}
        for term, of_term in terms.items():
            for product, sign, weights in self._weighed(term, of_term):
                factors = self._unfolded.factors(product.outs[0])  # Those of a convolution are not known.
                found.update((each, Factor((product,), sign, weights)) for each in self.unscaled(product.values))
                if factors.products:
                    found.update((each, Factor(factors.products, sign, weights)) for each in self.unscaled(factors.of))
        return found

    def _weighed(self, term: Value, sign: int) -> Iterator[tuple[Flat, int, tuple[Value, ...]]]:
        """The products in a term, their signs, and what they are weighed by: `w * (a @ x - b)`."""
        ahead = [(term, sign, ())]
        for value, of_value, weights in ahead:
            flat = self._opened.maker(value)
            if flat is not None and has(flat.eqn, PRODUCTS):
                yield flat, of_value, weights
            elif flat is not None and has(flat.eqn, SCALES) and len(flat.values) == 2 and len(ahead) < _MOST:
                sides = (flat.values, flat.values[::-1])
                for one, weight in sides[:1] if has(flat.eqn, Trait.DIVIDES) else sides:
                    ahead += [(each, of_value * own, (*weights, weight)) for each, own in self.summed(one).items()]

    def summed(self, total: Value) -> dict[Value, int]:
        """What is added up to a value, in front of numbers that scale it, and all that lies between, with its sign."""
        signs = {total: 1}
        ahead = [total]
        while ahead and len(signs) <= _MOST:
            value = ahead.pop()
            flat = self._opened.maker(value)
            for operand, sign in self._added(flat) if flat is not None and not flat.cases else ():
                if operand not in signs:
                    signs[operand] = sign * signs[value]
                    ahead.append(operand)
        return signs

    def _added(self, flat: Flat) -> list[tuple[Value, int]]:
        """What an equation adds up, with signs; of what it does not know, a number that scales is positive."""
        if has(flat.eqn, _SUMS):
            last = -1 if has(flat.eqn, Trait.SUBTRACTS | Trait.NEGATES) else 1
            signs = [1] * (len(flat.ins) - 1) + [last]
            return [(x, sign) for x, sign in zip(flat.ins, signs, strict=True) if isinstance(x, Value)]
        numbers = [number for source in flat.ins if (number := self._opened.number(source)) is not None]
        return [(value, -1 if any(number < 0 for number in numbers) else 1) for value in self._unfolded.scaled(flat)]

    def are_transposed(self, products: Sequence[Flat], matrix: Value) -> bool:
        """Whether the last of some products is with a matrix as it is, and one before with the transposed one."""
        *before, last = (self._summed_axes(product, matrix) for product in products)
        return any(one.isdisjoint(other) for one in last for each in before for other in each)

    def _summed_axes(self, product: Flat, matrix: Value) -> list[frozenset[int]]:
        """Over which axes of a matrix a product adds up, by side that the matrix is."""
        if not has(product.eqn, Trait.MATRIX):  # The kernel of a convolution is turned around.
            return [frozenset[int]()] if matrix in self.unscaled(product.values) else []
        contracted, _ = product.eqn.params["dimension_numbers"]
        sides = [(side, axes) for side, axes in zip(product.ins, contracted, strict=True) if isinstance(side, Value)]
        found = [self._before_views(side, axes) for side, axes in sides if self._unfolded.unscaled(side) == matrix]
        return [axes for axes in found if axes]

    def _before_views(self, value: Value, axes: Iterable[int]) -> frozenset[int]:
        """Which axes some of a value were before they were moved; none where that cannot be told."""
        labels = Axes()
        layout: Layout | None = labels.fresh(value.aval.shape)
        wanted = {label for axis in axes for label in layout[axis]}
        while layout is not None and (before := self._unfolded.before(value)) is not None:
            flat, value = before
            layout = labels.before(flat.eqn, layout) if has(flat.eqn, Trait.VIEW) else layout
        return frozenset(axis for axis, each in enumerate(layout or ()) if not wanted.isdisjoint(labels.whole(each)))
