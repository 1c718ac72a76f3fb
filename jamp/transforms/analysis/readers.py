"""What an equation wants of its operands, by what is wanted of its results.

Rules are asked in turn, and the first that has an answer decides. What none of them answers passes on what is wanted of
its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.core import ShapedArray

from jamp._compat import Aval, Eqn, Literal
from jamp._dtypes import Pair, is_complex, is_differentiable
from jamp._primitives import PRODUCTS, Rule, Trait, asks_one, is_outer, rule_of, traits_of
from jamp.transforms.analysis.apart import wanted_near
from jamp.transforms.analysis.facts import Facts
from jamp.transforms.analysis.reading.axes import (
    has_one_channel,
    insists_on_full,
    is_moment,
    is_reduction,
    makes_one_channel,
    num_contracted,
    operators,
    places,
    weights,
)
from jamp.transforms.analysis.reading.chains import Constants, is_mask
from jamp.transforms.analysis.regimes import Elementwise, Regime, Ruled
from jamp.transforms.program.heuristics import Heuristics
from jamp.transforms.program.want import Want, combine, raised


class Reader(NamedTuple):
    """An equation, as one that reads its operands.

    Attributes:
        eqn: The equation.
        wants: What is wanted of its results.
        want: What is wanted of it as a whole.
        rule: The rule of its primitive.
        traits: Those of its primitive.
        regime: Its regime.
        constants: What depends on no argument of the program.
    """

    eqn: Eqn
    wants: Sequence[Want]
    want: Want
    rule: Rule
    traits: int
    regime: Regime
    constants: Constants


class Readers:
    """What equations want of their operands.

    Args:
        facts: What is known of values that several equations make.
        pair: The wide and the narrow dtype.
        heuristics: The thresholds.
    """

    def __init__(self, facts: Facts, pair: Pair, heuristics: Heuristics) -> None:
        self._facts = facts
        self._pair = pair
        self._heuristics = heuristics
        self._rules: Sequence[Callable[[Reader], Want | None]] = (
            _of_what_decides,
            self._of_phases,
            _of_scores,
            self._near_a_number,
            self._near_an_identity,
            self._in_float32,
            self._of_sums,
            self._in_half,
            _of_choices,
            _of_gates,
        )

    def wanted_by(self, eqn: Eqn, wants: Sequence[Want], ruled: Ruled, constants: Constants) -> Sequence[Want]:
        """What an equation without jaxprs inside wants of its operands.

        Args:
            eqn: The equation.
            wants: What is wanted of its results.
            ruled: Its regime, and what rules of the policy say.
            constants: What depends on no argument of the program.
        """
        rule = Rule.PROMOTE if ruled.promotes or is_outer(eqn) else rule_of(eqn)
        reader = Reader(eqn, wants, _as_a_whole(wants), rule, traits_of(eqn), ruled.regime, constants)
        wanted = self._of_operands(reader)
        if ruled.regime.delicate:
            for index in places(eqn):
                wanted[index] = combine(wanted[index], Want.PHASE)
        return wanted

    def _of_operands(self, reader: Reader) -> list[Want]:
        for decide in self._rules:
            if (want := decide(reader)) is not None:
                return [want] * len(reader.eqn.invars)
        return self._passed_on(reader)

    def _of_phases(self, reader: Reader) -> Want | None:
        if not reader.regime.delicate:
            return None
        makes = Want.PHASE in reader.wants and (self._makes_phase(reader) or self._makes_index(reader))
        return Want.PHASE if makes or self._reads_phase(reader) else None

    def _near_a_number(self, reader: Reader) -> Want | None:
        if not reader.regime.delicate:
            return None
        return wanted_near(reader.eqn, reader.want, reader.constants, self._heuristics.part)

    def _near_an_identity(self, reader: Reader) -> Want | None:
        """The sum with a diagonal matrix is float32, and a small multiple of it must not be lost in what was rounded.

        Of a Gram matrix that was, with 1e-3 of its trace on the diagonal, a root by Newton's iteration was infinite.
        """
        if not (reader.regime.delicate and reader.traits & Trait.ADDS) or reader.want.full:
            return None
        near = any(atom in self._facts.diagonals for atom in reader.eqn.invars if not isinstance(atom, Literal))
        return raised(reader.want) if near else None

    def _in_float32(self, reader: Reader) -> Want | None:
        """What only moves on, or changes its weak type, is wanted as its readers want it, and in float32 at least."""
        if not (reader.regime.all_full or reader.rule in (Rule.FULL, Rule.NO_HALF, Rule.OPAQUE, Rule.TRACED)):
            return None
        if reader.traits & (Trait.SINGULAR | Trait.SOLVES) and reader.regime.delicate:
            return Want.DIVISOR
        moves = reader.rule is Rule.TRACED and reader.traits & Trait.CONTINUES and reader.regime.delicate
        rounds = moves and self._pair.is_narrow(reader.eqn.outvars[0].aval.dtype)
        return max(reader.want, Want.FULL) if moves and not rounds and reader.want.full else Want.FULL

    def _of_sums(self, reader: Reader) -> Want | None:
        """Of products that are sums in another form or divisors, of those that cancel or ask for a precision."""
        eqn = reader.eqn
        if not reader.traits & PRODUCTS or not reader.regime.delicate:
            return None
        if eqn.outvars[0] in self._facts.points:
            return Want.DIVISOR  # Shares that do not add up to one would move the points, whoever else reads them.
        sums = (
            is_reduction(eqn) or is_moment(eqn, self._heuristics.short) or _is_stencil(reader) or self._weighs(reader)
        )
        facts = self._facts
        known = any(eqn.outvars[0] in found for found in (facts.cancelling, facts.means, facts.divisors, facts.kernels))
        return Want.FULL if sums or known or insists_on_full(eqn) else None

    def _in_half(self, reader: Reader) -> Want | None:
        """A product with a matrix that subtracts is as careful as a subtraction."""
        if reader.rule is Rule.HALF and not (reader.regime.delicate and self._takes_differences(reader.eqn)):
            return Want.HALF
        return Want.HALF if reader.regime.elementwise is Elementwise.HALF else None

    def _passed_on(self, reader: Reader) -> list[Want]:
        """What is wanted of the result, which makes a divisor of the last operand of a division."""
        eqn, want = reader.eqn, reader.want
        # Of what goes into a divisor half will do, if others read it in half: it is added up in float32.
        weakens = want in (Want.DIVISOR, Want.DIVISOR_APART) and reader.rule is not Rule.FOLLOW
        passed = Want.FULL if weakens or want is Want.BOUND else want
        wants = [Want.FULL if self._is_wide(eqn, i, passed) else passed for i in range(len(eqn.invars))]
        if reader.traits & Trait.DIVIDES:
            return [*wants[:-1], want if want is Want.PHASE else Want.DIVISOR]
        return wants

    def _is_wide(self, eqn: Eqn, index: int, want: Want) -> bool:
        """Whether an operand that might be half is a product of which half would lose too much, or has no range for."""
        wide = self._facts.wide
        return bool(wide) and want in (Want.HALF, Want.HALF_APART) and (id(eqn), index) in wide

    def _weighs(self, reader: Reader) -> bool:
        """Whether an operation is a product with few columns that depend on no argument, and are no one-hot rows."""
        few = () if is_outer(reader.eqn) else weights(reader.eqn, self._heuristics.short)
        atoms = [reader.eqn.invars[index] for index in few]
        return any(atom in reader.constants and not is_mask(reader.constants, atom) for atom in atoms)

    def _takes_differences(self, eqn: Eqn) -> bool:
        """Whether one operand is a matrix that subtracts, or the other is known to be taken apart."""
        facts = self._facts
        if facts.wide and any((id(eqn), index) in facts.wide for index in range(len(eqn.invars))):
            return True
        return any(
            not isinstance(atom, Literal) and atom in facts.differences
            for atom in operators(eqn, self._heuristics.tallest)
        )

    def _reads_phase(self, reader: Reader) -> bool:
        """Whether an operation takes its operand modulo something, or makes an index of it.

        So does the exponential of a complex number, whose imaginary part is an angle; and what is not known, and makes
        nothing but integers of numbers, as the search is from jax 0.12 on.
        """
        eqn = reader.eqn
        if reader.traits & Trait.CONVERTS or reader.rule is Rule.OPAQUE:
            makes_indices = bool(eqn.outvars) and all(_is_integer(var.aval) for var in eqn.outvars)
            return makes_indices and any(self._pair.flows(atom.aval) for atom in eqn.invars)
        turns = reader.traits & Trait.EXPONENTIAL and is_complex(eqn.invars[0].aval.dtype)
        return bool(turns or reader.traits & Trait.PHASE)

    def _makes_phase(self, reader: Reader) -> bool:
        """Whether an operation is read as a phase and is a short product of positions, or adds up frequencies.

        The first gives angles or coordinates. The others are products with a matrix that the program makes, as
        `tril(ones)`, or cumulated sums.
        """
        eqn = reader.eqn
        if not reader.traits & Trait.MATRIX:
            return reader.traits & (Trait.LINEAR | Trait.SUMS_AXES) == Trait.LINEAR
        made = (not isinstance(atom, Literal) and reader.constants.get(atom) is not None for atom in eqn.invars)
        return num_contracted(eqn) <= self._heuristics.short_phase or any(made)

    def _makes_index(self, reader: Reader) -> bool:
        """Whether an operation makes an index of integers, of comparisons or by sorting, as a search does.

        What is best of many numbers, as by `argmax`, is a choice and no coordinate.
        """
        eqn, best = reader.eqn, reader.traits & (Trait.CHOOSES | Trait.SORTS) == Trait.CHOOSES
        if asks_one(reader.eqn) or (best and self._pair.flows(eqn.invars[0].aval)):
            return False
        results = zip(reader.wants, eqn.outvars, strict=True)
        return any(want is Want.PHASE and not is_differentiable(var.aval) for want, var in results)


def _of_what_decides(reader: Reader) -> Want | None:
    want = reader.want
    if not (want.decides and reader.regime.delicate and (want is Want.AGAIN or not reader.traits & Trait.CHOOSES)):
        return None
    return Want.NONE if asks_one(reader.eqn) else want


def _is_integer(aval: Aval) -> bool:
    return isinstance(aval, ShapedArray) and jnp.issubdtype(aval.dtype, jnp.integer)


def _of_scores(reader: Reader) -> Want | None:
    """Of what lies between the product of queries with keys and the softmax of it: scales, masks, caps, moves."""
    passes = reader.want is Want.SCORE and not reader.traits & Trait.COMPARES
    return Want.SCORE if passes and reader.rule in (Rule.PROMOTE, Rule.FOLLOW) else None


def _of_choices(reader: Reader) -> Want | None:
    traits = reader.traits
    if traits & Trait.CHOOSES and not (traits & Trait.SORTS and len(reader.eqn.invars) == 1):
        return Want.FULL
    return Want.NONE if traits & Trait.COMPARES else None


def _of_gates(reader: Reader) -> Want | None:
    """A sigmoid makes a good gate of half numbers, and a sign is exact."""
    is_gate = reader.want is Want.GATE and reader.traits & (Trait.OF_RESULT | Trait.COUNTS)
    return Want.HALF if is_gate or reader.want is Want.LEFT else None


def _is_stencil(reader: Reader) -> bool:
    eqn = reader.eqn
    if not has_one_channel(eqn):
        return False
    return makes_one_channel(eqn) or isinstance(eqn.invars[1], Literal) or eqn.invars[1] in reader.constants


def _as_a_whole(wants: Sequence[Want]) -> Want:
    """What is wanted of an equation: one result that is wanted in float32, as of a `split`, is enough."""
    return wants[0] if len(wants) == 1 else combine(*([want for want in wants if want.full] or wants))
