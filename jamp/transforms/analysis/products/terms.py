"""Sums of multiples of one value: `28 * c * r**5 - 48 * c * r**6`, which cancels as `28 - 48 * r` does.

So are derivatives: each path from a value to the result adds a multiple of the same cotangent, and what flattens a
function, such as a cutoff, makes them cancel. Rounded one by one, the multiples are no longer those of one value, and
what is left of them is noise. In float32 they lose nothing, and the value itself may be half: all of them are multiples
of what it is then. All this is elementwise, in one kernel with the sum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from jamp._compat import Eqn, Jaxpr, Literal, Var, open_jaxpr
from jamp._primitives import PRODUCTS, SCALES, SHOWN, Trait, having, holds, traits_of
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source, Value, loop_body, loop_counts
from jamp.transforms.analysis.reading.walks import back

_PASSES = SHOWN | SCALES | Trait.SELECTS | Trait.ADDS
# Factors of a term, and terms of a sum, that are looked at. What has more is a product over the steps of a loop, or a
# residual stream.
_MOST = 12
_Factors = frozenset[Value]
_Terms = tuple[_Factors, ...]
_OF_NUMBER: _Terms = (frozenset(),)


def terms(jaxpr: Jaxpr) -> set[Var]:
    """Variables to be computed in float32: multiples of one value that are added up, and their sums.

    Args:
        jaxpr: The jaxpr; calls in it are looked into, and what its loops add up.
    """
    found = _Search(Opened(jaxpr)).found if _adds(jaxpr) else set()
    return found.union(*map(_in_loop, having(jaxpr.eqns, Trait.LOOPS)))


def _in_loop(eqn: Eqn) -> set[Var]:
    """Variables in the body of a loop that adds up multiples of one constant: its iterations add the terms.

    In a body with matrix products the terms are made of their half results, and nothing that is that far off cancels.
    """
    body = open_jaxpr(loop_body(eqn, eqn.invars)[0])
    if not _adds(body) or holds(body.eqns, PRODUCTS):
        return set()
    count, _ = loop_counts(eqn)
    opened = Opened(body)
    search = _Search(opened)
    consts = frozenset(Value(0, var) for var in body.invars[:count])
    for before, atom in zip(body.invars[count:], body.outvars, strict=False):  # What is scanned has no result.
        search.add_over_iterations(Value(0, before), opened.source(atom), consts)
    return search.found


def _adds(jaxpr: Jaxpr) -> bool:
    return holds(jaxpr.eqns, Trait.ADDS, Trait.CALLS)


class _Search:
    """The search through one program.

    Args:
        opened: The program.

    Attributes:
        found: What was found.
    """

    def __init__(self, opened: Opened) -> None:
        self.found: set[Var] = set()
        self._opened = opened
        self._terms: dict[Value, _Terms] = {}
        self._spread: set[Value] = set()  # The same along an axis, such as a cotangent of what was added up.
        for flat in opened.eqns:
            traits = traits_of(flat.eqn)
            if traits & _PASSES and len(flat.outs) == 1:
                self._look(flat, traits, flat.outs[0])
            elif traits & Trait.MOVES and self._is_spread(flat):
                for part in flat.outs:
                    self._remember(part, self._of(flat.ins[0]))

    def _look(self, flat: Flat, traits: int, result: Value) -> None:
        """Finds what a result is the sum of."""
        of_operands = [self._of(source) for source in _multiplied(flat)]
        if not traits & (Trait.ADDS | Trait.SELECTS):
            if traits & Trait.GROWS or (traits & Trait.VIEW and self._is_spread(flat)):
                self._spread.add(result)
            if len(of_operands) == 1:
                self._remember(result, of_operands[0])
                return
            few = math.prod(map(len, of_operands)) <= _MOST
            products = itertools.product(*(of_operands if few else map(_common, of_operands)))
            self._remember(result, tuple(frozenset[Value]().union(*product) for product in products))
            return
        added = tuple(itertools.chain(*of_operands))
        # What is left of a number is a value of its own, as of a gate: `z * h + (1 - z) * n` are no multiples of `z`.
        self._remember(result, _common(added) if any(isinstance(s, Literal) for s in flat.ins) else added)
        if traits & Trait.ADDS:
            self._join(result, added, _shared(of_operands))

    def add_over_iterations(self, before: Value, after: Source | None, consts: _Factors) -> None:
        """Finds multiples of what a loop is given for all its iterations, if those are added to a carry.

        Args:
            before: The carry, as an iteration gets it.
            after: What the iteration makes of it.
            consts: What the loop is given.
        """
        if isinstance(after, Value):
            added = self._of(after)
            terms = [term for term in added if before not in term]
            if len(terms) < len(added):
                self._join(after, terms, consts.intersection(frozenset[Value]().union(*terms)))

    def _join(self, result: Value, added: Sequence[_Factors], shared: _Factors) -> None:
        """Adds a sum if some of its terms share factors."""
        linked = [term for term in added if not shared.isdisjoint(term)]
        if not linked:
            return
        common = linked[0].intersection(*linked) or shared
        made = {value for value in common if any(common & term - {value} for term in self._of(value))}
        self._add(result, shared, common - made)

    def _remember(self, result: Value, added: _Terms) -> None:
        """Remembers the terms of a value: of each it is a factor as well."""
        known = added if len(added) <= _MOST else _common(added)
        self._terms[result] = tuple(term | {result} if len(term) < _MOST else frozenset({result}) for term in known)

    def _is_spread(self, flat: Flat) -> bool:
        """Whether what an equation moves is the same along an axis."""
        return bool(flat.values) and flat.ins[0] is flat.values[0] and flat.values[0] in self._spread

    def _of(self, source: Source) -> _Terms:
        """The terms that a value is the sum of: often itself alone."""
        if not isinstance(source, Value):
            return _OF_NUMBER
        return self._terms.get(source) or (frozenset({source}),)

    def _add(self, result: Value, shared: _Factors, ends: _Factors) -> None:
        """Adds a sum, and what is made of shared factors on the way to it, from the first that all such terms have."""

        def is_on_the_way(source: Source) -> bool:
            if not isinstance(source, Value) or source in ends:
                return False
            return any(shared & term for term in self._terms.get(source, ()))

        walked = back(self._opened, [result], lambda flat, _: filter(is_on_the_way, _multiplied(flat)))
        for value, _ in walked:
            outer = self._opened.outer(value)
            self.found.update((value.var,) if outer is None else (value.var, outer))


def _multiplied(flat: Flat) -> Sequence[Source]:
    """The operands that a result is a multiple of: of a division what is divided, of a choice what it is made among."""
    traits = traits_of(flat.eqn)
    if traits & Trait.SELECTS:
        return flat.ins[1:]
    return flat.ins[:1] if traits & (Trait.DIVIDES | Trait.MOVES) else flat.ins


def _common(added: _Terms) -> _Terms:
    """A value with many terms as one term: what all of them are multiples of."""
    return (added[0].intersection(*added),)


def _shared(of_operands: Sequence[_Terms]) -> _Factors:
    """The factors that terms of several operands have."""
    seen, shared = frozenset[Value](), frozenset[Value]()
    for added in of_operands:
        factors = frozenset[Value]().union(*added)
        shared |= seen & factors
        seen |= factors
    return shared
