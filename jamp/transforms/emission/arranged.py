"""Operands of an attention with the axes that kernels expect, and masks as arrays or as numbers of queries and keys."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jamp.transforms.program.attention import ABSORBS, Attention, Factor, Labels, Layout, Mask, Operand, Place


class Ids(NamedTuple):
    """Numbers of queries and keys, `int32[batch, length]`; a score counts where they are equal."""

    queries: Array
    keys: Array

    def seeing(self, attention: Attention) -> Array:
        """Which queries see a key, `bool[batch, 1, queries]`."""
        seen = self.queries[:, None, :, None] == self.keys[:, None, None, :]
        near = _near(attention)
        return jnp.any(seen if near is None else seen & near, axis=-1)


def _near(attention: Attention) -> Array | None:
    """Which keys a causal mask and a window leave each query, `bool[1, 1, queries, keys]`; None for all."""
    if not attention.causal:
        return None
    shape = 1, 1, attention.size(attention.queries), attention.size(attention.keys)
    distance = jax.lax.broadcasted_iota(jnp.int32, shape, 2) - jax.lax.broadcasted_iota(jnp.int32, shape, 3)
    return distance >= 0 if attention.window is None else (distance >= 0) & (distance <= attention.window)


def _both(*conditions: Array | None) -> Array | None:
    """Where all of some conditions hold; None without any."""
    given = [each for each in conditions if each is not None]
    return functools.reduce(operator.and_, given) if given else None


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
        value = self._scaled(value, a.factors, heads_first, a.scale)
        if not a.biases:
            return value
        absorbed = self._shifted[1] <= ABSORBS
        return jnp.where(absorbed if heads_first else jnp.swapaxes(absorbed, 1, 2), jnp.zeros_like(value), value)

    @property
    def scale(self) -> float:
        """What the product of these queries with the keys is to be multiplied with."""
        return 1.0 if self._attention.factors else self._attention.scale

    def _scaled(
        self,
        value: Array,
        factors: Sequence[Factor],
        heads_first: bool,
        number: float = 1.0,
    ) -> Array:
        """Queries, or a result, times what has none of their features, or divided by it, and then a number."""
        if not factors:
            return value
        by = jnp.float32(number)
        for operand, divides in factors:
            one = self._row(operand, self._attention.queries, self.heads, (), heads_first, full=False)
            by = by / one if divides else by * one
        return (value.astype(jnp.float32) * by).astype(value.dtype)

    def _row(
        self, operand: Operand, length: Labels, heads: Labels, features: Labels, heads_first: bool, full: bool = True
    ) -> Array:
        middle = (heads, length) if heads_first else (length, heads)
        value = self.axes(operand, self._attention.batch, *middle, features, full=4 if full else 0)
        # What is repeated comes in float32, so that its cotangents add up so: see `planning.attention`.
        return value.astype(self._attention.half) if full and self._attention.half else value

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
        if not self._attention.biases:
            return None
        total, largest = self._shifted
        total -= jnp.where(jnp.isfinite(largest), largest, 0.0)
        # Large enough to leave nothing of a score, and to be added to one.
        return jnp.maximum(total, float(jnp.finfo(half).min) / 2).astype(half)

    @functools.cached_property
    def _shifted(self) -> tuple[Array, Array]:
        """The sum of all biases, and the largest that each query sees."""
        total = sum(self._whole(operand).astype(jnp.float32) * sign for operand, sign in self._attention.biases)
        total, seen = jnp.asarray(total), self._seen()
        largest = jnp.max(total if seen is None else jnp.where(seen, total, -jnp.inf), axis=-1, keepdims=True)
        return total, jax.lax.stop_gradient(largest)

    def _seen(self) -> Array | None:
        """Which keys each query sees, by all that says so, `[batch, heads, queries, keys]`; None for all."""
        return _both(self.mask(), None if self._attention.lifts_near else _near(self._attention))

    def seeing(self) -> Array | None:
        """Which queries see a key, `bool[batch, heads, queries]`; None where all do, whatever the operands are."""
        if not self._attention.may_see_none:
            return None
        seen = self._seen()
        return None if seen is None else jnp.any(seen, axis=-1)

    def mask(self) -> Array | None:
        """Where scores count, `[batch, heads, queries, keys]`, but for `causal` and `window` if these lift nothing."""
        a = self._attention
        axes = self.heads, a.queries, a.keys
        put = self._all([mask for mask in a.masks if not mask.added], *axes)
        added, near = self._all([mask for mask in a.masks if mask.added], *axes), _near(a)
        placed = [*map(self._placed, a.places)]
        placed += [operator.eq(*(self._whole(each) for each in pair)) for pair in a.same]
        if a.lifts_near:
            added, near = _both(added, near, *placed), None
        else:
            put = _both(put, *placed)
        if added is None:
            return put
        seen = _both(put, added, near)
        # What is added to all scores of a query changes none of its weights.
        return _both(put, added | ~jnp.any(jnp.asarray(seen), axis=-1, keepdims=True))

    def _whole(self, operand: Operand) -> Array:
        """An operand of scores, `[batch, heads, queries, keys]`."""
        a = self._attention
        return self.axes(operand, a.batch, self.heads, a.queries, a.keys, full=2)

    def _all(self, masks: Sequence[Mask], *axes: Labels) -> Array | None:
        """Where all of some masks say that scores count; None without any."""
        found = [self.axes(mask.operand, self._attention.batch, *axes, full=2) != 0 for mask in masks]
        return _both(*(is_set if mask.keeps else ~is_set for is_set, mask in zip(found, masks, strict=True)))

    def ids(self) -> Ids | None:
        """Which scores count, where a query and a key say so each by itself, or by being alike; None for all."""
        a = self._attention
        if not a.masks and not a.same:
            return None
        of_queries = [mask for mask in a.masks if a.is_of(a.queries, mask.operand)]
        of_keys = [mask for mask in a.masks if mask not in of_queries]
        (one, other), *_ = a.same or ((None, None),)
        return Ids(self._numbered(one, of_queries, a.queries), self._numbered(other, of_keys, a.keys))

    def _numbered(self, ids: Operand | None, masks: Sequence[Mask], length: Labels) -> Array:
        """The numbers of queries or of keys; those that a mask leaves out have one that the other side lacks."""
        a = self._attention
        shape = a.size(a.batch), a.size(length)
        seen = self._all(masks, length)
        if seen is not None and length == a.keys and all(mask.added for mask in masks):
            seen |= ~jnp.any(seen, axis=-1, keepdims=True)
        numbers = jnp.ones(shape, jnp.int32)
        if ids is not None:
            numbers = self.axes(ids, a.batch, length, full=2).astype(jnp.int32)
        outside = jnp.iinfo(jnp.int32).min + (length == a.keys)
        return numbers if seen is None else jnp.where(seen, numbers, outside)

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
        value = self._scaled(value, [Factor(each, divides=False) for each in a.weighted], heads_first)
        middle = (self.heads, a.queries) if heads_first else (a.queries, self.heads)
        labels = [label for axis in (a.batch, *middle, a.width) for label in axis]
        wanted = [label for axis in a.result for label in axis]
        value = value.reshape([a.sizes[label] for label in labels]).transpose([labels.index(label) for label in wanted])
        return value.reshape([a.size(axis) for axis in a.result])
