"""Attention kernels of each platform, for operands whose axes are where the program has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from jamp.transforms.emission.arranged import Arranged
from jamp.transforms.program.attention import Attention

Implementation = Literal["cudnn", "xla"]
Apply = Callable[..., Array]


def dot_product(attention: Attention, *operands: Array, implementation: Implementation = "cudnn") -> Array:
    """`jax.nn.dot_product_attention`: cuDNN's kernel, or in XLA what it is to compute.

    JAX refuses the derivative of odd numbers of queries or keys, such as the 197 of a vision transformer or the 1,023
    tokens that have a next one. They are filled up by one, which the kernel is told to leave out.
    """
    given = Arranged(attention, operands)
    q, k, values = given.queries(False), given.keys(False), given.values(False)
    v = values
    bias, mask = given.bias(q.dtype), given.mask()
    causal, window = (False, None) if attention.lifts_near else (attention.causal, attention.window)
    queries, keys = q.shape[1], k.shape[1]
    odd = bool(queries % 2 or keys % 2)
    if window is not None and (bias is not None or mask is not None or odd):  # cuDNN takes one of the two.
        near = (jnp.arange(queries)[:, None] - jnp.arange(keys) <= window)[None, None]
        mask, window = near if mask is None else mask & near, None
    lengths: list[Array | None] = [None, None]
    if odd:
        q, k, v = _even(q, 1), _even(k, 1), _even(v, 1)
        bias, mask = bias if bias is None else _even(bias, 2, 3), mask if mask is None else _even(mask, 2, 3)
        lengths = [jnp.full(q.shape[:1], length, jnp.int32) for length in (queries, keys)]
    out = jax.nn.dot_product_attention(
        q, k, v, bias=bias, mask=mask, scale=given.scale, is_causal=causal,
        query_seq_lengths=lengths[0], key_value_seq_lengths=lengths[1],
        local_window_size=None if window is None else (window, 0), implementation=implementation,
    )  # fmt: skip
    return given.result(_where_seeing(given.seeing(), out[:, :queries], values, False), False)


def _even(value: Array, *axes: int) -> Array:
    """A value whose axes have even numbers of elements, with a zero at the end where they had not."""
    return jnp.pad(value, [(0, size % 2 if axis in axes else 0) for axis, size in enumerate(value.shape)])


def on_tpu(attention: Attention, *operands: Array) -> Array:
    """The kernel for TPUs that JAX ships: of its two, splash attention where the other does not know what is wanted."""
    is_special = attention.cap is not None or attention.window is not None or attention.places
    return (splash if is_special else flash)(attention, *operands)


def flash(attention: Attention, *operands: Array) -> Array:
    """The flash attention for TPUs that JAX ships."""
    from jax.experimental.pallas.ops.tpu.flash_attention import SegmentIds, flash_attention  # Of no use elsewhere.

    given = Arranged(attention, operands)
    ids, values = given.ids(), given.values(True, repeat=True)
    out = flash_attention(
        given.queries(True), given.keys(True, repeat=True), values,
        segment_ids=ids and SegmentIds(*ids), causal=attention.causal, sm_scale=given.scale,
    )  # fmt: skip
    return given.result(_where_seeing(ids and ids.seeing(attention), out, values, True), True)


def _where_seeing(seeing: Array | None, value: Array, values: Array, heads_first: bool) -> Array:
    """A result, and for queries that see no key the mean of the values, as written.

    Weights are one and the same then, and have no derivative. The kernels leave out keys: the gradient of values was 30
    times too large with splash attention, and gradients 9 times their size off with cuDNN on an H100.

    Args:
        seeing: Which queries see a key, `bool[batch, heads, queries]`, the first two of one element too; None for all.
        value: The result, with its heads in front of its queries or behind these.
        values: The values, alike; several heads of the result may share one of theirs.
        heads_first: Which of the two.
    """
    if seeing is None:
        return value
    heads, length = (1, 2) if heads_first else (2, 1)
    mean = jnp.mean(values, axis=length, keepdims=True, dtype=jnp.float32)  # Many cotangents add up in it.
    mean = jnp.repeat(mean, value.shape[heads] // mean.shape[heads], axis=heads)
    seeing = seeing[..., None] if heads_first else jnp.swapaxes(seeing, 1, 2)[..., None]
    return jnp.where(seeing, value.astype(jnp.float32), mean).astype(value.dtype)


def splash(attention: Attention, *operands: Array, interpret: bool = False) -> Array:
    """The splash attention for TPUs that JAX ships, which knows soft caps and masks of places.

    Args:
        attention: The attention.
        *operands: Its operands.
        interpret: Whether to run the kernel without a TPU.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as tpu  # Of no use on other platforms.

    given = Arranged(attention, operands)
    # It knows no scale, and half operands alone: a scale that is no power of two rounds queries once more.
    queries = given.queries(True)
    queries = (queries.astype(jnp.float32) * given.scale).astype(queries.dtype)
    shape = queries.shape[2], attention.size(attention.keys)
    if attention.places:
        mask = tpu.NumpyMask(attention.seen())
    elif attention.window is not None:
        mask = tpu.LocalMask(shape, (attention.window, 0), 0)
    else:
        mask = tpu.CausalMask(shape) if attention.causal else tpu.FullMask(shape)
    rows, columns = map(_block, shape)
    sizes = tpu.BlockSizes(
        block_q=rows, block_kv=columns, block_q_dkv=rows, block_kv_dkv=columns, block_q_dq=rows, block_kv_dq=columns
    )  # fmt: skip
    kernel = tpu.make_splash_mha(
        tpu.MultiHeadMask([mask] * queries.shape[1]), block_sizes=sizes, attn_logits_soft_cap=attention.cap,
        head_shards=1, q_seq_shards=1, interpret=interpret,
    )  # fmt: skip
    ids, values = given.ids(), given.values(True, repeat=True)
    segments = ids and tpu.SegmentIds(*ids)
    out: Any = jax.vmap(kernel)(queries, given.keys(True, repeat=True), values, segments)
    return given.result(_where_seeing(ids and ids.seeing(attention), out, values, True), True)


def _block(length: int) -> int:
    """How many queries or keys the kernel takes at a time; its default of 128 leaves the matrix unit idle."""
    return next(size for size in (512, 256, 128) if length % size == 0)


APPLY: Mapping[str, Apply] = {"cuda": dot_product, "tpu": on_tpu}
