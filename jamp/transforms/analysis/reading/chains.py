"""Walks from an atom to what it was made of, through operations that do not matter for the question."""

from __future__ import annotations

from collections.abc import Mapping

from jamp._compat import Atom, Eqn, Jaxpr, Literal, Var, called_jaxpr, open_jaxpr
from jamp._primitives import Trait, has

Makers = Mapping[Var, Eqn] | Mapping[Atom, Eqn | None]
# What depends on no argument of the program, and the equation that makes it, if this jaxpr has that.
Constants = Mapping[Atom, Eqn | None]


def find_constants(jaxpr: Jaxpr, fixed: frozenset[int] = frozenset()) -> Constants:
    """Variables of a jaxpr that depend on no argument of the program.

    Args:
        jaxpr: The jaxpr.
        fixed: Positions of its inputs that depend on none.
    """
    found: dict[Atom, Eqn | None] = dict.fromkeys([*jaxpr.constvars, *(jaxpr.invars[index] for index in fixed)])
    for eqn in jaxpr.eqns:
        if not eqn.effects and all(isinstance(atom, Literal) or atom in found for atom in eqn.invars):
            found.update(dict.fromkeys(eqn.outvars, eqn))
    return found


def makers(jaxpr: Jaxpr) -> Makers:
    """By variable, the equation that it is a result of."""
    return {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}


def maker(made: Makers, atom: Atom) -> Eqn | None:
    """The equation that an atom is a result of; None for literals and arguments."""
    return None if isinstance(atom, Literal) else made.get(atom)


def moved_from(eqn: Eqn, atom: Atom) -> int:
    """The position of the operand that a result of an equation is elements of, where it moves them."""
    return [*eqn.outvars].index(atom) if len(eqn.invars) == len(eqn.outvars) else 0


def chain(made: Makers, atom: Atom, *, to: int, through: int = Trait.VIEW) -> Eqn | None:
    """The first equation behind an atom that has the traits `to`, through what has `through`.

    Args:
        made: Makers of the jaxpr.
        atom: Where to begin.
        to: One of these has to be a trait of what is looked for.
        through: Traits of the operations that may lie between.
    """
    eqn = maker(made, atom)
    while eqn is not None and not has(eqn, to):
        if not has(eqn, through):
            return None
        atom = eqn.invars[moved_from(eqn, atom)]
        eqn = maker(made, atom)
    return eqn


def is_mask(made: Makers, atom: Atom) -> bool:
    """Whether an atom is made of comparisons, as one-hot rows are: of zeros and ones, moved."""
    eqn = maker(made, atom)
    while eqn is not None:
        if has(eqn, Trait.CONVERTS) and eqn.invars[0].aval.dtype == bool:
            return True
        if has(eqn, Trait.CALLS):
            inner = open_jaxpr(called_jaxpr(eqn.params))
            return is_mask(makers(inner), inner.outvars[[*eqn.outvars].index(atom)])
        if not has(eqn, Trait.VIEW | Trait.MOVES):
            return False
        atom = eqn.invars[moved_from(eqn, atom)]
        eqn = maker(made, atom)
    return False


def is_zero(atom: Atom) -> bool:
    """Whether an atom is the number zero, written in the program."""
    return isinstance(atom, Literal) and getattr(atom.val, "ndim", 0) == 0 and bool(atom.val == 0)
