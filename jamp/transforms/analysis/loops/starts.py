"""What a loop to convergence is given: a guess, what is computed from that guess, and what it compares with.

A solver carries a point with its value, its gradient, or the step before. The point may be anything, so that a network
that guesses it is half. The others belong to that point: with the gradient of another the first steps of a solver go
elsewhere, as if it had been started there. They are computed as they are inside of the loop, as traced. They are what
is computed from the point, and what the loop computes anew of each point that it goes to: beside a number, as in
`(0.3, f(0.3))`, nothing shows what was computed from what. A point and its value may lie in one array too.

So are its limits: what it only compares with, and what is computed from something else that it reads. A line search
asks whether a step lowers the value that it had before. With that value in half it asks whether the step is better than
a rounding error, and near the minimum no step ever is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jamp._compat import Atom, Eqn, Jaxpr, Literal, Var
from jamp._primitives import MOVED, Trait, has
from jamp.transforms.analysis.loops.body import Body
from jamp.transforms.program.want import Want, combine


class Starts:
    """Which equations of a jaxpr compute what a loop starts from, or compares with, of something else that it reads.

    Args:
        jaxpr: The jaxpr, which is gone through from last to first.
        wants: What is wanted of its results.
    """

    def __init__(self, jaxpr: Jaxpr, wants: Sequence[Want]) -> None:
        self._eqns = jaxpr.eqns
        self._reached: dict[Want, set[Atom | None]] = {want: set() for want in Want if want.open}
        self._derived: dict[Want, set[int]] = {want: set() for want in Want if want.open}
        self._is_given = False  # Whether anything is a start or a limit. In most jaxprs nothing is.
        self._note(jaxpr.outvars, wants, None)

    def settle(self, eqn: Eqn, votes: dict[Var, Want]) -> Want | None:
        """Decides what is wanted of the results of an equation that a loop is given; a call does so inside.

        Returns:
            For the sake of what they are wanted exactly, if that is a start or a limit.
        """
        if not self._is_given:
            return None
        decides = any(votes.get(var, Want.NONE).decides for var in eqn.outvars)
        given = {var: votes[var] for var in eqn.outvars if var in votes and votes[var].open}
        derived = {var: want for var, want in given.items() if id(eqn) in self._derived[want]}
        if derived or not has(eqn, Trait.CALLS):
            votes.update({var: Want.EXACT if var in derived else Want.DIVISOR for var in given})
        return combine(*derived.values()) if derived and not decides else None

    def passed_on(self, eqn: Eqn, wants: Sequence[Want], given: Want) -> list[Want]:
        """What an equation wants that is computed exactly for what a loop is given: nothing that comes before it."""
        before = [given if atom in self._reached[given] else Want.DIVISOR for atom in map(_variable, eqn.invars)]
        return [start if want.decides else want for start, want in zip(before, wants, strict=True)]

    def add(self, eqn: Eqn, wants: Sequence[Want]) -> None:
        """Takes note of what a loop, or a call with one inside, is given; its other operands stay as they are."""
        self._note(eqn.invars, wants, eqn)

    def _note(self, atoms: Sequence[Atom], wants: Sequence[Want], end: Eqn | None) -> None:
        if not any(want.open for want in wants):
            return
        self._is_given = True
        wanted: dict[Atom | None, Want] = {}
        for atom, want in zip(map(_variable, atoms), wants, strict=True):
            wanted[atom] = combine(wanted.get(atom, Want.NONE), want)
        values = {atom for atom, want in wanted.items() if want is Want.VALUE}
        starts = {atom for atom, want in wanted.items() if want is Want.START} | values
        limits = {atom for atom, want in wanted.items() if want is Want.LIMIT}
        if starts:
            self._reach(Want.START, starts, wanted.keys() - starts, end)
        if values:
            self._reach_back(values, wanted.keys() - values, end)
        if limits:
            self._reach(Want.LIMIT, {atom for atom, want in wanted.items() if want >= Want.DIVISOR}, set(), end)

    def _reach(self, given: Want, atoms: set[Atom | None], fixed: set[Atom | None], end: Eqn | None) -> None:
        """Finds what is computed from some values before an equation, other than what is fixed."""
        reached = {*atoms} - {None}
        for eqn in self._eqns:
            if eqn is end:
                break
            if not reached.isdisjoint(map(_variable, eqn.invars)):
                self._derived[given].add(id(eqn))
                reached.update(var for var in eqn.outvars if var not in fixed)
        self._reached[given] |= reached

    def _reach_back(self, values: set[Atom | None], fixed: set[Atom | None], end: Eqn | None) -> None:
        """Finds what values at points are computed from before an equation; nothing that comes before the points."""
        before = [*itertools.takewhile(lambda eqn: eqn is not end, self._eqns)]
        fixed = fixed | _points(before, values)
        reached = {*values}
        for eqn in reversed(before):
            if not reached.isdisjoint(eqn.outvars):
                self._derived[Want.VALUE].add(id(eqn))
                reached.update({*map(_variable, eqn.invars)} - fixed)
        self._reached[Want.VALUE] |= reached


def _points(eqns: Sequence[Eqn], values: set[Atom | None]) -> set[Atom | None]:
    """Of what values are put together of, what other parts are computed from, and is computed from none."""
    parts = {*values}
    for eqn in reversed(eqns):
        if has(eqn, MOVED | Trait.ASSEMBLES) and not parts.isdisjoint(eqn.outvars):
            parts = parts.difference(eqn.outvars).union(map(_variable, eqn.invars))
    made_of: dict[Atom | None, set[Atom | None]] = {part: {part} for part in parts - {None}}
    points: set[Atom | None] = set()
    for eqn in eqns:
        read = set[Atom | None]().union(*(made_of.get(atom, ()) for atom in map(_variable, eqn.invars)))
        for var in eqn.outvars if read else ():
            points |= read if var in parts else set()
            made_of[var] = read | made_of.get(var, set())
    return {point for point in points if made_of[point] == {point}}


def changed(body: Body) -> set[int]:
    """Positions of the carries that a loop body does not hand on as they are."""
    carries = body.jaxpr.invars[body.first : body.first + body.carries]
    pairs = zip(carries, body.jaxpr.outvars[: body.carries], strict=True)
    return {index for index, (before, after) in enumerate(pairs) if before is not after}


def only_compared(operands: Sequence[Atom], body: Body, consts: int) -> list[bool]:
    """Which operands of a loop go into nothing that changes, other than by way of comparisons.

    Args:
        operands: Those of the loop: constants, of its condition too, and carries.
        body: Its body.
        consts: Number of all constants.
    """
    changing, jaxpr = changed(body), body.jaxpr
    needed = {_variable(jaxpr.outvars[index]) for index in changing}
    for eqn in reversed(jaxpr.eqns):
        if not has(eqn, Trait.COMPARES) and not needed.isdisjoint(eqn.outvars):
            needed.update(map(_variable, eqn.invars))
    given = [_variable(atom) for atom in operands]
    fed = {atom for atom, var in zip(given[consts - body.first :], jaxpr.invars, strict=True) if var in needed}
    fed.update(given[consts + index] for index in changing)
    return [atom not in fed for atom in given]


def _variable(atom: Atom) -> Atom | None:
    return None if isinstance(atom, Literal) else atom
