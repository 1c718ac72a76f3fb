"""Arrays in 8 bits: blocks along one axis, a float32 scale for each, and codes that are dense near zero.

Dettmers et al. (2022, arXiv:2110.02861) store optimizer states so, with a table of 256 values that is fine near zero.
Here a power takes the place of the table: the code `c` of a block with the largest magnitude `s` stands for `s * r**3`
with `r = c / 127`, and near zero for a straight line, `s * r / 1024`. It needs no look-up, which accelerators are slow
at, reaches from 1 down to 8e-6, and is exact at the largest value, so that decoding and encoding again changes nothing.

The line bounds what rounding at random does to small numbers: the lowest codes of a cube are 1, 8 and 27, and a number
just above one of them may be drawn up to eight times itself.

Blocks without a negative value, which those of second moments are, hold the code of the square root, and use the sign
bit too, so that `r` is `c / 255`. In them no positive value becomes zero: an update is divided by the root of the
second moment, and a zero there makes it as large as Adam's epsilon is small. Nor is a root smaller, beside the largest
of its block, than what a first moment may be drawn up to beside that of its own: the least is 1.3e-5. Where numbers of
very different size share a block, steps of the small ones are too short, and none is many times the learning rate.
Their scale is stored with a minus sign, by which the decoder knows them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jamp._shardings import in_whole_blocks, sharded_like

# Of the spacing between codes. What is as near as this to a code is that code, and has only been rounded in float32.
_SAME = 2.0**-12
_SMALLEST_SCALE = np.finfo(np.float32).tiny  # Below, XLA flushes to zero.


@dataclass(frozen=True)
class _Code:
    """The values of an 8-bit code, as multiples of the scale: `expand(grid point / top)`, squared if never negative."""

    dtype: np.dtype
    top: float
    top_nonnegative: float
    smallest: float  # The grid point of the least that is positive, where nothing is negative.
    spacing: Callable[[jax.Array], jax.Array]
    compress: Callable[[jax.Array], jax.Array]
    expand: Callable[[jax.Array], jax.Array]


def _spacing_e4m3(x: jax.Array) -> jax.Array:
    _, exponent = jnp.frexp(x)
    return jnp.ldexp(jnp.float32(1), jnp.maximum(exponent, -5) - 4)  # 4 bits of precision, denormals from 2^-9.


_SLOPE = 2.0**-10  # At zero, of the values of int8.


def _expand_int8(r: jax.Array) -> jax.Array:
    cube = r * r * r
    return cube + _SLOPE * (r - cube)


def _compress_int8(values: jax.Array) -> jax.Array:
    """The inverse, by Newton's method. From above, where it starts, it needs three steps for all that float32 tells."""
    r = jnp.minimum(lax.cbrt(values), values / _SLOPE)
    for _ in range(3):
        square = (1 - _SLOPE) * r * r
        r = (2 * square * r + values) / (3 * square + _SLOPE)
    return r


# Three: the root that it stands for is above the value of code 1 where signs are mixed.
_INT8 = _Code(np.dtype(np.int8), 127.0, 255.0, 3.0, jnp.ones_like, _compress_int8, _expand_int8)
_FLOAT8 = _Code(np.dtype(jnp.float8_e4m3fn), 448.0, 448.0, 2.0**-9, _spacing_e4m3, lambda r: r, lambda r: r)
_CODES = {code.dtype: code for code in (_INT8, _FLOAT8)}


