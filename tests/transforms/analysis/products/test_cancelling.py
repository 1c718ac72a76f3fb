"""Products that cancel are float32: of distances, of moments, of systems of equations, and of their gradients."""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import both_halves, mixed_levels, product_dtypes, run, trace

rng = np.random.default_rng(0)
X = (3 + rng.standard_normal((24, 16))).astype(np.float32)
Y = (X[:20] + 0.05 * rng.standard_normal((20, 16))).astype(np.float32)
T = rng.standard_normal(24).astype(np.float32)
SCALES = np.linspace(0.5, 2, 16, dtype=np.float32)
METRIC = (np.eye(16) + 0.1).astype(np.float32)


def squared(x, y):
    return jnp.sum(x * x, 1)[:, None] + jnp.sum(y * y, 1) - 2 * x @ y.T


def by_einsum(x, y):
    own = [jnp.einsum("nd,nd->n", points, points) for points in (x, y)]
    return own[0][:, None] + own[1] - 2 * jnp.einsum("nd,md->nm", x, y)


def by_norms(x, y):
    return jnp.linalg.norm(x, axis=1)[:, None] ** 2 + jnp.linalg.norm(y, axis=1) ** 2 - 2 * jnp.dot(x, y.T)


def one_by_one(x, y):
    def apart(a, b):
        return jnp.dot(a, a) + jnp.dot(b, b) - 2 * jnp.dot(a, b)

    return jax.vmap(lambda a: jax.vmap(lambda b: apart(a, b))(y))(x)


def in_functions(x, y):
    norm = jax.jit(lambda x: jnp.sum(x * x, 1))
    return norm(x)[:, None] + norm(y) - 2 * jax.jit(jnp.matmul)(x, y.T)


def by_gram(x, diagonal):
    gram = x @ x.T
    return diagonal(gram)[:, None] + diagonal(gram) - 2 * gram


def of_mahalanobis(x, y):
    moved, other = x @ METRIC, y @ METRIC
    return jnp.sum(moved * x, 1)[:, None] + jnp.sum(other * y, 1) - 2 * moved @ y.T


def clusters(x, y):
    def improve(_, centres):
        share = jax.nn.softmax(-squared(x, centres), -1)
        return (share.T @ x) / (share.sum(0)[:, None] + 1e-3)

    return lax.fori_loop(0, 3, improve, y)


def cross(a, b):
    return a.T @ b / len(a) - jnp.outer(a.mean(0), b.mean(0))


def of_whole(x, y):
    mean = x.mean(0)
    return x[:, :6].T @ x[:, 6:12] / 24 - mean[:6, None] * mean[6:12]


def in_a_scan(x, y):
    def add(state, rows):
        first, second = state
        return (first + rows.sum(0), rows.T @ rows + second), None

    (first, second), _ = lax.scan(add, (jnp.zeros(16), jnp.zeros((16, 16))), x.reshape(4, 6, 16))
    return second / 24 - jnp.outer(first / 24, first / 24)


def beside_a_scan(x, y):
    second = lax.fori_loop(0, 24, lambda i, total: total + x[i][:, None] @ x[i][None], jnp.zeros((16, 16)))
    return second / 24 - jnp.outer(x.mean(0), x.mean(0))


def by_weights(x, y):
    share = jnp.exp(jnp.linspace(0, 1, 24))
    share = share / share.sum()
    mean = share @ x
    return (x * share[:, None]).T @ x - jnp.outer(mean, mean)


