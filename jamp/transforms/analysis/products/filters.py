"""States that a loop corrects by what it solves: the mean and the covariance of a filter, conjugate directions.

`p = f @ p @ f.T + q` is what `h @ p @ h.T + r` is solved with, and what is left of it the next `p`. A product that is
rounded makes it less symmetric, which no step forgets: the gradient of a Kalman filter over 200 steps was ten times too
large in bfloat16, and NaN in float16, where its products with `f` alone were half.

A gain that is divided by a sum over states, `p @ x / (1 + x @ p @ x)`, solves too, and so does the step of a descent
that is a ratio of two such sums, `r @ r / (p @ (a @ p))`. Conjugate directions become smaller until float16 has no
number for `a @ p`: of 40 systems, 15 were off by up to 1e8 times their solution.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from jamp._primitives import PRODUCTS, Trait, has
from jamp.transforms.analysis.products.factors import Cancelled, computes
from jamp.transforms.analysis.reading.flat import Flat, Opened, Value
from jamp.transforms.program.flow import num_elements

_HANDED_ON = Trait.VIEW | Trait.CONVERTS | Trait.NEGATES | Trait.MOVES | Trait.SELECTS
_SCALES = Trait.MULTIPLIES | Trait.DIVIDES


def filters(opened: Opened) -> Iterator[Cancelled]:
    """Products of a state of a loop, and of what is linear in it or solved with it, with what is not made of states.

    Args:
        opened: A jaxpr, with its loops opened.
    """
    results = {id(flat.eqn): flat.cases[0] for flat in opened.eqns if id(flat.eqn) in opened.carried}
    for loop, carries in opened.carried.items():
        summed = _summed(opened, carries)
        after = zip(carries, results.get(loop, ()), strict=False)
        states = _States(carries, {carry for carry, result in after if isinstance(result, Value) and result in summed})
        for flat in opened.eqns:
            states.add(flat)
        if states.solve:
            yield Cancelled(tuple(states.products))


def _summed(opened: Opened, carries: Sequence[Value]) -> set[Value]:
    """What is computed of sums over the states of a loop. The time of a solver is not, whatever it is scaled by."""
    made, summed = set(carries), set[Value]()
    for flat in opened.eqns:
        operands = flat.values[1:] if has(flat.eqn, Trait.SELECTS) else flat.values
        if made.isdisjoint(operands) or not (computes(flat.eqn) or has(flat.eqn, _HANDED_ON)):
            continue
        made.update(flat.outs)
        if _is_sum(flat, [value for value in operands if value in made]) or not summed.isdisjoint(operands):
            summed.update(flat.outs)
    return summed


def _is_sum(flat: Flat, operands: Sequence[Value]) -> bool:
    size = num_elements(flat.outs[0].aval)
    return has(flat.eqn, PRODUCTS | Trait.SUMS_AXES) and all(size < num_elements(value.aval) for value in operands)


class _States:
    """What an iteration makes of the states of a loop.

    Args:
        carries: The states.
        summed: Those that are computed of sums over others.

    Attributes:
        products: Those of what is linear in states.
        solve: Whether they are corrected by something that is solved with them.
    """

    def __init__(self, carries: Sequence[Value], summed: Collection[Value]) -> None:
        largest = max((num_elements(value.aval) for value in carries), default=0)
        self.products: list[Flat] = []
        self.solve = False
        self._made = set(carries)  # Of the states, somehow.
        self._linear = set(carries)
        self._sums = {value for value in summed if num_elements(value.aval) < largest}
        self._ratios: set[Value] = set()
        self._gains: set[Value] = set()  # Something linear, divided by a sum.

    def add(self, flat: Flat) -> None:
        """Notes an equation, in order."""
        operands = [value for value in flat.values if value in self._made]
        if not operands:
            return
        self._made.update(flat.outs)
        if has(flat.eqn, Trait.SOLVES):
            self.solve = True
            self._linear.update(flat.outs)
        elif computes(flat.eqn):
            self._correct(flat, operands)
            self._add_sum(flat, operands)
            self._add_linear(flat, operands)

    def _correct(self, flat: Flat, operands: Sequence[Value]) -> None:
        """Notes whether something linear is multiplied with a ratio, or with a gain."""
        if not has(flat.eqn, PRODUCTS | Trait.MULTIPLIES) or len(operands) < 2 or self._linear.isdisjoint(operands):
            return
        is_step = has(flat.eqn, Trait.MULTIPLIES) and not self._ratios.isdisjoint(operands)
        self.solve |= is_step or not self._gains.isdisjoint(operands)

    def _add_linear(self, flat: Flat, operands: Sequence[Value]) -> None:
        if self._linear.isdisjoint(operands):
            return
        alone = len(operands) == 1
        if has(flat.eqn, PRODUCTS) and alone:
            self.products.append(flat)
        if has(flat.eqn, PRODUCTS | _SCALES):
            self._linear.update(flat.outs if alone else ())
        elif has(flat.eqn, _HANDED_ON | Trait.ADDS):
            self._linear.update(flat.outs)

    def _add_sum(self, flat: Flat, operands: Sequence[Value]) -> None:
        if has(flat.eqn, PRODUCTS | Trait.SUMS_AXES):
            self._sums.update(flat.outs if _is_sum(flat, operands) else ())
            return
        divides = has(flat.eqn, Trait.DIVIDES) and len(operands) == 2 and operands[1] in self._sums
        if divides and operands[0] in self._sums:
            self._ratios.update(flat.outs)
        elif divides:
            self._gains.update(flat.outs if operands[0] in self._linear else ())
        elif has(flat.eqn, _HANDED_ON) and self._gains.issuperset(operands):
            self._gains.update(flat.outs)
        elif has(flat.eqn, _HANDED_ON | Trait.MULTIPLIES) and self._ratios.issuperset(operands):
            self._ratios.update(flat.outs)
        elif self._sums.issuperset(operands):
            self._sums.update(flat.outs)
