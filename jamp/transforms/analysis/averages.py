"""What values of a program are sums, shares and inverses of, and which products by them are weighted means."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from jamp._compat import Atom, ClosedJaxpr, Eqn, Jaxpr, Literal, Var, called_jaxpr, nominal_size, open_jaxpr
from jamp._primitives import Trait, acts, has, having, traits_of
from jamp.transforms.analysis.axes import free_sizes
from jamp.transforms.analysis.flat import ONCE, loop_body, loop_counts

SAME = Trait.VIEW | Trait.MOVES | Trait.CONVERTS | Trait.SELECTS
_BY_EPSILON = Trait.ADDS | Trait.EXTREMUM | Trait.LIMITS
QUOTIENTS = Trait.DIVIDES | Trait.MULTIPLIES
_OF_SCORES = Trait.EXPONENTIAL | Trait.LOGARITHM
_TOLD = Trait.POWER | Trait.SUMS_AXES | Trait.MATRIX | ONCE | Trait.LOOPS
_OF_MEANS = SAME | _BY_EPSILON | QUOTIENTS | _OF_SCORES | _TOLD


class _Product(NamedTuple):
    """A product that may be divided later.

    Attributes:
        result: What it makes.
        of_points: The values that multiply points.
        of_shares: Its operands that are shares.
        of_vector: Whether one of these is a vector.
    """

    result: Var
    of_points: Sequence[Hashable]
    of_shares: Sequence[Hashable]
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

    value: Hashable
    is_number: bool = False
    sum_of: Hashable | None = None
    inverse_of: Hashable | None = None
    is_log: bool = False
    scores: bool = False
    exponential: bool = False
    shares: bool = False
    product: _Product | None = None


_Env = dict[Var, _Known]


class Averages:
    """Goes through a jaxpr and the calls and loops in it, from the first equation on.

    Args:
        coordinates: The most that a point in space has.
        of_space: Whether there may be points. Of these, weights that are written twice are found to be the same.

    Attributes:
        of_vectors: Results of products that are means by a vector of shares, or centres of clusters.
        of_points: Those of points in space.
    """

    def __init__(self, coordinates: int, of_space: bool) -> None:
        self._coordinates = coordinates
        self._values = itertools.count()
        self._made_of: dict[Hashable, _Known] | None = {} if of_space else None
        self.of_vectors: set[Var] = set()
        self.of_points: set[Var] = set()

    def look_at(self, jaxpr: Jaxpr, env: _Env) -> None:
        """Adds what is found in a jaxpr, and to `env` what is known of its values."""
        for eqn in having(jaxpr.eqns, _OF_MEANS) if self._made_of is None else jaxpr.eqns:
            traits, operands = traits_of(eqn), [self._read(atom, env) for atom in eqn.invars]
            if traits & ONCE:
                env.update(zip(eqn.outvars, self._look_inside(called_jaxpr(eqn.params), operands), strict=True))
            elif traits & Trait.LOOPS:
                body, given = loop_body(eqn, operands)
                consts, carries = loop_counts(eqn)
                anew = [self._known() for _ in range(carries)]
                self._look_inside(body, [*given[:consts], *anew, *given[consts + carries :]])
            elif traits & _OF_MEANS and (known := self._made(eqn, operands)):
                env[eqn.outvars[0]] = known
            if self._made_of is not None and len(eqn.outvars) == 1:
                env[eqn.outvars[0]] = self._first(eqn, operands, self._read(eqn.outvars[0], env))

    def _look_inside(self, jaxpr: ClosedJaxpr, operands: Sequence[_Known]) -> list[_Known]:
        inner = open_jaxpr(jaxpr)
        within = dict(zip(inner.invars, operands, strict=True))
        self.look_at(inner, within)
        return [self._read(atom, within) for atom in inner.outvars]

    def _first(self, eqn: Eqn, operands: Sequence[_Known], result: _Known) -> _Known:
        """Of results that are computed alike, the first."""
        key = eqn.primitive, tuple(eqn.params.items()), tuple(each.value for each in operands)
        try:
            return result if self._made_of is None or acts(eqn) else self._made_of.setdefault(key, result)
        except TypeError:  # A parameter that has no hash.
            return result

    def _read(self, atom: Atom, env: _Env) -> _Known:
        if isinstance(atom, Literal):
            return _Known(str(atom.val), is_number=True)
        return env.get(atom) or env.setdefault(atom, self._known())

    def _known(self, **what: object) -> _Known:
        return _Known(next(self._values), **what)  # type: ignore[arg-type]

    def _made(self, eqn: Eqn, operands: Sequence[_Known]) -> _Known | None:
        """What is known of the result of an equation; None for nothing."""
        traits, first, last = traits_of(eqn), operands[0], operands[-1]
        of = [each for each in operands[bool(traits & Trait.SELECTS) :] if not each.is_number]
        if traits & SAME:
            return (of or operands)[0] if len(of) < 2 or traits & Trait.MOVES else None
        if traits & Trait.MATRIX:
            return self._multiplied(eqn, operands)
        if traits & Trait.POWER:
            return self._known(inverse_of=first.sum_of) if inverts(eqn) else None
        if traits & QUOTIENTS:
            return self._divided(traits, operands)
        if traits & Trait.SUMS_AXES:
            return self._known(sum_of=first.value, shares=first.shares, exponential=first.exponential)
        if traits & (Trait.SUBTRACTS | Trait.LOGARITHM) and len(of) == 1 and of[0].product and of[0].product.of_vector:
            # Gains, as `returns @ softmax(s) - 1`: of the mean little is left.
            self.of_vectors.add(of[0].product.result)
        if traits & Trait.EXPONENTIAL:
            return self._known(exponential=True, shares=first.scores)
        if traits & Trait.LOGARITHM:
            return self._known(is_log=first.sum_of is not None)
        if traits & Trait.SUBTRACTS and last.is_log:
            return self._known(scores=True)
        if any(each.is_log for each in operands):  # The largest was subtracted before.
            return self._known(is_log=True)
        # As in `w / (w.sum() + 1e-8)`.
        return self._known(sum_of=of[0].sum_of, product=of[0].product) if len(of) == 1 else None

    def _divided(self, traits: int, operands: Sequence[_Known]) -> _Known | None:
        first, last = operands[0], operands[-1]
        by = last.sum_of if traits & Trait.DIVIDES else last.inverse_of
        if traits & Trait.MULTIPLIES and by is None:
            first, by = last, first.inverse_of
        if by is None:
            return None
        if first.is_number or len(operands) < 2:
            return self._known(inverse_of=by)
        if by == first.value:
            return self._known(shares=True, exponential=first.exponential)
        if first.product and by in first.product.of_points:
            self.of_points.add(first.product.result)  # As `(w @ points) / w.sum(1)`, of weights of any size.
        elif first.product and by in first.product.of_shares:
            self.of_vectors.add(first.product.result)  # Centres of clusters: `(w.T @ x) / w.sum(0)`.
        return None

    def _multiplied(self, eqn: Eqn, operands: Sequence[_Known]) -> _Known:
        of_points = list(itertools.compress(operands, are_points(eqn, self._coordinates)[::-1]))
        if any(each.shares for each in of_points):
            self.of_points.update(eqn.outvars)
        vectors = [each for each, size in zip(operands, free_sizes(eqn), strict=True) if size == 1 and each.shares]
        if not all(each.exponential for each in vectors):
            self.of_vectors.update(eqn.outvars)
        shares = [each.value for each in operands if each.shares]
        product = _Product(eqn.outvars[0], [each.value for each in of_points], shares, bool(vectors))
        return self._known(product=product)


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
