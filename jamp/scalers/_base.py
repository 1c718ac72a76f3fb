"""What every loss scaler is, and what the kinds of them share: registration, checks, scaling and unscaling.

A scaler is a frozen dataclass and a pytree. What changes during training is a leaf (float32 or int32, never weakly
typed, so that a train step is compiled once); how it changes is static.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.tree_util import GetAttrKey
from jax.typing import ArrayLike

from jamp._compat import checkpoint_name
from jamp._dtypes import short_repr
from jamp._elsewhere import unknown_method
from jamp._tree import check_holds_numbers
from jamp.transforms import full_precision

T = TypeVar("T")

# These and their reciprocals are normal float32 numbers. What is smaller, XLA flushes to zero: a scale of 2**-127 by
# itself, and one of 2**127 with all gradients, because the product with its reciprocal is what a division becomes.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126
LARGEST_COUNT = 2**31 - 1

_ARRAYS = (jax.Array, np.ndarray, np.generic)

# What a scale is called where it is used, and where it may change, so that an optimizer sees in a trace what was done
# to its gradients.
SCALE_NAME, ADJUSTED_NAME = "jamp_loss_scale", "jamp_adjusted_loss_scale"


@runtime_checkable
class LossScale(Protocol):
    """A factor that keeps float16 gradients away from zero, and the rule by which it adapts."""

    @property
    def loss_scale(self) -> jax.Array:
        """The factor: float32 array of shape ()."""
        ...

    def scale(self, tree: T) -> T:
        """Multiplies the floating leaves by the factor: applied to the loss, before it is differentiated."""
        ...

    def unscale(self, tree: T) -> T:
        """Divides the floating leaves by the factor: applied to the gradients, before anything reads them."""
        ...

    def adjust(self, grads_finite: ArrayLike) -> Self:
        """The scaler of the next step, given whether all gradients of this one were finite."""
        ...


def check_is_loss_scale(value: Any) -> None:
    """Raises a TypeError that says what to write, unless `value` is a loss scale."""
    if isinstance(value, type) or not isinstance(value, LossScale):
        if hasattr(value, "init") and hasattr(value, "update"):
            raise TypeError(
                "`loss_scale` is an optimizer: expected a loss scale. The scale comes first in "
                "jamp.loss_scaled(loss_scale, optimizer), and jamp.mixed_precision(optimizer, policy) chooses one."
            )
        raise TypeError(
            f"`loss_scale` is {short_repr(value)}: expected a loss scale. Write jamp.DynamicLossScale(2.0**15), "
            "jamp.StaticLossScale(1024.0) or jamp.NoOpLossScale(). The loss scale in an optimizer's state is "
            "jamp.loss_scale(opt_state), and jamp.scaled_value_and_grad(fun, opt_state) differentiates with it."
        )


def static_field(**kwargs: Any) -> Any:
    """A dataclass field that is part of the tree's structure and not one of its leaves."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


def register_scaler(cls: type[T]) -> type[T]:
    """Registers a dataclass as a pytree whose static fields are those made by `static_field`.

    `jax.tree_util.register_dataclass` would do, but for one thing: it rebuilds through `__init__`, so the checks of
    values would run on the results of every jitted step and wait for the device each time.
    """
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]  # It is a dataclass.
    leaves = tuple(f.name for f in fields if not f.metadata.get("static"))
    static = tuple(f.name for f in fields if f.metadata.get("static"))

    def flatten_with_keys(scaler: Any) -> tuple[list, tuple]:
        children = [(GetAttrKey(name), getattr(scaler, name)) for name in leaves]
        return children, tuple(getattr(scaler, name) for name in static)

    make = cls.__init__

    @functools.wraps(make)
    def init(scaler: Any, *args: Any, **kwargs: Any) -> None:
        teach_flax(cls, leaves)
        make(scaler, *args, **kwargs)

    def unflatten(values: tuple, children: Any) -> Any:
        teach_flax(cls, leaves)
        scaler = object.__new__(cls)
        scaler.__dict__.update(zip(static, values, strict=True))
        scaler.__dict__.update(zip(leaves, children, strict=True))
        return scaler

    def missing(scaler: Any, name: str) -> Any:
        raise unknown_method(cls.__name__, name)

    # Set here, where a type checker does not see them: with this in the class, every name would be a method.
    setattr(cls, "__getattr__", missing)  # noqa: B010
    setattr(cls, "__init__", init)  # noqa: B010
    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
    return cls


def teach_flax(cls: type, leaves: tuple[str, ...]) -> None:
    """Has `flax.serialization` save and restore the leaves of a scaler, once a program has imported it.

    Flax knows pytrees by a registry of its own, and jamp imports no model library. Every scaler that is made, and every
    state that a jitted step returns, comes by here.
    """
    flax = sys.modules.get("flax.serialization")
    if flax is None or flax.is_serializable(cls):
        return

    def to_state_dict(scaler: Any) -> dict[str, Any]:
        return {name: getattr(scaler, name) for name in leaves if getattr(scaler, name) is not None}

    def from_state_dict(scaler: Any, saved: dict[str, Any]) -> Any:
        expected = to_state_dict(scaler)
        if set(saved) != set(expected):
            raise ValueError(
                f"The saved {cls.__name__} has {sorted(saved)}, expected {sorted(expected)}: it was saved with other "
                "settings, such as `hysteresis`. Restore into a state of an optimizer that was made with them."
            )
        return replace_leaves(scaler, **{name: jnp.asarray(saved[name], x.dtype) for name, x in expected.items()})

    flax.register_serialization_state(cls, to_state_dict, from_state_dict)


