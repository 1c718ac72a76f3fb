"""Products that stand beside squares of what they multiply: distances and moments, of which little is left.

`|x|^2 + |y|^2 - 2 x @ y.T` is a distance, and `x.T @ x / n - outer(mean, mean)` a covariance. Each term is as large as
the data is far from zero, and their sum may be as small as the data is close together: where the product is rounded
and the squares are not, the distance of a point from itself is not zero, and may be negative.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from jamp._primitives import Trait, has
from jamp.transforms.analysis.factors import Cancelled, Factors, Unfolded
from jamp.transforms.analysis.flat import Opened


def distances(opened: Opened, unfolded: Unfolded) -> Iterator[Cancelled]:
    """Sums of products and of squares of what they multiply.

    Args:
        opened: A jaxpr.
        unfolded: Its values as sums of products.
    """
    for flat in opened.eqns:
        if not has(flat.eqn, Trait.ADDS) or len(flat.ins) < 2:
            continue
        for one, other in itertools.product(*map(unfolded.terms, flat.ins)):
            if _cancel(unfolded, one, other) or _cancel(unfolded, other, one):
                parts = unfolded.origins(one.of + other.of)
                yield Cancelled((*one.products, *other.products), parts, frozenset(flat.outs))


def _cancel(unfolded: Unfolded, product: Factors, square: Factors) -> bool:
    """Whether a product of two values, and the sum of the squares of one or a product of both, have the same size.

    What both are made of was rounded for both: the variance of a layer's results loses nothing.
    """
    if not square.is_sum or len(product.of) != len(square.of):
        return False
    if all(any(flat is other for other in square.products) for flat in product.products):
        return False
    if len(product.of) > 1 and sorted(map(hash, product.of)) == sorted(map(hash, square.of)):
        return True
    return not unfolded.origins(product.of).isdisjoint(unfolded.origins(square.squared))
