"""What decides about a flag: walks back from it, through iterations, to what it is computed of.

A walk ends at discrete choices: at what `argmax` or a sort chose, at a comparison with a random number, as by which
samplers draw and proposals are accepted, and at a probability that is looked at alone, as where a network tells by a
sigmoid that it has finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jamp._compat import Eqn, WhileParts, inner_jaxprs, open_jaxpr
from jamp._primitives import Rule, Trait, has, rule_of
from jamp.transforms.analysis.flat import Flat, Opened, Source, Value, operands
from jamp.transforms.analysis.freezing import Freezing, is_a

# Stands for what each iteration is given anew.
ANEW = -1
# The position of a carry, and whether it is one of two values whose difference is looked at.
Reached = tuple[int, bool]


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
        differ: Positions of the carries of which the difference is looked at.
    """

    at_once: set[int]
    carries: set[int]
    multiplies: bool
    draws: bool
    chose: bool
    differ: set[int]

    def converges(self, states: set[int]) -> bool:
        """Whether states decide that they are frozen, by way of products."""
        return self.multiplies and not self.draws and bool(self.carries & states)


class Trail:
    """What a walk has seen.

    Attributes:
        seen: Values, and whether each is one of two whose difference is looked at.
        eqns: The equations that it went through.
        chose: Whether it ended at a comparison with a random number, or at a probability.
    """

    def __init__(self) -> None:
        self.seen: set[tuple[Value, bool]] = set()
        self.eqns: dict[int, Eqn] = {}
        self.chose = False


class Deciders:
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
                pending += () if flat is None else operands(flat, source)
        return {self._index[source] for source in seen if source in self._index}

    def of(self, source: Source | None) -> Decided:
        """What decides about a value, in this iteration and, by way of carries, in earlier ones."""
        trail = Trail()
        return self.onward(self.walk(source, False, trail), trail)

    def onward(self, reached: list[Reached], trail: Trail) -> Decided:
        """What decides about carries that were reached, in earlier iterations too."""
        at_once = {index for index, _ in reached}
        differ = {index for index, apart in reached if apart}
        carries: set[int] = set()
        while reached:
            index, apart = reached.pop()
            carries.add(index)
            found = self.walk(self.after[index], apart, trail)
            differ.update(index for index, apart in found if apart)
            reached += found
        eqns = trail.eqns.values()
        multiplies, draws = any(map(_multiplies, eqns)), any(has(eqn, Trait.DRAWS) for eqn in eqns)
        return Decided(at_once, carries, multiplies, draws, trail.chose, differ)

    def walk(self, source: Source | None, apart: bool, trail: Trail) -> list[Reached]:
        """The carries that a value reads in its own iteration, and whether in a difference; no choices."""
        pending = [(source, apart)] if isinstance(source, Value) else []
        reached = []
        while pending:
            here = pending.pop()
            if here in trail.seen:
                continue
            trail.seen.add(here)
            value, apart = here
            if self._index.get(value, ANEW) != ANEW:
                reached.append((self._index[value], apart))
            flat = self._opened.maker(value)
            if flat is None or _is_finite(flat.eqn):
                continue
            if self._chooses(flat, apart):
                trail.chose |= not has(flat.eqn, Trait.CHOOSES)  # Nothing is wanted of those anyway.
                continue
            trail.eqns[id(flat.eqn)] = flat.eqn
            if not has(flat.eqn, Trait.DRAWS):
                apart = apart or self._tells_apart(flat)
                pending += [(operand, apart) for operand in operands(flat, value)]
        return reached

    def _chooses(self, flat: Flat, apart: bool) -> bool:
        """Whether what decides ends at an equation: a choice, or a probability that is looked at alone.

        What a network tells by a sigmoid, such as when to halt, is a choice of its own; the difference of two iterates
        through a sigmoid is not.
        """
        eqn = flat.eqn
        if has(eqn, Trait.CHOOSES):
            return len(eqn.invars) > 1 or not has(eqn, Trait.SORTS)
        if has(eqn, Trait.COMPARES):
            return any(map(self._is_drawn, flat.values))
        return has(eqn, Trait.PROBABILITY) and not apart

    def _is_drawn(self, value: Value) -> bool:
        """Whether a value is a random number, made of nothing else that is floating."""
        seen: set[Value] = set()
        pending, draws = [value], False
        while pending:
            source = pending.pop()
            if source in seen:
                continue
            seen.add(source)
            flat = self._opened.maker(source)
            if flat is None and is_a(np.floating, source):
                return False
            if flat is not None and has(flat.eqn, Trait.DRAWS):
                draws = True
            elif flat is not None:
                pending += operands(flat, source)
        return draws

    def _tells_apart(self, flat: Flat) -> bool:
        """Whether an equation gives the difference, or the quotient, of two computed values."""
        numbers = [self._freezing.number(operand) for operand in flat.ins]
        return has(flat.eqn, Trait.SUBTRACTS | Trait.DIVIDES) and numbers == [None, None]


def _is_finite(eqn: Eqn) -> bool:
    """Whether an equation asks whether a number is finite, which is no close call."""
    return has(eqn, Trait.COMPARES) and len(eqn.invars) == 1


def _multiplies(eqn: Eqn) -> bool:
    inside = (inner for jaxpr in inner_jaxprs(eqn) for inner in open_jaxpr(jaxpr).eqns)
    return rule_of(eqn) is Rule.HALF or any(map(_multiplies, inside))


def is_chosen(parts: WhileParts) -> bool:
    """Whether discrete choices alone decide when a `while` ends, so that it is no iteration to convergence.

    Generation that ends at a token, proposals until one is accepted, a network that halts itself. A loop that compares
    computed values besides, by way of products or as a difference, is an iteration all the same.
    """
    decided, carries = of_while(parts), open_jaxpr(parts.body).invars[parts.body_consts :]
    differs = any(is_a(np.floating, Value(0, carries[index])) for index in decided.differ)
    return decided.chose and not decided.multiplies and not differs


def of_while(parts: WhileParts) -> Decided:
    """What decides when a `while` ends."""
    cond, body = open_jaxpr(parts.cond), open_jaxpr(parts.body)
    opened, trail = Opened(cond, deep=True), Trail()
    state = [Value(0, var) for var in cond.invars[parts.cond_consts :]]
    ends = Deciders(opened, Freezing(opened, state, state), Inputs(state, ()), state)
    reached = ends.walk(opened.source(cond.outvars[0]), False, trail)
    trail.seen.clear()
    opened = Opened(body, deep=True)
    before = [Value(0, var) for var in body.invars[parts.body_consts :]]
    after = [opened.source(atom) for atom in body.outvars]
    return Deciders(opened, Freezing(opened, before, after), Inputs(before, ()), after).onward(reached, trail)
