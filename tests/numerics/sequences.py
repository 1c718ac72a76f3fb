"""Sequence models: recurrences, scans, attention with masks, and losses by dynamic programming."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.numerics._networks import F32, cross_entropy, dense, dense_weights, layer_norm
from tests.numerics._program import Program

BATCH, TIME, WIDTH, CLASSES = 4, 32, 16, 6
LEAST = float(np.finfo(np.float32).min)


def recurrent(params, x, labels, *, dtype=F32):
    """A plain recurrent network."""

    def cell(h, x):
        h = jnp.tanh(dense(params["in"], x, dtype) + h @ params["h"].astype(dtype))
        return h, h

    _, hs = lax.scan(cell, jnp.zeros((BATCH, WIDTH), dtype), x.swapaxes(0, 1))
    return cross_entropy(dense(params["out"], hs, dtype).astype(F32), labels.T)


def lstm(params, x, labels, *, dtype=F32):
    """Long short-term memory, the cell's state in float32."""

    def cell(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(dense(params["in"], x, dtype) + h @ params["h"].astype(dtype), 4, -1)
        c = jax.nn.sigmoid(f + 1.0).astype(F32) * c + (jax.nn.sigmoid(i) * jnp.tanh(g)).astype(F32)
        h = jax.nn.sigmoid(o) * jnp.tanh(c).astype(dtype)
        return (h, c), h

    start = jnp.zeros((BATCH, WIDTH), dtype), jnp.zeros((BATCH, WIDTH))
    _, hs = lax.scan(cell, start, x.swapaxes(0, 1))
    return cross_entropy(dense(params["out"], hs, dtype).astype(F32), labels.T)


def mamba(params, x, labels, *, dtype=F32):
    """A selective state space: outer products by einsum, a scan over time, states in float32."""
    u = jax.nn.silu(dense(params["in"], x, dtype))
    delta = jax.nn.softplus(dense(params["delta"], u, dtype).astype(F32) - 3.0)
    b, c = (dense(params[k], u, dtype).astype(F32) for k in ("b", "c"))
    a = -jnp.exp(params["log_a"])
    decay = jnp.exp(jnp.einsum("bld,dn->bldn", delta, a))
    drive = jnp.einsum("bld,bln->bldn", delta * u.astype(F32), b)

    def step(state, inputs):
        decay, drive, c = inputs
        state = decay * state + drive
        return state, jnp.einsum("bdn,bn->bd", state, c)

    time_first = [jnp.moveaxis(v, 1, 0) for v in (decay, drive, c)]
    _, y = lax.scan(step, jnp.zeros((BATCH, WIDTH, 4)), tuple(time_first))
    return cross_entropy(dense(params["out"], y, dtype).astype(F32), labels.T)


def mamba_associative(params, x, labels, *, dtype=F32):
    """The same recurrence by an associative scan."""
    u = jax.nn.silu(dense(params["in"], x, dtype)).astype(F32)
    delta = jax.nn.softplus(dense(params["delta"], u, dtype).astype(F32) - 3.0)
    b, c = (dense(params[k], u, dtype).astype(F32) for k in ("b", "c"))
    decay = jnp.exp(delta[..., None] * -jnp.exp(params["log_a"]))
    drive = jnp.einsum("bld,bln->bldn", delta * u, b)
    combine = lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])
    _, states = lax.associative_scan(combine, (decay, drive), axis=1)
    y = jnp.einsum("bldn,bln->bld", states, c)
    return cross_entropy(dense(params["out"], y, dtype).astype(F32), labels)


def long_convolution(params, x, labels, *, dtype=F32):
    """A diagonal state space as a long convolution: powers of decays near one, applied by FFT."""
    u = dense(params["in"], x, dtype).astype(F32)
    rate = jnp.exp(-jnp.exp(params["log_a"] - 4.0))
    kernel = jnp.sum(rate[:, :, None] ** jnp.arange(TIME), 1) / 4.0
    spectrum = jnp.fft.rfft(u, 2 * TIME, axis=1) * jnp.fft.rfft(kernel.T, 2 * TIME, axis=0)
    y = jnp.fft.irfft(spectrum, axis=1)[:, :TIME]
    return cross_entropy(dense(params["out"], jax.nn.gelu(y), dtype).astype(F32), labels)


