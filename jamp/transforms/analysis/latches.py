"""Loops that end before their count: scans, and loops with a counter, whose body does nothing more once a flag is set.

`lax.while_loop` has no reverse-mode derivative, so that iterations to convergence are also written with a fixed number
of steps: as a `cond` whose other branch hands its operands on, as `where(done, old, new)`, or as `x + active * dx`.
What freezes floating carries for good is a *latch*: a flag that is carried and stays as it is, or a predicate of
nothing but frozen carries. A choice that later iterations may take back is none: the best parameters so far, a step
that was accepted. Nor is an end that the frozen state does not decide, as where a mask stops to count rewards, or one
that is drawn at random, or told by a network as a probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jamp._compat import Eqn, Jaxpr, inner_jaxprs, open_jaxpr
from jamp._primitives import Rule, Trait, has, rule_of
from jamp.transforms.analysis.flat import Flat, Opened, Source, Value
from jamp.transforms.analysis.freezing import Freezing, Stop, Stops, is_a

# Stands for what each iteration is given anew.
ANEW = -1
# A value, and whether it is one of two whose difference is looked at.
_Seen = tuple[Value, bool]


class Inputs(NamedTuple):
    """What a loop body is given, beside constants."""

    carries: Sequence[Value]
    scanned: Sequence[Value]


def find_latches(body: Jaxpr, first: int, carries: int) -> frozenset[int]:
    """Positions of the carries that decide when a loop does nothing more.

    Args:
        body: The loop's body.
        first: Number of its inputs before the carries.
        carries: Number of carries.
    """
    if not _compares(body):
        return frozenset()
    opened = Opened(body, deep=True)
    before = [Value(0, var) for var in body.invars[first : first + carries]]
    after = [opened.source(atom) for atom in body.outvars[:carries]]
    freezing = Freezing(opened, before, after)
    held: dict[Stop, set[int]] = {}
    same: set[int] = set()
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        stops = freezing.under(new, old)
        same.update([index] if stops is None else [])
        for stop in stops or ():
            held.setdefault(stop, set()).add(index)
    scanned = [Value(0, var) for var in body.invars[first + carries :]]
    deciders = _Deciders(opened, freezing, Inputs(before, scanned), after)
    found: set[int] = set()
    for stop, frozen in held.items():
        states = {i for i in frozen if is_a(np.floating, before[i]) and before[i] not in freezing.flags}
        if states:
            flags = {i for i in range(carries) if _stays(freezing, before[i], after[i], stop)}
            found |= _by_flags(deciders, flags, states) or _by_predicate(deciders, stop, states, frozen | same)
    return frozenset(found)


def _compares(jaxpr: Jaxpr) -> bool:
    """Whether anything in a jaxpr is true or false."""
    return any(
        any(is_a(np.bool_, var) for var in eqn.outvars) or any(_compares(open_jaxpr(i)) for i in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def _stays(freezing: Freezing, old: Value, new: Source | None, stop: Stop) -> bool:
    """Whether a carry is the flag that a loop stops at, and stays it: `done | ...`, or `active * ...`."""
    kept: Stops = freezing.under(new, stop.number)
    if old == stop.predicate:
        return kept is None or stop in kept
    return new == stop.predicate and old in freezing.flags and (kept is None or Stop(old, stop.number) in kept)


def _by_flags(deciders: _Deciders, flags: set[int], states: set[int]) -> set[int]:
    """Of the flags that freeze states for good, those whose own states decide about them."""
    decided = {index: deciders.of(deciders.after[index]) for index in flags}
    return {index for index, found in decided.items() if found.converges(states)}


def _by_predicate(deciders: _Deciders, stop: Stop, states: set[int], frozen: set[int]) -> set[int]:
    """What a predicate reads that stays as it is, since all that it reads is frozen with it."""
    shape = stop.predicate.aval.shape
    gates = len([size for size in shape if size != 1]) > 1
    if gates and all(deciders.before[index].aval.shape == shape for index in states):
        return set()  # Elements that are frozen one by one, as by the derivative of a relu, read the others.
    decided = deciders.of(stop.predicate)
    stays = deciders.inputs(stop.predicate) <= frozen
    return decided.at_once if stays and decided.converges(states) else set()


class _Decided(NamedTuple):
    """What decides about a flag.

    Attributes:
        at_once: Positions of the carries that the flag is computed from; none behind a discrete choice.
        carries: These, and the carries that they are computed from in earlier iterations.
        multiplies: Whether a product is among what decides.
        draws: Whether a random number is.
    """

    at_once: set[int]
    carries: set[int]
    multiplies: bool
    draws: bool

    def converges(self, states: set[int]) -> bool:
        """Whether states decide that they are frozen, by way of products."""
        return self.multiplies and not self.draws and bool(self.carries & states)


class _Deciders:
    """Walks back from flags to what decides about them."""

    def __init__(self, opened: Opened, freezing: Freezing, inputs: Inputs, after: Sequence[Source | None]) -> None:
        self.before, self.after = inputs.carries, after
        self._opened = opened
        self._freezing = freezing
        self._index = {value: index for index, value in enumerate(inputs.carries)} | dict.fromkeys(inputs.scanned, ANEW)

    def inputs(self, value: Value) -> set[int]:
        """Positions of the carries that a value is made of; `ANEW` stands for what each iteration is given."""
        seen: set[Value] = set()
        pending = [value]
        while pending:
            source = pending.pop()
            if source not in seen:
                seen.add(source)
                flat = self._opened.maker(source)
                pending += () if flat is None else _operands(flat, source)
        return {self._index[source] for source in seen if source in self._index}

    def of(self, source: Source | None) -> _Decided:
        """What decides about a value, in this iteration and, by way of carries, in earlier ones."""
        seen: set[_Seen] = set()
        eqns: dict[int, Eqn] = {}
        reached = self._walk(source, False, seen, eqns)
        at_once = {index for index, _ in reached}
        carries: set[int] = set()
        while reached:
            index, apart = reached.pop()
            carries.add(index)
            reached += self._walk(self.after[index], apart, seen, eqns)
        multiplies = any(map(_multiplies, eqns.values()))
        return _Decided(at_once, carries, multiplies, any(has(eqn, Trait.DRAWS) for eqn in eqns.values()))

    def _walk(
        self, source: Source | None, apart: bool, seen: set[_Seen], eqns: dict[int, Eqn]
    ) -> list[tuple[int, bool]]:
        """The carries that a value reads in its own iteration, and whether in a difference; no choices."""
        pending = [(source, apart)] if isinstance(source, Value) else []
        reached = []
        while pending:
            here = pending.pop()
            if here in seen:
                continue
            seen.add(here)
            value, apart = here
            if self._index.get(value, ANEW) != ANEW:
                reached.append((self._index[value], apart))
            flat = self._opened.maker(value)
            if flat is None or _chooses(flat.eqn, apart):
                continue
            eqns[id(flat.eqn)] = flat.eqn
            if not has(flat.eqn, Trait.DRAWS):
                apart = apart or self._tells_apart(flat)
                pending += [(operand, apart) for operand in _operands(flat, value)]
        return reached

    def _tells_apart(self, flat: Flat) -> bool:
        """Whether an equation gives the difference, or the quotient, of two computed values."""
        numbers = [self._freezing.number(operand) for operand in flat.ins]
        return has(flat.eqn, Trait.SUBTRACTS | Trait.DIVIDES) and numbers == [None, None]


def _operands(flat: Flat, result: Value) -> list[Value]:
    """What a result of an equation is made of; of a `cond`, the same result of each branch."""
    sources = [flat.ins[0], *(case[flat.outs.index(result)] for case in flat.cases)] if flat.cases else flat.ins
    return [source for source in sources if isinstance(source, Value)]


def _chooses(eqn: Eqn, apart: bool) -> bool:
    """Whether what decides ends at an equation: a choice, or a probability that is looked at alone.

    Whether a number is finite is no close call. What a network tells by a sigmoid, such as when to halt, is a choice
    of its own; the difference of two iterates through a sigmoid is not.
    """
    if has(eqn, Trait.COMPARES) and len(eqn.invars) == 1:
        return True
    if has(eqn, Trait.CHOOSES):
        return len(eqn.invars) > 1 or not has(eqn, Trait.SORTS)
    return has(eqn, Trait.PROBABILITY) and not apart


def _multiplies(eqn: Eqn) -> bool:
    inside = (inner for jaxpr in inner_jaxprs(eqn) for inner in open_jaxpr(jaxpr).eqns)
    return rule_of(eqn) is Rule.HALF or any(map(_multiplies, inside))
