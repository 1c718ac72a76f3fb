"""Products whose results cancel, by what they multiply: distances and moments, Gram matrices, weighted means.

`|x|^2 + |y|^2 - 2 x @ y.T` is a distance, and `x.T @ x / n - outer(mean, mean)` a covariance. Each term is as large as
the data is far from zero, and their sum may be as small as the data is close together: where the product is rounded
and the squares are not, the distance of a point from itself is not zero, and may be negative.

`solve(x.T @ x + ridge, x.T @ y)` squares the condition of the data, so that a rounding of the products is one of the
solution times that. A system that a network makes has no such matrix, and its products are layers.

A product with a vector that is divided by its own sum is a mean, as `jnp.mean` is one. Not so a softmax, which makes
weights of scores: with one query it is a vector too, and its product an attention.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from jamp._compat import Atom, Jaxpr, Literal, Var
from jamp._primitives import PRODUCTS, Trait, has
from jamp.transforms.analysis.axes import free_sizes
from jamp.transforms.analysis.factors import Cancelled, Factors, Unfolded, computes
from jamp.transforms.analysis.flat import Flat, Opened, Value


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

    What both are made of was rounded for both: the variance of a layer's results loses nothing. Not so a part of it,
    as the diagonal of a Gram matrix, which was rounded for itself.
    """
    shared = all(any(flat is other for other in square.products) for flat in product.products)
    if not square.is_sum or (shared and square.is_part == product.is_part):
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
    return multiplied >= 2 and of_product.keys() == of_square.keys() and weights <= of_product


def _origins(unfolded: Unfolded, found: Counter[Value]) -> Counter[Value]:
    """Of which arrays the factors are parts."""
    return Counter(map(unfolded.origin, found.elements()))


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


_VIEWS = Trait.VIEW | Trait.MOVES | Trait.CONVERTS


def means(jaxpr: Jaxpr) -> frozenset[Var]:
    """The results of products in a jaxpr whose one operand is shares, one for each element that is added up."""
    origins: dict[Atom, Atom] = {}
    sums: dict[Atom | None, Atom] = {}  # By sum, what of.
    shares: set[Atom | None] = set()
    exponentials: set[Atom | None] = set()
    found: set[Var] = set()
    for eqn in jaxpr.eqns:
        operands = [None if isinstance(atom, Literal) else origins.get(atom, atom) for atom in eqn.invars]
        one = operands[0] if operands else None
        if one is None:
            continue
        if has(eqn, _VIEWS):
            origins[eqn.outvars[0]] = one
        elif has(eqn, Trait.EXPONENTIAL):
            exponentials.add(eqn.outvars[0])
        elif has(eqn, Trait.SUMS_AXES) and one not in exponentials:
            sums[eqn.outvars[0]] = one
        elif has(eqn, Trait.DIVIDES) and len(operands) == 2 and sums.get(operands[1]) is one:
            shares.add(eqn.outvars[0])
        elif shares and has(eqn, Trait.MATRIX):
            sizes = zip(operands, free_sizes(eqn), strict=True)
            if any(size == 1 and operand in shares for operand, size in sizes):
                found.update(eqn.outvars)
    return frozenset(found)
