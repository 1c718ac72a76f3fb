"""`custom_jvp` and `custom_vjp`: the user's rules are kept, and run under the same policy, forward and backward.

Rules become jaxprs at the traced dtypes, which are planned and emitted like any other jaxpr: a forward-mode rule by
`jax.jvp` of the equation as it was, the two halves of a reverse-mode rule by what `_compat` reads of it. Through
`jax.vjp` the rule would not see which cotangents are zero, and operands that it hands on would be kept twice.

A reverse-mode rule that keeps its own result in half hands this half over beside the result, for products to read: were
it rounded once more for them, both copies would be kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jamp._compat import (
    Atom,
    Aval,
    Eqn,
    Literal,
    backward_rule,
    bind,
    is_eager_in_shard_map,
    open_jaxpr,
    traced,
)  # fmt: skip
from jamp._dtypes import is_differentiable
from jamp._primitives import Trait, has
from jamp.transforms.emission.casts import cast, replaced, zeros
from jamp.transforms.emission.execute import execute
from jamp.transforms.emission.run import Memo, Run
from jamp.transforms.emission.taylor import with_rule
from jamp.transforms.emission.written_rules import (
    as_written,
    at_traced_dtype,
    at_traced_dtypes,
    forward_part,
    half_wants,
    rule_of_step,
)
from jamp.transforms.program.flow import Flow
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import Mark
from jamp.transforms.program.plan import Cast, Casts, Plan, Step, asks_what_moves

Function = Callable[..., Any]
P = ParamSpec("P")


def emit_custom_rule(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    """A function with a rule of its own.

    What it closes over stays closed over, so that JAX refuses to differentiate it: the rule says nothing of that.
    """
    (plan,) = step.plans
    if step.unchanged:
        return bind(step.eqn, operands)
    build = _build_custom_jvp if has(step.eqn, Trait.CUSTOM_JVP) else _build_custom_vjp
    inner = run._replace(keep_half=False)
    first = step.eqn.params["num_consts"]
    consts, primals = operands[:first], operands[first:]
    if build is _build_custom_jvp and not consts and not is_eager_in_shard_map():
        rules = run.memo.rules
        apart = inner._replace(memo=Memo(rules))  # What is remembered holds of this program the steps alone.
        options = inner.in_loop, inner.keep_results
        known = rules.apply(step, primals, options, lambda: build(step, plan, apart, ()))
        if known is not None:
            return known
    key = (build, plan, id(step.eqn), inner, *map(id, consts))
    if key not in run.memo.built or asks_what_moves(step.eqn):
        run.memo.built[key] = build(step, plan, inner, consts)
    function = with_rule(run.memo.built[key])
    # JAX has no symbolic zeros there.
    return list((jax.jit(function) if is_eager_in_shard_map() else function)(*primals))


def _build_custom_jvp(step: Step, plan: Plan, run: Run, consts: Sequence[Array]) -> Function:
    eqn, rewrite, built = step.eqn, rule_of_step(step), run.memo.built
    first = len(consts)

    @jax.custom_jvp
    def function(*primals: Array) -> Sequence[Array]:
        return tuple(execute(plan, [*consts, *primals], run))

    def rule(primals: Any, tangents: Any) -> Any:
        moving = [
            first + i
            for i, (value, tangent) in enumerate(zip(primals, tangents, strict=True))
            if is_differentiable(jax.typeof(value)) and not isinstance(tangent, SymbolicZero)
        ]
        if not moving:
            out = function(*primals)
            return out, tuple(zeros(jax.typeof(value)) for value in out)
        operands, given = [*consts, *primals], [tangents[i - first] for i in moving]
        key = ("jvp", plan, id(eqn), *moving, *map(jax.typeof, operands))
        if key not in built:
            avals = at_traced_dtypes(eqn, plan, operands)
            of_moving = functools.partial(_jvp_of, eqn, moving)
            built[key] = as_written(rewrite.replan, traced, of_moving, [*avals, *(avals[i] for i in moving)])
        jaxpr = built[key]
        moved = tuple(_tangent_state(plan.ins[i], plan) for i in moving)
        states, moved = rewrite.replan.of_derivative(jaxpr, plan.ins, moved, rewrite.solves, linear=True)
        ruled = rewrite.replan.plan(jaxpr, (*states, *moved), half_wants(jaxpr))
        given = [*map(_raised, given, moved)]
        differentiable = [i for i, var in enumerate(eqn.outvars) if is_differentiable(var.aval)]
        dtypes = [*plan.out_dtypes, *(plan.out_dtypes[i] for i in differentiable)]
        outs = execute(ruled, [*operands, *given], run, dtypes)
        values, dots = outs[: len(plan.outs)], outs[len(plan.outs) :]
        by_index = dict(zip(differentiable, dots, strict=False))
        tangents_out = (by_index[i] if i in by_index else zeros(jax.typeof(value)) for i, value in enumerate(values))
        return tuple(values), tuple(tangents_out)

    function.defjvp(rule, symbolic_zeros=True)
    return function


def _jvp_of(eqn: Eqn, moving: list[int], *args: Array) -> list[Array]:
    """The rule of an equation, for the operands that have a tangent; tangents of its differentiable results only."""
    count = len(eqn.invars)
    primals, tangents = args[:count], args[count:]

    def of_moving(*moved: Array) -> list[Array]:
        return bind(eqn, replaced(primals, moving, moved))

    outs, dots = jax.jvp(of_moving, [primals[i] for i in moving], list(tangents))
    return [*outs, *(dot for dot, var in zip(dots, eqn.outvars, strict=True) if is_differentiable(var.aval))]


def _tangent_state(flow: Flow | None, plan: Plan) -> Flow | None:
    """State of the tangent of an operand in that state: its casts must be linear, so it is no mask to be saturated."""
    if flow is None:
        return None
    kind = Kind.HALF if plan.pair.is_narrow(flow.dtype) else Kind.LAZY
    marks = (flow.marks & ~(Mark.HUGE | Mark.QUOTIENT)) | Mark.TANGENT | Mark.FRACTION
    return flow._replace(roots=frozenset(), kind=kind, marks=marks, scale=0, number=None)


def _build_custom_vjp(step: Step, plan: Plan, run: Run, consts: Sequence[Array]) -> Function:
    eqn, rewrite = step.eqn, rule_of_step(step)
    first, count = len(consts), len(plan.outs)
    saved: dict[str, Any] = {}  # What tracing the forward rule tells the backward rule about the residuals.

    @jax.custom_vjp
    def function(*primals: Array) -> Sequence[Array]:
        outs = execute(plan, [*consts, *primals], run)
        return (*outs, *_in_half(outs, rewrite.halves, (None,) * count))

    def forward(*primals: CustomVJPPrimal) -> Any:
        operands = [*consts, *(primal.value for primal in primals)]
        avals = at_traced_dtypes(eqn, plan, operands)
        jaxpr, ruled, forwarded, kept = forward_part(step, avals, [primal.perturbed for primal in primals])
        made = len(kept)
        dtypes = [*(flow and flow.dtype for flow in kept), *plan.out_dtypes]
        outs = execute(ruled, operands[first:], run._replace(keep_results=True), dtypes)
        atoms, results = open_jaxpr(jaxpr).outvars[:made], open_jaxpr(jaxpr).outvars[made:]
        new = map(_made, outs, kept, atoms)
        found = [next(new) if i is None else _forwarded(step, plan, i, operands[i]) for i in forwarded]
        residuals, saved["states"], saved["avals"] = zip(*found, strict=True) if found else ((), (), ())
        known = [next((out for it, out in zip(atoms, outs, strict=False) if it is result), None) for result in results]
        return (*outs[made:], *_in_half(outs[made:], rewrite.halves, known)), residuals

    def backward(residuals: Any, cotangents: Any) -> Any:
        cotangents = _added(cotangents, rewrite.halves, plan.pair.wide)
        # Without symbolic zeros of its own, a rule is given zeros.
        given = [i for i, value in enumerate(cotangents) if not isinstance(value, SymbolicZero)]
        # Numbers and flags are no arrays: a rule may branch on them.
        stored = [i for i, value in enumerate(residuals) if isinstance(value, jax.Array)]
        inputs = [*(residuals[i] for i in stored), *(cotangents[i] for i in given)]
        results = [var.aval for var in eqn.outvars]
        traced = [*(saved["avals"][i] for i in stored), *(results[i] for i in given)]
        avals = [at_traced_dtype(value, aval, plan) for value, aval in zip(inputs, traced, strict=True)]
        answered: list[int] = []

        def of_given(*args: Array) -> list[Array]:
            dots = [_absent(eqn, value, aval) for value, aval in zip(cotangents, results, strict=True)]
            dots = replaced(dots, given, args[len(stored) :])
            outs = backward_rule(eqn, replaced(residuals, stored, args[: len(stored)]), dots)
            answered[:] = [i for i, value in enumerate(outs) if value is not None]
            return [outs[i] for i in answered]

        jaxpr = as_written(rewrite.replan, jax.make_jaxpr(of_given), *avals)
        kept = tuple(saved["states"][i] for i in stored)
        tangents = tuple(_tangent_state(plan.outs[i], plan) for i in given)
        kept, tangents = rewrite.replan.of_derivative(jaxpr, kept, tangents, rewrite.solves, linear=False)
        wanted = rewrite.replan.cotangents(jaxpr, rewrite.converges)
        ruled = rewrite.replan.plan(jaxpr, (*kept, *tangents), wanted)
        inputs[len(stored) :] = map(_raised, inputs[len(stored) :], tangents)
        flows = [plan.ins[first + i] for i in answered]
        outs = execute(ruled, inputs, run, [flow and flow.dtype for flow in flows])
        by_index = dict(zip(answered, outs, strict=True))
        return tuple(by_index.get(i) for i in range(len(eqn.invars) - first))

    # Symbolic zeros tell which operands are differentiated; equinox's checkpointed loops refuse to run without knowing.
    function.defvjp(forward, backward, symbolic_zeros=True)
    return function


def _raised(cotangent: Array, state: Flow | None) -> Array:
    """A cotangent in its state."""
    return cotangent if state is None else lax.convert_element_type(cotangent, state.dtype)


def _made(value: Array, state: Flow | None, atom: Atom) -> tuple[Array, Flow | None, Aval]:
    """A residual that a rule makes: the value to keep, its state, and what it was traced as."""
    return atom.val if isinstance(atom, Literal) else value, state, atom.aval


def _forwarded(step: Step, plan: Plan, index: int, operand: Array) -> tuple[Array, Flow | None, Aval]:
    """An operand that is a residual: the value to keep, its state, and what it was traced as."""
    before = plan.ins[index]
    (state,) = rule_of_step(step).residual((before,))
    if before is not None and state is not None and state.dtype != before.dtype:
        operand = cast(operand, Cast(state.dtype, before.has(Mark.HUGE)))
    return operand, state, step.eqn.invars[index].aval


def _in_half(results: Sequence[Array], halves: Casts, known: Sequence[Array | None]) -> list[Array]:
    """Half copies of those results that are to have one, which may be known."""
    return [
        half if half is not None and half.dtype == to.dtype else cast(value, to)
        for value, to, half in zip(results, halves, known, strict=True)
        if to is not None
    ]


def _added(cotangents: Sequence[Array | SymbolicZero], halves: Casts, wide: np.dtype) -> list[Array | SymbolicZero]:
    """Cotangents of the results, with those of their half copies, which add up in float32."""
    added, of_halves = list(cotangents[: len(halves)]), iter(cotangents[len(halves) :])
    for index, to in enumerate(halves):
        if to is None or isinstance(half := next(of_halves), SymbolicZero):
            continue
        other, given = added[index], lax.convert_element_type(half, wide)
        added[index] = given if isinstance(other, SymbolicZero) else lax.add(other, given)
    return added


def _absent(eqn: Eqn, cotangent: Any, traced: Aval) -> Any:
    """The cotangent of a result that nobody reads, as the rule wants to see it."""
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    aval: Any = cotangent.aval
    if is_differentiable(traced):
        aval = aval.update(dtype=traced.dtype)
    return SymbolicZero(aval) if asks_what_moves(eqn) else zeros(aval)
