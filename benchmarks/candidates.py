"""The precisions that a model is measured at: its own two, and what jmp, mpx and jamp make of its float32 code."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Apply = Callable[..., Any]


@dataclass(frozen=True)
class Candidate:
    """One precision.

    Attributes:
        name: Heading of its columns.
        wrap: Makes the apply function of that precision.
        native: Whether it is built on the library's own mixed precision instead of the float32 code.
        runs: Whether it is compiled and run, or only traced.
    """

    name: str
    wrap: Callable[[Apply], Apply]
    native: bool = False
    runs: bool = True


def candidates(policy: str) -> tuple[list[Candidate], dict[str, str]]:
    """All precisions whose library is installed.

    Args:
        policy: What `jamp.cast_fn` is given; its half dtype is that of the others too.

    Returns:
        The candidates, and by name why one is missing.
    """
    dtype = half_dtype(policy)
    found = [
        Candidate("float32", _unchanged),
        Candidate("native", _unchanged, native=True),
        Candidate("native, dots saved", _dots_saveable, native=True, runs=False),
    ]
    missing: dict[str, str] = {}
    for name, make in (("jmp", _jmp), ("mpx", _mpx), ("jamp", _jamp)):
        try:
            found.append(Candidate(name, make(importlib.import_module(name), dtype, policy), runs=name != "mpx"))
        except (ImportError, AttributeError) as error:
            missing[name] = str(error)
    return found, missing


def half_dtype(policy: str) -> Any:
    """Half dtype that a policy's name ends in, bfloat16 if it names none."""
    return jnp.dtype(policy.partition(":")[2] or jnp.bfloat16)


def _unchanged(apply: Apply) -> Apply:
    return apply


def _dots_saveable(apply: Apply) -> Apply:
    return jax.checkpoint(apply, policy=jax.checkpoint_policies.dots_saveable)


def _jmp(jmp: Any, dtype: Any, policy: str) -> Callable[[Apply], Apply]:
    """The recipe of jmp's README: everything that comes in is cast to half, what goes out to float32."""
    del policy
    casts = jmp.Policy(jnp.float32, dtype, jnp.float32)

    def wrap(apply: Apply) -> Apply:
        return lambda *args: casts.cast_to_output(apply(*casts.cast_to_compute(args)))

    return wrap


def _mpx(mpx: Any, dtype: Any, policy: str) -> Callable[[Apply], Apply]:
    """What `mpx.filter_grad` does to its function."""
    del policy
    return lambda apply: mpx.cast_function(apply, dtype, jnp.float32)


def _jamp(jamp: Any, dtype: Any, policy: str) -> Callable[[Apply], Apply]:
    del dtype
    cast_fn = jamp.cast_fn  # looked up now, so that an incomplete package is reported as missing
    return lambda apply: cast_fn(apply, policy)
