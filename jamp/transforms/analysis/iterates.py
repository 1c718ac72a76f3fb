"""Linear iterations: carries that a loop makes of themselves by products alone, as power iteration does.

What such a loop computes is no layer's activation: what is rounded in one iteration is there in the next. A recurrent
layer bends what it hands on, and layers have weights of their own.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jamp._compat import Atom, Eqn, Jaxpr, Literal, called_jaxpr, open_jaxpr
from jamp._primitives import PRODUCTS, Trait, has
from jamp.transforms.analysis.flat import ONCE
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


def iterates(body: Jaxpr, first: int, carries: int) -> frozenset[int]:
    """Positions of the carries of a loop that are a product of what they were with something, in sums and scalings.

    Args:
        body: The body of the loop.
        first: Position of the first carry among its inputs.
        carries: How many there are.
    """
    if not _has_product(body):
        return frozenset()
    given = [_FIXED] * first + [_Made(1 << index) for index in range(carries)]
    given += [_SCANNED] * (len(body.invars) - len(given))
    made = _follow(body, given)[:carries]
    return returning([each.plain for each in made], [each.multiplied for each in made])


def _has_product(jaxpr: Jaxpr) -> bool:
    return any(
        has(eqn, PRODUCTS) or (has(eqn, ONCE) and _has_product(open_jaxpr(called_jaxpr(eqn.params))))
        for eqn in jaxpr.eqns
    )


def _follow(jaxpr: Jaxpr, given: Sequence[_Made]) -> list[_Made]:
    made: dict[Atom, _Made] = dict(zip(jaxpr.invars, given, strict=True))
    for eqn in jaxpr.eqns:
        operands = [_of(atom, made) for atom in eqn.invars]
        if has(eqn, ONCE) and any(operand.of for operand in operands):
            made.update(zip(eqn.outvars, _follow(open_jaxpr(called_jaxpr(eqn.params)), operands), strict=True))
        else:
            made.update(dict.fromkeys(eqn.outvars, _result(eqn, operands)))
    return [_of(atom, made) for atom in jaxpr.outvars]


def _of(atom: Atom, made: Mapping[Atom, _Made]) -> _Made:
    return _FIXED if isinstance(atom, Literal) else made.get(atom, _FIXED)


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
    scales = has(eqn, Trait.MULTIPLIES | Trait.DIVIDES)
    # A norm scales all elements alike, where a gate bends each.
    bends = any(operand.bent >= size for operand in operands) if scales else any(operand.bent for operand in operands)
    # Of a quotient the dividend goes on; where it is none of a carry, the divisor, as in Sinkhorn's `u = a / (k @ v)`.
    goes_on = operands[:1] if has(eqn, Trait.DIVIDES) and operands[0].of else operands
    # The best of several values is one of them: value iteration.
    if bends or not has(eqn, Trait.CONTINUES | Trait.TAKES_EXTREMUM) or not any(operand.of for operand in goes_on):
        return _Made(bent=size)
    return _Made(union(operand.plain for operand in goes_on), union(operand.multiplied for operand in goes_on))


def union(sets: Iterable[int]) -> int:
    """All that are in any of several sets of bits."""
    return functools.reduce(operator.or_, sets, 0)


def returning(plain: Sequence[int], through: Sequence[int]) -> frozenset[int]:
    """Positions of the carries that come back to themselves through something, maybe as another carry in between.

    Args:
        plain: By carry, those that it continues, as bits.
        through: By carry, those that it continues by way of that something.
    """
    return frozenset(index for index in range(len(plain)) if _returns(plain, through, index))


def _returns(plain: Sequence[int], through: Sequence[int], carry: int) -> bool:
    seen: set[tuple[int, bool]] = set()
    todo = [(carry, False)]
    while todo:
        at, changed = todo.pop()
        for index in range(len(plain)):
            edges = [(index, True)] if through[at] >> index & 1 else []
            edges += [(index, changed)] if plain[at] >> index & 1 else []
            todo += [edge for edge in edges if edge not in seen]
            seen.update(edges)
    return (carry, True) in seen
