"""Products of which little is left: those of distances, moments and systems of equations, and their derivatives."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from jamp._compat import Atom, Jaxpr, Var
from jamp._primitives import PRODUCTS, has
from jamp.transforms.analysis.products.centring import Centred, centred
from jamp.transforms.analysis.products.corrections import corrections
from jamp.transforms.analysis.products.determinants import determinants
from jamp.transforms.analysis.products.factors import Cancelled
from jamp.transforms.analysis.products.filters import filters
from jamp.transforms.analysis.products.glance import Glance
from jamp.transforms.analysis.products.identities import identities
from jamp.transforms.analysis.products.iterations import iterations
from jamp.transforms.analysis.products.lifted import lifted
from jamp.transforms.analysis.products.moments import distances, systems
from jamp.transforms.analysis.products.networks import networks
from jamp.transforms.analysis.products.solutions import descended, gains_of_one, right_sides, solved
from jamp.transforms.analysis.products.unfolded import Unfolded, computes
from jamp.transforms.analysis.reading.flat import Opened, Value


class Delicate(NamedTuple):
    """Results of products of which little is left, in a jaxpr and in the calls in it.

    Attributes:
        cancelling: Those that cancel with others.
        solved: Those of solutions with what was solved: they are float32 unless a network makes what they multiply.
        squares: Whether a product of a matrix with itself is among them all: `centred_in` may find it.
        inside: By identity, the jaxprs inside that were looked at too.
    """

    cancelling: frozenset[Var] = frozenset()
    solved: frozenset[Var] = frozenset()
    squares: bool = False
    inside: frozenset[int] = frozenset()


def cancelling(jaxpr: Jaxpr, diagonals: Container[Var]) -> Delicate:
    """The products of a jaxpr of which little is left.

    Args:
        jaxpr: The jaxpr.
        diagonals: Its diagonal matrices, and those of the jaxprs inside.
    """
    glance = Glance(diagonals)
    if not glance.finds(jaxpr):
        return Delicate(squares=glance.squares, inside=frozenset(glance.inside))
    opened = Opened(jaxpr, deep=True, loops=True)
    unfolded = Unfolded(opened)
    of_systems = [*systems(opened, unfolded)]
    gains = gains_of_one(opened, unfolded)
    widths = networks(opened, unfolded, gains)
    found = [
        *distances(opened, unfolded),
        *lifted(opened, unfolded),
        *determinants(opened, unfolded),
        *of_systems,
        *filters(opened, unfolded, widths),
    ]
    found += identities(opened, unfolded, diagonals)
    found += _derivatives(opened, unfolded, found)
    of_solutions = itertools.chain(
        solved(opened, unfolded, gains),
        corrections(opened, unfolded, gains, widths),
        iterations(opened, unfolded),
        descended(opened, unfolded),
        right_sides(opened, unfolded, of_systems),
    )
    return Delicate(_results(found), _results(of_solutions), glance.squares, frozenset(opened.inside))


def centred_in(jaxpr: Jaxpr, differences: Container[Atom]) -> Centred:
    """The products of a jaxpr that lose a mean.

    Args:
        jaxpr: The jaxpr.
        differences: Its constants that take differences, and those of the jaxprs inside.
    """
    opened = Opened(jaxpr, deep=True, loops=True)
    return centred(opened, Unfolded(opened), differences)


def _results(found: Iterable[Cancelled]) -> frozenset[Var]:
    return frozenset(product.eqn.outvars[0] for cancelled in found for product in cancelled.products)


def _derivatives(opened: Opened, unfolded: Unfolded, found: Sequence[Cancelled]) -> list[Cancelled]:
    """Products of what is left with what cancelled, or with more of what is left: gradients, of which as little is."""
    products: list[Cancelled] = []
    left: dict[Value, frozenset[Value]] = {}
    for cancelled in found:
        left.update((value, left.get(value, frozenset()) | cancelled.parts) for value in cancelled.left)
    for flat in opened.eqns if left else ():
        parts = frozenset().union(*(left[value] for value in flat.values if value in left))
        if not parts or not computes(flat.eqn):
            continue
        if has(flat.eqn, PRODUCTS):
            others = [value for value in flat.values if value not in left]
            factors = [unfolded.factors(value) for value in others]
            made_of = unfolded.origins(part for each in factors for part in each.of + each.whole)
            if others and parts.isdisjoint(made_of):
                continue  # A layer, which has what is left as data.
            products.append(Cancelled((flat,)))
        left.update((value, left.get(value, parts) | parts) for value in flat.outs)
    return products
