"""Products in determinants of Gram matrices: `|x|^2 |y|^2 - (x @ y)^2` is zero where `x` and `y` are parallel.

Kernels of infinitely wide networks have the angles of all pairs of rows from it, and derivatives its root below them:
of a row and itself both are what was rounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from jamp._primitives import Trait, has
from jamp.transforms.analysis.products.factors import Cancelled, Factors
from jamp.transforms.analysis.products.unfolded import Unfolded
from jamp.transforms.analysis.reading.flat import Opened, Source


def determinants(opened: Opened, unfolded: Unfolded) -> Iterator[Cancelled]:
    """Differences of two products of sums, in which all of the same factors are squared.

    Args:
        opened: A jaxpr.
        unfolded: Its values as sums of products.
    """
    for flat in opened.eqns:
        if not has(flat.eqn, Trait.SUBTRACTS) or len(flat.values) < 2:
            continue
        one, other = (_of_sums(unfolded, source) for source in flat.ins)
        times = [Counter(map(unfolded.origin, each.of)) for each in (one, other)]
        are_squares = times[0] == times[1] and times[0].total() >= 4 and all(n % 2 == 0 for n in times[0].values())
        if are_squares and set(one.products) != set(other.products):
            yield Cancelled((*one.products, *other.products), unfolded.origins(one.of), frozenset(flat.outs))


def _of_sums(unfolded: Unfolded, source: Source) -> Factors:
    """The factors of a product of two sums, whatever numbers are added to each; none if it is no such product."""
    found = unfolded.factors(source)
    terms = [unfolded.terms(value) for value in found.of]
    if [len(each) for each in terms] == [1, 1]:
        found = terms[0][0].times(terms[1][0])
    by_products = found.products and len(found.whole) == 2
    return found if by_products or (found.is_sum and not found.products) else Factors()
