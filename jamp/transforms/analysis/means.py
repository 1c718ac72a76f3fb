"""Products that are weighted means: with a vector that is divided by its own sum, of points in space, of clusters.

A product with a vector of shares is a mean, as `jnp.mean` is one. Not so a softmax, which makes weights of scores: with
one query it is a vector too, and its product an attention. Of points it is a mean whatever makes the shares: that is as
far from zero as the points are, and each reader looks at it from a place among them. With the mean and its shares in
half the gradient of AlphaFold's invariant point attention was up to 10 times as far off as careful code's. It is the
same mean when the product is divided, by the sum of its weights, and not these. So is the centre of a cluster, the sum
of what belongs to it by shares over the sum of these: an empty one was NaN in float16. And so is what a softmax makes
a mean of if it is compared with a number: the gain of a portfolio, `returns @ softmax(s) - 1`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from jamp._compat import Atom, Eqn, Jaxpr, Literal, Var, called_jaxpr, inner_jaxprs, open_jaxpr
from jamp._primitives import Trait, having, traits_of
from jamp.transforms.analysis.averages import QUOTIENTS, SAME, Averages, are_points, inverts
from jamp.transforms.analysis.flat import ONCE, Opened


class Means(NamedTuple):
    """The results of products that are weighted means.

    Attributes:
        of_vectors: Those by a vector of shares.
        of_points: Those of points in space.
        inside: The jaxprs that were looked at with it.
    """

    of_vectors: frozenset[Var] = frozenset()
    of_points: frozenset[Var] = frozenset()
    inside: frozenset[int] = frozenset()


def means(jaxpr: Jaxpr, coordinates: int) -> Means:
    """The products in a jaxpr whose one operand is shares, one for each element that is added up.

    Args:
        jaxpr: The jaxpr.
        coordinates: The most that a point in space has.
    """
    products = list(products_in(jaxpr))
    of_space = any(any(are_points(eqn, coordinates)) for eqn in products)
    if not of_space and not (products and _divides_products(jaxpr)):
        return Means()
    opened = Opened(jaxpr, deep=True, loops=True)
    found = Averages(opened, coordinates)
    return Means(frozenset(found.of_vectors), frozenset(found.of_points), frozenset(opened.inside))


def products_in(jaxpr: Jaxpr) -> Iterator[Eqn]:
    """The matrix products in a jaxpr, and in the calls and loops in it."""
    for eqn in having(jaxpr.eqns, Trait.MATRIX | ONCE | Trait.LOOPS):
        if traits_of(eqn) & Trait.MATRIX:
            yield eqn
        for inner in inner_jaxprs(eqn):
            yield from products_in(open_jaxpr(inner))


def _divides_products(jaxpr: Jaxpr) -> bool:
    """Whether products are divided, at a glance: of most programs nothing else has to be known."""
    products: set[Atom] = set()
    inverses: set[Atom] = set()
    for eqn in having(jaxpr.eqns, ONCE | SAME | QUOTIENTS | Trait.POWER | Trait.MATRIX):
        traits = traits_of(eqn)
        operands = [atom for atom in eqn.invars if not isinstance(atom, Literal) and getattr(atom.aval, "shape", ())]
        if traits & Trait.MATRIX or (traits & ONCE and any(products_in(open_jaxpr(called_jaxpr(eqn.params))))):
            products.update(eqn.outvars)
        elif traits & SAME:
            products.update(eqn.outvars if not products.isdisjoint(operands) else ())
            inverses.update(eqn.outvars if not inverses.isdisjoint(operands) else ())
        elif traits & Trait.POWER or len(operands) < 2:
            inverses.update(eqn.outvars if inverts(eqn) else ())
        elif not products.isdisjoint(operands) and (traits & Trait.DIVIDES or not inverses.isdisjoint(operands)):
            return True
    return False
