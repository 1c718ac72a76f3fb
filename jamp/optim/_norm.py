"""The norm of gradients that are multiplied by a loss scale, and clipping by it."""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from jamp._calls import explains
from jamp._dtypes import short_repr
from jamp._tree import check_holds_numbers, is_number
from jamp.optim._exact_update import ExactUpdate
from jamp.optim._find_loss_scale import loss_scale
from jamp.scalers import LossScale
from jamp.scalers._base import is_inexact, is_traced, raise_tree
from jamp.transforms import full_precision

T = TypeVar("T")
_OF_UPDATES = (
    "Expected gradients, got updates of half-precision parameters: `jamp.optim.ExactUpdate`s, which hold differences "
    "of bits and no numbers. The norm of a step is that of what it changed:\n"
    "  jamp.global_norm(jax.tree.map(jnp.subtract, *map(jamp.cast_to_full, (new_params, params))))"
)


@explains("jamp.global_norm(grads, opt_state)")
def global_norm(grads: Any, opt_state: optax.OptState | LossScale | None = None) -> jax.Array:
    """The l2 norm of the true gradients, from those that `jamp.scaled_value_and_grad` gives.

    `optax.tree.norm` of these is too large by the loss scale (32,768 at first), and nothing fails. Here they are
    unscaled, and half-precision ones are raised to float32, before anything is squared. They are divided by a power of
    two as large as the largest of them, so that no square overflows or vanishes; nothing else changes by that.

    Args:
        grads: A tree of gradients. Leaves that are not floating do not count.
        opt_state: The state that `grads` were made with, before `tx.update`; or its loss scale. Left out, the gradients
            are true, as those of `jamp.value_and_grad` and `jax.grad` are.

    Returns:
        Array of shape (), float32 (float64 or complex leaves keep their precision). Not finite where a gradient is not,
        or where float32 cannot hold the norm.

    Raises:
        ValueError: If `opt_state` holds no loss scale, or more than one.
        TypeError: If `grads` are updates of half-precision parameters, which are no numbers.

    Example:
        >>> import jamp, jax.numpy as jnp, optax
        >>> tx = jamp.mixed_precision(optax.sgd(0.1), "O2:float16")
        >>> params = jnp.float32([3, 4])
        >>> opt_state = tx.init(params)
        >>> loss, grads = jamp.scaled_value_and_grad(lambda p: (p * p).sum() / 2, opt_state)(params)
        >>> float(optax.tree.norm(grads)), float(jamp.global_norm(grads, opt_state))
        (163840.0, 5.0)
    """
    unit, norm = _norm(grads, opt_state)
    return unit * norm


@full_precision
def _norm(grads: Any, opt_state: optax.OptState | LossScale | None) -> tuple[jax.Array, jax.Array]:
    """A power of two as large as the largest gradient, and the norm of the true gradients in units of it."""
    check_holds_numbers(grads, "The norm is that of gradients, a tree of arrays", "Write jamp.global_norm(grads).")
    if any(map(_is_update, jax.tree.leaves(grads, is_leaf=_is_update))):
        raise TypeError(_OF_UPDATES)
    leaves = [x for x in jax.tree.leaves(grads) if is_inexact(x)]
    true = raise_tree(leaves if opt_state is None else loss_scale(opt_state).unscale(leaves))
    if not true:
        return jnp.ones([], jnp.float32), jnp.zeros([], jnp.float32)
    sizes = [jnp.max(jnp.abs(lax.stop_gradient(x)), initial=0) for x in true]
    unit = _power_of_two(functools.reduce(jnp.maximum, sizes))
    return unit, optax.tree.norm([x / unit for x in true])


def _is_update(tree: Any) -> bool:
    return isinstance(tree, ExactUpdate)


def _check_max_norm(max_norm: Any) -> None:
    write = "Write jamp.clip_by_global_norm(grads, 1.0, opt_state)."
    if not is_number(max_norm) or isinstance(max_norm, bool | complex):
        raise TypeError(f"`max_norm` is {short_repr(max_norm)}: expected a positive number. {write}")
    if np.shape(max_norm) or (not is_traced(max_norm) and not max_norm > 0):
        raise ValueError(f"`max_norm` is {short_repr(max_norm)}: expected a positive number, such as 1.0. {write}")


def _power_of_two(size: jax.Array) -> jax.Array:
    """One near a magnitude, which can be divided by; 1 for what is not finite."""
    info = jnp.finfo(size.dtype)
    # Without mantissa bits, powers of two are left. The largest number would be rounded up to infinity.
    power = lax.reduce_precision(jnp.clip(size, info.tiny, info.max / 4), info.nexp, 0)
    return jnp.where(jnp.isfinite(size), power, 1)


@explains("jamp.clip_by_global_norm(grads, 1.0, opt_state)")
def clip_by_global_norm(grads: T, max_norm: ArrayLike, opt_state: optax.OptState | LossScale | None = None) -> T:
    """Clips gradients so that the norm of the true ones is at most `max_norm`. What was scaled stays scaled.

    For a train step that clips by hand, between `jamp.scaled_value_and_grad` and `tx.update`. Where the clip is a part
    of the optimizer, write it inside, where gradients are true: `jamp.mixed_precision(optax.chain(
    optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), policy)`.

    Args:
        grads: A tree of gradients. Leaves that are not floating stay as they are.
        max_norm: Largest norm of the true gradients, a positive number.
        opt_state: The state that `grads` were made with, before `tx.update`; or its loss scale. Left out, the gradients
            are true.

    Returns:
        A tree like `grads`, of the same dtypes. Gradients that are not finite stay so, and `tx.update` skips the step.

    Raises:
        ValueError: If `max_norm` is not positive, or `opt_state` holds no loss scale, or more than one.

    Example:
        >>> import jamp, jax.numpy as jnp
        >>> scaled = jnp.float32([3, 4]) * 1024
        >>> jamp.clip_by_global_norm(scaled, 2.5, jamp.StaticLossScale(1024.0)) / 1024
        Array([1.5, 2. ], dtype=float32)
    """
    _check_max_norm(max_norm)
    unit, norm = _norm(grads, opt_state)
    # Not `where(norm > max_norm, ...)`: a NaN has to reach all gradients, or a part of the step would be done.
    small = unit * norm <= max_norm
    factor = max_norm / norm + 0 * norm

    def clipped(x: Any) -> Any:
        if not is_inexact(x):
            return x
        return jnp.where(small, x, jnp.asarray(x) / unit * factor).astype(jnp.result_type(x))

    return full_precision(jax.tree.map)(clipped, grads)
