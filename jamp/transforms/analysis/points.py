"""Which carries of a loop hold the value at a point that it holds too: a residual, a gradient, a function at both ends.

A loop that searches carries a point and what it has computed there, so that it need not do so again. What it computes
anew, of another carry's new point and not of what it was itself, is such a value. It may lie beside the point in one
array, as in a stack of intervals. `analysis.starts` says what becomes of those that a loop starts from.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import numpy as np

from jamp._compat import Jaxpr
from jamp.transforms.analysis.flat import Opened, Value, operands, parts_of
from jamp.transforms.analysis.freezing import is_a


def values_of_points(body: Jaxpr, first: int, carries: int) -> frozenset[int]:
    """Positions of the carries that hold the value at a point, maybe beside others.

    Args:
        body: The loop's body.
        first: Number of its inputs before the carries.
        carries: Number of carries.
    """
    opened = Opened(body, deep=True)
    before = [Value(0, var) for var in body.invars[first : first + carries]]
    after = [opened.source(atom) for atom in body.outvars[:carries]]
    parts = [{part for part in parts_of(opened, source) if part and is_a(np.floating, part)} for source in after]
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
    seen: set[Value] = set()
    pending = [value]
    while pending:
        made = pending.pop()
        flat = opened.maker(made)
        for operand in () if flat is None else operands(flat, made):
            if operand not in seen:
                seen.add(operand)
                pending += () if operand in points else (operand,)
    return seen
