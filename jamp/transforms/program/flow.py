"""What the interpreter knows about a value before it exists: the dtype that it is carried in, and how firmly.

A float32 program says nothing about which of its float32 values matter. Their states recover that from where values
come from, and the planner moves values between dtypes by these alone. "Half" and "float32" stand for the narrow and
the wide dtype of a policy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jamp._compat import Aval, nominal_size
from jamp._dtypes import Pair
from jamp._primitives import SCALES, Trait
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import NO_MARKS, OF_ALL, SETS, Mark
from jamp.transforms.program.scale import Range, exponent, largest


class Root(NamedTuple):
    """What a value continues, element by element, of a recurrence: see `analysis.loops.recurrences`.

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
NO_ROOTS = frozenset[Root]()


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
        return self if marks == self.marks._value_ else self._replace(marks=SETS[marks])


Flows = tuple[Flow | None, ...]


_NOT_OF_ALL = (~OF_ALL)._value_
_GIVEN = Mark.GIVEN._value_
_GOES_ON = Trait.CONTINUES | Trait.LIMITS
_CHANGES = Trait.ADDS | SCALES | Trait.REDUCES


def united(operands: Iterable[Flow | None]) -> Mark:
    """The marks of all operands of an operation, or of what a value may be."""
    marks, shared = 0, OF_ALL._value_  # As numbers: this is asked of each equation.
    for flow in operands:
        if flow is not None:
            found = flow.marks._value_
            marks |= found
            if found & _GIVEN and flow.size > 1:
                shared &= found
    return SETS[marks & (shared | _NOT_OF_ALL)]


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


def beyond_half(flow: Flow, array: np.ndarray | None, pair: Pair) -> Flow:
    """The state of an array that the program closes over: as of numbers, where half holds the largest of them not."""
    number = None if array is None or not array.size else Range.of_array(array)
    if number is None or not (scale := exponent(number.largest, pair)):
        return flow
    return flow._replace(marks=flow.marks | Mark.HUGE, scale=scale, number=number)


def inside(scope: str, outer: str) -> bool:
    """Whether `scope` is `outer` or lies below it in the tree of named scopes."""
    return not outer or scope == outer or scope.startswith(outer + "/")