DISTANCES = {
    "plain": squared,
    "the product first": lambda x, y: -2 * (x @ y.T) + jnp.sum(x**2, 1, keepdims=True) + jnp.sum(y**2, 1),
    "einsum": by_einsum,
    "norms": by_norms,
    "mapped": one_by_one,
    "in functions": in_functions,
    "jitted": jax.jit(squared),
    "in a checkpoint": jax.checkpoint(squared),
    "in a loop": lambda x, y: lax.map(lambda a: jnp.dot(a, a) + jnp.sum(y * y, 1) - 2 * y @ a, x),
    "in a branch": lambda x, y: lax.cond(x[0, 0] > -9, squared, lambda x, y: x[:, :1] + y[:, 0], x, y),
    "scaled": lambda x, y: squared(x / SCALES, y / SCALES),
    "Mahalanobis": of_mahalanobis,
    "by a diagonal": lambda x, y: by_gram(x, jnp.diag),
    "by the places of a diagonal": lambda x, y: by_gram(x, lambda gram: gram[jnp.arange(24), jnp.arange(24)]),
    "by a repeated label": lambda x, y: by_gram(x, lambda gram: jnp.einsum("ii->i", gram)),
    "kernel": lambda x, y: jnp.exp(-squared(x, y)),
    "gradient": lambda x, y: jax.grad(lambda x: jnp.exp(-squared(x, y)).sum())(x),
    "nearest": lambda x, y: y[jnp.argmin(squared(x, y), 1)] - x,
    "clusters": clusters,
    "moments": lambda x, y: x.T @ x / 24 - jnp.outer(x.mean(0), x.mean(0)),
    "cross moments": lambda x, y: y.T @ (2 * y) / 20 - jnp.outer(y.mean(0), (2 * y).mean(0)),
    "two parts": lambda x, y: cross(x[:, :8], x[:, 8:]),
    "parts taken anew": lambda x, y: x[:, :3].T @ x[:, 3:] / 24 - jnp.outer(x[:, :3].mean(0), x[:, 3:].mean(0)),
    "parts of the mean": of_whole,
    "a written factor": lambda x, y: x[:, :8].T @ x[:, 8:] * (1 / 24) - x[:, :8].mean(0)[:, None] * x[:, 8:].mean(0),
    "two arrays": lambda x, y: cross(x[:20], y),
    "lagged": lambda x, y: cross(x[:-3], x[3:]),
    "mapped moments": lambda x, y: jax.vmap(cross)(x.reshape(3, 8, 16), 2 + x.reshape(3, 8, 16)),
    "in a scan": in_a_scan,
    "beside a scan": beside_a_scan,
    "weighted": by_weights,
}


def ridge(x):
    return jnp.linalg.solve(x.T @ x + 0.1 * jnp.eye(16), x.T @ T)


def by_cholesky(x):
    return jsp.linalg.cho_solve(jsp.linalg.cho_factor(x.T @ x + 0.1 * jnp.eye(16)), x.T @ T)


def process(x):
    factor = jnp.linalg.cholesky(x @ x.T / 16 + 0.1 * jnp.eye(24))
    return T @ jsp.linalg.cho_solve((factor, True), T) + jnp.log(jnp.diag(factor)).sum()


def predicted(kernel):
    return lambda x, y: kernel(y, x) @ jnp.linalg.solve(kernel(x, x) + 0.1 * jnp.eye(24), T)


def whitened(x, y):
    centred = x - x.mean(0)
    return centred @ jnp.linalg.inv(jnp.linalg.cholesky(centred.T @ centred / 24)).T


def shrunk(x, y, until_it_rests=True):
    """A lasso by ADMM: a loop multiplies with an inverse what was made beside it."""
    inverse, right = jnp.linalg.inv(x.T @ x + jnp.eye(16)), x.T @ jnp.tanh(x * y[0]).sum(1)

    def step(carry):
        z, dual, _, count = carry
        point = inverse @ (right + z - dual) + dual
        new = jnp.sign(point) * jnp.maximum(jnp.abs(point) - 0.1, 0)
        return new, point - new, jnp.abs(new - z).max(), count + 1

    start = jnp.zeros(16), jnp.zeros(16), jnp.inf, 0
    if not until_it_rests:
        return lax.fori_loop(0, 40, lambda _, carry: step(carry), start)[0]
    return lax.while_loop(lambda c: (c[2] > 1e-5) & (c[3] < 400), step, start)[0]


def damped(x):
    """A system that is made before the loop that solves it, damped less each time."""
    gram, right = x.T @ x, x.T @ T

    def step(carry):
        z, damping = carry
        return z + jnp.linalg.solve(gram + damping * jnp.eye(16), right - gram @ z), damping / 2

    return lax.while_loop(lambda c: jnp.abs(right - gram @ c[0]).max() > 1e-2, step, (jnp.zeros(16), 8.0))[0]


