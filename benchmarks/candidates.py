"""A precision that a model is measured at, and how each library makes one of float32 code."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jamp

Apply = Callable[..., Any]


def unchanged(apply: Apply) -> Apply:
    """The function itself."""
    return apply


def dots_saveable(apply: Apply) -> Apply:
    """The function under JAX's checkpoint policy that keeps the results of products."""
    return jax.checkpoint(apply, policy=jax.checkpoint_policies.dots_saveable)


@dataclass(frozen=True)
class Candidate:
    """One precision.

    Attributes:
        name: Key in the results, and heading of its columns.
        wrap: Makes the apply function of that precision.
        dtype: Half dtype that the model is built with, in the mixed precision of its library or written by hand; None
            for the float32 code.
        policy: What jamp is given; `"O0"` where jamp has no part in it.
        matmul_precision: As in `jax.default_matmul_precision`; None for that of the library.
        runs: Whether it is compiled and run, or only traced.
    """

    name: str
    wrap: Callable[[Apply], Apply] = unchanged
    dtype: Any = None
    policy: str = "O0"
    matmul_precision: str | None = None
    runs: bool = True


def of_jamp(policy: str, name: str = "jamp") -> Candidate:
    """What `jamp.cast_fn` makes of float32 code."""
    return Candidate(name, lambda apply: jamp.cast_fn(apply, policy), policy=policy)


def of_peers(dtype: Any) -> tuple[list[Candidate], dict[str, str]]:
    """What jmp and mpx make of float32 code, in a half dtype.

    Returns:
        A candidate for each of them that is installed, and by name why one is missing.
    """
    found, missing = [], {}
    for name, make in (("jmp", _jmp), ("mpx", _mpx)):
        try:
            found.append(Candidate(name, make(importlib.import_module(name), dtype)))
        except ImportError as error:
            missing[name] = str(error)
    return found, missing


def _jmp(jmp: Any, dtype: Any) -> Callable[[Apply], Apply]:
    """The recipe of jmp's README: everything that comes in is cast to half, what goes out to float32."""
    casts = jmp.Policy(jnp.float32, dtype, jnp.float32)
    return lambda apply: lambda *args: casts.cast_to_output(apply(*casts.cast_to_compute(args)))


def _mpx(mpx: Any, dtype: Any) -> Callable[[Apply], Apply]:
    """What `mpx.filter_grad` does to its function."""
    return lambda apply: mpx.cast_function(apply, dtype, jnp.float32)
