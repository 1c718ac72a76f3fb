"""`custom_vmap`, whose rule for batches runs under the same policy, and transposes that close over computed values."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import Array
from jax.custom_batching import custom_vmap

from jamp._compat import bind
from jamp.transforms.emission.execute import execute
from jamp.transforms.emission.run import Run
from jamp.transforms.emission.written_rules import as_written, at_traced_dtypes
from jamp.transforms.program.plan import Step
from jamp.transforms.program.rewrites import CustomBatching
from jamp.transforms.program.want import Want


def emit_custom_batching(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    """A function with a rule for batches, whose jaxpr at the traced dtypes is planned and emitted as any other."""
    eqn, (plan,), built = step.eqn, step.plans, run.memo.built
    rewrite, inner = step.rewrite, run._replace(keep_half=False)
    assert isinstance(rewrite, CustomBatching)
    in_tree, out_tree = eqn.params["in_tree"], eqn.params["out_tree"]

    @custom_vmap
    def function(*args: Array) -> list[Array]:
        return execute(plan, args, inner)

    def rule(axis_size: int, in_batched: Sequence[bool], *args: Array) -> tuple[list[Array], list[bool]]:
        batched = list(jax.tree.unflatten(in_tree, in_batched))
        key = ("batching", plan, id(eqn), axis_size, *in_batched, *map(jax.typeof, args))
        if key not in built:
            marks: list[bool] = []

            def written(*flat: Array) -> list[Array]:
                outs, out_batched = eqn.params["rule"](axis_size, batched, *jax.tree.unflatten(in_tree, flat))
                marks[:] = out_tree.flatten_up_to(out_batched)
                return out_tree.flatten_up_to(outs)

            avals = at_traced_dtypes(eqn, plan, args)
            built[key] = as_written(rewrite.replan, jax.make_jaxpr(written), *avals), marks
        jaxpr, out_batched = built[key]
        ruled = rewrite.replan.plan(jaxpr, plan.ins, (Want.HALF,) * len(plan.outs))
        return execute(ruled, args, inner, plan.out_dtypes), out_batched

    function.def_vmap(rule)
    return list(function(*operands))


def emit_custom_transpose(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    """A linear function as it was traced, and its transpose, which is given the values that it closes over."""
    thunk = step.eqn.params["transpose_thunk"]

    def transpose() -> tuple[object, list[Array]]:
        jaxpr, consts = thunk()
        return jaxpr, list(map(run.memo.constant, consts))

    return bind(step.eqn, operands, {**step.eqn.params, "transpose_thunk": transpose})
