"""Emits a plan in segments: those under a checkpoint of jamp's own, and the steps in between."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

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
from jamp.transforms.keeping.segments import Segment, cast_inside, entering, raised_alike, segments
from jamp.transforms.program.plan import Cast, Plan, Step


def execute_in_segments(plan: Plan, env: Env, run: Run, half_states: frozenset[Var]) -> None:
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


def _execute_checkpointed(
    segment: Segment,
    later: set[Var],
    plan: Plan,
    env: Env,
    run: Run,
    half_states: frozenset[Var],
    raised: set[Var],
) -> None:
    steps, setting = segment.steps, plan.setting
    entries = entering(steps, half_states, setting)
    given = [env.read(entry.var) for entry in entries]
    plain = run._replace(keep_half=False, remember=False)
    if not any(isinstance(value, Tracer) for value in given):  # Nothing can be differentiated.
        execute_steps(steps, env, plain._replace(remember=run.remember))
        return
    weights = plan.weights
    copied = [entry for entry in entries if entry.var in weights and not entry.as_it_is]
    again = run.memo.kept_by_rules(plan)
    if cast_inside(steps, copied, [env.read(entry.var) for entry in copied], run.in_loop, setting.heuristics):
        again |= weights
    inputs = [
        (entry.var, to, step) for entry in entries for to, step in entry.reads_where(entry.var in again, steps[0])
    ]
    wide = Cast(setting.pair.wide)
    inputs += [(entry.var, wide, steps[0]) for entry in entries if entry.var in raised]
    made_of = [var for var, to, _ in inputs if to is None and var in env.raised]
    outputs = [var for step in steps for var in step.eqn.outvars if var in later]
    in_float32 = [var for var in outputs if var in raised]  # As they are read here: all cotangents add up.

    signature = _signature(segment, inputs, outputs, in_float32, made_of, env.keep, run, plan, half_states)
    if signature is not None:
        # JAX may remember the function: of this program it holds the steps alone.
        plain = plain._replace(memo=Memo(run.memo.rules))
    keep = env.keep

    def run_segment(*values: Array) -> list[Array]:
        inner = Env((), (), keep, setting)
        for (var, to, _), value in zip(inputs, values[: len(inputs)], strict=True):
            # XLA may well merge the casts of weights, which it would else do twice.
            merges = run.in_loop or var in weights
            given = raised_copy(value, inner.read(var)) if to == wide else value if merges else held(value)
            inner.enter(var, to, given)
            if to is not None and var in half_states:
                inner.enter_state(var, to.dtype)
        for var, half in zip(made_of, values[len(inputs) :], strict=True):
            inner.enter_raised(var, half)
        execute_steps(steps, inner, plain._replace(entered=segment.scopes))
        return [inner.read(var) for var in outputs] + [inner.read(var, wide) for var in in_float32]

    values = []
    for var, to, step in inputs:
        with equation_context(step.eqn):
            values.append(env.raised[var][0] if to is None and var in env.raised else env.read(var, to))
    values += [env.raised[var][1] for var in made_of]
    with outer_scopes(steps[0].eqn, segment.scopes):
        outs = checkpointed(run_segment, values, signature, KeepHalf(barrier=not run.in_loop))
    for var, value in zip(outputs, outs[: len(outputs)], strict=True):
        env.write(var, value)
    for var, value in zip(in_float32, outs[len(outputs) :], strict=True):
        env.alias(var, value.dtype, value)


def _signature(
    segment: Segment,
    inputs: Sequence[tuple[Var, Cast | None, Step]],
    outputs: Sequence[Var],
    in_float32: Sequence[Var],
    made_of: Sequence[Var],
    keep: Kept,
    run: Run,
    plan: Plan,
    half_states: frozenset[Var],
) -> Hashable | None:
    """What tells a segment from others, and is equal where the same would be emitted; None where nothing tells."""
    if is_labelling() or run.probe is not None:
        return None
    given = [var for var, *_ in inputs]
    made = [var for step in segment.steps for var in step.eqn.outvars]
    treated = (keep.half_copies, keep.written, plan.weights, half_states)
    marked = [[var for var in [*given, *made] if var in chosen] for chosen in treated]
    marked += [[*in_float32], [*made_of]]
    marked.append([var for var in made if var in keep.values])  # What is given is kept or not already.
    found = run.memo.signatures.of(segment.steps, given, outputs, *marked, entered=segment.scopes)
    return None if found is None else (found, tuple(to for _, to, _ in inputs), plan.setting, run.in_loop)


def _read_after(groups: list[list[Step]], outvars: Sequence[Atom]) -> list[set[Var]]:
    """For each group of steps, the variables that are read after it."""
    later: set[Var] = {atom for atom in outvars if not isinstance(atom, Literal)}
    result = []
    for steps in reversed(groups):
        result.append(set(later))
        later.update(atom for step in steps for atom in step.operands if not isinstance(atom, Literal))
    return result[::-1]
