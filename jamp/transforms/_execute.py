"""Emits what a plan says: casts operands, binds primitives, hands each result on in the dtype that was planned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jamp._compat import Literal, bind, checkpoint_name, equation_context, open_jaxpr
from jamp.transforms._emit import KEEP, OF_RESULT, keeping_result
from jamp.transforms._environment import Env, cast
from jamp.transforms._flow import is_half
from jamp.transforms._residuals import keep_half, kept, tags_inside
from jamp.transforms._segments import Casting, casting, entering, segments
from jamp.transforms._states import linearized_at, reads_operands, reduces
from jamp.transforms._steps import Plan, Step


class Run(NamedTuple):
    """How plans are emitted.

    Attributes:
        keep_half: Whether to tell reverse mode what to keep (not where an enclosing checkpoint already does).
        in_loop: Whether the emission is inside a loop body, where XLA cannot merge recomputation with the original.
        keep_results: Whether the results of the plan are to be kept for the backward pass, as what a loop stacks is.
        probe: Called after each step of the outermost plan with the step, its operands as they were carried, the
            same as they were cast, and its results.
    """

    keep_half: bool = False
    in_loop: bool = False
    keep_results: bool = False
    probe: Callable[[Step, list[Any], list[Any], list[Any]], None] | None = None


def execute(plan: Plan, args: Sequence[Any], run: Run, out_dtypes: Sequence[Any] | None = None) -> list[Any]:
    """Evaluates a planned jaxpr.

    Args:
        plan: The plan.
        args: Values for the jaxpr's inputs, in the dtypes of `plan.ins`.
        run: How to emit.
        out_dtypes: Dtypes to give the results in; None, for all or one, leaves what the plan has.

    Returns:
        The results, one for each of the jaxpr's outputs.
    """
    inner = open_jaxpr(plan.jaxpr)
    env = Env([*inner.invars, *inner.constvars], [*args, *plan.consts], kept(plan, run.keep_results))
    run = run._replace(keep_results=False)
    if run.keep_half:
        _execute_in_segments(plan, env, run)
    else:
        _execute_steps(plan.steps, env, run)
    dtypes = out_dtypes or [None] * len(inner.outvars)
    outs = []
    for atom, flow, dtype in zip(inner.outvars, plan.outs, dtypes, strict=True):
        target = dtype if flow is not None and dtype is not None and dtype != flow.dtype else None
        value = env.read(atom, target, flow is not None and flow.huge)
        aval: Any = atom.aval
        outs.append(jnp.asarray(value, aval.dtype) if isinstance(atom, Literal) and target is None else value)
    return outs


def _execute_steps(steps: Iterable[Step], env: Env, run: Run) -> None:
    inner = run._replace(probe=None)
    for step in steps:
        with equation_context(step.eqn):
            if step.pins is not None:
                env.pin(step.operands[0], step.pins)
            operands = [
                env.read(atom, dtype, flow is not None and flow.huge)
                for atom, dtype, flow in zip(step.operands, step.casts, step.ins, strict=True)
            ]
            # A rule may read the half result: what is kept has to be marked where it is made.
            inside = [tags_inside(step) and flow is not None and is_half(flow.dtype) for flow in step.out]
            keeps = any(var in env.keep.values for var, tags in zip(step.eqn.outvars, inside, strict=True) if tags)
            evaluate = functools.partial(_evaluate, step, inner._replace(keep_results=keeps))
            points = env.points(step, operands)
            if points is None or not reads_operands(step):
                outs = evaluate(operands)
            else:
                outs = linearized_at(evaluate, operands, [point() for point in points])
            for var, value, tags in zip(step.eqn.outvars, outs, inside, strict=True):
                env.write(var, value if tags or var not in env.keep.values else checkpoint_name(value, KEEP))
            if points is not None and not reduces(step.eqn):
                _set_points(step, evaluate, points, env)
            _remember_origin(step, env)
        if run.probe is not None:
            run.probe(step, [*map(env.read, step.operands)], operands, [*map(env.read, step.eqn.outvars)])


def _evaluate(step: Step, run: Run, operands: Sequence[Any]) -> list[Any]:
    name = step.eqn.primitive.name
    if name in OF_RESULT and run.keep_results:
        return [keeping_result(name, lambda x: bind(step.eqn, [x], step.params)[0])(*operands)]
    outs = step.emit(step, operands, run) if step.emit else bind(step.eqn, operands, step.params)
    dtypes = step.out_casts or [None] * len(outs)
    return [out if dtype is None else cast(out, dtype) for out, dtype in zip(outs, dtypes, strict=True)]


def _set_points(step: Step, evaluate: Callable[..., Any], points: Sequence[Callable[[], Any]], env: Env) -> None:
    """Where to take derivatives of what reads the results of a step; masks are kept as they are."""

    @functools.cache
    def at_points() -> list[Any]:
        with equation_context(step.eqn):
            return evaluate([point() for point in points])

    def result(index: int) -> Any:
        return at_points()[index]

    for index, (var, flow) in enumerate(zip(step.eqn.outvars, step.out, strict=True)):
        if flow is None:
            env.write(var, checkpoint_name(env.read(var), KEEP))
        elif var not in env.keep.values:
            env.set_point(var, functools.partial(result, index))


def _remember_origin(step: Step, env: Env) -> None:
    """A half value that the program raised to float32 is at hand when it is wanted in half again."""
    if step.eqn.primitive.name != "convert_element_type" or isinstance(step.operands[0], Literal):
        return
    source, result = step.ins[0], step.out[0]
    if (
        source is not None
        and result is not None
        and step.casts[0] is not None
        and source.dtype.itemsize < result.dtype.itemsize
    ):
        env.alias(step.eqn.outvars[0], source.dtype, env.read(step.operands[0]))


def _execute_in_segments(plan: Plan, env: Env, run: Run) -> None:
    """Segments of steps under jamp's own checkpoint, and in between the steps that give way to the user's remat."""
    outvars = open_jaxpr(plan.jaxpr).outvars
    groups = segments(plan.steps, outvars)
    for (free, steps), later in zip(groups, _read_after([steps for _, steps in groups], outvars), strict=True):
        if free:
            _execute_steps(steps, env, run)
        else:
            _execute_checkpointed(steps, later, plan, env, run)


def _execute_checkpointed(steps: list[Step], later: set[Any], plan: Plan, env: Env, run: Run) -> None:
    entries = entering(steps, plan.half_states)
    variables = [entry.var for entry in entries]
    given = [env.read(var) for var in variables]
    plain = run._replace(keep_half=False)
    if not any(isinstance(value, Tracer) for value in given):  # Nothing can be differentiated.
        _execute_steps(steps, env, plain)
        return
    weights = plan.weights
    form = casting(steps, [entry for entry in entries if entry.var in weights and not entry.as_it_is], run.in_loop)
    inputs = [
        (entry.var, dtype, step, huge)
        for entry in entries
        for dtype, (step, huge) in entry.reads_where(form is Casting.INSIDE and entry.var in weights, steps[0])
    ]
    outputs = [var for step in steps for var in step.eqn.outvars if var in later]
    checkpoint = functools.partial(jax.checkpoint, policy=keep_half)

    def segment(*values: Any) -> list[Any]:
        inner = Env((), (), env.keep)
        for (var, dtype, _, _), value in zip(inputs, values, strict=True):
            inner.enter(var, dtype, value)
            if dtype is not None and var in plan.half_states:
                inner.enter_state(var, dtype)
        _execute_steps(steps, inner, plain)
        return [inner.read(var) for var in outputs]

    def cast_and_run(outer: Env) -> list[Any]:
        values = []
        for var, dtype, step, huge in inputs:
            with equation_context(step.eqn):
                values.append(outer.read(var, dtype, huge))
        return checkpoint(segment, prevent_cse=not run.in_loop)(*values)

    if form is Casting.BETWEEN:
        enclosed = checkpoint(lambda *values: cast_and_run(Env(variables, values, env.keep)), prevent_cse=False)
        outs = enclosed(*given)
    else:
        outs = cast_and_run(env)
    for var, value in zip(outputs, outs, strict=True):
        env.write(var, value)


def _read_after(groups: list[list[Step]], outvars: Sequence[Any]) -> list[set[Any]]:
    """For each group of steps, the variables that are read after it."""
    later = {atom for atom in outvars if not isinstance(atom, Literal)}
    result = []
    for steps in reversed(groups):
        result.append(set(later))
        later.update(atom for step in steps for atom in step.operands if not isinstance(atom, Literal))
    return result[::-1]