def replace_leaves(scaler: T, **leaves: Any) -> T:
    """`dataclasses.replace` without the checks, for values that are right by construction."""
    new = object.__new__(type(scaler))
    new.__dict__.update(scaler.__dict__, **leaves)
    return new


def is_traced(value: Any) -> bool:
    """Whether the value of an array is not known yet."""
    return isinstance(value, Tracer)


def as_scale(value: Any, name: str = "loss_scale") -> jax.Array:
    """A strongly typed float32 scalar out of a positive number or array of any dtype."""
    if not isinstance(value, (int, float, *_ARRAYS)) or isinstance(value, bool):
        raise TypeError(f"`{name}` is {value!r}: expected a positive number, such as 2.0**15.")
    if np.shape(value):
        raise ValueError(f"`{name}` has shape {np.shape(value)}: expected one number. Give each loss its own scaler.")
    if not is_traced(value) and not SMALLEST_SCALE <= (number := float(value)) <= LARGEST_SCALE:
        raise ValueError(f"`{name}` is {number}: expected a finite number, positive and within [2**-126, 2**126].")
    return jnp.asarray(value, jnp.float32)


def as_count(value: Any, name: str) -> jax.Array:
    """A strongly typed int32 scalar out of a number of steps."""
    if not isinstance(value, (int, float, *_ARRAYS)) or isinstance(value, bool):
        raise TypeError(f"`{name}` is {value!r}: expected a number of steps, 0 or more.")
    if np.shape(value):
        raise ValueError(f"`{name}` has shape {np.shape(value)}: expected one number.")
    if not is_traced(value) and not (0 <= (number := float(value)) <= LARGEST_COUNT and number % 1 == 0):
        raise ValueError(f"`{name}` is {value!r}: expected a number of steps, between 0 and 2**31 - 1.")
    return jnp.asarray(value, jnp.int32)


def as_static(value: Any, name: str) -> int | float:
    """A Python number out of a setting. A setting decides what is compiled, so it cannot be a traced value."""
    if is_traced(value):
        raise TypeError(f"`{name}` is traced ({value!r}), but it is static: make the scaler outside of `jax.jit`.")
    if isinstance(value, _ARRAYS) and np.shape(value) == ():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise ValueError(f"`{name}` is {value!r}: expected a number.")
    return value


def as_flag(grads_finite: ArrayLike) -> jax.Array:
    """A boolean scalar array out of what `adjust` was given."""
    known = isinstance(grads_finite, bool | jax.Array | np.ndarray | np.generic)
    if not known or np.shape(grads_finite) or not jnp.issubdtype(jnp.result_type(grads_finite), jnp.bool_):
        raise ValueError(
            f"`grads_finite` is {short_repr(grads_finite)}: expected boolean scalar. Write jamp.all_finite(grads)."
        )
    return jnp.asarray(grads_finite)


def check_tree(tree: Any, method: str) -> None:
    """Refuses what holds no numbers, such as the name of a loss."""
    write = "grads = scaler.unscale(grads)" if method == "unscale" else "loss = scaler.scale(loss)"
    check_holds_numbers(tree, f"`{method}` takes a tree of arrays", f"Write `{write}`.")


def scale_tree(tree: T, factor: jax.Array) -> T:
    """Multiplies the floating and complex leaves; those narrower than float32 come out as float32."""
    check_tree(tree, "scale")
    factor = checkpoint_name(factor, SCALE_NAME)
    return full_precision(_map_inexact)(lambda x: _multiply(x, factor), tree)


def unscale_tree(tree: T, factor: jax.Array) -> T:
    """Divides the floating and complex leaves; those narrower than float32 come out as float32."""
    check_tree(tree, "unscale")
    factor = checkpoint_name(factor, SCALE_NAME)
    return full_precision(_map_inexact)(lambda x: _multiply(x, factor, inverse=True), tree)


def raise_tree(tree: T) -> T:
    """Casts floating leaves narrower than float32 to float32."""
    return _map_inexact(_raise, tree)


def is_inexact(x: Any) -> bool:
    """Whether a leaf holds floating or complex numbers."""
    return isinstance(x, (float, complex)) or (isinstance(x, _ARRAYS) and jnp.issubdtype(x.dtype, jnp.inexact))


def _map_inexact(fun: Callable[[Any], jax.Array], tree: T) -> T:
    return jax.tree.map(lambda x: fun(x) if is_inexact(x) else x, tree)


def _raise(x: ArrayLike) -> jax.Array:
    dtype = jnp.result_type(x)
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.asarray(x, jnp.float32 if narrow else dtype)  # With a dtype, so that no weak type remains.


def _multiply(x: ArrayLike, factor: jax.Array, inverse: bool = False) -> jax.Array:
    x = _raise(x)
    if jnp.iscomplexobj(x):  # By parts: a complex product with an infinity is NaN in both of them.
        return lax.complex(_multiply(x.real, factor, inverse), _multiply(x.imag, factor, inverse))
    factor = factor.astype(x.dtype)  # First, so that the reciprocal has all digits of a float64 leaf.
    return x * (1 / factor if inverse else factor)
