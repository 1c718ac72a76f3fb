"""Distances between distributions and in curved space, and the likelihood of a point process."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.numerics._networks import F32, mlp, mlp_weights
from tests.numerics._program import Program

BATCH, WIDTH, EVENTS = 16, 16, 24


def kernel_discrepancy(params, x, y, *, dtype=F32):
    """The maximum mean discrepancy of two sets of features, by kernels of several widths around the median distance."""
    a, b = mlp(params, x, dtype), mlp(params, y, dtype)
    z = jnp.concatenate([a, b])
    square = jnp.sum(jnp.square(z[:, None] - z[None]), -1)
    width = lax.stop_gradient(jnp.median(square))
    k = sum(jnp.exp(-square / (width * scale)) for scale in (0.25, 1.0, 4.0))
    n = len(x)
    return k[:n, :n].mean(1) + k[n:, n:].mean(1) - 2.0 * k[:n, n:].mean(1)


def hyperbolic(params, x, pairs, *, dtype=F32):
    """Embeddings in the Poincaré ball: their distance divides by how far they are from its border."""
    h = mlp(params, x, dtype)
    norm = jnp.linalg.norm(h, axis=-1, keepdims=True)
    h = 0.98 * jnp.tanh(norm) * h / norm
    u, v = h[pairs[:, 0]], h[pairs[:, 1]]
    inside = (1.0 - jnp.sum(u**2, -1)) * (1.0 - jnp.sum(v**2, -1))
    return jnp.square(jnp.arccosh(1.0 + 2.0 * jnp.sum((u - v) ** 2, -1) / inside) - 2.0)


def point_process(params, times, kinds, *, dtype=F32):
    """Hawkes' self-exciting process: each event raises an intensity that decays; a network gives the rates."""
    table, network = params
    rates = jax.nn.softplus(mlp(network, table[kinds], dtype))
    base, jump, decay = rates[..., 0], rates[..., 1], rates[..., 2] + 0.1

    def event(state, now):
        before, excited = state
        time, base, jump, decay = now
        excited = excited * jnp.exp(-decay * (time - before))
        return (time, excited + jump), jnp.log(base + excited)

    def one(times, base, jump, decay):
        _, logs = lax.scan(event, (jnp.float32(0), jnp.float32(0)), (times, base, jump, decay))
        expected = base[0] * times[-1] + jnp.sum(jump / decay * (1.0 - jnp.exp(-decay * (times[-1] - times))))
        return expected - jnp.sum(logs)

    return jax.vmap(one)(times, base, jump, decay)


def _two_sets(rng):
    return mlp_weights(rng, WIDTH, 32, 8), rng.normal(size=(BATCH, WIDTH)), 0.5 + rng.normal(size=(BATCH, WIDTH))


def _pairs(rng):
    pairs = np.stack([np.arange(32), (np.arange(32) + rng.integers(1, 31)) % 32], 1)
    return mlp_weights(rng, WIDTH, 32, 6), rng.normal(size=(32, WIDTH)), pairs


def _events(rng):
    times = np.cumsum(rng.exponential(size=(BATCH, EVENTS)), 1)
    return (rng.normal(size=(10, WIDTH)), mlp_weights(rng, WIDTH, 32, 3)), times, rng.integers(0, 10, times.shape)


PROGRAMS = (
    Program(kernel_discrepancy, _two_sets, (0, 1, 2)),
    Program(hyperbolic, _pairs, (0, 1)),
    Program(point_process, _events, (0,)),
)
