"""The assertions that other tests rely on can fail."""

import chex
import jax
import jax.numpy as jnp
import pytest

from tests.helpers import assert_bitwise_equal, assert_same_spec


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (jnp.zeros(2), -jnp.zeros(2)),
        (jnp.ones(2, jnp.bfloat16), jnp.ones(2)),
        (jnp.ones(1), jnp.ones(())),
        (jax.random.key(0), jax.random.key(1)),
        (jnp.ones(2), jnp.array([1.0, jnp.nan])),
    ],
)
def test_different_leaves_differ(a, b):
    assert_bitwise_equal({"x": a}, {"x": a})
    with pytest.raises(AssertionError, match="x"):
        assert_bitwise_equal({"x": a}, {"x": b})
    with pytest.raises(AssertionError):
        assert_bitwise_equal({"x": a}, {"x": a, "y": a})


def test_a_weak_type_is_another_spec():
    with pytest.raises(AssertionError):
        assert_same_spec(jnp.asarray(1.0), jnp.float32(1.0))


@pytest.mark.parametrize("n", [1, 2])
def test_traces_are_counted_anew_in_each_case(n):
    fun = jax.jit(chex.assert_max_traces(lambda x: x + 1, n=n))
    for size in range(1, n + 1):
        fun(jnp.ones(size))
    with pytest.raises(AssertionError, match=f"traced > {n} times"):
        fun(jnp.ones(n + 1))