def linear_attention(params, x, labels, *, dtype=F32):
    """Linear attention: running sums of outer products, by einsum and `cumsum`, and a normalizer."""
    q, k, v = (dense(params[n], x, dtype).astype(F32) for n in ("b", "c", "in"))
    q, k = jax.nn.elu(q) + 1.0, jax.nn.elu(k) + 1.0
    states = jnp.cumsum(jnp.einsum("btk,btv->btkv", k, v), 1)
    norms = jnp.einsum("btk,btk->bt", q, jnp.cumsum(k, 1))
    y = jnp.einsum("btk,btkv->btv", q, states) / (norms[..., None] + 1e-12)
    return cross_entropy(dense(params["out"], y, dtype).astype(F32), labels)


def retention(params, x, labels, *, dtype=F32):
    """Attention that decays with distance: a matrix of powers by positions, and a group norm."""
    q, k, v = (dense(params[n], x, dtype) for n in ("b", "c", "in"))
    distance = jnp.arange(TIME)[:, None] - jnp.arange(TIME)[None]
    decay = jnp.where(distance >= 0, 0.97 ** jnp.maximum(distance, 0).astype(F32), 0.0)
    scores = jnp.einsum("btk,bsk->bts", q, k).astype(F32) * decay
    y = layer_norm(jnp.einsum("bts,bsv->btv", scores.astype(dtype), v))
    return cross_entropy(dense(params["out"], y, dtype).astype(F32), labels)


def delta_rule(params, x, labels, *, dtype=F32):
    """Fast weights: a matrix state, corrected by what it predicts wrongly."""
    q, k, v = (dense(params[n], x, dtype).astype(F32) for n in ("b", "c", "in"))
    k = k / (jnp.linalg.norm(k, axis=-1, keepdims=True) + 1e-6)

    def step(state, inputs):
        q, k, v = inputs
        wrong = v - jnp.einsum("bkv,bk->bv", state, k)
        state = 0.99 * state + 0.5 * jnp.einsum("bk,bv->bkv", k, wrong)
        return state, jnp.einsum("bkv,bk->bv", state, q)

    start = jnp.zeros((BATCH, k.shape[-1], WIDTH))
    _, y = lax.scan(step, start, tuple(jnp.moveaxis(u, 1, 0) for u in (q, k, v)))
    return cross_entropy(dense(params["out"], y, dtype).astype(F32), labels.T)


def conditional_field(params, x, labels, *, dtype=F32):
    """A linear-chain CRF: the forward algorithm in a scan, and the score of the labels."""
    emissions = 3.0 * dense(params["out"], jnp.tanh(dense(params["in"], x, dtype)), dtype).astype(F32)
    transitions = params["transitions"]

    def step(alpha, emission):
        return jax.nn.logsumexp(alpha[:, :, None] + transitions, 1) + emission, None

    alpha, _ = lax.scan(step, emissions[:, 0], jnp.moveaxis(emissions[:, 1:], 1, 0))
    path = jnp.sum(jnp.take_along_axis(emissions, labels[..., None], -1), (1, 2))
    path = path + jnp.sum(transitions[labels[:, :-1], labels[:, 1:]], 1)
    return jax.nn.logsumexp(alpha, -1) - path


def alignment(params, x, labels, *, dtype=F32):
    """Connectionist temporal classification, by optax."""
    logits = 2.0 * dense(params["out"], jnp.tanh(dense(params["in"], x, dtype)), dtype).astype(F32)
    short = labels[:, :8] % (CLASSES - 1) + 1
    return optax.ctc_loss(logits, jnp.zeros((BATCH, TIME)), short, jnp.zeros(short.shape))


