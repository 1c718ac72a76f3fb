"""Loss scaling as an optax transformation: unscale, check, run the optimizer or skip the step, adapt the scale."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike

from jamp._calls import called, explains
from jamp._compat import varying_axes
from jamp._tree import AxisName, all_finite, check_mapped
from jamp.optim._abort import OnAbort, make_watch
from jamp.optim._half_params import is_half
from jamp.optim._inner import as_transformation, keep_dtype, reshard, strongly_typed
from jamp.optim._inputs import check_averaged, transformation
from jamp.optim._misuse import check_not_nested, warn_if_stuck
from jamp.optim._surroundings import check_surroundings
from jamp.optim._wrong_gradients import warn_of_gradients
from jamp.policy import Policy
from jamp.scalers import LossScale, NoOpLossScale
from jamp.scalers._base import as_flag, check_is_loss_scale, raise_tree
from jamp.transforms import full_precision


class LossScaledState(NamedTuple):
    """State of `loss_scaled`.

    Attributes:
        loss_scale: The loss scale of the next step.
        inner_state: State of the inner transformation; empty without one.
        grads_finite: Whether the gradients of the last step were finite, and so the step was done. Shape (), bool.
        scale_used: What the gradients of the last step were divided by. Shape (), float32.
        skipped: Steps skipped so far. Shape (), int32.
        consecutive_skipped: Steps skipped since the last one that was done. Shape (), int32.
    """

    loss_scale: LossScale
    inner_state: optax.OptState
    grads_finite: jax.Array
    scale_used: jax.Array
    skipped: jax.Array
    consecutive_skipped: jax.Array


@explains(
    "jamp.loss_scaled(jamp.DynamicLossScale(), inner=optax.adam(1e-3))",
    called(
        loss_scale=("scaler", "grad_scaler", "loss_scaler", "scale"),
        inner=("optimizer", "opt", "tx", "inner_optimizer"),
    ),
)
def loss_scaled(
    loss_scale: LossScale,
    inner: optax.GradientTransformation | optax.MultiSteps | None = None,
    *,
    axis_name: AxisName | None = None,
    abort_after: int | None = None,
    on_abort: OnAbort = "raise",
) -> optax.GradientTransformationExtraArgs:
    """Takes scaled gradients, as `jamp.scaled_value_and_grad` makes them, and steps only if they are finite.

    Each update casts the gradients to float32, divides them by the scale they were made with, checks them, and adapts
    the scale. With `inner`, a step whose gradients are not finite leaves everything as it is: parameters, the state of
    `inner`, its step counts, and its schedules. Clipping and accumulation belong inside, where gradients are true:
    `loss_scaled(scale, optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))` and
    `loss_scaled(scale, optax.MultiSteps(optax.adam(1e-3), 4))`.

    Without `inner` it is the first link of an `optax.chain`. The links after it then see a gradient of zero on a
    skipped step, which is no update for `optax.sgd`, but moves momenta, decays weights, and counts as a step. So
    prefer the form with `inner` for anything stateful.

    `update` takes one argument more, `grads_finite`: a boolean that has to be true as well for the step to be done.
    With several optimizers, give each of them the `&` of all flags. The other extra arguments go to `inner`.

    Not around it: `optax.MultiSteps(loss_scaled(…), k)` averages scaled gradients over a changing scale, and optax
    clears its accumulator with a product (`0 * inf` is NaN), so that one overflow poisons it for ever. That is an error
    here. `optax.apply_if_finite(loss_scaled(…))` hides the overflows to which the scale ought to react.

    Args:
        loss_scale: A loss scale; `jamp.NoOpLossScale()` for the skip alone, as one wants it in bfloat16.
        inner: Any optax transformation, or an `optax.MultiSteps`.
        axis_name: Mapped axes (`jax.shard_map`, `jax.pmap`) over which to agree: all devices skip together. Under
            `jax.jit` with sharded arrays they do without it.
        abort_after: What number of skipped steps in a row calls `on_abort`. None for never: `jamp.metrics` tells.
        on_abort: "raise" for a `NonFiniteGradientsError` that names the first bad gradient, which arrives from jitted
            code as a `jax.errors.JaxRuntimeError` with its text; "warn" for one `jamp.PrecisionWarning`; or a function,
            called with that error at this skip and every further one, in `jax.shard_map` and `jax.pmap` once for each
            device.

    Returns:
        An optax transformation whose state is a `LossScaledState`. Updates are of the dtype in which `inner` returns
        them for float32 gradients. The arrays in the state of `inner` keep the dtypes they were made with.

    Raises:
        TypeError: If `loss_scale` is no loss scale, or `inner` no optax transformation.
        ValueError: If `abort_after` or `on_abort` is impossible.

    Example:
        >>> import jamp, jax.numpy as jnp, optax
        >>> tx = jamp.loss_scaled(jamp.DynamicLossScale(2.0**15), inner=optax.adam(1e-3))
        >>> params = jnp.ones(2)
        >>> opt_state = tx.init(params)
        >>> updates, opt_state = tx.update(jnp.array([1.0, jnp.inf]), opt_state, params)
        >>> updates, float(opt_state.loss_scale.loss_scale), int(opt_state.skipped)
        (Array([0., 0.], dtype=float32), 16384.0, 1)
    """
    return loss_scaled_for(None, loss_scale, inner, axis_name, abort_after, on_abort)


def loss_scaled_for(
    policy: Policy | None,
    loss_scale: LossScale,
    inner: optax.GradientTransformation | optax.MultiSteps | None,
    axis_name: AxisName | None,
    abort_after: int | None,
    on_abort: OnAbort,
) -> optax.GradientTransformationExtraArgs:
    """`loss_scaled` with a scaler that a policy chose, so that another policy of the model can be told."""
    check_is_loss_scale(loss_scale)
    if inner is not None:
        inner = as_transformation(inner, "loss_scaled(scale, inner=optax.adam(1e-3))")
    watch = make_watch(abort_after, on_abort, axis_name)

    def init_fn(params: optax.Params) -> LossScaledState:
        inner_state = optax.EmptyState() if inner is None else strongly_typed(inner.init(params))
        check_not_nested(inner_state, _is_loss_scaled)
        # Copies, because a train step may donate the state and so delete its arrays, which the caller owns.
        scaler = jax.tree.map(jnp.copy, loss_scale)
        used = jnp.copy(loss_scale.loss_scale)
        return LossScaledState(scaler, inner_state, jnp.array(True), used, _zero_count(), _zero_count())

    @full_precision  # Whatever the policy of a `cast_fn` around the step.
    def update_fn(
        updates: optax.Updates,
        state: LossScaledState,
        params: optax.Params | None = None,
        *,
        grads_finite: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LossScaledState]:
        scaler = state.loss_scale
        if axis_name is not None:
            check_mapped(axis_name)
        check_surroundings(scaler, _is_loss_scaled)
        warn_if_stuck(scaler, state.consecutive_skipped)
        warn_of_gradients(updates, params, scaler, loss_scale, axis_name, policy, grads_finite is not None)
        # Computed anew by each reader, because XLA fuses it into them: unscaled gradients are never stored.
        true_grads = partial(_unscale, scaler, updates)
        finite = _finite_everywhere(updates if _cannot_amplify(scaler) else true_grads(), grads_finite, axis_name)
        if inner is None:
            new_updates, inner_state = _or_zeros(finite, true_grads()), state.inner_state
        else:
            step = partial(_step, inner, true_grads, state.inner_state, params, extra_args)
            try:
                new_updates, inner_state = _one_of(finite, step, partial(_skip, step, state.inner_state))
            except TypeError as error:
                error.add_note(_advice(finite, params, axis_name))
                raise
            check_averaged(updates, new_updates, params)
        skipped = jnp.where(finite, state.skipped, optax.safe_increment(state.skipped))
        consecutive = jnp.where(finite, 0, optax.safe_increment(state.consecutive_skipped))
        watch(true_grads, consecutive, scaler.loss_scale)
        new_scaler = scaler.adjust(finite)
        return new_updates, LossScaledState(new_scaler, inner_state, finite, scaler.loss_scale, skipped, consecutive)

    return transformation(LossScaledState, "loss_scaled", init_fn, update_fn, needs_params=inner is not None)


def _is_loss_scaled(x: Any) -> bool:
    return isinstance(x, LossScaledState)


def _finite_everywhere(grads: optax.Updates, grads_finite: ArrayLike | None, axis_name: AxisName | None) -> jax.Array:
    finite = all_finite(grads)
    if grads_finite is not None:
        finite = finite & as_flag(grads_finite)
    # As in `all_finite`, but with the caller's flag, on which devices may differ as well.
    return finite if axis_name is None else lax.pmin(finite.astype(jnp.int32), axis_name) == 1


def _cannot_amplify(scaler: LossScale) -> bool:
    """Whether finite gradients stay finite when they are unscaled, so that they can be checked without."""
    return isinstance(scaler, NoOpLossScale) or getattr(scaler, "min_loss_scale", 0.0) >= 1


def _unscale(scaler: LossScale, updates: optax.Updates) -> optax.Updates:
    return raise_tree(scaler.unscale(updates))


def _advice(finite: jax.Array, params: optax.Params | None, axis_name: AxisName | None) -> str:
    """What most likely made types differ between doing a step and skipping it."""
    if axis_name is None and (axes := sorted(varying_axes(finite))):
        return (
            f"The gradients differ between the devices of the mesh axes {axes}, so that some would step and others "
            "skip. Average them (jamp.average_gradients), and let the devices agree: "
            f"loss_scaled(…, axis_name={axes[0]!r})."
        )
    if any(map(is_half, jax.tree.leaves(params))):
        return (
            "The optimizer made its state for half-precision parameters, and gets float32 gradients. Let it work in "
            "float32: loss_scaled(scale, master_weights(inner)), or jamp.mixed_precision(inner, 'O3')."
        )
    return ""


def _step(
    inner: optax.GradientTransformationExtraArgs,
    true_grads: Callable[[], optax.Updates],
    inner_state: optax.OptState,
    params: optax.Params | None,
    extra_args: dict[str, Any],
) -> tuple[optax.Updates, optax.OptState]:
    updates, new_state = inner.update(true_grads(), inner_state, params, **extra_args)
    return strongly_typed(updates), jax.tree.map(keep_dtype, new_state, inner_state)


def _one_of(finite: jax.Array, step: Callable[[], tuple], skip: Callable[[], tuple]) -> tuple[Any, Any]:
    """A step, or what skips it. Outside of `jax.jit` JAX compiles a branch in each call, for up to two seconds."""
    if isinstance(finite, Tracer):
        return lax.cond(finite, step, skip)
    jax.eval_shape(lambda finite: lax.cond(finite, step, skip), finite)  # Raises where the two differ.
    return step() if finite else skip()


def _skip(step: Callable[[], tuple], inner_state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
    # Zeros of the shapes that `inner` returns, which need not be those of the gradients.
    return jax.tree.map(_zeros, jax.eval_shape(lambda: step()[0])), inner_state


def _or_zeros(finite: jax.Array, grads: optax.Updates) -> optax.Updates:
    return jax.tree.map(lambda g: jnp.where(finite, g, jnp.zeros_like(g)), grads)


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    # Unlike `zeros`, this keeps the axes over which a value varies in `shard_map`; explicit shardings it loses in 0.12.
    return reshard(jnp.zeros_like(x), x.sharding)


def _zero_count() -> jax.Array:
    return jnp.zeros([], jnp.int32)
