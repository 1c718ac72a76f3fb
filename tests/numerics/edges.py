"""Edges of number formats: epsilons, masks, branches, counters, integers held in floats, small linear algebra."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.numerics._networks import F32, cross_entropy, dense, dense_weights, mlp, mlp_weights
from tests.numerics._program import Program

BATCH, TIME, WIDTH = 16, 12, 16
LEAST = float(np.finfo(np.float32).min)
TINY = np.full((), 1e-8, np.float32)


def sparse_directions(params, x, target, *, dtype=F32):
    """Signs of sparse features, softened by an epsilon that is an array of its own."""
    h = jax.nn.relu(dense(params[0], x, dtype).astype(F32))
    h = h / (jnp.abs(h) + jnp.asarray(TINY))
    return jnp.square(dense(params[1], h, dtype).astype(F32) - target).mean(-1)


def smoothed_signs(params, x, target, epsilon, *, dtype=F32):
    """The same by a root, of an epsilon that is an argument and is squared."""
    h = jax.nn.relu(dense(params[0], x, dtype).astype(F32))
    h = h * lax.rsqrt(h * h + epsilon**2)
    return jnp.square(dense(params[1], h, dtype).astype(F32) - target).mean(-1)


def shares(params, x, target, *, dtype=F32):
    """Shares of what is active, the epsilon computed from sizes."""
    h = jax.nn.relu(dense(params[0], x, dtype).astype(F32))
    h = jnp.where(jnp.arange(len(x))[:, None] % 4 == 0, 0.0, h)
    epsilon = jnp.float32(1.0) / jnp.float32(h.size) ** 3.5
    neighbour = jnp.roll(h, 1, -1)
    h = h / (h + neighbour + epsilon)
    return jnp.square(dense(params[1], h, dtype).astype(F32) - target).mean(-1)


def cosine_attention(params, x, present, labels, *, dtype=F32):
    """Attention by cosines; absent tokens are zero, and so are their norms, but for an epsilon among the weights."""
    q, k, v = (dense(params[n], x, dtype).astype(F32) * present[..., None] for n in ("q", "k", "v"))
    unit = lambda u: u / jnp.sqrt(jnp.sum(u * u, -1, keepdims=True) + params["epsilon"])
    scores = 5.0 * jnp.einsum("btk,bsk->bts", unit(q).astype(dtype), unit(k).astype(dtype)).astype(F32)
    y = jnp.einsum("bts,bsv->btv", jax.nn.softmax(scores).astype(dtype), v.astype(dtype))
    return cross_entropy(dense(params["out"], y, dtype).astype(F32), labels)


def masks_added(params, x, present, labels, *, dtype=F32):
    """Masks as `(1 - m) * least` of tokens and of the future, added up, so that both are beyond all numbers."""
    q, k, v = (dense(params[n], x, dtype) for n in ("q", "k", "v"))
    future = jnp.triu(jnp.ones((TIME, TIME)), 1) * LEAST / 2
    bias = (1.0 - present)[:, None] * LEAST / 2 + future
    scores = jnp.einsum("btk,bsk->bts", q, k).astype(F32) / 4.0 + bias
    y = jnp.einsum("bts,bsv->btv", jax.nn.softmax(scores).astype(dtype), v)
    return cross_entropy(dense(params["out"], y, dtype).astype(F32), labels)


def pooled_maximum(params, x, present, labels, *, dtype=F32):
    """The maximum over tokens that are there; rows without any are zero after that."""
    h = dense(params["q"], x, dtype).astype(F32)
    there = present[..., None] > 0
    top = jnp.max(jnp.where(there, h, LEAST), 1)
    pooled = jnp.where(jnp.any(there, 1), top, 0.0)
    return cross_entropy(dense(params["out"], pooled, dtype).astype(F32), labels[:, 0])


def gaps_of_maxima(params, x, present, labels, *, dtype=F32):
    """Tokens relative to the largest that is there: in an empty row, least minus least."""
    h = dense(params["q"], x, dtype).astype(F32)
    masked = jnp.where(present[..., None] > 0, h, LEAST)
    gap = masked - jnp.max(masked, 1, keepdims=True)
    mixed = jnp.sum(jnp.where(present[..., None] > 0, jnp.tanh(gap), 0.0), 1)
    return cross_entropy(dense(params["out"], mixed, dtype).astype(F32), labels[:, 0])


def energy_in_a_branch(params, x, target, step, *, dtype=F32):
    """A penalty that a `cond` adds late in training: squares of activations around 300, a sum in one branch alone."""
    h = 100.0 * dense(params[0], x, dtype).astype(F32)
    penalty = lax.cond(step > 10, lambda s: 1e-5 * jnp.sum(s, -1), lambda s: jnp.zeros(len(s)), h * h)
    return jnp.square(dense(params[1], 0.01 * h, dtype).astype(F32) - target).mean(-1) + penalty


def phase_in_a_branch(params, x, target, frequencies, kind, *, dtype=F32):
    """Encodings of positions by a switch: one branch needs them to a fraction of a radian, the others not at all."""
    angles = jnp.einsum("t,f->tf", jnp.arange(2000.0, 2000.0 + len(x)), frequencies)
    branches = [jnp.zeros_like, jnp.sin, lambda a: jnp.ones_like(a)]
    encoding = lax.switch(kind, branches, angles)
    return jnp.square(mlp(params, x + encoding, dtype) - target).mean(-1)


def gated_outliers(params, x, target, *, dtype=F32):
    """Squared errors of readings around 700, those beyond three deviations left out."""
    e = 700.0 + mlp(params, x, dtype) - target
    inlier = jnp.abs(e) / 2.0 < 3.0
    return jnp.mean(jnp.where(inlier, 0.5 * (e / 2.0) ** 2, 4.5), -1)


def loss_with_metrics(params, x, target, *, dtype=F32):
    """A squared error with metrics beside it: how many are within one, and whether all are finite."""
    predicted = 1200.0 + mlp(params, x, dtype)
    within = jnp.mean(jnp.abs(predicted - target) < 1.0, -1)
    finite = jnp.all(jnp.isfinite(predicted * 1.0), -1)
    return jnp.mean((predicted - target) ** 2, -1) + jnp.where(finite, 0.0, 1.0) + 0.0 * within


def hard_examples(params, x, target, *, dtype=F32):
    """The mean of the larger errors, found by sorting errors with their indices; a layer reads the errors too."""
    e = 20.0 + 0.01 * mlp(params[:2], x, dtype) + target
    flat = e.mean(-1)
    order = lax.sort((lax.stop_gradient(flat), jnp.arange(len(flat))), num_keys=1)[1]
    weight = jnp.zeros(len(flat)).at[order].set(jnp.linspace(0.0, 1.0, len(flat)))
    return weight * jnp.square(dense(params[2], e - 20.0, dtype).astype(F32)).mean(-1)


def quantization_aware(params, x, target, *, dtype=F32):
    """Weights rounded to 8 bits, straight through, before each layer."""

    def quantized(p):
        scale = jnp.max(jnp.abs(p["w"]), 0) / 127.0 + 1e-9
        w = jnp.round(p["w"] / scale) * scale
        return p | {"w": p["w"] + lax.stop_gradient(w - p["w"])}

    return jnp.square(mlp([quantized(p) for p in params], x, dtype) - target).mean(-1)


def welford(params, x, target, *, dtype=F32):
    """Running means and deviations of features in a scan, the count a float that grows by one."""

    def step(carry, x):
        count, mean, square = carry
        h = 50.0 + dense(params[0], x, dtype).astype(F32)
        count = count + 1.0
        delta = h - mean
        mean = mean + delta / count
        return (count, mean, square + delta * (h - mean)), None

    start = (jnp.float32(0), jnp.zeros(WIDTH), jnp.zeros(WIDTH))
    (count, mean, square), _ = lax.scan(step, start, jnp.tile(x, (20, 1)))
    deviation = jnp.sqrt(square / count + 1e-6)
    normal = (50.0 + dense(params[0], x, dtype).astype(F32) - mean) / deviation
    return jnp.square(dense(params[1], normal, dtype).astype(F32) - target).mean(-1)


def packed_keys(params, x, target, *, dtype=F32):
    """Row and column packed into one number and taken apart by division and remainder; tables looked up by both."""
    rows, columns = jnp.arange(BATCH) * 7.0 % 16.0, jnp.arange(BATCH) * 5.0 % 16.0
    keys = rows * 331.0 + columns
    again, rest = jnp.floor(keys / 331.0), keys % 331.0
    table = params["table"]
    h = table[again.astype(jnp.int32)] + table[rest.astype(jnp.int32)]
    return jnp.square(mlp(params["net"], h + x, dtype) - target).mean(-1)


def kalman(params, x, readings, *, dtype=F32):
    """A Kalman filter in a scan: covariances of 2x2, corrected by differences; noises learned."""
    noise = jnp.exp(mlp(params, x, dtype).mean(0))
    move = jnp.array([[1.0, 0.1], [0.0, 1.0]])

    def step(carry, reading):
        mean, cov = carry
        mean, cov = move @ mean, move @ cov @ move.T + 1e-3 * noise[0] * jnp.eye(2)
        variance = cov[0, 0] + 0.1 * noise[1]
        gain = cov[:, 0] / variance
        wrong = reading - mean[0]
        cov = cov - jnp.outer(gain, cov[0])
        return (mean + gain * wrong, cov), 0.5 * (wrong**2 / variance + jnp.log(variance))

    _, losses = lax.scan(step, (jnp.array([100.0, 1.0]), jnp.eye(2)), readings)
    return losses


def gaussian_process(params, x, target, *, dtype=F32):
    """A deep kernel: features by a network, a likelihood by a Cholesky factor."""
    h = mlp(params, x, dtype)
    square = jnp.sum((h[:, None] - h) ** 2, -1)
    factor = jnp.linalg.cholesky(jnp.exp(-0.5 * square) + 0.05 * jnp.eye(len(h)))
    white = jax.scipy.linalg.solve_triangular(factor, target, lower=True)
    return 0.5 * jnp.sum(white**2, 0) + jnp.sum(jnp.log(jnp.diag(factor)))


def weight_normalized(params, x, target, *, dtype=F32):
    """Weights as directions and lengths, of columns whose squares are tiny."""
    v = params[0]["w"]
    w = v / jnp.sqrt(jnp.sum(v * v, 0))
    h = jax.nn.silu(dense({"w": w, "b": params[0]["b"]}, x, dtype))
    return jnp.square(dense(params[1], h, dtype).astype(F32) - target).mean(-1)


def _regression(center=0.0, layers=1):
    def inputs(rng):
        params = mlp_weights(rng, WIDTH, *[WIDTH] * layers, 8)
        return params, rng.normal(size=(BATCH, WIDTH)), center + rng.normal(size=(BATCH, 8))

    return inputs


def _errors(rng):
    target = 0.05 * rng.permutation(BATCH)[:, None] + 0.01 * rng.normal(size=(BATCH, 8))
    return mlp_weights(rng, WIDTH, WIDTH, 8, 4), rng.normal(size=(BATCH, WIDTH)), target


def _without_bias(rng):
    params, x, target = _regression()(rng)
    return [p | {"b": 0.0 * p["b"]} for p in params], np.where(rng.random((BATCH, 1)) < 0.3, 0.0, x), target


def _with(inputs, *more):
    return lambda rng: (*inputs(rng), *more)


def _sequences(rng):
    params = {n: dense_weights(rng, WIDTH, WIDTH) for n in "qkv"} | {"out": dense_weights(rng, WIDTH, 5)}
    present = 1.0 * (np.arange(TIME) >= TIME - rng.integers(2, TIME, 4)[:, None])
    present[1] = 0.0
    return params, rng.normal(size=(4, TIME, WIDTH)), present, rng.integers(0, 5, (4, TIME))


def _cosines(rng):
    params, *rest = _sequences(rng)
    return params | {"epsilon": np.float32(1e-12)}, *rest


def _keys(rng):
    params = {"table": rng.normal(size=(16, WIDTH)), "net": mlp_weights(rng, WIDTH, 32, 8)}
    return params, rng.normal(size=(BATCH, WIDTH)), rng.normal(size=(BATCH, 8))


def _readings(rng):
    params = mlp_weights(rng, WIDTH, 16, 2)
    return params, rng.normal(size=(BATCH, WIDTH)), 100.0 + np.cumsum(0.1 + 0.3 * rng.normal(size=40))


def _small_columns(rng):
    params, x, target = _regression()(rng)
    params[0]["w"] = params[0]["w"] * np.logspace(-5, 1, WIDTH)
    return params, x, target


EPSILONS, MASKS, BRANCHES, COMPARED = "epsilons", "masks", "branches", "what only comparisons read"
PROGRAMS = (
    Program(sparse_directions, _without_bias, (0, 1), EPSILONS),
    Program(smoothed_signs, _with(_without_bias, np.float32(1e-5)), (0, 1), EPSILONS, 2.0**-8),
    Program(shares, _without_bias, (0, 1), EPSILONS, 2.0**-4),
    Program(cosine_attention, _cosines, (1,), EPSILONS),
    Program(masks_added, _sequences, (0, 1), MASKS),
    Program(pooled_maximum, _sequences, (0, 1), MASKS),
    Program(gaps_of_maxima, _sequences, (0, 1), MASKS),
    Program(energy_in_a_branch, _with(_regression(), np.int32(20)), (0, 1), BRANCHES),
    Program(phase_in_a_branch, _with(_regression(), 1.0 / 1.5 ** np.arange(WIDTH), np.int32(1)), (0, 1), BRANCHES),
    Program(gated_outliers, _regression(700.0), (0, 1), COMPARED),
    Program(loss_with_metrics, _regression(1200.0), (0, 1), COMPARED),
    Program(hard_examples, _errors, (0, 1), "keys of sorts"),
    Program(quantization_aware, _regression(), (0, 1), "integers in floats"),
    Program(welford, _regression(), (0, 1), "accumulators in loops"),
    Program(packed_keys, _keys, (0, 1), "integers in floats"),
    Program(kalman, _readings, (0, 1), "coordinates"),
    Program(gaussian_process, _regression(), (0, 1)),
    Program(weight_normalized, _small_columns, (0, 1), "range", 2.0**-8),
)
