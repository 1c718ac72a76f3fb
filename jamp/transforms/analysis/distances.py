"""Products that stand beside squares of what they multiply: distances and moments, of which little is left.

`|x|^2 + |y|^2 - 2 x @ y.T` is a distance, and `x.T @ x / n - outer(mean, mean)` a covariance. Each term is as large as
the data is far from zero, and their sum may be as small as the data is close together: where the product is rounded
and the squares are not, the distance of a point from itself is not zero, and may be negative.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from jamp._primitives import Trait, has
from jamp.transforms.analysis.factors import Cancelled, Factors, Unfolded
from jamp.transforms.analysis.flat import Opened, Value


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
    if not square.is_sum or all(any(flat is other for other in square.products) for flat in product.products):
        return False
    if len(product.of) > 1 and _is_of_means(unfolded, product, square):
        return True
    if len(product.of) != len(square.of):
        return False
    return not unfolded.origins(product.of).isdisjoint(unfolded.origins(square.squared))


def _is_of_means(unfolded: Unfolded, product: Factors, square: Factors) -> bool:
    """Whether a mean of products stands beside the product of the means, which has its weights twice.

    The mean of a part of an array may be a part of its mean.
    """
    of_product, of_square = Counter(product.of), Counter(square.of)
    if of_product == of_square:
        return True
    if not square.products and _origins(unfolded, of_product) == _origins(unfolded, of_square):
        return True
    weights = of_square - of_product
    multiplied = of_product.total() - sum(of_product[value] for value in weights)
    return multiplied == 2 and of_product.keys() == of_square.keys() and weights <= of_product


def _origins(unfolded: Unfolded, found: Counter[Value]) -> Counter[Value]:
    """Of which arrays the factors are parts."""
    return Counter(map(unfolded.origin, found.elements()))
