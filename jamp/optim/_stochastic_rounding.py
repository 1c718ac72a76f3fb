"""Half-precision parameters without a master copy, by rounding at random."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jamp._calls import explains
from jamp.optim._exact_update import ExactUpdate
from jamp.optim._half_params import is_half
from jamp.optim._inner import as_transformation
from jamp.optim._inputs import transformation
from jamp.optim._surroundings import check_nothing_chooses, warn_inside_cast_fn
from jamp.transforms import full_precision


class StochasticRoundingState(NamedTuple):
    """State of `stochastic_rounding`.

    Attributes:
        key: PRNG key from which the next step draws.
        inner_state: State of the inner transformation, made for float32 parameters.
    """

    key: jax.Array
    inner_state: optax.OptState


@explains("jamp.stochastic_rounding(optax.adam(1e-3), key)")
def stochastic_rounding(
    inner: optax.GradientTransformation | optax.MultiSteps, key: jax.Array
) -> optax.GradientTransformationExtraArgs:
    """Trains half-precision parameters without a master: the new parameter is rounded up or down at random.

    The nearer neighbor is the likelier, such that the mean is the exact value. An update of a hundredth of the spacing
    is then made in one of a hundred steps, where rounding to nearest never makes it. `inner` sees float32: parameters
    and gradients are cast before, and the sum of parameter and update is rounded once. At 2 bytes a weight this is the
    smallest that still learns; a step is noisier by up to half a spacing of the parameter's dtype. Compare Gupta et
    al., 2015 (arXiv:1502.02551) and Zamirai et al., 2020 (arXiv:2010.06192).

    Parameters that are not half precision pass through. Updates of half parameters are `ExactUpdate`s, so other
    transformations go inside, and loss scaling outside, as for `master_weights`. Devices that hold copies of the same
    parameters need the same key; they then draw the same numbers.

    Args:
        inner: Any optax transformation, or an `optax.MultiSteps`.
        key: PRNG key (`jax.random.key(0)`). It is kept in the state and advances by one split a step, so a run is
            reproducible, and goes on from a checkpoint as it would have without a break.

    Returns:
        An optax transformation whose state is a `StochasticRoundingState`.

    Raises:
        TypeError: If `inner` is no optax transformation, or `key` no PRNG key.

    Example:
        >>> import jamp, jax, jax.numpy as jnp, optax
        >>> params = jnp.ones(1000, jnp.bfloat16)  # The next smaller bfloat16 is 1 - 1/256.
        >>> tx = jamp.stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
        >>> updates, state = tx.update(jnp.full(1000, 1 / 1024, jnp.bfloat16), tx.init(params), params)
        >>> params = optax.apply_updates(params, updates)
        >>> 200 < int((params < 1).sum()) < 300  # A quarter of the spacing moves a quarter of the weights.
        True
    """
    inner = as_transformation(inner, "stochastic_rounding(optax.adam(1e-3), jax.random.key(0))")
    check_is_key(key)

    def init_fn(params: optax.Params) -> StochasticRoundingState:
        # A copy, because a train step may donate the state and so delete its arrays, which the caller owns.
        return StochasticRoundingState(jnp.copy(key), inner.init(_to_float32(params)))

    @full_precision  # Whatever the policy of a `cast_fn` around the step.
    def update_fn(
        updates: optax.Updates, state: StochasticRoundingState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, StochasticRoundingState]:
        warn_inside_cast_fn()
        if params is None:
            raise ValueError("stochastic_rounding needs the parameters: write `tx.update(grads, opt_state, params)`.")
        check_nothing_chooses("stochastic_rounding", map(is_half, jax.tree.leaves(params)))
        full = _to_float32(params)
        updates, inner_state = inner.update(_to_float32(updates), state.inner_state, full, **extra_args)
        new_full = optax.apply_updates(full, updates)
        next_key, draw_key = jax.random.split(state.key)
        keys = _key_per_leaf(draw_key, params)
        updates = jax.tree.map(
            lambda p, new, u, k: ExactUpdate.between(p, round_stochastically(new, k, p.dtype)) if is_half(p) else u,
            params, new_full, updates, keys,
        )  # fmt: skip
        return updates, StochasticRoundingState(next_key, inner_state)

    return transformation(StochasticRoundingState, "stochastic_rounding", init_fn, update_fn)


def round_stochastically(x: jax.Array, key: jax.Array, dtype: Any) -> jax.Array:
    """Rounds float32 values to one of their two neighbors in a half-precision dtype, unbiased.

    The probability of each neighbor is exact for bfloat16 and for normal float16 values, and right to 2^-23 for
    denormal ones. Beyond the largest finite value all round to nearest, for no mean can be kept beside inf.

    Args:
        x: float32 array of any shape.
        key: PRNG key.
        dtype: bfloat16 or float16.

    Returns:
        Array of the shape of `x`, in `dtype`.
    """
    drawn = _draw_bfloat16(x, key) if dtype == jnp.bfloat16 else _draw_float16(x, key)
    within = jnp.abs(x) <= jnp.finfo(dtype).max.astype(jnp.float32)  # False for NaN.
    return jnp.where(within, drawn, x.astype(dtype))


def _draw_bfloat16(x: jax.Array, key: jax.Array) -> jax.Array:
    # The lower half of the bits is the distance from the neighbor toward zero, in units of 2^-16 of the spacing.
    draws = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    bits = lax.bitcast_convert_type(x, jnp.uint32) + draws
    return lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def _draw_float16(x: jax.Array, key: jax.Array) -> jax.Array:
    _, exponent = jnp.frexp(x)
    spacing = jnp.ldexp(jnp.float32(1), jnp.maximum(exponent - 11, -24))  # 11 bits of precision, denormals from 2^-24.
    steps = x / spacing  # Exact, as is all that follows: the spacing is a power of two, and steps are under 2^11.
    below = jnp.floor(steps)
    up = jax.random.uniform(key, x.shape, jnp.float32) < steps - below
    return (jnp.where(up, below + 1, below) * spacing).astype(jnp.float16)


def check_is_key(key: Any) -> None:
    """Raises a TypeError unless `key` is one PRNG key, typed or not."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
    if not typed and not (dtype == jnp.uint32 and shape is not None and len(shape) == 1):
        raise TypeError(f"`key` is {key!r}: expected a PRNG key. Write jax.random.key(0).")


def _to_float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32) if is_half(x) else x, tree)


def _key_per_leaf(key: jax.Array, tree: Any) -> Any:
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, [jax.random.fold_in(key, i) for i in range(len(leaves))])
