"""Sums that are written as products, by ones that face their terms: `[|x|^2, 1, -2 x] @ [1, |y|^2, y].T` is a distance.

It adds up what `|x|^2 + |y|^2 - 2 x @ y.T` does, and as little is left of it. A matrix of distances in this form may be
multiplied without being made: `a @ (b.T @ v)`. Where ones face all that there is, it is a sum and nothing else. Beside
the input of a layer ones are for its bias, and weights face them; features may have a one each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from jamp._primitives import PRODUCTS, Trait, has
from jamp.transforms.analysis.products.factors import Cancelled
from jamp.transforms.analysis.products.unfolded import Unfolded, behind
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source, Value


def lifted(opened: Opened, unfolded: Unfolded) -> Iterator[Cancelled]:
    """Products of two matrices that are put together of squares and ones, or of terms and ones.

    Args:
        opened: A jaxpr, with its loops opened.
        unfolded: Its values as sums of products.
    """
    rows = {unfolded.first(flat.outs[0]): _Row.of(flat, opened) for flat in opened.eqns if _puts_together(flat)}
    if not any(any(row.numbers) for row in rows.values()):
        return
    left: set[Value] = set()
    terms: dict[Value, None] = {}
    for flat in opened.eqns:
        for one, other, products in _pairs(flat, rows, opened, unfolded):
            if _face(rows[one], rows[other], unfolded) or _face(rows[other], rows[one], unfolded):
                left.update(flat.outs)
                terms.update(dict.fromkeys((one, other)))
                yield Cancelled(products, unfolded.origins((one, other)), frozenset(flat.outs))
    # The terms may be products with such matrices: those of an optimal transport between two of them.
    for flat in map(opened.maker, terms):
        behind_terms = behind(opened, flat.values) if flat is not None else ()
        products = [opened.made[value] for value in behind_terms if has(opened.made[value].eqn, PRODUCTS)]
        yield Cancelled(tuple(each for each in products if not left.isdisjoint(behind(opened, each.values))))


class _Row(NamedTuple):
    """What is put together side by side.

    Attributes:
        parts: The parts.
        sizes: How long each is along the axis.
        numbers: The number that each is, if the program writes it.
    """

    parts: tuple[Source, ...]
    sizes: list[int]
    numbers: list[float | None]

    @classmethod
    def of(cls, flat: Flat, opened: Opened) -> _Row:
        axis, ndim = flat.eqn.params.get("dimension", 0), flat.outs[0].aval.ndim
        sizes = [part.aval.shape[axis] if part.aval.ndim == ndim else 1 for part in flat.ins]
        return cls(flat.ins, sizes, [opened.number(part) for part in flat.ins])


def _puts_together(flat: Flat) -> bool:
    return has(flat.eqn, Trait.ASSEMBLES) and not has(flat.eqn, Trait.PLACES | Trait.PADS)


def _pairs(
    flat: Flat, rows: Mapping[Value, _Row], opened: Opened, unfolded: Unfolded
) -> Iterator[tuple[Value, Value, tuple[Flat, ...]]]:
    """Rows that a product multiplies: both of its sides, or one and a side of the product that is the other."""
    if not has(flat.eqn, PRODUCTS) or len(flat.values) != 2:
        return
    sides = [unfolded.unscaled(value) for value in flat.values]
    if all(side in rows for side in sides):
        yield sides[0], sides[1], (flat,)
    for one, other in (sides, sides[::-1]):
        inner = opened.maker(other)
        if one in rows and inner is not None and has(inner.eqn, PRODUCTS):
            yield from ((one, row, (flat, inner)) for row in map(unfolded.unscaled, inner.values) if row in rows)


def _face(one: _Row, other: _Row, unfolded: Unfolded) -> bool:
    """Whether ones of a row face squares of what else is in the other; or, of two terms, each the ones of the other."""
    if one.sizes != other.sizes:
        return False
    both = zip(other.parts, other.numbers, one.numbers, strict=True)
    faced = [part for part, number, ones in both if number is None and ones]
    if len(one.parts) == 2 and len(faced) == 1 and sum(map(bool, other.numbers)) == 1:
        return None in one.numbers
    squares = [unfolded.factors(part) for part in faced]
    squared = unfolded.origins(value for square in squares if square.is_sum for value in square.squared)
    rest = [unfolded.factors(part) for part in other.parts if part not in faced]
    return any(not squared.isdisjoint(unfolded.origins(each.of)) for each in rest)
