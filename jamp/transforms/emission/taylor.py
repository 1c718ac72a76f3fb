"""Taylor mode (`jax.experimental.jet`), which knows neither checkpoints nor functions with a rule of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax import Array
from jax.core import Tracer

from jamp._compat import is_taylor_tracer
from jamp.transforms.keeping.names import hold, keep

# Set while a program is emitted for Taylor series. In jit's key too, so that what is compiled for them is not reused.
_taylor = jax.make_user_context(False)


def taylor_mode(inputs: Sequence[Array]) -> AbstractContextManager[object]:
    """A context in which a program is emitted for what its inputs are: Taylor series, or anything else."""
    return _taylor(_taylor.value or any(map(is_taylor_tracer, inputs)))


def is_taylor_mode() -> bool:
    """Whether Taylor series are pushed through what is emitted."""
    return bool(_taylor.value)


def kept(value: Array, saved: object = None) -> Any:
    """A value under the name by which the backward pass is given it; `saved` is as `keep` has it."""
    return keep(value, saved) if isinstance(value, Tracer) and not is_taylor_mode() else value


def held(value: Array) -> Any:
    """A value that a checkpoint is given, so that what is computed of it again is held apart; a number need not be."""
    return value if is_taylor_mode() or not jax.typeof(value).shape else hold(value)


def with_rule(function: Any) -> Callable[..., Any]:
    """A function with its rule of differentiation, which is of no use for Taylor series: these take its operations."""
    return function.__wrapped__ if is_taylor_mode() else function
