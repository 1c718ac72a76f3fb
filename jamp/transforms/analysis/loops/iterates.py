"""Linear iterations: carries that a loop makes of themselves by products alone, as power iteration does.

What such a loop computes is no layer's activation: what is rounded in one iteration is there in the next. A recurrent
layer bends what it hands on, and layers have weights of their own.
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
        multiplied: Carries that it continues by way of a product.
        fixed: Whether it is the same in all iterations.
        bent: The elements, before any broadcast, of what depends on carries and continues none: a function of them.
    """

    plain: int = 0
    multiplied: int = 0
    fixed: bool = False
    bent: int = 0

    @property
    def of(self) -> int:
        """All carries that it continues."""
        return self.plain | self.multiplied


_FIXED, _SCANNED = _Made(fixed=True), _Made()


def iterates(body: Body) -> frozenset[int]:
    """Positions of the carries of a loop that are a product of what they were with something, in sums and scalings.

    Args:
        body: The body of the loop.
    """
    if not holds(body.jaxpr.eqns, PRODUCTS, ONCE):
        return frozenset()
    given = [_Made(1 << index) for index in range(body.carries)]
    made = after_iteration(body, given, _FIXED, _SCANNED, _result)
    return returning([each.plain for each in made], [each.multiplied for each in made])


def _result(eqn: Eqn, operands: Sequence[_Made]) -> _Made:
    if all(operand.fixed for operand in operands):
        return _SCANNED if eqn.effects else _FIXED
    if not any(operand.of or operand.bent for operand in operands):
        return _SCANNED
    size = max((num_elements(var.aval) for var in eqn.outvars), default=0)
    if has(eqn, PRODUCTS):
        by_itself = all(operand.fixed or operand.of for operand in operands)
        return _Made(0, union(operand.of for operand in operands)) if by_itself else _Made(bent=size)
    if has(eqn, Trait.VIEW) and operands[0].bent:
        return operands[0]
    scales = has(eqn, SCALES)
    # A norm scales all elements alike, where a gate bends each.
    bends = any(operand.bent >= size for operand in operands) if scales else any(operand.bent for operand in operands)
    # Of a quotient the dividend goes on; where it is none of a carry, the divisor, as in Sinkhorn's `u = a / (k @ v)`.
    goes_on = operands[:1] if has(eqn, Trait.DIVIDES) and operands[0].of else operands
    # The best of several values is one of them: value iteration.
    if bends or not has(eqn, Trait.CONTINUES | Trait.TAKES_EXTREMUM) or not any(operand.of for operand in goes_on):
        return _Made(bent=size)
    return _Made(union(operand.plain for operand in goes_on), union(operand.multiplied for operand in goes_on))
