"""An optimizer with what a policy needs: loss scaling, the skip, master weights."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from jamp._calls import called, explains
from jamp._dtypes import HALF_DTYPES
from jamp._tree import AxisName, nodes_of
from jamp.optim._abort import OnAbort
from jamp.optim._inner import as_transformation
from jamp.optim._loss_scaled import LossScaledState, loss_scaled_for
from jamp.optim._master_weights import MasterWeightsState, check_storage, master_weights
from jamp.optim._misuse import warn_of_full_params, warn_of_half_params
from jamp.optim._stochastic_rounding import StochasticRoundingState
from jamp.optim._surroundings import sets_to_zero
from jamp.policy import Policy, get_policy
from jamp.scalers import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from jamp.scalers._base import check_is_loss_scale

# What other libraries, and people, call the arguments.
SETTINGS_ELSEWHERE = {
    **called(
        policy=("level", "opt_level", "dtype", "half_dtype", "compute_dtype", "precision"),
        loss_scale=("scaler", "grad_scaler", "loss_scaler", "loss_scaling", "scale", "dynamic_scale", "init_scale"),
        axis_name=("axis",),
    ),
    "master_weights": "A policy such as 'O3:bfloat16' brings master weights.",
}
_ELSEWHERE = SETTINGS_ELSEWHERE | called(inner=("optimizer", "opt", "tx", "inner_optimizer"))


@explains("jamp.mixed_precision(optax.adam(1e-3), 'O2:float16')", _ELSEWHERE)
def mixed_precision(
    inner: optax.GradientTransformation | optax.MultiSteps,
    policy: str | Policy,
    *,
    loss_scale: LossScale | ArrayLike | Literal["dynamic"] | None = None,
    storage: Literal["float32", "split"] = "float32",
    axis_name: AxisName | None = None,
    abort_after: int | None = None,
    on_abort: OnAbort = "raise",
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer in what a policy needs, so that one train step serves every policy.

    | policy | example | loss scale | master weights |
    |---|---|---|---|
    | computes in float32 | `"O0"` | `NoOpLossScale()` | no |
    | computes in bfloat16 | `"O2:bfloat16"` | `NoOpLossScale()` | no |
    | computes in float16 | `"O2:float16"` | `DynamicLossScale()` | no |
    | has bfloat16 parameters | `"O3:bfloat16"` | `NoOpLossScale()` | yes |
    | has float16 parameters | `"O3:float16"` | `DynamicLossScale()` | yes |

    Half-precision parameters come from `policy.cast_to_param(params)`, or from `jamp.half_params`, which keeps norms in
    float32. bfloat16 has the exponents of float32, so its gradients need no scale. With every policy a step whose
    gradients are not finite is skipped, and `jamp.scaled_value_and_grad` and `jamp.metrics` find what they need in the
    state.

    Args:
        inner: Any optax transformation, or an `optax.MultiSteps`; clipping belongs inside of it. It sees true float32
            gradients, and float32 parameters.
        policy: A policy, or its name.
        loss_scale: A loss scale in place of the one in the table: a scaler, a number for a static scale, or "dynamic"
            for `DynamicLossScale()`.
        storage: How master weights are stored, for policies that have them: see `jamp.master_weights`.
        axis_name: Mapped axes over which devices agree to skip: see `jamp.loss_scaled`.
        abort_after: What number of skipped steps in a row calls `on_abort`: see `jamp.loss_scaled`.
        on_abort: "raise", "warn", or a function of a `NonFiniteGradientsError`.

    Returns:
        An optax transformation. Its state is a `LossScaledState`; with master weights, around a `MasterWeightsState`.

    Raises:
        TypeError: If `inner` is no optax transformation, or `loss_scale` no loss scale.
        ValueError: If `policy` is not a policy, or `storage` not a storage or none for its parameters; if `abort_after`
            or `on_abort` is impossible.

    Example:
        >>> import jamp, jax.numpy as jnp, optax
        >>> tx = jamp.mixed_precision(optax.adam(1e-3), policy="O2:float16")
        >>> jamp.loss_scale(tx.init(jnp.ones(2))).loss_scale
        Array(32768., dtype=float32)
    """
    if isinstance(inner, Policy) or (isinstance(inner, str) and not isinstance(policy, str | Policy)):
        raise TypeError("The optimizer comes first: write jamp.mixed_precision(optax.adamw(1e-3), 'O2:float16').")
    as_transformation(inner, "jamp.mixed_precision(optax.adam(1e-3), 'O2:float16')")
    policy = get_policy(policy)
    check_storage(storage)
    if policy.param_dtype in HALF_DTYPES:
        if storage == "split" and policy.param_dtype == jnp.float16:
            raise ValueError(
                f"storage='split' holds masters of bfloat16 parameters, and the policy is {str(policy)!r}. Write "
                "storage='float32', or take a bfloat16 policy."
            )
        inner = master_weights(inner, storage)
    scale, chosen_by = _scale_for(policy, loss_scale)
    tx = loss_scaled_for(chosen_by, scale, inner, axis_name, abort_after, on_abort)
    return _for_policy(policy, tx, freezes=sets_to_zero(inner.update))


