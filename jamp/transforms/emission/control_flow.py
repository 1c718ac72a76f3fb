"""Calls, checkpoints, branches, device maps and loops, rebuilt around planned bodies.

Branches and loops are rebuilt through public `jax.lax`; calls (`jit`) are bound again with a new jaxpr in place of the
old one, which keeps their name, shardings, donation and compiler options whatever the version calls them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jamp._compat import (
    Jaxpr,
    bind,
    called_jaxpr_name,
    eval_jaxpr,
    hoisted,
    jaxpr_consts,
    open_jaxpr,
    outer_scopes,
    scan_counts,
    traced,
    while_parts,
)
from jamp._primitives import Trait, has
from jamp.transforms._labels import is_labelling
from jamp.transforms.emission.checkpoints import Asked, checkpointed
from jamp.transforms.emission.execute import execute
from jamp.transforms.emission.run import Memo, Run
from jamp.transforms.emission.shared import shared_copy
from jamp.transforms.emission.taylor import is_taylor_mode
from jamp.transforms.keeping.repeats import shared_scopes
from jamp.transforms.keeping.states import half_states
from jamp.transforms.program.plan import Plan, Step, loop_dtypes
from jamp.transforms.program.rewrites import OptimizedRemat, Remat, Scan
from jamp.transforms.program.want import Want


def emit_call(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    """`jit` and its like."""
    (plan,) = step.plans
    if step.unchanged and is_labelling():  # Bound as it was traced, it would have no labels inside.
        return _labelled(plan, operands, run) if has(step.eqn, Trait.CALLS) else bind(step.eqn, operands)
    if not has(step.eqn, Trait.STAYS):
        return execute(plan, operands, run)
    key = (plan, run._replace(probe=None), *map(jax.typeof, operands))
    built = run.memo.built
    if key not in built or plan.asks_what_moves:
        built[key] = traced(lambda *args: execute(plan, args, run), operands)
    params = step.eqn.params
    return bind(step.eqn, operands, {**params, called_jaxpr_name(params): built[key]})


def _labelled(plan: Plan, operands: Sequence[Array], run: Run) -> list[Array]:
    return list(jax.jit(lambda *args: execute(plan, args, run))(*operands))


def emit_remat(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    """`jax.checkpoint`: the user's own, in which nothing else is kept."""
    rewrite, (plan,), params = step.rewrite, step.plans, step.eqn.params
    if not isinstance(rewrite, Remat):
        raise TypeError(f"Expected the step of a checkpoint, got {rewrite!r}.")
    policy = params["policy"]
    inner = run._replace(keep_half=False, asked=policy)
    policy = policy and Asked(policy)
    if is_taylor_mode():
        return execute(plan, operands[: len(step.eqn.invars)], inner)

    def evaluate(*args: Array) -> list[Array]:
        values, halves = args[: len(step.eqn.invars)], args[len(step.eqn.invars) :]
        return execute(plan, values, inner, halves=dict(zip(rewrite.raised, halves, strict=True)))

    if params["differentiated"]:  # The recomputing half of a gradient taken inside the function.
        closed = jax.make_jaxpr(evaluate)(*operands)
        if not jaxpr_consts(closed):
            return bind(step.eqn, operands, {**params, "jaxpr": open_jaxpr(closed)})

    # A library may enter the scope of a layer inside of its checkpoint: Flax does. But for that, layers are the same.
    entered = shared_scopes(plan.steps)
    found = None if is_labelling() else run.memo.signatures.remat(step, entered)
    if found is not None:
        signature = "remat", found, rewrite.raised, run.in_loop, run.keep_results
        inner = inner._replace(memo=Memo(run.memo.rules), entered=entered)
        with outer_scopes(plan.steps[0].eqn, entered) if entered else nullcontext():
            return checkpointed(evaluate, operands, signature, policy, params["prevent_cse"])
    key = ("remat", plan, rewrite.raised, inner, params["prevent_cse"])
    if key not in run.memo.built:  # JAX traces a function once for each dtype, so a block that repeats is traced once.
        run.memo.built[key] = jax.checkpoint(evaluate, policy=policy, prevent_cse=params["prevent_cse"])
    return list(run.memo.built[key](*operands))


