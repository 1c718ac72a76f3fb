"""Regions in another precision than the policy says, and the switch that turns `cast_fn` off."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax

from jamp._calls import explains, no_context
from jamp._dtypes import short_repr
from jamp.transforms._labels import FULL_SCOPE, HALF_SCOPE

F = TypeVar("F", bound=Callable[..., Any])

# Part of the key of jit's cache: a function compiled outside of `disable()` is traced anew inside.
_disabled = jax.make_user_context(False)


@no_context(
    "`jamp.full_precision` takes a function: write `jamp.full_precision(fn)(x)`, not `with jamp.full_precision:`."
)
def full_precision(fn: F = None) -> F:  # type: ignore[assignment]  # Left out, it is an error in words.
    """Marks a function whose operations run in float32, whatever the policy of the `cast_fn` around it.

    Args:
        fn: Any function of arrays. What it calls is covered too, inside `jit`, `scan`, `grad` and so on.

    Returns:
        The function with the mark. Outside of `cast_fn` the mark does nothing.

    Raises:
        TypeError: If `fn` is not callable.

    Example:
        >>> import jax, jax.numpy as jnp, jamp
        >>> @jamp.cast_fn(policy="O2:bfloat16")
        ... def model(w, x):
        ...     hidden = x @ w                                       # bfloat16
        ...     return jamp.full_precision(jnp.matmul)(hidden, w)    # float32
        >>> x = jnp.full((2, 2), 1 + 2**-7)
        >>> model(jnp.eye(2), x).dtype
        dtype('float32')
    """
    return _marked(fn, FULL_SCOPE, "full_precision")


@no_context(
    "`jamp.half_precision` takes a function: write `jamp.half_precision(fn)(x)`, not `with jamp.half_precision:`."
)
def half_precision(fn: F = None) -> F:  # type: ignore[assignment]  # Left out, it is an error in words.
    """Marks a function all of whose operations run in the policy's half dtype, norms and exponentials too.

    Args:
        fn: Any function of arrays.

    Returns:
        The function with the mark. Outside of `cast_fn` the mark does nothing.

    Raises:
        TypeError: If `fn` is not callable.

    Example:
        >>> import jax.numpy as jnp, jamp
        >>> fast_exp = jamp.half_precision(jnp.exp)
        >>> float(jamp.cast_fn(fast_exp, "O2:bfloat16")(jnp.float32(1.0)))
        2.71875
        >>> float(fast_exp(jnp.float32(0.0)))
        1.0
    """
    return _marked(fn, HALF_SCOPE, "half_precision")


def _marked(fn: F, scope: str, caller: str) -> F:
    if not callable(fn):
        raise TypeError(
            f"`jamp.{caller}` takes a function, got {short_repr(fn)}. Write `jamp.{caller}(fn)(x)`, not "
            f"`jamp.{caller}(fn(x))`, nor `with jamp.{caller}():`."
        )

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(scope):
            return fn(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


class _Disabled(contextlib.ContextDecorator):
    """A context, which may be entered again, and decorates functions."""

    def __init__(self) -> None:
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(_disabled(True))
        self._entered[-1].__enter__()

    def __exit__(self, *exc: object) -> None:
        self._entered.pop().__exit__(*exc)  # type: ignore[arg-type]  # As Python hands it over.


@no_context("`jamp.disable` makes a context: write `with jamp.disable():`.")
@explains("jamp.disable()(fn), which is a function, or `with jamp.disable():`")
def disable() -> _Disabled:
    """A context in which `cast_fn` does nothing, to compare with float32 or to find a bug.

    The state of the switch is part of the key of `jax.jit`'s cache: a function that was compiled outside is traced
    again inside, and the compiled function from outside is used again after.

    Returns:
        A context manager, which decorates functions too: `jamp.disable()(fn)` is `fn` in float32.

    Example:
        >>> import jax, jax.numpy as jnp, jamp
        >>> double = jax.jit(jamp.cast_fn(lambda x: jnp.dot(x, x), "O3:bfloat16"))
        >>> x = jnp.float32([1 + 2**-10])
        >>> with jamp.disable():
        ...     float(double(x))
        1.001954078674316
        >>> float(double(x))
        1.0
    """
    return _Disabled()


def is_disabled() -> bool:
    """Whether the caller is inside of `disable()`."""
    return _disabled.value
