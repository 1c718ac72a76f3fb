"""What a state is multiplied with from one iteration to the next: the gates and decays of a recurrence.

A state that adds up over hundreds of steps is float32, and so has to be its decay: in bfloat16 the number below 1 is
0.996, so that a gate of 0.999 keeps everything, or loses in one step what it should in four. What is added to a state
may be half all the same: its error is small beside itself. Not so where it is multiplied with what a gate leaves, as in
`z * h + (1 - z) * n`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Mapping
from typing import NamedTuple

from jamp._compat import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var, called_jaxpr, open_jaxpr
from jamp._dtypes import is_differentiable
from jamp._primitives import SCALES, SHOWN, Rule, Trait, has, is_outer, rule_of
from jamp.transforms.analysis.reading.chains import Makers, maker, makers
from jamp.transforms.analysis.reading.flat import called_jaxprs

_CALLS = Trait.CALLS | Trait.REMAT | Trait.CUSTOM_JVP
_HANDS_ON = Trait.CONTINUES | Trait.LIMITS

Moved = dict[Atom, Eqn | None]


class States(NamedTuple):
    """The states of a recurrence that a jaxpr is given.

    Attributes:
        inputs: Their positions. Counters among them have no gates.
        results: As how many of its first results they may go on; by default they may as any.
    """

    inputs: frozenset[int]
    results: int | None = None


NO_STATES = States(frozenset())


class Gates(NamedTuple):
    """The gates in a jaxpr.

    Attributes:
        scaled: By equation, the positions of operands that are gates.
        moved: What continues states, element by element.
        known_by: Equal to that of other states where the same are gates, in the jaxprs inside too.
    """

    scaled: Mapping[int, frozenset[int]]
    moved: Container[Atom]
    known_by: Hashable = None

    def given(self, eqn: Eqn, first: int = 0) -> States:
        """The states that an equation gives a jaxpr inside, from its `first` operand on."""
        atoms = enumerate(eqn.invars[first:])
        return States(frozenset(i for i, atom in atoms if not isinstance(atom, Literal) and atom in self.moved))


NO_GATES = Gates({}, ())


class GateFinder:
    """Finds gates; remembers them, since most jaxprs are looked at with several states, and have gates with none."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, States], tuple[ClosedJaxpr, Gates]] = {}

    def of(self, jaxpr: ClosedJaxpr, states: States) -> Gates:
        """What multiplies or divides states on their way to the results of a jaxpr, and what is left of one.

        Args:
            jaxpr: The jaxpr.
            states: Its states.
        """
        key = id(jaxpr), states
        if key not in self._known:
            self._known[key] = jaxpr, self._find(open_jaxpr(jaxpr), states)
        return self._known[key][1]

    def _find(self, jaxpr: Jaxpr, states: States) -> Gates:
        found = _gates(jaxpr, states)
        known_by: set[Hashable] = {*found.scaled.items()}
        for eqn in jaxpr.eqns:
            if rule_of(eqn) is Rule.RECURSE and not has(eqn, Trait.LOOPS):  # A loop has states of its own.
                branches, first = called_jaxprs(eqn)
                inside = found.given(eqn, first)
                of_branches = [self.of(branch, inside).known_by for branch in branches] if inside.inputs else []
                known_by.update((id(eqn), i, known) for i, known in enumerate(of_branches) if known)
        return found._replace(known_by=frozenset(known_by) or None)


def _gates(jaxpr: Jaxpr, states: States) -> Gates:
    inputs = [jaxpr.invars[index] for index in states.inputs if is_differentiable(jaxpr.invars[index].aval)]
    moved, made = _moved(jaxpr, inputs), makers(jaxpr)
    found: dict[int, set[int]] = defaultdict(set)
    pending: list[Atom] = [atom for atom in jaxpr.outvars[: states.results] if _is_in(atom, moved)]
    seen: set[int] = set()
    while pending:
        eqn = moved[pending.pop()]
        if eqn is None or id(eqn) in seen:
            continue
        seen.add(id(eqn))
        pending += [atom for atom in eqn.invars if _is_in(atom, moved)]
        others = [index for index, atom in enumerate(eqn.invars) if not isinstance(atom, Literal) and atom not in moved]
        if has(eqn, SCALES) or is_outer(eqn):
            found[id(eqn)].update(others)
        elif has(eqn, Trait.ADDS):
            for index in others:
                for taken, operand in _left_over(made, eqn.invars[index]):
                    found[id(taken)].add(operand)
    return Gates({eqn: frozenset(positions) for eqn, positions in found.items() if positions}, moved)


def _is_in(atom: Atom, moved: Moved) -> bool:
    return not isinstance(atom, Literal) and atom in moved


def _moved(jaxpr: Jaxpr, states: Iterable[Var]) -> Moved:
    """What continues states, element by element, each with the equation that makes it."""
    moved: Moved = dict.fromkeys(states)
    for eqn in jaxpr.eqns:
        if has(eqn, _CALLS):
            inner = open_jaxpr(called_jaxpr(eqn.params))
            given = [var for var, atom in zip(inner.invars, eqn.invars, strict=True) if _is_in(atom, moved)]
            inside = _moved(inner, given) if given else {}
            moved.update(
                (var, eqn) for var, atom in zip(eqn.outvars, inner.outvars, strict=True) if _is_in(atom, inside)
            )
        elif has(eqn, _HANDS_ON) or is_outer(eqn):
            # Of a choice, the first operand says which.
            operands = eqn.invars[1:] if has(eqn, Trait.SELECTS) else eqn.invars
            moved.update(dict.fromkeys(eqn.outvars, eqn) if any(_is_in(atom, moved) for atom in operands) else {})
    return moved


def _left_over(made: Makers, term: Atom) -> Iterable[tuple[Eqn, int]]:
    """The subtractions from a number that a term is a multiple of, and what they take off it."""
    pending, seen = [term], set[int]()
    while pending:
        eqn = maker(made, pending.pop())
        if eqn is None or id(eqn) in seen:
            continue
        seen.add(id(eqn))
        if has(eqn, Trait.SUBTRACTS) and isinstance(eqn.invars[0], Literal):
            yield eqn, 1
        elif has(eqn, SCALES | SHOWN) and len(eqn.outvars) == 1:
            pending += [atom for atom in eqn.invars if not isinstance(atom, Literal)]
