"""The state of an optimizer in half the bytes, or a quarter of them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.tree_util import GetAttrKey, tree_leaves_with_path, tree_map_with_path

from jamp._calls import check_count, explains
from jamp._dtypes import FLOAT32, HALF_DTYPES, close_matches, short_repr
from jamp._tree import is_floating
from jamp._warnings import warn_user
from jamp.optim._block_codes import are_blocks_of, decode_blocks, encode_blocks, scales_shape
from jamp.optim._cancelling import cancelled
from jamp.optim._copies import copied
from jamp.optim._exact_update import ExactUpdate
from jamp.optim._half_params import is_half, matches_path
from jamp.optim._inner import as_transformation, keep_dtype, strongly_typed
from jamp.optim._inputs import transformation
from jamp.optim._master_weights import MasterWeightsState
from jamp.optim._stochastic_rounding import check_is_key, round_stochastically
from jamp.scalers._base import raise_tree

_DTYPES = {
    "bfloat16": np.dtype(jnp.bfloat16),
    "float8": np.dtype(jnp.float8_e4m3fn),
    "int8": np.dtype(np.int8),
}


class LowPrecisionState(NamedTuple):
    """State of `low_precision_state`.

    Attributes:
        key: PRNG key from which the next step draws.
        inner_state: State of the inner transformation. Stored leaves have the shapes that they have there, and the
            dtype of the storage, so that what shards the one by its shape shards the other.
        scales: For each leaf of `inner_state`, in the order of `jax.tree.leaves`: its float32 scales, of as many axes,
            if it is in 8 bits; None for one in bfloat16, which needs none; `optax.MaskedNode()` for one that is kept as
            it is. A tuple and no tree like `inner_state`, in which every loss scale would then be found twice.
    """

    key: jax.Array
    inner_state: optax.OptState
    scales: tuple[Any, ...]


@explains('jamp.low_precision_state(optax.adam(1e-3), "int8")')
def low_precision_state(
    inner: optax.GradientTransformation | optax.MultiSteps,
    dtype: Literal["bfloat16", "float8", "int8"] = "bfloat16",
    *,
    key: jax.Array | None = None,
    block_size: int = 256,
    min_size: int = 4096,
    keep_float32: Sequence[str] = (),
) -> optax.GradientTransformationExtraArgs:
    """Stores the state of an optimizer in 2 bytes or 1 for each of its float32 numbers, and computes on it in float32.

    What is stored are the leaves of the state that belong to a parameter: those of its shape, at its path in a tree of
    the parameters' structure, as moments, momenta and accumulators are. An update decodes them, runs `inner` on
    float32 state and float32 gradients, and encodes what comes out. Everything else stays as it is: counts,
    hyperparameters, loss scales, small leaves, statistics of other shapes, the masters of `jamp.master_weights`. So
    does what begins as the values of the parameters: a copy (`z` of `optax.contrib.schedule_free`, the start that
    `prodigy` and `mechanize` measure from) moves by less in a step than 8 bits can tell. And so does what the update
    subtracts from something that is nearly the same, where rounding would be all that is left: both moments of
    `optax.rmsprop(centered=True)`, the mean of `adabelief`, the gradient before in `adan` and in `optimistic_adam_v2`,
    what `lbfgs` remembers. What the update does not read, as the gradient that a line search leaves behind, is as well.

    | `dtype` | bytes | stored |
    |---|---|---|
    | `"bfloat16"` | 2 | rounded at random, so that the mean is exact: see `jamp.stochastic_rounding` |
    | `"int8"` | 1 + 4 / `block_size` | blocks with a float32 scale each; codes dense near zero, rounded at random |
    | `"float8"` | the same | the same with E4M3 for a code: cheaper to decode, and three times as coarse |

    The random rounding is what lets a slow average move. In bfloat16 a second moment with a decay of 0.999 changes by
    less than half the spacing at a step, and would never change.

    The codes of 8 bits are those of Dettmers et al. (2022, arXiv:2110.02861) in spirit, without their table: a value
    is the cube of its code, times the largest magnitude in its block, and near zero a multiple of it. Blocks with no
    negative value, as those of second moments, hold the root, and nothing positive is rounded to zero there; Adam
    divides by it. What is smaller than the largest in its block by more than 1e5 takes shorter steps than in float32.
    A block with a NaN or an infinity comes back as NaNs.

    Blocks lie along one axis, so that codes and scales can be sharded as the parameter is: `PartitionSpec`s are those
    of the parameter. With an axis sharded along which the blocks lie (the last one, mostly), nothing travels where the
    share of each device is a multiple of `block_size`.

    It goes around the optimizer and inside of the other wrappers: `jamp.master_weights(low_precision_state(tx))`,
    `jamp.loss_scaled(scale, low_precision_state(tx))`, which leaves the stored state bit for bit when it skips a step,
    `jamp.mixed_precision(low_precision_state(tx), policy)`. An `optax.MultiSteps` outside keeps its sum in float32;
    inside, the sum is stored like the rest.

    `optax.tree_map_params(inner, fun, state.inner_state)` maps over what is stored. Given the whole, it raises: it
    makes a state without knowing the shapes of the parameters, and which scales there are depends on them.

    Args:
        inner: Any optax transformation, or an `optax.MultiSteps`.
        dtype: `"bfloat16"`, `"int8"` or `"float8"`.
        key: PRNG key; `jax.random.PRNGKey(0)` by default. It is kept in the state and advances by one split a step, so
            a run is reproducible, and goes on from a checkpoint as it would have without a break. Devices that hold
            copies of the same parameters need the same key; they then draw the same numbers.
        block_size: Number of values to a scale in 8 bits, at most.
        min_size: Leaves with fewer values stay float32. Scalars always do.
        keep_float32: Glob patterns of leaves that are to stay float32, matched without case against each of the names
            in a leaf's path in the state, or, with a `/`, against the whole path: `["nu"]`, `["*embed*"]`.

    Returns:
        An optax transformation whose state is a `LowPrecisionState`. `jamp.to_optax` decodes it. Updates are
        those of `inner` for float32 gradients: float32, or in the dtype of half gradients of half parameters.

    Warns:
        PrecisionWarning: When the state is made, if a pattern of `keep_float32` names nothing in it, or parameters are
            float64, whose state stays float64; by an update, if its state was made with another `dtype` or
            `block_size`, in which it stays.

    Raises:
        TypeError: If `inner` is no optax transformation, `key` no PRNG key, or `keep_float32` no list of strings.
        ValueError: If `dtype` is none of the three, or `block_size` or `min_size` impossible.

    Example:
        >>> import jamp, jax, jax.numpy as jnp, optax
        >>> params = {"w": jnp.ones((64, 256)), "b": jnp.ones(256)}
        >>> tx = jamp.low_precision_state(optax.adam(1e-3), "int8")
        >>> state = tx.init(params)
        >>> state.inner_state[0].nu["w"].dtype, state.inner_state[0].nu["b"].dtype
        (dtype('int8'), dtype('float32'))
        >>> updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        >>> jnp.allclose(updates["w"], -1e-3)
        Array(True, dtype=bool)
    """
    inner = as_transformation(inner, "low_precision_state(optax.adam(1e-3), 'int8')")
    stored = _check_dtype(dtype)
    check_count("block_size", block_size, "how many values share a scale", 256)
    check_count("min_size", min_size, "how many values the smallest leaf in few bits has", 4096)
    keep_float32 = _check_patterns(keep_float32)
    if key is not None:
        check_is_key(key)

    def init_fn(params: optax.Params) -> LowPrecisionState:
        # By default no typed key, because pickle cannot store one. A copy, for a train step may donate the state.
        first_key = jax.random.PRNGKey(0) if key is None else jnp.copy(key)
        full = strongly_typed(_init_float32(inner, params))
        belongs, exact = _belonging_to(params, full), copied(lambda params: _init_float32(inner, params), params)
        exact |= cancelled(inner, full, params)
        # The barrier keeps XLA from working out, while it compiles, what all those zeros encode to.
        raised = lambda x: lax.optimization_barrier(x.astype(jnp.float32))  # noqa: E731
        full = tree_map_with_path(lambda path, x: raised(x) if belongs(path, x) else x, full)

        def layout(path: tuple, x: Any) -> tuple[Any, Any]:
            """What is stored of a leaf, and its scales, without values."""
            small = not belongs(path, x) or x.ndim == 0 or x.size < max(min_size, 1) or path in exact
            if small or any(matches_path(path, pattern) for pattern in keep_float32):
                return x, optax.MaskedNode()
            scales = jax.ShapeDtypeStruct(scales_shape(x.shape, block_size), jnp.float32)
            return jax.ShapeDtypeStruct(x.shape, stored), None if stored in HALF_DTYPES else scales

        leaves, treedef = jax.tree_util.tree_flatten_with_path(full)
        _warn_of_unmatched(keep_float32, [path for path, _ in leaves])
        _warn_of_float64(params, max(min_size, 1))
        layouts = [layout(path, x) for path, x in leaves]
        empty = LowPrecisionState(first_key, treedef.unflatten(x for x, _ in layouts), tuple(s for _, s in layouts))
        return encode_state(full, empty)

    def update_fn(
        updates: optax.Updates, state: LowPrecisionState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, LowPrecisionState]:
        _warn_of_other_storage(state, stored, block_size)
        made, new = inner.update(raise_tree(updates), decode_state(state), params, **extra_args)
        return _as_given(made, updates, params), encode_state(new, state)

    return transformation(LowPrecisionState, "low_precision_state", init_fn, update_fn)


def decode_state(state: LowPrecisionState) -> optax.OptState:
    """The state of the inner transformation, in float32."""

    def decode(stored: Any, scales: Any) -> Any:
        if isinstance(scales, optax.MaskedNode):
            return stored
        return stored.astype(jnp.float32) if scales is None else decode_blocks(stored, scales)

    leaves, treedef = jax.tree.flatten(state.inner_state)
    return treedef.unflatten(map(decode, leaves, state.scales))


def encode_state(full: optax.OptState, old: LowPrecisionState) -> LowPrecisionState:
    """Stores a state of the inner transformation as the old one is stored, each leaf in the dtype that it had."""
    next_key, draw_key = jax.random.split(old.key)

    def encode(number: int, x: Any, stored: Any, scales: Any) -> tuple[Any, Any]:
        if isinstance(scales, optax.MaskedNode):
            return keep_dtype(x, stored), scales
        x, leaf_key = x.astype(jnp.float32), jax.random.fold_in(draw_key, number)
        if scales is None:
            return round_stochastically(x, leaf_key, stored.dtype), None
        return encode_blocks(x, leaf_key, stored.dtype, scales.shape)

    treedef = jax.tree.structure(old.inner_state)
    columns = treedef.flatten_up_to(full), jax.tree.leaves(old.inner_state), old.scales
    pairs = [encode(i, *row) for i, row in enumerate(zip(*columns, strict=True))]
    return LowPrecisionState(next_key, treedef.unflatten(x for x, _ in pairs), tuple(s for _, s in pairs))


def _init_float32(inner: optax.GradientTransformation, params: optax.Params) -> optax.OptState:
    """The state for float32 parameters.

    `optax.inject_hyperparams` keeps hyperparameters in the dtype of the parameters. A decay of 0.999 is 1 in bfloat16,
    and the bias correction of Adam then divides by zero.
    """
    state = inner.init(params)
    # Masters cast for themselves, and have to see which parameters are half.
    if _masters(state) or not any(is_half(p) for p in jax.tree.leaves(params)):
        return state
    del state  # Before there is a second one.
    return inner.init(raise_tree(params))


def _as_given(made: optax.Updates, grads: optax.Updates, params: optax.Params | None) -> optax.Updates:
    """Updates in the dtype that gradients and parameters share, which they have without a wrapper.

    `optax.apply_if_finite`, and all that chooses between an update and a gradient or zeros, need that.
    """
    halves = [g.dtype if is_half(g) else None for g in jax.tree.leaves(grads)]
    if params is not None:
        dtypes = [getattr(p, "dtype", None) for p in jax.tree.leaves(params)]
        halves = [half if half == dtype else None for half, dtype in zip(halves, dtypes, strict=False)]
    leaves, treedef = jax.tree.flatten(made, is_leaf=lambda x: isinstance(x, ExactUpdate))
    if len(leaves) != len(halves):
        return made
    cast = [
        u.astype(half) if half is not None and is_floating(u) else u for u, half in zip(leaves, halves, strict=True)
    ]
    return treedef.unflatten(cast)


def _masters(state: optax.OptState) -> list[tuple]:
    """The paths of all masters in a state."""
    nodes = tree_leaves_with_path(state, is_leaf=lambda x: isinstance(x, MasterWeightsState))
    return [(*path, GetAttrKey("masters")) for path, x in nodes if isinstance(x, MasterWeightsState)]


def _belonging_to(params: optax.Params, state: optax.OptState) -> Callable[[tuple, Any], bool]:
    """A test of the leaves of a state: floating, float32 or half, and of the path and shape of a parameter."""
    shapes = {path: np.shape(p) for path, p in tree_leaves_with_path(params)}
    masters = _masters(state)

    def test(path: tuple, x: Any) -> bool:
        if not isinstance(x, jax.Array) or x.dtype not in (FLOAT32, *HALF_DTYPES):
            return False
        if any(path[: len(prefix)] == prefix for prefix in masters):
            return False
        return any(shapes.get(path[i:]) == x.shape for i in range(len(path) + 1))

    return test


def _check_dtype(dtype: Any) -> np.dtype:
    if isinstance(dtype, str) and dtype in _DTYPES:
        return _DTYPES[dtype]
    try:
        parsed = np.dtype(dtype)
    except TypeError:
        parsed = None
    if not isinstance(dtype, str) and dtype is not None and parsed is not None and parsed in _DTYPES.values():
        return parsed
    hint = " float16 cannot hold second moments: they are often below 6e-8." if parsed == np.float16 else ""
    raise ValueError(
        f"`dtype` is {dtype!r}: expected one of {', '.join(map(repr, _DTYPES))}."
        + (close_matches(dtype, _DTYPES) if isinstance(dtype, str) and not hint else hint)
    )


def _warn_of_unmatched(patterns: Sequence[str], paths: Sequence[tuple]) -> None:
    unmatched = [pattern for pattern in patterns if not any(matches_path(path, pattern) for path in paths)]
    if unmatched:
        names = ", ".join(jax.tree_util.keystr(path, simple=True, separator="/") for path in paths[:6])
        warn_user(
            f"`keep_float32` names nothing in the state: {', '.join(map(repr, unmatched))}. Its leaves are {names}"
            f"{', …' if len(paths) > 6 else ''}. Write a pattern for one of the names in a path, such as 'nu'."
        )


def _warn_of_float64(params: optax.Params, min_size: int) -> None:
    leaves = tree_leaves_with_path(params)
    wide = [path for path, p in leaves if getattr(p, "dtype", None) == np.float64 and np.size(p) >= min_size]
    if wide:
        names = ", ".join(jax.tree_util.keystr(path, simple=True, separator="/") or "params" for path in wide[:6])
        warn_user(
            f"Parameters are float64, and their state stays float64: {names}{', …' if len(wide) > 6 else ''}. Only "
            "float32 and half ones have a state in few bits. Write params = jamp.cast_tree(params, 'float32') in front "
            "of tx.init(params)."
        )


def _warn_of_other_storage(state: LowPrecisionState, stored: np.dtype, block_size: int) -> None:
    """Says that a state goes on as it was stored, as one from a checkpoint does."""
    both = zip(jax.tree.leaves(state.inner_state), state.scales, strict=True)
    few_bits = [(x, scales) for x, scales in both if not isinstance(scales, optax.MaskedNode)]
    other = {x.dtype.name for x, _ in few_bits if x.dtype != stored}
    in_other_blocks = any(
        scales is not None and not are_blocks_of(block_size, x.shape, scales.shape) for x, scales in few_bits
    )
    if other or in_other_blocks:
        found = " and ".join(sorted(other)) if other else "blocks of another size"
        asked = f"{stored.name}, as `dtype` says" if other else f"blocks of {block_size}, as `block_size` says"
        warn_user(
            f"The state is stored in {found}, and goes on so, not in {asked}. To store it anew, write params, state = "
            "jamp.from_optax(tx, params, *jamp.to_optax(params, state))."
        )


def _check_patterns(patterns: Any) -> tuple[str, ...]:
    if isinstance(patterns, str):
        raise TypeError(f"`keep_float32` is {patterns!r}: expected several patterns. Write [{patterns!r}].")
    is_list = isinstance(patterns, Collection) and not isinstance(patterns, Mapping)
    if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(
            f"`keep_float32` is {short_repr(patterns)}: expected several glob patterns. Write keep_float32=['nu'], "
            "or leave it out."
        )
    return tuple(patterns)
