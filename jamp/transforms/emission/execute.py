"""Emits what a plan says: casts operands, binds primitives, hands each result on in the dtype that was planned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from jamp._compat import (
    Atom,
    Literal,
    Var,
    bind,
    equation_context,
    open_jaxpr,
    outer_scopes,
    scope_path,
    traced_variable,
)
from jamp._primitives import Trait, has
from jamp.transforms._labels import TRACED_SCOPE, is_labelling, rule_scope
from jamp.transforms.emission.casts import cast, exact
from jamp.transforms.emission.checkpoints import checkpointed, remembered
from jamp.transforms.emission.environment import Env, Point
from jamp.transforms.emission.functions import keeping_result, linearized_at
from jamp.transforms.emission.known_rules import KnownRules
from jamp.transforms.emission.taylor import held, is_taylor_mode, kept
from jamp.transforms.emission.written_rules import kept_by_rules
from jamp.transforms.keeping.kept import KeepHalf, Keeping, Kept, keeps_inside
from jamp.transforms.keeping.segments import Segment, cast_inside, entering, segments
from jamp.transforms.keeping.states import reads_operands, reduces
from jamp.transforms.program.flow import Mark
from jamp.transforms.program.plan import Cast, Casts, Inside, Plan, Step
from jamp.transforms.program.rewrites import Branches, Call, CustomRule, Float8Product, Forward, Pinned, Scan, While
from jamp.transforms.program.setting import Setting
from jamp.transforms.program.signature import Signatures

# Rewrites whose jaxprs are made anew wherever they are emitted.
_OF_JAXPRS = Branches | Call | Scan | While
Probe = Callable[[Step, list[Array], list[Array], list[Array]], None]


class Memo:
    """What was built while a program is emitted, so that a sub-jaxpr that repeats with the same dtypes is built once.

    It lives for one call of the transformed function.

    Args:
        rules: The rules that are known; of what JAX may remember, those of the program around it.
    """

    def __init__(self, rules: KnownRules | None = None) -> None:
        self.keeping = Keeping()
        self.rules = rules or KnownRules()
        self.signatures = Signatures()
        self.built: dict[Any, Any] = {}
        self.outermost: Env | None = None

    def kept_by_rules(self, plan: Plan) -> frozenset[Var]:
        """Results of a plan's steps whose half copies can be made again, for a rule keeps them in float32."""
        key = kept_by_rules, plan
        if key not in self.built:
            self.built[key] = kept_by_rules(plan)
        return self.built[key]

    def enter(self, plan: Plan, env: Env) -> None:
        """Remembers the values of the outermost plan, where rules close over some of them."""
        if self.outermost is None and plan.captures:
            self.outermost = env

    def constant(self, value: Any) -> Any:
        """What a jaxpr closes over; in place of a tracer of the program, its value, in the dtype of the trace."""
        var = traced_variable(value)
        if self.outermost is None or var is None or not self.outermost.has(var):
            return value
        found = self.outermost.read(var)
        return found if found.dtype == var.aval.dtype else cast(found, Cast(var.aval.dtype))


class Run(NamedTuple):
    """How plans are emitted.

    Attributes:
        emit: Emits the rewrite of a step. (Rewrites with plans inside execute these in turn.)
        memo: What was built already.
        keep_half: Whether to tell reverse mode what to keep (not where an enclosing checkpoint already does).
        in_loop: Whether the emission is inside a loop body, where XLA cannot merge recomputation with the original.
        keep_results: Whether the results of the plan are to be kept for the backward pass, as what a loop stacks is.
        entered: How many of the outermost scopes of the steps are entered already.
        remember: Whether to find what is made of the jaxprs inside of steps, such as loops, where it was made before.
            What is emitted under a checkpoint is found as a whole.
        probe: Called after each step of the outermost plan with the step, its operands as they were carried, the
            same as they were cast, and its results.
    """

    emit: Callable[[Step, Sequence[Array], Run], list[Array]]
    memo: Memo
    keep_half: bool = False
    in_loop: bool = False
    keep_results: bool = False
    entered: int = 0
    remember: bool = False
    probe: Probe | None = None


