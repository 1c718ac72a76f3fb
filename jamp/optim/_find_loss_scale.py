"""The loss scale inside an optax state: find it, set it, differentiate with it."""

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_leaves_with_path
from jax.typing import ArrayLike

from jamp._calls import called, explains
from jamp._dtypes import short_repr
from jamp._tree import nodes_of
from jamp.optim._loss_scaled import LossScaledState
from jamp.optim._misuse import warn_if_stuck
from jamp.scalers import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale, _grad

P = ParamSpec("P")
T = TypeVar("T")


@explains("jamp.loss_scale(opt_state)")
def loss_scale(opt_state: optax.OptState | LossScale) -> DynamicLossScale | StaticLossScale | NoOpLossScale:
    """The loss scale that is now in force.

    Args:
        opt_state: Any optax state with the state of one `jamp.loss_scaled` in it, however deep (in `optax.chain`,
            `optax.masked`, `optax.partition`, `optax.inject_hyperparams`, …), or a loss scale itself.

    Returns:
        The loss scale.

    Raises:
        ValueError: If there is none in the state, or more than one. The message tells where they are.

    Example:
        >>> import jamp, jax.numpy as jnp, optax
        >>> tx = optax.chain(jamp.loss_scaled(jamp.DynamicLossScale(2.0**15)), optax.sgd(1e-2))
        >>> float(jamp.loss_scale(tx.init(jnp.ones(3))).loss_scale)
        32768.0
    """
    found = opt_state if isinstance(opt_state, LossScale) else find_loss_scaled_state(opt_state).loss_scale
    return cast("DynamicLossScale | StaticLossScale | NoOpLossScale", found)  # Or one of the user's own.


@explains("jamp.scale_value(opt_state)")
def scale_value(opt_state: optax.OptState | LossScale) -> jax.Array:
    """The number that losses are multiplied by now, for a log or a condition.

    Args:
        opt_state: Any optax state with one loss scale in it: see `jamp.loss_scale`.

    Returns:
        float32 array of shape (). A copy, because the next step may donate the state before anybody reads it.

    Raises:
        ValueError: If there is no loss scale in the state, or more than one.

    Example:
        >>> import jamp, jax.numpy as jnp, optax
        >>> tx = jamp.mixed_precision(optax.adam(1e-3), "O2:float16")
        >>> float(jamp.scale_value(tx.init(jnp.ones(3))))
        32768.0
    """
    return jnp.copy(loss_scale(opt_state).loss_scale)


@explains("jamp.set_loss_scale(opt_state, 1024.0)", called(opt_state=("state",), loss_scale=("scale", "scaler")))
def set_loss_scale(opt_state: optax.OptState, loss_scale: LossScale | ArrayLike) -> optax.OptState:
    """Sets the loss scale by hand; everything else in the state stays as it is.

    Args:
        opt_state: Any optax state with one loss scale in it: see `jamp.loss_scale`.
        loss_scale: The new scale, a positive number or scalar array within the limits of the scaler; or a whole scaler,
            for instance one from `jamp.DynamicLossScale.from_state_dict`.

    Returns:
        The state with that scale.

    Raises:
        ValueError: If there is no loss scale in the state, or more than one, or if the scale is impossible.
        TypeError: If the scaler in the state has no scale to set.

    Example:
        >>> import jamp, jax.numpy as jnp, optax
        >>> tx = optax.chain(jamp.loss_scaled(jamp.DynamicLossScale(2.0**15)), optax.sgd(1e-2))
        >>> opt_state = jamp.set_loss_scale(tx.init(jnp.ones(3)), 1024.0)
        >>> jamp.metrics(opt_state)["loss_scale"]
        Array(1024., dtype=float32)
    """
    if not nodes_of(opt_state, LossScaledState) and nodes_of(loss_scale, LossScaledState):
        raise TypeError("The state comes first: write `jamp.set_loss_scale(opt_state, loss_scale)`.")
    old = find_loss_scaled_state(opt_state).loss_scale
    if isinstance(loss_scale, LossScale):
        new = jax.tree.map(jnp.copy, loss_scale)  # A donated state must not take the caller's scaler with it.
    elif isinstance(old, (DynamicLossScale, StaticLossScale)):
        new = old.set(loss_scale)
    else:
        raise TypeError(f"{old!r} has no scale to set: pass a scaler, such as jamp.StaticLossScale({loss_scale!r}).")
    return jax.tree.map(
        lambda x: x._replace(loss_scale=new) if isinstance(x, LossScaledState) else x,
        opt_state,
        is_leaf=lambda x: isinstance(x, LossScaledState),
    )


_ELSEWHERE = called(
    fun=("loss_fn", "loss", "f", "func", "function"),
    opt_state=("state", "optimizer_state", "loss_scale", "scaler", "scale"),
)


