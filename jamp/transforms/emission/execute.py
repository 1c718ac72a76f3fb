"""Emits what a plan says: reads its inputs, runs its steps, hands results on in the dtypes that were planned.

Where reverse mode is to keep half, it emits the steps in segments under a checkpoint of jamp's own each, and in between
those that give way to the user's remat.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jamp._compat import Atom, Literal, Var, equation_context, open_jaxpr, outer_scopes
from jamp.transforms._labels import is_labelling
from jamp.transforms.emission.checkpoints import checkpointed
from jamp.transforms.emission.environment import Env
from jamp.transforms.emission.run import Memo, Run
from jamp.transforms.emission.shared import raised_copy
from jamp.transforms.emission.steps import execute_steps
from jamp.transforms.emission.taylor import held, is_taylor_mode
from jamp.transforms.keeping.kept import KeepHalf, Kept
from jamp.transforms.keeping.segments import (
    Entering,
    Segment,
    cast_inside,
    entering,
    raised_alike,
    segments,
)
from jamp.transforms.program.marks import Mark
from jamp.transforms.program.plan import Cast, Plan, Step


def execute(
    plan: Plan,
    args: Sequence[Array],
    run: Run,
    out_dtypes: Sequence[np.dtype | None] | None = None,
    half_states: frozenset[Var] = frozenset(),
    halves: Mapping[int, Array] | None = None,
) -> list[Array]:
    """Evaluates a planned jaxpr.

    Args:
        plan: The plan.
        args: Values for the jaxpr's inputs, in the dtypes of `plan.ins`.
        run: How to emit.
        out_dtypes: Dtypes to give the results in; None, for all or one, leaves what the plan has.
        half_states: Float32 carries, where the plan is of a loop's body, that the backward pass is given in half.
        halves: By position of a float32 input, the half value that it was made of, which is kept in its place.

    Returns:
        The results, one for each of the jaxpr's outputs.
    """
    inner = open_jaxpr(plan.jaxpr)
    keep = run.memo.keeping.of(plan, run.keep_results)
    consts = map(run.memo.constant, plan.consts)
    env = Env([*inner.invars, *inner.constvars], [*args, *consts], keep, plan.setting)
    for index, half in (halves or {}).items():
        env.enter_raised(inner.invars[index], half)
    run.memo.enter(plan, env)
    run = run._replace(keep_results=False)
    if run.keep_half:
        _execute_in_segments(plan, env, run, half_states)
    else:
        execute_steps(plan.steps, env, run)
    dtypes = out_dtypes or [None] * len(inner.outvars)
    outs = []
    for atom, flow, dtype in zip(inner.outvars, plan.outs, dtypes, strict=True):
        to = None
        if flow is not None and dtype is not None and dtype != flow.dtype:  # None is equal to float64, says NumPy.
            to = Cast(dtype, flow.has(Mark.HUGE))
        value = env.read(atom, to)
        if isinstance(atom, Literal) and to is None:  # Of a weak type, it has its dtype as a literal already.
            value = jnp.asarray(value, None if atom.aval.weak_type else atom.aval.dtype)
        outs.append(value)
    return outs


def _execute_in_segments(plan: Plan, env: Env, run: Run, half_states: frozenset[Var]) -> None:
    """Segments of steps under jamp's own checkpoint, and in between the steps that give way to the user's remat."""
    outvars = open_jaxpr(plan.jaxpr).outvars
    groups = segments(plan, run.memo.keeping, env.keep)
    read_after = _read_after([group.steps for group in groups], outvars)
    raised_inside = [set[Var]() for _ in groups] if is_taylor_mode() else raised_alike(groups, plan.setting)
    for segment, later, raised in zip(groups, read_after, raised_inside, strict=True):
        if segment.free:
            execute_steps(segment.steps, env, run)
        else:
            _execute_checkpointed(segment, later, plan, env, run, half_states, raised)


class _Border(NamedTuple):
    """What crosses the border of a segment.

    Attributes:
        inputs: What it reads, each with the cast that is made in front of it, and the step that reads it first.
        made_of: Those of its inputs that are float32 made of half, which is given as well and kept in their place.
        outputs: What is read after it.
        in_float32: Half outputs that are read in float32, there as here: all cotangents add up.
    """

    inputs: list[tuple[Var, Cast | None, Step]]
    made_of: list[Var]
    outputs: list[Var]
    in_float32: list[Var]


def _execute_checkpointed(
    segment: Segment,
    later: set[Var],
    plan: Plan,
    env: Env,
    run: Run,
    half_states: frozenset[Var],
    raised: set[Var],
) -> None:
    entries = entering(segment.steps, half_states, plan.setting)
    plain = run._replace(keep_half=False, remember=False)
    if not any(isinstance(env.read(entry.var), Tracer) for entry in entries):  # Nothing can be differentiated.
        execute_steps(segment.steps, env, plain._replace(remember=run.remember))
        return
    border = _border(segment.steps, entries, later, raised, plan, env, run)
    signature = _signature(segment, border, env.keep, run, plan, half_states)
    if signature is not None:
        # JAX may remember the function: of this program it holds the steps alone.
        plain = plain._replace(memo=Memo(run.memo.rules))
    keep, setting, weights = env.keep, plan.setting, plan.weights
    inputs, wide = border.inputs, Cast(setting.pair.wide)

    def run_segment(*values: Array) -> list[Array]:
        inner = Env((), (), keep, setting)
        for (var, to, _), value in zip(inputs, values[: len(inputs)], strict=True):
            # XLA may well merge the casts of weights, which it would else do twice.
            merges = run.in_loop or var in weights
            given = raised_copy(value, inner.read(var)) if to == wide else value if merges else held(value)
            inner.enter(var, to, given)
            if to is not None and var in half_states:
                inner.enter_state(var, to.dtype)
        for var, half in zip(border.made_of, values[len(inputs) :], strict=True):
            inner.enter_raised(var, half)
        execute_steps(segment.steps, inner, plain._replace(entered=segment.scopes))
        return [inner.read(var) for var in border.outputs] + [inner.read(var, wide) for var in border.in_float32]

    values = []
    for var, to, step in inputs:
        with equation_context(step.eqn):
            values.append(env.raised[var][0] if to is None and var in env.raised else env.read(var, to))
    values += [env.raised[var][1] for var in border.made_of]
    with outer_scopes(segment.steps[0].eqn, segment.scopes):
        outs = checkpointed(run_segment, values, signature, KeepHalf(barrier=not run.in_loop))
    for var, value in zip(border.outputs, outs[: len(border.outputs)], strict=True):
        env.write(var, value)
    for var, value in zip(border.in_float32, outs[len(border.outputs) :], strict=True):
        env.alias(var, value.dtype, value)


def _border(
    steps: Sequence[Step],
    entries: Sequence[Entering],
    later: set[Var],
    raised: set[Var],
    plan: Plan,
    env: Env,
    run: Run,
) -> _Border:
    weights, setting = plan.weights, plan.setting
    copied = [entry for entry in entries if entry.var in weights and not entry.as_it_is]
    again = run.memo.kept_by_rules(plan)
    if cast_inside(steps, copied, [env.read(entry.var) for entry in copied], run.in_loop, setting.heuristics):
        again |= weights
    inputs = [
        (entry.var, to, step) for entry in entries for to, step in entry.reads_where(entry.var in again, steps[0])
    ]
    inputs += [(entry.var, Cast(setting.pair.wide), steps[0]) for entry in entries if entry.var in raised]
    made_of = [var for var, to, _ in inputs if to is None and var in env.raised]
    outputs = [var for step in steps for var in step.eqn.outvars if var in later]
    return _Border(inputs, made_of, outputs, [var for var in outputs if var in raised])


def _signature(
    segment: Segment, border: _Border, keep: Kept, run: Run, plan: Plan, half_states: frozenset[Var]
) -> Hashable | None:
    """What tells a segment from others, and is equal where the same would be emitted; None where nothing tells."""
    if is_labelling() or run.probe is not None:
        return None
    given = [var for var, *_ in border.inputs]
    made = [var for step in segment.steps for var in step.eqn.outvars]
    treated = (keep.half_copies, keep.written, plan.weights, half_states)
    marked = [[var for var in [*given, *made] if var in chosen] for chosen in treated]
    marked += [border.in_float32, border.made_of]
    marked.append([var for var in made if var in keep.values])  # What is given is kept or not already.
    found = run.memo.signatures.of(segment.steps, given, border.outputs, *marked, entered=segment.scopes)
    return None if found is None else (found, tuple(to for _, to, _ in border.inputs), plan.setting, run.in_loop)


def _read_after(groups: list[list[Step]], outvars: Sequence[Atom]) -> list[set[Var]]:
    """For each group of steps, the variables that are read after it."""
    later: set[Var] = {atom for atom in outvars if not isinstance(atom, Literal)}
    result = []
    for steps in reversed(groups):
        result.append(set(later))
        later.update(atom for step in steps for atom in step.operands if not isinstance(atom, Literal))
    return result[::-1]