SYSTEMS = {
    "shrunk until it rests": shrunk,
    "shrunk forty times": lambda x, y: shrunk(x, y, until_it_rests=False),
    "damped": lambda x, y: damped(x),
    "ridge": lambda x, y: ridge(x),
    "its prediction": lambda x, y: x @ ridge(x),
    "Cholesky": lambda x, y: x @ by_cholesky(x),
    "inverse": lambda x, y: y @ (jnp.linalg.inv(x.T @ x + 0.1 * jnp.eye(16)) @ (x.T @ T)),
    "dual": predicted(lambda a, b: a @ b.T),
    "kernel of products": predicted(lambda a, b: (1 + a @ b.T / 16) ** 2),
    "kernel of distances": predicted(lambda a, b: jnp.exp(-squared(a, b) / 20)),
    "a process": lambda x, y: process(x),
    "its gradient": lambda x, y: jax.grad(process)(x),
    "whitened": whitened,
}


def dtypes(cast, *args):
    """Of all operands of all products."""
    return {str(dtype) for operands in product_dtypes(trace(cast, *args)) for dtype in operands}


@both_halves
@mixed_levels
@pytest.mark.parametrize("program", [*DISTANCES.values(), *SYSTEMS.values()], ids=[*DISTANCES, *SYSTEMS])
def test_products_that_cancel_are_those_of_float32(program, level, half):
    with jax.default_matmul_precision("highest"):
        cast, traced = run(jamp.cast_fn(program, f"{level}:{half}"), X, Y), run(program, X, Y)
    np.testing.assert_allclose(cast, traced, rtol=0, atol=3e-4 * np.abs(traced).max())
    assert dtypes(jamp.cast_fn(program, f"{level}:{half}"), X, Y) == {"float32"}


@mixed_levels
def test_points_are_no_further_from_themselves_than_float32_has_them(level):
    x = jnp.asarray(np.random.default_rng(1).integers(-9, 10, (32, 8)) * 257, jnp.float32)
    apart = run(jamp.cast_fn(lambda x: squared(x, x), f"{level}:bfloat16"), x)
    np.testing.assert_array_equal(np.diag(apart), np.zeros(32))


def normalized(x, w):
    h = x @ w
    return (h - h.mean(0)) / jnp.sqrt(jnp.mean(h * h, 0) - h.mean(0) ** 2 + 1e-6)


def split(x, w):
    q, k, v = jnp.split(x @ jnp.concatenate([w, w, w], 1), 3, 1)
    return jnp.tanh(q @ k.T) @ v + q * k.sum(0) * v.sum(0)


def recurrent(x, w):
    def step(state, row):
        h, total = state
        h = jnp.tanh(row @ w + h @ w)
        return (h, total + jnp.outer(h, h)), h.sum() * h

    (h, total), rows = lax.scan(step, (jnp.zeros(16), jnp.zeros((16, 16))), x)
    return rows + total @ h


LAYERS = {
    "parts of one layer": split,
    "a recurrent layer": recurrent,
    "the variance of a layer": normalized,
    "a gated layer": lambda x, w: jax.nn.silu(x @ w) * (x @ w) + x,
    "correlations": lambda x, w: (gram := (x @ w).T @ (x @ w)) / jnp.sqrt(jnp.outer(jnp.diag(gram), jnp.diag(gram))),
    "parts of squares": lambda x, w: jnp.square(x @ w)[:, :8].sum(0) + jnp.square(x @ w)[:, 8:].sum(0),
    "a penalty": lambda x, w: jnp.mean(jnp.square(jnp.tanh(x @ w))) + 1e-4 * jnp.sum(w * w),
    "tied weights": lambda x, w: x + jnp.tanh(x @ w) @ w.T,
    "a layer that is solved": lambda x, w: jnp.linalg.solve(jnp.eye(16) + (x @ w)[:16], x[:16]),
    "complex": lambda x, w: x[:, :8] @ w[:8] - x[:, 8:] @ w[8:],
}