def execute(
    plan: Plan,
    args: Sequence[Array],
    run: Run,
    out_dtypes: Sequence[np.dtype | None] | None = None,
    half_states: frozenset[Var] = frozenset(),
) -> list[Array]:
    """Evaluates a planned jaxpr.

    Args:
        plan: The plan.
        args: Values for the jaxpr's inputs, in the dtypes of `plan.ins`.
        run: How to emit.
        out_dtypes: Dtypes to give the results in; None, for all or one, leaves what the plan has.
        half_states: Float32 carries, where the plan is of a loop's body, that the backward pass is given in half.

    Returns:
        The results, one for each of the jaxpr's outputs.
    """
    inner = open_jaxpr(plan.jaxpr)
    keep = run.memo.keeping.of(plan, run.keep_results)
    consts = map(run.memo.constant, plan.consts)
    env = Env([*inner.invars, *inner.constvars], [*args, *consts], keep, plan.setting)
    run.memo.enter(plan, env)
    run = run._replace(keep_results=False)
    if run.keep_half:
        _execute_in_segments(plan, env, run, half_states)
    else:
        _execute_steps(plan.steps, env, run)
    dtypes = out_dtypes or [None] * len(inner.outvars)
    outs = []
    for atom, flow, dtype in zip(inner.outvars, plan.outs, dtypes, strict=True):
        to = Cast(dtype, flow.has(Mark.HUGE)) if flow is not None and dtype not in (None, flow.dtype) else None
        value = env.read(atom, to)
        if isinstance(atom, Literal) and to is None:  # Of a weak type, it has its dtype as a literal already.
            value = jnp.asarray(value, None if atom.aval.weak_type else atom.aval.dtype)
        outs.append(value)
    return outs


def _execute_steps(steps: Iterable[Step], env: Env, run: Run) -> None:
    telling = run._replace(probe=None, entered=0, keep_results=True, remember=False)
    plain = telling._replace(keep_results=False)
    narrow, kept_values = env.setting.pair.is_narrow, env.keep.values
    for step in steps:
        eqn, rewrite = step.eqn, step.rewrite
        with equation_context(eqn, run.entered):
            if isinstance(rewrite, Pinned):
                env.pin(step.operands[0], rewrite.digits)
            operands = [env.read(atom, to) for atom, to in zip(step.operands, step.casts, strict=True)]
            if isinstance(rewrite, Float8Product):
                operands += env.read_in_8_bits(step, rewrite)
            # A rule may read the half result: what is kept has to be marked where it is made.
            inside: set[Var] = set()
            if keeps_inside(step):
                inside.update(v for v, flow in zip(eqn.outvars, step.out, strict=True) if flow and narrow(flow.dtype))
            inner = plain if inside.isdisjoint(kept_values) else telling
            points = env.points(step, operands)
            if points is None and run.remember and isinstance(rewrite, _OF_JAXPRS):
                outs = _remembered(step, operands, inner, env.setting, run.entered)
            elif points is None or not reads_operands(step):
                outs = _evaluate(step, inner, operands)
            else:
                evaluate = functools.partial(_evaluate, step, inner)
                outs = linearized_at(evaluate, operands, [point() for point in points])
            already = inside if has(eqn, Trait.CALLS) else ()  # A rule keeps its results if it is asked.
            compared = () if is_taylor_mode() else step.exact
            outs, halves = outs[: len(eqn.outvars)], outs[len(eqn.outvars) :]
            for index, (var, value, to) in enumerate(zip(eqn.outvars, outs, _out_casts(step), strict=True)):
                keeps = var in kept_values and not run.keep_half and var not in already
                is_exact = index in compared
                if is_exact and narrow(value.dtype):
                    value, is_exact = exact(value), False
                if keeps and to is not None and narrow(value.dtype) and not narrow(to.dtype):
                    # Of a half result that the program goes on with in float32, the half is enough.
                    value, keeps = env.kept(var, value), False
                result = value if to is None else cast(value, to)
                result = exact(result) if is_exact else result
                env.write(var, env.kept(var, result) if keeps else result)
            if points is not None and not reduces(eqn):
                context = functools.partial(equation_context, eqn, run.entered)
                _set_points(step, functools.partial(_evaluate, step, inner), points, env, context)
            _remember_origin(step, env)
            _remember_halves(step, halves, env)
        if run.probe is not None:
            cast_operands = operands[: len(step.operands)]  # Without the same in 8 bits.
            run.probe(step, [*map(env.read, step.operands)], cast_operands, [*map(env.read, step.eqn.outvars)])


