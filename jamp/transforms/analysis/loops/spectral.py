"""Carries that go on by way of a Fourier transform, as in spectral solvers: `u = irfft(rfft(u) * e) + dt * f(u)`.

Complex numbers have no precision to decide about, so that the states of values do not show that a sum goes on there.
In half such a solver loses in each step what a network adds to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jamp._compat import Eqn
from jamp._primitives import PRODUCTS, SCALES, Trait, has, holds
from jamp.transforms.analysis.loops.body import Body
from jamp.transforms.analysis.loops.continued import after_iteration, returning, union
from jamp.transforms.analysis.reading.flat import ONCE
from jamp.transforms.program.flow import num_elements


class _Made(NamedTuple):
    """What a value of an iteration is made of.

    Attributes:
        plain: Carries, as bits, that it continues by sums, scalings and moves alone.
        through: Carries that it continues by way of a transform.
        bent: The elements of what depends on carries and continues none: a function of them.
    """

    plain: int = 0
    through: int = 0
    bent: int = 0

    @property
    def of(self) -> int:
        """All carries that it continues."""
        return self.plain | self.through


_NOTHING = _Made()


def spectral(body: Body) -> frozenset[int]:
    """Positions of the carries of a loop that come back to themselves by way of a Fourier transform.

    Args:
        body: The body of the loop.
    """
    if not holds(body.jaxpr.eqns, Trait.COMPLEX, ONCE):
        return frozenset()
    given = [_Made(1 << index) for index in range(body.carries)]
    made = after_iteration(body, given, _NOTHING, _NOTHING, _result)
    return returning([each.plain for each in made], [each.through for each in made])


def _result(eqn: Eqn, operands: Sequence[_Made]) -> _Made:
    size = max((num_elements(var.aval) for var in eqn.outvars), default=0)
    if not any(operand.of for operand in operands):
        return _Made(bent=size) if any(operand.bent for operand in operands) else _NOTHING
    if has(eqn, Trait.COMPLEX) and not has(eqn, Trait.SOLVES):
        return _Made(0, union(operand.of for operand in operands))
    # What an activation or a gate scales each element by bends them; layers are no steps of a solver.
    scales = has(eqn, SCALES)
    if has(eqn, PRODUCTS) or not has(eqn, Trait.CONTINUES) or (scales and any(o.bent >= size for o in operands)):
        return _Made(bent=size)
    return _Made(union(operand.plain for operand in operands), union(operand.through for operand in operands))
