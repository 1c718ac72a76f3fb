"""What averages by a softmax gain or lose beside a number is all that is left of them: float32, wherever it is made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import both_halves, mixed_levels, product_dtypes, trace

rng = np.random.default_rng(0)
RETURNS = np.float32(0.01 * rng.standard_normal((11, 24)))
X = np.float32(rng.standard_normal((24, 16)))
W = {"in": np.float32(rng.standard_normal((16, 16)) / 4), "out": np.float32(rng.standard_normal(16) / 4)}


def shares(w):
    """A part of each of 24 for a network's wealth."""
    return jax.nn.softmax(jnp.tanh(X @ w["in"]) @ w["out"])


GAINS = {
    "matrix times vector": lambda gross, w, level: gross @ w - level,
    "vector times matrix": lambda gross, w, level: w @ gross.T - level,
    "what is lost": lambda gross, w, level: -(level - gross @ w),
    "einsum": lambda gross, w, level: jnp.einsum("ta,a->t", gross, w) - level,
    "by the day": lambda gross, w, level: jnp.einsum("ta,ta->t", gross, jnp.broadcast_to(w, gross.shape)) - level,
    "one by one": lambda gross, w, level: jax.vmap(lambda row: row @ w - level)(gross),
    "scanned": lambda gross, w, level: lax.scan(lambda c, row: (c, row @ w - level), 0.0, gross)[1],
    "in a function": lambda gross, w, level: jax.jit(lambda gross, w: gross @ w - level)(gross, w),
    "kept in a checkpoint": lambda gross, w, level: jax.checkpoint(lambda w: gross @ w - level)(w),
    "the mean in a function": lambda gross, w, level: jax.jit(jnp.matmul)(gross, w) - level,
}


@both_halves
@mixed_levels
@pytest.mark.parametrize("gains", GAINS.values(), ids=GAINS)
def test_gains_are_those_at_zero(gains, level, half):
    def growth(at):
        def loss(w, returns):
            return (gains(returns + at, shares(w), at) ** 2).sum() * 1e3

        return jax.jit(jax.value_and_grad(jamp.cast_fn(loss, f"{level}:{half}")))(W, RETURNS)

    (here, d_here), (there, d_there) = growth(1.0), growth(16.0)
    np.testing.assert_allclose(np.float32(here), np.float32(there), rtol=4e-3)
    for one, other in zip(jax.tree.leaves(d_here), jax.tree.leaves(d_there), strict=True):
        assert np.linalg.norm(np.float32(one) - np.float32(other)) < 0.02 * np.linalg.norm(np.float32(one))


@both_halves
@mixed_levels
@pytest.mark.parametrize("epsilon", [0.0, 1e-8])
def test_logarithms_of_means_near_one(epsilon, level, half):
    def growth(w, prices):
        mean = (prices[1:] / prices[:-1]) @ shares(w)
        return jnp.log(mean + epsilon if epsilon else mean).sum()

    prices = 100 * np.exp(np.cumsum(RETURNS + 0.005, 0))
    cast = jamp.cast_fn(growth, f"{level}:{half}")
    np.testing.assert_allclose(np.float32(cast(W, prices)), growth(W, prices), rtol=0.02)


@both_halves
@mixed_levels
def test_attention_of_one_query_is_half(level, half):
    def fn(w, x):
        return shares(w) @ jnp.tanh(x @ w["in"]) + 1

    dtypes = product_dtypes(trace(jamp.cast_fn(fn, f"{level}:{half}"), W, X))
    assert {dtype for each in dtypes for dtype in each[:2]} == {half}
