"""Normalizing flows: couplings, mixings, splines, ordinary differential equations."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.numerics._networks import F32, mlp, mlp_weights
from tests.numerics._program import Program

BATCH, WIDTH = 64, 8


def real_nvp(params, x, *, dtype=F32):
    """Affine couplings, a standardization with data's own scale first."""
    z = (x - 100.0) / 2.0
    logdet = jnp.zeros(len(z))
    for i, p in enumerate(params):
        a, b = jnp.split(z, 2, -1) if i % 2 else jnp.split(z, 2, -1)[::-1]
        shift, scale = jnp.split(mlp(p, a, dtype), 2, -1)
        scale = 2.0 * jnp.tanh(scale / 2.0)
        b = (b + shift) * jnp.exp(scale)
        logdet = logdet + scale.sum(-1)
        z = jnp.concatenate([a, b] if i % 2 else [b, a], -1)
    return 0.5 * jnp.sum(z**2, -1) - logdet


def invertible_mixing(params, x, *, dtype=F32):
    """Glow's mixing of channels by a matrix, with the logarithm of its determinant; activation norms before."""
    z, logdet = x, jnp.zeros(len(x))
    for p in params:
        z = (z + p["bias"]) * jnp.exp(p["log_scale"])
        z = (z.astype(dtype) @ p["mix"].astype(dtype)).astype(F32)
        logdet = logdet + jnp.linalg.slogdet(p["mix"])[1] + jnp.sum(p["log_scale"])
        a, b = jnp.split(z, 2, -1)
        shift, scale = jnp.split(mlp(p["net"], a, dtype), 2, -1)
        scale = jax.nn.log_sigmoid(scale + 2.0)
        z = jnp.concatenate([a, b * jnp.exp(scale) + shift], -1)
        logdet = logdet + scale.sum(-1)
    return 0.5 * jnp.sum(z**2, -1) - logdet


def rational_splines(params, x, y, *, dtype=F32):
    """Neural spline flow: bins by a cumulative sum, found by comparisons, gathered by one-hots."""
    raw = mlp(params, x, dtype).reshape(len(x), 3, 8)
    widths, heights = (1e-3 + (1 - 8e-3) * jax.nn.softmax(raw[:, i]) for i in range(2))
    slopes = 1e-3 + jax.nn.softplus(raw[:, 2])
    left, bottom = jnp.cumsum(widths, -1) - widths, jnp.cumsum(heights, -1) - heights
    index = jnp.sum(y[:, None] >= left, -1) - 1
    pick = lambda v: jnp.take_along_axis(v, index[:, None], -1)[:, 0]
    w, h, d = pick(widths), pick(heights), pick(slopes)
    e = pick(jnp.roll(slopes, -1, -1))
    s, t = h / w, (y - pick(left)) / w
    below = s + (d + e - 2.0 * s) * t * (1.0 - t)
    slope = s**2 * (e * t**2 + 2.0 * s * t * (1.0 - t) + d * (1.0 - t) ** 2) / below**2
    value = pick(bottom) + h * (s * t**2 + d * t * (1.0 - t)) / below
    return 10.0 * (value - 0.5) ** 2 - jnp.log(slope)


def continuous_flow(params, x, probe, *, dtype=F32):
    """FFJORD in a scan: a state, and a divergence by Hutchinson's probe, added up over 30 steps."""
    field = lambda z: mlp(params, z, dtype, jnp.tanh)

    def step(carry, _):
        z, logdet = carry
        f, pull = jax.vjp(field, z)
        divergence = jnp.sum(pull(probe)[0] * probe, -1)
        return (z + f / 30.0, logdet + divergence / 30.0), None

    (z, logdet), _ = lax.scan(step, (x, jnp.zeros(len(x))), length=30)
    return 0.5 * jnp.sum(z**2, -1) - logdet


def _plain(out=WIDTH):
    return lambda rng: (mlp_weights(rng, WIDTH, 32, out), rng.normal(size=(BATCH, WIDTH)))


def _couplings(rng):
    params = [mlp_weights(rng, WIDTH // 2, 32, WIDTH) for _ in range(3)]
    return params, 100.0 + 2.0 * rng.normal(size=(BATCH, WIDTH))


def _mixing(rng):
    def layer():
        mix = np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0]
        norm = {"bias": 0.1 * rng.normal(size=WIDTH), "log_scale": 0.1 * rng.normal(size=WIDTH)}
        return norm | {"mix": mix, "net": mlp_weights(rng, WIDTH // 2, 32, WIDTH)}

    return [layer() for _ in range(2)], rng.normal(size=(BATCH, WIDTH))


def _splines(rng):
    return mlp_weights(rng, WIDTH, 32, 24), rng.normal(size=(BATCH, WIDTH)), rng.uniform(0.01, 0.99, BATCH)


def _with_noise(inputs):
    return lambda rng: (*inputs(rng), rng.normal(size=(BATCH, WIDTH)))


SCANNED = "accumulators in loops"
PROGRAMS = (
    Program(real_nvp, _couplings, (0,), "differences", 4.0),
    Program(invertible_mixing, _mixing, (0,)),
    Program(rational_splines, _splines, (0, 1)),
    Program(continuous_flow, _with_noise(_plain()), (0,), SCANNED),
)