def time_warping(params, x, target, *, dtype=F32):
    """Soft dynamic time warping in two nested scans; far cells start at 1e10."""
    y = dense(params["in"], x, dtype).astype(F32)
    cost = jnp.sum((y[:, :, None] - target[:, None]) ** 2, -1)

    def row(above, costs):
        def cell(left, inputs):
            diagonal, up, c = inputs
            value = c - 0.5 * jax.nn.logsumexp(-2.0 * jnp.stack([left, diagonal, up]), 0)
            return value, value

        diagonal = jnp.concatenate([above[:1], above[1:-1]])
        _, values = lax.scan(cell, jnp.full(costs.shape[1], 1e10), (diagonal, above[1:], costs))
        return jnp.concatenate([jnp.full_like(above[:1], 1e10), values]), None

    first = jnp.full((target.shape[1] + 1, BATCH), 1e10).at[0].set(0.0)
    last, _ = lax.scan(row, first, jnp.moveaxis(cost, 0, -1))
    return last[-1]


def attention_with_padding(params, x, labels, lengths, *, dtype=F32):
    """Causal attention of left-padded sequences, masks of the least number added: some rows are masked wholly."""
    q, k, v = (dense(params[n], x, dtype) for n in ("q", "k", "v"))
    causal = jnp.tril(jnp.ones((TIME, TIME), bool))
    present = jnp.arange(TIME) >= TIME - lengths[:, None]
    bias = jnp.where(causal & present[:, None], 0.0, LEAST)
    scores = jnp.einsum("btk,bsk->bts", q, k).astype(F32) / 4.0 + bias
    y = jnp.einsum("bts,bsv->btv", jax.nn.softmax(scores).astype(dtype), v)
    losses = cross_entropy(dense(params["out"], y, dtype).astype(F32), labels)
    return jnp.where(present, losses, 0.0)


def attention_with_loop_mask(params, x, labels, lengths, *, dtype=F32):
    """Attention whose mask a loop writes, a row for each length."""
    q, k, v = (dense(params[n], x, dtype) for n in ("q", "k", "v"))
    rows = jnp.arange(TIME)
    mask = lax.fori_loop(
        0, BATCH, lambda i, m: m.at[i].set(jnp.where(rows < lengths[i], 0.0, -1e9)), jnp.full((BATCH, TIME), LEAST)
    )
    scores = jnp.einsum("btk,bsk->bts", q, k).astype(F32) / 4.0 + mask[:, None]
    y = jnp.einsum("bts,bsv->btv", jax.nn.softmax(scores).astype(dtype), v)
    return cross_entropy(dense(params["out"], y, dtype).astype(F32), labels)


def attention_of_masked_sums(params, x, labels, lengths, *, dtype=F32):
    """Two masks of the least number that add up to minus infinity where both hold, and `where` for empty rows."""
    q, k, v = (dense(params[n], x, dtype) for n in ("q", "k", "v"))
    absent = jnp.arange(TIME) < TIME - lengths[:, None]
    later = jnp.triu(jnp.ones((TIME, TIME), bool), 1)
    bias = jnp.where(absent, LEAST / 4, 0.0)[:, None] + jnp.where(later, LEAST / 4, 0.0)
    scores = jnp.einsum("btk,bsk->bts", q, k).astype(F32) / 4.0 + bias
    y = jnp.einsum("bts,bsv->btv", jax.nn.softmax(scores).astype(dtype), v)
    y = jnp.where(absent[..., None], 0.0, y)
    return cross_entropy(dense(params["out"], y, dtype).astype(F32), labels)


