"""Follows the degrees of values through the equations of a program, those in loops, branches and calls included."""

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

from jamp._compat import Literal, Producer, called_jaxpr, inner_jaxprs, open_jaxpr, scan_counts, scope_path, while_parts
from jamp._primitives import TABLE, Row, Rule, Trait
from jamp.optim._degrees import (
    ARGUMENT,
    LOST,
    PLAIN,
    Degree,
    Fault,
    Size,
    Trust,
    degree_of_number,
    either,
    fault_of,
    join,
    power,
    power_of,
    product,
    worst,
)
from jamp.scalers._base import ADJUSTED_NAME, SCALE_NAME
from jamp.transforms._labels import TRACED_SCOPE

_UNKNOWN = Row(Rule.OPAQUE, Trait(0))
_COPIES = Trait.VIEW | Trait.CONVERTS
_PRODUCTS = Trait.MULTIPLIES | Trait.MATRIX | Trait.CONVOLVES
_EXPONENTS = {"sqrt": (1, 2), "cbrt": (1, 3), "rsqrt": (-1, 2), "square": (2, 1), "reciprocal": (-1, 1)}
_CHOOSING = Trait.EXTREMUM | Trait.ASSEMBLES | Trait.REPLACES
_PASSING = (
    Trait.MOVES | Trait.NEGATES | Trait.LINEAR | Trait.TRAFFIC | Trait.TAKES_EXTREMUM | Trait.SORTS | Trait.CHOOSES
)  # fmt: skip
_PASSED = ("abs", "real", "imag", "conj", "complex", "reduce_precision", "cummax", "cummin")
_COLLECTIVES = ("psum", "pmean", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "ppermute", "pmin", "pmax")
_MAX_DENOMINATOR = 1000  # Of exponents.
_MAX_ROUNDS = 4  # Of a loop's body: a scale goes from carry to carry.


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
        kind: "argument" of the trace, "carry" of a loop, "adjusted" by a scaler, or else "computed".
        id: One for each.
    """

    kind: str
    id: Hashable


GUARD = "guard"  # A comparison with zero, infinity or an epsilon, which is true or false whatever the scale.


def constant(x: Any) -> Value:
    """What a number or an array in the program is worth."""
    if not _is_number(x):
        return Value(ARGUMENT)
    number = complex(np.asarray(x).item())
    return Value(degree_of_number(abs(number)), number.real if not number.imag else abs(number), cotangent=True)


class Following:
    """Follows degrees through equations.

    Args:
        scale: The origin of a loss scale, which is one wherever it is used.

    Attributes:
        scales: The scales met so far, by what their values are copies of.
        numbers: Magnitudes of the numbers met so far.
        differentiated: Whether any of the equations belongs to a derivative.
        averaged: Whether devices exchange anything in any of them.
    """

    def __init__(self, scale: Hashable = None) -> None:
        self.scale = scale
        self.scales: set[Hashable] = set()
        self.numbers: set[float] = set()
        self.differentiated = self.averaged = False
        self._memo: dict[Hashable, list[Value]] = {}

    def equation(self, eqn: Producer, ins: list[Value]) -> list[Value]:
        """The values that an equation makes.

        Args:
            eqn: The equation, its scope with that of the calls around it. In a derivative nothing is an accumulator of
                earlier steps, and what is chosen by size guards against zero and overflow.
            ins: The values of its operands.
        """
        self.numbers.update(abs(value.origin) for value in ins if isinstance(value.origin, float))
        row = TABLE.get(eqn.primitive, _UNKNOWN)
        derivative = _in_derivative(eqn.scope)
        self.differentiated |= derivative
        self.averaged |= eqn.primitive.startswith(_COLLECTIVES)
        named = eqn.params["name"] if eqn.primitive == "name" else None
        if named == SCALE_NAME:
            scale = ins[0].origin or Origin("computed", id(eqn.outputs[0]))
            self.scales.add(scale)
            made = [Value(power_of(scale), scale)]
        elif named == ADJUSTED_NAME:
            made = [Value(ins[0].degree, Origin("adjusted", id(eqn.outputs[0])))]
        elif row.rule is Rule.RECURSE:
            made = self._inside(row, eqn, ins)
        elif row.traits & _COPIES and len(ins) == len(eqn.outputs):
            made = ins
        else:
            made = _computed(row, eqn, ins, lenient=derivative or TRACED_SCOPE in eqn.scope)
            if derivative:
                made = _in_pass(made, eqn, ins)
        return [self.settled(value, out) for value, out in zip(made, eqn.outputs, strict=True)]

    def settled(self, value: Value, out: Any) -> Value:
        """A value with an origin, if it is a scalar, and with the degree of the scale, if it is that."""
        origin = value.origin
        if origin is None and getattr(out.aval, "shape", None) == ():
            origin = Origin("computed", id(out))
        degree = power_of(origin) if origin is not None and origin == self.scale else value.degree
        return Value(degree, origin, value.cotangent)

    def _inside(self, row: Row, eqn: Producer, ins: list[Value]) -> list[Value]:
        if row.traits & Trait.LOOPS:
            return self._loop(eqn.params, eqn.scope, ins)
        if not row.traits & Trait.BRANCHES:
            called = (open_jaxpr(jaxpr) for jaxpr in inner_jaxprs(eqn))
            fits = any(len(p.invars) == len(ins) and len(p.outvars) == len(eqn.outputs) for p in called)
            made = self.jaxpr(called_jaxpr(eqn.params), ins, eqn.scope) if fits else [Value(LOST)] * len(eqn.outputs)
            if row.traits & (Trait.CUSTOM_JVP | Trait.CUSTOM_VJP):  # Such as `hypot`, which scales to and fro itself.
                return [value._replace(degree=LOST) if value.degree.fault else value for value in made]
            return made
        branches = [self.jaxpr(branch, ins[1:], eqn.scope) for branch in eqn.params["branches"]]
        lenient = _in_derivative(eqn.scope) or TRACED_SCOPE in eqn.scope
        fault = ins[0].degree.fault or Fault.BRANCH
        return [_either(values, fault, lenient) for values in zip(*branches, strict=True)]

    def _loop(self, params: dict[str, Any], scope: str, ins: list[Value]) -> list[Value]:
        """A loop: its carries are what they become, found by going through the body until nothing changes."""
        if "jaxpr" in params:
            body, (first, count) = params["jaxpr"], scan_counts(params)
            consts, carry, rest = ins[:first], ins[first : first + count], ins[first + count :]
        else:
            parts = while_parts(params)
            body, rest = parts.body, []
            consts, carry = ins[parts.cond_consts : parts.first_carry], ins[parts.first_carry :]
        carry = [value._replace(origin=Origin("carry", (id(body), i))) for i, value in enumerate(carry)]
        for _ in range(_MAX_ROUNDS):
            made = self.jaxpr(body, [*consts, *carry, *rest], scope)
            later = [_goes_on(a, b) for a, b in zip(carry, made, strict=False)]
            if later == carry:
                break
            carry = later
        else:
            carry = [value._replace(degree=LOST) for value in carry]
        made = self.jaxpr(body, [*consts, *carry, *rest], scope)
        return [value._replace(origin=None) for value in (*carry, *made[len(carry) :])]

    def jaxpr(self, jaxpr: Any, ins: Sequence[Value], scope: str) -> list[Value]:
        """The results of a jaxpr, which several calls may share."""
        key = (id(jaxpr), tuple(ins), _in_derivative(scope), _is_backward(scope), TRACED_SCOPE in scope)
        if key not in self._memo:
            self._memo[key] = self._run(jaxpr, ins, scope)
        return self._memo[key]

    def _run(self, jaxpr: Any, ins: Sequence[Value], scope: str) -> list[Value]:
        program = open_jaxpr(jaxpr)
        known: dict[Any, Value] = dict(
            zip(program.constvars, map(constant, getattr(jaxpr, "consts", ())), strict=False)
        )
        known.update(zip(program.invars, ins, strict=True))

        def read(atom: Any) -> Value:
            return constant(atom.val) if isinstance(atom, Literal) else known[atom]

        for eqn in program.eqns:
            here = Producer(
                eqn.primitive.name, eqn.params, f"{scope}/{scope_path(eqn)}", list(eqn.outvars), list(eqn.invars), 0
            )
            known.update(zip(eqn.outvars, self.equation(here, list(map(read, eqn.invars))), strict=True))
        return list(map(read, program.outvars))


def _either(values: Sequence[Value], fault: Fault, lenient: bool) -> Value:
    """What one of several branches gives."""
    degrees = [value.degree for value in values]
    origins = {value.origin for value in values}
    degree = either(degrees) if lenient else join(degrees, fault)
    return Value(degree, origins.pop() if len(origins) == 1 else None, any(value.cotangent for value in values))


def _goes_on(before: Value, after: Value) -> Value:
    """A carry that a loop makes anew."""
    return Value(either([before.degree, after.degree]), before.origin, before.cotangent or after.cotangent)


def _computed(row: Row, eqn: Producer, ins: list[Value], lenient: bool) -> list[Value]:
    """The results of an equation without a jaxpr."""
    count = len(eqn.outputs)
    if row.rule is Rule.OPAQUE or not all(isinstance(x.aval, ShapedArray) for x in (*eqn.operands, *eqn.outputs)):
        return [Value(LOST)] * count  # Such as what was read from a reference, or returned by a callback.
    floating = [value.degree for value, operand in zip(ins, eqn.operands, strict=True) if _is_inexact(operand)]
    if not floating or not any(map(_is_inexact, eqn.outputs)):
        return [_discrete(row, ins, floating, lenient)] * count
    if row.traits & _PASSING and count == len(floating):  # Such as a collective of several operands.
        return list(map(Value, floating))
    if row.traits & Trait.SELECTS:  # By a comparison, which may be at fault.
        degree = join(floating, Fault.CHOICE, lenient or ins[0].origin == GUARD)
        return [Value(dataclasses.replace(degree, fault=degree.fault or ins[0].degree.fault))]
    if eqn.primitive == "pow" and isinstance(ins[1].origin, float):
        return [Value(power(floating[0], Fraction(ins[1].origin).limit_denominator(_MAX_DENOMINATOR)))]
    return [Value(_result(row, eqn.primitive, eqn.params, floating, lenient))] * count


def _discrete(row: Row, ins: list[Value], floating: list[Degree], lenient: bool) -> Value:
    """What is made of no floating numbers, or gives none: comparisons, bits, counts."""
    degrees = [value.degree for value in ins]
    if row.traits & Trait.DRAWS:
        return Value(PLAIN)
    if row.traits & Trait.REINTERPRETS and any(d.powers for d in degrees):
        return Value(LOST)
    judged = join(floating, Fault.CHOICE, lenient) if row.traits & Trait.COMPARES else PLAIN
    guards = [d.size > Size.ORDINARY for d in floating] if floating else [value.origin == GUARD for value in ins]
    guard = GUARD if (row.traits & Trait.COMPARES and any(guards)) or (guards and all(guards)) else None
    return Value(Degree(trust=worst(degrees), fault=fault_of([judged, *degrees])), guard)


def _in_pass(made: list[Value], eqn: Producer, ins: list[Value]) -> list[Value]:
    """The results of an equation of a derivative, in which arguments are data and no accumulators.

    Not so where nothing goes back to a number: the cotangent itself may be an argument. Nor where the loss is
    multiplied by one: it may be a scale.
    """
    if not _is_backward(eqn.scope):
        return [value._replace(degree=_data(value.degree)) for value in made]
    assumed = any(value.degree.trust == Trust.ASSUMED for value in ins)
    began = any(value.cotangent and not (assumed and isinstance(value.origin, float)) for value in ins)
    scaled = any(isinstance(value.origin, Origin) and value.degree.trust == Trust.ASSUMED for value in ins)
    is_data = [began and not (scaled and getattr(out.aval, "shape", None) == ()) for out in eqn.outputs]
    return [
        Value(_data(value.degree) if data else value.degree, value.origin, began)
        for value, data in zip(made, is_data, strict=True)
    ]


def _data(degree: Degree) -> Degree:
    return dataclasses.replace(degree, trust=Trust.KNOWN) if degree.trust == Trust.ASSUMED else degree


def _result(row: Row, name: str, params: dict[str, Any], ins: list[Degree], lenient: bool) -> Degree:
    if row.traits & _PRODUCTS or name == "ragged_dot_general":
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


def _is_backward(scope: str) -> bool:
    """Whether a scope is of a backward pass, and not of what a checkpoint computes again in it."""
    return "transpose(" in scope.rpartition("rematted_computation")[2]


def _in_derivative(scope: str) -> bool:
    return "transpose(" in scope or "jvp(" in scope


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
