"""Signatures: what emission reads of steps, as data that is equal where the same would be emitted."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from types import FunctionType

import jax
import numpy as np

from jamp._compat import (
    Atom,
    Eqn,
    Literal,
    Var,
    code_location,
    is_atom,
    is_equation,
    is_jaxpr,
    jaxpr_consts,
    open_jaxpr,
)  # fmt: skip
from jamp.transforms.program import plan as planned
from jamp.transforms.program.flow import Flow
from jamp.transforms.program.plan import Plan, Rewrite, Step

# Rewrites that are data. Others hold functions of the user's, which may close over anything.
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
    }
)
_PLAIN = frozenset({str, bytes, bool, int, type(None)})
_LARGEST = 64  # Elements of a constant that is compared by its numbers.


class _UnsignedError(Exception):
    """There is something that has no signature."""


class Signatures:
    """Finds signatures. Lives for one call of a transformed function; so does what it remembers."""

    def __init__(self) -> None:
        self._plans: dict[Plan, Hashable] = {}
        self._locations: dict[object, Hashable] = {}

    def of(self, steps: Sequence[Step], *variables: Sequence[Var]) -> Hashable | None:
        """The signature of steps, and of lists of variables that they read or make.

        Two signatures are equal where the steps are, but for the names of variables: what they compute and how, the
        dtypes, the scopes and the lines of the user's code.

        Args:
            steps: The steps.
            *variables: Variables, of which each is told by where the steps read or make it.

        Returns:
            Data that can be hashed; None where the steps hold more than data, such as a rule of the user's.
        """
        try:
            scope = _Scope(self)
            return tuple(map(scope.step, steps)), tuple(tuple(map(scope.variable, group)) for group in variables)
        except _UnsignedError:
            return None

    def plan(self, plan: Plan) -> Hashable:
        """The signature of a plan."""
        if plan not in self._plans:
            if plan.consts or plan.captures:
                raise _UnsignedError
            scope, inner = _Scope(self), open_jaxpr(plan.jaxpr)
            sides = scope.value([*inner.invars]), tuple(map(scope.step, plan.steps)), scope.value([*inner.outvars])
            self._plans[plan] = sides, _of_flows(plan.ins), _of_flows(plan.outs), plan.constants, plan.carries
        return self._plans[plan]

    def location(self, eqn: Eqn) -> Hashable:
        """Scope and line of an equation."""
        info = eqn.source_info
        if info.traceback not in self._locations:
            self._locations[info.traceback] = code_location(eqn)
        return self._locations[info.traceback], info.name_stack


class _Scope:
    """The variables of one jaxpr, each named by when it is seen first."""

    def __init__(self, signatures: Signatures) -> None:
        self._signatures = signatures
        self._names: dict[Var, int] = {}

    def variable(self, var: Var) -> int:
        return self._names.setdefault(var, len(self._names))

    def step(self, step: Step) -> Hashable:
        rewrite = None if step.rewrite is None else self._rewrite(step.rewrite)
        return self._equation(step.eqn), rewrite, step.casts, _of_flows(step.ins), _of_flows(step.out)

    def _equation(self, eqn: Eqn) -> Hashable:
        if eqn.effects:
            raise _UnsignedError
        atoms = tuple(map(self._atom, eqn.invars)), tuple(map(self._atom, eqn.outvars))
        return eqn.primitive, self.value(eqn.params), atoms, self._signatures.location(eqn), eqn.ctx

    def _rewrite(self, rewrite: Rewrite) -> Hashable:
        if type(rewrite) not in _DATA:
            raise _UnsignedError
        values = (self.value(getattr(rewrite, field.name)) for field in dataclasses.fields(rewrite))
        return type(rewrite), *values

    def _atom(self, atom: Atom) -> Hashable:
        if isinstance(atom, Literal):
            return atom.aval, self.value(np.asarray(atom.val)), type(atom.val)
        return atom.aval, self.variable(atom)

    def value(self, value: object) -> Hashable:
        """The signature of anything that a step or an equation holds."""
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if isinstance(value, tuple | list):
            return kind, *map(self.value, value)
        if isinstance(value, dict):
            return tuple((name, self.value(item)) for name, item in sorted(value.items()))
        if isinstance(value, float):
            return kind, value.hex()
        if isinstance(value, np.ndarray | np.generic):
            return _of_numbers(value)
        if is_atom(value):
            return self._atom(value)
        if is_equation(value):
            return self._equation(value)
        if isinstance(value, Plan):
            return self._signatures.plan(value)
        if isinstance(value, Rewrite):
            return self._rewrite(value)
        return _of_other(value)


def _of_other(value: object) -> Hashable:
    """A jaxpr is equal to itself alone, as are many objects of JAX, which remembers those of jitted functions."""
    if _may_hold_values(value) or isinstance(value, jax.Array) or (is_jaxpr(value) and jaxpr_consts(value)):
        raise _UnsignedError
    try:
        hash(value)
    except TypeError as error:
        raise _UnsignedError from error
    return type(value), value


def _may_hold_values(value: object) -> bool:
    """Whether something can be called, and is no function that closes over nothing, as those of a random key are."""
    if isinstance(value, FunctionType):
        return bool(value.__closure__ or value.__defaults__ or value.__kwdefaults__)
    return callable(value) and not isinstance(value, type | jax.sharding.Mesh)


def _of_numbers(value: np.ndarray | np.generic) -> Hashable:
    if value.size > _LARGEST or value.dtype.hasobject:
        raise _UnsignedError
    return value.dtype, value.shape, value.tobytes()


def _of_flows(flows: Sequence[Flow | None]) -> Hashable:
    """What emission reads of states: not the scopes and the histories of values."""
    return tuple(flow and (flow.dtype, flow.kind, flow.size, flow.marks) for flow in flows)
