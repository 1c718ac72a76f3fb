"""The evaluation in two precisions inside of a `shard_map`, on all devices at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jamp._compat import called_jaxpr, inner_jaxprs, open_jaxpr, varying_axes
from jamp.inspect.numerics.found import differing
from jamp.inspect.numerics.sites import mapped_names
from jamp.inspect.roundings.pair import Pair

# Runs the body: is given pairs and slots, and gives pairs and records.
Body = Callable[[list[Pair], Any], tuple[list[Pair], dict[Any, Any]]]


def enters_map(eqn: Any) -> bool:
    """Whether the body of a `shard_map` is looked into. One with branches, or loops of unknown length, is not."""

    def decides(jaxpr: Any) -> bool:
        return any(
            eqn.primitive.name in ("cond", "while", "shard_map") or any(map(decides, inner_jaxprs(eqn)))
            for eqn in open_jaxpr(jaxpr).eqns
        )

    return not decides(called_jaxpr(eqn.params))


def in_shard_map(eqn: Any, args: Sequence[Pair], body: Body, slots: Any) -> tuple[list[Pair], dict[Any, Any]]:
    """A `shard_map` whose body is given pairs. What it records has a row for each device.

    Args:
        eqn: The equation.
        args: Pairs of its operands.
        body: Runs what is inside.
        slots: What `body` is given besides, alike on all devices.
    """
    params, names = eqn.params, mapped_names(eqn)
    axes = names if params["check_vma"] else ()
    # What is the same in both precisions is handed over once, and known to be the same inside.
    given = [(arg.wide,) if arg.wide is arg.half else tuple(arg) for arg in args]
    specs = [(spec,) * len(arg) for spec, arg in zip(params["in_specs"], given, strict=True)]

    def mapped(given: Sequence[tuple[Any, ...]], slots: Any) -> tuple[list[tuple[Any, Any]], Any]:
        outs, found = body([Pair(arg[0], arg[-1]) for arg in given], slots)
        return [tuple(out) for out in outs], jax.tree.map(lambda x: differing(jnp.asarray(x), axes)[None], found)

    run = jax.shard_map(
        mapped,
        mesh=params["mesh"],
        in_specs=(specs, PartitionSpec()),
        out_specs=([(spec, spec) for spec in params["out_specs"]], PartitionSpec(names)),
        axis_names=set(names),
        check_vma=params["check_vma"],
    )
    outs, found = run(given, slots)
    return [Pair(*out) for out in outs], found


def along(x: Any, like: Any) -> Any:
    """A value that is the same on all devices, as one that differs where another does."""
    missing = tuple(axis for axis in varying_axes(like) if axis not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x
