"""Epsilons that are zero in float16: what they keep from zero stays float32 until it has divided."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.transforms.harness import EYE, X, mixed_levels, out_dtypes, run, trace

WITH_ZEROS = jnp.where(jnp.arange(X.shape[0])[:, None] == 1, 0.0, jnp.round(4 * X))

DIVISORS = {
    "abs": lambda h: jnp.abs(h) + 1e-8,
    "clip": lambda h: jnp.clip(jnp.abs(h), 1e-8),
    "full": lambda h: jnp.abs(h) + jnp.full(h.shape, 1e-8),
    "largest": lambda h: jnp.maximum(jnp.max(jnp.abs(h), -1, keepdims=True), 1e-12),
    "maximum": lambda h: jnp.maximum(jnp.abs(h), 1e-8),
    "norm": lambda h: jnp.linalg.norm(h, axis=-1, keepdims=True) + 1e-8,
    "reciprocal": lambda h: 1.0 / (1.0 / (jnp.abs(h) + 1e-8)),
    "root": lambda h: jnp.sqrt(h * h + 1e-12),
    "sum": lambda h: jnp.sum(jnp.abs(h), -1, keepdims=True) + 1e-9,
    "where": lambda h: jnp.where(h == 0, 1e-8, h),
}


@mixed_levels
@pytest.mark.parametrize("divisor", DIVISORS.values(), ids=DIVISORS.keys())
def test_zero_divided_by_an_epsilon_is_zero(divisor, level):
    def fn(w, x):
        h = x @ w
        return jnp.tanh(h / divisor(h)) @ w

    actual = run(jamp.cast_fn(fn, f"{level}:float16"), EYE, WITH_ZEROS)
    np.testing.assert_allclose(actual, fn(EYE, WITH_ZEROS), atol=2e-3)


def test_what_was_divided_is_half_again():
    def fn(w, x):
        h = x @ w
        return (h * (h / (jnp.abs(h) + 1e-8))) @ w

    assert out_dtypes(trace(jamp.cast_fn(fn, "O2:float16"), EYE, X), "add", "div") == {"float32"}
    assert out_dtypes(trace(jamp.cast_fn(fn, "O2:float16"), EYE, X), "mul") == {"float16"}
    # In bfloat16 the epsilon is a number too, but the derivative of the quotient cancels.
    assert out_dtypes(trace(jamp.cast_fn(fn, "O2:bfloat16"), EYE, X), "add", "div") == {"float32"}
    assert out_dtypes(trace(jamp.cast_fn(fn, "O2:bfloat16"), EYE, X), "mul") == {"bfloat16"}


@pytest.mark.parametrize("epsilon", [1e-5, 1e-6, 1e-7])
def test_an_epsilon_that_float16_holds_is_weak(epsilon):
    def fn(w, x):
        return jnp.tanh(x @ w + epsilon) @ w

    assert out_dtypes(trace(jamp.cast_fn(fn, "O2:float16"), EYE, X), "add") == {"float16"}


def test_an_epsilon_survives_its_scope_and_a_call():
    def fn(w, x):
        h = x @ w
        with jax.named_scope("Divisor"):
            divisor = jax.jit(lambda h: jnp.abs(h) + 1e-8)(h)
        return jnp.tanh(h / divisor.reshape(h.shape)) @ w

    assert jnp.isfinite(run(jamp.cast_fn(fn, "O2:float16"), EYE, WITH_ZEROS)).all()
