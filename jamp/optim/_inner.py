"""The optimizer that a wrapper was given, and the types of its state."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jamp._dtypes import short_repr


def as_transformation(inner: Any, usage: str, name: str = "inner") -> optax.GradientTransformationExtraArgs:
    """What was passed as `inner`, as a transformation that takes extra arguments and hands them on."""
    if isinstance(inner, optax.MultiSteps):  # Its `gradient_transformation()` would lose them.
        return optax.GradientTransformationExtraArgs(inner.init, inner.update)  # pyright: ignore[reportArgumentType]
    if isinstance(inner, optax.GradientTransformation):
        return optax.with_extra_args_support(inner)
    call = f" `{inner.__name__}` makes one when it is called." if inspect.isfunction(inner) else ""
    raise TypeError(f"`{name}` is {short_repr(inner)}: expected an optax transformation. Write {usage}.{call}")


def strongly_typed(tree: Any) -> Any:
    """Without weak types, which would come back strong from a step, and so compile it twice."""
    return jax.tree.map(lambda x: lax.convert_element_type(x, x.dtype) if _is_plain_array(x) else x, tree)


def keep_dtype(new: Any, old: Any) -> Any:
    """Of half-precision parameters optax makes half-precision moments, which the first float32 gradient would widen.

    That is optax#1207 and optax#1098: the train step compiles twice, or its scan fails.
    """
    if not _is_plain_array(new) or not _is_plain_array(old) or not jnp.can_cast(new.dtype, old.dtype, "same_kind"):
        return new
    return reshard(lax.convert_element_type(new, old.dtype), jax.typeof(old).sharding)


def reshard(x: jax.Array, sharding: Any) -> jax.Array:
    """Both branches have to agree on the sharding as well, where it is part of the type (`jax.make_mesh`'s default)."""
    return x if sharding is None or jax.typeof(x).sharding.spec == sharding.spec else jax.reshard(x, sharding)


def _is_plain_array(x: Any) -> bool:
    return isinstance(x, jax.Array) and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
