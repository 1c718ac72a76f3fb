"""Products whose results cancel, by what they multiply: distances and moments, Gram matrices.

`|x|^2 + |y|^2 - 2 x @ y.T` is a distance, and `x.T @ x / n - outer(mean, mean)` a covariance. Each term is as large as
the data is far from zero, and their sum may be as small as the data is close together: where the product is rounded
and the squares are not, the distance of a point from itself is not zero, and may be negative.

`solve(x.T @ x + ridge, x.T @ y)` squares the condition of the data, so that a rounding of the products is one of the
solution times that. A system that a network makes has no such matrix, and its products are layers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from jamp._primitives import PRODUCTS, Trait, has
from jamp.transforms.analysis.products.factors import Cancelled, Factors, repeated
from jamp.transforms.analysis.products.unfolded import Unfolded, behind
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source, Value


def distances(opened: Opened, unfolded: Unfolded) -> Iterator[Cancelled]:
    """Sums of products and of squares of what they multiply.

    Args:
        opened: A jaxpr.
        unfolded: Its values as sums of products.
    """
    for flat in opened.eqns:
        if not has(flat.eqn, Trait.ADDS) or len(flat.ins) < 2:
            continue
        sides = [unfolded.terms(source) for source in flat.ins[:2]]
        for one, other in itertools.product(*_uncentred(unfolded, *sides)):
            found = _cancelled(unfolded, one, other) or _cancelled(unfolded, other, one)
            if found is not None:
                yield found._replace(left=frozenset(flat.outs))
        for source, terms in zip(flat.ins[:2], sides[::-1], strict=True):
            yield from _discriminants(opened, unfolded, source, terms)


def _discriminants(opened: Opened, unfolded: Unfolded, source: Source, terms: Iterable[Factors]) -> Iterator[Cancelled]:
    """Products in a sum whose square is added to squares of what they multiply, as in `(d @ c - b)**2 - |c - o|**2`.

    So a ray meets a sphere, if that is positive.
    """
    squared = unfolded.origins(value for term in terms if not term.products for value in term.summed)
    makers = [flat for flat in map(opened.maker, squared) if flat is not None and has(flat.eqn, Trait.ADDS)]
    parts = squared.union(*(unfolded.origins(flat.values) for flat in makers))
    square = unfolded.factors(source)
    sums = set(square.squared) if parts and not square.products else ()
    for product in (term for value in sums for term in unfolded.terms(value)):
        if product.products and not parts.isdisjoint(unfolded.origins(product.of)):
            yield Cancelled(product.products)


def _uncentred(
    unfolded: Unfolded, one: Sequence[Factors], other: Sequence[Factors]
) -> tuple[list[Factors], list[Factors]]:
    """Terms without those that are sums of the same products, as where a layer's results lose their mean.

    What both are made of was rounded for both: the variance of a layer's results loses nothing, and neither do the
    logits of targets from which label smoothing takes the mean of all. Not so a part of a Gram matrix, as its diagonal,
    which was rounded for itself.
    """
    left, right = ([_rounded(unfolded, term) for term in terms] for terms in (one, other))
    return (
        [term for term, key in zip(one, left, strict=True) if key is None or key not in right],
        [term for term, key in zip(other, right, strict=True) if key is None or key not in left],
    )


def _rounded(unfolded: Unfolded, term: Factors) -> tuple[frozenset[Value], bool] | None:
    """What was rounded for a term."""
    if not term.products:
        return None
    of_gram = term.is_part and bool(repeated(map(unfolded.origin, term.of)))
    return frozenset(unfolded.first(product.outs[0]) for product in term.products), of_gram


def _cancelled(unfolded: Unfolded, product: Factors, square: Factors) -> Cancelled | None:
    """What cancels, where a product of two values, and the sum of the squares of one or of both, have the same size."""
    if not square.is_sum or _is_square(product):
        return None
    if _reads_square(unfolded, product, square):  # Of what a layer makes, which is none of it.
        return Cancelled((*product.own, *square.own), unfolded.origins(_values(product.sides + square.sides)))
    for one, other, cancel in (
        (product.shallow, square.shallow, _have_one_size),
        (product, square, _have_one_form),
    ):
        if (one is not product and _are_alike(unfolded, one, other)) or cancel(unfolded, one, other):
            return Cancelled((*one.products, *other.products), unfolded.origins(one.of + other.of))
    return None


def _is_square(term: Factors) -> bool:
    """Whether a term is at least zero: of two such, all is left when they are added."""
    by_itself = len(term.sides) == 2 and not term.own and term.sides[0] == term.sides[1]
    return by_itself or all(times % 2 == 0 for times in Counter(term.whole).values())


def _reads_square(unfolded: Unfolded, product: Factors, square: Factors) -> bool:
    """Whether one of two values that are multiplied is squared, whatever they are made of."""
    if not product.own or len(product.sides) != 2 or len(square.sides) != 2:
        return False
    squared = unfolded.origins(_values(square.sides))
    return len(squared) == 1 and not squared.isdisjoint(unfolded.origins(_values(product.sides)))


def _values(sources: Iterable[Source]) -> Iterator[Value]:
    return (source for source in sources if isinstance(source, Value))


def _have_one_size(unfolded: Unfolded, product: Factors, square: Factors) -> bool:
    if len(product.of) > 1 and _is_of_means(product, square):
        return True
    return len(product.of) == len(square.of) and _shares_square(unfolded, product, square)


def _have_one_form(unfolded: Unfolded, product: Factors, square: Factors) -> bool:
    """The same, where the square is no product of products: each of these was rounded."""
    is_product = len(square.whole) == 1 and not square.is_part and not square.of_parts
    return not is_product and _have_one_size(unfolded, product, square)


def _shares_square(unfolded: Unfolded, product: Factors, square: Factors) -> bool:
    """Whether a product has all that is squared as a factor: two layers may share their weights without the data."""
    squared = unfolded.origins(square.squared)
    if squared.isdisjoint(unfolded.origins(square.summed)):  # As in the derivative of GELU.
        return False
    return bool(squared) and squared <= unfolded.origins(product.of)


def _is_of_means(product: Factors, square: Factors) -> bool:
    """Whether a mean of products stands beside the product of the means, which has its weights twice.

    The mean of a part of an array may be a part of its mean.
    """
    of_product, of_square = Counter(product.of), Counter(square.of)
    weights = of_square - of_product
    multiplied = of_product.total() - sum(of_product[value] for value in weights)
    if of_product.keys() != of_square.keys() or not (weights or len(of_square) == 1):  # A polynomial has no weights.
        return False
    return multiplied >= 2 and weights <= of_product


def _are_alike(unfolded: Unfolded, product: Factors, square: Factors) -> bool:
    """Whether a product has the factors of a sum, as neighbours less degrees."""
    of_product, of_square = Counter(product.of), Counter(square.of)
    if of_product.total() < 2 or not _multiplies_sums(unfolded, square):
        return False
    return _origins(unfolded, of_product) == _origins(unfolded, of_square)


def _multiplies_sums(unfolded: Unfolded, term: Factors) -> bool:
    """Whether a sum is multiplied, as by `diag(a.sum(1)) @ x`: `a @ x + a.T @ x` adds up two products of `a`."""
    return not term.own or any(unfolded.factors(value).is_sum for value in term.own[0].values)


def _origins(unfolded: Unfolded, found: Counter[Value]) -> Counter[Value]:
    """Of which arrays the factors are parts."""
    return Counter(map(unfolded.origin, found.elements()))


def systems(opened: Opened, unfolded: Unfolded) -> Iterator[Cancelled]:
    """Products that make a Gram matrix which is factorized, or the other side of its system, or read its solution.

    A loop that multiplies what it carries with a Gram matrix solves as well: no layer has such weights.

    Args:
        opened: A jaxpr.
        unfolded: Its values as sums of products.
    """
    solutions: set[Value] = set()
    parts: frozenset[Value] = frozenset()  # Of all systems so far.
    descents = _descents(opened, unfolded)
    for flat in opened.eqns:
        is_solver = has(flat.eqn, Trait.SOLVES) or not descents.keys().isdisjoint(flat.outs)
        if not is_solver and not (solutions and has(flat.eqn, PRODUCTS)):
            continue
        sources = [*behind(opened, flat.values)]
        made = _products(opened, unfolded, sources)
        for inside in _covariances(opened, unfolded, made.values()) if is_solver else ():
            made.update(inside)
        gram = unfolded.origins(part for product in made.values() if product.forms for part in product.of)
        whole = unfolded.factors(flat.outs[0])
        reads = not solutions.isdisjoint(sources if is_solver else unfolded.origins(whole.of))
        if not reads and not (is_solver and gram):
            continue
        parts |= gram if is_solver else frozenset()
        products = tuple(product for found in made.values() for product in _of_system(unfolded, found, parts))
        if is_solver:
            solutions.update(flat.outs)
            yield Cancelled((*products, *descents.get(flat.outs[0], ())), parts, frozenset(flat.outs))
        elif own := _of_system(unfolded, whole, parts) or (whole.last if products else ()):  # Else a layer behind it.
            yield Cancelled((*products, *own))


def _of_system(unfolded: Unfolded, found: Factors, parts: frozenset[Value]) -> tuple[Flat, ...]:
    """The products of a term that multiply what a system is made of: what they multiply with it, a layer may make."""
    if not parts.isdisjoint(unfolded.origins(value for value in found.of if value not in found.outer)):
        return found.products
    return found.last if not parts.isdisjoint(unfolded.origins(found.outer)) else ()


def _descents(opened: Opened, unfolded: Unfolded) -> dict[Value, list[Flat]]:
    """By the first result of a loop, products in it of what it carries with a Gram matrix that it is given."""
    found: dict[Value, list[Flat]] = {}
    loops_of = {value: frozenset({loop}) for loop, carried in opened.carried.items() for value in carried}
    for flat in opened.eqns if loops_of else ():
        loops = [loops_of.get(value, frozenset[Value]()) for value in flat.values]
        loops_of.update((out, frozenset[Value]().union(*loops)) for out in flat.outs)
        if not has(flat.eqn, PRODUCTS) or len(loops) != 2:
            continue
        for (inside, outside), matrix in zip((loops, loops[::-1]), flat.values[::-1], strict=True):
            if inside - outside and _is_gram(opened, unfolded, matrix):
                for loop in inside - outside:
                    found.setdefault(loop, []).append(flat)
    return found


def _is_gram(opened: Opened, unfolded: Unfolded, matrix: Value) -> bool:
    return any(product.forms for product in _products(opened, unfolded, behind(opened, [matrix])).values())


def _products(opened: Opened, unfolded: Unfolded, values: Iterable[Value]) -> dict[Value, Factors]:
    """By value, the factors of those that are products; of a Gram matrix of what a layer makes, no more than that."""
    made = {value: unfolded.factors(value) for value in values if has(opened.made[value].eqn, PRODUCTS)}
    of_layers = (value for value, found in made.items() if found.shallow.forms and _is_of_layers(opened, found))
    return made | {value: made[value].shallow for value in of_layers}


def _is_of_layers(opened: Opened, found: Factors) -> bool:
    """Whether factors of a product are made of other products, and not given as data is."""
    return any(has(opened.made[value].eqn, PRODUCTS) for value in behind(opened, found.of))


def _covariances(opened: Opened, unfolded: Unfolded, found: Iterable[Factors]) -> Iterator[dict[Value, Factors]]:
    """What Gram matrices are made of, if those are too: `h @ (f @ p @ f.T + q) @ h.T`, `k.T @ k` of `k = x @ x.T`."""
    ahead, seen = [*found], set[Value]()
    while ahead:
        product = ahead.pop()
        inside = set(product.of) - seen if product.forms else set()
        seen |= inside
        made = _products(opened, unfolded, behind(opened, inside))
        of_squares = {value: each for value, each in made.items() if each.forms}
        ahead += of_squares.values()
        yield of_squares
