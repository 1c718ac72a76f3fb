"""Sums that are written as products, by ones beside their terms: `[|x|^2, 1, -2 x] @ [1, |y|^2, y].T` is a distance.

It adds up what `|x|^2 + |y|^2 - 2 x @ y.T` does, and as little is left of it. A matrix of distances in this form may be
multiplied without being made: `a @ (b.T @ v)`. Ones beside the input of a layer are for its bias: there weights are on
the other side.
"""

from __future__ import annotations

from collections.abc import Iterator

from jamp._primitives import PRODUCTS, Trait, has
from jamp.transforms.analysis.products.factors import Cancelled
from jamp.transforms.analysis.products.unfolded import Unfolded, behind
from jamp.transforms.analysis.reading.flat import Flat, Opened, Value


def lifted(opened: Opened, unfolded: Unfolded) -> Iterator[Cancelled]:
    """Products of two matrices that have values beside ones.

    Args:
        opened: A jaxpr, with its loops opened.
        unfolded: Its values as sums of products.
    """
    beside_ones = [flat for flat in opened.eqns if _puts_beside_ones(flat, opened)]
    holding = {unfolded.first(flat.outs[0]) for flat in beside_ones}
    left: set[Value] = set()
    for flat in opened.eqns if holding else ():
        if has(flat.eqn, PRODUCTS):
            found = unfolded.factors(flat.outs[0])
            if sum(unfolded.origin(value) in holding for value in found.of) > 1:
                left.update(flat.outs)
                yield Cancelled(found.products, unfolded.origins(found.of), frozenset(flat.outs))
    # Terms of such sums may be products with such matrices: those of an optimal transport between two of them.
    for flat in beside_ones if left else ():
        terms = [opened.made[value] for value in behind(opened, flat.values) if has(opened.made[value].eqn, PRODUCTS)]
        yield Cancelled(tuple(term for term in terms if not left.isdisjoint(behind(opened, term.values))))


def _puts_beside_ones(flat: Flat, opened: Opened) -> bool:
    """Whether an equation puts values beside a number: zeros fill up, and add nothing."""
    if not has(flat.eqn, Trait.ASSEMBLES) or has(flat.eqn, Trait.PLACES):
        return False
    numbers = [opened.number(source) for source in flat.ins]
    return None in numbers and any(numbers)
