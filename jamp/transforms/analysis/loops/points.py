"""What a search holds: the values at the points that it carries, and the targets that it takes off what it computes.

A loop that searches carries a point and what it has computed there (a residual, a gradient, a function at both ends),
so that it need not do so again. What it computes anew, of another carry's new point and not of what it was itself, is
such a value. It may lie beside the point in one array, as in a stack of intervals. `loops.starts` says what becomes of
those that a loop starts from.

What is left of a target (the data of a fit, the right-hand side of an equation) is as much smaller as the fit is
better, and what came in rounded is not to be met. A network that half moves by 0.4 % is as good a network; a target
that is moved by as much, along a direction in which the model hardly gives way, takes a solver far away: of a network
of 32 units fitted to itself, optimistix's GaussNewton left for 1e15.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import numpy as np

from jamp._primitives import PRODUCTS, Trait, has
from jamp.transforms.analysis.loops.body import Body
from jamp.transforms.analysis.loops.starts import changed
from jamp.transforms.analysis.reading.flat import Opened, Source, Value
from jamp.transforms.analysis.reading.freezing import is_a
from jamp.transforms.analysis.reading.walks import back, operands, parts_of


def values_of_points(body: Body) -> frozenset[int]:
    """Positions of the carries that hold the value at a point, maybe beside others.

    Args:
        body: The loop's body.
    """
    opened, before = body.opened, body.before
    parts = [{part for part in parts_of(opened, source) if part and is_a(np.floating, part)} for source in body.after]
    points = {part for of_one in parts for part in of_one if opened.maker(part) is not None}
    found: set[int] = set()
    for index, of_one in enumerate(parts):
        computed = of_one & points
        for part in computed:
            read = _read(opened, part, points - {part})
            anew = before[index] not in read and not read.isdisjoint(points.union(before))
            if anew or read & computed - {part}:
                found.add(index)
    while True:
        values = {before[index] for index in found}
        # What takes over what another carry was, as that at the point before, is one too.
        taken = {index for index, of_one in enumerate(parts) if not of_one.isdisjoint(values - {before[index]})}
        if taken <= found:
            return frozenset(found)
        found |= taken


def _read(opened: Opened, value: Value, points: AbstractSet[Value]) -> set[Value]:
    """What a value is computed from; nothing that comes before a point."""
    walked = back(opened, [value], lambda flat, made: () if made in points else operands(flat, made))
    return {read for read, _ in walked} - {value}


def targets(body: Body) -> frozenset[int]:
    """Positions of the inputs of a loop's body that are taken off what it computes, or that this is taken off.

    They are the same in all iterations: constants, and carries that it hands on.

    Args:
        body: The loop's body.
    """
    given = body.jaxpr.invars
    moving = {body.first + index for index in changed(body)}
    moving.update(range(body.first + body.carries, len(given)))
    constants = {Value(0, var): index for index, var in enumerate(given) if index not in moving}
    if not any(is_a(np.floating, value) for value in constants):
        return frozenset()
    opened = body.opened
    changing = _changing(opened, {Value(0, given[index]) for index in moving})
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
    walked = back(opened, values, lambda flat, value: () if has(flat.eqn, PRODUCTS) else operands(flat, value))
    return {value for value, _ in walked}