def emit_optimized_remat(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    """A forward rule with `optimize_remat`: bound again with both the rule and the function in other precisions."""
    rewrite, params = step.rewrite, step.eqn.params
    if not isinstance(rewrite, OptimizedRemat):
        raise TypeError(f"Expected the step of an optimized remat, got {rewrite!r}.")
    (plan,), first = rewrite.plans, params["num_consts"]
    inner = run._replace(keep_half=False)
    avals = [jax.typeof(value) for value in operands]
    consts, rule = hoisted(jax.make_jaxpr(lambda *args: execute(plan, args, inner))(*avals), avals)

    def function() -> tuple[Jaxpr, Sequence[Array]]:
        at_dtypes = (
            aval.update(dtype=var.aval.dtype, weak_type=var.aval.weak_type) if plan.pair.flows(aval) else aval
            for aval, var in operands_and_vars
        )
        with jax.default_matmul_precision(None):  # pyright: ignore[reportArgumentType]
            written = jax.make_jaxpr(functools.partial(eval_jaxpr, *params["fun_jaxpr_thunk"]()))(*at_dtypes)
        dtypes = plan.out_dtypes[params["num_res"] :]
        planned = rewrite.replan.plan(written, plan.ins[first:], (Want.HALF,) * len(dtypes))
        built = jax.make_jaxpr(lambda *args: execute(planned, args, inner, dtypes))(*avals[first:])
        return open_jaxpr(built), jaxpr_consts(built)

    operands_and_vars = list(zip(avals, step.eqn.invars, strict=True))[first:]
    changes = {"num_consts": len(consts) + first, "fwd_jaxpr": rule, "fun_jaxpr_thunk": functools.cache(function)}
    return bind(step.eqn, [*consts, *operands], {**params, **changes})


def emit_cond(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    """`cond` and `switch`, and `platform_dependent`, whose branches are for one platform each."""
    dtypes = loop_dtypes(step)
    branches = [_bound(plan, run._replace(keep_results=True), dtypes) for plan in step.plans]
    platforms = step.eqn.params.get("branches_platforms")
    if platforms is None:
        return list(lax.switch(operands[0], branches, *operands[1:]))
    by_name = {name: branch for names, branch in zip(platforms, branches, strict=True) for name in names or ()}
    default = next((b for names, b in zip(platforms, branches, strict=True) if names is None), None)
    return list(lax.platform_dependent(*operands[1:], default=default, **by_name))


def _bound(plan: Plan, run: Run, dtypes: Sequence[np.dtype | None]) -> Callable[..., list[Array]]:
    return lambda *args: execute(plan, args, run, dtypes)


def emit_shard_map(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    """`shard_map`, and `pmap`, which is one inside."""
    (plan,), params = step.plans, step.eqn.params
    mapped = jax.shard_map(
        lambda *args: tuple(execute(plan, args, run)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params.get("newly_manual_axes", params.get("manual_axes", ()))),
        check_vma=params["check_vma"],
    )
    return list(mapped(*operands))


def emit_scan(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    """A scan. What its half constants are cast of follows the operands, and then what is half of those in float32."""
    rewrite, params = step.rewrite, step.eqn.params
    if not isinstance(rewrite, Scan):
        raise TypeError(f"Expected the step of a scan, got {rewrite!r}.")
    (plan,) = rewrite.plans
    consts, carries = scan_counts(params)
    count = len(step.eqn.invars)
    dtypes = loop_dtypes(step)
    fixed, init, xs = operands[:consts], operands[consts : consts + carries], operands[consts + carries : count]
    originals = operands[count : count + len(rewrite.shared)]
    shared = [] if is_taylor_mode() else zip(rewrite.shared, originals, strict=True)
    casts = [(i, x, lax.stop_gradient(fixed[i])) for i, x in shared]
    halves = dict(zip(rewrite.raised, operands[count + len(rewrite.shared) :], strict=True))
    scanned = [i for i in halves if i >= consts]
    inner = run._replace(in_loop=True)
    states = half_states(plan, run.memo.keeping) if rewrite.states_may_be_half else frozenset()

    def body(carry: Sequence[Array], x: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        constants = list(fixed)
        for index, original, half in casts:
            constants[index] = shared_copy(original, half)
        given = halves | dict(zip(scanned, x[len(xs) :], strict=True))
        outs = execute(plan, [*constants, *carry, *x[: len(xs)]], inner, dtypes, states, given)
        return outs[:carries], outs[carries:]

    # The length of an exported program may be an unknown, which `lax.scan` takes from its operands alone.
    known = ("length",) if isinstance(params["length"], int) or not xs else ()
    options = {name: params[name] for name in ("reverse", "unroll", *known)}
    final, ys = lax.scan(body, [*map(_as_array, init)], [*xs, *(halves[i] for i in scanned)], **options)
    return [*final, *ys]


def _as_array(value: Array) -> Array:
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def emit_while(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    """A while loop."""
    (cond, body), parts = step.plans, while_parts(step.eqn.params)
    inner = run._replace(keep_half=False, in_loop=True)  # Reverse mode does not pass through a while loop.
    dtypes = loop_dtypes(step)

    def goes_on(carry: Sequence[Array]) -> Array:
        return execute(cond, [*operands[: parts.cond_consts], *carry], inner)[0]

    def iteration(carry: Sequence[Array]) -> list[Array]:
        after = execute(body, [*operands[parts.cond_consts : parts.first_carry], *carry], inner, dtypes)
        if not batched:
            return after
        going = goes_on(carry)
        return [select_going(going, new, old) for new, old in zip(after, carry, strict=True)]

    # Under vmap the condition is one for each member of the batch. The loop goes on while one of them does, and what
    # has come to its end stays as it is: the meaning that JAX gives to such an equation, which `while_loop` refuses.
    batched = open_jaxpr(cond.jaxpr).outvars[0].aval.shape != ()
    final = lax.while_loop(
        lambda carry: jnp.any(goes_on(carry)) if batched else goes_on(carry),
        iteration,
        [*map(_as_array, operands[parts.first_carry :])],
    )
    return list(final)


def select_going(going: Array, new: Array, old: Array) -> Array:
    """The new value for the members of a batch whose loop goes on, the old one for the others."""
    return lax.select(lax.broadcast_in_dim(going, new.shape, range(going.ndim)), new, old)
