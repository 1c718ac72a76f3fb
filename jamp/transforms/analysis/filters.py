"""States that a loop corrects by what it solves: the mean and the covariance of a filter, the gain of a regulator.

`p = f @ p @ f.T + q` is what `h @ p @ h.T + r` is solved with, and what is left of it the next `p`. A product that is
rounded makes it less symmetric, which no step forgets: the gradient of a Kalman filter over 200 steps was ten times too
large in bfloat16, and NaN in float16, where its products with `f` alone were half.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jamp._primitives import PRODUCTS, Trait, has
from jamp.transforms.analysis.factors import Cancelled, computes
from jamp.transforms.analysis.flat import Flat, Opened, Value

_HANDED_ON = Trait.VIEW | Trait.CONVERTS | Trait.NEGATES | Trait.MOVES | Trait.SELECTS | Trait.ADDS
_SCALES = Trait.MULTIPLIES | Trait.DIVIDES


def filters(opened: Opened) -> Iterator[Cancelled]:
    """Products of a state of a loop, and of what is linear in it or solved with it, with what is not made of states.

    Args:
        opened: A jaxpr, with its loops opened.
    """
    for carries in opened.carried.values():
        states = _states(opened, carries)
        if states:
            yield Cancelled(tuple(states))


def _states(opened: Opened, carries: Iterable[Value]) -> list[Flat]:
    """The products of one loop; none where it solves nothing that its states are part of."""
    made = set(carries)  # Of the states, somehow.
    linear = set(carries)
    products: list[Flat] = []
    solves = False
    for flat in opened.eqns:
        operands = [value for value in flat.values if value in made]
        if not operands:
            continue
        made.update(flat.outs)
        if has(flat.eqn, Trait.SOLVES):
            solves = True
            linear.update(flat.outs)
        are_linear = [value for value in operands if value in linear]
        if not are_linear or not computes(flat.eqn):
            continue
        if has(flat.eqn, PRODUCTS) and len(operands) == 1:
            products.append(flat)
            linear.update(flat.outs)
        elif has(flat.eqn, _HANDED_ON) or (has(flat.eqn, _SCALES) and len(operands) == 1):
            linear.update(flat.outs)
    return products if solves else []
