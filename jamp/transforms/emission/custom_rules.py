"""`custom_jvp` and `custom_vjp`: the user's rules are kept, and run under the same policy, forward and backward.

The rules themselves sit in private parameters of the equation. But `jax.jvp` and `jax.vjp` of the equation, bound as it
was, *are* the rules, as jaxprs at the traced dtypes; these are planned and emitted like any other jaxpr.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jamp._compat import Aval, ClosedJaxpr, Eqn, bind, open_jaxpr
from jamp._dtypes import is_differentiable
from jamp._primitives import Trait, has
from jamp.transforms.emission.casts import replaced
from jamp.transforms.emission.execute import Run, execute
from jamp.transforms.program.flow import Flow, Kind, Mark
from jamp.transforms.program.plan import CustomRule, Plan, Step, asks_what_moves
from jamp.transforms.program.want import Want

Function = Callable[..., Any]


def emit_custom_rule(step: Step, operands: Sequence[Any], run: Run) -> list[Any]:
    """A function with a rule of its own."""
    (plan,) = step.plans
    if step.unchanged:
        return bind(step.eqn, operands)
    build = _build_custom_jvp if has(step.eqn, Trait.CUSTOM_JVP) else _build_custom_vjp
    inner = run._replace(keep_half=False)
    key = (build, plan, id(step.eqn), inner)
    if key not in run.memo.built or asks_what_moves(step.eqn):
        run.memo.built[key] = build(step, plan, inner)
    return list(run.memo.built[key](*operands))


def _rule(step: Step) -> CustomRule:
    if not isinstance(step.rewrite, CustomRule):
        raise TypeError(f"Expected the step of a custom rule, got {step.rewrite!r}.")
    return step.rewrite


def _half_wants(jaxpr: ClosedJaxpr) -> tuple[Want, ...]:
    return (Want.HALF,) * len(open_jaxpr(jaxpr).outvars)


def _build_custom_jvp(step: Step, plan: Plan, run: Run) -> Function:
    eqn, rewrite, built = step.eqn, _rule(step), run.memo.built

    @jax.custom_jvp
    def function(*primals: Any) -> Any:
        return tuple(execute(plan, primals, run))

    def rule(primals: Any, tangents: Any) -> Any:
        moving = [i for i in _moving(eqn) if not isinstance(tangents[i], SymbolicZero)]
        if not moving:
            out = function(*primals)
            return out, tuple(_no_tangent(value) for value in out)
        given = [tangents[i] for i in moving]
        key = ("jvp", plan, id(eqn), *moving, *map(jax.typeof, primals))
        if key not in built:
            built[key] = _trace(functools.partial(_jvp_of, eqn, moving), eqn, plan, primals, moving)
        jaxpr = built[key]
        states = (*plan.ins, *(_tangent_state(plan.ins[i], plan) for i in moving))
        ruled = rewrite.replan(jaxpr, states, _half_wants(jaxpr))
        differentiable = [i for i, var in enumerate(eqn.outvars) if is_differentiable(var.aval)]
        dtypes = [*plan.out_dtypes, *(plan.out_dtypes[i] for i in differentiable)]
        outs = execute(ruled, [*primals, *given], run, dtypes)
        values, dots = outs[: len(plan.outs)], outs[len(plan.outs) :]
        by_index = dict(zip(differentiable, dots, strict=False))
        return tuple(values), tuple(by_index.get(i, _no_tangent(value)) for i, value in enumerate(values))

    function.defjvp(rule, symbolic_zeros=True)
    return function


def _jvp_of(eqn: Eqn, moving: list[int], *args: Any) -> list[Any]:
    """The rule of an equation, for the operands that have a tangent; tangents of its differentiable results only."""
    count = len(eqn.invars)
    primals, tangents = args[:count], args[count:]

    def of_moving(*moved: Any) -> list[Any]:
        return bind(eqn, replaced(primals, moving, moved))

    outs, dots = jax.jvp(of_moving, [primals[i] for i in moving], list(tangents))
    return [*outs, *(dot for dot, var in zip(dots, eqn.outvars, strict=True) if is_differentiable(var.aval))]


def _trace(function: Function, eqn: Eqn, plan: Plan, primals: Sequence[Any], moving: Sequence[int] = ()) -> ClosedJaxpr:
    """The jaxpr of a rule at the dtypes that the equation was traced with."""
    avals = [_at_traced_dtype(value, var.aval, plan) for value, var in zip(primals, eqn.invars, strict=True)]
    return jax.make_jaxpr(function)(*avals, *(avals[i] for i in moving))


def _at_traced_dtype(value: Any, traced: Aval, plan: Plan) -> Any:
    aval = jax.typeof(value)
    return aval.update(dtype=traced.dtype, weak_type=False) if plan.pair.flows(traced) else aval


def _no_tangent(value: Any) -> Any:
    """A zero tangent: of the same dtype, or `float0` for what is not differentiable."""
    if jnp.issubdtype(value.dtype, jnp.inexact):
        return jnp.zeros_like(value)
    return np.zeros(value.shape, jax.dtypes.float0)


def _tangent_state(flow: Flow | None, plan: Plan) -> Flow | None:
    """State of the tangent of an operand in that state: its casts must be linear, so it is no mask to be saturated."""
    if flow is None:
        return None
    kind = Kind.HALF if plan.pair.is_narrow(flow.dtype) else Kind.LAZY
    marks = (flow.marks & ~(Mark.HUGE | Mark.QUOTIENT)) | Mark.TANGENT | Mark.FRACTION
    return flow._replace(roots=frozenset(), kind=kind, marks=marks)


def _build_custom_vjp(step: Step, plan: Plan, run: Run) -> Function:
    eqn, rewrite = step.eqn, _rule(step)
    count = len(plan.outs)
    saved: dict[str, Any] = {}  # What tracing the forward rule tells the backward rule about the residuals.

    @jax.custom_vjp
    def function(*primals: Any) -> Any:
        return tuple(execute(plan, primals, run))

    def forward(*primals: Any) -> Any:
        # A rule that does not ask which operands are differentiated is one for all of them: JAX traces the function
        # anew for each set of them, and remembers the residuals of the last trace alone.
        moving = [i for i in _moving(eqn) if primals[i].perturbed or not asks_what_moves(eqn)]
        values = [primal.value for primal in primals]
        jaxpr = _trace(lambda *args: _forward_of(eqn, moving, args, saved), eqn, plan, values)
        ruled = rewrite.replan(jaxpr, plan.ins, _half_wants(jaxpr))
        saved["moving"] = moving
        saved["states"] = rewrite.residual(ruled.outs[count:])
        saved["avals"] = [var.aval for var in open_jaxpr(jaxpr).outvars[count:]]
        dtypes = [*plan.out_dtypes, *(flow and flow.dtype for flow in saved["states"])]
        outs = execute(ruled, values, run._replace(keep_results=True), dtypes)
        return tuple(outs[:count]), tuple(outs[count:])

    def backward(residuals: Any, cotangents: Any) -> Any:
        moving = saved["moving"]
        floating = [i for i, var in enumerate(eqn.outvars) if is_differentiable(var.aval)]
        given = [*residuals, *(_instantiated(cotangents[i]) for i in floating)]
        traced = [*saved["avals"], *(eqn.outvars[i].aval for i in floating)]
        avals = [_at_traced_dtype(value, aval, plan) for value, aval in zip(given, traced, strict=True)]
        jaxpr = jax.make_jaxpr(lambda *args: _backward_of(eqn, saved["tree"], floating, args))(*avals)
        arriving = (_tangent_state(plan.outs[i], plan) for i in floating)
        ruled = rewrite.replan(jaxpr, (*saved["states"], *arriving), _half_wants(jaxpr))
        outs = execute(ruled, given, run, [plan.ins[i] and plan.ins[i].dtype for i in moving])
        by_index = dict(zip(moving, outs, strict=True))
        return tuple(by_index.get(i) for i in range(len(eqn.invars)))

    # Symbolic zeros tell which operands are differentiated; equinox's checkpointed loops refuse to run without knowing.
    function.defvjp(forward, backward, symbolic_zeros=True)
    return function


def _forward_of(eqn: Eqn, moving: list[int], args: Sequence[Any], saved: dict[str, Any]) -> list[Any]:
    """Results of an equation and the residuals of its reverse-mode rule, flat; how to read them goes into `saved`."""

    def of_moving(*moved: Any) -> list[Any]:
        return bind(eqn, replaced(args, moving, moved))

    outs, pull = jax.vjp(of_moving, *(args[i] for i in moving))
    residuals, saved["tree"] = jax.tree.flatten(pull)
    return [*outs, *residuals]


def _backward_of(eqn: Eqn, tree: Any, floating: list[int], args: Sequence[Any]) -> list[Any]:
    """Cotangents of the differentiable operands, from residuals and the cotangents of floating results."""
    pull = jax.tree.unflatten(tree, args[: len(args) - len(floating)])
    given = dict(zip(floating, args[len(args) - len(floating) :], strict=True))
    return list(pull([given.get(i, _no_tangent(var.aval)) for i, var in enumerate(eqn.outvars)]))


def _instantiated(cotangent: Any) -> Any:
    if isinstance(cotangent, SymbolicZero):
        aval: Any = cotangent.aval
        return jnp.zeros(aval.shape, aval.dtype)
    return cotangent


def _moving(eqn: Eqn) -> list[int]:
    """Operands that a rule knows how to differentiate: floating, and not a constant that the function closes over."""
    first = eqn.params["num_consts"]
    return [i for i, var in enumerate(eqn.invars) if i >= first and is_differentiable(var.aval)]