def _remembered(step: Step, operands: Sequence[Array], run: Run, setting: Setting, entered: int) -> list[Array]:
    """What a step is evaluated to, by the jaxpr that was made of it before if there is one."""
    signature = None
    if not is_labelling() and not is_taylor_mode():
        found = run.memo.signatures.of([step], entered=entered)
        signature = None if found is None else (found, setting, run.keep_half, run.in_loop, run.keep_results)
    if signature is None:
        return _evaluate(step, run, operands)
    # The signature has the numbers of literals, and of no other operand.
    literals = {index: operands[index] for index, atom in enumerate(step.operands) if isinstance(atom, Literal)}
    given = [index for index in range(len(operands)) if index not in literals]
    fresh = run._replace(memo=Memo(run.memo.rules))  # JAX may remember the function.

    def evaluate(*values: Array) -> list[Array]:
        merged = literals | dict(zip(given, values, strict=True))
        return _evaluate(step, fresh, [merged[index] for index in range(len(merged))])

    return remembered(evaluate, [operands[index] for index in given], signature)


def _evaluate(step: Step, run: Run, operands: Sequence[Array]) -> list[Array]:
    if is_labelling() and TRACED_SCOPE not in scope_path(step.eqn):  # What an inner `cast_fn` emitted has its labels.
        with rule_scope(_label_of(step), step.not_float8):
            return _evaluated(step, run, operands)
    return _evaluated(step, run, operands)


def _label_of(step: Step) -> str:
    if not step.plans:
        return step.rule
    return "as traced" if step.unchanged else "cast_fn"  # For what has no label of its own in the jaxprs inside.


def _evaluated(step: Step, run: Run, operands: Sequence[Array]) -> list[Array]:
    if has(step.eqn, Trait.OF_RESULT) and run.keep_results:
        name = step.eqn.primitive.name
        return [keeping_result(name, lambda x: bind(step.eqn, [x])[0])(*operands)]
    rewrite = step.rewrite
    if rewrite is None or (isinstance(rewrite, Inside) and rewrite.as_traced and not is_labelling()):
        outs = bind(step.eqn, operands)
    elif isinstance(rewrite, Forward):
        outs = list(operands)
    else:
        outs = run.emit(step, operands, run)
    return outs


def _out_casts(step: Step) -> Casts:
    return step.out_casts or (None,) * len(step.out)


def _set_points(
    step: Step,
    evaluate: Callable[..., Any],
    points: Sequence[Point],
    env: Env,
    context: Callable[[], AbstractContextManager[None]],
) -> None:
    """Where to take derivatives of what reads the results of a step; masks are kept as they are."""

    @functools.cache
    def at_points() -> list[Array]:
        with context():
            outs = evaluate([point() for point in points])
            return [out if to is None else cast(out, to) for out, to in zip(outs, _out_casts(step), strict=True)]

    def result(index: int) -> Any:
        return at_points()[index]

    for index, (var, flow) in enumerate(zip(step.eqn.outvars, step.out, strict=True)):
        if flow is None:
            env.write(var, kept(env.read(var)))
        elif var not in env.keep.values:
            env.set_point(var, functools.partial(result, index))


