"""What the interpreter knows about a value before it exists: the dtype that it is carried in, and how firmly.

A float32 program says nothing about which of its float32 values matter. The kinds below recover that from where a
value comes from; the planner moves values between dtypes by these alone.
"""

from __future__ import annotations

import enum
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jamp._compat import nominal_size


class Kind(enum.IntEnum):
    """How firmly a floating value holds on to its dtype, weakest first."""

    WEAK = 0  # Computed from literals alone: takes the dtype of whatever it meets.
    LAZY = 1  # Float32 by origin (an argument, a closed-over array): cast where a half operation uses it.
    HALF = 2  # Stored in half.
    ISLAND = 3  # Float32 of data's size, computed from half data: rounded back when it leaves its scope.
    STAT = 4  # A float32 statistic: raises bigger half data to float32, yields to half data of its own size.
    FULL = 5  # An accumulator: float32 whatever it meets.


class Flow(NamedTuple):
    """Abstract state of one floating value.

    Attributes:
        dtype: The dtype that the value is carried in.
        kind: How firmly it holds on to that.
        size: Number of elements before any broadcast; tells a statistic from data.
        scope: Named scope in which the value was computed.
        huge: May hold finite magnitudes beyond the half range by construction, such as a mask of -1e9.
        roots: Loop carries and scanned inputs that this value continues, element by element.
        tangent: Depends on a tangent of a `custom_jvp` rule, so that its casts must be linear: never saturated.
        tiny: May be a number that is zero in float16 by construction, such as a divisor with an epsilon of 1e-8.
        given: Depends on a floating argument; else it is made of counters, integers, keys and literals: a position.
    """

    dtype: np.dtype
    kind: Kind
    size: int
    scope: str = ""
    huge: bool = False
    roots: frozenset[Any] = frozenset()
    tangent: bool = False
    tiny: bool = False
    given: bool = False


FLOAT32 = np.dtype(np.float32)
# What is an eighth of data or less is a statistic of it; anything larger is data.
STATISTIC = 8
BFLOAT16 = np.dtype(jnp.bfloat16)
_HALVES = (np.dtype(np.float16), BFLOAT16)


def is_half(dtype: Any) -> bool:
    """Whether a dtype is one of the two half-precision dtypes."""
    return dtype in _HALVES


def flows(aval: Any) -> bool:
    """Whether precision may flow through a value: float32, float16, bfloat16. Float64 and float8 stay."""
    dtype = getattr(aval, "dtype", None)
    return dtype == FLOAT32 or dtype in _HALVES


def is_other_inexact(aval: Any) -> bool:
    """Floating or complex, but outside what flows: float64, float8, complex."""
    return hasattr(aval, "dtype") and not flows(aval) and jnp.issubdtype(aval.dtype, jnp.inexact)


def num_elements(aval: Any) -> int:
    """Number of elements of an abstract value; 1 for what has no shape."""
    size = math.prod(getattr(aval, "shape", ()))
    return size if type(size) is int else nominal_size(size)


def traced_flow(aval: Any, kind: Kind, scope: str = "") -> Flow | None:
    """State of a value that arrives at its traced dtype; half dtypes are half whatever `kind` says."""
    if not flows(aval):
        return None
    half = is_half(aval.dtype)
    return Flow(aval.dtype, Kind.HALF if half else kind, num_elements(aval), scope, given=kind != Kind.WEAK)


def inside(scope: str, outer: str) -> bool:
    """Whether `scope` is `outer` or lies below it in the tree of named scopes."""
    return not outer or scope == outer or scope.startswith(outer + "/")


def join(flows_in: list[Flow], half: np.dtype) -> Flow:
    """State of a value that is one of several, such as the results of the branches of a `cond`.

    A firm float32 wins over half, half wins over what only happens to be float32.
    """
    firm = max(flows_in, key=lambda f: f.kind)
    kinds = {f.kind for f in flows_in}
    if firm.kind < Kind.STAT and (Kind.HALF in kinds or (firm.kind == Kind.ISLAND and len(kinds) > 1)):
        halves = {f.dtype for f in flows_in if f.kind == Kind.HALF} or {half}
        firm = firm._replace(kind=Kind.HALF, dtype=halves.pop() if len(halves) == 1 else half)
    return firm._replace(
        size=max(f.size for f in flows_in),
        huge=any(f.huge for f in flows_in),
        tiny=any(f.tiny for f in flows_in),
        tangent=any(f.tangent for f in flows_in),
        given=any(f.given for f in flows_in),
        roots=frozenset().union(*(f.roots for f in flows_in)),
    )
