"""Calls, loops, branches and maps over devices, rebuilt around a function that looks into the jaxprs inside of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jamp._compat import (
    ClosedJaxpr,
    Eqn,
    Jaxpr,
    bind,
    called_jaxpr,
    eval_jaxpr,
    hoisted,
    jaxpr_consts,
    open_jaxpr,
    scan_counts,
    while_parts,
)  # fmt: skip
from jamp._primitives import Trait, has
from jamp.inspect._operations import Place
from jamp.inspect.numerics.found import Axes, Found, differing, joined, later, nothing, over_devices
from jamp.inspect.numerics.sites import mapped_names
from jamp.transforms.emission.control_flow import select_going

Values = Sequence[jax.Array]


class Runs(Protocol):
    """Runs a jaxpr and looks: gives its results, and what is found at its sites."""

    def __call__(
        self, jaxpr: Jaxpr | ClosedJaxpr, args: Values, place: Place, axes: Axes
    ) -> tuple[list[jax.Array], Found]:
        """Looks into one jaxpr."""
        ...

    def in_loop(self, iteration: jax.Array) -> Runs:
        """The same for the body of a loop, in one iteration of it."""
        ...


def rebuilt(
    eqn: Eqn, args: Values, run: Runs, place: Place, axes: Axes, numbers: Sequence[int]
) -> tuple[list[jax.Array], Found]:
    """An equation with jaxprs inside, run by `run`.

    Args:
        eqn: The equation.
        args: Its operands.
        run: What runs the jaxprs inside.
        place: Where the equation is.
        axes: Manual mesh axes around it, if JAX keeps account of what differs along them.
        numbers: Number of sites of each jaxpr inside.
    """
    name = eqn.primitive.name
    if name == "scan":
        return _scan(eqn, args, run, place, axes, numbers[0])
    if name == "while":
        return _while(eqn, args, run, place, axes, numbers[0])
    if name == "cond":
        return _cond(eqn, args, run, place, axes, numbers)
    if name == "shard_map":
        return _shard_map(eqn, args, run, place, axes)
    if has(eqn, Trait.REMAT):
        return _remat(eqn, args, run, place, axes)
    return run(called_jaxpr(eqn.params), args, place, axes)


def _remat(eqn: Eqn, args: Values, run: Runs, place: Place, axes: Axes) -> tuple[list[jax.Array], Found]:
    avals = [*map(jax.typeof, args)]
    closed, shape = jax.make_jaxpr(
        lambda *operands: run(called_jaxpr(eqn.params), operands, place, axes), return_shape=True
    )(*avals)
    consts, jaxpr = hoisted(closed, avals)
    outs = bind(eqn, [*consts, *args], {**eqn.params, "jaxpr": open_jaxpr(jaxpr)})
    return jax.tree.unflatten(jax.tree.structure(shape), outs)


def _scan(eqn: Eqn, args: Values, run: Runs, place: Place, axes: Axes, number: int) -> tuple[list[jax.Array], Found]:
    consts, carries = scan_counts(eqn.params)
    length, reverse = eqn.params["length"], eqn.params["reverse"]
    fixed, init, xs = args[:consts], args[consts : consts + carries], args[consts + carries :]

    def body(state: tuple[jax.Array, list[jax.Array], Found], x: list[jax.Array]) -> tuple[Any, list[jax.Array]]:
        i, carry, found = state
        at = length - 1 - i if reverse else i
        outs, new = run.in_loop(at)(eqn.params["jaxpr"], [*fixed, *carry, *x], place, axes)
        return (i + 1, outs[:carries], later(found, new.differing(axes), at)), outs[carries:]

    start = jnp.int32(0), [*map(jnp.asarray, init)], nothing(number).differing(axes)
    options = {option: eqn.params[option] for option in ("length", "reverse", "unroll")}
    (_, final, found), ys = lax.scan(body, start, list(xs), **options)
    return [*final, *ys], found


def _while(eqn: Eqn, args: Values, run: Runs, place: Place, axes: Axes, number: int) -> tuple[list[jax.Array], Found]:
    parts = while_parts(eqn.params)
    for_cond, for_body, init = (
        args[: parts.cond_consts],
        args[parts.cond_consts : parts.first_carry],
        args[parts.first_carry :],
    )
    batched = open_jaxpr(parts.cond).outvars[0].aval.shape != ()

    def goes_on(carry: Values) -> jax.Array:
        return eval_jaxpr(open_jaxpr(parts.cond), jaxpr_consts(parts.cond), *for_cond, *carry)[0]

    def body(state: tuple[jax.Array, list[jax.Array], Found]) -> tuple[jax.Array, list[jax.Array], Found]:
        i, carry, found = state
        outs, new = run.in_loop(i)(parts.body, [*for_body, *carry], place, axes)
        if batched:
            going = goes_on(carry)
            outs = [select_going(going, after, before) for after, before in zip(outs, carry, strict=True)]
        return i + 1, outs, later(found, new.differing(axes), i)

    start = jnp.int32(0), [*map(jnp.asarray, init)], nothing(number).differing(axes)
    _, final, found = lax.while_loop(lambda state: jnp.any(goes_on(state[1])), body, start)
    return final, found


def _cond(
    eqn: Eqn, args: Values, run: Runs, place: Place, axes: Axes, numbers: Sequence[int]
) -> tuple[list[jax.Array], Found]:
    def branch(index: int, jaxpr: ClosedJaxpr):
        def taken(*operands: jax.Array) -> tuple[list[jax.Array], Found]:
            outs, found = run(jaxpr, operands, place, axes)
            parts = [nothing(n).differing(axes) for n in numbers]
            parts[index] = found.differing(axes)
            # Branches that agree by themselves may differ in what varies between devices.
            varied = [differing(jnp.asarray(x), axes) if axes else x for x in outs]
            return varied, joined(parts).differing(axes)

        return taken

    branches = [branch(i, jaxpr) for i, jaxpr in enumerate(eqn.params["branches"])]
    return lax.switch(args[0], branches, *args[1:])


def _shard_map(eqn: Eqn, args: Values, run: Runs, place: Place, axes: Axes) -> tuple[list[jax.Array], Found]:
    params, names = eqn.params, mapped_names(eqn)
    inner = (*axes, *names) if params["check_vma"] else ()

    def body(*operands: jax.Array) -> tuple[list[jax.Array], Found]:
        outs, found = run(called_jaxpr(params), operands, place, inner)
        return outs, Found(*(x[None] for x in found.differing(inner)))

    mapped = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=([*params["out_specs"]], jax.tree.map(lambda _: PartitionSpec(names), nothing(0))),
        axis_names=set(names),
        check_vma=params["check_vma"],
    )
    outs, each = mapped(*args)
    return outs, over_devices(each)
