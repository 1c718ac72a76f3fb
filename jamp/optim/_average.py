"""Mean of the gradients of several devices, with half the traffic if wanted."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import keystr, tree_leaves_with_path
from jax.typing import DTypeLike

from jamp._calls import explains
from jamp._compat import varying_axes
from jamp._dtypes import parse_dtype
from jamp._tree import AxisName, check_holds_numbers, check_mapped
from jamp.scalers._base import is_inexact, raise_tree

T = TypeVar("T")


@explains('jamp.average_gradients(grads, "batch")')
def average_gradients(grads: T, axis_name: AxisName, dtype: DTypeLike | None = None) -> T:
    """Averages gradients over mapped axes: `jax.lax.pmean`, with a choice of the dtype that travels.

    Call it inside `jax.shard_map` or `jax.pmap`, on scaled gradients, before `tx.update`. Each device divides its share
    by the number of devices in float32, casts it to `dtype`, and the shares are added in that dtype. So a mean that
    `dtype` can hold never overflows on the way, and one that it cannot hold is inf on every device: the step is
    skipped, and the loss scale backs off.

    Under `jax.jit` with sharded arrays XLA adds the gradients where they are made, in the dtype they are made in, which
    with half-precision parameters or `jamp.cast_fn` is already half; there is nothing to call.

    Args:
        grads: Tree of the gradients of each device's own examples. In `jax.shard_map` the derivative with respect to a
            replicated value is a sum over devices already; make the parameters
            `jax.lax.pcast(params, axis_name, to="varying")` before differentiating.
        axis_name: Name, or names, of the mapped axes.
        dtype: Floating dtype that travels: `"bfloat16"` or `"float16"` for half the bytes, None for float32.

    Returns:
        Tree of means, the same on every device. Half-precision leaves come out as float32.

    Raises:
        ValueError: If gradients are known to be the same on all devices, and so are sums already. All are named.

    Example:
        >>> import jax, jax.numpy as jnp, jamp
        >>> average = lambda g: jamp.average_gradients(g, "devices", "bfloat16")
        >>> jax.vmap(average, axis_name="devices")(jnp.array([1.0, 2.0]))  # Works for vmap's axes too.
        Array([1.5, 1.5], dtype=float32)
    """
    check_holds_numbers(
        grads, "`jamp.average_gradients` takes a tree of arrays", "Write jamp.average_gradients(grads, axis_name)."
    )
    check_mapped(axis_name)
    _check_varying(grads, axis_name)
    devices = lax.axis_size(axis_name)

    def average(g: jax.Array) -> jax.Array:
        if jnp.iscomplexobj(g):
            return lax.complex(average(g.real), average(g.imag))
        share = g / devices
        sent = share if dtype is None else share.astype(parse_dtype(dtype))
        return lax.psum(sent, axis_name).astype(share.dtype)

    return jax.tree.map(lambda g: average(g) if is_inexact(g) else g, raise_tree(grads))


def _check_varying(grads: Any, axis_name: AxisName) -> None:
    """Refuses sums over devices, of which a mean would be too large by the number of devices."""
    kept_account_of = varying_axes(lax.axis_index(axis_name))
    leaves = [(path, g) for path, g in tree_leaves_with_path(grads) if is_inexact(g)]
    same = [keystr(path) or "the gradient" for path, g in leaves if kept_account_of - varying_axes(g)]
    if same:
        raise ValueError(
            f"The same on all devices of {axis_name!r}, and so already summed over them: {', '.join(same)}. In "
            "jax.shard_map the derivative with respect to a replicated value is such a sum. Differentiate with respect "
            f'to jax.lax.pcast(params, {axis_name!r}, to="varying").'
        )
