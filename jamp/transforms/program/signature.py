"""Signatures: what emission reads of steps, as data that is equal where the same would be emitted."""

from __future__ import annotations

import enum
from collections.abc import Container, Hashable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from jamp._compat import (
    Atom,
    ClosedJaxpr,
    Eqn,
    Literal,
    Var,
    code_location,
    is_atom,
    is_equation,
    is_jaxpr,
    jaxpr_consts,
    open_jaxpr,
    rule_parts,
    scopes,
)  # fmt: skip
from jamp._primitives import Trait, has
from jamp.transforms.program import rewrites as planned
from jamp.transforms.program.closures import HAS_RULES, Reader, UnsignedError, of_numbers, with_rules
from jamp.transforms.program.flow import Flow
from jamp.transforms.program.plan import Plan, Rewrite, Step, asks_what_moves

# Rewrites whose emission reads nothing but data.
_DATA = frozenset(
    {
        planned.Forward,
        planned.Retyped,
        planned.WideProduct,
        planned.Float8Product,
        planned.WideGradient,
        planned.Scatter,
        planned.Softmax,
        planned.ScaledSum,
        planned.Rectified,
        planned.Pinned,
        planned.Call,
        planned.CustomRule,
        planned.Branches,
        planned.Remat,
        planned.Scan,
        planned.While,
    }
)
# An equation, its operands and its results: literals, and variables by name.
Wired: TypeAlias = tuple[Eqn, Sequence[Hashable], Sequence[Hashable]]
_PLAIN = frozenset({str, bytes, bool, int, type(None)})
# A tuple, which `isinstance` takes a third of the time for.
_EQUAL = np.dtype, enum.Enum
_SEQUENCES = tuple, list


