"""Distances of what a layer makes: the product that cancels is float32, and the layer is none of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.transforms.harness import both_halves, layer_norm, mixed_levels, product_dtypes, trace

rng = np.random.default_rng(0)
WIDTH = 32
X = np.float32(rng.standard_normal((64, WIDTH)))
X[:, 0] = 1.0
W = np.float32(rng.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5)
W[0] = 3.0  # Features with a mean of 3.
CODES = np.float32((X @ W)[rng.integers(0, 64, 100)] + 0.1 * rng.standard_normal((100, WIDTH)))


def squared(z, codes):
    return (z**2).sum(-1, keepdims=True) - 2 * z @ codes.T + (codes**2).sum(-1)


def by_columns(z, codes):
    return (z**2).sum(-1, keepdims=True) - 2 * z @ codes + (codes**2).sum(0)


def by_einsum(z, codes):
    norms = (z * z).sum(1)[:, None] + (codes * codes).sum(1)
    return norms - 2 * jnp.einsum("nd,kd->nk", z, codes)


def rms(z):
    return z / jnp.sqrt((z * z).mean(-1, keepdims=True) + 1e-6)


def by_norms(z, codes):
    norms = jnp.linalg.norm(z, axis=-1, keepdims=True) ** 2 + jnp.linalg.norm(codes, axis=-1) ** 2
    return norms - 2 * jnp.inner(z, codes)


def pixels(x, w):
    image = x.reshape(1, 8, 8, WIDTH)
    dims = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(image, w[None, None], (1, 1), "SAME", dimension_numbers=dims).reshape(64, WIDTH)


CODEBOOKS = {
    "a product": lambda x, w, codes: squared(x @ w, codes),
    "scaled": lambda x, w, codes: squared(0.5 * (x @ w), codes / 2),
    "with a bias": lambda x, w, codes: squared(x @ w + w[0], codes),
    "a relu": lambda x, w, codes: squared(jax.nn.relu(x @ w), codes),
    "a norm": lambda x, w, codes: squared(layer_norm(x @ w), codes),
    "a silu": lambda x, w, codes: squared(jax.nn.silu(x @ w), codes),
    "a softplus": lambda x, w, codes: squared(jax.nn.softplus(x @ w), codes),
    "a gate": lambda x, w, codes: squared((x @ w) * jax.nn.sigmoid(x[:, :1]), codes),
    "a root mean square": lambda x, w, codes: squared(rms(x @ w) * 3, codes),
    "two that are normed": lambda x, w, codes: by_einsum(rms(x @ w), rms(codes @ w)),
    "two layers": lambda x, w, codes: squared(jnp.tanh(x @ w) @ w, codes),
    "columns": lambda x, w, codes: by_columns(x @ w, codes.T),
    "einsum": lambda x, w, codes: by_einsum(x @ w, codes),
    "norms": lambda x, w, codes: by_norms(x @ w, codes),
    "a convolution": lambda x, w, codes: squared(pixels(x, w), codes),
    "a kernel": lambda x, w, codes: jnp.exp(-squared(x @ w, codes) / 16),
    "of two layers": lambda x, w, codes: squared(x @ w, codes @ w),
}


@both_halves
@mixed_levels
@pytest.mark.parametrize("program", CODEBOOKS.values(), ids=CODEBOOKS)
def test_distances_are_those_of_the_rounded_layer(program, level, half):
    jaxpr = trace(jamp.cast_fn(program, f"{level}:{half}"), X, W, CODES)
    layer, *_, distance = product_dtypes(jaxpr)
    assert layer == [half, half]
    assert distance == ["float32", "float32"]


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_no_distance_is_negative(half):
    distances = jamp.cast_fn(CODEBOOKS["a product"], f"O2:{half}")(X, W, CODES)
    assert distances.min() > 0
    by_hand = squared(jax.lax.reduce_precision(X @ W, 8, 7), CODES)
    assert (distances.argmin(1) != CODEBOOKS["a product"](X, W, CODES).argmin(1)).mean() <= 0.1
    np.testing.assert_allclose(distances, by_hand, rtol=0, atol=0.05 * by_hand.max())


PROJECTIONS = dict.fromkeys("qkvo", W)
MOVED = dict.fromkeys("qkvo", W.T)
TOKENS, ALONG = (np.float32(rng.standard_normal((2, 16, WIDTH))) for _ in range(2))


def attention(p, x):
    weights = jax.nn.softmax((x @ p["q"]) @ (x @ p["k"]).mT / 8)
    return weights @ (x @ p["v"]) @ p["o"]


def by_distance(p, x):
    """Attention by distances, which is Lipschitz continuous."""
    q, k = x @ p["q"], x @ p["k"]
    far = (q**2).sum(-1)[..., :, None] - 2 * q @ k.mT + (k**2).sum(-1)[..., None, :]
    return jax.nn.softmax(-far / 8) @ (x @ p["v"]) @ p["o"]


DERIVATIVES = {
    "along the tokens": lambda p, x: jax.jvp(lambda x: attention(p, x), (x,), (ALONG,)),
    "along the weights": lambda p, x: jax.jvp(lambda p: attention(p, x), (p,), (MOVED,)),
    "a force": lambda p, x: jax.grad(lambda x: (attention(p, x) * x).sum())(x),
    "twice": lambda p, x: jax.jvp(jax.grad(lambda x: (attention(p, x) ** 2).mean()), (x,), (ALONG,)),
}


@both_halves
@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_derivatives_of_an_attention_are_half(derivative, half):
    products = product_dtypes(trace(jamp.cast_fn(derivative, f"O2:{half}"), PROJECTIONS, TOKENS))
    share = [dtype for operands in products for dtype in operands].count(half) / (2 * len(products))
    assert share == 1.0


@both_halves
def test_of_an_attention_by_distances_one_product_is_float32(half):
    products = product_dtypes(trace(jamp.cast_fn(by_distance, f"O2:{half}"), PROJECTIONS, TOKENS))
    assert sorted(products) == [[half, half]] * 5 + [["float32", "float32"]]


def by_features(p, x):
    """An attention by the features of its kernel, whose exponents are distances."""
    q, k = (x @ w for w in p[:2])
    features = [jnp.exp(z @ p[2] - 0.5 * (z**2).sum(-1, keepdims=True)) for z in (0.1 * q, 0.1 * k)]
    attended = features[0] @ (features[1].T @ x) / (features[0] @ features[1].sum(0))[:, None]
    return jax.nn.relu((x + attended) @ p[3]) @ p[4]


def test_layers_behind_distances_are_half_in_a_gradient_inside():
    def gradient(x, *weights):
        return jax.grad(lambda p: (by_features(p, x) ** 2).mean())(weights)

    weights = (W, W.T, W / 4, W, W.T)
    products = product_dtypes(trace(jamp.cast_fn(gradient, "O2:bfloat16"), X, *weights))
    exponents, features = 2 * 3, 4  # Of queries and keys, with derivatives; and features times features.
    assert sum("float32" in operands for operands in products) <= exponents + features


def smoothed(logits, targets):
    """Label smoothing by the mean logit, and a z-loss: a square beside products, a part of them and their mean."""
    normalizer = jax.nn.logsumexp(logits, -1)
    hit = jnp.take_along_axis(logits, targets[:, None], 1)[:, 0]
    return (normalizer - 0.9 * hit - 0.1 * logits.mean(-1)).mean() + 1e-4 * (normalizer**2).mean()


def hinged(logits, targets):
    hit = jnp.take_along_axis(logits, targets[:, None], 1)
    margins = jax.nn.relu(1 + logits - hit)
    return margins.sum() + 1e-4 * (logits.sum(-1) ** 2).mean()


@mixed_levels
@pytest.mark.parametrize("loss", [smoothed, hinged])
def test_losses_of_logits_are_no_distances(loss, level):
    targets = jnp.arange(64) % 32
    cast = jamp.cast_fn(lambda x, w: loss(layer_norm(x @ w) @ w, targets), f"{level}:bfloat16")
    found = product_dtypes(trace(jax.grad(cast, (0, 1)), X, W))
    assert {dtype for dtypes in found for dtype in dtypes[:2]} == {"bfloat16"}


def moved(params, x):
    return jnp.tanh(x @ params[0]) @ params[1]


def flow(params, x, along):
    """A continuous normalizing flow, whose trace is estimated: a square of what it ends at beside products along it."""

    def step(state, _):
        x, trace = state
        slope, turned = jax.jvp(lambda x: moved(params, x), (x,), (along,))
        return (x + 0.1 * slope, trace + 0.1 * (turned * along).sum(-1)), None

    (x, trace), _ = jax.lax.scan(step, (x, jnp.zeros(len(x))), None, length=5)
    return (0.5 * (x**2).sum(-1) - trace).mean()


def score_matching(params, x, along):
    score, turned = jax.jvp(lambda x: moved(params, x), (x,), (along,))
    return ((turned * along).sum(-1) + 0.5 * (score**2).sum(-1)).mean()


def sliced(params, x, along):
    score, turned = jax.jvp(lambda x: moved(params, x), (x,), (along,))
    return ((turned * along).sum(-1) + 0.5 * (score * along).sum(-1) ** 2).mean()


@mixed_levels
@pytest.mark.parametrize("loss", [flow, score_matching, sliced])
def test_traces_of_a_network_are_no_distances(loss, level):
    """They share weights with the square beside them, and no data."""
    cast = jamp.cast_fn(lambda w, v, x: loss((w, v), x, ALONG.reshape(-1, WIDTH)), f"{level}:bfloat16")
    x = TOKENS.reshape(-1, WIDTH)
    found = product_dtypes(trace(jax.grad(cast, (0, 1)), W, W.T, x))
    assert {dtype for dtypes in found for dtype in dtypes[:2]} == {"bfloat16"}
