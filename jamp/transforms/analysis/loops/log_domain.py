"""Recurrences in logarithms: carries that are logarithms of sums of their own exponentials.

Such are forward algorithms (HMMs, CRFs, CTC), and Sinkhorn's iteration: sums of probabilities that float32 has no range
for. They grow to thousands, of which bfloat16 keeps no unit, and an error of one is a factor of e.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jamp._compat import Eqn
from jamp._primitives import PRODUCTS, Trait, has, holds
from jamp.transforms.analysis.loops.body import Body
from jamp.transforms.analysis.loops.continued import after_iteration, returning, union
from jamp.transforms.analysis.reading.flat import ONCE
from jamp.transforms.analysis.reading.walks import parts_of

_GOES_ON = Trait.CONTINUES | Trait.REDUCES | Trait.TAKES_EXTREMUM | Trait.EXTREMUM | Trait.MAGNITUDE


class _Made(NamedTuple):
    """Carries, as bits, that a value is made of.

    Attributes:
        plain: Those that it continues by sums, scalings, extrema and moves alone.
        logs: Those that it continues as logarithms of sums of their exponentials.
        exponentials: Those of whose exponentials it is made, by sums, scalings and products.
    """

    plain: int = 0
    logs: int = 0
    exponentials: int = 0

    @property
    def of(self) -> int:
        """All carries that it is made of."""
        return self.plain | self.logs | self.exponentials


_NOTHING = _Made()


def in_log_domain(body: Body) -> frozenset[int]:
    """Positions of the carries of a loop that are logarithms of sums of their exponentials, in sums and extrema.

    Args:
        body: The body of the loop.
    """
    if not holds(body.jaxpr.eqns, Trait.LOGARITHM, ONCE):
        return frozenset()
    given = [_Made(1 << index) for index in range(body.carries)]
    made = after_iteration(body, given, _NOTHING, _NOTHING, _result)
    found = returning([each.plain for each in made], [each.logs for each in made])
    # Sinkhorn's other potential is made of the first in each step, and goes on to none.
    bits = union(1 << index for index in found)
    return found | {index for index, each in enumerate(made) if each.logs & bits}


def stacked_logarithms(body: Body, in_logs: frozenset[int], stacks: int) -> frozenset[int]:
    """Which results that a scan stacks are such carries, before an iteration or after it, moved or chosen from.

    Args:
        body: The body of the scan.
        in_logs: Positions of such carries.
        stacks: How many results it stacks.
    """
    if not in_logs or not stacks:
        return frozenset()
    opened, before, after = body.opened, body.before, body.after
    sources = [source for index in in_logs for source in (before[index], after[index])]
    carried = set[object]().union(*(parts_of(opened, source) for source in sources)) - {None}
    stacked = body.jaxpr.outvars[len(body.jaxpr.outvars) - stacks :]
    made = [parts_of(opened, opened.source(atom)) for atom in stacked]
    return frozenset(index for index, parts in enumerate(made) if not carried.isdisjoint(parts))


def _result(eqn: Eqn, operands: Sequence[_Made]) -> _Made:
    if not any(operand.of for operand in operands):
        return _NOTHING
    plain, logs, exponentials = (union(bits) for bits in zip(*operands, strict=True))
    if has(eqn, Trait.EXPONENTIAL):
        return _Made(exponentials=plain | logs)
    if has(eqn, Trait.LOGARITHM):
        return _Made(logs=exponentials)
    if has(eqn, PRODUCTS):
        return _Made(exponentials=exponentials)
    return _Made(plain, logs, exponentials) if has(eqn, _GOES_ON) else _NOTHING
