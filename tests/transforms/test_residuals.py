"""What reverse mode keeps of a function under `residuals="half"`."""

import jax
import jax.numpy as jnp
import pytest

from jamp.inspect import bytes_by_dtype, residuals
from tests.transforms.harness import SIZE, W, X, layer_norm, o2

INDEX = jnp.array([2, 0, 2, 1])


def running_sums(w, x):
    return jnp.tanh(jnp.cumsum(x @ w, 0) @ w) @ w


def sums_of_segments(w, x):
    return jnp.tanh(jax.ops.segment_sum(x @ w, INDEX, len(x)) @ w) @ w


def norms_and_activations(w, x):
    return jax.nn.gelu(layer_norm(x @ w) @ w) @ w


@pytest.mark.parametrize("fn", [running_sums, sums_of_segments, norms_and_activations])
def test_no_float32_of_data_size_is_kept(fn):
    """A sum that is as large as its operand is computed in float32, and kept in the half that its reader takes."""
    kept = bytes_by_dtype(residuals(lambda w, x: o2(fn)(w, x).sum(), W, X))
    assert kept.get("float32", 0) < X.size * 4
    assert kept["bfloat16"] <= 4 * X.size * 2 + W.size * 2
    assert kept["bfloat16"] >= 2 * len(X) * SIZE
