"""What decides about a flag: walks back from it, through iterations, to what it is computed of.

A walk ends at discrete choices: at what `argmax` or a sort chose, at a comparison with a random number, as by which
samplers draw and proposals are accepted, and at a probability that is looked at alone, as where a network tells by a
sigmoid that it has finished. It goes on where a loop waits for a choice to come again, as policy iteration does.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jamp._compat import ClosedJaxpr, Eqn, WhileParts, inner_jaxprs, open_jaxpr
from jamp._primitives import Rule, Trait, asks_one, has, rule_of
from jamp.transforms.analysis.loops.body import Body
from jamp.transforms.analysis.loops.choices import Choices
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source, Value, is_while
from jamp.transforms.analysis.reading.freezing import Freezing, is_a
from jamp.transforms.analysis.reading.walks import back, operands, parts_of

# Stands for what each iteration is given anew.
ANEW = -1


class Seen(enum.IntEnum):
    """How what decides looks at a value."""

    ALONE = 0
    APART = 1  # At the difference of it and another.
    AGAIN = 2  # At whether a choice is what it was before.


# The position of a carry, and how it is looked at.
Reached = tuple[int, Seen]


class Inputs(NamedTuple):
    """What a loop body is given, beside constants."""

    carries: Sequence[Value]
    scanned: Sequence[Value]


class Decided(NamedTuple):
    """What decides about a flag.

    Attributes:
        at_once: Positions of the carries that the flag is computed from; none behind a discrete choice.
        carries: These, and the carries that they are computed from in earlier iterations.
        multiplies: Whether a product is among what decides.
        draws: Whether a random number is.
        chose: Whether a comparison with a random number is, or a probability.
        differ: Positions of the floating carries of which the difference is looked at.
        again: Positions of the carries that are choices which are to come again, and of what these are made of.
    """

    at_once: set[int]
    carries: set[int]
    multiplies: bool
    draws: bool
    chose: bool
    differ: set[int]
    again: set[int]

    @property
    def is_chosen(self) -> bool:
        """Whether discrete choices alone decide, so that a loop that ends by the flag is no iteration to convergence.

        Generation that ends at a token, proposals until one is accepted, a network that halts itself. A loop that
        compares computed values besides, by way of products or as a difference, is an iteration all the same.
        """
        return self.chose and not self.multiplies and not self.differ

    def converges(self, states: set[int]) -> bool:
        """Whether states decide that they are frozen, by way of products."""
        return self.multiplies and not self.draws and bool(self.carries & states)


class Trail:
    """What a walk has seen.

    Attributes:
        seen: Values, and how each is looked at.
        eqns: The equations that it went through.
        chose: Whether it ended at a comparison with a random number, or at a probability.
    """

    def __init__(self) -> None:
        self.seen: set[tuple[Value, Seen]] = set()
        self.eqns: dict[int, Eqn] = {}
        self.chose = False


class Deciders:
    """Walks back from flags to what decides about them.

    Args:
        opened: The body of a loop, or its condition.
        freezing: What makes its values those of the iteration before.
        inputs: What it is given.
        after: What its carries are in the next iteration.
        body: Of a condition, what walks through the body.
    """

    def __init__(
        self,
        opened: Opened,
        freezing: Freezing,
        inputs: Inputs,
        after: Sequence[Source | None],
        body: Deciders | None = None,
    ) -> None:
        self.before, self.after = inputs.carries, after
        self._opened = opened
        self._freezing = freezing
        self._choices = Choices(opened)
        self._index = {value: index for index, value in enumerate(inputs.carries)} | dict.fromkeys(inputs.scanned, ANEW)
        self._body = body

    @functools.cached_property
    def _becomes(self) -> list[set[Value | None]]:
        """What each carry is put together of in the next iteration."""
        return [parts_of(self._opened, source) for source in self.after]

    @functools.cached_property
    def _kin(self) -> list[set[int]]:
        """By carry, the positions of itself and of those that it takes over, so that it is what they were before."""
        if self._body is not None:
            return self._body._kin
        changing: dict[Value | None, int] = {v: i for i, v in enumerate(self.before) if self.after[i] != v}
        return [{i, *(changing[part] for part in parts if part in changing)} for i, parts in enumerate(self._becomes)]

    def inputs(self, value: Value) -> set[int]:
        """Positions of the carries that a value is made of; `ANEW` stands for what each iteration is given."""
        return {self._index[each] for each, _ in back(self._opened, [value]) if each in self._index}

    def of(self, source: Source | None) -> Decided:
        """What decides about a value, in this iteration and, by way of carries, in earlier ones."""
        trail = Trail()
        return self.onward(self.walk(source, Seen.ALONE, trail), trail)

    def onward(self, pending: list[Reached], trail: Trail) -> Decided:
        """What decides about carries that were reached, in earlier iterations too."""
        at_once = {index for index, _ in pending}
        reached = {*pending}
        while pending:
            index, seen = pending.pop()
            found = self.walk(self.after[index], seen, trail)
            reached.update(found)
            pending += found
        eqns = trail.eqns.values()
        return Decided(
            at_once,
            carries={index for index, _ in reached},
            multiplies=any(map(_multiplies, eqns)),
            draws=any(has(eqn, Trait.DRAWS) for eqn in eqns),
            chose=trail.chose,
            differ={i for i, seen in reached if seen is not Seen.ALONE and is_a(np.floating, self.before[i])},
            again={index for index, seen in reached if seen is Seen.AGAIN},
        )

    def walk(self, source: Source | None, seen: Seen, trail: Trail) -> list[Reached]:
        """The carries that a value reads in its own iteration, and how they are looked at; no choices."""
        pending = [(source, seen)] if isinstance(source, Value) else []
        reached = []
        while pending:
            here = pending.pop()
            if here in trail.seen:
                continue
            trail.seen.add(here)
            value, seen = here
            if self._index.get(value, ANEW) != ANEW:
                reached.append((self._index[value], seen))
            flat = self._opened.maker(value)
            if flat is None or asks_one(flat.eqn):
                continue
            if self._ends(flat, value, seen):
                trail.chose |= not has(flat.eqn, Trait.CHOOSES)  # Nothing is wanted of those anyway.
                continue
            trail.eqns[id(flat.eqn)] = flat.eqn
            if not has(flat.eqn, Trait.DRAWS):
                seen = max(seen, self._looks_at(flat))
                pending += [(operand, seen) for operand in operands(flat, value)]
        return reached

    def _ends(self, flat: Flat, value: Value, seen: Seen) -> bool:
        """Whether what decides ends at an equation: a choice, or a probability that is looked at alone.

        What a network tells by a sigmoid, such as when to halt, is a choice of its own; the difference of two iterates
        through a sigmoid is not. Nor does a choice end what waits for it to come again.
        """
        choices = self._choices
        if choices.by_draw(flat) or (seen is Seen.ALONE and choices.is_probability(flat)):
            return True
        return seen is not Seen.AGAIN and (choices.by_rank(flat) or choices.among(flat, value))

    def _looks_at(self, flat: Flat) -> Seen:
        """Whether an equation gives the difference or the quotient of two computed values, or compares two choices."""
        if len(flat.ins) != 2 or len(flat.values) != 2:
            return Seen.ALONE
        if has(flat.eqn, Trait.COMPARES | Trait.SUBTRACTS) and not is_a(np.floating, flat.ins[0]):
            many = bool(flat.ins[0].aval.shape)  # One choice that comes again is a token.
            return Seen.AGAIN if many and self._are_one(*flat.values) else Seen.ALONE
        numbers = [self._freezing.number(operand) for operand in flat.ins]
        apart = has(flat.eqn, Trait.SUBTRACTS | Trait.DIVIDES) and numbers == [None, None]
        return Seen.APART if apart else Seen.ALONE

    def _are_one(self, value: Value, other: Value) -> bool:
        """Whether two values are one carry, in different iterations."""
        one, two = parts_of(self._opened, value) - {None}, parts_of(self._opened, other) - {None}
        return one != two and not self._carried(one).isdisjoint(self._carried(two))

    def _carried(self, parts: set[Value | None]) -> set[int]:
        """Positions of the carries that parts of a value are, or become."""
        found = {each for i, value in enumerate(self.before) if value in parts for each in self._kin[i]}
        return found.union(index for index, becomes in enumerate(self._becomes) if not parts.isdisjoint(becomes))


def _multiplies(eqn: Eqn) -> bool:
    inside = (inner for jaxpr in inner_jaxprs(eqn) for inner in open_jaxpr(jaxpr).eqns)
    return rule_of(eqn) is Rule.HALF or any(map(_multiplies, inside))


def converges(jaxpr: ClosedJaxpr, ended_by: Callable[[Eqn], Decided]) -> bool:
    """Whether a jaxpr holds a loop that ends by what products compute.

    Args:
        jaxpr: The jaxpr.
        ended_by: Says of a `while` what decides when it ends.
    """
    for eqn in open_jaxpr(jaxpr).eqns:
        if is_while(eqn):
            decided = ended_by(eqn)
            if decided.multiplies and not decided.is_chosen:
                return True
        if any(converges(inner, ended_by) for inner in inner_jaxprs(eqn)):
            return True
    return False


def of_while(parts: WhileParts, body: Body) -> Decided:
    """What decides when a `while` ends."""
    cond, trail = open_jaxpr(parts.cond), Trail()
    inside = Deciders(body.opened, body.freezing, Inputs(body.before, ()), body.after)
    opened = Opened(cond, deep=True)
    state = [Value(0, var) for var in cond.invars[parts.cond_consts :]]
    ends = Deciders(opened, Freezing(opened, state, state), Inputs(state, ()), state, inside)
    reached = ends.walk(opened.source(cond.outvars[0]), Seen.ALONE, trail)
    trail.seen.clear()
    return inside.onward(reached, trail)
