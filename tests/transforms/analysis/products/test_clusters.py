"""Centres of clusters are weighted means: float32, so that it does not matter where space begins. Layers are half."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import both_halves, mixed_levels, product_dtypes, trace

rng = np.random.default_rng(0)
X = np.float32(rng.standard_normal((40, 16)))
W = np.float32(rng.standard_normal((16, 16)) / 4)
CENTRES = np.float32(2 * rng.standard_normal((5, 16)))


def shares(points, centres):
    return jax.nn.softmax(-((points[:, None] - centres) ** 2).sum(-1), 1)


CENTRE = {
    "by a product": lambda w, x: (w.T @ x) / (w.sum(0)[:, None] + 1e-6),
    "by einsum": lambda w, x: jnp.einsum("nk,nd->kd", w, x) / jnp.maximum(w.sum(0), 1e-6)[:, None],
    "in columns": lambda w, x: ((x.T @ w) / (w.sum(0) + 1e-6)).T,
    "times the inverse": lambda w, x: (w.T @ x) * (1 / (w.sum(0) + 1e-6))[:, None],
    "in a function": lambda w, x: jax.jit(jnp.matmul)(w.T, x) / (w.sum(0)[:, None] + 1e-6),
    "of the kept sum": lambda w, x: (w.T @ x) / (w.sum(0, keepdims=True).T + 1e-6),
}


def clustered(centre, x, centres):
    """What is left of points about the centres of five clusters, found in three steps."""
    centres = lax.scan(lambda c, _: (centre(shares(x, c), x), None), centres, length=3)[0]
    return (shares(x, centres) * ((x[:, None] - centres) ** 2).sum(-1)).mean()


@both_halves
@mixed_levels
@pytest.mark.parametrize("centre", CENTRE.values(), ids=CENTRE)
def test_clusters_have_no_origin(centre, level, half):
    def found(far):
        def loss(w):
            return clustered(centre, jnp.tanh(X @ w) + far, CENTRES + far)

        return jax.jit(jax.value_and_grad(jamp.cast_fn(loss, f"{level}:{half}")))(W)

    (here, d_here), (there, d_there) = found(8.0), found(256.0)
    np.testing.assert_allclose(np.float32(here), np.float32(there), rtol=4e-3)
    assert np.linalg.norm(np.float32(d_here - d_there)) < 0.02 * np.linalg.norm(np.float32(d_here))


@mixed_levels
def test_an_empty_cluster_has_a_gradient(level):
    def loss(w):
        return clustered(CENTRE["by a product"], jnp.tanh(X @ w), jnp.asarray(CENTRES).at[4].add(3.0))

    assert np.isfinite(jax.grad(jamp.cast_fn(loss, f"{level}:float16"))(W)).all()


LAYERS = {
    "a graph by its degrees": lambda w, x: (W @ jnp.tanh(x @ w)) / W.sum(1, keepdims=True),
    "attention that is divided last": lambda w, x: (lambda e: (e @ jnp.tanh(x @ w)) / e.sum(1, keepdims=True))(
        jnp.exp(x @ x.T - (x @ x.T).max(1, keepdims=True))
    ),
    "slots": lambda w, x: (lambda a: (a / a.sum(0)).T @ jnp.tanh(x @ w))(jax.nn.softmax(x @ w[:, :5]) + 1e-8),
    "divided by another sum": lambda w, x: (jax.nn.softmax(x @ w) @ w) / jax.nn.softmax(x).sum(1, keepdims=True),
}


@both_halves
@mixed_levels
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_layers_are_half(layer, level, half):
    cast = jamp.cast_fn(layer, f"{level}:{half}")
    assert {dtype for each in product_dtypes(trace(cast, W, X[:16])) for dtype in each[:2]} == {half}
