"""Sums that are written as products, by ones beside their terms, are float32; what fills a layer up leaves it half."""

import jax
import jax.numpy as jnp
import pytest

import jamp
from tests.transforms.harness import both_halves, mixed_levels, product_dtypes, trace

KEYS = jax.random.split(jax.random.key(0), 3)
X = 3 + jax.random.normal(KEYS[0], (24, 16)) / 4
Y = X[:20] + 0.05 * jax.random.normal(KEYS[1], (20, 16))
W = jax.random.normal(KEYS[2], (16, 16)) / 4
FULL = ["float32"] * 2


def features(x, y):
    """As the low-rank geometries of ott do."""
    of_x, of_y = (jnp.sum(points**2, 1, keepdims=True) for points in (x, y))
    a = jnp.concatenate([of_x, jnp.ones((len(x), 1)), -jnp.sqrt(2.0) * x], 1)
    return a, jnp.concatenate([jnp.ones((len(y), 1)), of_y, jnp.sqrt(2.0) * y], 1)


def distances(x, y):
    a, b = features(x, y)
    return a @ b.T


def by_einsum(x, y):
    a, b = features(x, y)
    return jnp.exp(-jnp.einsum("id,jd->ij", a, 0.5 * b))


def applied(x, y):
    """The matrix is not made."""
    a, b = features(x, y)
    return a @ (b.T @ y)


def in_a_loop(x, y):
    a, b = features(x[:20], y)
    return jax.lax.fori_loop(0, 3, lambda i, v: jnp.tanh(b @ (a.T @ v)), y)


def of_one_side(x, y):
    """As queries and keys of an attention by distances, of which the queries' squares are left out."""
    keys = jnp.concatenate([2 * y, -jnp.sum(y**2, 1, keepdims=True)], 1)
    return jax.nn.softmax(jnp.concatenate([x, jnp.ones((24, 1))], 1) @ keys.T)


def at_once(x, y):
    """Squares and product in one barrier."""
    parts = jnp.sum(x**2, 1, keepdims=True), jnp.sum(y**2, 1), x @ y.T
    of_x, of_y, product = jax.lax.optimization_barrier(parts)
    return of_x + of_y - 2 * product


def gradient(x, y):
    return jax.grad(lambda x, y: jnp.exp(-distances(x, y)).sum(), (0, 1))(x, y)


def transported(x, y):
    """Gromov-Wasserstein: the terms of the sum are products with distances themselves, and so is what is taken off."""
    between = jnp.full((24, 20), 1 / 480)
    of_x, of_y = distances(x, x), distances(y, y)
    a = jnp.stack([(of_x**2) @ between.sum(1), jnp.ones(24)], 1)
    b = jnp.stack([jnp.ones(20), (of_y**2) @ between.sum(0)], 1)
    return a @ b.T - 2 * of_x @ between @ of_y


@both_halves
@mixed_levels
@pytest.mark.parametrize("fn", [distances, by_einsum, applied, in_a_loop, of_one_side, at_once, gradient])
def test_distances_of_one_product_are_float32(fn, level, half):
    products = product_dtypes(trace(jamp.cast_fn(fn, f"{level}:{half}"), X, Y))
    assert products
    assert products == [FULL] * len(products)


@both_halves
@mixed_levels
def test_terms_that_are_products_with_such_distances_are_float32(level, half):
    products = product_dtypes(trace(jamp.cast_fn(transported, f"{level}:{half}"), X, Y))
    assert products[:5] == [FULL] * 5  # The distances, the terms and their sum.


def with_bias(x, w):
    return jnp.concatenate([x, jnp.ones((24, 1))], 1) @ jnp.concatenate([w, w[:1]])


def of_squares(x, w):
    features = jnp.concatenate([jnp.sum(x**2, 1, keepdims=True), x[:, :15]], 1)
    return jax.nn.relu(features @ w) @ w


def padded_heads(x, w):
    q, k = (jnp.concatenate([x @ part, jnp.zeros((24, 8))], 1) for part in (w, w.T))
    return jax.nn.softmax(q @ k.T) @ x


def with_a_sink(x, w):
    k = jnp.concatenate([jnp.ones((1, 16)), x @ w])
    return jax.nn.softmax(x @ w.T @ k.T) @ k


def with_a_start(x, w):
    """A row of ones in front of an attention."""
    x = jnp.concatenate([jnp.ones((1, 16)), x])
    return jax.nn.softmax(x @ w @ (x @ w.T).T) @ x @ w


def with_a_channel(x, w):
    x = jnp.concatenate([x[:, :15], jnp.ones((24, 1))], 1)
    return jax.nn.softmax(x @ w @ (x @ w.T).T) @ x @ w


def biaffine(x, w):
    head, dependent = (jnp.concatenate([jax.nn.relu(x @ part)[:, :15], jnp.ones((24, 1))], 1) for part in (w, w.T))
    return head @ w @ dependent.T


def powers(x, w):
    """As in linear attention by a Taylor series."""
    q, k = (jnp.concatenate([jnp.ones((24, 1)), x @ part, (x @ part) ** 2], 1) for part in (w, w.T))
    return q @ (k.T @ x)


def factorized(x, w):
    """A matrix factorization with biases of rows and columns."""
    a = jnp.concatenate([x @ w, x[:, :1], jnp.ones((24, 1))], 1)
    return a @ jnp.concatenate([x @ w.T, jnp.ones((24, 1)), x[:, 1:2]], 1).T


HALF_LAYERS = (
    with_bias,
    of_squares,
    padded_heads,
    with_a_sink,
    with_a_start,
    with_a_channel,
    biaffine,
    powers,
    factorized,
)


@both_halves
@mixed_levels
@pytest.mark.parametrize("layer", HALF_LAYERS)
def test_a_layer_with_something_beside_its_input_is_half(layer, level, half):
    products = product_dtypes(trace(jamp.cast_fn(layer, f"{level}:{half}"), X, W))
    assert products == [[half] * 2] * len(products)


@both_halves
@mixed_levels
def test_layers_in_front_of_distances_are_half(level, half):
    def between(x, w):
        a, b = features(x @ w, x @ w.T)
        return jax.nn.softmax(-a @ b.T) @ (x @ w)

    products = product_dtypes(trace(jamp.cast_fn(between, f"{level}:{half}"), X, W))
    assert products.count(FULL) == 1
