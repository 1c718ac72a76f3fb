"""Products of which a number, an identity or what they project leaves little are float32; those of layers are half."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.transforms.harness import both_halves, mixed_levels, product_dtypes, run, trace

rng = np.random.default_rng(0)
X = np.float32(rng.standard_normal((64, 16)))
NEAR = np.float32(X + 0.1 * rng.standard_normal((64, 16)))
W = np.float32(rng.standard_normal((16, 32)) / 4)
TURN = np.float32(np.linalg.qr(rng.standard_normal((32, 32)))[0] + 0.003 * rng.standard_normal((32, 32)))
BACK = np.float32(np.linalg.inv(TURN) + 1e-3)


def by_norm(t):
    return t / jnp.linalg.norm(t, axis=-1, keepdims=True)


def by_root(t):
    return t * jax.lax.rsqrt(jnp.sum(t * t, -1, keepdims=True) + 1e-8)


def by_limit(t):
    return t / jnp.maximum(jnp.linalg.norm(t, axis=-1, keepdims=True), 1e-6)


def by_einsum(t):
    return t / jnp.sqrt(jnp.maximum(jnp.einsum("nd,nd->n", t, t), 1e-9))[:, None]


def divided_after(a, b):
    return a @ b.T / (jnp.linalg.norm(a, axis=1)[:, None] * jnp.linalg.norm(b, axis=1))


def divided_twice(a, b):
    return a @ b.T / jnp.linalg.norm(a, axis=1)[:, None] / jnp.linalg.norm(b, axis=1)[None]


def cosines(unit):
    return lambda a, b: unit(a) @ unit(b).T


DISTANCES = {
    "1 - cosines": lambda a, b: 1 - cosines(by_norm)(a, b),
    "by rsqrt": lambda a, b: 1 - cosines(by_root)(a, b),
    "by a limited norm": lambda a, b: 1 - cosines(by_limit)(a, b),
    "by einsum": lambda a, b: 1 - cosines(by_einsum)(a, b),
    "divided after": lambda a, b: 1 - divided_after(a, b),
    "divided twice": lambda a, b: 1 - divided_twice(a, b),
    "clipped": lambda a, b: 1 - jnp.clip(cosines(by_norm)(a, b), -1, 1),
    "their diagonal": lambda a, b: 1 - jnp.diag(cosines(by_norm)(a, b)),
    "a chord": lambda a, b: jnp.sqrt(2 - 2 * by_norm(a) @ by_norm(b).T + 1e-6),
    "a kernel": lambda a, b: jnp.exp((cosines(by_norm)(a, b) - 1) / 0.01),
    "negated": lambda a, b: -cosines(by_norm)(a, b) + 1,
    "of ones": lambda a, b: jnp.ones(64) - jnp.diag(cosines(by_norm)(a, b)),
    "limited": lambda a, b: 1 - jnp.maximum(cosines(by_norm)(a, b), 0.1),
    "nearly one": lambda a, b: 1.001 - cosines(by_norm)(a, b),
    "in a loop": lambda a, b: jax.lax.map(lambda row: 1 - by_norm(row)[None] @ by_norm(b).T, a),
    "of several": lambda a, b: 1 - jax.vmap(cosines(by_norm))(a.reshape(4, 16, -1), b.reshape(4, 16, -1)),
}
WRITTEN = np.eye(32, dtype=np.float32)
LACKS = {
    "closed over": lambda w, v: w.T @ w - WRITTEN,
    "closed over by a function": lambda w, v: jax.jit(lambda w: w.T @ w - WRITTEN)(w),
    "the other way": lambda w, v: v @ w[:, :12] @ w[:, :12].T - v,
    "W' W - 1": lambda w, v: w.T @ w - jnp.eye(32),
    "1 - W' W": lambda w, v: jnp.eye(32) - w.T @ w,
    "by einsum": lambda w, v: jnp.einsum("ij,ik->jk", w, w) - jnp.eye(32),
    "a multiple": lambda w, v: 0.5 * (w.T @ w) - 0.5 * jnp.eye(32),
    "on the diagonal": lambda w, v: (w @ w.T).at[jnp.diag_indices(32)].add(-1.0),
    "of two": lambda w, v: w @ v - jnp.eye(32),
    "of several": lambda w, v: jax.vmap(jnp.matmul)(w[None], v[None]) - jnp.eye(32),
    "in a function": lambda w, v: jax.jit(lambda g: g - jnp.eye(32))(w @ v),
    "projected": lambda w, v: v - v @ w[:, :12] @ w[:, :12].T,
    "projected at once": lambda w, v: v - v @ (w @ w.T),
}


def operands(fn, *given):
    return {str(dtype) for pair in product_dtypes(trace(fn, *given)) for dtype in pair}


@both_halves
@mixed_levels
@pytest.mark.parametrize("distance", DISTANCES.values(), ids=DISTANCES)
def test_distances_by_cosines_are_those_of_float32(distance, level, half):
    assert operands(jamp.cast_fn(distance, f"{level}:{half}"), X, NEAR) == {"float32"}


def assert_gradients_agree(distance, cast):
    def loss(a, b):
        return (distance(a, b) * weights).sum()

    weights = np.float32(rng.random(jax.eval_shape(distance, X, NEAR).shape))
    found, traced = run(cast(loss), X, NEAR), run(jax.grad(loss, (0, 1)), X, NEAR)
    for one, other in zip(found, traced, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * np.abs(other).max())


@mixed_levels
@pytest.mark.parametrize("distance", DISTANCES.values(), ids=DISTANCES)
def test_their_gradients_are_those_of_float32(distance, level):
    assert_gradients_agree(distance, lambda loss: jax.grad(jamp.cast_fn(loss, f"{level}:bfloat16"), (0, 1)))


@mixed_levels
@pytest.mark.parametrize(
    "distance", [name for name in DISTANCES if name != "in a loop"]
)  # Its backward pass is another.
def test_gradients_inside_are_those_of_float32(distance, level):
    assert_gradients_agree(DISTANCES[distance], lambda loss: jamp.cast_fn(jax.grad(loss, (0, 1)), f"{level}:bfloat16"))


@both_halves
@mixed_levels
@pytest.mark.parametrize("lack", LACKS.values(), ids=LACKS)
def test_what_an_identity_leaves_is_that_of_float32(lack, level, half):
    cast = jamp.cast_fn(lack, f"{level}:{half}")
    assert operands(cast, TURN, BACK) == {"float32"}
    np.testing.assert_array_equal(run(cast, TURN, BACK), run(lack, TURN, BACK))


def layers(x, w):
    return jax.nn.relu(x @ w) @ w.T


NETWORKS = {
    "similarities": lambda x, w: jax.nn.log_softmax(by_norm(layers(x, w)) @ by_norm(layers(x[::-1], w)).T / 0.1),
    "a sum of cosines": lambda x, w: 1 + by_norm(layers(x, w)) @ by_norm(layers(x[::-1], w)).T,
    "a margin": lambda x, w: (lambda c: jnp.where(c > 0.5, c - 0.35, c))(
        by_norm(layers(x, w)) @ by_norm(layers(x[::-1], w)).T
    ),
    "a hinge": lambda x, w: jax.nn.relu(1 - layers(x, w) @ w),
    "scores less one": lambda x, w: layers(x, w) @ layers(x, w).T - 1,
    "correlations": lambda x, w: (lambda z: z.T @ z / len(z) - jnp.eye(16))(layers(x, w)),
    "what is predicted": lambda x, w: x - layers(x, w),
    "a descent of tied weights": lambda x, w: x - 0.1 * jnp.tanh(x) @ w @ w.T - 0.2 * x @ w @ w.T,
    "low rank": lambda x, w: layers(x, w) @ (jnp.eye(16) - w[:, :4] @ w[:, 4:8].T),
    "a step": lambda x, w: w - 0.1 * x.T @ jnp.tanh(x @ w),
}


@both_halves
@mixed_levels
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_layers_are_half(network, level, half):
    assert operands(jamp.cast_fn(network, f"{level}:{half}"), X, W) == {half}
