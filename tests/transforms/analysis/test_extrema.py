"""The gradient of a maximum goes to the values that are equal to it, however the program is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import both_halves, find, trace

KEYS = jax.random.split(jax.random.key(0), 4)
X = jax.random.normal(KEYS[0], (4, 50, 3))
INNER = jax.random.normal(KEYS[1], (3, 32))
OUTER = jax.random.normal(KEYS[2], (32, 64)) / 6
BIAS = jax.random.normal(KEYS[3], (64,)) / 20


def pooled_after_norm(bias, extremum):
    h = jax.nn.relu(X @ INNER) @ OUTER
    h = (h - h.mean((0, 1))) * lax.rsqrt(h.var((0, 1)) + 1e-5) + bias
    return (extremum(jax.nn.relu(h)) ** 2).mean()


def largest(h):
    return h.max(1)


def smallest(h):
    return (-h).min(1)


@both_halves
@pytest.mark.parametrize("extremum", [largest, smallest])
def test_a_compiled_gradient_inside_the_function_is_that_of_float32(extremum, half):
    expected = jax.grad(pooled_after_norm)(BIAS, extremum)
    cast = jamp.cast_fn(lambda bias: jax.grad(pooled_after_norm)(bias, extremum), f"O2:{half}")
    for gradient in (cast, jax.jit(cast)):
        assert jnp.linalg.norm(gradient(BIAS) - expected) < 0.02 * jnp.linalg.norm(expected)


def test_a_maximum_without_a_gradient_is_left_alone():
    jaxpr = trace(jamp.cast_fn(lambda b: pooled_after_norm(b, largest), "O2:bfloat16"), BIAS)
    assert not find(jaxpr, "optimization_barrier")
    np.testing.assert_allclose(jamp.cast_fn(jnp.max)(X), X.max())


def test_pinned_values_keep_the_range_of_float32():
    def loss(w):
        return jnp.max((jnp.ones((1, 1)) @ w) ** 2)

    value, gradient = jamp.cast_fn(jax.value_and_grad(loss), "O2:float16")(jnp.array([[300.0, 200.0]]))
    np.testing.assert_allclose((value, *gradient[0]), (90_000, 600, 0), rtol=1e-2)
    tiny = jamp.cast_fn(jax.grad(lambda w: jnp.min((jnp.ones((1, 1)) @ w) ** 2)), "O2:float16")
    np.testing.assert_allclose(tiny(jnp.array([[1e-4, 5e-5, 2e-4]])), [[0, 1e-4, 0]], rtol=1e-2)
