"""Which function emits which rewrite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax import Array

from jamp._compat import bind
from jamp._primitives import Trait, has
from jamp.transforms.emission import (
    attention,
    control_flow,
    custom_batching,
    custom_rules,
    eight_bits,
    eight_bits_transposed,
    functions,
    wide_gradients,
)
from jamp.transforms.emission.casts import spread_out
from jamp.transforms.emission.run import Memo, Run
from jamp.transforms.emission.wide_products import wide_product
from jamp.transforms.program import rewrites as planned
from jamp.transforms.program.plan import Rewrite, Step

Emitter = Callable[[Step, Sequence[Array], Run], list[Array]]


def _bind(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    del run
    if spread := getattr(step.rewrite, "spread", ()):
        operands = spread_out(operands, spread, step.eqn.outvars[0].aval)
    return bind(step.eqn, operands, getattr(step.rewrite, "params", None))


def _scatter(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    del run
    return functions.scatter(step.eqn, operands)


def _scaled_sum(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    del run
    assert isinstance(step.rewrite, planned.ScaledSum)
    return functions.scaled_sum(step.eqn, step.rewrite, operands)


def _wide_product(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    del run
    (out,) = step.out
    assert out is not None
    return wide_product(step.eqn, operands, out.dtype)


def _float8_product(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    del run
    assert isinstance(step.rewrite, planned.Float8Product)
    emit = eight_bits if has(step.eqn, Trait.MATRIX) else eight_bits_transposed
    return emit.float8_product(step.eqn, step.rewrite, operands)


def _wide_gradient(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    rewrite, count = step.rewrite, len(step.eqn.invars)
    assert isinstance(rewrite, planned.WideGradient)
    inner = dataclasses.replace(step, rewrite=rewrite.product)

    def product(operands: Sequence[Array]) -> list[Array]:
        return bind(step.eqn, operands) if rewrite.product is None else _emit(inner, operands, run)

    return wide_gradients.wide_gradient(step.eqn, product, operands[:count], rewrite.weights, operands[count:])


def _softmax(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    del run
    assert isinstance(step.rewrite, planned.Softmax)
    return functions.softmax(step.rewrite, operands[0])


EMITTERS: dict[type[Rewrite], Emitter] = {
    planned.Retyped: _bind,
    planned.Rectified: _bind,
    planned.Pinned: _bind,
    planned.Scatter: _scatter,
    planned.ScaledSum: _scaled_sum,
    planned.WideProduct: _wide_product,
    planned.Float8Product: _float8_product,
    planned.WideGradient: _wide_gradient,
    planned.Softmax: _softmax,
    planned.FusedAttention: attention.emit_attention,
    planned.Call: control_flow.emit_call,
    planned.OptimizedRemat: control_flow.emit_optimized_remat,
    planned.Remat: control_flow.emit_remat,
    planned.Branches: control_flow.emit_cond,
    planned.ShardMap: control_flow.emit_shard_map,
    planned.Scan: control_flow.emit_scan,
    planned.While: control_flow.emit_while,
    planned.CustomRule: custom_rules.emit_custom_rule,
    planned.CustomBatching: custom_batching.emit_custom_batching,
    planned.CustomTranspose: custom_batching.emit_custom_transpose,
}


def _emit(step: Step, operands: Sequence[Array], run: Run) -> list[Array]:
    assert step.rewrite is not None
    return EMITTERS[type(step.rewrite)](step, operands, run)


def new_run(**options: Any) -> Run:
    """How to emit a program from its outermost plan; options are those of `Run`."""
    return Run(_emit, Memo(), **options)