def rotary(params, x, labels, *, dtype=F32):
    """Rotary embeddings of positions around 3000, applied as a complex product written out."""
    q, k, v = (dense(params[n], x, dtype) for n in ("q", "k", "v"))
    angles = jnp.outer(jnp.arange(TIME) + 3000.0, 1.0 / 100.0 ** jnp.linspace(0.0, 1.0, WIDTH // 2))
    cos, sin = jnp.cos(angles), jnp.sin(angles)

    def turn(u):
        a, b = jnp.split(u.astype(F32), 2, -1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1).astype(dtype)

    scores = jnp.einsum("btk,bsk->bts", turn(q), turn(k)).astype(F32) / 4.0
    y = jnp.einsum("bts,bsv->btv", jax.nn.softmax(scores).astype(dtype), v)
    return cross_entropy(dense(params["out"], y, dtype).astype(F32), labels)


def cached_decoding(params, x, labels, *, dtype=F32):
    """Decoding with a cache that `dynamic_update_slice` fills, step by step, differentiated."""

    def step(cache, inputs):
        t, x = inputs
        q, k, v = (dense(params[n], x, dtype) for n in ("q", "k", "v"))
        keys = lax.dynamic_update_slice(cache[0], k[:, None], (0, t, 0))
        values = lax.dynamic_update_slice(cache[1], v[:, None], (0, t, 0))
        scores = jnp.einsum("bk,bsk->bs", q, keys).astype(F32) / 4.0
        scores = jnp.where(jnp.arange(TIME) <= t, scores, LEAST)
        y = jnp.einsum("bs,bsv->bv", jax.nn.softmax(scores).astype(dtype), values)
        return (keys, values), y

    start = (jnp.zeros((BATCH, TIME, WIDTH), dtype),) * 2
    _, y = lax.scan(step, start, (jnp.arange(TIME), x.swapaxes(0, 1)))
    return cross_entropy(dense(params["out"], y, dtype).astype(F32), labels.T)


def _weights(rng, **outs):
    return {name: dense_weights(rng, WIDTH, out) for name, out in outs.items()}


def _data(rng):
    return rng.normal(size=(BATCH, TIME, WIDTH)), rng.integers(0, CLASSES, (BATCH, TIME))


def _recurrent(gates):
    def inputs(rng):
        params = _weights(rng, **{"in": gates * WIDTH, "out": CLASSES})
        return params | {"h": rng.normal(size=(WIDTH, gates * WIDTH)) / 4}, *_data(rng)

    return inputs


def _state_space(rng):
    params = _weights(rng, **{"in": WIDTH, "delta": WIDTH, "b": 4, "c": 4, "out": CLASSES})
    return params | {"log_a": np.log(np.tile(np.arange(1.0, 5.0), (WIDTH, 1)))}, *_data(rng)


def _field(rng):
    params = _weights(rng, **{"in": WIDTH, "out": CLASSES})
    return params | {"transitions": rng.normal(size=(CLASSES, CLASSES))}, *_data(rng)


def _aligned(rng):
    return _weights(rng, **{"in": WIDTH, "out": CLASSES}), *_data(rng)


def _warped(rng):
    return _weights(rng, **{"in": 4}), _data(rng)[0], rng.normal(size=(BATCH, 12, 4))


def _attention(rng):
    return _weights(rng, q=WIDTH, k=WIDTH, v=WIDTH, out=CLASSES), *_data(rng)


def _padded(rng):
    return *_attention(rng), np.array([32, 20, 9, 27])


RECURRENT, MASKS, OUTER = "accumulators in loops", "masks", "outer products"
PROGRAMS = (
    Program(recurrent, _recurrent(1), (0, 1), RECURRENT),
    Program(lstm, _recurrent(4), (0, 1), RECURRENT),
    Program(mamba, _state_space, (0, 1), OUTER),
    Program(mamba_associative, _state_space, (0, 1), OUTER),
    Program(long_convolution, _state_space, (0, 1), "phases"),
    Program(linear_attention, _state_space, (0, 1), OUTER),
    Program(retention, _state_space, (0, 1), "positions"),
    Program(delta_rule, _state_space, (0, 1), OUTER),
    Program(conditional_field, _field, (0, 1), RECURRENT),
    Program(alignment, _aligned, (0, 1), RECURRENT),
    Program(time_warping, _warped, (0, 1), MASKS),
    Program(attention_with_padding, _padded, (0, 1), MASKS),
    Program(attention_with_loop_mask, _padded, (0, 1), MASKS),
    Program(attention_of_masked_sums, _padded, (0, 1), MASKS),
    Program(rotary, _attention, (0, 1), "phases"),
    Program(cached_decoding, _attention, (0, 1), RECURRENT),
)
