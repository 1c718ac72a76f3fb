"""What a loop takes off what it computes: the data of a fit, the right-hand side of an equation.

What is left is as much smaller as the fit is better, and what came in rounded is not to be met. A network that half
moves by 0.4 % is as good a network; a target that is moved by as much, along a direction in which the model hardly
gives way, takes a solver far away: of a network of 32 units fitted to itself, optimistix's GaussNewton left for 1e15.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import numpy as np

from jamp._compat import Jaxpr
from jamp._primitives import PRODUCTS, Trait, has
from jamp.transforms.analysis.flat import Opened, Source, Value, operands
from jamp.transforms.analysis.freezing import is_a
from jamp.transforms.analysis.starts import changed


def targets(body: Jaxpr, first: int, carries: int) -> frozenset[int]:
    """Positions of the inputs of a loop's body that are taken off what it computes, or that this is taken off.

    They are the same in all iterations: constants, and carries that it hands on.

    Args:
        body: The loop's body.
        first: Number of its inputs before the carries.
        carries: Number of carries.
    """
    moving = {first + index for index in changed(body, first, carries)}
    moving.update(range(first + carries, len(body.invars)))
    constants = {Value(0, var): index for index, var in enumerate(body.invars) if index not in moving}
    if not any(is_a(np.floating, value) for value in constants):
        return frozenset()
    opened = Opened(body, deep=True)
    changing = _changing(opened, {Value(0, body.invars[index]) for index in moving})
    found: set[Value] = set()
    for flat in opened.eqns:
        if has(flat.eqn, Trait.SUBTRACTS) and any(value in changing for value in flat.values):
            found |= _made_of(opened, [value for value in flat.values if value not in changing])
    return frozenset(constants[value] for value in found if value in constants and is_a(np.floating, value))


def _changing(opened: Opened, given: set[Value]) -> AbstractSet[Value]:
    """What is not the same in all iterations."""
    found: set[Source] = {*given}
    for flat in opened.eqns:
        found.update(value for value in flat.outs if not found.isdisjoint(operands(flat, value)))
    return {value for value in found if isinstance(value, Value)}


def _made_of(opened: Opened, values: list[Value]) -> set[Value]:
    """What values are computed from, but by products."""
    seen: set[Value] = set()
    pending = [*values]
    while pending:
        value = pending.pop()
        flat = opened.maker(value)
        if value not in seen:
            seen.add(value)
            pending += () if flat is None or has(flat.eqn, PRODUCTS) else operands(flat, value)
    return seen
