"""To what power of which loss scale each value of a program is proportional.

Gradients that are to be divided by a loss scale have to be homogeneous of degree 1 in it: twice the scale, twice the
gradients. Degrees follow from operation to operation as the units of physics do: a product adds them, a quotient
subtracts them, a sum asks for operands of the same. So one rule finds gradients that nobody scaled (degree 0), those
that were scaled by another scale, and those that were scaled in part, or clipped while they were scaled, which have no
degree at all.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Hashable, Iterable, Sequence
from fractions import Fraction

import jax.numpy as jnp
import numpy as np


class Trust(enum.IntEnum):
    """How much is known of a degree, most first."""

    KNOWN = 0
    ASSUMED = 1  # An argument, which is taken to be of degree 0. It may hold what an earlier step has accumulated.
    LOST = 2  # Behind an operation of which nothing is known.


class Size(enum.IntEnum):
    """Whether a value counts beside others in a sum."""

    ORDINARY = 0
    NEGLIGIBLE = 1  # An epsilon, or as good as infinite: harmless whatever the scale of the others is.
    ZERO = 2


class Fault(enum.Enum):
    """Why a value is not homogeneous."""

    SUM = "sum"  # Of operands of different degrees.
    CHOICE = "choice"  # Between them, or by comparing them: clipping.
    BRANCH = "branch"  # Of a conditional, which give different degrees.
    FUNCTION = "function"  # An argument of a function such as `tanh` that is not of degree 0.
    HIDDEN = "hidden"  # Numbers in the place of its infinities and NaNs, which follow no scale.


@dataclasses.dataclass(frozen=True, slots=True)
class Degree:
    """The power of each loss scale that a value is proportional to.

    Attributes:
        powers: Pairs of a scale and its exponent, without those that are zero.
        trust: How much is known.
        fault: Why the value is proportional to no power, if so.
        size: Whether the value counts in sums.
    """

    powers: frozenset[tuple[Hashable, Fraction]] = frozenset()
    trust: Trust = Trust.KNOWN
    fault: Fault | None = None
    size: Size = Size.ORDINARY


PLAIN = Degree()
LOST = Degree(trust=Trust.LOST)
ZERO = Degree(size=Size.ZERO)
_NEGLIGIBLE = Degree(size=Size.NEGLIGIBLE)
ARGUMENT = Degree(trust=Trust.ASSUMED)

_EPSILON = 1.0001e-4  # What sums and divisors are guarded with. The least normal number of float16 is 6.1e-5.
# What programs take for infinity: half types saturate there.
_LARGEST = {float(jnp.finfo(dtype).max) for dtype in (jnp.float16, jnp.float8_e5m2)}


def is_known(degree: Degree) -> bool:
    """Whether anything can be said of a value: it is no zero, and no argument had a part in it."""
    return degree.trust == Trust.KNOWN and degree.size == Size.ORDINARY


def power_of(scale: Hashable) -> Degree:
    """The degree of a loss scale itself."""
    return Degree(frozenset({(scale, Fraction(1))}))


def degree_of_number(number: float) -> Degree:
    """What a number that is written in the program is worth, by its magnitude."""
    if number == 0:
        return ZERO
    negligible = not np.isfinite(number) or number > 1e30 or number < _EPSILON or number in _LARGEST
    return _NEGLIGIBLE if negligible else PLAIN


def worst(degrees: Iterable[Degree]) -> Trust:
    """The least that is known of any."""
    return max((d.trust for d in degrees), default=Trust.KNOWN)


def fault_of(degrees: Iterable[Degree]) -> Fault | None:
    """Why one of them is not homogeneous, if so."""
    return next((d.fault for d in degrees if d.fault), None)


def power(degree: Degree, exponent: Fraction) -> Degree:
    """The degree of a value to a power."""
    size = degree.size if exponent > 0 else min(degree.size, Size.NEGLIGIBLE)
    powers = frozenset((scale, times * exponent) for scale, times in degree.powers if exponent)
    return dataclasses.replace(degree, powers=powers, size=size)


def product(factors: Sequence[Degree]) -> Degree:
    """The degree of a product."""
    if any(d.size == Size.ZERO for d in factors):
        return ZERO
    total: dict[Hashable, Fraction] = {}
    for scale, times in (pair for d in factors for pair in d.powers):
        total[scale] = total.get(scale, Fraction(0)) + times
    powers = frozenset((scale, times) for scale, times in total.items() if times)
    return Degree(powers, worst(factors), fault_of(factors), min((d.size for d in factors), default=Size.ORDINARY))


def join(degrees: Sequence[Degree], fault: Fault, lenient: bool = False) -> Degree:
    """The degree of what is made of several values side by side, or of one of them.

    Args:
        degrees: Theirs.
        fault: What is wrong if they differ.
        lenient: Whether they may: the result has the degree of the one that a scale went into.
    """
    counting = [d for d in degrees if d.size == Size.ORDINARY]
    if not counting:
        return min(degrees, key=lambda d: d.size, default=PLAIN)
    trust = worst(counting)
    firm = [d.powers for d in counting if d.trust == Trust.KNOWN]
    differ = any(powers != firm[0] for powers in firm) and not lenient and trust < Trust.LOST
    powers = next((d.powers for d in counting if d.powers), frozenset())
    return Degree(powers, trust, fault_of(counting) or (fault if differ else None))


def either(degrees: Sequence[Degree]) -> Degree:
    """The degree of a value that is one of several, which nobody chose by their size: a branch, a carry."""
    joined = join(degrees, Fault.CHOICE, lenient=True)
    powers = {d.powers for d in degrees if d.size == Size.ORDINARY and d.trust == Trust.KNOWN}
    return joined if len(powers) < 2 else LOST
