"""Gram matrices of which a matrix that the program writes takes differences, as in `trace(K @ H @ L @ H)`.

`H = eye - 1 / n` takes the mean off rows or columns. Those of `K = x @ x.T` are as large as features are far from zero,
so that a Gram matrix in half loses what is left: the gradient of a kernel's principal components was 44 % off. Features
that are centred are rounded as those of any layer are.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from jamp._compat import Atom, Var
from jamp._primitives import PRODUCTS, Trait, has
from jamp.transforms.analysis.products.factors import repeated
from jamp.transforms.analysis.products.unfolded import Unfolded, computes
from jamp.transforms.analysis.reading.flat import Opened, Value


class Centred(NamedTuple):
    """What is found.

    Attributes:
        grams: Such Gram matrices, each as an operand of the product that takes differences: equation and position.
        products: Results of products of what is left with another Gram matrix, whose mean that takes off as well.
    """

    grams: frozenset[tuple[int, int]] = frozenset()
    products: frozenset[Var] = frozenset()


def centred(opened: Opened, unfolded: Unfolded, differences: Container[Atom]) -> Centred:
    """The Gram matrices that lose a mean.

    Args:
        opened: A jaxpr.
        unfolded: Its values as sums of products.
        differences: Those of its constants that take differences, and of the jaxprs inside.
    """
    grams: set[tuple[int, int]] = set()
    products: set[Var] = set()
    left: set[Value] = set()
    for flat in opened.eqns:
        goes_on = not left.isdisjoint(flat.values)
        if has(flat.eqn, Trait.MATRIX) and len(flat.values) == 2:
            one, other = flat.values
            of_grams = [side for side in ((0, one, other), (1, other, one)) if _is_gram(unfolded, side[1])]
            taken = {(id(flat.eqn), index) for index, _, by in of_grams if unfolded.origin(by).var in differences}
            grams |= taken
            goes_on |= bool(taken)
            if any(by in left and gram not in left for _, gram, by in of_grams):
                products.add(flat.eqn.outvars[0])
        elif not computes(flat.eqn) or has(flat.eqn, PRODUCTS):
            continue
        left.update(flat.outs if goes_on else ())
    return Centred(frozenset(grams), frozenset(products))


def _is_gram(unfolded: Unfolded, value: Value) -> bool:
    """Whether a value is a product that has a factor twice, moved or not."""
    factors = unfolded.factors(value)
    return bool(factors.products) and bool(repeated(map(unfolded.origin, factors.of)))
