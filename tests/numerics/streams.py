"""Loops over time that keep a sum, and what it is divided by: softmaxes, means and variances in one pass."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.numerics._networks import F32, dense, dense_weights, mlp, mlp_weights
from tests.numerics._program import Program

TIME, WIDTH = 64, 8


def streaming_softmax(w, x, v, target, *, dtype=F32):
    """A softmax in one pass: the largest score so far, the sum of exponentials, and the weighted sum."""

    def step(carry, inputs):
        largest, total, out = carry
        x, v = inputs
        score = (x.astype(dtype) @ w.astype(dtype)).astype(F32)
        new = jnp.maximum(largest, score)
        decay, weight = jnp.exp(largest - new), jnp.exp(score - new)
        return (new, total * decay + weight, out * decay + weight * v), None

    start = jnp.full(WIDTH, -jnp.inf), jnp.zeros(WIDTH), jnp.zeros(WIDTH)
    (largest, total, out), _ = lax.scan(step, start, (x, v))
    return out / total * target + largest + jnp.log(total)


def chunked_attention(params, x, target, *, dtype=F32):
    """Attention over chunks of keys, as flash attention has it."""
    q, k, v = (dense(params[name], x, dtype) for name in ("q", "k", "v"))

    def step(carry, inputs):
        largest, total, out = carry
        k, v = inputs
        scores = (q @ k.T).astype(F32) / np.sqrt(WIDTH)
        new = jnp.maximum(largest, scores.max(-1))
        decay, weights = jnp.exp(largest - new), jnp.exp(scores - new[:, None])
        seen = (weights.astype(dtype) @ v).astype(F32)
        return (new, decay * total + weights.sum(-1), decay[:, None] * out + seen), None

    start = jnp.full(TIME, -1e30), jnp.zeros(TIME), jnp.zeros((TIME, WIDTH))
    (_, total, out), _ = lax.scan(step, start, tuple(z.reshape(8, -1, WIDTH) for z in (k, v)))
    return jnp.square(out / total[:, None] - target)


def normalized_linear_attention(params, x, target, *, dtype=F32):
    """Linear attention that forgets at a rate that it reads: a matrix and its normaliser."""
    q, k = (jax.nn.softplus(dense(params[name], x, dtype).astype(F32)) for name in ("q", "k"))
    v, gate = dense(params["v"], x, dtype).astype(F32), jax.nn.sigmoid(dense(params["g"], x, dtype).astype(F32))[:, :1]

    def step(carry, inputs):
        state, norm = carry
        q, k, v, gate = inputs
        state, norm = gate[:, None] * state + jnp.outer(k, v), gate * norm + k
        return (state, norm), (q.astype(dtype) @ state.astype(dtype)).astype(F32) / jnp.sum(q * norm)

    _, y = lax.scan(step, (jnp.zeros((WIDTH, WIDTH)), jnp.zeros(WIDTH)), (q, k, v, gate))
    return jnp.square(y - target)


def exponential_gates(params, x, target, *, dtype=F32):
    """The cell of an xLSTM: exponential gates, their normaliser, and a stabilizer."""
    z, i, f, o = jnp.split(dense(params, x, dtype).astype(F32), 4, -1)

    def step(carry, inputs):
        cell, norm, largest = carry
        z, i, f, o = inputs
        log_f = jax.nn.log_sigmoid(f + 2.0)
        new = jnp.maximum(log_f + largest, i)
        keep, add = jnp.exp(log_f + largest - new), jnp.exp(i - new)
        cell, norm = keep * cell + add * jnp.tanh(z), keep * norm + add
        return (cell, norm, new), jax.nn.sigmoid(o) * cell / norm

    _, y = lax.scan(step, (jnp.zeros(WIDTH), jnp.zeros(WIDTH), jnp.zeros(WIDTH)), (z, i, f, o))
    return jnp.square(y - target)


def gated_mean(params, x, target, *, dtype=F32):
    """A mean with weights that a network makes, and that fades: sums of both terms."""
    value, fade = jnp.split(mlp(params, x, dtype).astype(F32), 2, -1)

    def step(carry, inputs):
        total, count = carry
        value, fade = inputs
        kept = jnp.exp(-jax.nn.softplus(fade))
        return (kept * total + value, kept * count + 1.0), (kept * total + value) / (kept * count + 1.0)

    _, means = lax.scan(step, (jnp.zeros(WIDTH), jnp.zeros(WIDTH)), (value, fade))
    return jnp.square(means - target)


def streaming_welford(params, x, *, dtype=F32):
    """Mean and variance of features in one pass."""
    h = mlp(params, x, dtype).astype(F32)

    def step(carry, h):
        mean, m2, n = carry
        n = n + 1.0
        delta = h - mean
        mean = mean + delta / n
        return (mean, m2 + delta * (h - mean), n), None

    (mean, m2, n), _ = lax.scan(step, (jnp.zeros(2 * WIDTH), jnp.zeros(2 * WIDTH), jnp.float32(0)), h)
    return jnp.square(mean) + jnp.log(m2 / n)


def moving_moments(params, x, target, *, dtype=F32):
    """Features normalised by moments that follow them at a rate that they make."""
    h, rate = jnp.split(mlp(params, x, dtype).astype(F32), 2, -1)

    def step(carry, inputs):
        mean, square = carry
        h, rate = inputs
        rate = jax.nn.sigmoid(rate - 2.0)
        mean, square = (1 - rate) * mean + rate * h, (1 - rate) * square + rate * h * h
        return (mean, square), (h - mean) / jnp.sqrt(jnp.maximum(square - mean * mean, 0) + 0.1)

    _, y = lax.scan(step, (jnp.zeros(WIDTH), jnp.ones(WIDTH)), (h, rate))
    return jnp.square(y - target)


def streaming_kalman(params, x, *, dtype=F32):
    """A filter of many scalar states: a mean and a variance each, gains that both share."""
    h, noise = jnp.split(mlp(params, x, dtype).astype(F32), 2, -1)

    def step(carry, inputs):
        mean, variance = carry
        h, noise = inputs
        variance = variance + 0.1
        gain = variance / (variance + jnp.exp(noise))
        error = h - mean
        loss = jnp.square(error) * gain - jnp.log(gain)
        return (mean + gain * error, (1 - gain) * variance), loss

    return lax.scan(step, (jnp.zeros(WIDTH), jnp.ones(WIDTH)), (h, noise))[1]


def _streamed(rng):
    return rng.normal(size=(16, WIDTH)) * 0.3, *(rng.normal(size=s) for s in ((400, 16), (400, WIDTH), (WIDTH,)))


def _tokens(*names):
    def inputs(rng):
        params = {name: dense_weights(rng, 16, WIDTH) for name in names}
        return params, rng.normal(size=(TIME, 16)), rng.normal(size=(TIME, WIDTH))

    return inputs


def _cell(rng):
    return dense_weights(rng, 16, 4 * WIDTH), rng.normal(size=(TIME, 16)), rng.normal(size=(TIME, WIDTH))


def _features(rng):
    return mlp_weights(rng, 16, 16, 2 * WIDTH), rng.normal(size=(TIME, 16)), rng.normal(size=(TIME, WIDTH))


STREAMED = "sums and what they are divided by, in one pass"
PROGRAMS = (
    Program(streaming_softmax, _streamed, (0, 1), STREAMED),
    Program(chunked_attention, _tokens("q", "k", "v"), (0, 1), STREAMED),
    Program(normalized_linear_attention, _tokens("q", "k", "v", "g"), (0, 1), STREAMED),
    Program(exponential_gates, _cell, (0, 1), STREAMED),
    Program(gated_mean, _features, (0, 1), STREAMED),
    Program(streaming_welford, lambda rng: _features(rng)[:2], (0, 1), STREAMED),
    Program(moving_moments, _features, (0, 1), STREAMED),
    Program(streaming_kalman, lambda rng: _features(rng)[:2], (0, 1), STREAMED),
)
