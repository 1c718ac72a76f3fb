"""Emits what a plan says: reads its inputs, runs its steps, hands results on in the dtypes that were planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from jamp._compat import Literal, Var, open_jaxpr
from jamp.transforms.emission.environment import Env
from jamp.transforms.emission.run import Run
from jamp.transforms.emission.segmented import execute_in_segments
from jamp.transforms.emission.steps import execute_steps
from jamp.transforms.program.marks import Mark
from jamp.transforms.program.plan import Cast, Plan


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
        execute_in_segments(plan, env, run, half_states)
    else:
        execute_steps(plan.steps, env, run)
    dtypes = out_dtypes or [None] * len(inner.outvars)
    outs = []
    for atom, flow, dtype in zip(inner.outvars, plan.outs, dtypes, strict=True):
        to = Cast(dtype, flow.has(Mark.HUGE)) if flow is not None and dtype not in (None, flow.dtype) else None
        value = env.read(atom, to)
        if isinstance(atom, Literal) and to is None:  # Of a weak type, it has its dtype as a literal already.
            value = jnp.asarray(value, None if atom.aval.weak_type else atom.aval.dtype)
        outs.append(value)
    return outs
