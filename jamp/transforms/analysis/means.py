"""Products that are weighted means: with a vector that is divided by its own sum, or of points in space.

A product with a vector of shares is a mean, as `jnp.mean` is one. Not so a softmax, which makes weights of scores: with
one query it is a vector too, and its product an attention. Of points it is a mean whatever makes the shares: that is as
far from zero as the points are, and each reader looks at it from a place among them. With the mean and its shares in
half the gradient of AlphaFold's invariant point attention was up to 10 times as far off as careful code's.
"""

from __future__ import annotations

from typing import NamedTuple

from jamp._compat import Atom, Eqn, Jaxpr, Literal, Var, nominal_size
from jamp._primitives import Trait, having, traits_of, traits_of_all
from jamp.transforms.analysis.axes import free_sizes

_VIEWS = Trait.VIEW | Trait.MOVES | Trait.CONVERTS
_BY_EPSILON = Trait.ADDS | Trait.EXTREMUM
_OF_MEANS = _VIEWS | Trait.EXPONENTIAL | Trait.SUMS_AXES | Trait.DIVIDES | Trait.MATRIX | _BY_EPSILON


class Means(NamedTuple):
    """The results of products that are weighted means.

    Attributes:
        of_vectors: Those by a vector of shares.
        of_points: Those of points in space.
    """

    of_vectors: frozenset[Var] = frozenset()
    of_points: frozenset[Var] = frozenset()


def means(jaxpr: Jaxpr, coordinates: int) -> Means:
    """The products in a jaxpr whose one operand is shares, one for each element that is added up.

    Args:
        jaxpr: The jaxpr.
        coordinates: The most that a point in space has.
    """
    present = traits_of_all(jaxpr.eqns)
    if not all(present & trait for trait in (Trait.SUMS_AXES, Trait.DIVIDES, Trait.MATRIX)):
        return Means()
    origins: dict[Atom, Atom] = {}
    sums: dict[Atom | None, Atom] = {}  # By sum, what of.
    shares: set[Atom | None] = set()
    softmaxes: set[Atom | None] = set()
    exponentials: set[Atom | None] = set()
    of_vectors: set[Var] = set()
    of_points: set[Var] = set()
    for eqn in having(jaxpr.eqns, _OF_MEANS):
        traits = traits_of(eqn)
        operands = [None if isinstance(atom, Literal) else origins.get(atom, atom) for atom in eqn.invars]
        one = operands[0] if operands else None
        if one is None:
            continue
        if traits & _VIEWS:
            origins[eqn.outvars[0]] = one
        elif traits & Trait.EXPONENTIAL:
            exponentials.add(eqn.outvars[0])
        elif traits & Trait.SUMS_AXES:
            sums[eqn.outvars[0]] = one
        elif traits & _BY_EPSILON:
            if one in sums and None in operands:  # As in `w / (w.sum() + 1e-8)`.
                sums[eqn.outvars[0]] = sums[one]
        elif traits & Trait.DIVIDES and len(operands) == 2 and sums.get(operands[1]) is one:
            (softmaxes if one in exponentials else shares).add(eqn.outvars[0])
        elif traits & Trait.MATRIX and (shares or softmaxes):
            sides = zip(operands, free_sizes(eqn), _are_points(eqn, coordinates)[::-1], strict=True)
            for operand, size, of_space in sides:
                if of_space and (operand in shares or operand in softmaxes):
                    of_points.update(eqn.outvars)
                elif size == 1 and operand in shares:
                    of_vectors.update(eqn.outvars)
    return Means(frozenset(of_vectors), frozenset(of_points))


def _are_points(eqn: Eqn, coordinates: int) -> list[bool]:
    """For each operand of a matrix product, whether it is points: rows or columns of a few numbers."""
    contracted, batch = eqn.params["dimension_numbers"]
    shapes = [atom.aval.shape for atom in eqn.invars]
    return [
        size <= coordinates or (len(shape) - 1 not in (*of_sum, *of_batch) and nominal_size(shape[-1]) <= coordinates)
        for shape, size, of_sum, of_batch in zip(shapes, free_sizes(eqn), contracted, batch, strict=True)
    ]
