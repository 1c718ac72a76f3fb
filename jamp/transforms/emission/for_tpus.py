"""Identities that are something else in a program for a TPU. Other platforms' programs are the same without them.

What a platform's compiler makes of a program decides whether they help (`docs/design/residuals.md`), and what platform
that is, tracing does not know. So each is a primitive, and the rule for lowering chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import ad, batching, mlir

from jamp._compat import lowered_platforms


def _identity(on_tpu: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """An identity, its own derivative and transpose, for which a TPU computes something else."""
    # A conversion like others, for all who look for them in a jaxpr, but for how it is lowered.
    primitive = Primitive("convert_element_type")

    def identity(value: Array) -> Array:
        return primitive.bind(value, new_dtype=value.dtype, weak_type=False, sharding=None)

    def converted(value: Array, *, new_dtype: np.dtype, **_: object) -> Array:
        return lax.convert_element_type(value, new_dtype)

    def lowered(context: mlir.LoweringRuleContext, value: ir.Value, **params: Any) -> Sequence[ir.Value]:
        if lowered_platforms(context) != ("tpu",):
            return mlir.lower_fun(converted, multiple_results=False)(context, value, **params)
        return mlir.lower_fun(lambda x: on_tpu(converted(x, **params)), multiple_results=False)(context, value)

    def transposed(cotangent: Array, value: Any, **_: object) -> list[Array]:
        return [primitive.bind(cotangent, new_dtype=value.aval.dtype, weak_type=False, sharding=None)]

    primitive.def_impl(converted)
    primitive.def_abstract_eval(lambda aval, *, new_dtype, **_: aval.update(dtype=new_dtype, weak_type=False))
    ad.deflinear2(primitive, transposed)
    batching.defvectorized(primitive)
    mlir.register_lowering(primitive, lowered)
    return identity


# A value that is written to memory, so that not each of its readers computes it once more.
written = _identity(lax.optimization_barrier)
# A value that does not matter, but helps other compilers.
left_out = _identity(jnp.zeros_like)