def scales_shape(shape: tuple[int, ...], block_size: int) -> tuple[int, ...]:
    """The shape of the scales of an array: that of the array, one axis of which counts blocks.

    It is the axis that needs the fewest scales, and the last of those. Blocks along an axis, and not of the flattened
    array, let the codes be sharded like the array, and the scales too. All blocks are of one length, the last may be
    shorter, and the two shapes tell it.
    """
    blocks = [-(-n // block_size) for n in shape]
    sizes = [math.prod(shape[:a]) * blocks[a] * math.prod(shape[a + 1 :]) for a in range(len(shape))]
    axis = max(range(len(shape)), key=lambda a: (-sizes[a], a))
    return (*shape[:axis], blocks[axis], *shape[axis + 1 :])


def are_blocks_of(block_size: int, shape: tuple[int, ...], scales: tuple[int, ...]) -> bool:
    """Whether scales of a shape are of blocks of this size, along whatever axis: an array may be a share of another."""
    axis = _block_axis(shape, scales)
    return scales[axis] == -(-shape[axis] // block_size)


@partial(jax.jit, static_argnames=("dtype", "shape"))  # One operation where the state is made op by op.
def encode_blocks(x: jax.Array, key: jax.Array, dtype: np.dtype, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Rounds each value to one of the two codes next to it at random, such that the mean is the value.

    Args:
        x: float32 array of one axis or more.
        key: PRNG key.
        dtype: int8 or float8_e4m3fn.
        shape: What `scales_shape` returned for it.

    Returns:
        Codes of the shape of `x`, in `dtype`, and float32 scales. A block with a NaN or an infinity has the scale NaN,
        and comes back as NaNs.
    """
    code, axis = _CODES[dtype], _block_axis(x.shape, shape)
    blocks = _split(x, shape)
    # A maximum need not see a NaN: on CPUs XLA drops it, and what is left would look like ordinary numbers.
    finite = jnp.all(jnp.isfinite(blocks), axis + 1, keepdims=True)
    largest = jnp.where(finite, jnp.max(jnp.abs(blocks), axis + 1, keepdims=True), jnp.nan)
    nonnegative = jnp.min(blocks, axis + 1, keepdims=True) >= 0
    scales = jnp.where(largest < _SMALLEST_SCALE, 0.0, largest)
    usable = scales > 0
    # XLA divides by what is broadcast as it multiplies with the reciprocal, which is zero for the largest numbers.
    fits = jnp.where(scales > 1, jnp.float32(2**-8), jnp.float32(1))
    ratios = jnp.where(usable, (jnp.abs(blocks) * fits) / jnp.where(usable, scales * fits, 1), 0)
    points = _round_to_grid(code, ratios, nonnegative, jax.random.uniform(key, blocks.shape))
    points = jnp.where(nonnegative | (blocks >= 0), points, -points)
    codes = points.astype(jnp.int32).astype(jnp.int8) if code is _INT8 else points.astype(dtype)
    return _join(codes, x, axis), jnp.where(nonnegative, -scales, scales).squeeze(axis + 1)


@jax.jit
def decode_blocks(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """The float32 array that `encode_blocks` encoded."""
    code, axis = _CODES[codes.dtype], _block_axis(codes.shape, scales.shape)
    blocks = _split(codes, scales.shape)
    scales = jnp.expand_dims(scales, axis + 1)
    nonnegative = scales < 0
    if code is _INT8:
        unsigned = lax.bitcast_convert_type(blocks, jnp.uint8)
        blocks = jnp.where(nonnegative, unsigned.astype(jnp.int32), blocks.astype(jnp.int32))
    points = blocks.astype(jnp.float32)
    ratios = jnp.where(points < 0, -1, 1) * _value(code, jnp.abs(points), nonnegative)
    return _join(ratios * jnp.abs(scales), codes, axis)


def _round_to_grid(code: _Code, ratios: jax.Array, nonnegative: jax.Array, draws: jax.Array) -> jax.Array:
    """Points of the code's grid, at random, for ratios within [0, 1]."""
    points = _top(code, nonnegative) * code.compress(jnp.where(nonnegative, jnp.sqrt(ratios), ratios))
    points = jnp.minimum(points, _top(code, nonnegative))
    spacing = code.spacing(points)
    steps = points / spacing
    nearest = jnp.round(steps)
    same = jnp.abs(steps - nearest) < _SAME
    below = jnp.floor(steps) * spacing
    low, high = (_value(code, p, nonnegative) for p in (below, below + spacing))
    drawn = jnp.where(draws * (high - low) < ratios - low, below + spacing, below)
    points = jnp.where(same, nearest * spacing, drawn)
    return jnp.where(nonnegative & (ratios > 0), jnp.maximum(points, code.smallest), points)


def _value(code: _Code, points: jax.Array, nonnegative: jax.Array) -> jax.Array:
    ratios = code.expand(points / _top(code, nonnegative))
    return jnp.where(nonnegative, ratios * ratios, ratios)


def _top(code: _Code, nonnegative: jax.Array) -> jax.Array:
    return jnp.where(nonnegative, jnp.float32(code.top_nonnegative), jnp.float32(code.top))


def _block_axis(shape: tuple[int, ...], scales: tuple[int, ...]) -> int:
    differing = [a for a in range(len(shape)) if shape[a] != scales[a]]
    return differing[0] if differing else len(shape) - 1


def _split(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Makes two axes of the one along which the blocks lie: blocks, and what is in them, with zeros at the end."""
    axis = _block_axis(x.shape, shape)
    blocks = shape[axis]
    length = -(-x.shape[axis] // blocks)
    x = in_whole_blocks(x, axis, length)
    if missing := blocks * length - x.shape[axis]:
        x = jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)])
    return x.reshape(*x.shape[:axis], blocks, length, *x.shape[axis + 1 :])


def _join(x: jax.Array, like: jax.Array, axis: int) -> jax.Array:
    x = x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
    return sharded_like(lax.slice_in_dim(x, 0, like.shape[axis], axis=axis), like)
