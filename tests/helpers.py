"""Assertions that several tests share."""

import subprocess
import sys
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path


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
    """Asserts that two trees are the same: structures, dtypes, shapes and every bit, the sign of zeros included.

    `chex.assert_trees_all_equal` takes bfloat16 for float32, and -0 for 0.
    """
    chex.assert_trees_all_equal_comparator(lambda x, y: _bits(x) == _bits(y), lambda x, y: f"{x!r}, {y!r}", a, b)


def _bits(x: Any) -> tuple:
    is_key = jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    array = np.asarray(jax.random.key_data(x) if is_key else jnp.asarray(x))
    return jnp.result_type(x), array.shape, array.tobytes()


def run_python(code: str) -> str:
    """Runs code in a fresh interpreter, with warnings as errors, and returns what it prints."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
