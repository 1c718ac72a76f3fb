"""What is found at each site of a program, as arrays that loops carry and devices add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jamp._compat import varying_axes

Axes = tuple[str, ...]


class Found(NamedTuple):
    """Of each site, in order.

    Attributes:
        counts: Infinities and NaN that it made of other numbers, int32[sites, 2].
        first: The iteration of the outermost loop around it in which it made the first, int32[sites]; -1 for none.
        largest: Largest finite magnitude of its results, float32[sites]; zero where that is not asked for.
        of_infinities: Whether what it made the first of were infinities, int32[sites]: 1, or else 0.
    """

    counts: jax.Array
    first: jax.Array
    largest: jax.Array
    of_infinities: jax.Array

    def differing(self, axes: Axes) -> Found:
        """The same as values that differ between the devices of manual axes, as those of a loop or branch must."""
        return Found(*(differing(x, axes) for x in self))


def nothing(number: int) -> Found:
    """What is found where nothing was looked for."""
    none = jnp.zeros(number, jnp.int32)
    return Found(jnp.zeros((number, 2), jnp.int32), none - 1, jnp.zeros(number, jnp.float32), none)


def joined(parts: Sequence[Found]) -> Found:
    """Those of several equations, one behind the other."""
    return Found(*map(jnp.concatenate, zip(nothing(0), *parts, strict=True)))


def later(before: Found, new: Found, iteration: jax.Array) -> Found:
    """With one more iteration of a loop."""
    fresh = (before.counts.sum(1) == 0) & (new.counts.sum(1) > 0)
    first = jnp.where(fresh, iteration, before.first)
    of_infinities = jnp.where(fresh, new.of_infinities, before.of_infinities)
    return Found(before.counts + new.counts, first, jnp.maximum(before.largest, new.largest), of_infinities)


def either(here: Found, again: Found) -> Found:
    """What was found where something is; else what a second look found."""
    has = here.counts.sum(1) > 0
    counts = jnp.where(has[:, None], here.counts, again.counts)
    first = jnp.where(has, here.first, again.first)
    of_infinities = jnp.where(has, here.of_infinities, again.of_infinities)
    return Found(counts, first, jnp.maximum(here.largest, again.largest), of_infinities)


def without(found: Found, known: Found) -> Found:
    """What was found at sites at which nothing was known."""
    return found._replace(counts=jnp.where(known.counts.sum(1)[:, None] > 0, 0, found.counts))


def over_devices(each: Found) -> Found:
    """Of all devices, from arrays with one row for each."""
    bad = each.counts.sum(2) > 0
    first = jnp.where(bad, each.first, jnp.iinfo(jnp.int32).max).min(0)
    first = jnp.where(bad.any(0), first, -1)
    return Found(each.counts.sum(0), first, each.largest.max(0), each.of_infinities.max(0))


def differing(x: jax.Array, axes: Axes) -> jax.Array:
    """A value as one that differs between the devices of manual axes, where JAX keeps account of that."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def counts_of(x: ArrayLike) -> jax.Array:
    """Infinities and NaN of an array, int32[2], by one read."""
    x = jnp.asarray(x)
    flags = jnp.isinf(x).astype(jnp.int32), jnp.isnan(x).astype(jnp.int32)
    zero = differing(jnp.int32(0), tuple(varying_axes(x)))
    return jnp.stack(lax.reduce(flags, (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), range(x.ndim)))


def is_bad(x: jax.Array) -> jax.Array:
    """Whether an array has an infinity or a NaN; in float32 by one read (see `jamp.all_finite`)."""
    return ~jnp.isfinite(x).all() if x.dtype.itemsize < 4 else jnp.sum(x - x) != 0


def magnitude(x: jax.Array) -> jax.Array:
    """Largest finite magnitude of an array."""
    size = jnp.abs(x).astype(jnp.float32)
    return jnp.max(jnp.where(jnp.isfinite(size), size, 0), initial=0)
