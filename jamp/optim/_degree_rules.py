"""What an equation without a jaxpr makes of the degrees of its operands."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from jamp._compat import Producer
from jamp._primitives import PRODUCTS, Row, Rule, Trait
from jamp.optim._degrees import (
    ARGUMENT,
    LOST,
    PLAIN,
    Degree,
    Fault,
    Size,
    Trust,
    degree_of_number,
    fault_of,
    join,
    power,
    product,
    worst,
)  # fmt: skip
from jamp.transforms._labels import TRACED_SCOPE

_PRODUCTS = Trait.MULTIPLIES | PRODUCTS
_EXPONENTS = {"sqrt": (1, 2), "cbrt": (1, 3), "rsqrt": (-1, 2), "square": (2, 1), "reciprocal": (-1, 1)}
_CHOOSING = Trait.EXTREMUM | Trait.ASSEMBLES | Trait.REPLACES
_PASSING = (
    Trait.MOVES | Trait.NEGATES | Trait.LINEAR | Trait.TRAFFIC | Trait.TAKES_EXTREMUM | Trait.SORTS | Trait.CHOOSES
)  # fmt: skip
_PASSED = ("abs", "real", "imag", "conj", "complex", "reduce_precision", "cummax", "cummin")
_MAX_DENOMINATOR = 1000  # Of exponents.


class Value(NamedTuple):
    """A value of the program.

    Attributes:
        degree: Its degree.
        origin: What it is a copy of: a number, `GUARD`, or what stands for an argument or a scalar result.
        cotangent: Whether it goes back to a number with which a backward pass began, if it belongs to one.
    """

    degree: Degree
    origin: Hashable = None
    cotangent: bool = False


class Origin(NamedTuple):
    """What stands for a value that others are copies of.

    Attributes:
        kind: "argument" of the step or of the loop that is traced, "operand" of what is traced inside of them, "carry"
            of a loop, "adjusted" by a scaler, or else "computed".
        id: One for each.
        traces: The trace in which it came to be, and those around it.
    """

    kind: str
    id: Hashable
    traces: tuple[int, ...] = ()


def may_be_one(a: Hashable, b: Hashable) -> bool:
    """Whether two scales may be the same.

    A branch, a checkpoint or an inner `jit` is traced without its operands, so each of them may be any value of before:
    one of the traces around it, which a closure brings, or another operand. What comes to be inside is new.
    """
    return a == b or _may_be_handed(a, b) or _may_be_handed(b, a)


def _may_be_handed(operand: Hashable, scale: Hashable) -> bool:
    if not isinstance(operand, Origin) or operand.kind != "operand":
        return False
    if not isinstance(scale, Origin):  # A number.
        return isinstance(scale, float)
    is_inside = operand.traces[0] in scale.traces
    return scale.kind == "operand" if is_inside else scale.kind != "computed"


GUARD = "guard"  # A comparison with zero, infinity or an epsilon, which is true or false whatever the scale.


class Finite(NamedTuple):
    """The origin of what says whether values that are multiplied by a scale are finite, or no NaN.

    Attributes:
        values: The values.
        of_all: Whether it is one answer for all of their elements.
    """

    values: tuple[Value, ...]
    of_all: bool = False


def constant(x: Any) -> Value:
    """What a number or an array in the program is worth."""
    if not _is_number(x):
        return Value(ARGUMENT)
    number = complex(np.asarray(x).item())
    return Value(degree_of_number(abs(number)), number.real if not number.imag else abs(number), cotangent=True)


def computed(row: Row, eqn: Producer, ins: list[Value]) -> list[Value]:
    """The results of an equation without a jaxpr.

    Args:
        row: What is known of its primitive.
        eqn: The equation.
        ins: The values of its operands.
    """
    count, lenient = len(eqn.outputs), is_lenient(eqn.scope)
    if row.rule is Rule.OPAQUE or not all(isinstance(x.aval, ShapedArray) for x in (*eqn.operands, *eqn.outputs)):
        return [Value(LOST)] * count  # Such as what was read from a reference, or returned by a callback.
    floating = [value.degree for value, operand in zip(ins, eqn.operands, strict=True) if _is_inexact(operand)]
    if not floating or not any(map(_is_inexact, eqn.outputs)):
        return [_discrete(row, eqn, ins, floating, lenient)] * count
    if row.traits & _PASSING and count == len(floating):  # Such as a collective of several operands.
        return [
            Value(d, v.origin if isinstance(v.origin, Finite) else None) for d, v in zip(floating, ins, strict=False)
        ]
    if row.traits & Trait.SELECTS:  # By a comparison, which may be at fault.
        degree = join(floating, Fault.CHOICE, lenient or ins[0].origin == GUARD or isinstance(ins[0].origin, Finite))
        hidden = None if lenient else hidden_by(ins[0], ins[1:], eqn.outputs[0])
        return [Value(dataclasses.replace(degree, fault=degree.fault or ins[0].degree.fault or hidden))]
    if eqn.primitive == "abs" and ins[0].origin is None:  # As finite as what it is of.
        return ins
    if eqn.primitive == "sub" and eqn.operands[0] is eqn.operands[1]:  # NaN where something is not finite, else zero.
        return [Value(floating[0], Finite((ins[0],)))]
    if eqn.primitive == "pow" and isinstance(ins[1].origin, float):
        return [Value(power(floating[0], Fraction(ins[1].origin).limit_denominator(_MAX_DENOMINATOR)))]
    return [Value(_result(row, eqn.primitive, eqn.params, floating, lenient))] * count


def _discrete(row: Row, eqn: Producer, ins: list[Value], floating: list[Degree], lenient: bool) -> Value:
    """What is made of no floating numbers, or gives none: comparisons, bits, counts."""
    degrees = [value.degree for value in ins]
    if row.traits & Trait.DRAWS:
        return Value(PLAIN)
    if row.traits & Trait.REINTERPRETS and any(d.powers for d in degrees):
        return Value(LOST)
    compares = bool(row.traits & Trait.COMPARES)
    asked = tuple(value for value in ins if compares and value.degree.powers and _asks_if_finite(eqn, ins))
    before = [value.origin for value in ins if isinstance(value.origin, Finite)]
    if asked := sum((each.values for each in before), asked):
        of_all = getattr(eqn.outputs[0].aval, "shape", None) == () or any(each.of_all for each in before)
        return Value(Degree(trust=worst(degrees), fault=fault_of(degrees)), Finite(asked, of_all))
    judged = join(floating, Fault.CHOICE, lenient) if compares else PLAIN
    guards = [d.size > Size.ORDINARY for d in floating] if floating else [value.origin == GUARD for value in ins]
    guard = GUARD if (compares and any(guards)) or (guards and all(guards)) else None
    return Value(Degree(trust=worst(degrees), fault=fault_of([judged, *degrees])), guard)


def _asks_if_finite(eqn: Producer, ins: list[Value]) -> bool:
    """Whether a comparison is a part of `isfinite`, `isnan` or `isinf`."""
    if len(ins) == 1 or eqn.operands[0] is eqn.operands[1]:
        return True
    # Nothing else is equal to what is neither zero nor of an ordinary size.
    is_infinite = any(isinstance(value.origin, float) and np.isinf(value.origin) for value in ins)
    return is_infinite or (eqn.primitive == "eq" and any(value.degree.size == Size.NEGLIGIBLE for value in ins))


def hidden_by(predicate: Value, cases: Sequence[Value], out: Any) -> Fault | None:
    """What is wrong where a choice puts numbers in the place of what is not finite.

    That are the values themselves, or all elements of an array where one of anything is not.

    Args:
        predicate: What the choice is made by.
        cases: What is chosen among.
        out: What is chosen.
    """
    asked = predicate.origin
    if not isinstance(asked, Finite) or all(value.degree.powers or value.degree.trust > Trust.KNOWN for value in cases):
        return None
    scaled = [value for value in cases if value.degree.powers]
    of_all = asked.of_all and getattr(out.aval, "shape", ()) != ()
    return Fault.HIDDEN if scaled and (of_all or any(v is each for v in scaled for each in asked.values)) else None


def in_pass(made: list[Value], eqn: Producer, ins: list[Value]) -> list[Value]:
    """The results of an equation of a derivative, in which arguments are data and no accumulators.

    Not so where nothing goes back to a number: the cotangent itself may be an argument. Nor where the loss is
    multiplied by one: it may be a scale.
    """
    if not is_backward(eqn.scope):
        return [_of_data(value) for value in made]
    assumed = any(value.degree.trust == Trust.ASSUMED for value in ins)
    began = any(value.cotangent and not (assumed and isinstance(value.origin, float)) for value in ins)
    scaled = any(isinstance(value.origin, Origin) and value.degree.trust == Trust.ASSUMED for value in ins)
    is_data = [began and not (scaled and getattr(out.aval, "shape", None) == ()) for out in eqn.outputs]
    return [
        Value(_data(value.degree) if data else value.degree, value.origin, began)
        for value, data in zip(made, is_data, strict=True)
    ]


def _of_data(value: Value) -> Value:
    degree = _data(value.degree)
    return value if degree is value.degree else value._replace(degree=degree)


def _data(degree: Degree) -> Degree:
    return dataclasses.replace(degree, trust=Trust.KNOWN) if degree.trust == Trust.ASSUMED else degree


def _result(row: Row, name: str, params: dict[str, Any], ins: list[Degree], lenient: bool) -> Degree:
    if row.traits & _PRODUCTS:
        return product(ins)
    if name == "div":
        return product([ins[0], power(ins[1], Fraction(-1))])
    if name in _EXPONENTS:
        return power(ins[0], Fraction(*_EXPONENTS[name]))
    if name == "integer_pow":
        return power(ins[0], Fraction(params["y"]))
    if name == "sign":
        return dataclasses.replace(ins[0], powers=frozenset())
    if row.traits & Trait.ADDS or name == "scatter-add":
        return join(ins, Fault.SUM)
    if row.traits & _CHOOSING or name == "clamp":
        return join(ins, Fault.CHOICE, lenient)
    if row.traits & _PASSING or name in _PASSED:
        return join(ins, Fault.CHOICE, lenient=True)
    known = worst(ins)
    if not any(d.powers for d in ins):
        return Degree(trust=known, fault=fault_of(ins))
    if row.rule in (Rule.FULL, Rule.PROMOTE) and name not in ("log", "log2") and not lenient and known < Trust.LOST:
        return Degree(trust=known, fault=fault_of(ins) or Fault.FUNCTION)
    return LOST


def is_backward(scope: str) -> bool:
    """Whether a scope is of a backward pass, and not of what a checkpoint computes again in it."""
    return "transpose(" in scope.rpartition("rematted_computation")[2]


def in_derivative(scope: str) -> bool:
    """Whether a scope is of a derivative: nothing in it is an accumulator of earlier steps."""
    return "transpose(" in scope or "jvp(" in scope


def is_lenient(scope: str) -> bool:
    """Whether what is chosen by size in a scope guards against zero and overflow, and is no clipping."""
    return in_derivative(scope) or TRACED_SCOPE in scope


def _is_number(x: Any) -> bool:
    """Whether something is one number that this process can read."""
    if isinstance(x, jax.Array) and (not x.is_fully_addressable or jnp.issubdtype(x.dtype, jax.dtypes.extended)):
        return False
    return isinstance(x, (bool, int, float, complex, np.ndarray, np.generic, jax.Array)) and np.size(x) == 1


def _is_inexact(x: Any) -> bool:
    return _has_fractions(getattr(x.aval, "dtype", None))


@functools.cache
def _has_fractions(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)