class Signatures:
    """Finds signatures. Lives for one call of a transformed function; so does what it remembers.

    Args:
        places: Whether the scopes and the lines of the user's code are part of them.
    """

    def __init__(self, places: bool = True) -> None:
        self._places = places
        self._plans: dict[tuple[Plan, int], Hashable] = {}
        self._locations: dict[object, Hashable] = {}
        self._jaxprs: dict[int, tuple[object, Hashable]] = {}
        self._called: dict[int, tuple[object, Hashable]] = {}
        self._functions: dict[int, tuple[object, Hashable]] = {}

    def of(self, steps: Sequence[Step], *variables: Sequence[Var], entered: int = 0) -> Hashable | None:
        """The signature of steps, and of lists of variables that they read or make.

        Two signatures are equal where the steps are, but for the names of variables: what they compute and how, the
        dtypes, the scopes and the lines of the user's code.

        Args:
            steps: The steps.
            *variables: Variables, of which each is told by where the steps read or make it.
            entered: How many of the outermost scopes of the steps are left out.

        Returns:
            Data that can be hashed; None where the steps hold more than data, such as a rule of the user's.
        """
        try:
            scope = _Scope(self, entered)
            # What is kept of these steps was decided by their states, and is told by the lists of variables.
            told = tuple((scope.step(step), _dtypes(step.ins), _dtypes(step.out)) for step in steps)
            return told, tuple(tuple(map(scope.variable, group)) for group in variables)
        except UnsignedError:
            return None

    def of_equations(self, equations: Sequence[Wired], *variables: Sequence[Hashable]) -> Hashable | None:
        """The signature of equations, as of steps; each comes with the names of what it reads and makes.

        Args:
            equations: Equations, their operands and their results.
            *variables: Variables, of which each is told by where the equations read or make it.
        """
        try:
            scope = _Scope(self)
            return tuple(map(scope.wired, equations)), tuple(tuple(map(scope.variable, group)) for group in variables)
        except UnsignedError:
            return None

    def remat(self, step: Step, entered: int = 0) -> Hashable | None:
        """The signature of a checkpoint of the user's; None where it holds more than data.

        Args:
            step: The step of the checkpoint.
            entered: How many of the outermost scopes inside of it are left out.
        """
        (plan,), params = step.plans, step.eqn.params
        try:
            return self.plan(plan, entered), plan.setting, self.function(params["policy"]), params["prevent_cse"]
        except UnsignedError:
            return None

    def jaxpr(self, jaxpr: ClosedJaxpr) -> Hashable:
        """The signature of a jaxpr by what it computes."""
        if id(jaxpr) not in self._jaxprs:
            scope, inner = _Scope(self), open_jaxpr(jaxpr)
            if inner.constvars:
                raise UnsignedError
            sides = scope.value([*inner.invars]), scope.value([*inner.eqns]), scope.value([*inner.outvars])
            self._jaxprs[id(jaxpr)] = jaxpr, sides
        return self._jaxprs[id(jaxpr)][1]

    def called(self, jaxpr: ClosedJaxpr) -> Hashable:
        """The same of a jitted function's jaxpr: JAX remembers it, so that one without signature may be found again."""
        if id(jaxpr) not in self._called:
            try:
                self._called[id(jaxpr)] = jaxpr, self.jaxpr(jaxpr)
            except UnsignedError:
                if any(map(asks_what_moves, with_rules(jaxpr))):
                    raise
                self._called[id(jaxpr)] = jaxpr, _of_other(jaxpr)
        return self._called[id(jaxpr)][1]

    def plan(self, plan: Plan, entered: int = 0) -> Hashable:
        """The signature of a plan, but for so many of the outermost scopes of its steps."""
        key = plan, entered
        if key not in self._plans:
            if plan.consts or plan.captures:
                raise UnsignedError
            scope, inner = _Scope(self, entered), open_jaxpr(plan.jaxpr)
            steps = tuple((scope.step(step), _of_flows(step.ins), _of_flows(step.out)) for step in plan.steps)
            sides = scope.value([*inner.invars]), steps, scope.value([*inner.outvars])
            self._plans[key] = sides, _of_flows(plan.ins), _of_flows(plan.outs), plan.constants, plan.carries
        return self._plans[key]

    def function(self, function: object) -> Hashable:
        """The signature of a function, or of several and what they are given, by all that they have at hand."""
        if id(function) not in self._functions:
            self._functions[id(function)] = function, Reader().value(function)
        return self._functions[id(function)][1]

    def parts(self, part: object) -> Hashable:
        """The signature of tuples in tuples of functions and data, each by itself."""
        if type(part) is tuple:
            return tuple(map(self.parts, part))
        return self.function(part) if callable(part) else Reader().value(part)

    def location(self, eqn: Eqn, entered: int = 0) -> Hashable:
        """Line of an equation, and its scopes without those that are entered already."""
        if not self._places:
            return None
        info = eqn.source_info
        if info.traceback not in self._locations:
            self._locations[info.traceback] = code_location(eqn)
        return self._locations[info.traceback], scopes(eqn)[entered:]


