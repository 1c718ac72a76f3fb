"""Arrays in 8 bits: float8 numbers, and the powers of two that scale them.

Rows may belong to groups, as tokens do to experts: they share a scale.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jamp._dtypes import FLOAT32
from jamp._shardings import in_whole_blocks
from jamp.transforms.program.setting import Scaling


def of_groups(rows: Array, sizes: Array) -> Array:
    """The largest value of each group, and zero of a group without rows.

    Args:
        rows: A value of each row, none negative.
        sizes: How many rows each group has. Those of the first group come first.
    """
    members = _members(rows.size, sizes)
    values = lax.broadcast_in_dim(rows, members.shape, (0,))
    return lax.reduce_max(lax.select(members, values, lax.full_like(values, 0)), (0,))


def of_rows(groups: Array, sizes: Array, count: int) -> Array:
    """The value of the group that each row belongs to, and zero of a row without a group.

    Args:
        groups: A value of each group, none negative.
        sizes: How many rows each group has.
        count: The number of rows.
    """
    members = _members(count, sizes)
    values = lax.broadcast_in_dim(groups, members.shape, (1,))
    return lax.reduce_max(lax.select(members, values, lax.full_like(values, 0)), (1,))


def shared(rows: Array, sizes: Array) -> Array:
    """The largest value of the group that each row belongs to; a row without a group keeps its own."""
    found = of_rows(of_groups(rows, sizes), sizes, rows.size)
    return lax.max(found, lax.select(_has_group(rows.size, sizes), lax.full_like(rows, 0), rows))


def _members(count: int, sizes: Array) -> Array:
    """Which of a number of rows belong to which group. XLA makes it where it is read, and not in memory."""
    shape = count, sizes.shape[0]
    ends = lax.cumsum(sizes)
    row = lax.broadcasted_iota(sizes.dtype, shape, 0)
    first, last = (lax.broadcast_in_dim(x, shape, (1,)) for x in (lax.sub(ends, sizes), ends))
    return lax.bitwise_and(lax.ge(row, first), lax.lt(row, last))


def _has_group(count: int, sizes: Array) -> Array:
    row = lax.iota(sizes.dtype, count)
    return lax.lt(row, lax.broadcast(lax.reduce_sum(sizes, (0,)), (count,)))


# Of a float32: where the exponent begins, and the digits of 1.75, as which the largest float8 of either format begins.
_EXPONENT, _DIGITS_OF_LARGEST = 23, 0x600000
_BIAS = 127
_NAN = 0x7F  # A byte that is NaN in either format.


class Quantized(NamedTuple):
    """An array in 8 bits: `float8 * 2.0**(exponents - 127)`.

    Both are bytes. Of floats `jax.checkpoint` would round what it keeps by `reduce_precision`, which makes NaN of the
    largest numbers of E4M3; and bytes have no derivative.

    Attributes:
        bits: The float8 numbers.
        exponents: The scales, in the format E8M0, of the same rank: one for all that share a scale.
    """

    bits: Array
    exponents: Array


def quantize(x: Array, dtype: np.dtype, scaling: Scaling, sizes: Array | None = None) -> Quantized:
    """Rounds an array to float8, with the smallest powers of two for scales at which nothing overflows.

    The scale of each part comes from its largest magnitude (current scaling; Micikevicius et al., "FP8 Formats for Deep
    Learning", 2022), so that there is no state. As powers of two, scales round nothing. What is not finite becomes NaN,
    since E4M3 has no infinity, and is left out of the scale: all else is what it would be without it.

    Args:
        x: Any floating array.
        dtype: `float8_e4m3fn` or `float8_e5m2`.
        scaling: Which elements share a scale.
        sizes: How many rows each group has, where rows are of groups.
    """
    x = lax.stop_gradient(x)
    whole = x if scaling.block is None else in_whole_blocks(x, scaling.block, Scaling.BLOCK)
    parts, axes = _in_parts(whole.astype(FLOAT32), scaling)
    magnitude = lax.abs(parts)
    # Not with what the elements themselves go through: XLA would write it to memory for both.
    magnitude = lax.select(lax.is_finite(magnitude), magnitude, lax.full_like(magnitude, 0))
    largest = lax.reduce_max(magnitude, axes)
    if scaling.ragged is not None:
        assert sizes is not None
        largest = shared(largest, sizes)
    largest = lax.expand_dims(largest, axes)
    exponents = _exponents(largest, dtype)
    top = np.float32(jnp.finfo(dtype).max)
    # The inverse of a power of two, by its exponent. No number is rounded up to 2.0**128, which float32 has not.
    end = np.float32((2 - float(jnp.finfo(dtype).eps)) * 2.0**_BIAS)
    scaled = lax.mul(lax.clamp(-end, parts, end), spread(power_of_two(2 * _BIAS - exponents), parts.shape))
    # Casts to float8 do not saturate.
    bits = lax.bitcast_convert_type(lax.clamp(-top, scaled, top).astype(dtype), np.dtype(np.uint8))
    # As a byte: `jax_debug_nans` would take an array of NaNs for an error in the data.
    bits = lax.reshape(lax.select(lax.is_finite(parts), bits, lax.full_like(bits, _NAN)), x.shape)
    kept = exponents if scaling.block is None else lax.squeeze(exponents, (scaling.block + 1,))
    return Quantized(bits, kept.astype(np.uint8))


def _in_parts(x: Array, scaling: Scaling) -> tuple[Array, tuple[int, ...]]:
    """The array, an axis in blocks cut in two, and the axes along which all share a scale."""
    if scaling.ragged is not None:
        return x, tuple(axis for axis in range(x.ndim) if axis != scaling.ragged)
    if scaling.block is None:
        return x, tuple(range(x.ndim)) if scaling.axes is None else scaling.axes
    axis, size = scaling.block, Scaling.BLOCK
    shape = (*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
    return lax.reshape(x, shape), (axis + 1,)


def _exponents(largest: Array, dtype: np.dtype) -> Array:
    """Exponents, as float32 has them, of the least powers of two that bring numbers into the range of a format."""
    bits = lax.bitcast_convert_type(largest, np.dtype(np.int32))
    digits = lax.bitwise_and(bits, lax.full_like(bits, (1 << _EXPONENT) - 1))
    above = lax.gt(digits, lax.full_like(bits, _DIGITS_OF_LARGEST)).astype(np.int32)
    top = int(np.floor(np.log2(float(jnp.finfo(dtype).max))))
    exponents = lax.shift_right_logical(bits, lax.full_like(bits, _EXPONENT)) - top + above
    return lax.max(exponents, lax.full_like(exponents, 1))  # Of zeros: any will do that has an inverse.


def power_of_two(exponents: Array, dtype: np.dtype = FLOAT32) -> Array:
    """The powers of two of exponents as float32 has them, and so bfloat16."""
    digits = jnp.finfo(dtype).nmant
    exponents = exponents.astype(np.int32 if dtype == FLOAT32 else np.int16)
    return lax.bitcast_convert_type(lax.shift_left(exponents, lax.full_like(exponents, digits)), dtype)


def scales(q: Quantized, dtype: np.dtype = FLOAT32) -> Array:
    """The scales."""
    return power_of_two(q.exponents, dtype)


def smaller_first(a: Array, b: Array) -> tuple[Array, Array]:
    """Scales in the order in which to multiply a product by them: by the larger one first it may be infinite."""
    return lax.min(a, b), lax.max(a, b)


def numbers(q: Quantized, dtype: np.dtype) -> Array:
    """The float8 numbers, not scaled."""
    return lax.bitcast_convert_type(q.bits, dtype)


def dequantize(q: Quantized, dtype: np.dtype, to: np.dtype) -> Array:
    """The array that a quantized one stands for."""
    wide, scale = numbers(q, dtype).astype(FLOAT32), scales(q)
    for axis, (have, want) in enumerate(zip(scale.shape, wide.shape, strict=True)):
        if 1 < have < want:  # In blocks.
            split = (*scale.shape[: axis + 1], want // have, *scale.shape[axis + 1 :])
            repeated = lax.broadcast_in_dim(scale, split, [i for i in range(len(split)) if i != axis + 1])
            scale = lax.reshape(repeated, (*scale.shape[:axis], want, *scale.shape[axis + 1 :]))
    return lax.mul(wide, spread(scale, wide.shape)).astype(to)


def spread(x: Array, shape: tuple[int, ...]) -> Array:
    """One for all that share it, for each of these."""
    return lax.broadcast_in_dim(x, shape, range(len(shape)))
