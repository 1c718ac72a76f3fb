"""Training that goes on and leads nowhere: steps skipped without end, parameters without masters, nested scaling."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from jamp._warnings import warn_user
from jamp.optim._half_params import is_half
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

# The count that was asked for last and had not arrived, one number. Whoever asks right after a step was dispatched, as
# loggers do, asks before there is anything to read. Without this, such a run is told only to those who wait. States are
# no place for it: their structure is that of checkpoints, and asking returns none.
_awaited: jax.Array | None = None
_told = False  # After that nothing is awaited: what a run has left would be told to the next one, which may be right.


def warn_if_stuck(scaler: LossScale, consecutive_skipped: jax.Array) -> None:
    """Warns of a long run of skipped steps, if that can be told without waiting for the device.

    Counts that have not arrived yet are looked at when somebody asks for the next one.

    A callback in the step could tell everybody. But JAX runs a program with callbacks in it at 20 times the overhead
    (234 instead of 12 microseconds on a CPU, jax 0.10), neither exports it nor keeps it in its compilation cache, and
    under `vmap` calls the host at every step.
    """
    global _told, _awaited
    count, scale = consecutive_skipped, scaler.loss_scale
    if is_traced(count) or is_traced(scale):
        return
    lowest = scaler.min_loss_scale if isinstance(scaler, DynamicLossScale) else None
    lowest = np.inf if lowest is None else lowest
    before = _arrived()
    if _is_at_hand(count) and _is_at_hand(scale):
        stuck = _skipped_at(lowest, np.asarray(count), np.asarray(scale)) >= _STUCK_AFTER  # Newer than the one before.
    else:
        stuck = before >= _STUCK_AFTER
        _await(lowest, count, scale)
    if stuck:
        _told, _awaited = True, None
        warn_user(_STUCK)


def _skipped_at(lowest: Any, count: Any, scale: Any) -> Any:
    """The steps in a row that were skipped, if the last was at the lowest scale, and of all replicas the fewest."""
    return (count * (scale <= lowest).astype(count.dtype)).min()


_skipped_later = jax.jit(_skipped_at)


def _await(lowest: float, count: Any, scale: Any) -> None:
    """Keeps what is asked for, in an array of its own, because the next step may take those of the state."""
    global _awaited
    if _told or _awaited is not None or not (_is_here(count) and _is_here(scale)) or count.devices() != scale.devices():
        return
    with jax.ensure_compile_time_eval():  # Nothing of it may go into a program that is being traced.
        _awaited = _skipped_later(lowest, count, scale)


def _arrived() -> int:
    """The count that was asked for before, once it has arrived; 0 until then, and where there is none."""
    global _awaited
    if _awaited is None or not _is_at_hand(_awaited):
        return 0
    arrived, _awaited = _awaited, None
    try:
        return int(arrived)
    except jax.errors.JaxRuntimeError:  # Of the step, whose other results tell it.
        return 0


def _is_at_hand(x: Any) -> bool:
    """Whether an array can be read now, without waiting for the steps that have been dispatched."""
    return x.is_ready() if _is_here(x) else isinstance(x, np.ndarray | np.generic)


def _is_here(x: Any) -> bool:
    """Whether an array is one of JAX that this process can read, sooner or later."""
    return isinstance(x, jax.Array) and not is_traced(x) and x.is_fully_addressable and not x.is_deleted()


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


def warn_of_half_params(params: Any, policy: Policy) -> None:
    """Warns of parameters in half precision where the policy keeps them in float32, and nothing keeps small steps."""
    half = [(keystr(path) or "the only leaf", leaf) for path, leaf in tree_leaves_with_path(params) if is_half(leaf)]
    if half:
        paths = ", ".join(path for path, _ in half[:3]) + (f" and {len(half) - 3} more" if len(half) > 3 else "")
        warn_user(
            f"The policy {str(policy)!r} has {policy.param_dtype} parameters, and these are half: {paths}. They have "
            "no masters, so that a step that is small beside a weight is rounded away, and leaves it as it is. Write\n"
            f"    params = jamp.get_policy({str(policy)!r}).cast_to_param(params)\n"
            "before `tx.init(params)`, which `jamp.cast_fn` casts where they are used; or take "
            f"'O3:{half[0][1].dtype}', which keeps float32 masters of half parameters."
        )


def check_not_nested(inner_state: optax.OptState, is_loss_scaled: Any) -> None:
    """Refuses an optimizer with loss scaling inside of another."""
    leaves = tree_leaves_with_path(inner_state, is_leaf=is_loss_scaled)
    if nested := [keystr(path) for path, leaf in leaves if is_loss_scaled(leaf)]:
        raise ValueError(
            f"This optimizer scales losses, and so does one inside of it (inner_state{nested[0]}): gradients would be "
            "unscaled twice. Wrap the plain optimizer once: jamp.mixed_precision(optax.adamw(1e-3), policy)."
        )
