"""Emits the steps of a plan in turn: reads and casts operands, binds primitives, hands results on as planned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from jax import Array

from jamp._compat import Literal, Var, bind, equation_context, scope_path
from jamp._primitives import Trait, has
from jamp.transforms._labels import TRACED_SCOPE, is_labelling, rule_scope
from jamp.transforms.emission.casts import cast, exact
from jamp.transforms.emission.checkpoints import remembered
from jamp.transforms.emission.environment import Env, Point
from jamp.transforms.emission.functions import keeping_result, linearized_at
from jamp.transforms.emission.run import Memo, Run
from jamp.transforms.emission.taylor import is_taylor_mode, kept
from jamp.transforms.keeping.derivatives import reads_operands, reduces
from jamp.transforms.keeping.kept import keeps_inside
from jamp.transforms.program.plan import Casts, Inside, Step
from jamp.transforms.program.rewrites import (
    Branches,
    Call,
    CustomRule,
    Float8Product,
    Forward,
    FusedAttention,
    Pinned,
    Retyped,
    Scan,
    While,
)
from jamp.transforms.program.setting import Setting

# Rewrites whose jaxprs are made anew wherever they are emitted.
_OF_JAXPRS = Branches | Call | Scan | While
# Of these the policy of a checkpoint is asked where JAX looks into it: they are bound as they were, or hold equations.
_AS_WRITTEN = Forward | Inside | Retyped


def execute_steps(steps: Iterable[Step], env: Env, run: Run) -> None:
    """Emits steps, and writes their results to the environment.

    Args:
        steps: Steps of a plan, in order.
        env: Has what they read.
        run: How to emit.
    """
    telling = run._replace(probe=None, entered=0, keep_results=True, remember=False)
    plain = telling._replace(keep_results=False)
    to_keep = frozenset[Var]() if run.keep_half else env.keep.values
    for step in steps:
        with equation_context(step.eqn, run.entered):
            operands = _operands(step, env)
            # A rule may read the half result: what is kept has to be marked where it is made.
            inside = _made_inside(step, env)
            inner = plain if inside.isdisjoint(env.keep.values) else telling
            points = env.points(step, operands)
            if points is None and run.remember and isinstance(step.rewrite, _OF_JAXPRS):
                outs = _remembered(step, operands, inner, env.setting, run.entered)
            elif points is None or not reads_operands(step):
                outs = _evaluate(step, inner, operands)
            else:
                evaluate = functools.partial(_evaluate, step, inner)
                outs = linearized_at(evaluate, operands, [point() for point in points])
            outs, halves = outs[: len(step.eqn.outvars)], outs[len(step.eqn.outvars) :]
            # A rule keeps its results if it is asked, but none that it only moves.
            keep = to_keep - (inside - env.keep.parts) if inside and has(step.eqn, Trait.CALLS) else to_keep
            _write(step, outs, env, keep, _says(run.asked, step))
            if points is not None and not reduces(step.eqn):
                context = functools.partial(equation_context, step.eqn, run.entered)
                _set_points(step, functools.partial(_evaluate, step, inner), points, env, context)
            _remember_origin(step, env)
            _remember_halves(step, halves, env)
        if run.probe is not None:
            cast_operands = operands[: len(step.operands)]  # Without the same in 8 bits.
            run.probe(step, [*map(env.read, step.operands)], cast_operands, [*map(env.read, step.eqn.outvars)])


def _operands(step: Step, env: Env) -> list[Array]:
    """The operands of a step, cast as planned."""
    if isinstance(step.rewrite, Pinned):
        env.pin(step.operands[0], step.rewrite.digits)
    operands = [env.read(atom, to) for atom, to in zip(step.operands, step.casts, strict=True)]
    return operands + env.read_in_8_bits(step, step.rewrite) if isinstance(step.rewrite, Float8Product) else operands


def _made_inside(step: Step, env: Env) -> set[Var]:
    """The half results of a step that are made by a jaxpr inside of it."""
    if not keeps_inside(step):
        return set()
    narrow = env.setting.pair.is_narrow
    return {var for var, flow in zip(step.eqn.outvars, step.out, strict=True) if flow and narrow(flow.dtype)}


def _says(asked: Callable[..., object] | None, step: Step) -> object:
    """What the policy of the user's checkpoint says of an equation that is emitted as something else."""
    stands_for_it = not isinstance(step.rewrite, _AS_WRITTEN) or isinstance(step.rewrite, FusedAttention)
    if asked is None or step.rewrite is None or not stands_for_it:
        return None
    return asked(step.eqn.primitive, *(atom.aval for atom in step.eqn.invars), **step.eqn.params)


def _write(step: Step, outs: Sequence[Array], env: Env, keep: frozenset[Var], saved: object) -> None:
    """Casts the results of a step as planned; those to keep are marked for the backward pass."""
    narrow = env.setting.pair.is_narrow
    rounds = not is_taylor_mode()
    for index, (var, value, to) in enumerate(zip(step.eqn.outvars, outs, _out_casts(step), strict=True)):
        keeps = var in keep or bool(saved)
        is_exact = rounds and (index in step.exact or (keeps and index in step.exact_if_kept))
        if is_exact and narrow(value.dtype):
            value, is_exact = exact(value), False
        if keeps and to is not None and narrow(value.dtype) and not narrow(to.dtype):
            # Of a half result that the program goes on with in float32, the half is enough.
            value, keeps = env.kept(var, value, saved), False
        result = value if to is None else cast(value, to)
        result = exact(result) if is_exact else result
        env.write(var, env.kept(var, result, saved) if keeps else result)


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
