"""Identities that are something else in a program for one platform. Others' programs are the same without them.

What a platform's compiler makes of a program decides whether they help (`docs/design/residuals.md`), and what platform
that is, tracing does not know. So each is a primitive, and the rule for lowering chooses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import ad, batching, mlir

from jamp._compat import is_partitioned_by_xla, lowered_platforms
from jamp._shardings import explicit_sharding


def _identity(name: str, platform: str, there: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """An identity, its own derivative and transpose, for which one platform computes something else."""
    primitive = Primitive(name)

    def transposed(cotangent: Array, value: Any) -> list[Array]:
        del value
        return [primitive.bind(cotangent)]

    primitive.def_impl(lambda value: value)
    primitive.def_abstract_eval(lambda aval: aval)
    ad.deflinear2(primitive, transposed)
    batching.defvectorized(primitive)
    mlir.register_lowering(primitive, lambda context, value: [value])
    mlir.register_lowering(primitive, mlir.lower_fun(there, multiple_results=False), platform=platform)
    return primitive.bind


_laid_out_p = Primitive("jamp_laid_out")


def laid_out(value: Array, contracted: int, free: int) -> Array:
    """An operand of a product, which on a GPU of one's own lies in memory in the order of its axes.

    Args:
        value: The operand.
        contracted: How many axes are contracted. They are the last.
        free: How many axes before them are of one operand alone. Those before these are of a batch.
    """
    return _laid_out_p.bind(value, contracted=contracted, free=free)


def _as_matrices(value: Array, contracted: int, free: int) -> Array:
    """The same behind a barrier, as the matrices that XLA makes of it: a barrier alone it would move a transpose past.

    Axes that devices share could not be merged without a gather, and stay as they are.
    """
    batch = value.ndim - free - contracted
    sizes = [math.prod(value.shape[a:b]) for a, b in ((0, batch), (batch, batch + free), (batch + free, value.ndim))]
    return lax.reshape(lax.optimization_barrier(lax.reshape(value, sizes[not batch :])), value.shape)


def _lower(context: mlir.LoweringRuleContext, value: ir.Value, **axes: int) -> Sequence[ir.Value]:
    aval: Any = context.avals_in[0]
    is_divided = is_partitioned_by_xla(context) or explicit_sharding(aval, range(aval.ndim)) is not None
    if lowered_platforms(context) != ("cuda",) or is_divided:
        return [value]
    return mlir.lower_fun(functools.partial(_as_matrices, **axes), multiple_results=False)(context, value)


def _batch(values: Sequence[Array], dims: Sequence[int], **axes: int) -> tuple[Array, int]:
    return _laid_out_p.bind(jnp.moveaxis(values[0], dims[0], 0), **axes), 0


_laid_out_p.def_impl(lambda value, **_: value)
_laid_out_p.def_abstract_eval(lambda aval, **_: aval)
batching.primitive_batchers[_laid_out_p] = _batch
mlir.register_lowering(_laid_out_p, _lower)


# A value that is written to memory, so that not each of its readers computes it once more.
written = _identity("jamp_written", "tpu", lax.optimization_barrier)
# A value that does not matter, but helps other compilers.
left_out = _identity("jamp_left_out", "tpu", jnp.zeros_like)
# An operand of a product that no transpose is folded through.
held_apart = _identity("jamp_held_apart", "cpu", lax.optimization_barrier)
