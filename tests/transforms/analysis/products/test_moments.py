"""Moments by weights: of means by a softmax, a kernel or a window, from which little is left once they are centred."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import both_halves, product_dtypes, run, trace

rng = np.random.default_rng(0)
X, Y = (np.float32(10 + 0.3 * rng.standard_normal((24, 8))) for _ in range(2))
SCORES = np.float32(rng.standard_normal((6, 24)))


def weighted(moment):
    """A moment by the rows of a softmax."""
    return lambda scores, x, y: moment(jax.nn.softmax(scores), x, y)


def slope(scores, x, y):
    p = jax.nn.softmax(scores)
    return (p @ (x * y) - (p @ x) * (p @ y)) / (p @ x**2 - (p @ x) ** 2)


def by_kernel(scores, x, y):
    kernel = jnp.exp(scores)
    weights = kernel / kernel.sum(1, keepdims=True)
    return weights @ (x * x) - (weights @ x) ** 2


def mixture(scores, x, y):
    """The variances of a mixture, one for each axis."""
    r = jax.nn.softmax(scores, 0)
    n = r.sum(1)[:, None]
    return r @ (x * x) / n - (r @ x / n) ** 2


def covariances(scores, x, y):
    """The covariances of a mixture."""
    r = jax.nn.softmax(scores, 0)
    n = r.sum(1)
    mean = r @ x / n[:, None]
    return jnp.einsum("kn,ni,nj->kij", r, x, x) / n[:, None, None] - mean[:, :, None] * mean[:, None, :]


def blurred(scores, x, y):
    """The variance in a window."""
    window = jax.nn.softmax(scores[0, :3]).reshape(3, 1, 1) * jnp.ones((3, 1, 8))
    blur = lambda z: lax.conv_general_dilated(  # noqa: E731
        z[None], window, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=8
    )
    return blur(x * x) - blur(x) ** 2


def by_a_function(scores, x, y):
    """A mean that is written once, and so are its weights, each time that it is called."""
    mean = jax.jit(lambda z: jax.nn.softmax(scores) @ z)
    return mean(x * x) - mean(x) ** 2


def forgetting(scores, x, y):
    """A covariance of rows that are forgotten."""

    def step(state, rows):
        mean, second = state
        return (0.9 * mean + 0.1 * rows.mean(0), 0.9 * second + 0.1 * rows.T @ rows / 8), None

    start = x[0], jnp.outer(x[0], x[0])
    mean, second = lax.scan(step, start, x.reshape(3, 8, 8))[0]
    return second - jnp.outer(mean, mean)


def fitted(scores, x, y):
    """A mixture, by expectation and maximization."""

    def improve(state, _):
        mean, variance = state
        far = -0.5 * ((x[:, None] - mean) ** 2 / variance).sum(-1) - 0.5 * jnp.log(variance).sum(-1)
        r = jax.nn.softmax(far, -1)
        n = r.sum(0)[:, None]
        mean = r.T @ x / n
        return (mean, r.T @ (x * x) / n - mean**2 + 1e-3), None

    start = jnp.stack([x.min(0), x.max(0)]), jnp.ones((2, 8))
    return lax.scan(improve, start, None, length=4)[0][1]


MOMENTS = {
    "a square by multiplying": weighted(lambda p, x, y: p @ (x * x) - (p @ x) * (p @ x)),
    "a square by a power": weighted(lambda p, x, y: p @ (x * x) - (p @ x) ** 2),
    "jnp.square": weighted(lambda p, x, y: p @ jnp.square(x) - jnp.square(p @ x)),
    "a covariance": weighted(lambda p, x, y: p @ (x * y) - (p @ x) * (p @ y)),
    "a third moment": weighted(lambda p, x, y: p @ x**3 - 3 * (p @ x) * (p @ x**2) + 2 * (p @ x) ** 3),
    "weights written twice": lambda scores, x, y: jax.nn.softmax(scores) @ (x * x) - (jax.nn.softmax(scores) @ x) ** 2,
    "a function": by_a_function,
    "rows that are forgotten": forgetting,
    "a fourth moment": weighted(
        lambda p, x, y: p @ x**4 - 4 * (p @ x**3) * (p @ x) + 6 * (p @ x**2) * (p @ x) ** 2 - 3 * (p @ x) ** 4
    ),
    "a slope": slope,
    "a kernel": by_kernel,
    "a mixture": mixture,
    "covariances of a mixture": covariances,
    "a mixture that is fitted": fitted,
    "a window": blurred,
    "a mean by ones": lambda p, x, y: (lambda ones: x.T @ x / 24 - (ones @ x).T @ (ones @ x))(
        jnp.full((1, 24), 1 / 24)
    ),
    "a mean by a vector": lambda p, x, y: (x * x).mean(0) - (jnp.full(24, 1 / 24) @ x) ** 2,
    "degrees less neighbours": lambda scores, x, y: scores.sum(1)[:, None] * x[:6] - scores @ x,
    "a form of degrees less neighbours": lambda scores, x, y: (lambda a, x: x.T @ jnp.diag(a.sum(1)) @ x - x.T @ a @ x)(
        scores[:, :6], x[:6]
    ),
    "a tangent of distances": lambda scores, x, y: jax.jvp(
        lambda x: (x * x).sum(1)[:, None] + (x * x).sum(1) - 2 * x @ x.T, (x,), (y[:1] + 0 * x,)
    )[1],
    "a diagonal of a sum": lambda scores, x, y: (
        lambda gram: jnp.diagonal(gram)[:, None] + jnp.diagonal(gram) - 2 * gram
    )(x @ (x - 1).T + (x - 1) @ x.T),
    "degrees by ones": lambda scores, x, y: (scores @ jnp.ones((24, 1))) * x[:6] - scores @ x,
    "degrees by einsum": lambda scores, x, y: jnp.einsum("ij,ik->ik", scores, x[:6]) - jnp.einsum("ij,jk", scores, x),
    "degrees on a diagonal": lambda scores, x, y: jnp.diag(scores.sum(1)) @ x[:6] - scores @ x,
}


@both_halves
@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_moments_by_weights_are_those_of_float32(moment, level, half):
    cast = jamp.cast_fn(moment, f"{level}:{half}")
    got, traced = run(cast, SCORES, X, Y), run(moment, SCORES, X, Y)
    np.testing.assert_allclose(got, traced, rtol=0, atol=3e-4 * np.abs(traced).max())
    assert {dtype for operands in product_dtypes(trace(cast, SCORES, X, Y)) for dtype in operands} == {"float32"}


@both_halves
@pytest.mark.parametrize("moment", [slope, mixture, fitted])
def test_their_gradients_are_those_of_float32(moment, half):
    def gradient(fn):
        return jax.grad(lambda *args: jnp.sin(fn(*args)).sum(), (0, 1, 2))(SCORES, X, Y)

    for cast, traced in zip(gradient(jamp.cast_fn(moment, f"O2:{half}")), gradient(moment), strict=True):
        np.testing.assert_allclose(cast, traced, rtol=0, atol=1e-3 * np.abs(traced).max() + 1e-6)


def attention(scores, x, y):
    h = jnp.tanh(x @ jnp.ones((8, 8)))
    return jax.nn.softmax(scores) @ h + (jax.nn.softmax(scores) @ h) * h[:6]


def links(scores, x, y):
    """A gradient with two products of the same factors: what decodes edges of a graph is one matrix with itself."""
    return jax.grad(lambda z: jax.nn.softplus(z @ z.T).mean())(jnp.tanh(x))


LAYERS = {
    "attention": attention,
    "links": links,
    "the cube of a layer": lambda scores, x, y: jax.nn.gelu(x @ y.T) @ x,
    "a share of scores": lambda scores, x, y: (scores / scores.sum(1, keepdims=True)) @ x,
    "a layer that is normalized": lambda scores, x, y: (scores @ x - (scores @ x).mean(0)) * (scores @ x).std(0),
}


@both_halves
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_layers_are_half(layer, half):
    products = product_dtypes(trace(jamp.cast_fn(layer, f"O2:{half}"), SCORES, X, Y))
    assert {dtype for operands in products for dtype in operands} == {half}
