"""Graphs, hubs and accumulators: what is gathered by many, and added up by index."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.numerics._networks import F32, dense, dense_weights, mlp, mlp_weights
from tests.numerics._program import Program

TOKENS, WIDTH = 96, 16


def hub_of_a_graph(params, x, senders, target, *, dtype=F32):
    """A message from one node to 20,000 others: the transpose of its gather is a sum of as many."""
    h = jnp.tanh(mlp(params[:2], x, dtype))
    return jnp.square(dense(params[2], h[senders], dtype).astype(F32) - target).mean(-1)


def words_of_one_kind(params, ids, target, *, dtype=F32):
    """An embedding that a layer makes for each word of a vocabulary, looked up where one word is most of the text."""
    table = jax.nn.silu(dense(params[1], params[0]["w"], dtype)).astype(F32)
    return jnp.square(dense(params[2], jnp.take(table, ids, 0), dtype).astype(F32) - target).mean(-1)


def prompt_for_all(params, x, target, *, dtype=F32):
    """A learned prompt, projected once and added to thousands of tokens: a broadcast, whose transpose is a sum."""
    prompt = jnp.tanh(dense(params["project"], params["prompt"], dtype))
    h = jax.nn.silu(dense(params["in"], x, dtype) + prompt)
    return jnp.square(dense(params["out"], h, dtype).astype(F32) - target).mean(-1)


def repeated_context(params, context, x, target, *, dtype=F32):
    """One context vector repeated along a sequence of thousands and concatenated to it."""
    c = jax.nn.silu(dense(params["context"], context, dtype))
    both = jnp.concatenate([jnp.broadcast_to(c, (len(x), WIDTH)), x.astype(dtype)], -1)
    return jnp.square(dense(params["out"], both, dtype).astype(F32) - target).mean(-1)


def graph_attention(params, x, senders, receivers, target, *, dtype=F32):
    """Softmax over the edges of each node, by segments; one node with most of the edges."""
    h = mlp(params["node"], x, dtype)
    score = jax.nn.leaky_relu(dense(params["edge"], jnp.concatenate([h[senders], h[receivers]], -1), dtype))
    score = score.astype(F32)[:, 0]
    top = jax.ops.segment_max(score, receivers, len(x))
    weight = jnp.exp(score - lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))[receivers])
    total = jax.ops.segment_sum(weight, receivers, len(x))
    mixed = jax.ops.segment_sum(weight[:, None] * h[senders], receivers, len(x)) / (total[:, None] + 1e-16)
    return jnp.square(mixed - target).mean(-1)


def degrees(params, x, senders, receivers, target, *, dtype=F32):
    """Symmetric normalization by degrees, that are sums of ones over edges."""
    degree = jnp.zeros(len(x)).at[receivers].add(1.0) + 1.0
    for p in params:
        h = dense(p, x, dtype).astype(F32) / jnp.sqrt(degree)[:, None]
        x = jnp.tanh((jnp.zeros_like(h).at[receivers].add(h[senders]) + h) / jnp.sqrt(degree)[:, None])
    return jnp.square(x - target).mean(-1)


def messages_in_a_scan(params, x, blocks, target, *, dtype=F32):
    """Edges in blocks, a scan that adds the messages of each to the nodes by `.at[].add`."""

    def block(total, edges):
        senders, receivers = edges
        message = jax.nn.silu(dense(params[0], x[senders], dtype))
        return total.at[receivers].add(message.astype(F32)), None

    total, _ = lax.scan(block, jnp.zeros_like(x), blocks)
    return jnp.square(dense(params[1], total / 30.0, dtype).astype(F32) - target).mean(-1)


def rows_in_a_scan(params, x, segments, target, *, dtype=F32):
    """Rows of a table that a scan adds to, by index and one at a time, for a layer to read."""

    def chunk(total, inputs):
        x, segment = inputs
        row = lax.dynamic_index_in_dim(total, segment, 0, keepdims=False)
        row = row + 0.02 * jnp.tanh(mlp(params["in"], x, dtype)).sum(0)
        return lax.dynamic_update_index_in_dim(total, row, segment, 0), None

    total, _ = lax.scan(chunk, jnp.zeros((4, 8)), (x, segments))
    return jnp.square(mlp(params["out"], total, dtype) - target)


def frames_in_a_scan(params, x, target, *, dtype=F32):
    """Overlapping frames that a scan adds up in a buffer and moves along, for a layer to read."""

    def frame(buffer, v):
        buffer = buffer + jnp.tanh(mlp(params["in"], v, dtype))
        return jnp.concatenate([0.999 * buffer[:, 2:], buffer[:, :2]], -1), None

    buffer, _ = lax.scan(frame, jnp.zeros((8, 8)), x)
    return jnp.square(mlp(params["out"], 0.1 * buffer, dtype) - target)


def _hub(rng):
    senders = np.where(rng.random(20000) < 0.99, 3, rng.integers(0, 32, 20000))
    return mlp_weights(rng, 8, 16, 8, 4), rng.normal(size=(32, 8)), senders, rng.normal(size=(20000, 4))


def _text(rng):
    ids = np.where(rng.random(16000) < 0.95, 5, rng.integers(0, 8, 16000))
    return mlp_weights(rng, 8, 8, 8, 4), ids, rng.normal(size=(16000, 4))


def _prompt(rng):
    params = {k: dense_weights(rng, WIDTH, WIDTH) for k in ("project", "in")}
    params |= {"prompt": rng.normal(size=WIDTH), "out": dense_weights(rng, WIDTH, 4)}
    return params, rng.normal(size=(6000, WIDTH)), rng.normal(size=(6000, 4))


def _context(rng):
    params = {"context": dense_weights(rng, WIDTH, WIDTH), "out": dense_weights(rng, 2 * WIDTH, 4)}
    return params, rng.normal(size=WIDTH), rng.normal(size=(6000, WIDTH)), rng.normal(size=(6000, 4))


def _edges(rng, count=2000, nodes=TOKENS):
    receivers = np.where(rng.random(count) < 0.5, 0, rng.integers(0, nodes, count))
    return rng.integers(0, nodes, count), receivers


def _attended(rng):
    params = {"node": mlp_weights(rng, WIDTH, 32, 8), "edge": dense_weights(rng, 16, 1)}
    return params, rng.normal(size=(TOKENS, WIDTH)), *_edges(rng), rng.normal(size=(TOKENS, 8))


def _gcn(rng):
    return (
        mlp_weights(rng, WIDTH, WIDTH, WIDTH),
        rng.normal(size=(TOKENS, WIDTH)),
        *_edges(rng),
        rng.normal(size=(TOKENS, WIDTH)),
    )


def _blocks(rng):
    edges = tuple(e.reshape(20, -1) for e in _edges(rng))
    return mlp_weights(rng, WIDTH, WIDTH, 4), rng.normal(size=(TOKENS, WIDTH)), edges, rng.normal(size=(TOKENS, 4))


def _chunks(rng):
    params = {"in": mlp_weights(rng, 8, 8), "out": mlp_weights(rng, 8, 8, 4)}
    return params, 0.5 + rng.normal(size=(200, 16, 8)), rng.integers(0, 4, 200), rng.normal(size=(4, 4))


def _frames(rng):
    params = {"in": mlp_weights(rng, 8, 8), "out": mlp_weights(rng, 8, 8, 4)}
    return params, 0.5 + rng.normal(size=(150, 8, 8)), rng.normal(size=(8, 4))


COUNTS, HUBS, ACCUMULATORS = "counts by products", "transposes that are sums", "accumulators in loops"
PROGRAMS = (
    Program(hub_of_a_graph, _hub, (0, 1), HUBS),
    Program(words_of_one_kind, _text, (0,), HUBS),
    Program(prompt_for_all, _prompt, (0, 1), HUBS),
    Program(repeated_context, _context, (0, 1, 2), HUBS),
    Program(graph_attention, _attended, (0, 1), HUBS),
    Program(degrees, _gcn, (0, 1), COUNTS),
    Program(messages_in_a_scan, _blocks, (0, 1), ACCUMULATORS),
    Program(rows_in_a_scan, _chunks, (0, 1), ACCUMULATORS),
    Program(frames_in_a_scan, _frames, (0, 1), ACCUMULATORS),
)
