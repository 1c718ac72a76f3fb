"""Products of which little is left beside a number, an identity, or what they project.

`1 - a @ b.T` is a distance if the rows are divided by their norms, for their squares are the number: gradients of near
points were four times as far off as those of rounded layers. `w.T @ w - eye(n)` is what a weight lacks to be orthogonal
(its gradient was 21 % off), and `x - x @ u @ u.T` what a projection leaves.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence

import numpy as np

from jamp._compat import Var
from jamp._primitives import MOVED, PRODUCTS, SCALES, Trait, has
from jamp.transforms.analysis.products.factors import Cancelled, Factors
from jamp.transforms.analysis.products.unfolded import Unfolded, behind
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source, Value
from jamp.transforms.analysis.reading.walks import back
from jamp.transforms.program.flow import num_elements

_ALONE = MOVED | Trait.NEGATES | SCALES | Trait.LIMITS
_OF_NORM = (
    MOVED | Trait.POWER | Trait.SINGULAR | SCALES | Trait.ADDS | Trait.LIMITS | Trait.SELECTS
)  # fmt: skip
_NEARLY = 0.02  # What is left of a number for parallel rows, of the number: `1.001 - a @ b.T`.
_MOST = 32  # Values between a norm and what is divided by it.


def identities(opened: Opened, unfolded: Unfolded, diagonals: Container[Var]) -> Iterator[Cancelled]:
    """Products that such values are taken off, or that are taken off these.

    Args:
        opened: A jaxpr.
        unfolded: Its values as sums of products.
        diagonals: Its diagonal matrices, and those of the jaxprs inside.
    """
    partners: dict[Value, int] = {}  # By side of a cosine, the size of the other one.
    for flat in opened.eqns:
        if has(flat.eqn, PRODUCTS):
            size = num_elements(flat.outs[0].aval)
            if any(partners.get(unfolded.origin(side)) == size for side in flat.values):
                yield Cancelled((flat,))  # A gradient, of which a norm takes off most.
        if not has(flat.eqn, Trait.ADDS | Trait.REPLACES) or len(flat.ins) < 2:
            continue
        beside = _Beside(opened, unfolded, diagonals, flat)
        for source, other in (flat.ins[:2], flat.ins[1::-1]):
            products = beside.cancelling(source, other)
            if products:
                multiplied = (value for product in products for value in product.values)
                factors = (value for product in products for value in unfolded.factors(product.outs[0]).of)
                yield Cancelled(products, unfolded.origins((*multiplied, *factors)), frozenset(flat.outs))
                partners |= beside.partners(products) if opened.number(other) is not None else {}


class _Beside:
    """What a sum adds to products.

    Args:
        opened: A jaxpr.
        unfolded: Its values as sums of products.
        diagonals: Its diagonal matrices, and those of the jaxprs inside.
        flat: The sum, or what changes a diagonal in place.
    """

    def __init__(self, opened: Opened, unfolded: Unfolded, diagonals: Container[Var], flat: Flat) -> None:
        self._opened = opened
        self._unfolded = unfolded
        self._diagonals = diagonals
        self._flat = flat

    def cancelling(self, source: Source, other: Source) -> tuple[Flat, ...]:
        """The products that one operand is made of, if the other one leaves little of it."""
        *_, (source, scale) = self._path(source)
        found = self._unfolded.factors(source)
        if not found.products:
            return ()
        if has(self._flat.eqn, Trait.REPLACES):
            number = self._opened.number(self._flat.ins[-1])
            is_changed = source == self._flat.ins[0] and self._flat.outs[0].var in self._diagonals
            return self._lacking(found) if is_changed and number is not None and number < 0 else ()
        subtracts = has(self._flat.eqn, Trait.SUBTRACTS)
        number = self._opened.number(other)
        if number is not None:
            left = number + scale * (-1 if subtracts else 1) * self._scale(found.last)
            return found.last if abs(left) <= _NEARLY * abs(number) and self._is_cosine(found) else ()
        of_diagonal = [
            by for value, by in self._path(other) if isinstance(value, Value) and value.var in self._diagonals
        ]
        if of_diagonal:
            is_taken_off = of_diagonal[0] * scale * (-1 if subtracts else 1) < 0
            # `eye - u @ v` is a layer of low rank, if it is not `eye - u @ u.T`.
            is_first = other != self._flat.ins[0] or found.forms
            return self._lacking(found) if is_taken_off and is_first else ()
        return found.products if self._projects(found, scale, other) else ()

    def partners(self, products: Sequence[Flat]) -> dict[Value, int]:
        """By side of a product of two, the number of elements of the other."""
        pairs = [flat.values for flat in products if len(flat.values) == 2]
        sides = [(one, other) for pair in pairs for one, other in (pair, pair[::-1])]
        return {self._unfolded.origin(one): num_elements(other.aval) for one, other in sides}

    def _path(self, source: Source) -> Iterator[tuple[Source, float]]:
        """A value, and what it was before numbers scaled or limited it, each with the scale from there."""
        scale = 1.0
        yield source, scale
        while (flat := self._opened.maker(source)) is not None and has(flat.eqn, _ALONE | Trait.BRANCHES):
            operands = flat.ins
            if flat.cases:  # By platform, as the diagonal of a matrix is taken.
                operands = (flat.cases[-1][flat.outs.index(source)],) if isinstance(source, Value) else ()
            elif has(flat.eqn, MOVED):
                operands = flat.ins[:1]
            numbers = [self._opened.number(each) for each in operands]
            if numbers.count(None) != 1:
                return
            index = numbers.index(None)
            for number in (number for number in numbers if number is not None):
                if has(flat.eqn, Trait.MULTIPLIES):
                    scale *= number
                elif has(flat.eqn, Trait.DIVIDES):
                    scale = scale / number if number and index == 0 else np.nan
            scale *= -1 if has(flat.eqn, Trait.NEGATES) else 1
            source = operands[index]
            yield source, scale

    def _projects(self, found: Factors, scale: float, other: Source) -> bool:
        """Whether a product, with its scale, is what another value was projected to."""
        *_, (of, by) = self._path(other)
        if not has(self._flat.eqn, Trait.SUBTRACTS) or len(found.products) != 2:
            return False
        if by != scale * self._scale(found.products):  # Of a part of that, a layer is made.
            return False
        rest = Counter(map(self._unfolded.origin, found.of))
        rest.subtract([self._unfolded.origin(of)] if isinstance(of, Value) else [])
        return [times for times in rest.values() if times] == [2]

    def _lacking(self, found: Factors) -> tuple[Flat, ...]:
        """A product of two matrices, if no products make these, as in a network."""
        operands = (value for product in found.own for value in product.values)
        return (
            ()
            if any(has(self._opened.made[value].eqn, PRODUCTS) for value in behind(self._opened, operands))
            else found.own
        )

    def _scale(self, products: Iterable[Flat]) -> float:
        """What the sides of some products are scaled by."""
        sides = [value for product in products for value in product.values]
        return float(np.prod([[*self._path(side)][-1][1] for side in sides]))

    def _is_cosine(self, found: Factors) -> bool:
        """Whether a product is of rows that are divided by their norms, before it or after."""
        return len(found.last) == 1 and all(self._is_unit(side, found) for side in found.last[0].values)

    def _is_unit(self, side: Value, found: Factors) -> bool:
        *_, (vector, _) = self._path(side)
        flat = self._opened.maker(vector)
        if flat is not None and has(flat.eqn, SCALES) and len(flat.values) == 2:
            orders = (flat.values,) if has(flat.eqn, Trait.DIVIDES) else (flat.values, flat.values[::-1])
            if any(self._is_norm(norm, one) for one, norm in orders):
                return True
        return isinstance(vector, Value) and any(self._is_norm(norm, vector) for norm in found.of)

    def _is_norm(self, norm: Value, vector: Value) -> bool:
        """Whether a value is made of the sum of another one's squares, and of nothing else that is a sum."""
        of = self._unfolded.factors(vector).of
        squared = Counter(map(self._unfolded.origin, (*of, *of)))
        sums = PRODUCTS | Trait.SUMS_AXES

        def onward(flat: Flat, _: Value) -> Iterable[Value]:
            return flat.values if not flat.cases and has(flat.eqn, _OF_NORM) and not has(flat.eqn, sums) else ()

        for value, flat in itertools.islice(back(self._opened, [norm], onward), _MOST):
            if flat is not None and not flat.cases and has(flat.eqn, sums):
                found = self._unfolded.factors(value)
                if found.is_sum and Counter(map(self._unfolded.origin, found.of)) == squared:
                    return True
        return False
