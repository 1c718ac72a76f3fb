"""Which operands an operation hands on to its result, whole or in places, and what else decides about that.

A sum over the iterations of a loop that is written out goes on behind a limit (a relu, a clip), a choice (of what is
painted, and what is given) and a factor of signs or comparisons. Not so behind other factors: a gate of a recurrent net
is one, and so is the derivative of the loss in the gradient of a square, where the forward pass would go on in the
backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jamp._compat import Atom, Eqn, Literal, Var, called_jaxpr, open_jaxpr
from jamp._primitives import FUNCTIONS, SCALES, SHOWN, Trait, has, traits_of
from jamp.transforms.program.flow import num_elements


class Passage(NamedTuple):
    """A result that is an operand of its equation.

    Attributes:
        result: The result.
        handed_on: The operand, or several of which it is each in places.
        others: What else it is made of.
        whole: Whether it is the operand everywhere, scaled or moved by a number at most.
    """

    result: Var
    handed_on: Sequence[Atom]
    others: Sequence[Atom] = ()
    whole: bool = False


class Passages:
    """Finds the passages of a jaxpr, equation after equation.

    Attributes:
        learned: What products have computed.
    """

    def __init__(self, functions: dict[int, list[frozenset[int]]]) -> None:
        """Takes what is known of functions, by the id of their jaxpr, and adds to it."""
        self.learned: set[Atom] = set()
        self._counted: set[Atom] = set()  # Made of counters, signs and comparisons.
        self._functions = functions

    def through(self, eqn: Eqn, multiplies: bool) -> list[Passage]:
        """The passages of the next equation, and whether it multiplies matrices, as functions may."""
        data, traits = _data(eqn.invars), traits_of(eqn)
        found = [] if multiplies else list(self._find(eqn, traits, data))
        if multiplies or not self.learned.isdisjoint(data):
            self.learned.update(eqn.outvars)
        counts = traits & Trait.COUNTS or (traits & Trait.CONVERTS and eqn.invars[0].aval.dtype.kind in "biu")
        if counts or (traits & Trait.INTEGRAL and data and self._counted.issuperset(data)):
            self._counted.update(eqn.outvars)
        return found

    def _find(self, eqn: Eqn, traits: int, data: list[Atom]) -> Iterator[Passage]:
        result = eqn.outvars[0] if eqn.outvars else None
        if traits & FUNCTIONS:
            for var, positions in zip(eqn.outvars, self._of_function(eqn), strict=True):
                handed_on = _data([eqn.invars[index] for index in positions])
                if handed_on:
                    yield Passage(var, handed_on, [atom for atom in data if atom not in handed_on])
        elif result is None or not data:
            return
        elif traits & SHOWN:
            yield Passage(result, data[:1], whole=True)
        elif traits & Trait.SELECTS:
            yield Passage(result, _data(eqn.invars[1:]), data[:1])
        elif traits & Trait.LIMITS:
            yield Passage(result, data)
        elif traits & (Trait.ADDS | SCALES) and len(eqn.invars) == 2:
            yield from self._computed(eqn, result, data)

    def _computed(self, eqn: Eqn, result: Var, data: list[Atom]) -> Iterator[Passage]:
        """The operand that a number is added to, or that is scaled by a number, by signs or by a mask."""
        large = [atom for atom in data if num_elements(atom.aval) > 1]
        if has(eqn, Trait.DIVIDES) and eqn.invars[0] not in large:
            return
        if has(eqn, Trait.ADDS):
            if len(data) == 1 or (len(large) == 1 and self.learned.isdisjoint(set(data) - set(large))):
                yield Passage(result, large or data, whole=True)
        elif len(large) == 1:
            yield Passage(result, large, whole=True)
        elif len(large) == 2:
            handed_on = [atom for atom in large if atom not in self._counted]
            if len(handed_on) == 1 and has(eqn, Trait.MULTIPLIES):
                yield Passage(result, handed_on, [atom for atom in large if atom is not handed_on[0]])

    def _of_function(self, eqn: Eqn) -> list[frozenset[int]]:
        """For each result of a function, the positions of the operands that it hands on."""
        jaxpr = open_jaxpr(called_jaxpr(eqn.params))
        if id(jaxpr) not in self._functions:
            inside = Passages(self._functions)
            inside.learned.update(var for var in jaxpr.invars if num_elements(var.aval) > 1)
            made: dict[Atom, frozenset[int]] = {var: frozenset({index}) for index, var in enumerate(jaxpr.invars)}
            for inner in jaxpr.eqns:
                for passage in inside.through(inner, multiplies=False):
                    made[passage.result] = frozenset().union(*(made.get(atom, ()) for atom in passage.handed_on))
            none = frozenset()
            self._functions[id(jaxpr)] = [
                none if isinstance(var, Literal) else made.get(var, none) for var in jaxpr.outvars
            ]
        return self._functions[id(jaxpr)]


def _data(atoms: Sequence[Atom]) -> list[Atom]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]
