"""Marks: what else is known of a value besides its dtype, by construction, and how that goes on."""

from __future__ import annotations

import enum
import functools
from typing import NamedTuple

from jamp._primitives import Trait
from jamp.transforms.program.kind import Kind


class Mark(enum.Flag):
    """What else is known of a value. A mark is born, handed on and ended as `TRANSMISSION` says."""

    HUGE = enum.auto()  # May hold finite magnitudes beyond the half range, such as a mask of -1e9.
    QUOTIENT = enum.auto()  # As large as what it was divided by is small: it meets half data in float32.
    TANGENT = enum.auto()  # Depends on a tangent of a `custom_jvp` rule: its casts must be linear, and never saturate.
    GIVEN = enum.auto()  # Depends on a floating value from outside; else it is a position, or a random number.
    TRAINED = enum.auto()  # Depends on a floating argument; what is given and not trained is a constant of the program.
    FRACTION = enum.auto()  # May be something else than an integer.
    STORED = enum.auto()  # Is made of what the program was given, by no product: weights and data.
    REPEATED = enum.auto()  # The same of what a loop is given once: rounded to 8 bits, it would be in each iteration.
    SAMPLED = enum.auto()  # A random number, or made of integers from outside: half the digits are as good as all.
    ROUNDS = enum.auto()  # A number that half cannot hold with all of its digits, or one that is not known.
    FAR = enum.auto()  # A number so large that data it is added to loses digits in half.
    SOLUTION = enum.auto()  # Comes from linear algebra, or from a loop to convergence: products with it cancel.
    SIGNED = enum.auto()  # Numbers that the program writes, some below zero: products with them take differences.
    BUILT = enum.auto()  # Put together column by column, or with numbers: a frame, a pose, homogeneous coordinates.
    FRAME = enum.auto()  # A diagonal matrix, and what is added to one: all else in it may be small.
    RAISED = enum.auto()  # Float32 made of half: what keeps it may keep the half instead.

    # Looked up: those of `enum` take a microsecond each, and plans ask for tens of thousands.
    def __or__(self, other: Mark) -> Mark:  # pyright: ignore[reportIncompatibleMethodOverride]
        return SETS[self._value_ | other._value_]

    def __and__(self, other: Mark) -> Mark:  # pyright: ignore[reportIncompatibleMethodOverride]
        return SETS[self._value_ & other._value_]

    def __invert__(self) -> Mark:
        return SETS[~self._value_ & _ALL]


class _Sets(dict[int, Mark]):
    """Sets of marks by value, each made when it is asked for: all of them take a quarter of a second to make."""

    def __missing__(self, value: int) -> Mark:
        return self.setdefault(value, Mark(value))


SETS = _Sets()
_ALL = 2 ** len(Mark) - 1


class Transmission(NamedTuple):
    """How a mark goes on: through which primitives, and of which kinds of results.

    Attributes:
        through: Traits of the primitives that hand it on; None for all.
        kinds: The kinds of results that it is handed to.
        of_all: Whether it takes all arrays that come from outside to have it, or one operand.
    """

    through: int | None
    kinds: frozenset[Kind] = frozenset(Kind)
    of_all: bool = False


# Weights are stacked, put side by side, masked, scaled and divided by their norm before they are multiplied.
_NO_PRODUCT = (
    Trait.VIEW | Trait.MOVES | Trait.CONVERTS | Trait.ASSEMBLES | Trait.SPREADS | Trait.SMOOTH | Trait.SINGULAR
    | Trait.OF_RESULT | Trait.PHASE | Trait.EXPONENTIAL | Trait.REDUCES
)  # fmt: skip


# A mark is born where a value comes in (`traced_flow`, `literal_flow`); QUOTIENT, SIGNED, BUILT and FRAME where a
# planner divides, subtracts, puts together or knows a diagonal, and FRACTION by whatever does not make integers. What
# else happens to marks is this table. HUGE ends in half: the cast saturates.
TRANSMISSION = {
    Mark.HUGE: Transmission(Trait.SPREADS, frozenset({Kind.WEAK, Kind.LAZY, Kind.ISLAND, Kind.STAT, Kind.FULL})),
    Mark.QUOTIENT: Transmission(Trait.VIEW | Trait.MOVES | Trait.NEGATES, frozenset(Kind) - {Kind.HALF}),
    Mark.TANGENT: Transmission(None),
    Mark.GIVEN: Transmission(None),
    Mark.TRAINED: Transmission(None),
    Mark.FRACTION: Transmission(Trait.INTEGRAL),
    Mark.STORED: Transmission(_NO_PRODUCT, of_all=True),
    Mark.REPEATED: Transmission(_NO_PRODUCT, of_all=True),
    Mark.SAMPLED: Transmission(None),
    Mark.ROUNDS: Transmission(None, frozenset({Kind.WEAK, Kind.LAZY})),
    Mark.FAR: Transmission(Trait.SPREADS, frozenset({Kind.WEAK})),
    Mark.SOLUTION: Transmission(
        Trait.SPREADS | Trait.MOVES | Trait.MATRIX | Trait.LINEAR, frozenset(Kind) - {Kind.HALF}
    ),
    Mark.SIGNED: Transmission(
        Trait.SPREADS | Trait.VIEW | Trait.MOVES | Trait.CONVERTS | Trait.MATRIX | Trait.CONVOLVES,
        frozenset(Kind) - {Kind.HALF},
        of_all=True,
    ),
    Mark.BUILT: Transmission(Trait.VIEW | Trait.MOVES | Trait.CONVERTS, frozenset(Kind) - {Kind.HALF}),
    Mark.RAISED: Transmission(Trait.VIEW | Trait.MOVES, frozenset(Kind) - {Kind.HALF}),
    # Half numbers on a diagonal are as good as others: what is added to them counts.
    Mark.FRAME: Transmission(
        Trait.VIEW | Trait.MOVES | Trait.CONVERTS | Trait.NEGATES | Trait.MULTIPLIES | Trait.DIVIDES | Trait.ADDS
    ),
}
NO_MARKS = Mark(0)
_MAKES_INTEGERS = Trait.INTEGRAL | Trait.COUNTS


@functools.cache
def _handed_on(traits: int, kind: Kind) -> Mark:
    """The marks that a primitive of some traits hands on to a result of a kind."""
    marks = (mark for mark, rule in TRANSMISSION.items() if rule.through is None or rule.through & traits)
    return functools.reduce(lambda a, b: a | b, (m for m in marks if kind in TRANSMISSION[m].kinds), NO_MARKS)


OF_ALL = functools.reduce(lambda a, b: a | b, (mark for mark, rule in TRANSMISSION.items() if rule.of_all))


def transmit(operands: Mark, traits: int, kind: Kind) -> Mark:
    """The marks of a result of a kind, from those of all operands of a primitive of some traits."""
    marks = operands & _handed_on(traits, kind)
    return marks if traits & _MAKES_INTEGERS else marks | Mark.FRACTION
