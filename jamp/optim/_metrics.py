"""What loss scaling did, for a logger."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jamp._calls import explains
from jamp.optim._find_loss_scale import find_loss_scaled_state
from jamp.optim._norm import global_norm
from jamp.scalers._base import unscale_tree


@explains("jamp.metrics(opt_state)")
def metrics(opt_state: optax.OptState, grads: Any = None) -> dict[str, jax.Array]:
    """What loss scaling did, for any logger: arrays, so that asking does not wait for the device.

    Args:
        opt_state: Any optax state with the state of one `jamp.loss_scaled` in it: see `jamp.loss_scale`. It is that
            which `tx.update` returned.
        grads: The scaled gradients that `tx.update` was given, if their norm is wanted.

    Returns:
        Arrays of shape (): `loss_scale` (float32), the scale of the next step; `grads_finite` (bool), whether the
        last step was done; `skipped` and `consecutive_skipped` (int32), steps skipped so far, and since the last one
        that was done. With `grads`, `grad_norm` (float32) too: the l2 norm of the true ones, by the scale that they
        were made with.

    Raises:
        ValueError: If there is no such state in `opt_state`, or more than one.

    Example:
        >>> import jamp, jax.numpy as jnp, optax
        >>> opt_state = jamp.loss_scaled(jamp.DynamicLossScale(8.0), inner=optax.sgd(0.5)).init(jnp.ones(3))
        >>> {name: value.item() for name, value in jamp.metrics(opt_state).items()}
        {'loss_scale': 8.0, 'grads_finite': True, 'skipped': 0, 'consecutive_skipped': 0}
    """
    state = find_loss_scaled_state(opt_state)
    values = {
        "loss_scale": state.loss_scale.loss_scale,
        "grads_finite": state.grads_finite,
        "skipped": state.skipped,
        "consecutive_skipped": state.consecutive_skipped,
    }
    if grads is not None:
        values["grad_norm"] = global_norm(unscale_tree(grads, state.scale_used))
    # Copies, because the next step may donate the state before the logger reads them.
    return {name: jnp.copy(value) for name, value in values.items()}
