"""Training that goes on and leads nowhere: steps skipped without end, parameters without masters, nested scaling."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from jamp._warnings import warn_user
from jamp.policy import Policy
from jamp.scalers import DynamicLossScale, LossScale
from jamp.scalers._base import is_traced

_STUCK = (
    "A hundred steps in a row or more were skipped, the last of them at the lowest loss scale: no scale cures these "
    "gradients. jamp.first_nonfinite names the operation that the first infinity or NaN comes from:\n"
    "    grad_fn = jamp.scaled_value_and_grad(loss_fn, opt_state)\n"
    "    print(jamp.first_nonfinite(grad_fn, params, batch))\n"
    "To stop by itself, let training say it: jamp.mixed_precision(…, abort_after=100)."
)
_STUCK_AFTER = 100


def warn_if_stuck(scaler: LossScale, consecutive_skipped: jax.Array) -> None:
    """Warns of a long run of skipped steps, if that can be told without waiting for the device.

    A callback in the step could tell everybody. But JAX runs a program with callbacks in it at 20 times the overhead
    (234 instead of 12 microseconds on a CPU, jax 0.10), neither exports it nor keeps it in its compilation cache, and
    under `vmap` calls the host at every step.
    """
    scale = scaler.loss_scale
    if (
        is_traced(consecutive_skipped)
        or is_traced(scale)
        or not (_is_at_hand(consecutive_skipped) and _is_at_hand(scale))
    ):
        return
    lowest = scaler.min_loss_scale if isinstance(scaler, DynamicLossScale) else None
    at_lowest = lowest is None or np.asarray(scale).max() <= lowest
    if at_lowest and np.asarray(consecutive_skipped).min() >= _STUCK_AFTER:
        warn_user(_STUCK)


def _is_at_hand(x: Any) -> bool:
    """Whether an array can be read now, without waiting for the steps that have been dispatched."""
    if is_traced(x) or not isinstance(x, jax.Array):
        return isinstance(x, np.ndarray | np.generic)
    ready = x.is_fully_addressable and not x.is_deleted() and x.is_ready()  # pyright: ignore[reportAttributeAccessIssue]
    return bool(ready)


def warn_of_full_params(params: Any, policy: Policy) -> None:
    """Warns of float32 parameters where the policy keeps them in half precision."""
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(params) if hasattr(leaf, "dtype")}
    dtypes = {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}
    if dtypes and policy.param_dtype not in dtypes:
        have = " and ".join(sorted(dtype.name for dtype in dtypes))
        warn_user(
            f"The policy {str(policy)!r} has {policy.param_dtype} parameters, and these are {have}: they take the "
            f"memory of {have}, and have no masters. Write\n"
            f"    params = jamp.half_params(params, '{policy.param_dtype}')\n"
            "before `tx.init(params)`, or take 'O2', which keeps parameters in float32."
        )


def check_not_nested(inner_state: optax.OptState, is_loss_scaled: Any) -> None:
    """Refuses an optimizer with loss scaling inside of another."""
    leaves = tree_leaves_with_path(inner_state, is_leaf=is_loss_scaled)
    if nested := [keystr(path) for path, leaf in leaves if is_loss_scaled(leaf)]:
        raise ValueError(
            f"This optimizer scales losses, and so does one inside of it (inner_state{nested[0]}): gradients would be "
            "unscaled twice. Wrap the plain optimizer once: jamp.mixed_precision(optax.adamw(1e-3), policy)."
        )
