"""Attention kernels of each platform, for operands whose axes are where the program has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jamp.transforms.program.attention import Attention, Labels, Layout, Operand, Place

Implementation = Literal["cudnn", "xla"]
Apply = Callable[..., Array]


class Padding(NamedTuple):
    """Which queries and keys count, `bool[batch, length]` each."""

    queries: Array
    keys: Array

    def ids(self) -> tuple[Array, Array]:
        """Numbers of queries and keys, equal where both count."""
        return jnp.where(self.queries, 1, 2).astype(jnp.int32), self.keys.astype(jnp.int32)

    def seeing(self, attention: Attention) -> Array:
        """Which queries see a key, `bool[batch, queries]`."""
        before = jnp.cumsum(self.keys, axis=1, dtype=jnp.int32)  # How many count up to each key.
        place = jnp.arange(self.queries.shape[1])
        last = jnp.minimum(place, before.shape[1] - 1) if attention.causal else jnp.full_like(place, -1)
        seen = before[:, last]
        if attention.window is not None:
            first = jnp.minimum(place - attention.window, before.shape[1])
            seen -= jnp.where(first > 0, before[:, first - 1], 0)
        return self.queries & (seen > 0)


class Arranged:
    """The operands of an attention, with the axes that kernels expect.

    Args:
        attention: The attention.
        operands: Values of its operands.
    """

    def __init__(self, attention: Attention, operands: Sequence[Array]) -> None:
        self._attention, self._operands = attention, operands
        self.heads = attention.heads + attention.groups

    def axes(self, operand: Operand, *axes: Labels, full: int = 0) -> Array:
        """An operand with these axes; those that it has nothing of have one element, but for the last `full` ones."""
        return self._axes(self._operands[operand.place], operand.layout, axes, full)

    def _axes(self, value: Array, layout: Layout, axes: Sequence[Labels], full: int) -> Array:
        sizes = self._attention.sizes
        labels = [label for of_axis in layout for label in of_axis]
        value = value.reshape([sizes[label] for label in labels])
        present = [label for axis in axes for label in axis if label in labels]
        value = value.transpose([labels.index(label) for label in present])
        whole = [
            number >= len(axes) - full or any(label in labels for label in axis) for number, axis in enumerate(axes)
        ]
        wanted = [
            (label, label in labels) for axis, is_whole in zip(axes, whole, strict=True) if is_whole for label in axis
        ]
        value = value.reshape([sizes[label] if is_there else 1 for label, is_there in wanted])
        value = jnp.broadcast_to(value, [sizes[label] for label, _ in wanted])
        shape = [
            math.prod(sizes[label] for label in axis) if is_whole else 1
            for axis, is_whole in zip(axes, whole, strict=True)
        ]
        return value.reshape(shape)

    def queries(self, heads_first: bool) -> Array:
        """The queries, scaled by what the program computes, then by what it writes too: both may be far from one."""
        a = self._attention
        value = self._row(a.query, a.queries, self.heads, a.depth, heads_first)
        return self._scaled(value, a.factors, heads_first, a.scale)

    @property
    def scale(self) -> float:
        """What the product of these queries with the keys is to be multiplied with."""
        return 1.0 if self._attention.factors else self._attention.scale

    def _scaled(self, value: Array, factors: Sequence[Operand], heads_first: bool, number: float = 1.0) -> Array:
        """Queries, or a result, times what has none of their features, and then a number."""
        if not factors:
            return value
        by = jnp.float32(number)
        for factor in factors:
            by = by * self._row(factor, self._attention.queries, self.heads, (), heads_first, full=False)
        return (value.astype(jnp.float32) * by).astype(value.dtype)

    def _row(
        self, operand: Operand, length: Labels, heads: Labels, features: Labels, heads_first: bool, full: bool = True
    ) -> Array:
        middle = (heads, length) if heads_first else (length, heads)
        return self.axes(operand, self._attention.batch, *middle, features, full=4 if full else 0)

    def keys(self, heads_first: bool, repeat: bool = False) -> Array:
        """The keys, of as many heads as queries have if wanted."""
        a = self._attention
        return self._row(a.key, a.keys, self.heads if repeat else a.heads, a.depth, heads_first)

    def values(self, heads_first: bool, repeat: bool = False) -> Array:
        """The values, of as many heads as queries have if wanted."""
        a = self._attention
        return self._row(a.value, a.keys, self.heads if repeat else a.heads, a.width, heads_first)

    def bias(self, half: jnp.dtype) -> Array | None:
        """The sum of all biases, `[batch, heads, queries, keys]`, less the largest that a query sees.

        Softmax is the same without that, and half is exact where the weights are: of `slope * key`, as BLOOM has it,
        differences of 0.5 would be lost at key 500, and the result was 16 % off.
        """
        a = self._attention
        total: Array | None = None
        for operand, sign in a.biases:
            one = self.axes(operand, a.batch, self.heads, a.queries, a.keys, full=2).astype(jnp.float32) * sign
            total = one if total is None else total + one
        if total is None:
            return None
        seen = self._seen()
        largest = jnp.max(total if seen is None else jnp.where(seen, total, -jnp.inf), axis=-1, keepdims=True)
        total -= jax.lax.stop_gradient(jnp.where(jnp.isfinite(largest), largest, 0.0))
        # Large enough to leave nothing of a score, and to be added to one.
        return jnp.maximum(total, float(jnp.finfo(half).min) / 2).astype(half)

    def _seen(self) -> Array | None:
        """Which keys each query sees, by all that says so; None for all."""
        a, seen = self._attention, self.mask()
        if a.causal:
            before = jnp.arange(a.size(a.queries))[:, None] - jnp.arange(a.size(a.keys))
            near = before >= 0 if a.window is None else (before >= 0) & (before <= a.window)
            seen = near if seen is None else seen & near
        return seen

    def mask(self) -> Array | None:
        """Where scores count, `[batch, heads, queries, keys]`."""
        a = self._attention
        total = self._all(a.masks, self.heads, a.queries, a.keys)
        for place in a.places:
            one = self._placed(place)
            total = one if total is None else total & one
        return total

    def _all(self, masks: Sequence[tuple[Operand, bool]], *axes: Labels) -> Array | None:
        """Where all of some masks say that scores count; None without any."""
        total: Array | None = None
        for operand, keeps in masks:
            one = self.axes(operand, self._attention.batch, *axes, full=2)
            one = (one != 0) if keeps else (one == 0)
            total = one if total is None else total & one
        return total

    def padding(self) -> Padding | None:
        """Which queries and keys count, where masks say nothing else; None without masks."""
        a = self._attention
        if not a.masks:
            return None
        of_queries = [mask for mask in a.masks if a.is_of(a.queries, mask[0])]
        of_keys = [mask for mask in a.masks if mask not in of_queries]
        queries, keys = (
            jnp.ones((a.size(a.batch), a.size(length)), bool) if (seen := self._all(masks, length)) is None else seen
            for masks, length in ((of_queries, a.queries), (of_keys, a.keys))
        )
        return Padding(queries, keys)

    def _placed(self, place: Place) -> Array:
        """Where a condition on places holds."""
        a = self._attention
        labels = [label for label, _ in place.slopes]
        sizes = [a.size((label,)) for label in labels]
        value = jnp.full(sizes, place.offset)
        for axis, (_, slope) in enumerate(place.slopes):
            value += slope * jax.lax.broadcasted_iota(value.dtype, sizes, axis)
        layout = tuple((label,) for label in labels)
        return self._axes(value >= 0, layout, (a.batch, self.heads, a.queries, a.keys), 2)

    def result(self, value: Array, heads_first: bool) -> Array:
        """The result `[batch, length, heads, width]` with the axes of the program."""
        a = self._attention
        value = self._scaled(value, a.weighted, heads_first)
        middle = (self.heads, a.queries) if heads_first else (a.queries, self.heads)
        labels = [label for axis in (a.batch, *middle, a.width) for label in axis]
        wanted = [label for axis in a.result for label in axis]
        value = value.reshape([a.sizes[label] for label in labels]).transpose([labels.index(label) for label in wanted])
        return value.reshape([a.size(axis) for axis in a.result])


def dot_product(attention: Attention, *operands: Array, implementation: Implementation = "cudnn") -> Array:
    """`jax.nn.dot_product_attention`: cuDNN's kernel, or in XLA what it is to compute.

    JAX refuses the derivative of odd numbers of queries or keys, such as the 197 of a vision transformer or the 1,023
    tokens that have a next one. They are filled up by one, which the kernel is told to leave out.
    """
    given = Arranged(attention, operands)
    q, k, v = given.queries(False), given.keys(False), given.values(False)
    bias, mask, window = given.bias(q.dtype), given.mask(), attention.window
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
        q, k, v, bias=bias, mask=mask, scale=given.scale, is_causal=attention.causal,
        query_seq_lengths=lengths[0], key_value_seq_lengths=lengths[1],
        local_window_size=None if window is None else (window, 0), implementation=implementation,
    )  # fmt: skip
    return given.result(out[:, :queries], False)


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
    padding, values = given.padding(), given.values(True, repeat=True)
    out = flash_attention(
        given.queries(True), given.keys(True, repeat=True), values,
        segment_ids=padding and SegmentIds(*padding.ids()), causal=attention.causal, sm_scale=given.scale,
    )  # fmt: skip
    return given.result(_where_seeing(padding, attention, out, values), True)


def _where_seeing(padding: Padding | None, attention: Attention, value: Array, values: Array) -> Array:
    """A result `[batch, heads, queries, width]`, and for queries that see no key the mean of the values, as written.

    Weights are one and the same then, and have no derivative. The kernels leave out keys, and the gradient of splash
    attention was 30 times too large.
    """
    if padding is None:
        return value
    mean = jnp.mean(values, axis=2, keepdims=True, dtype=jnp.float32).astype(value.dtype)
    return jnp.where(padding.seeing(attention)[:, None, :, None], value, mean)


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
    padding, values = given.padding(), given.values(True, repeat=True)
    segments = padding and tpu.SegmentIds(*padding.ids())
    out: Any = jax.vmap(kernel)(queries, given.keys(True, repeat=True), values, segments)
    return given.result(_where_seeing(padding, attention, out, values), True)


def _block(length: int) -> int:
    """How many queries or keys the kernel takes at a time; its default of 128 leaves the matrix unit idle."""
    return next(size for size in (512, 256, 128) if length % size == 0)


APPLY: Mapping[str, Apply] = {"cuda": dot_product, "tpu": on_tpu}
