"""What the interpreter knows about a value before it exists: the dtype that it is carried in, and how firmly.

A float32 program says nothing about which of its float32 values matter. The kinds below recover that from where a
value comes from; the planner moves values between dtypes by these alone. "Half" and "float32" stand for the narrow and
the wide dtype of a policy.

The states form a lattice. `join` is the state of a value that is one of several; `meet` is the state of a loop carry,
which must leave an iteration as it came in. Both unite marks and take the larger size; `join` unites roots as well.
tests/transforms/program/test_lattice.py holds their laws.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jamp._compat import Aval, nominal_size
from jamp._dtypes import Pair
from jamp._primitives import Trait
from jamp.transforms.program.scale import Range, enclosing, exponent, largest


@enum.unique
class Kind(enum.IntEnum):
    """How firmly a floating value holds on to its dtype, weakest first."""

    WEAK = 0  # Computed from literals alone: takes the dtype of whatever it meets.
    LAZY = 1  # Float32 by origin (an argument, a closed-over array): cast where a half operation uses it.
    HALF = 2  # Stored in half.
    ISLAND = 3  # Float32 of data's size, computed from half data: rounded back when it leaves its scope.
    STAT = 4  # A float32 statistic: raises bigger half data to float32, yields to half data of its own size.
    FULL = 5  # An accumulator: float32 whatever it meets.


class Mark(enum.Flag):
    """What else is known of a value, by construction. A mark is born, handed on and ended as `TRANSMISSION` says."""

    HUGE = enum.auto()  # May hold finite magnitudes beyond the half range, such as a mask of -1e9.
    QUOTIENT = enum.auto()  # As large as what it was divided by is small: it meets half data in float32.
    TANGENT = enum.auto()  # Depends on a tangent of a `custom_jvp` rule: its casts must be linear, and never saturate.
    GIVEN = enum.auto()  # Depends on a floating value from outside; else it is a position, or a random number.
    TRAINED = enum.auto()  # Depends on a floating argument; what is given and not trained is a constant of the program.
    FRACTION = enum.auto()  # May be something else than an integer.
    STORED = enum.auto()  # Is made of what the program was given, by no product: weights and data.
    REPEATED = enum.auto()  # The same of what a loop is given once: rounded to 8 bits, it would be in each iteration.
    RANDOM = enum.auto()  # Made of bits, as random numbers are: of these, half the digits are as good as all.
    ROUNDS = enum.auto()  # A number that half cannot hold with all of its digits, or one that is not known.
    FAR = enum.auto()  # A number so large that data it is added to loses digits in half.
    SOLUTION = enum.auto()  # Comes from linear algebra, or from a loop to convergence: products with it cancel.
    SIGNED = enum.auto()  # Numbers that the program writes, some below zero: products with them take differences.
    BUILT = enum.auto()  # Put together column by column, or with numbers: a frame, a pose, homogeneous coordinates.
    FRAME = enum.auto()  # A diagonal matrix, and what is added to one: all else in it may be small.

    # Looked up: those of `enum` take a microsecond each, and plans ask for tens of thousands.
    def __or__(self, other: Mark) -> Mark:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _SETS[self._value_ | other._value_]

    def __and__(self, other: Mark) -> Mark:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _SETS[self._value_ & other._value_]

    def __invert__(self) -> Mark:
        return _SETS[~self._value_ & _ALL]


class _Sets(dict[int, Mark]):
    """Sets of marks by value, each made when it is asked for: all of them take a quarter of a second to make."""

    def __missing__(self, value: int) -> Mark:
        return self.setdefault(value, Mark(value))


_SETS = _Sets()
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
    Mark.RANDOM: Transmission(None),
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


_OF_ALL = functools.reduce(lambda a, b: a | b, (mark for mark, rule in TRANSMISSION.items() if rule.of_all))
_NOT_OF_ALL = (~_OF_ALL)._value_
_GIVEN = Mark.GIVEN._value_


def united(operands: Iterable[Flow | None]) -> Mark:
    """The marks of all operands of an operation, or of what a value may be."""
    marks, shared = 0, _OF_ALL._value_  # As numbers: this is asked of each equation.
    for flow in operands:
        if flow is not None:
            found = flow.marks._value_
            marks |= found
            if found & _GIVEN and flow.size > 1:
                shared &= found
    return _SETS[marks & (shared | _NOT_OF_ALL)]


def transmit(operands: Mark, traits: int, kind: Kind) -> Mark:
    """The marks of a result of a kind, from those of all operands of a primitive of some traits."""
    marks = operands & _handed_on(traits, kind)
    return marks if traits & _MAKES_INTEGERS else marks | Mark.FRACTION


class Root(NamedTuple):
    """What a value continues, element by element, of a recurrence: see `analysis.recurrences`.

    Attributes:
        role: `"carry"` or `"xs"` of a loop, `"sum"` of a loop written out, `"tree"` of an associative scan.
        loop: Identifies the recurrence.
        index: Position among the operands of the loop.
        changed: Whether arithmetic has changed it in this iteration.
        limited: Whether it is, in places, a limit instead, such as the zero of a relu.
    """

    role: str
    loop: int = 0
    index: int = 0  # pyright: ignore[reportIncompatibleMethodOverride]
    changed: bool = False
    limited: bool = False

    @property
    def origin(self) -> Root:
        """The same before anything happened to it."""
        return Root(self.role, self.loop, self.index)

    @property
    def adds_up(self) -> bool:
        """Whether what continues it adds up over the iterations; a running maximum is one of its terms, as it was."""
        return self.changed or not self.limited


TREE = Root("tree")  # Of all associative scans: what they add up is float32.


class Flow(NamedTuple):
    """Abstract state of one floating value.

    Attributes:
        dtype: The dtype that the value is carried in.
        kind: How firmly it holds on to that.
        size: Number of elements before any broadcast; tells a statistic from data.
        scope: Named scope in which the value was computed.
        marks: What else is known of it.
        roots: What it continues of recurrences.
        scale: The power of two by which numbers beyond the half range scale it, and that of such a number; else zero.
        number: What it is where the program writes it, or computes it from what it writes: the range of its elements.
            Known where half lacks range.
    """

    dtype: np.dtype
    kind: Kind
    size: int
    scope: str = ""
    marks: Mark = NO_MARKS
    roots: frozenset[Root] = frozenset()
    scale: int = 0
    number: Range | None = None

    @property
    def is_number(self) -> bool:
        """Whether the program writes it, or computes it from what it writes, as far as that is known of integers."""
        return self.kind == Kind.WEAK or self.number is not None

    def has(self, mark: Mark) -> bool:
        """Whether the value has a mark, or one of several."""
        return bool(self.marks._value_ & mark._value_)

    def without(self, mark: Mark) -> Flow:
        """The same without some marks."""
        return self._replace(marks=self.marks & ~mark) if self.has(mark) else self

    def with_marks(self, more: Mark, less: Mark) -> Flow:
        """The same with some marks and without others."""
        marks = (self.marks._value_ | more._value_) & ~less._value_
        return self if marks == self.marks._value_ else self._replace(marks=_SETS[marks])


Flows = tuple[Flow | None, ...]


NO_ROOTS = frozenset[Root]()
_GOES_ON = Trait.CONTINUES | Trait.LIMITS
_CHANGES = Trait.ADDS | Trait.MULTIPLIES | Trait.DIVIDES | Trait.REDUCES


def continued(operands: Iterable[Flow | None], traits: int) -> frozenset[Root]:
    """What the result of a primitive of some traits continues of recurrences."""
    if not traits & _GOES_ON:
        return NO_ROOTS
    found = [flow.roots for flow in operands if flow is not None and flow.roots]
    if not found:
        return NO_ROOTS
    roots = frozenset().union(*found)
    changed, limited = bool(traits & _CHANGES), bool(traits & Trait.LIMITS)
    return frozenset(r._replace(changed=r.changed or changed, limited=r.limited or limited) for r in roots)


def num_elements(aval: Aval) -> int:
    """Number of elements of an abstract value; 1 for what has no shape."""
    size = math.prod(getattr(aval, "shape", ()))
    return size if type(size) is int else nominal_size(size)


def traced_flow(aval: Aval, kind: Kind, pair: Pair, scope: str = "", marks: Mark | None = None) -> Flow | None:
    """State of a value that arrives at its traced dtype; half dtypes are half whatever `kind` says.

    Args:
        aval: Shape and dtype.
        kind: How firmly it holds on to float32.
        pair: The precisions of the policy.
        scope: Where it was computed.
        marks: What else is known of it. Left out, it comes from outside if it is more than a literal.
    """
    if not pair.flows(aval):
        return None
    narrow = pair.is_narrow(aval.dtype)
    size = num_elements(aval)
    if marks is None:
        marks = NO_MARKS if kind == Kind.WEAK else Mark.GIVEN | Mark.TRAINED | Mark.FRACTION | Mark.STORED
        marks |= Mark.ROUNDS if size == 1 and not narrow else NO_MARKS
    return Flow(aval.dtype, Kind.HALF if narrow else kind, size, scope, marks)


def literal_flow(aval: Aval, value: object, kind: Kind, pair: Pair, far: float = math.inf) -> Flow | None:
    """State of a number that the program writes, or closes over; from `far` on it moves data far from zero."""
    flow = traced_flow(aval, kind, pair, marks=NO_MARKS)
    if flow is None:
        return None
    numbers = np.asarray(value, np.float64)
    known = _of_scalar(numbers.tobytes(), pair, far) if numbers.ndim == 0 else _of_numbers(numbers, pair, far)
    marks, scale, number = known
    return flow._replace(marks=marks, scale=scale, number=number)


@functools.lru_cache(maxsize=1024)
def _of_scalar(number: bytes, pair: Pair, far: float) -> tuple[Mark, int, Range | None]:
    """The same of one number, which programs write again and again; its bytes tell 0.0 from -0.0."""
    return _of_numbers(np.frombuffer(number).reshape(()), pair, far)


def _of_numbers(numbers: np.ndarray, pair: Pair, far: float) -> tuple[Mark, int, Range | None]:
    """What is known of numbers that a program writes: their marks, their scale and their range."""
    magnitudes = np.abs(numbers)
    finite = magnitudes[np.isfinite(magnitudes)]
    beyond = finite[~pair.holds(finite)]
    marks = Mark.HUGE if beyond.size else NO_MARKS
    if finite.size < magnitudes.size or bool(np.any(numbers != np.round(numbers))):
        marks |= Mark.FRACTION
    if bool(np.any(finite >= far)):
        marks |= Mark.FAR
    if bool(np.any(numbers < 0)):
        marks |= Mark.SIGNED
    with np.errstate(over="ignore", under="ignore"):
        if bool(np.any(finite != finite.astype(pair.narrow).astype(np.float64))):
            marks |= Mark.ROUNDS
    scale = largest(exponent(each, pair) for each in beyond)
    return marks, scale, Range.of_array(numbers) if pair.lacks_range else None


def scale_of_all(states: Iterable[Flow]) -> int:
    """The scale of what is one of several: that of data. A number beside it is a mask, or what a loop begins with."""
    numbers, data = [], []
    for state in states:
        (numbers if state.is_number else data).append(state.scale)
    return largest(data or numbers)


def inside(scope: str, outer: str) -> bool:
    """Whether `scope` is `outer` or lies below it in the tree of named scopes."""
    return not outer or scope == outer or scope.startswith(outer + "/")


def common_scope(scopes: Iterable[str]) -> str:
    """The innermost scope that encloses all of some scopes."""
    paths = [scope.split("/") for scope in scopes]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared)


def join(states: list[Flow], pair: Pair) -> Flow:
    """State of a value that is one of several, such as the results of the branches of a `cond`.

    The least upper bound in the order weak, lazy, half, statistic, accumulator, in which an island lies beside the
    first two and below half: firm float32 wins over half, half wins over what only happens to be float32. Two half
    dtypes, and an island beside half, join to the half dtype of the policy.
    """
    kinds = {state.kind for state in states}
    kind = max(kinds)
    if kind == Kind.ISLAND and len(kinds) > 1:
        kind = Kind.HALF
    dtype = pair.wide
    if kind == Kind.HALF:
        halves = {state.dtype if state.kind == Kind.HALF else pair.narrow for state in states if state.kind >= kind}
        dtype = halves.pop() if len(halves) == 1 else pair.narrow
    size = max(state.size for state in states)
    roots = frozenset().union(*(state.roots for state in states))
    scope = common_scope(state.scope for state in states)
    number = None if kind == Kind.HALF else enclosing(state.number for state in states)
    return Flow(dtype, kind, size, scope, united(states), roots, scale_of_all(states), number)


def meet(before: Flow, after: Flow, kind: Kind, pair: Pair) -> Flow:
    """State of a loop carry, from the states that it went into an iteration with and came out of it with.

    A carry never falls, so that repeating this comes to an end. It keeps its roots: what else an iteration hands over,
    such as another carry in a swap, or a slice of what is scanned over, the carry continues for that iteration alone.

    Args:
        before: State in front of the iteration.
        after: State behind it.
        kind: How firm the loop wants it (see `planning.loops`): its own kind, if that is firmer, stays.
        pair: The precisions of the policy.
    """
    size, marks = max(before.size, after.size), united((before, after))
    scale = scale_of_all((before, after))
    number = before.number if before.number == after.number else None
    if kind > before.kind:
        before = before._replace(kind=kind, dtype=pair.narrow if kind == Kind.HALF else pair.wide)
    if before.kind == Kind.HALF:
        scale, number = 0, None
    return before._replace(size=size, marks=marks, scale=scale, number=number)
