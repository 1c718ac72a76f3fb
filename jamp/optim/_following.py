"""Follows the degrees of values through the equations of a program, those in loops, branches and calls included."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

from jamp._compat import Literal, Producer, called_jaxpr, inner_jaxprs, open_jaxpr, scan_counts, scope_path, while_parts
from jamp._primitives import NO_TRAITS, TABLE, Row, Rule, Trait
from jamp.optim._degree_rules import (
    Origin,
    Value,
    computed,
    constant,
    hidden_by,
    in_derivative,
    in_pass,
    is_backward,
    is_lenient,
    may_be_one,
)  # fmt: skip
from jamp.optim._degrees import LOST, Fault, either, join, power_of
from jamp.scalers._base import ADJUSTED_NAME, SCALE_NAME
from jamp.transforms._labels import TRACED_SCOPE

_UNKNOWN = Row(Rule.OPAQUE, NO_TRAITS)
_COPIES = Trait.VIEW | Trait.CONVERTS
_COLLECTIVES = ("psum", "pmean", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "ppermute", "pmin", "pmax")
_MAX_ROUNDS = 4  # Of a loop's body: a scale goes from carry to carry.


class Following:
    """Follows degrees through equations.

    Args:
        scale: The origin of a loss scale, which is one wherever it is used. Scales that may be the same count as it,
            because nothing can be said of gradients that are wrong only if they are not.

    Attributes:
        traces: The trace that the equations are in, and those around it.
        scales: The scales met so far, by what their values are copies of.
        numbers: Magnitudes of the numbers met so far.
        differentiated: Whether any of the equations belongs to a derivative.
        averaged: Whether devices exchange anything in any of them.
    """

    def __init__(self, scale: Hashable = None) -> None:
        self.scale = scale
        self.traces: tuple[int, ...] = ()
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
        derivative = in_derivative(eqn.scope)
        self.differentiated |= derivative
        self.averaged |= eqn.primitive.startswith(_COLLECTIVES)
        named = eqn.params["name"] if eqn.primitive == "name" else None
        if named == SCALE_NAME:
            scale = ins[0].origin or self._new("computed", id(eqn.outputs[0]))
            scale = self.scale if may_be_one(scale, self.scale) else scale
            self.scales.add(scale)
            made = [Value(power_of(scale), scale)]
        elif named == ADJUSTED_NAME:
            made = [Value(ins[0].degree, self._new("adjusted", id(eqn.outputs[0])))]
        elif row.rule is Rule.RECURSE:
            made = self._inside(row, eqn, ins)
        elif row.traits & _COPIES and len(ins) == len(eqn.outputs):
            made = ins
        else:
            made = computed(row, eqn, ins)
            if derivative:
                made = in_pass(made, eqn, ins)
        return [self.settled(value, out) for value, out in zip(made, eqn.outputs, strict=True)]

    def settled(self, value: Value, out: Any) -> Value:
        """A value with an origin, if it is a scalar, and with the degree of the scale, if it is that."""
        origin = value.origin
        if origin is None and getattr(out.aval, "shape", None) == ():
            origin = self._new("computed", id(out))
        degree = power_of(origin) if origin is not None and origin == self.scale else value.degree
        if degree is value.degree and origin is value.origin:
            return value  # What is asked of a value is known by the object that it is (`Finite`).
        return Value(degree, origin, value.cotangent)

    def _new(self, kind: str, key: Hashable) -> Origin:
        return Origin(kind, key, self.traces)

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
        fault, lenient = ins[0].degree.fault or Fault.BRANCH, is_lenient(eqn.scope)
        made = [_either(values, fault, lenient) for values in zip(*branches, strict=True)]
        if lenient:
            return made
        hidden = [hidden_by(ins[0], values, out) for *values, out in zip(*branches, eqn.outputs, strict=True)]
        return [_at_fault(value, each or ins[0].degree.fault) for value, each in zip(made, hidden, strict=True)]

    def _loop(self, params: dict[str, Any], scope: str, ins: list[Value]) -> list[Value]:
        """A loop: its carries are what they become, found by going through the body until nothing changes."""
        if "jaxpr" in params:
            body, (first, count) = params["jaxpr"], scan_counts(params)
            consts, carry, rest = ins[:first], ins[first : first + count], ins[first + count :]
        else:
            parts = while_parts(params)
            body, rest = parts.body, []
            consts, carry = ins[parts.cond_consts : parts.first_carry], ins[parts.first_carry :]
        carry = [value._replace(origin=self._new("carry", (id(body), i))) for i, value in enumerate(carry)]
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
        key = (id(jaxpr), tuple(ins), self.traces, in_derivative(scope), is_backward(scope), TRACED_SCOPE in scope)
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


def _at_fault(value: Value, fault: Fault | None) -> Value:
    """A value that was chosen, maybe not rightly; what is multiplied by no scale is chosen however one likes."""
    if fault is None or value.degree.fault or not value.degree.powers:
        return value
    return value._replace(degree=dataclasses.replace(value.degree, fault=fault))


def _goes_on(before: Value, after: Value) -> Value:
    """A carry that a loop makes anew."""
    return Value(either([before.degree, after.degree]), before.origin, before.cotangent or after.cotangent)