def _scale_for(policy: Policy, loss_scale: Any) -> tuple[Any, Policy | None]:
    """The scaler, and the policy if it is the policy that chose it."""
    if loss_scale is None:
        return (DynamicLossScale() if policy.compute_dtype == jnp.float16 else NoOpLossScale()), policy
    if isinstance(loss_scale, str):
        if loss_scale != "dynamic":
            raise ValueError(
                f"`loss_scale` is {loss_scale!r}: expected 'dynamic', a number, a loss scale such as "
                "jamp.DynamicLossScale.preset('pytorch'), or None for that of the policy."
            )
        return DynamicLossScale(), None
    if isinstance(loss_scale, (int, float, np.ndarray, np.number, jax.Array)) and not isinstance(loss_scale, bool):
        loss_scale = StaticLossScale(loss_scale)
    check_is_loss_scale(loss_scale)
    return loss_scale, None


def _for_policy(
    policy: Policy, tx: optax.GradientTransformationExtraArgs, freezes: bool
) -> optax.GradientTransformationExtraArgs:
    """The optimizer, which says so when parameters or a state are those of another policy.

    Args:
        policy: The policy.
        tx: The optimizer.
        freezes: Whether it leaves some parameters as they are, which may be half then.
    """
    has_masters = policy.param_dtype in HALF_DTYPES
    update: Callable[..., tuple[Any, Any]] = tx.update

    def init_fn(params: optax.Params) -> optax.OptState:
        state = tx.init(params)
        if not (has_masters or freezes or _keeps_small_steps(state)):
            warn_of_half_params(params, policy)
        return state

    def update_fn(
        updates: optax.Updates, state: Any = None, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        if has_masters and params is not None:
            warn_of_full_params(params, policy)
        if isinstance(state, LossScaledState) and _has_masters(state) != has_masters and not _makes(tx, state, params):
            raise TypeError(
                f"This state {'lacks' if has_masters else 'has'} master weights, and the optimizer was made for "
                f"{str(policy)!r}, which {'has' if has_masters else 'lacks'} them: it is the state of another policy. "
                "Make a state with `tx.init(params)`, or bring the old one over: "
                "jamp.from_optax(tx, params, *jamp.to_optax(old_params, old_state))."
            )
        return update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


def _has_masters(state: LossScaledState) -> bool:
    return isinstance(state.inner_state, MasterWeightsState)


def _keeps_small_steps(state: optax.OptState) -> bool:
    """Whether half parameters learn here: the caller has put `master_weights` inside, or `stochastic_rounding`."""
    return bool(nodes_of(state, MasterWeightsState, StochasticRoundingState))


def _makes(tx: optax.GradientTransformation, state: LossScaledState, params: optax.Params | None) -> bool:
    """Whether an optimizer makes such states: the caller may have put `master_weights` inside by hand."""
    return params is not None and _has_masters(jax.eval_shape(tx.init, params)) == _has_masters(state)