class _Scope:
    """The variables of one jaxpr, each named by when it is seen first."""

    def __init__(self, signatures: Signatures, entered: int = 0) -> None:
        self._signatures = signatures
        self._entered = entered
        self._names: dict[Hashable, int] = {}

    def variable(self, var: Hashable) -> int:
        return self._names.setdefault(var, len(self._names))

    def step(self, step: Step) -> Hashable:
        rewrite = None if step.rewrite is None else self._rewrite(step.rewrite)
        planned = frozenset(id(plan.jaxpr) for plan in step.plans)
        return self._equation(step.eqn, planned), rewrite, step.casts, step.exact, step.exact_if_kept

    def _equation(self, eqn: Eqn, planned: Container[int] = ()) -> Hashable:
        if eqn.effects:
            raise UnsignedError
        atoms = tuple(map(self._atom, eqn.invars)), tuple(map(self._atom, eqn.outvars))
        return eqn.primitive, self._params(eqn, planned), atoms, self._signatures.location(eqn, self._entered), eqn.ctx

    def wired(self, wired: Wired) -> Hashable:
        eqn, ins, outs = wired
        names = *((self._atom(x) if is_atom(x) else self.variable(x)) for x in ins), *map(self.variable, outs)
        avals = *((atom.aval, isinstance(atom, Literal)) for atom in eqn.invars), *(var.aval for var in eqn.outvars)
        if eqn.effects:
            raise UnsignedError
        return eqn.primitive, self._params(eqn, ()), names, avals, self._signatures.location(eqn), eqn.ctx

    def _params(self, eqn: Eqn, planned: Container[int]) -> Hashable:
        """The parameters of an equation, but for jaxprs that are planned, as the rewrite of its step says."""
        if has(eqn, HAS_RULES):
            return self._of_rule(eqn)
        if not eqn.params:
            return ()
        made = {name: found for name, value in eqn.params.items() if (found := _jaxprs(value))}
        if not made:
            return self.value(eqn.params)
        called = self._signatures.called if has(eqn, Trait.CALLS) else self._signatures.jaxpr
        inside = ((name, *(id(jaxpr) in planned or called(jaxpr) for jaxpr in made[name])) for name in sorted(made))
        return self.value({name: value for name, value in eqn.params.items() if name not in made}), *inside

    def _of_rule(self, eqn: Eqn) -> Hashable:
        """The parameters of a function with a rule of its own, whose jaxpr is made anew wherever it is called."""
        parts = rule_parts(eqn) if has(eqn, Trait.CUSTOM_JVP | Trait.CUSTOM_VJP) else None
        if parts is None or asks_what_moves(eqn):  # What moves, one jaxpr cannot say of all that differentiate it.
            raise UnsignedError
        called = self._signatures.jaxpr(eqn.params["call_jaxpr"])
        return called, self._signatures.parts(parts), eqn.params["num_consts"], eqn.params["symbolic_zeros"]

    def _rewrite(self, rewrite: Rewrite) -> Hashable:
        if type(rewrite) not in _DATA:
            raise UnsignedError
        return type(rewrite), *map(self.value, vars(rewrite).values())

    def _atom(self, atom: Atom) -> Hashable:
        if isinstance(atom, Literal):
            return atom.aval, self.value(np.asarray(atom.val)), type(atom.val)
        name = self._names.get(atom)
        return (atom.aval, self.variable(atom)) if name is None else name

    def value(self, value: object) -> Hashable:
        """The signature of anything that a step or an equation holds."""
        kind = type(value)
        if kind in _PLAIN or isinstance(value, _EQUAL):
            return kind, value
        if isinstance(value, _SEQUENCES):
            kinds = tuple(map(type, value))
            return (kind, kinds, tuple(value)) if _PLAIN.issuperset(kinds) else (kind, *map(self.value, value))
        if isinstance(value, dict):
            return tuple([(name, self.value(value[name])) for name in sorted(value)])
        if isinstance(value, float):
            return kind, value.hex()
        if isinstance(value, np.ndarray | np.generic):
            return of_numbers(value)
        if is_atom(value):
            return self._atom(value)
        if is_equation(value):
            return self._equation(value)
        if isinstance(value, Plan):
            return self._signatures.plan(value)
        if isinstance(value, Rewrite):
            return self._rewrite(value)
        if callable(value) and not isinstance(value, type | jax.sharding.Mesh):
            return self._signatures.function(value)
        return _of_other(value)


def _jaxprs(value: object) -> Sequence[Any]:
    """The jaxprs that a parameter is."""
    if type(value) in _PLAIN:
        return ()
    if is_jaxpr(value):
        return (value,)
    return value if type(value) is tuple and value and is_jaxpr(value[0]) and all(map(is_jaxpr, value)) else ()


def _of_other(value: object) -> Hashable:
    """A jaxpr is equal to itself alone, as are many objects of JAX, which remembers those of jitted functions."""
    if isinstance(value, jax.Array) or (is_jaxpr(value) and any(each is not None for each in jaxpr_consts(value))):
        raise UnsignedError
    try:
        hash(value)
    except TypeError as error:
        raise UnsignedError from error
    return type(value), value


def _of_flows(flows: Sequence[Flow | None]) -> Hashable:
    """What emission reads of states: not the scopes and the histories of values."""
    return tuple(flow and (flow.dtype, flow.kind, flow.size, flow.marks, flow.scale) for flow in flows)


def _dtypes(flows: Sequence[Flow | None]) -> Hashable:
    return tuple(flow and flow.dtype for flow in flows)
