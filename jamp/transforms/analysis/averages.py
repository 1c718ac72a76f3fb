"""What values of a program are sums, shares and inverses of, and which products by them are weighted means."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from jamp._compat import Eqn, Literal, Var, nominal_size
from jamp._primitives import Trait, has, traits_of
from jamp.transforms.analysis.axes import free_sizes
from jamp.transforms.analysis.flat import Flat, Opened, Source, Value

SAME = Trait.VIEW | Trait.MOVES | Trait.CONVERTS | Trait.SELECTS
_BY_EPSILON = Trait.ADDS | Trait.EXTREMUM | Trait.LIMITS
QUOTIENTS = Trait.DIVIDES | Trait.MULTIPLIES
_OF_SCORES = Trait.EXPONENTIAL | Trait.LOGARITHM
_OF_MEANS = SAME | _BY_EPSILON | QUOTIENTS | _OF_SCORES | Trait.POWER | Trait.SUMS_AXES | Trait.MATRIX


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
        if traits & QUOTIENTS:
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
