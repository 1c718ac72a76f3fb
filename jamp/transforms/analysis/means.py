"""Weighted means: products with a vector that is divided by its own sum, which are sums as `jnp.mean` is one.

Not so a softmax, which makes weights of scores: with one query it is a vector too, and its product an attention.
"""

from __future__ import annotations

from jamp._compat import Atom, Jaxpr, Literal, Var
from jamp._primitives import Trait, has
from jamp.transforms.analysis.shapes import free_sizes

_VIEWS = Trait.VIEW | Trait.MOVES | Trait.CONVERTS


def means(jaxpr: Jaxpr) -> frozenset[Var]:
    """The results of products in a jaxpr whose one operand is shares, one for each element that is added up."""
    origins: dict[Atom, Atom] = {}
    sums: dict[Atom | None, Atom] = {}  # By sum, what of.
    shares: set[Atom | None] = set()
    exponentials: set[Atom | None] = set()
    found: set[Var] = set()
    for eqn in jaxpr.eqns:
        operands = [None if isinstance(atom, Literal) else origins.get(atom, atom) for atom in eqn.invars]
        one = operands[0] if operands else None
        if one is None:
            continue
        if has(eqn, _VIEWS):
            origins[eqn.outvars[0]] = one
        elif has(eqn, Trait.EXPONENTIAL):
            exponentials.add(eqn.outvars[0])
        elif has(eqn, Trait.SUMS_AXES) and one not in exponentials:
            sums[eqn.outvars[0]] = one
        elif has(eqn, Trait.DIVIDES) and len(operands) == 2 and sums.get(operands[1]) is one:
            shares.add(eqn.outvars[0])
        elif shares and has(eqn, Trait.MATRIX):
            sizes = zip(operands, free_sizes(eqn), strict=True)
            if any(size == 1 and operand in shares for operand, size in sizes):
                found.update(eqn.outvars)
    return frozenset(found)
