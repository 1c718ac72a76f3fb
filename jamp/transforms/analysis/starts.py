"""What a loop to convergence starts from: a guess, and what is computed from that guess before the first iteration.

A solver carries a point with its value, its gradient, or the step before. The point may be anything, so that a network
that guesses it is half. The others belong to that point: with the gradient of another the first steps of a solver go
elsewhere, as if it had been started there. They are computed as they are inside of the loop, as traced.
"""

from __future__ import annotations

from collections.abc import Sequence

from jamp._compat import Atom, Eqn, Jaxpr, Literal, Var
from jamp._primitives import Trait, has
from jamp.transforms.program.want import Want


class Starts:
    """Which equations of a jaxpr compute what a loop starts from of something else that it starts from.

    Args:
        jaxpr: The jaxpr, which is gone through from last to first.
        wants: What is wanted of its results.
    """

    def __init__(self, jaxpr: Jaxpr, wants: Sequence[Want]) -> None:
        self._eqns = jaxpr.eqns
        self._reached: set[Atom | None] = set()
        self._derived: set[int] = set()
        self._reach(jaxpr.outvars, wants)

    def settle(self, eqn: Eqn, votes: dict[Var, Want]) -> bool:
        """Decides what is wanted of the results of an equation that a loop starts from; a call does so inside.

        Returns:
            Whether they are wanted exactly for the sake of the start.
        """
        decides = any(votes.get(var) is Want.EXACT for var in eqn.outvars)
        starts = [var for var in eqn.outvars if votes.get(var) is Want.START]
        derived = id(eqn) in self._derived
        if derived or not has(eqn, Trait.CALLS):
            votes.update(dict.fromkeys(starts, Want.EXACT if derived else Want.DIVISOR))
        return bool(starts) and derived and not decides

    def passed_on(self, eqn: Eqn, wants: Sequence[Want]) -> list[Want]:
        """What an equation wants that is computed exactly for the sake of the start: nothing that comes before it."""
        before = [Want.START if atom in self._reached else Want.DIVISOR for atom in map(_variable, eqn.invars)]
        return [start if want is Want.EXACT else want for start, want in zip(before, wants, strict=True)]

    def add(self, eqn: Eqn, wants: Sequence[Want]) -> None:
        """Takes note of what a loop, or a call with one inside, starts from; its other operands stay as they are."""
        self._reach(eqn.invars, wants, eqn)

    def _reach(self, atoms: Sequence[Atom], wants: Sequence[Want], end: Eqn | None = None) -> None:
        """Finds what is computed from the starts among some values, before an equation."""
        starts = {atom for atom, want in zip(map(_variable, atoms), wants, strict=True) if want is Want.START}
        if not starts:
            return
        fixed = {*map(_variable, atoms)} - starts
        reached = {*starts}
        for eqn in self._eqns:
            if eqn is end:
                break
            if not reached.isdisjoint(map(_variable, eqn.invars)):
                self._derived.add(id(eqn))
                reached.update(var for var in eqn.outvars if var not in fixed)
        self._reached |= reached


def _variable(atom: Atom) -> Atom | None:
    return None if isinstance(atom, Literal) else atom
