"""`jax.value_and_grad` and `jax.grad` through a scaled loss, which the caller never sees."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, tree_leaves_with_path

from jamp._calls import called, explains
from jamp._dtypes import short_repr
from jamp._tree import is_number
from jamp.scalers._base import LossScale, check_is_loss_scale, is_inexact, raise_tree

P = ParamSpec("P")
T = TypeVar("T")

_ELSEWHERE = called(
    fun=("loss_fn", "loss", "f", "func", "function"),
    loss_scale=("scaler", "scale", "loss_scaler", "dynamic_scale", "loss_scaling", "scaling"),
)


@explains("jamp.value_and_grad(loss_fn, loss_scale)(params, batch)", _ELSEWHERE)
def value_and_grad(
    fun: Callable[P, T],
    loss_scale: LossScale,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    holomorphic: bool = False,
    allow_int: bool = False,
    transform: Callable[..., Any] = jax.value_and_grad,
) -> Callable[P, tuple[T, Any]]:
    """`jax.value_and_grad` through a scaled loss.

    The loss is raised to float32 and scaled, differentiated, and the gradients are unscaled with the same scale.
    Gradients that overflowed come out as infinities or NaN: ask `jamp.all_finite`, then `loss_scale.adjust`.

    Args:
        fun: Function to be differentiated. Returns a scalar, or a pair of a scalar and anything with `has_aux`.
        loss_scale: `jamp.DynamicLossScale`, `jamp.StaticLossScale` or `jamp.NoOpLossScale`.
        argnums: Which positional arguments to differentiate with respect to.
        has_aux: Whether `fun` returns a pair.
        holomorphic: As in `jax.value_and_grad`.
        allow_int: As in `jax.value_and_grad`.
        transform: What differentiates: see `jamp.scaled_value_and_grad`.

    Returns:
        A function with the arguments of `fun` that returns `(value, gradients)` as that of `jax.value_and_grad` does.
        The value is what `fun` returned, never scaled; gradients of half-precision arguments are float32.

    Raises:
        TypeError: If `fun` cannot be called or `loss_scale` is no loss scale; when the function is called, if an
            argument to differentiate holds leaves that are not floating. All of them are named.

    Example:
        >>> import jamp, jax.numpy as jnp
        >>> square = lambda x: (x**2).sum()
        >>> jamp.value_and_grad(square, jamp.DynamicLossScale(2.0**15))(jnp.array([1.0, 2.0]))
        (Array(5., dtype=float32), Array([2., 4.], dtype=float32))
    """
    scaled = scaled_value_and_grad(
        fun, loss_scale, argnums, has_aux, holomorphic=holomorphic, allow_int=allow_int, transform=transform
    )

    @functools.wraps(fun)
    def value_and_grad_fun(*args: P.args, **kwargs: P.kwargs) -> tuple[T, Any]:
        value, grads = scaled(*args, **kwargs)
        # What does not scale does not unscale, and gradients are float32 all the same.
        return value, raise_tree(loss_scale.unscale(grads))

    return value_and_grad_fun


@explains("jamp.grad(loss_fn, loss_scale)(params, batch)", _ELSEWHERE)
def grad(
    fun: Callable[P, Any],
    loss_scale: LossScale,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Callable[P, Any]:
    """`jax.grad` through a scaled loss: `jamp.value_and_grad` without the value.

    Args:
        fun: As in `jamp.value_and_grad`, and so are the other arguments.
        loss_scale: The loss scale.
        argnums: Which positional arguments to differentiate with respect to.
        has_aux: Whether `fun` returns a pair.
        holomorphic: As in `jax.grad`.
        allow_int: As in `jax.grad`.

    Returns:
        A function that returns the gradients, or the pair of gradients and auxiliary data with `has_aux`.

    Example:
        >>> import jamp, jax.numpy as jnp
        >>> jamp.grad(lambda x: x**3, jamp.StaticLossScale(128.0))(jnp.float16(2.0))
        Array(12., dtype=float32)
    """
    both = value_and_grad(fun, loss_scale, argnums, has_aux, holomorphic=holomorphic, allow_int=allow_int)

    @functools.wraps(fun)
    def grad_fun(*args: P.args, **kwargs: P.kwargs) -> Any:
        value: Any
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fun


def scaled_value_and_grad(
    fun: Callable[P, T],
    loss_scale: LossScale,
    argnums: Any,
    has_aux: bool,
    *,
    holomorphic: bool = False,
    allow_int: bool = False,
    transform: Callable[..., Any] = jax.value_and_grad,
) -> Callable[P, tuple[T, Any]]:
    """The true value and the scaled gradients of `fun`; the arguments are those of `value_and_grad`."""
    if not callable(fun):
        raise TypeError(
            f"`fun` is {short_repr(fun)}: expected a function that returns the loss. Write "
            "jamp.scaled_value_and_grad(loss_fn, opt_state)(params, batch)."
        )
    check_is_loss_scale(loss_scale)
    _check_transform(transform)
    _check_argnums(argnums)

    @functools.wraps(fun)
    def scaled_fun(*args: P.args, **kwargs: P.kwargs) -> tuple[Any, T]:
        out = fun(*args, **kwargs)
        value = _split(out)[0] if has_aux else out
        _check_loss(value, has_aux)
        return loss_scale.scale(value), out

    # Only what was asked for: Equinox takes the first argument alone, and has no word for the others.
    asked = {"argnums": (argnums, 0), "holomorphic": (holomorphic, False), "allow_int": (allow_int, False)}
    settings = {name: value for name, (value, default) in asked.items() if value is not default}
    differentiate = transform(scaled_fun, has_aux=True, **settings)

    @functools.wraps(fun)
    def scaled_value_and_grad_fun(*args: P.args, **kwargs: P.kwargs) -> tuple[T, Any]:
        if transform is jax.value_and_grad and not holomorphic and not allow_int:
            _check_floating(args, argnums)
        (_, out), grads = differentiate(*args, **kwargs)
        return out, grads

    return scaled_value_and_grad_fun


def _check_transform(transform: Any) -> None:
    if not callable(transform):
        raise TypeError(f"`transform` is {short_repr(transform)}: expected jax.value_and_grad, or one that is like it.")
    if "value_and_grad" not in getattr(transform, "__name__", "value_and_grad"):
        raise ValueError(
            f"`transform` is {transform.__name__}: expected one that returns values and gradients, such as "
            "jax.value_and_grad, nnx.value_and_grad or eqx.filter_value_and_grad."
        )


def _check_argnums(argnums: Any) -> None:
    """Refuses names and the like; what Equinox and NNX take here besides, such as `nnx.DiffState`, is theirs."""
    chosen = argnums if isinstance(argnums, tuple | list) else (argnums,)
    if not any(isinstance(x, str | float | bool | None) for x in chosen):
        return
    raise TypeError(
        f"`argnums` is {short_repr(argnums)}: expected the position of an argument, or several, such as argnums=0 or "
        "argnums=(0, 2)."
    )


def _split(out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(
            f"With has_aux=True `fun` has to return a pair (loss, auxiliary data), got {_described(out)}. Write "
            "`return loss, aux`, or leave `has_aux` away."
        )
    return out


def _check_loss(value: Any, has_aux: bool) -> None:
    """Refuses what is no scalar before it is scaled, so that the number in the message is the user's."""
    # What these lack JAX says: that a loss of integers has no gradient, for instance.
    if jnp.shape(value) == () if is_number(value) else hasattr(value, "__jax_array__"):
        return
    if value is None:
        got, write = "None", "`return` the loss at its end."
    elif isinstance(value, tuple | list) and not has_aux:
        got = _described(value)
        write = "For a pair (loss, auxiliary data) write has_aux=True: the answer is then ((loss, aux), grads)."
    elif is_number(value):
        got, write = _described(value), "Return the mean over the batch, `loss.mean()`."
    else:
        got, write = _described(value), "Return one number."
    raise TypeError(f"`fun` returned {got}: expected a scalar loss. {write}")


