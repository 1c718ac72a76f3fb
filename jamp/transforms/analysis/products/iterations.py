"""Products of iterations that solve: with a matrix and then its transpose, or of a state with a matrix and itself.

`x = x - rate * a.T @ (a @ x - b)` multiplies with a Gram matrix that nobody writes down, and near the solution little
is left of `b`: so do Landweber's iteration, conjugate gradients for least squares, primal and dual steps. In
`x = 2 * x - x @ a @ x` what `x` lacks of an inverse is squared, and what was rounded of it is not. A recurrent layer
bends its state between two products, and stacked layers have weights of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
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
        sign: Of the terms that the factor is in, -1 or 1.
    """

    common: Value
    others: frozenset[Value]
    of: Set[Value]
    products: tuple[Flat, ...]
    of_sum: bool
    sign: int


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
        self._unfolded = unfolded
        self._sides = Sides(opened, unfolded)
        results = {id(flat.eqn): flat.cases[0] for flat in opened.eqns if id(flat.eqn) in opened.carried}
        after = (zip(carries, results.get(loop, ()), strict=False) for loop, carries in opened.carried.items())
        self._carried = frozenset(carry for each in after for carry, result in each if carry != result)
        self._parts = self._sides.unscaled(opened.scanned)  # What each iteration is given of its own.
        self._changing = set(self._carried)  # What depends on carries or steps.
        self._made: dict[Value, frozenset[_Step]] = {}  # By value, the steps in it, by sums and products alone.
        self._summed: dict[Value, frozenset[_Step]] = {}  # Those that were added to something on the way.
        self._steps_of: dict[Value, _Step] = {}  # By product, the step with a matrix that it is.
        self._continued: dict[Value, frozenset[_Step]] = {}  # Those that its state took, by sums, limits and choices.

    def add(self, flat: Flat) -> None:
        """Notes an equation, in order."""
        self._changing.update(flat.outs if not self._changing.isdisjoint(flat.values) else ())
        handed_on = flat.values if has(flat.eqn, _LINEAR) else self._unfolded.scaled(flat)
        _hand_on(self._made, flat, handed_on)
        _hand_on(self._summed, flat, handed_on)
        _hand_on(self._continued, flat, self._continues(flat, handed_on))
        if has(flat.eqn, PRODUCTS) and len(flat.values) == 2:
            self._multiply(flat)
        elif has(flat.eqn, Trait.ADDS):
            self._correct(flat.outs[0])
            self._summed.update((out, self._made[out]) for out in flat.outs if out in self._made)
        for carry, result in zip(self._opened.carried.get(id(flat.eqn), ()), *flat.cases, strict=False):
            made = self._made.get(result, ()) if isinstance(result, Value) else ()
            states = [step for step in made if step.common == carry and step.others]
            self.again.update((step, None) for step in states if step.of_sum or step in self._summed.get(result, ()))
            continued = self._continued.get(result, ()) if isinstance(result, Value) else ()
            self.again.update((step, None) for step in continued if not self._carried.isdisjoint(step.of))

    def matrices(self, step: _Step) -> Iterable[Value]:
        """What a step multiplies its state with."""
        return [step.common] if self._is_fixed(step.common) else filter(self._is_fixed, step.others)

    def _is_fixed(self, value: Value) -> bool:
        return value not in self._changing

    def _multiply(self, product: Flat) -> None:
        """Notes a product as a step, once for each factor that its sides have in common."""
        one, other, of_sum = self._sides.factors(*product.values)
        both = (one, other)
        leaves = {value for side in both for value, factor in side.items() if factor.products or len(side) == 1}
        # What each iteration is given are its layers, or its data.
        common = one.keys() & other.keys() if self._parts.isdisjoint(leaves) else ()
        steps: list[_Step] = []
        for value in common:
            inside = {id(flat): flat for flat in (*one[value].products, *other[value].products, product)}
            of = leaves.union(*(self._sides.unscaled(flat.values) for flat in inside.values()))
            of = of.union(*map(self._sides.summed, of))
            others = frozenset(leaf for leaf in leaves if leaf != value and self._is_fixed(leaf))
            sign = one[value].sign * other[value].sign
            steps.append(_Step(value, others, of, tuple(inside.values()), of_sum, sign))
        for step in steps:
            if self._is_fixed(step.common) and self._sides.are_transposed(step.products, step.common):
                self._steps_of[product.outs[0]] = step
            self._compare(step)
        if steps:
            self._changing.update(product.outs)
            self._made[product.outs[0]] = self._made.get(product.outs[0], frozenset()).union(steps)

    def _compare(self, step: _Step) -> None:
        """Notes a state that is multiplied with itself and a matrix, and that such a product made."""
        states = (self._made if step.of_sum else self._summed).get(step.common, ())
        made = [each for each in states if each.others and each.others <= step.others]
        same = [each for each in made if each.common.aval.shape == step.common.aval.shape]
        self.again.update(dict.fromkeys((*same, step) if same else ()))

    def _correct(self, total: Value) -> None:
        """Notes steps with a matrix that are taken off the state that they multiply; again, if such steps made that."""
        terms = self._sides.summed(total)
        for value, sign in terms.items():
            step = self._steps_of.get(value)
            if step is None:
                continue
            states = [
                state for state, other in terms.items() if self._is_state(state, step) and sign * step.sign * other < 0
            ]
            if not states:
                continue
            before = frozenset[_Step]().union(*(self._continued.get(x, ()) for x in (*states, *step.of)))
            earlier = [each for each in before if each.common == step.common and step.others <= each.others]
            self.again.update(dict.fromkeys((*earlier, step) if earlier else ()))
            self._continued[total] = self._continued.get(total, frozenset()) | {step}

    def _is_state(self, value: Value, step: _Step) -> bool:
        return value != step.common and (value in step.of or value in self._carried)

    def _continues(self, flat: Flat, handed_on: Sequence[Value]) -> Sequence[Value]:
        """Of what an equation is a state that goes on: behind limits, and signs, as of soft thresholds, too."""
        if has(flat.eqn, PRODUCTS):
            return []
        makers = map(self._opened.maker, flat.values) if has(flat.eqn, Trait.MULTIPLIES) else ()
        has_sign = any(maker is not None and has(maker.eqn, Trait.COUNTS) for maker in makers)
        return flat.values if has_sign or has(flat.eqn, Trait.LIMITS) else handed_on


def _hand_on(known: dict[Value, frozenset[T]], flat: Flat, values: Iterable[Value]) -> None:
    found = frozenset[T]().union(*(known.get(value, ()) for value in values))
    known.update(dict.fromkeys(flat.outs, found) if found else ())