@both_halves
@mixed_levels
@pytest.mark.parametrize("activation", [jax.nn.gelu, jax.nn.silu, lambda z: z * jnp.tanh(z + 0.04 * z**3)])
def test_gradients_of_layers_without_a_bias_are_half(activation, level, half):
    """The derivative of GELU has a square of what a layer makes, and no sum of squares."""

    def loss(weights, x):
        for w in weights:
            x = activation(x @ w)
        return jnp.mean(jnp.tanh(x))

    weights = np.random.default_rng(2).standard_normal((3, 16, 16)).astype(np.float32) / 4
    assert dtypes(jamp.cast_fn(jax.grad(loss), f"{level}:{half}"), list(weights), X) == {half}


@both_halves
@mixed_levels
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_layers_are_half(layer, level, half):
    w = np.random.default_rng(2).standard_normal((16, 16)).astype(np.float32) / 4
    cast = jamp.cast_fn(layer, f"{level}:{half}")
    assert half in dtypes(cast, X, w)


def deep(activation):
    def network(x, u, v, w):
        return activation(activation(activation(x @ u) @ v) @ w)

    return network


def gated(x, u, v, w):
    for _ in range(2):
        x = x + (jax.nn.silu(x @ u) * (x @ v)) @ w
    return x


NETWORKS = {
    "relu": deep(jax.nn.relu),
    "GELU": deep(jax.nn.gelu),
    "GELU by erf": deep(lambda z: jax.nn.gelu(z, approximate=False)),
    "SiLU": deep(jax.nn.silu),
    "mish": deep(lambda z: z * jnp.tanh(jax.nn.softplus(z))),
    "hard swish": deep(jax.nn.hard_swish),
    "a threshold": deep(lambda z: z * (z > 0.1)),
    "squared relu": deep(lambda z: jnp.square(jax.nn.relu(z))),
    "gates": gated,
    "projected": lambda x, u, v, w: jnp.tanh(x @ u) @ v,
}
HEADS = {
    "ridge": lambda h: h @ ridge(h),
    "log-determinant": lambda h: jnp.linalg.slogdet(jnp.cov(h.T) + jnp.eye(16))[1],
    "process": process,
    "whitened": lambda h: whitened(h, h),
}


@both_halves
@mixed_levels
def test_layers_of_the_same_features_are_no_gram_matrix(level, half):
    def attention(x, u, v, w):
        h = jax.nn.relu(x @ u)
        h = h / jnp.sqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)
        keys, values, queries = h @ u, h @ v, h @ w
        return queries @ jnp.linalg.solve(keys.T @ keys + jnp.eye(16), keys.T @ values)

    given = X, *(np.random.default_rng(2).standard_normal((3, 16, 16)).astype(np.float32) / 4)
    products = product_dtypes(trace(jamp.cast_fn(attention, f"{level}:{half}"), *given))
    assert products[:4] == [[half, half]] * 4
    assert products[4:6] == [["float32", "float32"]] * 2


@both_halves
@mixed_levels
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("network", NETWORKS)
def test_a_network_in_front_of_a_system_is_half(network, head, level, half):
    given = X, *(np.random.default_rng(2).standard_normal((3, 16, 16)).astype(np.float32) / 4)
    layers = len(product_dtypes(trace(NETWORKS[network], *given)))
    cast = jamp.cast_fn(lambda *given: HEADS[head](NETWORKS[network](*given)), f"{level}:{half}")
    products = product_dtypes(trace(cast, *given))
    assert products[:layers] == [[half, half]] * layers
    assert products[layers:] == [["float32", "float32"]] * (len(products) - layers)


@both_halves
@mixed_levels
@pytest.mark.parametrize("other", [0, 1])
def test_what_a_barrier_hands_on_is_the_operand_of_each_result(other, level, half):
    def left(q, *weights):
        down, up = lax.optimization_barrier((weights[0], weights[other]))
        return q - q @ down @ up.T

    given = X, *(np.random.default_rng(2).standard_normal((2, 16, 4)).astype(np.float32) / 4)
    products = product_dtypes(trace(jamp.cast_fn(left, f"{level}:{half}"), *given))
    assert products == [["float32", "float32"] if other == 0 else [half, half]] * 2


def test_report_tells_why():
    assert "cancelling" in str(jamp.report(jamp.cast_fn(squared, "O1:bfloat16"), X, Y))