def _described(value: Any) -> str:
    """What a function returned, without the values, which are traced."""
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{jnp.result_type(value)}{list(jnp.shape(value))}" if is_number(value) else short_repr(value)


def _check_floating(args: tuple, argnums: int | Sequence[int]) -> None:
    """Names all leaves that cannot be differentiated; JAX names one, without its path."""
    chosen = (argnums,) if isinstance(argnums, int) else argnums
    bad = [
        f"  argument {i}{keystr(path)}: {_describe(leaf)}"
        for i in chosen if -len(args) <= i < len(args)  # JAX says it when there are not as many.
        for path, leaf in tree_leaves_with_path(args[i]) if not is_inexact(leaf)
    ]  # fmt: skip
    if bad:
        raise TypeError(
            "Only floating arrays have gradients, but these arguments are not:\n" + "\n".join(bad[:20])
            + (f"\n  and {len(bad) - 20} more" if len(bad) > 20 else "")
            + "\nMove them to another argument, or choose with `argnums`; `allow_int=True` gives them gradients of "
            "no value, and `holomorphic=True` differentiates complex functions. For modules write "
            "transform=nnx.value_and_grad (Flax NNX) or transform=eqx.filter_value_and_grad (Equinox)."
        )  # fmt: skip


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else repr(leaf)
