"""Products of which little is left: those of distances, moments and systems of equations, and their derivatives."""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jamp._compat import Atom, Eqn, Jaxpr, Literal, Var, called_jaxpr, open_jaxpr
from jamp._primitives import PRODUCTS, Trait, has
from jamp.transforms.analysis.factors import Cancelled, Unfolded, computes, squares
from jamp.transforms.analysis.flat import ONCE, Opened, Value, loop_body
from jamp.transforms.analysis.moments import distances, systems


def cancelling(jaxpr: Jaxpr) -> frozenset[Var]:
    """Results of the products in a jaxpr, and in the calls in it, that cancel with others."""
    if not _Glance().finds(jaxpr):
        return frozenset()
    opened = Opened(jaxpr, deep=True, loops=True)
    unfolded = Unfolded(opened)
    found = [*distances(opened, unfolded), *systems(opened, unfolded)]
    found += _derivatives(opened, unfolded, found)
    return frozenset(product.eqn.outvars[0] for cancelled in found for product in cancelled.products)


def _derivatives(opened: Opened, unfolded: Unfolded, found: Sequence[Cancelled]) -> list[Cancelled]:
    """Products of what is left with what cancelled, or with more of what is left: gradients, of which as little is."""
    products: list[Cancelled] = []
    left: dict[Value, frozenset[Value]] = {}
    for cancelled in found:
        left.update((value, left.get(value, frozenset()) | cancelled.parts) for value in cancelled.left)
    for flat in opened.eqns if left else ():
        parts = frozenset().union(*(left[value] for value in flat.values if value in left))
        if not parts or not computes(flat.eqn):
            continue
        left.update((value, left.get(value, parts) | parts) for value in flat.outs)
        others = [value for value in flat.values if value not in left]
        made_of = unfolded.origins(part for value in others for part in unfolded.factors(value).of)
        if has(flat.eqn, PRODUCTS) and (not others or not parts.isdisjoint(made_of)):
            products.append(Cancelled(unfolded.factors(flat.outs[0]).products))
    return products


class _Is(enum.IntFlag):
    """What a value may be, at a glance."""

    NOTHING = 0
    PRODUCT = enum.auto()  # Of matrices, scaled, moved or added up.
    SUM = enum.auto()  # Over axes.
    SQUARE = enum.auto()
    SQUARES = enum.auto()  # A sum of them, or the product of two sums.


class _Seen(NamedTuple):
    atom: Atom | None  # The first variable that a value was, before it was moved.
    what: _Is = _Is.NOTHING


class _Glance:
    """Whether a jaxpr may have products that cancel: a square is added to a product, or a system is solved.

    It goes once through the equations. Most programs need no closer look, which takes up to 2 % of their tracing.
    """

    def __init__(self) -> None:
        self._found = False

    def finds(self, jaxpr: Jaxpr) -> bool:
        """Looks at a jaxpr."""
        self._look(jaxpr, [_Seen(var) for var in jaxpr.invars])
        return self._found

    def _look(self, jaxpr: Jaxpr, given: Sequence[_Seen]) -> list[_Seen]:
        seen: dict[Atom, _Seen] = dict(zip(jaxpr.invars, given, strict=True))
        for eqn in jaxpr.eqns:
            if self._found:
                break
            if has(eqn, ONCE):
                inside = self._look(open_jaxpr(called_jaxpr(eqn.params)), [_at(seen, atom) for atom in eqn.invars])
                seen.update(zip(eqn.outvars, inside, strict=True))
            elif has(eqn, Trait.BRANCHES):
                given = [_at(seen, atom) for atom in eqn.invars[1:]]
                branches = [self._look(open_jaxpr(branch), given) for branch in eqn.params["branches"]]
                seen.update(zip(eqn.outvars, map(_any_of, zip(*branches, strict=True)), strict=True))
            elif has(eqn, Trait.LOOPS):
                body, operands = loop_body(eqn, eqn.invars)
                inside = self._look(open_jaxpr(body), [_at(seen, atom) for atom in operands])
                found = (one._replace(what=one.what | _Is.SUM) for one in inside)
                seen.update(zip(eqn.outvars, found, strict=True))
            elif has(eqn, Trait.SOLVES):
                self._found = True
            else:
                self._pass(eqn, seen)
        return [_at(seen, atom) for atom in jaxpr.outvars]

    def _pass(self, eqn: Eqn, seen: dict[Atom, _Seen]) -> None:
        if not eqn.invars or not has(eqn, _PASSES):
            return
        result = eqn.outvars[0]
        one = _at(seen, eqn.invars[0])
        other = _at(seen, eqn.invars[1]) if len(eqn.invars) == 2 else _NOTHING
        if has(eqn, _VIEWS):
            seen[result] = one
        elif has(eqn, Trait.MOVES):
            seen[result] = one._replace(atom=result)
        elif has(eqn, Trait.SELECTS):
            seen[result] = _any_of(_at(seen, atom) for atom in eqn.invars[1:])
        elif has(eqn, Trait.SUMS_AXES):
            squared = _Is.SQUARES if one.what & _Is.SQUARE else _Is.NOTHING
            seen[result] = _Seen(result, one.what | _Is.SUM | squared)
        elif has(eqn, Trait.POWER):
            seen[result] = _Seen(result, _of_power(eqn, one.what))
        elif has(eqn, Trait.ADDS):
            self._found |= bool(one.what & _Is.PRODUCT and other.what & _Is.SQUARES)
            self._found |= bool(one.what & _Is.SQUARES and other.what & _Is.PRODUCT)
            seen[result] = _Seen(result, (one.what | other.what) & (_Is.PRODUCT | _Is.SQUARES))
        else:
            seen[result] = _Seen(result, _of_product(eqn, one, other))


_NOTHING = _Seen(None)
_VIEWS = Trait.VIEW | Trait.CONVERTS | Trait.NEGATES
_PASSES = (
    _VIEWS
    | Trait.MOVES
    | Trait.SELECTS
    | PRODUCTS
    | Trait.SUMS_AXES
    | Trait.POWER
    | Trait.ADDS
    | Trait.MULTIPLIES
    | Trait.DIVIDES
)


def _of_product(eqn: Eqn, one: _Seen, other: _Seen) -> _Is:
    is_square = one.atom is not None and one.atom is other.atom
    if has(eqn, PRODUCTS):
        return _Is.PRODUCT | _Is.SQUARES if is_square else _Is.PRODUCT
    if one.what & other.what & (_Is.SUM | _Is.PRODUCT):
        return _Is.SQUARES
    either = one.what | other.what
    of_product = either & _Is.PRODUCT and one.atom is not None and other.atom is not None
    return either | _Is.SQUARE if is_square or of_product else either


def _of_power(eqn: Eqn, base: _Is) -> _Is:
    if squares(eqn):
        return _Is.SQUARES if base & _Is.SUM else _Is.SQUARE
    return _Is.NOTHING if has(eqn, Trait.DIVIDES) or not has(eqn, Trait.SINGULAR) else base  # A root.


def _any_of(cases: Iterable[_Seen]) -> _Seen:
    return _Seen(None, functools.reduce(operator.or_, (case.what for case in cases)))


def _at(seen: Mapping[Atom, _Seen], atom: Atom) -> _Seen:
    if isinstance(atom, Literal):
        return _NOTHING
    return seen.get(atom) or _Seen(atom)
