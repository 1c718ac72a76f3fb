"""Products of iterations that solve: with a matrix and then its transpose, or of what they carry with itself.

`x = x - rate * a.T @ (a @ x - b)` multiplies with a Gram matrix that nobody writes down, and near the solution little
is left of `b`: so do Landweber's iteration, conjugate gradients for least squares, primal and dual steps. In
`x = 2 * x - x @ a @ x` what `x` lacks of an inverse is squared, and what was rounded of it is not. A recurrent layer
bends its state between two products, and stacked layers have weights of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import TypeVar

from jamp._primitives import PRODUCTS, Trait, has
from jamp.transforms.analysis.products.factors import Cancelled
from jamp.transforms.analysis.products.solutions import products_with
from jamp.transforms.analysis.products.unfolded import Unfolded
from jamp.transforms.analysis.reading.axes import Axes
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source, Value
from jamp.transforms.program.attention import Layout
from jamp.transforms.program.flow import num_elements

T = TypeVar("T")
_Factors = dict[Value, tuple[Flat, ...]]
_SCALES = Trait.MULTIPLIES | Trait.DIVIDES
_VIEWS = Trait.VIEW | Trait.CONVERTS
_SUMS = _VIEWS | Trait.NEGATES | Trait.ADDS
_LINEAR = _SUMS | Trait.MOVES | Trait.SELECTS | PRODUCTS
_MOST = 16  # Values between a product and what it is a term of.


@dataclass(frozen=True, eq=False)
class _Step:
    """A product whose sides have a factor in common.

    Attributes:
        common: That factor: a matrix, or a state.
        others: What else they are products of that no step before made.
        of: All that they are products of.
        products: The product, and those in its sides.
        of_sum: Whether a side is a sum.
    """

    common: Value
    others: frozenset[Value]
    of: Set[Value]
    products: tuple[Flat, ...]
    of_sum: bool


def iterations(opened: Opened, unfolded: Unfolded) -> Iterator[Cancelled]:
    """Products of steps that a loop takes, or equations that are written one after another.

    Args:
        opened: A jaxpr, with its loops opened.
        unfolded: Its values as sums of products.
    """
    steps = _Steps(opened, unfolded)
    for flat in opened.eqns:
        steps.add(flat)
    yield from (Cancelled(step.products) for step in steps.again)
    yield from products_with(opened, unfolded, (value for step in steps.again for value in steps.matrices(step)))


class _Steps:
    """The steps of a jaxpr.

    Args:
        opened: A jaxpr, with its loops opened.
        unfolded: Its values as sums of products.

    Attributes:
        again: Those that are taken more than once.
    """

    def __init__(self, opened: Opened, unfolded: Unfolded) -> None:
        self.again: dict[_Step, None] = {}
        self._opened = opened
        self._sides = _Sides(opened, unfolded)
        results = {id(flat.eqn): flat.cases[0] for flat in opened.eqns if id(flat.eqn) in opened.carried}
        after = (zip(carries, results.get(loop, ()), strict=False) for loop, carries in opened.carried.items())
        self._carried = frozenset(carry for each in after for carry, result in each if carry != result)
        self._parts = self._sides.seen_all(opened.scanned)  # What each iteration is given of its own.
        # By value, the carries and the steps that it depends on.
        self._carries = {value: frozenset((value,)) for value in self._carried}
        self._before: dict[Value, frozenset[_Step]] = {}
        self._made: dict[Value, frozenset[_Step]] = {}  # The steps that it is made of by sums and products alone.
        self._summed: dict[Value, frozenset[_Step]] = {}  # Those that were added to something on the way.
        self._added: set[_Step] = set()  # What was added to something.
        self._earlier: dict[_Step, list[_Step]] = {}  # By step, those with its matrix that were, before it was taken.

    def add(self, flat: Flat) -> None:
        """Notes an equation, in order."""
        _hand_on(self._carries, flat, flat.values)
        _hand_on(self._before, flat, flat.values)
        handed_on = flat.values if has(flat.eqn, _LINEAR) else self._sides.scaled(flat)
        _hand_on(self._made, flat, handed_on)
        _hand_on(self._summed, flat, handed_on)
        if has(flat.eqn, PRODUCTS) and len(flat.values) == 2:
            self._multiply(flat)
        elif has(flat.eqn, Trait.ADDS) and len(flat.values) == 2:
            for term, other in (flat.values, flat.values[::-1]):
                self._correct(term, other)
            self._summed.update((out, self._made[out]) for out in flat.outs if out in self._made)
        for carry, result in zip(self._opened.carried.get(id(flat.eqn), ()), *flat.cases, strict=False):
            made = self._made.get(result, ()) if isinstance(result, Value) else ()
            steps = [step for step in made if step.common == carry]
            self.again.update((step, None) for step in steps if step.of_sum or step in self._summed.get(result, ()))

    def matrices(self, step: _Step) -> Iterable[Value]:
        """What a step multiplies its state with."""
        return [step.common] if self._is_fixed(step.common) else filter(self._is_fixed, step.others)

    def _is_fixed(self, value: Value) -> bool:
        return value not in self._carries and value not in self._before

    def _multiply(self, product: Flat) -> None:
        """Notes a product as a step, once for each factor that its sides have in common."""
        one, other, of_sum = self._sides.factors(*product.values)
        leaves = {value for side in (one, other) for value, products in side.items() if products or len(side) == 1}
        # What each iteration is given are its layers, or its data.
        common = one.keys() & other.keys() if self._parts.isdisjoint(leaves) else ()
        steps: list[_Step] = []
        for value in common:
            inside = {id(flat): flat for flat in (*one[value], *other[value], product)}
            of = leaves.union(*(self._sides.seen_all(flat.values) for flat in inside.values()))
            others = frozenset(leaf for leaf in leaves if leaf != value and self._is_fixed(leaf))
            steps.append(_Step(value, others, of, tuple(inside.values()), of_sum))
        for step in steps:
            self._compare(step, self._before.get(product.outs[0], ()))
        for known in (self._before, self._made) if steps else ():
            known[product.outs[0]] = known.get(product.outs[0], frozenset()).union(steps)

    def _compare(self, step: _Step, before: Iterable[_Step]) -> None:
        """Notes the steps that were taken before with the same matrix, or made what is multiplied with itself."""
        same = [each for each in before if each.common == step.common and each in self._added]
        self._earlier[step] = [each for each in same if step.others <= each.others]
        states = (self._made if step.of_sum else self._summed).get(step.common, ())
        made = [each for each in states if each.others <= step.others]
        states = [each for each in made if each.common.aval.shape == step.common.aval.shape]
        self.again.update(dict.fromkeys((*states, step) if states else ()))

    def _correct(self, term: Value, other: Value) -> None:
        """Notes steps with a matrix that are taken from a state: again, if a loop carries that, or others before."""
        if not self._made.get(term):
            return
        states = self._sides.summed(other)
        in_loop = term in self._carries and not self._carried.isdisjoint(states)
        for step in self._made[term]:
            goes_on = in_loop or not (step.of - {step.common}).isdisjoint(states)
            if not (goes_on and self._is_fixed(step.common) and self._sides.are_transposed(step)):
                continue
            self._added.add(step)
            if in_loop or self._earlier[step]:
                self.again.update(dict.fromkeys((*self._earlier[step], step)))


class _Sides:
    """What sides of products are.

    Args:
        opened: A jaxpr, with its loops opened.
        unfolded: Its values as sums of products.
    """

    def __init__(self, opened: Opened, unfolded: Unfolded) -> None:
        self._opened = opened
        self._unfolded = unfolded

    def seen_all(self, values: Iterable[Value]) -> frozenset[Value]:
        """What values were before they were shown in another shape; of values that are computed alike the first."""
        return frozenset(map(self._seen, values))

    def factors(self, *sides: Value) -> tuple[_Factors, _Factors, bool]:
        """What two sides are products of, and sums of such only where they would have nothing in common otherwise.

        Returns:
            The factors of both, and whether a sum was looked into.
        """
        of_both = ([self._factors(side, (side,)), self._factors(side, self.summed(side))] for side in sides)
        for (left, one), (right, other) in itertools.product(*map(enumerate, of_both)):
            if one.keys() & other.keys():
                return one, other, bool(left or right)
        return {}, {}, False

    def _factors(self, side: Value, terms: Iterable[Value]) -> _Factors:
        """What the terms of one side of a product are products of, and by which."""
        found: _Factors = {self._seen(side): ()}
        for term in terms:
            flat = self._opened.maker(term)
            if flat is not None and has(flat.eqn, PRODUCTS):
                factors = self._unfolded.factors(term)  # Those of a convolution are not known.
                found.update((value, (flat,)) for value in self.seen_all(flat.values))
                found.update((value, factors.products) for value in self.seen_all(factors.of) if factors.products)
        return found

    def summed(self, total: Value) -> Iterable[Value]:
        """What is added up to a value, in front of numbers that scale it, and all that lies between."""
        ahead, seen = [total], {total: None}
        while ahead and len(seen) <= _MOST:
            flat = self._opened.maker(ahead.pop())
            if flat is not None and not flat.cases:
                inside = flat.values if has(flat.eqn, _SUMS) else self.scaled(flat)
                ahead += [value for value in inside if value not in seen]
                seen.update(dict.fromkeys(inside))
        return seen

    def scaled(self, flat: Flat) -> list[Value]:
        """What one number scales, if an equation does that."""
        if not has(flat.eqn, _SCALES) or len(flat.ins) != 2:
            return []
        one, other = flat.ins
        if not self._is_number(other):
            one, other = other, one
        scales = self._is_number(other) and (has(flat.eqn, Trait.MULTIPLIES) or one is flat.ins[0])
        return [one] if scales and isinstance(one, Value) else []

    def _is_number(self, source: Source) -> bool:
        return num_elements(source.aval) == 1 or self._opened.number(source) is not None

    def are_transposed(self, step: _Step) -> bool:
        """Whether the last product of a step is with a matrix as it is, and one before with the transposed one."""
        *before, last = (self._summed_axes(product, step.common) for product in step.products)
        return any(one.isdisjoint(other) for one in last for each in before for other in each)

    def _summed_axes(self, product: Flat, matrix: Value) -> list[frozenset[int]]:
        """Over which axes of a matrix a product adds up, by side that the matrix is."""
        if not has(product.eqn, Trait.MATRIX):  # The kernel of a convolution is turned around.
            return [frozenset[int]()] if matrix in self.seen_all(product.values) else []
        contracted, _ = product.eqn.params["dimension_numbers"]
        sides = [(side, axes) for side, axes in zip(product.ins, contracted, strict=True) if isinstance(side, Value)]
        found = [self._before_views(side, axes) for side, axes in sides if self._seen(side) == matrix]
        return [axes for axes in found if axes]

    def _before_views(self, value: Value, axes: Iterable[int]) -> frozenset[int]:
        """Which axes some of a value were before they were moved; none where that cannot be told."""
        labels = Axes()
        layout: Layout | None = labels.fresh(value.aval.shape)
        wanted = {label for axis in axes for label in layout[axis]}
        while layout is not None and (flat := self._view(value)) is not None:
            layout = layout if has(flat.eqn, Trait.CONVERTS) else labels.before(flat.eqn, layout)
            value = flat.values[0]
        return frozenset(axis for axis, each in enumerate(layout or ()) if not wanted.isdisjoint(labels.whole(each)))

    def _seen(self, value: Value) -> Value:
        while (flat := self._view(value)) is not None:
            value = flat.values[0]
        return self._opened.first(value)

    def _view(self, value: Value) -> Flat | None:
        flat = self._opened.maker(value)
        return flat if flat is not None and has(flat.eqn, _VIEWS) and len(flat.values) == 1 else None


def _hand_on(known: dict[Value, frozenset[T]], flat: Flat, values: Iterable[Value]) -> None:
    found = frozenset[T]().union(*(known.get(value, ()) for value in values))
    known.update(dict.fromkeys(flat.outs, found) if found else ())
