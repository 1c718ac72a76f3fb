"""Routing, codebooks, counts, graphs: what is chosen, numbered, gathered and added up by index."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.numerics._networks import F32, clusters, cross_entropy, decided, dense, dense_weights, mlp, mlp_weights
from tests.numerics._program import Program

TOKENS, WIDTH, EXPERTS = 96, 16, 4


def switch_layer(params, x, target, *, dtype=F32):
    """One expert a token: its place in the expert's buffer by a cumulative sum of one-hots, dispatch by einsum."""
    gates = jax.nn.softmax(dense(params["router"], x, F32))
    one_hot = jax.nn.one_hot(jnp.argmax(gates, -1), EXPERTS)
    place = jnp.sum((jnp.cumsum(one_hot, 0) - 1.0) * one_hot, -1).astype(jnp.int32)
    dispatch = one_hot[:, :, None] * jax.nn.one_hot(place, TOKENS // 2)[:, None]
    h = jnp.einsum("tec,td->ecd", dispatch.astype(dtype), x.astype(dtype))
    h = jax.nn.relu(jnp.einsum("ecd,edf->ecf", h, params["experts"].astype(dtype)))
    out = jnp.einsum("tec,ecf->tf", (dispatch * gates[:, :, None]).astype(dtype), h).astype(F32)
    balance = EXPERTS * jnp.sum(one_hot.mean(0) * gates.mean(0))
    return jnp.sum((out - target) ** 2, -1) + 0.01 * balance


def places_by_product(params, x, target, *, dtype=F32):
    """The same numbering of tokens by a product with a triangular matrix, as gathers of an embedding of places."""
    logits = mlp(params["router"], x, dtype)
    one_hot = jax.nn.one_hot(jnp.argmax(logits, -1), 2)
    places = jnp.sum((jnp.tril(jnp.ones((len(x), len(x)))) @ one_hot) * one_hot, -1)
    weight = jax.nn.softmax(logits)[:, 0]
    return jnp.square(weight * (1.0 + places / len(x)) - target)


def frequencies_of_words(params, ids, labels, *, dtype=F32):
    """A bag of words whose counts are products of one-hots with ones; 700 words of one kind are 700."""
    counts = jnp.ones((1, ids.shape[1])) @ jax.nn.one_hot(ids, 8)
    return cross_entropy(mlp(params, jnp.log1p(counts[:, 0]) - 3.0, dtype), labels) + 1e-3 * counts.max((1, 2))


def expected_bins(params, x, ages, *, dtype=F32):
    """Ages as the expectation of a distribution over bins from 0 to 400, which a product with `arange` makes."""
    p = jax.nn.softmax(mlp(params, x, dtype))
    predicted = p @ jnp.arange(400.0)
    return jnp.abs(predicted - ages)


def permuted_ids(params, x, ids, *, dtype=F32):
    """Identifiers moved by a permutation matrix, then looked up."""
    order = jnp.argsort(x[:, 0])
    moved = jax.nn.one_hot(order, len(x)) @ ids[:, None]
    rows = params["table"][moved[:, 0].astype(jnp.int32)]
    return jnp.sum((rows - mlp(params["net"], x[order], dtype)) ** 2, -1)


def histogram_matching(params, x, target, *, dtype=F32):
    """Soft histograms: distances to bin centres, counts of thousands of pixels."""
    v = 100.0 * jax.nn.sigmoid(mlp(params, x, dtype))
    soft = jnp.exp(-0.5 * (v[..., None] - jnp.linspace(0.0, 100.0, 12)) ** 2 / 16.0)
    return jnp.square(jnp.sum(soft, (0, 1)) - target) / target


def vector_quantizer(params, x, *, dtype=F32):
    """A codebook far from the origin: squares minus twice a product choose the code; straight through."""
    z = 8.0 + mlp(params["encoder"], x, dtype)
    book = params["book"]
    distance = jnp.sum(z**2, -1, keepdims=True) - 2.0 * z @ book.T + jnp.sum(book**2, -1)
    code = book[jnp.argmin(distance, -1)]
    passed = z + lax.stop_gradient(code - z)
    commit = jnp.sum((z - lax.stop_gradient(code)) ** 2 + (lax.stop_gradient(z) - code) ** 2, -1)
    return jnp.sum((mlp(params["decoder"], passed - 8.0, dtype) - x) ** 2, -1) + commit


def codebook_averages(params, x, book, *, dtype=F32):
    """Moving averages of a codebook: counts and sums of members by products with one-hots."""
    z = mlp(params, x, dtype)
    one_hot = jax.nn.one_hot(jnp.argmin(jnp.sum((z[:, None] - book) ** 2, -1), -1), len(book))
    counts, sums = one_hot.sum(0), one_hot.T @ z
    book = 0.99 * book + 0.01 * sums / (counts[:, None] + 1e-5)
    return jnp.sum((z - lax.stop_gradient(one_hot @ book)) ** 2, -1)


def gumbel_routes(params, x, noise, target, *, dtype=F32):
    """A straight-through Gumbel choice among a few linear maps."""
    logits = mlp(params["router"], x, dtype)
    gumbel = -jnp.log(-jnp.log(noise + 1e-20) + 1e-20)
    soft = jax.nn.softmax((logits + gumbel) / 0.5)
    hard = soft + lax.stop_gradient(jax.nn.one_hot(jnp.argmax(soft, -1), EXPERTS) - soft)
    mapped = jnp.einsum("td,edf->tef", x.astype(dtype), params["experts"].astype(dtype)).astype(F32)
    return jnp.sum((jnp.einsum("te,tef->tf", hard, mapped) - target) ** 2, -1)


def neighbours(params, x, labels, *, dtype=F32):
    """Neighbourhood components: distances between features that lie far from the origin."""
    z = mlp(params, x, dtype) + 30.0
    square = jnp.sum((z[:, None] - z[None]) ** 2, -1)
    p = jax.nn.softmax(jnp.where(jnp.eye(len(z), dtype=bool), -jnp.inf, -square))
    return -jnp.log(jnp.sum(jnp.where(labels[:, None] == labels, p, 0.0), -1) + 1e-8)


def suppressed_boxes(params, x, boxes, prior, target, *, dtype=F32):
    """Non-maximum suppression in the order of scores, which lie close together."""
    scores = prior + 2e-4 * mlp(params, x, dtype)[:, 0]
    order = jnp.argsort(-lax.stop_gradient(scores))
    sorted_scores, sorted_boxes = scores[order], boxes[order]
    near = jnp.abs(sorted_boxes[:, None] - sorted_boxes) < 1.0
    kept = ~jnp.any(near & jnp.tril(jnp.ones(near.shape, bool), -1), 1)
    return jnp.where(kept, jnp.square(1e3 * (sorted_scores - prior[order]) - target[order]), 0.0)


def _tokens(out):
    return lambda rng: (rng.normal(size=(TOKENS, WIDTH)), rng.normal(size=(TOKENS, out) if out else TOKENS))


def _experts(rng):
    params = {"router": dense_weights(rng, WIDTH, EXPERTS), "experts": rng.normal(size=(EXPERTS, WIDTH, WIDTH)) / 4}
    x = decided(rng, TOKENS, WIDTH, lambda x: dense(params["router"], x))
    return params, x, rng.normal(size=(TOKENS, WIDTH))


def _many_tokens(rng):
    params = {"router": mlp_weights(rng, 8, 16, 2)}
    return params, decided(rng, 1000, 8, lambda x: mlp(params["router"], x)), rng.normal(size=1000)


def _words(rng):
    ids = rng.choice(8, p=[0.7, 0.1, 0.1, 0.05, 0.02, 0.01, 0.01, 0.01], size=(16, 1000))
    return mlp_weights(rng, 8, 32, 5), ids, rng.integers(0, 5, 16)


def _ages(rng):
    return mlp_weights(rng, WIDTH, 32, 400), rng.normal(size=(TOKENS, WIDTH)), 200.0 + rng.normal(size=TOKENS)


def _identifiers(rng):
    params = {"table": rng.normal(size=(3000, 8)), "net": mlp_weights(rng, WIDTH, 32, 8)}
    return params, rng.normal(size=(TOKENS, WIDTH)), rng.integers(0, 3000, TOKENS) * 1.0


def _pixels(rng):
    return mlp_weights(rng, 8, 16, 16), rng.normal(size=(400, 8)), 500.0 + 50 * rng.normal(size=12)


def _quantized(rng):
    params = {"encoder": mlp_weights(rng, WIDTH, 32, 8), "decoder": mlp_weights(rng, 8, 32, WIDTH)}
    x, centres = clusters(rng, TOKENS, WIDTH, 12)
    return params | {"book": 8.0 + np.asarray(mlp(params["encoder"], centres))}, x


def _averaged(rng):
    params = mlp_weights(rng, 8, 32, 8)
    x, centres = clusters(rng, 800, 8, 6)
    return params, x, np.asarray(mlp(params, centres))


def _gumbel(rng):
    params, x, target = _experts(rng)
    params["router"] = mlp_weights(rng, WIDTH, 32, EXPERTS)
    likely = np.eye(EXPERTS)[rng.integers(0, EXPERTS, TOKENS)]
    return params, x, np.where(likely, rng.uniform(0.99, 0.999, likely.shape), 0.5 * rng.random(likely.shape)), target


def _classes(rng):
    return mlp_weights(rng, WIDTH, 32, 4), rng.normal(size=(TOKENS, WIDTH)), rng.integers(0, 4, TOKENS)


def _boxes(rng):
    params, x, _ = _classes(rng)
    return params, x, 10 * rng.random(TOKENS), 5.0 + 5e-3 * rng.permutation(TOKENS), rng.normal(size=TOKENS)


COUNTS, HUBS, ACCUMULATORS = "counts by products", "transposes that are sums", "accumulators by index"

PROGRAMS = (
    Program(switch_layer, _experts, (0, 1), COUNTS),
    Program(places_by_product, _many_tokens, (0, 1), COUNTS),
    Program(frequencies_of_words, _words, (0,), COUNTS),
    Program(expected_bins, _ages, (0, 1), COUNTS),
    Program(permuted_ids, _identifiers, (0,), COUNTS),
    Program(histogram_matching, _pixels, (0, 1), COUNTS),
    Program(vector_quantizer, _quantized, (0,), "choices"),
    Program(codebook_averages, _averaged, (0, 1), COUNTS),
    Program(gumbel_routes, _gumbel, (0, 1), "choices"),
    Program(neighbours, _classes, (0, 1), "choices"),
    Program(suppressed_boxes, _boxes, (0, 1), "keys of sorts"),
)
