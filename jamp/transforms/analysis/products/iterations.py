"""Products of iterations that solve: with a matrix and then its transpose, or of a state with a matrix and itself.

`x = x - rate * a.T @ (a @ x - b)` multiplies with a Gram matrix that nobody writes down, and near the solution little
is left of `b`: so do Landweber's iteration, conjugate gradients for least squares, primal and dual steps. In
`x = 2 * x - x @ a @ x` what `x` lacks of an inverse is squared, and what was rounded of it is not. A recurrent layer
bends its state between two products, and stacked layers have weights of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from jamp._primitives import PRODUCTS, SHOWN, Trait, has
from jamp.transforms.analysis.products.factors import Cancelled
from jamp.transforms.analysis.products.sides import Sides
from jamp.transforms.analysis.products.solutions import products_with
from jamp.transforms.analysis.products.steps import Step, Steps
from jamp.transforms.analysis.products.unfolded import Unfolded
from jamp.transforms.analysis.reading.flat import Flat, Opened, Value

T = TypeVar("T")
_LINEAR = SHOWN | Trait.ADDS | Trait.SELECTS | PRODUCTS


def iterations(opened: Opened, unfolded: Unfolded) -> Iterator[Cancelled]:
    """Products of steps that a loop takes, or equations that are written one after another.

    Args:
        opened: A jaxpr, with its loops opened.
        unfolded: Its values as sums of products.
    """
    sides = Sides(opened, unfolded)
    steps = Steps(opened, sides)
    descents, inverses = _Descents(opened, sides, steps), _Inverses(opened)
    for flat in opened.eqns:
        of = steps.of(flat)
        linear = flat.values if has(flat.eqn, _LINEAR) else unfolded.scaled(flat)
        descents.add(flat, of, linear)
        inverses.add(flat, of, linear)
    again = {**descents.again, **inverses.again}
    yield from (Cancelled(step.products) for step in again)
    yield from products_with(opened, unfolded, (value for step in again for value in steps.matrices(step)))


class _Inverses:
    """Steps that multiply a state with a matrix and itself, after such steps: `2 * x - x @ a @ x`.

    Args:
        opened: A jaxpr, with its loops opened.

    Attributes:
        again: Those that are taken more than once.
    """

    def __init__(self, opened: Opened) -> None:
        self.again: dict[Step, None] = {}
        self._opened = opened
        self._made: dict[Value, frozenset[Step]] = {}  # By value, the steps in it, by sums and products alone.
        self._summed: dict[Value, frozenset[Step]] = {}  # Those that were added to something on the way.

    def add(self, flat: Flat, steps: Sequence[Step], linear: Iterable[Value]) -> None:
        """Notes an equation, in order.

        Args:
            flat: The equation.
            steps: The steps that it is.
            linear: What it takes sums and products of.
        """
        _hand_on(self._made, flat, linear)
        _hand_on(self._summed, flat, linear)
        for step in steps:
            self._compare(step)
        if steps:
            self._made[flat.outs[0]] = self._made.get(flat.outs[0], frozenset()).union(steps)
        if has(flat.eqn, Trait.ADDS):
            self._summed.update((out, self._made[out]) for out in flat.outs if out in self._made)
        for carry, result in _results(self._opened, flat):
            made = self._made.get(result, ())
            states = [step for step in made if step.common == carry and step.matrices]
            self.again.update((step, None) for step in states if step.of_sum or step in self._summed.get(result, ()))

    def _compare(self, step: Step) -> None:
        """Notes a state that is multiplied with itself and a matrix, and that such a product made."""
        states = (self._made if step.of_sum else self._summed).get(step.common, ())
        made = [each for each in states if each.matrices and each.matrices <= step.matrices]
        same = [each for each in made if each.common.aval.shape == step.common.aval.shape]
        self.again.update(dict.fromkeys((*same, step) if same else ()))


class _Descents:
    """Steps with a matrix and its transpose that are taken off the state that they multiply, after such steps.

    Args:
        opened: A jaxpr, with its loops opened.
        sides: Those of its products.
        steps: Its steps.

    Attributes:
        again: Those that are taken more than once.
    """

    def __init__(self, opened: Opened, sides: Sides, steps: Steps) -> None:
        self.again: dict[Step, None] = {}
        self._opened = opened
        self._sides = sides
        self._steps = steps
        self._of: dict[Value, Step] = {}  # By product, the step with a matrix that it is.
        self._continued: dict[Value, frozenset[Step]] = {}  # Those that its state took, by sums, limits and choices.

    def add(self, flat: Flat, steps: Sequence[Step], linear: Sequence[Value]) -> None:
        """Notes an equation, in order.

        Args:
            flat: The equation.
            steps: The steps that it is.
            linear: What it takes sums and products of.
        """
        _hand_on(self._continued, flat, self._continues(flat, linear))
        for step in steps:
            if self._steps.is_fixed(step.common) and self._sides.are_transposed(step.products, step.common):
                self._of[flat.outs[0]] = step
        if has(flat.eqn, Trait.ADDS):
            self._correct(flat.outs[0])
        for _, result in _results(self._opened, flat):
            continued = self._continued.get(result, ())
            self.again.update((step, None) for step in continued if not self._steps.carried.isdisjoint(step.of))

    def _correct(self, total: Value) -> None:
        """Notes steps that are taken off the state that they multiply; again, if such steps made that."""
        terms = self._sides.summed(total)
        for value, sign in terms.items():
            step = self._of.get(value)
            if step is None:
                continue
            states = [x for x, other in terms.items() if self._is_state(x, step) and sign * step.sign * other < 0]
            if not states:
                continue
            before = frozenset[Step]().union(*(self._continued.get(x, ()) for x in (*states, *step.of)))
            earlier = [each for each in before if each.common == step.common and step.matrices <= each.matrices]
            self.again.update(dict.fromkeys((*earlier, step) if earlier else ()))
            self._continued[total] = self._continued.get(total, frozenset()) | {step}

    def _is_state(self, value: Value, step: Step) -> bool:
        return value != step.common and (value in step.of or value in self._steps.carried)

    def _continues(self, flat: Flat, linear: Sequence[Value]) -> Sequence[Value]:
        """Of what an equation is a state that goes on: behind limits, and signs, as of soft thresholds, too."""
        if has(flat.eqn, PRODUCTS):
            return []
        makers = map(self._opened.maker, flat.values) if has(flat.eqn, Trait.MULTIPLIES) else ()
        has_sign = any(maker is not None and has(maker.eqn, Trait.COUNTS) for maker in makers)
        return flat.values if has_sign or has(flat.eqn, Trait.LIMITS) else linear


def _results(opened: Opened, loop: Flat) -> Iterator[tuple[Value, Value]]:
    """What a loop carries, and what an iteration makes of it."""
    pairs = zip(opened.carries(loop), *loop.cases, strict=False)
    yield from ((carry, result) for carry, result in pairs if isinstance(result, Value))


def _hand_on(known: dict[Value, frozenset[T]], flat: Flat, values: Iterable[Value]) -> None:
    found = frozenset[T]().union(*(known.get(value, ()) for value in values))
    known.update(dict.fromkeys(flat.outs, found) if found else ())
