"""What values are made of: the factors that a chain of products multiplies, and the terms that a sum adds up."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jamp._compat import Eqn, Literal
from jamp._primitives import MOVED, PRODUCTS, SCALES, SHOWN, Rule, Trait, contracts_nothing, has, rule_of
from jamp.transforms.analysis.products.factors import Factors
from jamp.transforms.analysis.reading.arithmetic import computed
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source, Value
from jamp.transforms.analysis.reading.walks import back
from jamp.transforms.program.flow import num_elements

_MOST = 8  # Factors of a term, and terms of a sum. What has more is a deep linear network, or a residual stream.
_MOST_OF_ACTIVATION = 32  # Values that one computes: softplus, with its limits, takes a dozen.
_COMPUTING = frozenset({Rule.HALF, Rule.FULL, Rule.NO_HALF, Rule.PROMOTE, Rule.FOLLOW, Rule.TRACED})
_NO_ACTIVATION = PRODUCTS | Trait.SUMS_AXES | Trait.SOLVES


class Unfolded:
    """The values of a jaxpr as sums of products.

    Args:
        opened: The jaxpr.

    Attributes:
        first: Of values that are computed alike, the first.
    """

    def __init__(self, opened: Opened) -> None:
        self.first = opened.first
        self._opened = opened
        self._factors: dict[Value, Factors] = {}
        self._terms: dict[Value, tuple[Factors, ...]] = {}
        self._ahead = iter(opened.eqns)  # In order, and not back from each value: thousands may stand in a row.

    def factors(self, source: Source) -> Factors:
        """The factors of a value, in front of what is neither a product, nor a sum over axes, nor a view."""
        if isinstance(source, Literal):
            return Factors()
        self._go_to(source)
        return self._factors[source] if source in self._factors else Factors.only(self._opened.first(source))

    def _go_to(self, value: Value) -> None:
        """Unfolds all values up to one."""
        while value not in self._factors and self._opened.maker(value) is not None:
            for out in next(self._ahead).outs:
                self._factors[out] = self._limited(out)
                self._terms[out] = self._add(out)[:_MOST]

    def _limited(self, value: Value) -> Factors:
        found = self._unfold(value)
        if found is not None and len(found.of) > _MOST:
            found = found.shallow
        return Factors.only(self._opened.first(value)) if found is None or len(found.of) > _MOST else found

    def _unfold(self, source: Value) -> Factors | None:
        if self._opened.number(source) is not None:
            return Factors()
        flat = self._opened.maker(source)
        if flat is None:
            return None
        eqn, ins = flat.eqn, flat.ins
        if has(eqn, Trait.LOOPS):
            return self._added_up(flat, source)
        if flat.cases:  # For one platform the diagonal is a sum, and for others a gather.
            return min(
                (self.factors(case[flat.outs.index(source)]) for case in flat.cases), key=lambda each: len(each.of)
            )
        if has(eqn, Trait.MATRIX) and contracts_nothing(eqn.params):
            return self.factors(ins[0]).times(self.factors(ins[1]))
        if has(eqn, PRODUCTS) and not has(eqn, Trait.GROUPS):
            for number, summed in (ins, ins[::-1]):
                if self._opened.number(number) is not None:  # It adds up as `jnp.sum` does.
                    found = self.factors(summed)
                    return found.added()._replace(products=(*found.products, flat), last=(*found.last, flat))
            return self.factors(ins[0]).contracted(self.factors(ins[1]), flat)._replace(sides=self._sides(ins))
        if has(eqn, Trait.ADDS):
            return self.factors(ins[0]).joined(self.factors(ins[1])) if self._multiply_alike(ins) else None
        if has(eqn, Trait.SUMS_AXES):
            return self.factors(ins[0]).added()
        if has(eqn, SHOWN) or (has(eqn, Trait.LIMITS) and len(ins) == 1):
            return self.factors(ins[0])
        if has(eqn, Trait.MULTIPLIES) or (has(eqn, Trait.DIVIDES) and len(ins) == 2):
            one, other = self.factors(ins[0]), self.factors(ins[1])
            # What is divided by its own sum is shares: weights, of which nobody takes the sum apart again.
            are_shares = has(eqn, Trait.DIVIDES) and other.is_sum and other == one.added()
            if are_shares or (has(eqn, Trait.MULTIPLIES) and self._is_activation(ins, one, other)):
                return None
            found = one.times(other)
            if has(eqn, Trait.MULTIPLIES) and one.of and other.of:
                found = found._replace(sides=self._sides(ins))
            return self._rooted(found)
        if times := times_itself(eqn):
            found = functools.reduce(Factors.times, [self.factors(ins[0])] * times)
            return self._rooted(found._replace(sides=self._sides(ins[:1] * 2) if times == 2 else ()))
        if has(eqn, Trait.MOVES | Trait.PADS):  # A part of a mean is the mean of a part.
            found = self.factors(ins[0])
            return found._replace(is_part=True) if found.is_sum else None
        if has(eqn, Trait.SELECTS):
            cases = [case for case in ins[1:] if self._opened.number(case) is None]
            return self.factors(cases[0])._replace(is_part=True) if len(cases) == 1 else None
        return None

    def _multiply_alike(self, addends: Sequence[Source]) -> bool:
        """Whether two values are products of the same ones, as in the tangent of `x * x`, which is `x * v + v * x`."""
        makers = [flat for side in self._sides(addends) if (flat := self._opened.maker(side)) is not None]
        if len(makers) != 2 or not all(has(flat.eqn, PRODUCTS | Trait.MULTIPLIES) for flat in makers):
            return False
        one, other = (frozenset(map(self.first, self.origins(flat.values))) for flat in makers)
        return one == other

    def _is_activation(self, sides: Sequence[Source], one: Factors, other: Factors) -> bool:
        """Whether a product of matrices is multiplied by a function of itself, as by GELU: a layer ends there."""
        for side, factors, gate in zip(self._sides(sides), (one, other), (other, one), strict=True):
            if factors.products and any(self._is_made_of(factor, side) for factor in gate.of):
                return True
        return False

    def _is_made_of(self, factor: Value, value: Source) -> bool:
        """Whether a factor is computed from a value, element by element."""

        def onward(flat: Flat, _: Value) -> Iterable[Value]:
            return () if flat.cases or has(flat.eqn, _NO_ACTIVATION) else map(self._opened.first, flat.values)

        walked = itertools.islice(back(self._opened, [factor], onward), _MOST_OF_ACTIVATION)
        return any(made == value != factor for made, _ in walked)

    def _sides(self, sources: Iterable[Source]) -> tuple[Source, ...]:
        return tuple(self.unscaled(source) if isinstance(source, Value) else source for source in sources)

    def unscaled(self, value: Value) -> Value:
        """A value in front of views, and of numbers that scale it; of those computed alike the first."""
        while (before := self.before(value)) is not None:
            _, value = before
        return self._opened.first(value)

    def before(self, value: Value) -> tuple[Flat, Value] | None:
        """What shows a value in another shape, or scales it, and of what."""
        flat = self._opened.maker(value)
        if flat is None:
            return None
        values = flat.values if has(flat.eqn, SHOWN) else self.scaled(flat)
        return (flat, values[0]) if len(values) == 1 else None

    def scaled(self, flat: Flat) -> list[Value]:
        """What one number scales, if an equation does that: of all elements, written or computed."""
        if not has(flat.eqn, SCALES) or len(flat.ins) != 2:
            return []
        one, other = flat.ins
        if has(flat.eqn, Trait.MULTIPLIES) and not self._is_number(other):
            one, other = other, one
        return [one] if isinstance(one, Value) and self._is_number(other) else []

    def _is_number(self, source: Source) -> bool:
        return num_elements(source.aval) == 1 or self._opened.number(source) is not None

    def _added_up(self, loop: Flat, source: Value) -> Factors | None:
        """The factors of what a loop adds up, as those of what `jnp.sum` does."""
        index = loop.outs.index(source)
        carried = self._opened.carries(loop)[index : index + 1]
        flat = self._opened.maker(loop.cases[0][index]) if carried else None
        if flat is None or not has(flat.eqn, Trait.ADDS):
            return None
        terms = [term for term in flat.ins if not self._decays(term, carried[0])]
        return self.factors(terms[0]).added() if len(terms) < len(flat.ins) and terms else None

    def _decays(self, term: Source, carry: Value) -> bool:
        """Whether a term is a carry, times a number that the program writes at the most."""
        flat = self._opened.maker(term)
        while term != carry and flat is not None and has(flat.eqn, Trait.MULTIPLIES):
            rest = [source for source in flat.ins if self._opened.number(source) is None]
            if len(rest) != 1:
                return False
            term, flat = rest[0], self._opened.maker(rest[0])
        return term == carry

    def _rooted(self, found: Factors) -> Factors:
        """The square of a root is what the root is of."""
        for value in found.squared:
            flat = self._opened.maker(value)
            if flat is not None and len(flat.ins) == 1 and computed(flat.eqn, (16.0,)) == 4.0:
                of, outer, whole = (_without(values, value) for values in (found.of, found.outer, found.whole))
                rest = found._replace(of=of, outer=outer, whole=whole, sides=())
                squared = rest.times(self.factors(flat.ins[0]))
                return squared._replace(sides=found.sides) if rest.of else squared
        return found

    def terms(self, source: Source) -> tuple[Factors, ...]:
        """The terms of a sum that are products, sums of them or of sums, in front of numbers that scale them."""
        if isinstance(source, Literal):
            return ()
        self._go_to(source)
        return self._terms.get(source, ())

    def _add(self, source: Value) -> tuple[Factors, ...]:
        flat = self._opened.maker(source)
        if flat is not None and has(flat.eqn, Trait.ADDS):
            return tuple(term for operand in flat.ins for term in self.terms(operand))
        if flat is not None and has(flat.eqn, SHOWN):
            return self.terms(flat.ins[0])
        if flat is not None and has(flat.eqn, SCALES) and len(flat.ins) == 2:
            one, other = flat.ins
            if self._opened.number(other) is not None:
                return self.terms(one)
            if has(flat.eqn, Trait.MULTIPLIES) and self._opened.number(one) is not None:
                return self.terms(other)
        found = self.factors(source)
        return (found,) if found.products or (found.is_sum and len(found.of) > 1) else ()

    def origin(self, value: Value) -> Value:
        """What a value was before its elements were moved, or some of them taken."""
        while isinstance(before := self._moved(value), Value):
            value = before
        return value

    def _moved(self, value: Value) -> Source | None:
        flat = self._opened.maker(value)
        if flat is None:
            return self._opened.scanned.get(value)
        return flat.ins[0] if has(flat.eqn, MOVED) else None

    def origins(self, values: Iterable[Value]) -> frozenset[Value]:
        """The origins of several values."""
        return frozenset(map(self.origin, values))


def _without(values: Sequence[Value], value: Value) -> tuple[Value, ...]:
    """Values without two that are the same."""
    rest = list(values)
    for _ in range(2):
        if value in rest:
            rest.remove(value)
    return tuple(rest)


def computes(eqn: Eqn) -> bool:
    """Whether an equation computes numbers from those of its operands, and decides nothing."""
    return rule_of(eqn) in _COMPUTING and not has(eqn, Trait.COMPARES | Trait.CHOOSES | Trait.COUNTS)


def times_itself(eqn: Eqn) -> int:
    """How often an equation multiplies its first operand by itself: 2 of a square; 0 if it does not."""
    if not has(eqn, Trait.POWER):
        return 0
    numbers = [atom.val for atom in eqn.invars[1:] if isinstance(atom, Literal) and np.ndim(atom.val) == 0]
    exponents = [float(number) for number in numbers if not np.iscomplexobj(number)]
    found = computed(eqn, (2.0, *exponents)) if len(exponents) == len(eqn.invars) - 1 else None
    return next((times for times in range(2, _MOST + 1) if found == 2.0**times), 0)


def behind(opened: Opened, values: Iterable[Value]) -> Iterator[Value]:
    """What values are made of, back to the next products and solvers; of what a loop stacks, what it stacks."""

    def onward(flat: Flat, value: Value) -> Iterable[Source]:
        if flat.cases:  # Of a loop, those of an iteration.
            return [case[flat.outs.index(value)] for case in flat.cases]
        return flat.values if computes(flat.eqn) and not has(flat.eqn, PRODUCTS | Trait.SOLVES) else ()

    return (value for value, flat in back(opened, values, onward) if flat is not None)
