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
from jamp.scalers._base import SCALE_NAME
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
_MAX_DENOMINATOR = 64  # Of exponents.
_MAX_ROUNDS = 4  # Of a loop's body: a scale goes from carry to carry.


class Value(NamedTuple):
    """A value of the program.

    Attributes:
        degree: Its degree.
        origin: What it is a copy of, if it is a scalar: a number, or what stands for an argument or a result.
    """

    degree: Degree
    origin: Hashable = None


def constant(x: Any) -> Value:
    """What a number or an array in the program is worth."""
    if not _is_number(x):
        return Value(ARGUMENT)
    number = complex(np.asarray(x).item())
    return Value(degree_of_number(abs(number)), number.real if not number.imag else abs(number))


class Following:
    """Follows degrees through equations.

    Attributes:
        scales: The scales met so far, by what their values are copies of.
        numbers: Magnitudes of the numbers met so far.
        differentiated: Whether any of the equations belongs to a derivative.
        averaged: Whether devices exchange anything in any of them.
    """

    def __init__(self) -> None:
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
        if eqn.primitive == "name" and eqn.params["name"] == SCALE_NAME:
            made = [self._scale(ins[0])]
        elif row.rule is Rule.RECURSE:
            made = self._inside(row, eqn, ins)
        elif row.traits & _COPIES and len(ins) == 1:
            made = ins
        else:
            made = _computed(row, eqn, ins, lenient=derivative or TRACED_SCOPE in eqn.scope)
        return [_settled(value, out, derivative) for value, out in zip(made, eqn.outputs, strict=True)]

    def _scale(self, value: Value) -> Value:
        """A loss scale, at the place where a scaler uses it."""
        self.scales.add(value.origin)
        return Value(power_of(value.origin), value.origin)

    def _inside(self, row: Row, eqn: Producer, ins: list[Value]) -> list[Value]:
        if row.traits & Trait.LOOPS:
            return self._loop(eqn.params, eqn.scope, ins)
        if not row.traits & Trait.BRANCHES:
            called = (open_jaxpr(jaxpr) for jaxpr in inner_jaxprs(eqn))
            fits = any(len(p.invars) == len(ins) and len(p.outvars) == len(eqn.outputs) for p in called)
            return self.jaxpr(called_jaxpr(eqn.params), ins, eqn.scope) if fits else [Value(LOST)] * len(eqn.outputs)
        lenient = _in_derivative(eqn.scope) or TRACED_SCOPE in eqn.scope
        branches = [self.jaxpr(branch, ins[1:], eqn.scope) for branch in eqn.params["branches"]]
        results = [[value.degree for value in values] for values in zip(*branches, strict=True)]
        return [Value(either(degrees) if lenient else join(degrees, Fault.CHOICE)) for degrees in results]

    def _loop(self, params: dict[str, Any], scope: str, ins: list[Value]) -> list[Value]:
        """A loop: its carries are what they become, found by going through the body until nothing changes."""
        if "jaxpr" in params:
            body, (first, count) = params["jaxpr"], scan_counts(params)
            consts, carry, rest = ins[:first], ins[first : first + count], ins[first + count :]
        else:
            parts = while_parts(params)
            body, rest = parts.body, []
            consts, carry = ins[parts.cond_consts : parts.first_carry], ins[parts.first_carry :]
        carry = [Value(value.degree, ("carry", id(body), i)) for i, value in enumerate(carry)]
        for _ in range(_MAX_ROUNDS):
            made = self.jaxpr(body, [*consts, *carry, *rest], scope)
            later = [Value(either([a.degree, b.degree]), a.origin) for a, b in zip(carry, made, strict=False)]
            if later == carry:
                break
            carry = later
        else:
            carry = [Value(LOST, value.origin) for value in carry]
        made = self.jaxpr(body, [*consts, *carry, *rest], scope)
        return [Value(value.degree) for value in (*carry, *made[len(carry) :])]

    def jaxpr(self, jaxpr: Any, ins: Sequence[Value], scope: str) -> list[Value]:
        """The results of a jaxpr, which several calls may share."""
        key = (id(jaxpr), tuple(ins), _in_derivative(scope), TRACED_SCOPE in scope)
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


def _computed(row: Row, eqn: Producer, ins: list[Value], lenient: bool) -> list[Value]:
    """The results of an equation without a jaxpr."""
    if row.rule is Rule.OPAQUE or not all(isinstance(x.aval, ShapedArray) for x in (*eqn.operands, *eqn.outputs)):
        return [Value(LOST)] * len(eqn.outputs)  # Such as what was read from a reference, or returned by a callback.
    floating = [value.degree for value, operand in zip(ins, eqn.operands, strict=True) if _is_inexact(operand)]
    if not any(map(_is_inexact, eqn.outputs)):
        judged = join(floating, Fault.CHOICE, lenient) if row.traits & Trait.COMPARES else PLAIN
        degrees = [judged, *(value.degree for value in ins)]
        return [Value(Degree(trust=worst(degrees), fault=fault_of(degrees)))] * len(eqn.outputs)
    if row.traits & _PASSING and len(eqn.outputs) == len(floating):  # Such as a collective of several operands.
        return list(map(Value, floating))
    degree = _result(row, eqn.primitive, eqn.params, floating, lenient)
    if eqn.primitive == "pow" and isinstance(ins[1].origin, float):
        degree = power(floating[0], Fraction(ins[1].origin).limit_denominator(_MAX_DENOMINATOR))
    if row.traits & Trait.SELECTS:  # By a comparison, which may be at fault.
        degree = dataclasses.replace(degree, fault=degree.fault or ins[0].degree.fault)
    return [Value(degree)] * len(eqn.outputs)


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
    if row.traits & (_CHOOSING | Trait.SELECTS) or name == "clamp":
        return join(ins, Fault.CHOICE, lenient)
    if row.traits & _PASSING or name in _PASSED:
        return join(ins, Fault.CHOICE, lenient=True)
    known = worst(ins)
    if not any(d.powers for d in ins):
        return Degree(trust=known, fault=fault_of(ins))
    if row.rule in (Rule.FULL, Rule.PROMOTE) and not lenient and known < Trust.LOST:
        return Degree(trust=known, fault=fault_of(ins) or Fault.FUNCTION)
    return LOST


def _settled(value: Value, out: Any, derivative: bool) -> Value:
    degree, origin = value
    if derivative and degree.trust == Trust.ASSUMED:
        degree = dataclasses.replace(degree, trust=Trust.KNOWN)
    if origin is None and getattr(out.aval, "shape", None) == ():
        origin = ("computed", id(out))
    return Value(degree, origin)


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
