"""Products that are weighted means: with a vector that is divided by its own sum, of points in space, of clusters.

A product with a vector of shares is a mean, as `jnp.mean` is one. Not so a softmax, which makes weights of scores: with
one query it is a vector too, and its product an attention. Of points it is a mean whatever makes the shares: that is as
far from zero as the points are, and each reader looks at it from a place among them. With the mean and its shares in
half the gradient of AlphaFold's invariant point attention was up to 10 times as far off as careful code's. It is the
same mean when the product is divided, by the sum of its weights, and not these. So is the centre of a cluster, the sum
of what belongs to it by shares over the sum of these: an empty one was NaN in float16. And so is what a softmax makes
a mean of if it is compared with a number: the gain of a portfolio, `returns @ softmax(s) - 1`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jamp._compat import Atom, Eqn, Jaxpr, Literal, Var, called_jaxpr, inner_jaxprs, nominal_size, open_jaxpr
from jamp._primitives import MOVED, SCALES, Trait, has, having, traits_of
from jamp.transforms.analysis.reading.axes import free_sizes
from jamp.transforms.analysis.reading.flat import ONCE, Flat, Opened, Source, Value

SAME = MOVED | Trait.SELECTS
_BY_EPSILON = Trait.ADDS | Trait.EXTREMUM | Trait.LIMITS
_OF_SCORES = Trait.EXPONENTIAL | Trait.LOGARITHM
_OF_MEANS = SAME | _BY_EPSILON | SCALES | _OF_SCORES | Trait.POWER | Trait.SUMS_AXES | Trait.MATRIX


class _Product(NamedTuple):
    """A product that may be divided later.

    Attributes:
        result: What it makes.
        of_points: The values that multiply points.
        of_shares: Its operands that are shares.
        of_vector: Whether one of these is a vector.
    """

    result: Var
    of_points: Sequence[Source]
    of_shares: Sequence[Source]
    of_vector: bool


class _Known(NamedTuple):
    """What is known of a value.

    Attributes:
        value: Which it is, however it is seen, moved or masked.
        is_number: Whether the program writes it as a number.
        sum_of: Of a sum, the value that it is of.
        inverse_of: Of one over a sum, the same.
        is_log: Whether it is the logarithm of a sum.
        scores: Whether its exponentials are shares.
        exponential: Whether it is exponentials.
        shares: Whether it adds up to one.
        product: What makes it, where that is a product.
    """

    value: Source
    is_number: bool = False
    sum_of: Source | None = None
    inverse_of: Source | None = None
    is_log: bool = False
    scores: bool = False
    exponential: bool = False
    shares: bool = False
    product: _Product | None = None


class Averages:
    """The products of a jaxpr, and of the calls and loops in it, that are weighted means.

    Args:
        opened: The jaxpr.
        coordinates: The most that a point in space has.

    Attributes:
        of_vectors: Results of products that are means by a vector of shares, or centres of clusters.
        of_points: Those of points in space.
    """

    def __init__(self, opened: Opened, coordinates: int) -> None:
        self._opened = opened
        self._coordinates = coordinates
        self._found: dict[Value, _Known] = {}
        self.of_vectors: set[Var] = set()
        self.of_points: set[Var] = set()
        for flat in opened.eqns:
            if has(flat.eqn, _OF_MEANS):
                self._found[flat.outs[0]] = self._made(flat)

    def _read(self, source: Source) -> _Known:
        if isinstance(source, Literal):
            return _Known(source, is_number=True)
        if source in self._opened.scanned:  # Weights of a slice are of the whole.
            return self._read(self._opened.scanned[source])
        return self._found.get(source) or _Known(self._opened.first(source))

    def _made(self, flat: Flat) -> _Known:
        """What is known of the result of an equation."""
        operands, result = [self._read(source) for source in flat.ins], _Known(self._opened.first(flat.outs[0]))
        traits, first, last = traits_of(flat.eqn), operands[0], operands[-1]
        of = [each for each in operands[bool(traits & Trait.SELECTS) :] if not each.is_number]
        if traits & SAME:
            return (of or operands)[0] if len(of) < 2 or traits & Trait.MOVES else result
        if traits & Trait.MATRIX:
            return result._replace(product=self._multiplied(flat.eqn, operands))
        if traits & Trait.POWER:
            return result._replace(inverse_of=first.sum_of) if inverts(flat.eqn) else result
        if traits & SCALES:
            return self._divided(traits, operands, result)
        if traits & Trait.SUMS_AXES:
            return result._replace(sum_of=first.value, shares=first.shares, exponential=first.exponential)
        if traits & (Trait.SUBTRACTS | Trait.LOGARITHM) and len(of) == 1 and of[0].product and of[0].product.of_vector:
            # Gains, as `returns @ softmax(s) - 1`: of the mean little is left.
            self.of_vectors.add(of[0].product.result)
        if traits & Trait.EXPONENTIAL:
            return result._replace(exponential=True, shares=first.scores)
        if traits & Trait.LOGARITHM:
            return result._replace(is_log=first.sum_of is not None)
        if traits & Trait.SUBTRACTS and last.is_log:
            return result._replace(scores=True)
        if any(each.is_log for each in operands):  # The largest was subtracted before.
            return result._replace(is_log=True)
        # As in `w / (w.sum() + 1e-8)`.
        return result._replace(sum_of=of[0].sum_of, product=of[0].product) if len(of) == 1 else result

    def _divided(self, traits: int, operands: Sequence[_Known], result: _Known) -> _Known:
        first, last = operands[0], operands[-1]
        by = last.sum_of if traits & Trait.DIVIDES else last.inverse_of
        if traits & Trait.MULTIPLIES and by is None:
            first, by = last, first.inverse_of
        if by is None:
            return result
        if first.is_number or len(operands) < 2:
            return result._replace(inverse_of=by)
        if by == first.value:
            return result._replace(shares=True, exponential=first.exponential)
        if first.product and by in first.product.of_points:
            self.of_points.add(first.product.result)  # As `(w @ points) / w.sum(1)`, of weights of any size.
        elif first.product and by in first.product.of_shares:
            self.of_vectors.add(first.product.result)  # Centres of clusters: `(w.T @ x) / w.sum(0)`.
        return result

    def _multiplied(self, eqn: Eqn, operands: Sequence[_Known]) -> _Product:
        of_points = list(itertools.compress(operands, are_points(eqn, self._coordinates)[::-1]))
        if any(each.shares for each in of_points):
            self.of_points.update(eqn.outvars)
        vectors = [each for each, size in zip(operands, free_sizes(eqn), strict=True) if size == 1 and each.shares]
        if not all(each.exponential for each in vectors):
            self.of_vectors.update(eqn.outvars)
        shares = [each.value for each in operands if each.shares]
        return _Product(eqn.outvars[0], [each.value for each in of_points], shares, bool(vectors))


def inverts(eqn: Eqn) -> bool:
    """Whether an equation gives one over what it is given."""
    if has(eqn, Trait.POWER):
        return eqn.params.get("y") == -1
    return has(eqn, Trait.DIVIDES) and (len(eqn.invars) < 2 or isinstance(eqn.invars[0], Literal))


def are_points(eqn: Eqn, coordinates: int) -> list[bool]:
    """For each operand of a matrix product, whether it is points: rows or columns of a few numbers."""
    contracted, batch = eqn.params["dimension_numbers"]
    shapes = [atom.aval.shape for atom in eqn.invars]
    return [
        size <= coordinates or (len(shape) - 1 not in (*of_sum, *of_batch) and nominal_size(shape[-1]) <= coordinates)
        for shape, size, of_sum, of_batch in zip(shapes, free_sizes(eqn), contracted, batch, strict=True)
    ]


class Means(NamedTuple):
    """The results of products that are weighted means.

    Attributes:
        of_vectors: Those by a vector of shares.
        of_points: Those of points in space.
        inside: The jaxprs that were looked at with it.
    """

    of_vectors: frozenset[Var] = frozenset()
    of_points: frozenset[Var] = frozenset()
    inside: frozenset[int] = frozenset()


def means(jaxpr: Jaxpr, coordinates: int) -> Means:
    """The products in a jaxpr whose one operand is shares, one for each element that is added up.

    Args:
        jaxpr: The jaxpr.
        coordinates: The most that a point in space has.
    """
    products = list(products_in(jaxpr))
    of_space = any(any(are_points(eqn, coordinates)) for eqn in products)
    if not of_space and not (products and _divides_products(jaxpr)):
        return Means()
    opened = Opened(jaxpr, deep=True, loops=True)
    found = Averages(opened, coordinates)
    return Means(frozenset(found.of_vectors), frozenset(found.of_points), frozenset(opened.inside))


def products_in(jaxpr: Jaxpr) -> Iterator[Eqn]:
    """The matrix products in a jaxpr, and in the calls and loops in it."""
    for eqn in having(jaxpr.eqns, Trait.MATRIX | ONCE | Trait.LOOPS):
        if traits_of(eqn) & Trait.MATRIX:
            yield eqn
        for inner in inner_jaxprs(eqn):
            yield from products_in(open_jaxpr(inner))


def _divides_products(jaxpr: Jaxpr) -> bool:
    """Whether products are divided, at a glance: of most programs nothing else has to be known."""
    products: set[Atom] = set()
    inverses: set[Atom] = set()
    for eqn in having(jaxpr.eqns, ONCE | SAME | SCALES | Trait.POWER | Trait.MATRIX):
        traits = traits_of(eqn)
        operands = [atom for atom in eqn.invars if not isinstance(atom, Literal) and getattr(atom.aval, "shape", ())]
        if traits & Trait.MATRIX or (traits & ONCE and any(products_in(open_jaxpr(called_jaxpr(eqn.params))))):
            products.update(eqn.outvars)
        elif traits & SAME:
            products.update(eqn.outvars if not products.isdisjoint(operands) else ())
            inverses.update(eqn.outvars if not inverses.isdisjoint(operands) else ())
        elif traits & Trait.POWER or len(operands) < 2:
            inverses.update(eqn.outvars if inverts(eqn) else ())
        elif not products.isdisjoint(operands) and (traits & Trait.DIVIDES or not inverses.isdisjoint(operands)):
            return True
    return False
