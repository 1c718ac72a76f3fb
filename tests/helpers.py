"""Assertions that several tests share."""

import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path


def count_traces(fun: Callable) -> tuple[Callable, Callable[[], int]]:
    """Jits a function and counts how often it is traced.

    Returns:
        The jitted function, and a function that tells the number of traces so far.
    """
    traces = 0

    @wraps(fun)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal traces
        traces += 1
        return fun(*args, **kwargs)

    return jax.jit(counted), lambda: traces


def spec(x: Any) -> tuple:
    """Shape, dtype and weak type of an array: what decides whether jax compiles again."""
    aval = jax.typeof(x)
    return aval.shape, aval.dtype, aval.weak_type


def assert_same_spec(a: Any, b: Any) -> None:
    """Asserts that two trees agree in structure, and in shape, dtype and weak type of every leaf."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(tree_leaves_with_path(a), jax.tree.leaves(b), strict=True)
    different = {keystr(path): (spec(x), spec(y)) for (path, x), y in pairs if spec(x) != spec(y)}
    assert not different, different


def assert_bitwise_equal(a: Any, b: Any) -> None:
    """Asserts that two trees of arrays are the same: dtypes, shapes and every bit, NaNs included."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert jnp.result_type(x) == jnp.result_type(y), keystr(path)
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), err_msg=keystr(path))


def run_python(code: str) -> str:
    """Runs code in a fresh interpreter, with warnings as errors, and returns what it prints."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
