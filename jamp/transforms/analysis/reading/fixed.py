"""Which inputs of a jaxpr are fixed, as they depend on no argument of the program, and of which of them it matters.

Products alone ask what their operands are made of. In a solver the tolerances and the ends of an interval are fixed in
one loop and not in the next, which changes nothing that any product reads: what is wanted inside is the same. Of a
neural ODE half of the passes over its loops differed in nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from jamp._compat import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, open_jaxpr
from jamp._primitives import PRODUCTS, Rule, Trait, has, holds, rule_of
from jamp.transforms.analysis.reading.chains import Constants, find_constants
from jamp.transforms.analysis.reading.flat import called_jaxprs, loop_body, loop_counts


def positions(fixed: Sequence[bool]) -> frozenset[int]:
    """Where a sequence is true."""
    return frozenset(index for index, is_fixed in enumerate(fixed) if is_fixed)


def in_body(eqn: Eqn, fixed: Sequence[bool]) -> frozenset[int]:
    """Positions of the inputs of a loop's body that are fixed, by which operands of the loop are: carries never."""
    _, given = loop_body(eqn, fixed)
    consts, carries = loop_counts(eqn)
    return positions([*given[:consts], *[False] * carries, *given[consts + carries :]])


class FixedInputs:
    """Tells of which fixed inputs of jaxprs it matters that they are; remembers what it told."""

    def __init__(self) -> None:
        self._told: dict[tuple[int, frozenset[int]], frozenset[int]] = {}
        self._jaxprs: list[ClosedJaxpr] = []  # Whose identities are remembered.

    def that_matter(self, closed: ClosedJaxpr, fixed: frozenset[int]) -> frozenset[int]:
        """The positions among `fixed` of what products read, or that is made into what they read with others of them.

        If only these are fixed, products in the jaxpr, and in those inside, read as many constants.

        Args:
            closed: The jaxpr.
            fixed: Positions of its inputs that depend on no argument of the program.
        """
        key = id(closed), fixed
        if key not in self._told:
            self._jaxprs.append(closed)
            jaxpr = open_jaxpr(closed)
            self._told[key] = self._read(jaxpr, fixed) if fixed and holds(jaxpr.eqns, PRODUCTS) else frozenset()
        return self._told[key]

    def _read(self, jaxpr: Jaxpr, fixed: frozenset[int]) -> frozenset[int]:
        constants = find_constants(jaxpr, fixed)
        read: set[Atom] = set()
        for eqn in reversed(jaxpr.eqns):
            asked = eqn.invars if not read.isdisjoint(eqn.outvars) else self._asked(eqn, constants)
            read.update(atom for atom in asked if not isinstance(atom, Literal) and atom in constants)
        return frozenset(index for index in fixed if jaxpr.invars[index] in read)

    def _asked(self, eqn: Eqn, constants: Constants) -> Sequence[Atom]:
        """The operands of a product, or those of an equation with jaxprs inside that products there read."""
        if rule_of(eqn) is not Rule.RECURSE:
            return eqn.invars if has(eqn, PRODUCTS) else ()
        fixed = [isinstance(atom, Literal) or atom in constants for atom in eqn.invars]
        if has(eqn, Trait.LOOPS):
            body, given = loop_body(eqn, eqn.invars)
            return [given[index] for index in self.that_matter(body, in_body(eqn, fixed))]
        branches, first = called_jaxprs(eqn)
        inside = positions(fixed[first:])
        return [eqn.invars[first + index] for each in branches for index in self.that_matter(each, inside)]