def _remember_origin(step: Step, env: Env) -> None:
    """A half value that the program raised to float32 is at hand when it is wanted in half again."""
    if not isinstance(step.rewrite, Forward) or isinstance(step.operands[0], Literal):
        return
    source, result = step.ins[0], step.out[0]
    if source is None or result is None or step.casts[0] is None:
        return
    if source.dtype.itemsize < result.dtype.itemsize:
        env.alias(step.eqn.outvars[0], source.dtype, env.read(step.operands[0]))


def _remember_halves(step: Step, halves: Sequence[Array], env: Env) -> None:
    """The half copies that a rule hands over beside its results are those that its backward part is given."""
    if isinstance(step.rewrite, CustomRule):
        cast_vars = [var for var, to in zip(step.eqn.outvars, step.rewrite.halves, strict=True) if to is not None]
        for var, half in zip(cast_vars, halves, strict=True):
            env.alias(var, half.dtype, half)


def _execute_in_segments(plan: Plan, env: Env, run: Run, half_states: frozenset[Var]) -> None:
    """Segments of steps under jamp's own checkpoint, and in between the steps that give way to the user's remat."""
    outvars = open_jaxpr(plan.jaxpr).outvars
    groups = segments(plan, run.memo.keeping, env.keep)
    for segment, later in zip(groups, _read_after([group.steps for group in groups], outvars), strict=True):
        if segment.free:
            _execute_steps(segment.steps, env, run)
        else:
            _execute_checkpointed(segment, later, plan, env, run, half_states)


def _execute_checkpointed(
    segment: Segment, later: set[Var], plan: Plan, env: Env, run: Run, half_states: frozenset[Var]
) -> None:
    steps, setting = segment.steps, plan.setting
    entries = entering(steps, half_states, setting)
    given = [env.read(entry.var) for entry in entries]
    plain = run._replace(keep_half=False, remember=False)
    if not any(isinstance(value, Tracer) for value in given):  # Nothing can be differentiated.
        _execute_steps(steps, env, plain._replace(remember=run.remember))
        return
    weights = plan.weights
    copied = [entry for entry in entries if entry.var in weights and not entry.as_it_is]
    again = run.memo.kept_by_rules(plan)
    if cast_inside(steps, copied, [env.read(entry.var) for entry in copied], run.in_loop, setting.heuristics):
        again |= weights
    inputs = [
        (entry.var, to, step) for entry in entries for to, step in entry.reads_where(entry.var in again, steps[0])
    ]
    outputs = [var for step in steps for var in step.eqn.outvars if var in later]

    signature = _signature(segment, inputs, outputs, env.keep, run, plan, half_states)
    if signature is not None:
        # JAX may remember the function: of this program it holds the steps alone.
        plain = plain._replace(memo=Memo(run.memo.rules))
    keep = env.keep

    def run_segment(*values: Array) -> list[Array]:
        inner = Env((), (), keep, setting)
        for (var, to, _), value in zip(inputs, values, strict=True):
            # XLA may well merge the casts of weights, which it would else do twice.
            inner.enter(var, to, value if run.in_loop or var in weights else held(value))
            if to is not None and var in half_states:
                inner.enter_state(var, to.dtype)
        _execute_steps(steps, inner, plain._replace(entered=segment.scopes))
        return [inner.read(var) for var in outputs]

    values = []
    for var, to, step in inputs:
        with equation_context(step.eqn):
            values.append(env.read(var, to))
    with outer_scopes(steps[0].eqn, segment.scopes):
        outs = checkpointed(run_segment, values, signature, KeepHalf(barrier=not run.in_loop))
    for var, value in zip(outputs, outs, strict=True):
        env.write(var, value)


def _signature(
    segment: Segment,
    inputs: Sequence[tuple[Var, Cast | None, Step]],
    outputs: Sequence[Var],
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
