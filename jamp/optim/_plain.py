"""Between jamp's wrappers and plain float32 training with optax: checkpoints of one go on in the other."""

from typing import Any

import jax
import optax
from jax.tree_util import keystr, tree_leaves_with_path

from jamp._calls import explains
from jamp.optim._half_params import is_half
from jamp.optim._loss_scaled import LossScaledState
from jamp.optim._low_precision_state import LowPrecisionState, decode_state, encode_state
from jamp.optim._master_weights import MasterWeightsState, master_params, set_masters
from jamp.optim._stochastic_rounding import StochasticRoundingState
from jamp.scalers._base import raise_tree

_WRAPPERS = (LossScaledState, LowPrecisionState, MasterWeightsState, StochasticRoundingState)


@explains("jamp.to_optax(params, opt_state)")
def to_optax(params: optax.Params, opt_state: optax.OptState) -> tuple[optax.Params, optax.OptState]:
    """What training without jamp would have: float32 parameters, and the state of the optimizer inside the wrappers.

    Args:
        params: The parameters.
        opt_state: State of `jamp.mixed_precision`, `jamp.loss_scaled` (with `inner`), `jamp.master_weights`,
            `jamp.low_precision_state` or `jamp.stochastic_rounding`, nested or not; a plain state comes back as it is.

    Returns:
        Parameters, half-precision ones replaced by their float32 masters, and the inner state.

    Raises:
        TypeError: If the arguments are in another order.

    Example:
        >>> import jamp, jax.numpy as jnp, optax
        >>> tx = jamp.mixed_precision(optax.adam(1e-3), "O3:bfloat16")
        >>> params = jnp.ones(2, jnp.bfloat16)
        >>> plain_params, plain_state = jamp.to_optax(params, tx.init(params))
        >>> updates, plain_state = optax.adam(1e-3).update(jnp.ones(2), plain_state, plain_params)
    """
    if isinstance(params, _WRAPPERS):
        raise TypeError("The parameters come first: write jamp.to_optax(params, opt_state).")
    state = opt_state
    while isinstance(state, _WRAPPERS):
        if isinstance(state, MasterWeightsState):
            params = master_params(state, params)
        state = _inner_state(state)
    return raise_tree(params), state


@explains("jamp.from_optax(tx, params, plain_params, plain_state)")
def from_optax(
    tx: optax.GradientTransformation, params: optax.Params, plain_params: optax.Params, plain_state: optax.OptState
) -> tuple[optax.Params, optax.OptState]:
    """Goes on with a wrapped optimizer where plain float32 training stopped.

    Args:
        tx: The wrapped optimizer: `jamp.mixed_precision(optax.adam(1e-3), policy)`, if the plain one was
            `optax.adam(1e-3)`.
        params: Parameters with the structure, shapes and dtypes that they are to have; their values are not used.
        plain_params: The float32 parameters to go on with. Masters start from them exactly.
        plain_state: The state of the plain optimizer.

    Returns:
        The parameters in their new dtypes, and the state for `tx`, with a fresh loss scale.

    Raises:
        TypeError: If the arguments are in another order.
        ValueError: If `plain_state` is not the state of the optimizer in `tx`. The message names what differs.

    Example:
        >>> import jamp, jax.numpy as jnp, optax
        >>> plain_params = jnp.array([1.0, 2.0])
        >>> plain_state = optax.adam(1e-3).init(plain_params)
        >>> tx = jamp.mixed_precision(optax.adam(1e-3), "O3:bfloat16")
        >>> params, opt_state = jamp.from_optax(tx, jamp.half_params(plain_params), plain_params, plain_state)
        >>> params
        Array([1, 2], dtype=bfloat16)
    """
    wrapped = tx.init(params)
    _check_order(wrapped, params, plain_params, plain_state)
    _check_same(to_optax(params, wrapped)[1], plain_state)
    masters = [s for s in _wrapper_states(wrapped) if isinstance(s, MasterWeightsState)]
    if masters:
        params, stored = set_masters(masters[0].masters, params, plain_params)
    else:
        params, stored = jax.tree.map(lambda p, full: full.astype(p.dtype), params, plain_params), None
    return params, _replace(wrapped, stored, plain_state)


def _wrapper_states(state: Any) -> list[Any]:
    return [state, *_wrapper_states(_inner_state(state))] if isinstance(state, _WRAPPERS) else []


def _inner_state(state: Any) -> Any:
    return decode_state(state) if isinstance(state, LowPrecisionState) else state.inner_state


def _replace(state: Any, masters: Any, plain_state: Any) -> Any:
    """The wrappers' states with other masters and another innermost state."""
    if not isinstance(state, _WRAPPERS):
        return plain_state
    inner_state = _replace(_inner_state(state), masters, plain_state)
    if isinstance(state, LowPrecisionState):
        return encode_state(inner_state, state)
    state = state._replace(inner_state=inner_state)
    return state._replace(masters=masters) if isinstance(state, MasterWeightsState) else state


def _check_order(wrapped: optax.OptState, params: Any, plain_params: Any, plain_state: Any) -> None:
    """Refuses the plain state before the plain parameters, and these before the half ones, whose dtypes are asked."""
    structure = jax.tree.structure(params)
    problem = ""
    if jax.tree.structure(plain_params) != structure and jax.tree.structure(plain_state) == structure:
        problem = "The plain parameters come before the plain state"
    elif any(isinstance(s, MasterWeightsState) for s in _wrapper_states(wrapped)) and (
        any(map(is_half, jax.tree.leaves(plain_params))) and not any(map(is_half, jax.tree.leaves(params)))
    ):
        problem = "The half parameters come before the plain ones"
    if problem:
        raise TypeError(f"{problem}: write jamp.from_optax(tx, params, plain_params, plain_state).")


def _check_same(expected: optax.OptState, given: optax.OptState) -> None:
    want, have = (
        {keystr(k): f"{x.dtype}{list(x.shape)}" for k, x in tree_leaves_with_path(t)} for t in (expected, given)
    )
    lines = [f"  {k}: {have.get(k, 'nothing')}, expected {want.get(k, 'nothing')}"
             for k in sorted(want | have) if want.get(k) != have.get(k)]  # fmt: skip
    if lines or jax.tree.structure(expected) != jax.tree.structure(given):
        lines = lines or [f"  {jax.tree.structure(given)}, expected {jax.tree.structure(expected)}"]
        raise ValueError(
            "`plain_state` is not a state of the optimizer inside `tx`:\n" + "\n".join(lines)
            + "\nIf the plain optimizer is tx_plain, make `tx` with jamp.mixed_precision(tx_plain, policy). A state "
            "saved by jamp's own wrappers is not plain; jamp.to_optax makes it so."
        )  # fmt: skip
