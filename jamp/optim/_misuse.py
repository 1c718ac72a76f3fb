"""Train steps that run and train wrongly: what `loss_scaled` looks for while a step is traced, and what it says."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from jamp._compat import jit_tracer, mapped_axes
from jamp._tree import AxisName
from jamp._warnings import warn_user
from jamp.optim._provenance import Provenance, provenance
from jamp.policy import Policy
from jamp.scalers import DynamicLossScale, LossScale, NoOpLossScale
from jamp.scalers._base import is_traced

_DIFFERENTIATE = (
    "    loss, grads = jamp.scaled_value_and_grad(loss_fn, opt_state)(params, batch)\n"
    "    updates, opt_state = tx.update(grads, opt_state, params)\n"
)

_NOT_SCALED = (
    "`tx.update` divides these gradients by the loss scale in `opt_state`, and they were never multiplied by it: steps "
    "are too small by that factor (32,768 at first), or wrong by what the scale has changed since. Differentiate "
    "inside of the step, with the state that goes to `tx.update`:\n" + _DIFFERENTIATE
    + "For Flax NNX add transform=nnx.value_and_grad, for Equinox transform=eqx.filter_value_and_grad."
)  # fmt: skip

_SCALED_BEFORE = (
    "These gradients are multiplied by the loss scale of before this loop, and `tx.update` divides them by the one "
    "that the loop carries: after two overflows steps are 4 times too large. Differentiate in the body of the loop, "
    "with the state that goes to `tx.update`:\n" + _DIFFERENTIATE.rstrip()
)

_UNSCALED_TWICE = (
    "These gradients are unscaled already, and `tx.update` divides them by the loss scale once more: steps are too "
    "small by that factor. jamp.value_and_grad is for training without jamp's optimizers. Here write\n"
    + _DIFFERENTIATE
    + "and leave it to `tx.update` to unscale."
)

_NOT_AVERAGED = (
    "On the mapped axis {axis!r} each device has gradients, and so overflows, of its own: their loss scales will "
    "drift apart, and some will skip steps that others do. Average the gradients before `tx.update`:\n"
    "    grads = jamp.average_gradients(grads, {axis!r})\n"
    "or let the devices agree: jamp.mixed_precision(inner, policy, axis_name={axis!r})."
)

_OTHER_POLICY = (
    "These gradients went through float16 in a `cast_fn`, and the optimizer was made for {policy!r}, which has no loss "
    "scale: small gradients become zero. Write the policy once:\n"
    "    amp = jamp.MixedPrecision('O2:float16', optimizer)\n"
    "    apply_fn, tx = amp.cast_fn(model.apply), amp.tx\n"
    "Without a scale on purpose, say so: jamp.mixed_precision(…, loss_scale=jamp.NoOpLossScale())."
)

_STUCK = (
    "A hundred steps in a row or more were skipped, the last of them at the lowest loss scale: no scale cures these "
    "gradients. jamp.first_nonfinite names the operation that the first infinity or NaN comes from:\n"
    "    grad_fn = jamp.scaled_value_and_grad(loss_fn, opt_state)\n"
    "    print(jamp.first_nonfinite(grad_fn, params, batch))\n"
    "To stop by itself, let training say it: jamp.mixed_precision(…, abort_after=100)."
)
_STUCK_AFTER = 100

_OTHER_SCALER = (
    "The optimizer was made with a {made}, and its state has none: it comes from a run without loss scaling, "
    "and small float16 gradients become zero. Give it one:\n"
    "    opt_state = jamp.set_loss_scale(opt_state, jamp.DynamicLossScale())"
)


def warn_of_gradients(
    grads: Any, params: Any, scaler: LossScale, made_with: LossScale, axis_name: AxisName | None, policy: Policy | None
) -> None:
    """Warns of gradients that were not made for this optimizer, as far as their trace tells.

    Args:
        grads: What `tx.update` got.
        params: The parameters, or None.
        scaler: The loss scale in the state.
        made_with: The loss scale that the optimizer was made with.
        axis_name: The axes over which devices agree.
        policy: The policy that chose `made_with`; None where the caller chose it.
    """
    scales = not isinstance(scaler, NoOpLossScale)
    if not scales and not isinstance(made_with, NoOpLossScale):
        warn_user(_OTHER_SCALER.format(made=type(made_with).__name__))
        return
    if not (scales or policy) or not any(_is_traced_here(x) for x in jax.tree.leaves(grads)):
        return
    found = provenance(grads, params, scaler.loss_scale)
    if scales and found.unscaled:
        warn_user(_UNSCALED_TWICE)
    elif _is_dynamic(scaler) and found.differentiated and not found.scaled:
        warn_user(_NOT_SCALED)
    elif _is_dynamic(scaler) and found.scaled_before:
        warn_user(_SCALED_BEFORE)
    if _is_dynamic(scaler) and (axis := _disagreeing_axis(grads, found, axis_name)):
        warn_user(_NOT_AVERAGED.format(axis=axis))
    if policy and not scales and "float16" in found.cast_dtypes:
        warn_user(_OTHER_POLICY.format(policy=str(policy)))


def _is_dynamic(scaler: LossScale) -> bool:
    """Whether the scale of this step is known to the state alone: a scaler in whose state the scale is traced."""
    return isinstance(scaler, DynamicLossScale) and _is_traced_here(scaler.loss_scale)


def _is_traced_here(x: Any) -> bool:
    return is_traced(jit_tracer(x))


def _disagreeing_axis(grads: Any, found: Provenance, axis_name: AxisName | None) -> str | None:
    """The mapped axis over which gradients of this trace were differentiated, and nobody averaged them."""
    if axis_name is not None or not found.differentiated or found.averaged:
        return None
    batched = any(jit_tracer(x) is not x for x in jax.tree.leaves(grads))  # By `vmap`: an ensemble, not devices.
    axes = mapped_axes()
    return axes[0] if axes and not batched else None


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
