"""A look at a jaxpr before a closer one: whether it may have products of which little is left."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from jamp._compat import Atom, Eqn, Jaxpr, Literal, called_jaxpr, open_jaxpr
from jamp._primitives import PRODUCTS, SHOWN, Trait, has, traits_as_computed
from jamp.transforms.analysis.products.unfolded import times_itself
from jamp.transforms.analysis.reading.axes import is_reduction
from jamp.transforms.analysis.reading.chains import moved_from
from jamp.transforms.analysis.reading.flat import ONCE, loop_body, loop_counts, written
from jamp.transforms.program.flow import num_elements

T = TypeVar("T")

# What a value may be, at a glance: bits.
_PRODUCT = 1  # Of matrices, scaled, moved or added up.
_SUM = 2  # Over axes.
_SQUARE = 4
_SQUARES = 8  # A sum of them, or the product of two sums.
_WEIGHTED = 16  # Something times a sum.
_DIAGONAL = 32  # A matrix that is one.
_SMALL = 64  # A number near zero.
_POWER = 128  # A square of its elements alone.
_GRAM = 256  # A matrix times itself.
_ROW = 512  # Put together of several; or a product of that.
_ONES = 1024  # With ones among them.
_MOST = 8  # Factors of a product, and of a sum of such.
_EPSILON = 0.01  # What is added to a norm is no square of one.
_FEW = 64  # Descents side by side.
_IN_A_STEP = 2  # Products with a factor of what they multiply, in the derivatives of a loss: with data, and weights.


class _Seen(NamedTuple):
    atom: Atom | None  # The first variable that a value was, before it was moved.
    what: int = 0


class Glance:
    """Whether a jaxpr may have products that cancel: a square is added to a product, or a system is solved.

    It goes once through the equations. Most programs need no closer look, which takes up to 2 % of their tracing.

    Attributes:
        squares: Whether there is a product of a matrix with itself.
        inside: By identity, the jaxprs inside that it went through: alone they show it no more.
    """

    def __init__(self, diagonals: Container[Atom]) -> None:
        self.squares = False
        self.inside: set[int] = set()
        self._diagonals = diagonals
        self._found = False
        self._state = 0  # Elements of the largest state of the loop that is looked at.
        self._weighted = False  # Something times a sum is added to a product.
        self._summed: set[Atom | None] = set()
        self._multiplied: set[Atom | None] = set()
        self._sides: dict[Atom | None, tuple[Atom | None, ...]] = {}  # Of products.
        self._factors: dict[Atom | None, frozenset[Atom]] = {}  # Of products, and of sums of such.
        self._roots: dict[Atom | None, Atom] = {}  # By value that a number scales, that.
        self._common: set[Atom] = set()  # Factors that both sides of a product have.

    def finds(self, jaxpr: Jaxpr) -> bool:
        """Looks at a jaxpr."""
        self._look(jaxpr, [_Seen(var) for var in jaxpr.invars])
        return self._found or (self._weighted and not self._summed.isdisjoint(self._multiplied - {None}))

    def _look(self, jaxpr: Jaxpr, given: Sequence[_Seen]) -> list[_Seen]:
        self.inside.add(id(jaxpr))
        seen: dict[Atom, _Seen] = dict(zip(jaxpr.invars, given, strict=True))
        seen.update((var, _Seen(var, _DIAGONAL)) for var in jaxpr.constvars if var in self._diagonals)
        for eqn in jaxpr.eqns:
            traits = traits_as_computed(eqn)
            if not traits & (_ENTERED | Trait.SOLVES):
                if traits & _PASSES and eqn.invars:
                    self._pass(eqn, traits, seen)
            elif traits & Trait.BRANCHES:
                operands = [_at(seen, atom) for atom in eqn.invars[1:]]
                branches = [self._look(open_jaxpr(branch), operands) for branch in eqn.params["branches"]]
                seen.update((var, _any_of(one, var)) for var, *one in zip(eqn.outvars, *branches, strict=True))
            elif traits & (ONCE | Trait.LOOPS):
                operands = [_at(seen, atom) for atom in eqn.invars]
                inside = self._iterate(eqn, operands) if traits & Trait.LOOPS else self._call(eqn, operands)
                atoms = {one.atom for one in operands}
                seen.update((var, self._brought_out(one, var, atoms)) for var, one in inside)
            else:
                self._found = True
        return [_at(seen, atom) for atom in jaxpr.outvars]

    def _call(self, eqn: Eqn, operands: Sequence[_Seen]) -> Iterator[tuple[Atom, _Seen]]:
        return zip(eqn.outvars, self._look(open_jaxpr(called_jaxpr(eqn.params)), operands), strict=True)

    def _iterate(self, eqn: Eqn, operands: Sequence[_Seen]) -> Iterator[tuple[Atom, _Seen]]:
        closed, operands = loop_body(eqn, operands)
        body, (consts, carries) = open_jaxpr(closed), loop_counts(eqn)
        given, changing = list(operands), slice(consts, consts + carries)
        # It only begins with what it is given for its carries.
        given[changing] = [
            _Seen(var, one.what) for var, one in zip(body.invars[changing], given[changing], strict=True)
        ]
        around, self._state = self._state, max((num_elements(var.aval) for var in eqn.outvars), default=0)
        inside = self._look(body, given)
        self._state = around
        return ((var, _Seen(one.atom, one.what | _SUM)) for var, one in zip(eqn.outvars, inside, strict=True))

    def _pass(self, eqn: Eqn, traits: int, seen: dict[Atom, _Seen]) -> None:
        operands, result = eqn.invars, eqn.outvars[0]
        one = _at(seen, operands[0])
        if traits & SHOWN:
            seen.update((var, _at(seen, operands[moved_from(eqn, var)])) for var in eqn.outvars)
        elif traits & _MOVES:
            seen[result] = _Seen(result, one.what)
        elif traits & Trait.ASSEMBLES and not traits & Trait.PLACES:
            seen[result] = _Seen(result, _ROW | (_ONES if _NOTHING in (_at(seen, atom) for atom in operands) else 0))
        elif traits & Trait.SELECTS:
            seen[result] = _any_of((_at(seen, atom) for atom in operands[1:]), result)
        elif traits & Trait.LIMITS:
            limits = [_at(seen, atom) for atom in operands]
            is_activation = any(limit.what & _SMALL for limit in limits)  # As relu is.
            seen[result] = _Seen(result) if is_activation else _any_of(limits, result)
        elif traits & Trait.SUMS_AXES:
            squared = _SQUARES if one.what & _SQUARE else 0
            self._summed.add(one.atom)
            seen[result] = _Seen(result, one.what | _SUM | squared)
        elif traits & Trait.POWER:
            seen[result] = _Seen(result, _of_power(eqn, one.what))
        else:
            other = _at(seen, operands[1]) if len(operands) == 2 else _NOTHING
            if traits & Trait.REPLACES:
                self._found |= bool(one.what & _PRODUCT) and result in self._diagonals
                seen[result] = _Seen(result)
            elif traits & Trait.ADDS:
                self._found |= bool(one.what & _PRODUCT and other.what & _SQUARES)
                self._found |= bool(one.what & _SQUARES and other.what & _PRODUCT)
                self._found |= bool(one.what & other.what & _SQUARES and (one.what | other.what) & _GRAM)
                self._weighted |= bool(one.what & _PRODUCT and other.what & _WEIGHTED)
                self._weighted |= bool(one.what & _WEIGHTED and other.what & _PRODUCT)
                self._found |= self._leaves_little(one, other)
                self._note_factors(result, one, other)
                seen[result] = _Seen(result, (one.what | other.what) & (_PRODUCT | _SQUARES | _WEIGHTED | _GRAM))
            else:
                if traits & Trait.DIVIDES:
                    self._found |= self._is_ratio(eqn, other)
                if traits & PRODUCTS:
                    self._summed.update(side.atom for side, of in ((one, other), (other, one)) if of.atom is None)
                    self._found |= bool(self._state and (one.what | other.what) & _GRAM)
                    self._found |= bool(one.what & other.what & _ROW and (one.what | other.what) & _ONES)
                    self._multiplied.update((one.atom, other.atom))
                    self._sides[result] = one.atom, other.atom
                    self._note_common(one, other)
                    self.squares |= one.atom is not None and one.atom is other.atom and not is_reduction(eqn)
                elif (scaled := _scaled(eqn, one, other)) is not None:
                    self._roots[result] = self._roots.get(scaled, scaled)
                self._note_factors(result, one, other, *((one.atom, other.atom) if traits & PRODUCTS else ()))
                seen[result] = _Seen(result, _of_product(traits, one, other))
        if result in self._diagonals:
            seen[result] = _Seen(result, seen[result].what | _DIAGONAL)

    def _brought_out(self, one: _Seen, var: Atom, given: Container[Atom | None]) -> _Seen:
        """What a call or a loop returns: if made inside, that of this one alone, since several share a jaxpr."""
        if one.atom is None or one.atom in given:
            return one
        _hand_on(self._sides, one.atom, var)
        _hand_on(self._factors, one.atom, var)
        _hand_on(self._roots, one.atom, var)
        for noted in (self._summed, self._multiplied):
            if one.atom in noted:
                noted.add(var)
        return _Seen(var, one.what)

    def _note_factors(self, result: Atom, one: _Seen, other: _Seen, *sides: Atom | None) -> None:
        """Notes the factors of what is made of two values, if it is of products."""
        factors = self._factors.get(one.atom, _NONE) | self._factors.get(other.atom, _NONE)
        factors = factors.union(self._roots.get(side, side) for side in sides if side is not None)
        if 0 < len(factors) <= _MOST:
            self._factors[result] = factors

    def _note_common(self, one: _Seen, other: _Seen) -> None:
        """Notes a product as a step if one side is a factor of the other, which in a loop or twice is an iteration."""
        left, right = self._factors.get(one.atom, _NONE), self._factors.get(other.atom, _NONE)
        if not left and not right:
            return
        left_side, right_side = (self._roots.get(side.atom, side.atom) for side in (one, other))
        common = {
            atom for atom, factors in ((left_side, right), (right_side, left)) if atom in factors and atom is not None
        }
        known, self._common = self._common, self._common | common
        self._found |= bool(common) and bool(self._state or known & common or len(self._common) > _IN_A_STEP)

    def _leaves_little(self, one: _Seen, other: _Seen) -> bool:
        """Whether a number or an identity is added to a product, or a projection is taken off what it projects."""
        if (one.what | other.what) & _PRODUCT and any(side.atom is None and not side.what for side in (one, other)):
            return True
        of_diagonal = (one.what & _PRODUCT and other.what & _DIAGONAL) or (
            one.what & _DIAGONAL and other.what & _PRODUCT
        )
        return bool(of_diagonal) or self._projects(one, other) or self._projects(other, one)

    def _projects(self, of: _Seen, product: _Seen) -> bool:
        sides = self._sides.get(product.atom, ())
        inner = [atom for side in sides for atom in self._sides.get(side, ())]
        return of.atom is not None and bool(inner) and of.atom in (*sides, *inner)

    def _is_ratio(self, eqn: Eqn, divisor: _Seen) -> bool:
        """Whether a few numbers may be divided by a sum of products, or, in a loop, by one of its larger state."""
        if len(eqn.invars) != 2 or any(isinstance(atom, Literal) for atom in eqn.invars):
            return False
        size = max(num_elements(atom.aval) for atom in eqn.invars)
        return size < self._state or (size <= _FEW and bool(divisor.what & _PRODUCT))


_NOTHING = _Seen(None)
_NONE: frozenset[Atom] = frozenset()
_SMALL_NUMBER = _Seen(None, _SMALL)
_ENTERED = ONCE | Trait.BRANCHES | Trait.LOOPS
_MOVES = Trait.MOVES | Trait.PADS
_PASSES = (
    SHOWN
    | _MOVES
    | Trait.SELECTS
    | PRODUCTS
    | Trait.SUMS_AXES
    | Trait.POWER
    | Trait.ADDS
    | Trait.MULTIPLIES
    | Trait.DIVIDES
    | Trait.ASSEMBLES
    | Trait.REPLACES
    | Trait.LIMITS
)


def _hand_on(known: dict[Atom | None, T], inner: Atom, outer: Atom) -> None:
    if inner in known:
        known[outer] = known[inner]


def _scaled(eqn: Eqn, one: _Seen, other: _Seen) -> Atom | None:
    """What an equation scales by one number."""
    sizes = [num_elements(atom.aval) for atom in eqn.invars]
    if len(sizes) == 2 and sizes[1] == 1:
        return one.atom
    return other.atom if len(sizes) == 2 and sizes[0] == 1 and has(eqn, Trait.MULTIPLIES) else None


def _of_product(traits: int, one: _Seen, other: _Seen) -> int:
    is_square = one.atom is not None and one.atom is other.atom
    either = one.what | other.what
    if traits & PRODUCTS:
        if one.atom is None or other.atom is None:  # With ones, it adds up.
            return either | _PRODUCT | _SUM
        if any(side.what & _DIAGONAL and side.what & _SUM for side in (one, other)):
            return _PRODUCT | _WEIGHTED
        # With squares, as in `x**2 @ w`, it is a weighted sum of them.
        squares = _SQUARES if is_square or either & _POWER else 0
        return _PRODUCT | squares | (_GRAM if is_square else 0) | (either & (_ROW | _ONES))
    if one.what & other.what & (_SUM | _PRODUCT):
        return _SQUARES | (either & _PRODUCT)
    if either & _SUM and one.atom is not None and other.atom is not None:
        either |= _WEIGHTED
    of_product = either & _PRODUCT and one.atom is not None and other.atom is not None
    if is_square:
        return either | _SQUARE | _POWER
    return either | _SQUARE if of_product else either


def _of_power(eqn: Eqn, base: int) -> int:
    if times_itself(eqn) == 2:
        return _SQUARES | (base & _GRAM) if base & (_SUM | _PRODUCT) else _SQUARE | _POWER
    return 0 if has(eqn, Trait.DIVIDES) or not has(eqn, Trait.SINGULAR) else base  # A root.


def _any_of(cases: Iterable[_Seen], result: Atom) -> _Seen:
    what = 0
    for case in cases:
        what |= case.what
    return _Seen(result, what)


def _at(seen: Mapping[Atom, _Seen], atom: Atom) -> _Seen:
    if isinstance(atom, Literal):
        number = written(atom)
        return _SMALL_NUMBER if number is not None and abs(number) < _EPSILON else _NOTHING
    return seen.get(atom) or _Seen(atom)