@explains("jamp.scaled_value_and_grad(loss_fn, opt_state)(params, batch)", _ELSEWHERE)
def scaled_value_and_grad(
    fun: Callable[P, T],
    opt_state: optax.OptState | LossScale,
    argnums: int | Sequence[int] | Any = 0,
    has_aux: bool = False,
    *,
    holomorphic: bool = False,
    allow_int: bool = False,
    transform: Callable[..., Any] = jax.value_and_grad,
) -> Callable[P, tuple[T, Any]]:
    """`jax.value_and_grad` for an optimizer with `jamp.loss_scaled` in it: true loss, scaled gradients.

    Gradients stay scaled, and in the dtypes of the parameters, because `tx.update` unscales them in the pass over
    them that the optimizer makes anyway.

    Call it inside of the step, where `opt_state` is an argument: a function that was made outside has the scale of the
    state that it was made with, for ever.

    Args:
        fun: Function to be differentiated, as in `jax.value_and_grad`.
        opt_state: Any optax state with one loss scale in it: see `jamp.loss_scale`.
        argnums: Which positional arguments to differentiate with respect to.
        has_aux: Whether `fun` returns a pair of the loss and auxiliary data.
        holomorphic: As in `jax.value_and_grad`.
        allow_int: As in `jax.value_and_grad`.
        transform: What differentiates: `jax.value_and_grad`, or a function like it for the modules of a library,
            such as `nnx.value_and_grad` or `eqx.filter_value_and_grad`. `argnums` may be what it takes, for instance
            `nnx.DiffState(0, nnx.LoRAParam)`.

    Returns:
        A function with the arguments of `fun` that returns `(loss, scaled gradients)`, or
        `((loss, auxiliary data), scaled gradients)`.

    Raises:
        ValueError: If `opt_state` holds no loss scale, or more than one.
        TypeError: If `fun` cannot be called; when the function is called, if an argument to differentiate holds
            leaves that are not floating.

    Example:
        >>> import jamp, jax.numpy as jnp, optax
        >>> tx = jamp.loss_scaled(jamp.StaticLossScale(8.0), inner=optax.sgd(0.5))
        >>> params = jnp.array([1.0, 2.0])
        >>> opt_state = tx.init(params)
        >>> loss, grads = jamp.scaled_value_and_grad(jnp.sum, opt_state)(params)
        >>> updates, opt_state = tx.update(grads, opt_state, params)
        >>> loss, grads, updates
        (Array(3., dtype=float32), Array([8., 8.], dtype=float32), Array([-0.5, -0.5], dtype=float32))
    """
    if not callable(fun) and callable(opt_state):
        raise TypeError("The function comes first: write `jamp.scaled_value_and_grad(loss_fn, opt_state)`.")
    return _grad.scaled_value_and_grad(
        fun,
        loss_scale(opt_state),
        argnums,
        has_aux,
        holomorphic=holomorphic,
        allow_int=allow_int,
        transform=transform,
    )


def _paths(tree: Any) -> list[str]:
    return [keystr(path) for path, _ in tree_leaves_with_path(tree)]


def _described(tree: Any) -> str:
    """What something is, in one line: its type, and those in it or the paths of its leaves."""
    paths = _paths(tree)
    if isinstance(tree, tuple):
        return f"a {type(tree).__name__} of {', '.join(type(x).__name__ for x in tree) or 'nothing'}"
    if not paths or paths == [""]:
        return short_repr(tree).replace("\n", " ")
    return f"a {type(tree).__name__} with leaves {', '.join(paths[:5])}{', …' if len(paths) > 5 else ''}"


def find_loss_scaled_state(opt_state: optax.OptState) -> LossScaledState:
    """The one `LossScaledState` in an optax state."""
    leaves = tree_leaves_with_path(opt_state, is_leaf=lambda x: isinstance(x, LossScaledState))
    found = [(keystr(path), x) for path, x in leaves if isinstance(x, LossScaledState)]
    if len(found) == 1:
        state = found[0][1]
        warn_if_stuck(state.loss_scale, state.consecutive_skipped)
        return state
    if isinstance(opt_state, optax.GradientTransformation):
        raise ValueError("This is an optimizer, not its state: pass `opt_state`, which `tx.init(params)` made.")
    if not found and any("loss_scale" in path for path in _paths(opt_state)):
        raise ValueError(
            f"This optimizer state is {_described(opt_state)}: restored without a target, a checkpoint is a dict. Give "
            "it the state of the optimizer that wrote it, as shapes: like = jax.eval_shape(tx.init, params)."
        )
    if not found:
        raise ValueError(
            f"There is no loss scale in this optimizer state, which is {_described(opt_state)}. Make it with an "
            "optimizer such as jamp.loss_scaled(jamp.DynamicLossScale(2.0**15), inner=optax.adam(1e-3)), or "
            "jamp.mixed_precision(optax.adam(1e-3), 'O2:float16'): `opt_state = tx.init(params)`."
        )
    paths = "\n".join(f"  opt_state{path}" for path, _ in found)
    raise ValueError(
        f"There are {len(found)} loss scales in this optimizer state. Pass one of them:\n{paths}\n"
        "Or let one scale serve all parameters: jamp.mixed_precision(optax.multi_transform(...), policy), none inside."
    )
