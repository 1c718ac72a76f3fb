"""Products of iterations that solve: with a matrix and then its transpose, or of what they carry with itself.

`x = x - rate * a.T @ (a @ x - b)` multiplies with a Gram matrix that nobody writes down, and near the solution little
is left of `b`: so do Landweber's iteration, conjugate gradients for least squares, primal and dual steps. In
`x = 2 * x - x @ a @ x` what `x` lacks of an inverse is squared, and what was rounded of it is not. A recurrent layer
bends its state between two products, and stacked layers have weights of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import TypeVar

from jamp._primitives import PRODUCTS, Trait, has
from jamp.transforms.analysis.products.factors import Cancelled
from jamp.transforms.analysis.products.sides import Sides
from jamp.transforms.analysis.products.solutions import products_with
from jamp.transforms.analysis.products.unfolded import Unfolded
from jamp.transforms.analysis.reading.flat import Flat, Opened, Value

T = TypeVar("T")
_LINEAR = Trait.VIEW | Trait.CONVERTS | Trait.NEGATES | Trait.ADDS | Trait.MOVES | Trait.SELECTS | PRODUCTS


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
        self._sides = Sides(opened, unfolded)
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
            if not (goes_on and self._is_fixed(step.common) and self._sides.are_transposed(step.products, step.common)):
                continue
            self._added.add(step)
            if in_loop or self._earlier[step]:
                self.again.update(dict.fromkeys((*self._earlier[step], step)))


def _hand_on(known: dict[Value, frozenset[T]], flat: Flat, values: Iterable[Value]) -> None:
    found = frozenset[T]().union(*(known.get(value, ()) for value in values))
    known.update(dict.fromkeys(flat.outs, found) if found else ())
