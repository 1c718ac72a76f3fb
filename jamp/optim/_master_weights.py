"""Float32 master copies of half-precision parameters, kept in the optimizer's state."""

from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr, tree_map_with_path
from jax.typing import DTypeLike

from jamp._calls import explains
from jamp._dtypes import FLOAT32, parse_dtype
from jamp._tree import is_floating, nodes_of
from jamp.optim._exact_update import ExactUpdate
from jamp.optim._half_params import is_half
from jamp.optim._inner import as_transformation
from jamp.optim._inputs import transformation
from jamp.optim._split import join_float32, split_float32
from jamp.optim._surroundings import check_nothing_chooses, warn_inside_cast_fn
from jamp.transforms import full_precision

T = TypeVar("T")

_STORAGES = ("float32", "split")
_NO_MASTERS = (
    "At the levels O0, OD, O1 and O2 parameters are float32, and are the masters: write `params`. For masters of half "
    "parameters take 'O3', or wrap the optimizer: `jamp.master_weights(inner)`."
)


class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
        masters: Tree with the structure of the parameters. For each half-precision parameter, an array of its shape:
            its float32 master, or with split storage the int16 remainder. `optax.MaskedNode()` for all other leaves,
            which are their own masters.
        inner_state: State of the inner transformation, made for float32 parameters.
    """

    masters: optax.Params
    inner_state: optax.OptState


@explains("jamp.master_weights(optax.adam(1e-3))")
def master_weights(
    inner: optax.GradientTransformation | optax.MultiSteps, storage: Literal["float32", "split"] = "float32"
) -> optax.GradientTransformationExtraArgs:
    """Trains half-precision parameters as if they were float32.

    A weight of 1.0 in bfloat16 has 1.0078 for a neighbor, and an update of 1e-3 is rounded away for ever. So a float32
    copy of every half-precision parameter is kept in the state, `inner` sees nothing but float32 (these masters for
    parameters, gradients cast to float32), and after `optax.apply_updates(params, updates)` each parameter equals its
    rounded master bit for bit: through zero, denormals, overflow to inf and back. The masters are those of float32
    training with the same gradients. (Op by op, that is to the last bit. Compiled, XLA may round the sum of a product
    once here and twice there, as it may in two float32 programs.) This is what Apex and Paddle call O2, MXNet
    `multi_precision`, and Megatron-LM its main parameters (Micikevicius et al., 2018, arXiv:1710.03740).

    Parameters that are not half precision pass through as they are, without a copy. `jamp.half_params` makes a tree
    in which norms stay float32.

    The parameters are an input: one that no longer equals its rounded master was changed by somebody else (clipped,
    reset, loaded from a file), and its master starts anew from it. Masters are not touched by anything else.

    Updates of half parameters are `ExactUpdate`s, which add exactly. Other transformations therefore go inside:
    `master_weights(optax.chain(…))`, `master_weights(optax.apply_if_finite(…))`, and loss scaling outside:
    `jamp.loss_scaled(scale, master_weights(inner))`. Apply them with `optax.apply_updates`, as Flax does; with Equinox,
    to `params, static = equinox.partition(model, equinox.is_inexact_array)`, since `equinox.apply_updates` expects
    arrays.

    Args:
        inner: Any optax transformation, or an `optax.MultiSteps`.
        storage: What is kept of a master. `"float32"`: all of it, 6 bytes a weight with the parameter. `"split"`: only
            the 16 bits that a bfloat16 parameter lacks (see `split_float32`), 4 bytes a weight, exactly the same
            masters, and exact ties round away from zero instead of to even.

    Returns:
        An optax transformation whose state is a `MasterWeightsState`.

    Raises:
        TypeError: If `inner` is no optax transformation.
        ValueError: If `storage` is neither of the two, or, by `init`, if it is `"split"` and a parameter is float16:
            beside a float16 below 2^-17 in magnitude, 16 bits cannot hold the rest of a float32, whose exponent has
            three bits more.

    Example:
        >>> import jamp, jax.numpy as jnp, optax
        >>> params = jnp.ones(2, jnp.bfloat16)
        >>> tx = jamp.master_weights(optax.sgd(1.0))
        >>> state = tx.init(params)
        >>> for _ in range(8):  # Each step alone would be lost in bfloat16.
        ...     updates, state = tx.update(jnp.full(2, 2.0**-10, jnp.bfloat16), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> params.tolist()
        [0.9921875, 0.9921875]
    """
    check_storage(storage)
    inner = as_transformation(inner, "master_weights(optax.adam(1e-3))")

    def init_fn(params: optax.Params) -> MasterWeightsState:
        if storage == "split":
            _check_splittable(params)
        masters = jax.tree.map(lambda p: p.astype(jnp.float32) if is_half(p) else p, params)
        return MasterWeightsState(_store(params, masters, storage), inner.init(masters))

    @full_precision  # Whatever the policy of a `cast_fn` around the step.
    def update_fn(
        updates: optax.Updates, state: MasterWeightsState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, MasterWeightsState]:
        warn_inside_cast_fn()
        if params is None:
            raise ValueError("master_weights needs the parameters: write `tx.update(grads, opt_state, params)`.")
        check_nothing_chooses("master_weights", map(is_half, jax.tree.leaves(params)))
        masters = _load(params, state.masters)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) if is_half(g) else g, updates)
        updates, inner_state = inner.update(grads, state.inner_state, masters, **extra_args)
        new_masters = optax.apply_updates(masters, updates)
        updates = jax.tree.map(lambda p, m, u: _exact(p, m, storage) if is_half(p) else u, params, new_masters, updates)
        return updates, MasterWeightsState(_store(params, new_masters, storage), inner_state)

    return transformation(MasterWeightsState, "master_weights", init_fn, update_fn)


def check_storage(storage: Any) -> None:
    """Refuses what is no way to store master weights."""
    if storage not in _STORAGES:
        raise ValueError(f"`storage` is {storage!r}: expected one of {', '.join(map(repr, _STORAGES))}.")


@explains("jamp.master_params(opt_state, params)")
def master_params(opt_state: optax.OptState, params: T, dtype: DTypeLike = "float32") -> T:
    """The parameters at full precision, read from the state of `master_weights`.

    Use it to evaluate, to average (EMA), and to save: files keep the truth, and `dtype` gives a smaller view of it.

    Args:
        opt_state: Any optax state with the state of one `master_weights` somewhere inside.
        params: The half-precision parameters that belong to it.
        dtype: Floating dtype of the answer, for instance `"bfloat16"` for a file to be used in inference.

    Returns:
        The tree of `params`, floating leaves in `dtype`.

    Raises:
        TypeError: If the arguments are in another order.
        ValueError: If there is no master state in `opt_state`, or more than one.

    Example:
        >>> import jamp, jax.numpy as jnp, optax
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> opt_state = jamp.master_weights(optax.adam(1e-3)).init(params)
        >>> jamp.master_params(opt_state, params)["w"].dtype
        dtype('float32')
    """
    if hasattr(params, "inner_state") or (
        nodes_of(params, MasterWeightsState) and not nodes_of(opt_state, MasterWeightsState)
    ):
        raise TypeError("The state comes first: write jamp.master_params(opt_state, params).")
    masters = _load(params, find_master_state(opt_state).masters)
    return jax.tree.map(lambda m: m.astype(parse_dtype(dtype)) if is_floating(m) else m, masters)


def set_masters(stored: optax.Params, params: optax.Params, full: optax.Params) -> tuple[optax.Params, optax.Params]:
    """Gives masters new float32 values; returns the parameters and the masters as a state stores them."""
    full = jax.tree.map(lambda p, value: _plain_nan(value) if is_half(p) else value, params, full)
    storage = "split" if any(x.dtype != FLOAT32 for x in jax.tree.leaves(stored)) else "float32"
    new_params = jax.tree.map(lambda p, v: _round(v, p.dtype, storage) if is_half(p) else v, params, full)
    return new_params, _store(params, full, storage)


def find_master_state(opt_state: optax.OptState) -> MasterWeightsState:
    """The one `MasterWeightsState` in an optax state; a `ValueError` if there is none, or several."""
    found = nodes_of(opt_state, MasterWeightsState)
    if len(found) != 1:
        raise ValueError(
            f"Found {len(found)} states of master_weights in this optimizer state: expected one. "
            + ("Pass the part of it that you mean." if found else _NO_MASTERS)
        )
    return found[0]


def _round(master: jax.Array, dtype: Any, storage: str) -> jax.Array:
    return split_float32(master)[0] if storage == "split" else master.astype(dtype)


def _exact(param: jax.Array, new_master: jax.Array, storage: str) -> ExactUpdate:
    return ExactUpdate.between(param, _round(_plain_nan(new_master), param.dtype, storage))


def _store(params: optax.Params, masters: optax.Params, storage: str) -> optax.Params:
    def store(param: Any, master: Any) -> Any:
        if not is_half(param):
            return optax.MaskedNode()
        return split_float32(_plain_nan(master))[1] if storage == "split" else master

    return jax.tree.map(store, params, masters)


def _load(params: Any, stored: optax.Params) -> optax.Params:
    """The float32 masters of half parameters; other leaves as they are."""

    def load(path: tuple, param: Any, kept: Any) -> Any:
        if is_half(param) == isinstance(kept, optax.MaskedNode):
            raise ValueError(
                f"The parameter {keystr(path)} is {param.dtype}, and was not when the optimizer state was made: "
                "parameters keep their dtypes. Make a new state with `tx.init(params)`."
            )
        if not is_half(param):
            return param
        if kept.dtype != FLOAT32:
            return join_float32(param, kept)
        unchanged = ExactUpdate.between(param, kept.astype(param.dtype)).bits == 0
        return jnp.where(unchanged, kept, param.astype(jnp.float32))

    return tree_map_with_path(load, params, stored)


def _plain_nan(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(x), jnp.nan, x)


def _check_splittable(params: optax.Params) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    bad = [keystr(path) or "the tree" for path, p in leaves if is_half(p) and p.dtype == jnp.float16]
    if bad:
        raise ValueError(
            f"Split storage needs bfloat16 parameters; these are float16: {', '.join(bad)}. A float16 has three "
            "exponent bits less than a float32, so 16 more bits cannot hold the rest of every weight. Write "
            "master_weights(inner, storage='float32'), or jamp.half_params(params, 'bfloat16')."
        )
