"""How the carries of a loop go on through its body: what values are made of them, and which come back to themselves."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from jamp._compat import Atom, Eqn, Jaxpr, Literal, called_jaxpr, open_jaxpr
from jamp._primitives import has
from jamp.transforms.analysis.loops.body import Body
from jamp.transforms.analysis.reading.flat import ONCE


class Made(Protocol):
    """What a value of an iteration is made of."""

    @property
    def of(self) -> int:
        """The carries, as bits, that it continues in whatever way."""
        ...


T = TypeVar("T", bound=Made)


def follow(jaxpr: Jaxpr, given: Sequence[T], other: T, result: Callable[[Eqn, Sequence[T]], T]) -> list[T]:
    """What the results of a jaxpr are made of.

    Args:
        jaxpr: The jaxpr. Calls in it that are given something of a carry are entered.
        given: What its inputs are made of.
        other: What constants and literals are made of.
        result: What the results of an equation are made of, by its operands.
    """
    made: dict[Atom, T] = dict(zip(jaxpr.invars, given, strict=True))

    def read(atom: Atom) -> T:
        return other if isinstance(atom, Literal) else made.get(atom, other)

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if has(eqn, ONCE) and any(operand.of for operand in operands):
            inside = follow(open_jaxpr(called_jaxpr(eqn.params)), operands, other, result)
            made.update(zip(eqn.outvars, inside, strict=True))
        else:
            made.update(dict.fromkeys(eqn.outvars, result(eqn, operands)))
    return [read(atom) for atom in jaxpr.outvars]


def after_iteration(
    body: Body, carries: Sequence[T], constant: T, scanned: T, result: Callable[[Eqn, Sequence[T]], T]
) -> list[T]:
    """What the carries that an iteration hands over are made of.

    Args:
        body: The body of the loop.
        carries: What each carry is made of where an iteration begins.
        constant: What is the same in all iterations is made of that.
        scanned: And what each iteration is given of its own.
        result: What the results of an equation are made of, by its operands.
    """
    others = len(body.jaxpr.invars) - body.first - body.carries
    given = [*[constant] * body.first, *carries, *[scanned] * others]
    return follow(body.jaxpr, given, constant, result)[: body.carries]


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
