"""Products of matrices with a scale for each block of what is contracted, as devices have them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jamp._compat import Aval, has_dim_variables
from jamp._dtypes import BFLOAT16
from jamp.transforms.emission.quantized import Quantized, dequantize
from jamp.transforms.emission.tangents import varying_alike

_E8M0 = np.dtype(jnp.float8_e8m0fnu)
_MATRICES = ((2,), (2,)), ((0,), (0,))


def product_of_blocks(pair: Sequence[Quantized], formats: Sequence[np.dtype], dtype: np.dtype) -> Array:
    """The product of two stacks of matrices, [b, m, k] and [b, n, k], in blocks along k.

    Args:
        pair: Both operands.
        formats: Their float8 formats.
        dtype: That of the result.
    """
    operands = [lax.bitcast_convert_type(q.bits, form) for q, form in zip(pair, formats, strict=True)]
    operands += [lax.bitcast_convert_type(q.exponents, _E8M0) for q in pair]
    return blocks_p.bind(*varying_alike(operands), dimension_numbers=_MATRICES, dtype=dtype)


def _in_blocks(
    x: Array, y: Array, left: Array, right: Array, *, dimension_numbers: lax.DotDimensionNumbers, dtype: np.dtype
) -> Array:
    out = lax.scaled_dot(
        x, y, lhs_scale=left, rhs_scale=right, dimension_numbers=dimension_numbers, preferred_element_type=dtype
    )
    # JAX forgets along which axes of a `shard_map` the result of this primitive varies.
    return varying_alike([out, x])[0]


def _written_out(
    x: Array, y: Array, left: Array, right: Array, *, dimension_numbers: lax.DotDimensionNumbers, dtype: np.dtype
) -> Array:
    """The same as JAX composes it of other operations; bfloat16 holds each float8 number times a power of two."""

    def wide(numbers: Array, exponents: Array) -> Array:
        q = Quantized(*(lax.bitcast_convert_type(part, np.dtype(np.uint8)) for part in (numbers, exponents)))
        return dequantize(q, numbers.dtype, BFLOAT16)

    return lax.dot_general(wide(x, left), wide(y, right), dimension_numbers, preferred_element_type=dtype)


def _lower(
    ctx: mlir.LoweringRuleContext, *operands: mlir.ir.Value, dimension_numbers: lax.DotDimensionNumbers, dtype: np.dtype
) -> Any:
    """JAX lowers the product to a composite operation of four operands, which XLA knows by its name.

    In a program that is exported for several platforms, or with sizes that are not known, each function is given these
    as operands besides. jax 0.10 forgets them for composites and fails, and from 0.12 on they have a fifth operand,
    in front of the others. So there the product is written out.
    """
    fn = _written_out if has_dim_variables(ctx) else _in_blocks
    return mlir.lower_fun(fn, multiple_results=False)(ctx, *operands, dimension_numbers=dimension_numbers, dtype=dtype)


def _abstract(*avals: Aval, dimension_numbers: lax.DotDimensionNumbers, dtype: np.dtype) -> Aval:
    return jax.make_jaxpr(functools.partial(_in_blocks, dimension_numbers=dimension_numbers, dtype=dtype))(
        *avals
    ).out_avals[0]


def _batch(
    operands: Sequence[Array],
    dims: Sequence[int | None],
    *,
    dimension_numbers: lax.DotDimensionNumbers,
    dtype: np.dtype,
) -> tuple[Array, int]:
    """More matrices in the stack."""
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    stacks = [batching.bdim_at_front(x, d, size) for x, d in zip(operands, dims, strict=True)]
    merged = [lax.reshape(x, (math.prod(x.shape[:2]), *x.shape[2:])) for x in stacks]
    out = blocks_p.bind(*merged, dimension_numbers=dimension_numbers, dtype=dtype)
    return lax.reshape(out, (*stacks[0].shape[:2], *out.shape[1:])), 0


blocks_p = Primitive("jamp_scaled_dot")
blocks_p.def_impl(_in_blocks)
blocks_p.def_abstract_eval(_abstract)
batching.primitive_batchers[blocks_p] = _batch
mlir.register_lowering(blocks_p, _lower)
