"""Products that are weighted means: with a vector that is divided by its own sum, of points in space, of clusters.

A product with a vector of shares is a mean, as `jnp.mean` is one. Not so a softmax, which makes weights of scores: with
one query it is a vector too, and its product an attention. Of points it is a mean whatever makes the shares: that is as
far from zero as the points are, and each reader looks at it from a place among them. With the mean and its shares in
half the gradient of AlphaFold's invariant point attention was up to 10 times as far off as careful code's. So is the
centre of a cluster, the sum of what belongs to it by shares over the sum of these: an empty one was NaN in float16.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
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
    search = _Search(coordinates)
    for eqn in having(jaxpr.eqns, _OF_MEANS):
        search.look_at(eqn)
    return Means(frozenset(search.of_vectors), frozenset(search.of_points))


class _Search:
    """What is known of the values of a jaxpr, from its first equation on."""

    def __init__(self, coordinates: int) -> None:
        self._coordinates = coordinates
        self._origins: dict[Atom, Atom] = {}
        self._sums: dict[Atom | None, Atom] = {}  # By sum, what of.
        self._shares: dict[Atom | None, bool] = {}  # By what is divided by its sum, whether that are exponentials.
        self._exponentials: set[Atom | None] = set()
        self._weighted: dict[Atom, tuple[Var, Container[Atom | None]]] = {}  # Products, and what of them is shares.
        self.of_vectors: set[Var] = set()
        self.of_points: set[Var] = set()

    def look_at(self, eqn: Eqn) -> None:
        """Adds the next equation."""
        traits, result = traits_of(eqn), eqn.outvars[0]
        operands = [None if isinstance(atom, Literal) else self._origins.get(atom, atom) for atom in eqn.invars]
        one = operands[0] if operands else None
        if one is None:
            return
        if traits & _VIEWS:
            self._origins[result] = one
        elif traits & Trait.EXPONENTIAL:
            self._exponentials.add(result)
        elif traits & Trait.SUMS_AXES:
            self._sums[result] = one
        elif traits & _BY_EPSILON:
            if one in self._sums and None in operands:  # As in `w / (w.sum() + 1e-8)`.
                self._sums[result] = self._sums[one]
        elif traits & Trait.DIVIDES and operands[-1] in self._sums:
            self._divided(result, one, self._sums[operands[-1]])
        elif traits & Trait.MATRIX and self._shares:
            self._multiplied(eqn, operands)

    def _divided(self, result: Var, one: Atom, summed: Atom) -> None:
        if summed is one:
            self._shares[result] = one in self._exponentials
        elif one in self._weighted and summed in self._weighted[one][1]:
            self.of_vectors.add(self._weighted[one][0])  # Centres of clusters: `(w.T @ x) / w.sum(0)`.

    def _multiplied(self, eqn: Eqn, operands: Sequence[Atom | None]) -> None:
        self._weighted[eqn.outvars[0]] = eqn.outvars[0], [each for each in operands if each in self._shares]
        sides = zip(operands, free_sizes(eqn), _are_points(eqn, self._coordinates)[::-1], strict=True)
        for operand, size, of_space in sides:
            if of_space and operand in self._shares:
                self.of_points.update(eqn.outvars)
            elif size == 1 and self._shares.get(operand) is False:
                self.of_vectors.update(eqn.outvars)


def _are_points(eqn: Eqn, coordinates: int) -> list[bool]:
    """For each operand of a matrix product, whether it is points: rows or columns of a few numbers."""
    contracted, batch = eqn.params["dimension_numbers"]
    shapes = [atom.aval.shape for atom in eqn.invars]
    return [
        size <= coordinates or (len(shape) - 1 not in (*of_sum, *of_batch) and nominal_size(shape[-1]) <= coordinates)
        for shape, size, of_sum, of_batch in zip(shapes, free_sizes(eqn), contracted, batch, strict=True)
    ]
