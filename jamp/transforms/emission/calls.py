"""Calls, checkpoints, branches and device maps, rebuilt around planned bodies.

Branches are rebuilt through public `jax.lax`; calls (`jit`) are bound again with a new jaxpr in place of the old one,
which keeps their name, shardings, donation and compiler options whatever the version calls them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax import Array, lax

from jamp._compat import Jaxpr, bind, called_jaxpr_name, eval_jaxpr, hoisted, jaxpr_consts, open_jaxpr
from jamp._primitives import Trait, has
from jamp.transforms._labels import is_labelling
from jamp.transforms.emission.execute import Run, execute
from jamp.transforms.emission.taylor import is_taylor_mode
from jamp.transforms.program.plan import OptimizedRemat, Plan, Step, loop_dtypes
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
        built[key] = jax.make_jaxpr(lambda *args: execute(plan, args, run))(*operands)
    params = step.eqn.params
    return bind(step.eqn, operands, {**params, called_jaxpr_name(params): built[key]})


def _labelled(plan: Plan, operands: Sequence[Array], run: Run) -> list[Array]:
    return list(jax.jit(lambda *args: execute(plan, args, run))(*operands))


def emit_remat(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    """`jax.checkpoint`: the user's own, in which nothing else is kept."""
    (plan,), params = step.plans, step.eqn.params
    inner = run._replace(keep_half=False)
    if is_taylor_mode():
        return execute(plan, operands, inner)
    if params["differentiated"]:  # The recomputing half of a gradient taken inside the function.
        closed = jax.make_jaxpr(lambda *args: execute(plan, args, inner))(*operands)
        if not jaxpr_consts(closed):
            return bind(step.eqn, operands, {**params, "jaxpr": open_jaxpr(closed)})

    key = ("remat", plan, inner, params["policy"], params["prevent_cse"])
    if key not in run.memo.built:  # JAX traces a function once for each dtype, so a block that repeats is traced once.
        run.memo.built[key] = jax.checkpoint(
            lambda *args: execute(plan, args, inner), policy=params["policy"], prevent_cse=params["prevent_cse"]
        )
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
        traced = (
            aval.update(dtype=var.aval.dtype) if plan.pair.flows(aval) else aval for aval, var in operands_and_vars
        )
        with jax.default_matmul_precision(None):  # pyright: ignore[reportArgumentType]
            written = jax.make_jaxpr(functools.partial(eval_jaxpr, *params["fun_jaxpr_thunk"]()))(*traced)
        dtypes = plan.out_dtypes[params["num_res"] :]
        planned = rewrite.replan(written, plan.ins[first:], (Want.HALF,) * len(dtypes))
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
