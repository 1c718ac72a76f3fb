"""Arrays on meshes with explicit axes, whose types say how they are divided among devices."""

import math
from collections.abc import Sequence

import jax
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jamp._compat import Aval


def explicit_sharding(aval: Aval, axes: Sequence[int]) -> NamedSharding | None:
    """How an array is sharded whose axes are some of another's; None where no mesh with explicit axes says it."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*(sharding.spec[axis] for axis in axes)))


def in_whole_blocks(x: Array, axis: int, length: int) -> Array:
    """An array in blocks along an axis; if devices would have parts of blocks, with all of that axis on each."""
    sharding = explicit_sharding(jax.typeof(x), range(x.ndim))
    names = sharding and sharding.spec[axis]
    if sharding is None or names is None:
        return x
    devices = math.prod(sharding.mesh.shape[name] for name in (names if isinstance(names, tuple) else (names,)))
    if x.shape[axis] % (devices * length) == 0:
        return x
    spec = [None if each == axis else of_each for each, of_each in enumerate(sharding.spec)]
    return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*spec)))


def sharded_like(x: Array, other: Array) -> Array:
    """An array of the shape of another, divided among devices as that is where its type says so."""
    sharding = explicit_sharding(jax.typeof(other), range(other.ndim))
    return x if sharding is None else jax.reshard(x, sharding)
