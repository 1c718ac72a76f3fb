"""Gram matrices that are factorized, and products with what solves their systems: regression, Gaussian processes.

`solve(x.T @ x + ridge, x.T @ y)` squares the condition of the data, so that a rounding of the products is one of the
solution times that. A system that a network makes has no such matrix, and its products are layers.
"""

from __future__ import annotations

from collections.abc import Iterator

from jamp._primitives import PRODUCTS, Trait, has
from jamp.transforms.analysis.factors import Cancelled, Unfolded, computes
from jamp.transforms.analysis.flat import Flat, Opened, Value


def systems(opened: Opened, unfolded: Unfolded) -> Iterator[Cancelled]:
    """Products that make a Gram matrix which is factorized, or the other side of its system, or read its solution.

    Args:
        opened: A jaxpr.
        unfolded: Its values as sums of products.
    """
    solutions: set[Value] = set()
    parts: frozenset[Value] = frozenset()  # Of all systems so far.
    for flat in opened.eqns:
        is_solver = has(flat.eqn, Trait.SOLVES)
        if not is_solver and not (solutions and has(flat.eqn, PRODUCTS)):
            continue
        behind = [*_behind(opened, flat)]
        made = {value: unfolded.factors(value) for value in behind if has(opened.made[value].eqn, PRODUCTS)}
        gram = unfolded.origins(part for product in made.values() if product.squared for part in product.of)
        whole = unfolded.factors(flat.outs[0])
        reads = not solutions.isdisjoint(behind if is_solver else unfolded.origins(whole.of))
        if not reads and not (is_solver and gram):
            continue
        parts |= gram if is_solver else frozenset()
        of_system = [found for found in made.values() if not parts.isdisjoint(unfolded.origins(found.of))]
        if not is_solver and not of_system and parts.isdisjoint(unfolded.origins(whole.of)):
            continue  # A layer behind a solution.
        products = tuple(product for found in of_system for product in found.products)
        if is_solver:
            solutions.update(flat.outs)
            yield Cancelled(products, parts, frozenset(flat.outs))
        else:
            yield Cancelled((*products, *whole.products))


def _behind(opened: Opened, solver: Flat) -> Iterator[Value]:
    """What the operands of a solver are made of, back to the next products and solvers."""
    seen: set[Value] = set()
    ahead = solver.values
    while ahead:
        value = ahead.pop()
        flat = opened.maker(value)
        if value in seen or flat is None:
            continue
        seen.add(value)
        yield value
        if computes(flat.eqn) and not has(flat.eqn, PRODUCTS | Trait.SOLVES):
            ahead.extend(flat.values)
