"""Loops that fit what they compute to something: that is as it is written, if they read what it is made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import product_dtypes, trace

W = jax.random.normal(jax.random.key(0), (16, 16)) / 4
V = jax.random.normal(jax.random.key(1), (16, 16)) / 4
X = jax.random.normal(jax.random.key(2), (4, 16))


def fitted(residual, size):
    """Gauss-Newton from zero, until what is left is small: the change of what `residual` reads, and the steps."""

    def step(carry):
        z, _, count = carry
        left = residual(z)
        jacobian = jax.jacfwd(residual)(z)
        z = z - jnp.linalg.lstsq(jacobian, left)[0]
        return z, jnp.abs(residual(z)).max(), count + 1

    found = lax.while_loop(lambda c: (c[1] > 1e-4) & (c[2] < 40), step, (jnp.zeros(size), jnp.inf, 0))
    return found[0], found[2]


def network(w, v, x):
    return jnp.tanh(x @ w) @ v


def fits_outputs(w, v, x):
    """What makes the network give what it gives."""
    wanted = network(w, v, x[0])
    return fitted(lambda z: network(w, v, z) - wanted, 16)


def fits_weights(w, v, x):
    wanted = network(0.9 * w, v, x).ravel()
    return fitted(lambda z: network(w + z.reshape(w.shape), v, x).ravel() - wanted, 256)


def turned_round(w, v, x):
    wanted = network(w, v, x[0])
    return fitted(lambda z: 3 * (jnp.expand_dims(wanted, 0)[0] * 2 - network(w, v, z) * 2), 16)


def in_a_call(w, v, x):
    @jax.jit
    def left(z, wanted):
        return network(w, v, z) - wanted

    return jax.jit(lambda wanted: fitted(lambda z: left(z, wanted), 16))(network(w, v, x[0]))


def carried(w, v, x):
    def step(carry):
        z, wanted, _, count = carry
        residual = lambda z: network(w, v, z) - wanted  # noqa: E731
        z = z - jnp.linalg.lstsq(jax.jacfwd(residual)(z), residual(z))[0]
        return z, wanted, jnp.abs(residual(z)).max(), count + 1

    start = jnp.zeros(16), network(w, v, x[0]), jnp.inf, 0
    found = lax.while_loop(lambda c: (c[2] > 1e-4) & (c[3] < 40), step, start)
    return found[0], found[3]


def frozen(w, v, x):
    """The same by a scan that stops to change anything."""
    wanted = network(w, v, x[0])
    residual = lambda z: network(w, v, z) - wanted  # noqa: E731

    def step(carry, _):
        z, done, count = carry
        new = z - jnp.linalg.lstsq(jax.jacfwd(residual)(z), residual(z))[0]
        z = jnp.where(done, z, new)
        return (z, done | (jnp.abs(residual(z)).max() < 1e-4), count + ~done), None

    found = lax.scan(step, (jnp.zeros(16), False, 0), length=40)[0]
    return found[0], found[2]


FITS = [fits_outputs, fits_weights, turned_round, in_a_call, carried, frozen]


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("policy", ["OD:bfloat16", "O1:bfloat16", "O2:bfloat16", "O2:float16"])
@pytest.mark.parametrize("fit", FITS, ids=lambda fit: fit.__name__)
def test_a_fit_takes_as_many_steps_as_in_float32_and_finds_the_same(fit, policy):
    expected, steps = jax.jit(fit)(W, V, X)
    found, taken = jax.jit(jamp.cast_fn(fit, policy))(W, V, X)
    assert 2 < int(steps) < 40
    assert int(taken) == int(steps)
    np.testing.assert_allclose(found, expected, atol=1e-3)


def relaxed(step, z):
    close = lambda c: (jnp.abs(c[0] - c[1]).max() > 1e-5) & (c[2] < 100)  # noqa: E731
    return lax.while_loop(close, lambda c: (step(c[0]), c[0], c[2] + 1), (step(z), z, 0))[0]


def of_another_network(w, v, x):
    """What the loop takes off is made of nothing that it reads: data, which are as good in half."""
    data = x @ v
    return relaxed(lambda z: z - 0.1 * (z @ w @ w.T + z - data), jnp.zeros((4, 16)))


def added(w, v, x):
    injected = jnp.tanh(x @ w) @ v
    return relaxed(lambda z: 0.5 * jnp.tanh(z @ w + injected), jnp.zeros((4, 16)))


@pytest.mark.parametrize(("fn", "in_half"), [(of_another_network, 1), (added, 2)], ids=["data", "injected"])
def test_what_else_a_loop_is_given_stays_half(fn, in_half):
    dtypes = product_dtypes(trace(jamp.cast_fn(fn, "O1:bfloat16"), W, V, X))
    assert dtypes.count(["bfloat16", "bfloat16"]) == in_half, dtypes
