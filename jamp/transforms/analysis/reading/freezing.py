"""Under which conditions a value is zero, one, or what a loop carry was before: a loop body, simplified.

A carry is frozen by `where(done, old, new)`, by a `cond` that hands it on, or by arithmetic, as in
`x + (1 - done) * dx`. All of these are one question: what makes the new value of a carry the old one, once a flag has
become true? It is answered forwards, equation by equation, with the laws that a compiler would simplify them by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax.core
import jax.numpy as jnp
import numpy as np

from jamp._compat import Literal, Var
from jamp._primitives import MOVED, Trait, has
from jamp.transforms.analysis.reading.arithmetic import COMPARISONS
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source, Value, moved, written


class Stop(NamedTuple):
    """A condition: a value, and the number that all of it is."""

    predicate: Value
    number: float


# Conditions each of which is enough; None where none is needed.
Stops = frozenset[Stop] | None
ALWAYS: Stops = None
NEVER: Stops = frozenset()
# What a value may be: a number, or a carry.
Target = float | Value

_FALSE, _TRUE = 0.0, 1.0
_HANDS_ON = MOVED | Trait.TAKES_EXTREMUM | Trait.JUDGES


def every(stops: Iterable[Stops]) -> Stops:
    """What makes all of several things true."""
    needed = [each for each in stops if each is not None]
    return frozenset.intersection(*needed) if needed else ALWAYS


def some(stops: Iterable[Stops]) -> Stops:
    """What makes one of several things true."""
    found: frozenset[Stop] = frozenset()
    for each in stops:
        if each is None:
            return ALWAYS
        found |= each
    return found


def is_a(kind: type[np.generic], source: Source | Var) -> bool:
    """Whether a value is an array of a kind of numbers."""
    return isinstance(source.aval, jax.core.ShapedArray) and jnp.issubdtype(source.aval.dtype, kind)


class Freezing:
    """The conditions, for all values of a loop body.

    Args:
        opened: The body.
        before: Its carries as an iteration is given them.
        after: The same as an iteration returns them.
    """

    def __init__(self, opened: Opened, before: Sequence[Value], after: Sequence[Source | None]) -> None:
        self._eqns = opened.eqns
        self.flags = self._find_flags(before, after)
        self._numbers: dict[Value, float] = {}
        self._known: dict[Value, dict[Target, Stops]] = {carry: {carry: ALWAYS} for carry in before}
        for carry in before:
            if carry in self.flags or is_a(np.integer, carry):
                self._known[carry].update((number, frozenset({Stop(carry, number)})) for number in (_FALSE, _TRUE))
        for flat in self._eqns:
            self._add(flat)

    def under(self, source: Source | None, target: Target) -> Stops:
        """What makes a value equal to a number, or to what a carry was before."""
        if source is None:
            return NEVER
        number = self.number(source)
        if number is not None:
            return ALWAYS if number == target else NEVER
        known = self._known.get(source) if isinstance(source, Value) else None
        return known.get(target, NEVER) if known else NEVER

    def number(self, source: Source) -> float | None:
        """The number that the program writes for a value."""
        if isinstance(source, Literal):
            return written(source)
        return self._numbers.get(source)

    def _add(self, flat: Flat) -> None:
        for index, out in enumerate(flat.outs):
            if has(flat.eqn, MOVED) and flat.ins:
                number = self.number(moved(flat, index))
                if number is not None:
                    self._numbers[out] = number
                    continue
            known = {}
            for target in self._targets(flat, index):
                stops = self._derive(flat, index, target)
                if stops != NEVER:
                    known[target] = stops
            if is_a(np.bool_, out):
                for number in (_FALSE, _TRUE):
                    known[number] = some((known.get(number, NEVER), frozenset({Stop(out, number)})))
            if known:
                self._known[out] = known

    def _targets(self, flat: Flat, index: int) -> set[Target]:
        """What a result may be: a number, or what an operand that it is chosen or made of may be."""
        sources = [case[index] for case in flat.cases] if flat.cases else flat.ins
        known = [self._known[source] for source in sources if isinstance(source, Value) and source in self._known]
        some_number = flat.cases or any(isinstance(source, Literal) for source in flat.ins)
        return {_FALSE, _TRUE}.union(*known) if known or some_number else set()

    def _derive(self, flat: Flat, index: int, target: Target) -> Stops:
        """What makes a result of an equation equal to a target, by the laws of its primitive."""
        ins = flat.ins
        if flat.cases:
            return self._choice(ins[0], [case[index] for case in flat.cases], target)
        if has(flat.eqn, Trait.SELECTS):
            return self._choice(ins[0], ins[1:], target)
        if has(flat.eqn, _HANDS_ON):
            operand = moved(flat, index)
            elsewhere = has(flat.eqn, Trait.TURNS) or not _alike(operand, flat.outs[index])
            return NEVER if elsewhere and isinstance(target, Value) else self.under(operand, target)
        if has(flat.eqn, Trait.NEGATES):
            return self.under(ins[0], target) if target == 0 else NEVER
        if has(flat.eqn, Trait.INVERTS):
            return self.under(ins[0], 1 - target) if isinstance(target, float) else NEVER
        return self._of_two(flat, *ins, target) if len(ins) == 2 else NEVER

    def _of_two(self, flat: Flat, a: Source, b: Source, target: Target) -> Stops:
        eqn, under = flat.eqn, self.under
        if has(eqn, Trait.SUBTRACTS):
            less = every((under(a, target), under(b, 0.0)))
            return some((less, every((under(a, 1.0), under(b, 1.0))))) if target == 0 else less
        if has(eqn, Trait.ADDS):
            return some((every((under(a, target), under(b, 0.0))), every((under(a, 0.0), under(b, target)))))
        if has(eqn, Trait.MULTIPLIES | Trait.BOTH):
            return self._with_neutral(a, b, target, neutral=1.0)
        if has(eqn, Trait.EITHER):
            return self._with_neutral(a, b, target, neutral=0.0)
        if has(eqn, Trait.DIVIDES):
            return under(a, target) if target == 0 else every((under(a, target), under(b, 1.0)))
        if has(eqn, Trait.EXTREMUM) and _in(a, self.flags) and _in(b, self.flags):
            return self._with_neutral(a, b, target, neutral=0.0 if has(eqn, Trait.MAXIMUM) else 1.0)
        compare = COMPARISONS.get(eqn.primitive.name)
        return NEVER if compare is None else self._compared(compare, a, b, target)

    def _with_neutral(self, a: Source, b: Source, target: Target, neutral: float) -> Stops:
        """Of an operation on zeros and ones with a neutral number, where the other one prevails; a product, or `|`."""
        under = self.under
        if target == 1 - neutral:
            return some((under(a, target), under(b, target)))
        return some((every((under(a, target), under(b, neutral))), every((under(a, neutral), under(b, target)))))

    def _choice(self, predicate: Source, cases: Sequence[Source], target: Target) -> Stops:
        each = [self.under(case, target) for case in cases]
        taken = (every((self.under(predicate, float(i)), stops)) for i, stops in enumerate(each))
        return some((every(each), *taken))

    def _compared(self, compare: Callable[[float, float], bool], a: Source, b: Source, target: Target) -> Stops:
        """A flag that is a number, compared: `active > 0`."""
        left, right = self.number(a), self.number(b)
        if right is not None:
            return some(self.under(a, v) for v in (_FALSE, _TRUE) if compare(v, right) == target)
        if left is not None:
            return some(self.under(b, v) for v in (_FALSE, _TRUE) if compare(left, v) == target)
        return NEVER

    def _find_flags(self, before: Sequence[Value], after: Sequence[Source | None]) -> set[Source]:
        """Values that are nothing but true or false: carries among them, if an iteration makes flags of flags."""
        carried = set(before)
        while True:
            flags: set[Source] = {*carried}
            for flat in self._eqns:
                flags.update(out for index, out in enumerate(flat.outs) if _is_flag(flat, index, flags))
            kept = {b for b, a in zip(before, after, strict=True) if b in carried and a is not None and _in(a, flags)}
            if kept == carried:
                return flags
            carried = kept


def _alike(source: Source, other: Value) -> bool:
    return (source.aval.shape, source.aval.dtype) == (other.aval.shape, other.aval.dtype)


def _in(source: Source, flags: set[Source]) -> bool:
    if isinstance(source, Literal):
        return np.ndim(source.val) == 0 and bool(source.val in (0, 1))
    return source in flags


def _is_flag(flat: Flat, index: int, flags: set[Source]) -> bool:
    """Whether a result is true or false, or zero or one made of such."""
    if is_a(np.bool_, flat.outs[index]):
        return True
    if flat.cases:
        return all(_in(case[index], flags) for case in flat.cases)
    if has(flat.eqn, Trait.SELECTS):
        return all(_in(case, flags) for case in flat.ins[1:])
    if has(flat.eqn, Trait.SUBTRACTS):
        first = flat.ins[0]
        return isinstance(first, Literal) and bool(np.all(first.val == 1)) and _in(flat.ins[1], flags)
    closed = _HANDS_ON | Trait.MULTIPLIES | Trait.EXTREMUM
    return has(flat.eqn, closed) and bool(flat.ins) and all(_in(source, flags) for source in flat.ins)
