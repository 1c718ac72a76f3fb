"""Identities that are something else in a program for a TPU. Other platforms' programs are the same without them.

What a platform's compiler makes of a program decides whether they help (`docs/design/residuals.md`), and what platform
that is, tracing does not know. So each is a primitive, and the rule for lowering chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import ad, batching, mlir

from jamp._compat import lowered_platforms


def _identity(name: str, on_tpu: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """An identity, its own derivative and transpose, for which a TPU computes something else."""
    primitive = Primitive(name)

    def lowered(context: mlir.LoweringRuleContext, value: ir.Value) -> Sequence[ir.Value]:
        if lowered_platforms(context) != ("tpu",):
            return [value]
        return mlir.lower_fun(on_tpu, multiple_results=False)(context, value)

    def transposed(cotangent: Array, value: Any) -> list[Array]:
        del value
        return [primitive.bind(cotangent)]

    primitive.def_impl(lambda value: value)
    primitive.def_abstract_eval(lambda aval: aval)
    ad.deflinear2(primitive, transposed)
    batching.defvectorized(primitive)
    mlir.register_lowering(primitive, lowered)
    return primitive.bind


# A value that is written to memory, so that not each of its readers computes it once more.
written = _identity("jamp_written", lax.optimization_barrier)
# A value that does not matter, but helps other compilers.
left_out = _identity("jamp_left_out", jnp.zeros_like)
