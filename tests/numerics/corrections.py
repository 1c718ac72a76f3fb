"""Networks that correct something large, of which others read the difference: temperatures, prices, gains."""

import jax.numpy as jnp

from tests.numerics._networks import F32, mlp, mlp_weights
from tests.numerics._program import Program

APART = "what is taken apart again"
BATCH, WIDTH = 16, 16


def _forecast(params, x, dtype):
    return 5.0 * mlp(params, (x - 300.0) / 10.0, dtype)


def corrected_kelvins(params, x, *, dtype=F32):
    """One network corrects temperatures, and the next looks at what they are beyond 300."""
    u = x + _forecast(params[:2], x, dtype)
    return mlp(params[2:], (u - 300.0) / 10.0, dtype)


def kelvins_of_neighbours(params, x, *, dtype=F32):
    u = x + _forecast(params[:2], x, dtype)
    return mlp(params[2:], jnp.diff(u, append=u[:, :1]) / 10.0, dtype), jnp.square(u - 300.0)


def assimilation(params, x, y, *, dtype=F32):
    """A network weighs what is measured against what was predicted."""
    u = x + _forecast(params[:2], x, dtype)
    return u + mlp(params[2:], (y - u) / 10.0, dtype) - y


def gains(params, x, *, dtype=F32):
    """Factors around one, of which a layer reads what they are beyond that."""
    gain = 1.0 + 0.01 * mlp(params[:2], (x - 300.0) / 10.0, dtype)
    return mlp(params[2:], 100.0 * (gain - 1.0), dtype)


def _states(rng):
    weights = mlp_weights(rng, WIDTH, WIDTH, WIDTH) + mlp_weights(rng, WIDTH, WIDTH, 4)
    return weights, 300.0 + 10.0 * rng.normal(size=(BATCH, WIDTH))


def _measured(rng):
    weights = mlp_weights(rng, WIDTH, WIDTH, WIDTH) + mlp_weights(rng, WIDTH, WIDTH, WIDTH)
    x = 300.0 + 10.0 * rng.normal(size=(2, BATCH, WIDTH))
    return weights, x[0], x[1]


PROGRAMS = [
    Program(corrected_kelvins, _states, (0, 1), APART),
    Program(kelvins_of_neighbours, _states, (0, 1), APART),
    Program(assimilation, _measured, (0, 1, 2), APART),
    Program(gains, _states, (0, 1), APART),
]
