"""Steps of integrators and of descent, unrolled, scanned, and written out."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.numerics._networks import F32, mlp, mlp_weights
from tests.numerics._program import Program

BATCH, WIDTH = 16, 16


def _field(params, z, dtype):
    return mlp(params, z, dtype, jnp.tanh)


def runge_kutta_unrolled(params, x, target, *, dtype=F32):
    """A neural ODE by RK4, its loop written out."""
    z, dt = x, 0.1
    for _ in range(6):
        a = _field(params, z, dtype)
        b = _field(params, z + 0.5 * dt * a, dtype)
        c = _field(params, z + 0.5 * dt * b, dtype)
        d = _field(params, z + dt * c, dtype)
        z = z + dt / 6.0 * (a + 2.0 * b + 2.0 * c + d)
    return jnp.square(z - target)


def runge_kutta_scanned(params, x, target, *, dtype=F32):
    """A neural ODE by RK4, in a scan, the time as a carry."""

    def step(carry, _):
        z, t = carry
        f = functools.partial(_field, params, dtype=dtype)
        with_time = lambda z, t: jnp.concatenate([z[:, 1:], jnp.full((len(z), 1), t)], 1)
        a = f(with_time(z, t))
        b = f(with_time(z + 0.01 * a, t + 0.01))
        return (z + 0.02 * b, t + 0.02), None

    (z, _), _ = lax.scan(step, (x, jnp.float32(0)), length=50)
    return jnp.square(z - target)


def momentum_unrolled(params, x, target, *, dtype=F32):
    """Unrolled descent with momentum on a state, written out, a decay between the sums."""
    z, v = x, jnp.zeros_like(x)
    for _ in range(16):
        v = 0.95 * v - 0.05 * _field(params, z, dtype)
        z = z + v
    return jnp.square(z - target)


def euler_with_frozen_noise(params, x, noise, target, *, dtype=F32):
    """A stochastic equation written out; the diffusion does not see the gradient."""
    z = x
    for i in range(10):
        drift = _field(params, z, dtype)
        z = lax.stop_gradient(0.02 * noise[i]) + (z + 0.1 * drift)
        z = z - lax.stop_gradient(0.001 * z)
    return jnp.square(z - target)


def refinement(params, x, target, *, dtype=F32):
    """Iterative refinement, as of optical flow: an update of an estimate that is detached each time."""
    estimate = jnp.zeros_like(x) + 20.0
    losses = []
    for i in range(6):
        estimate = lax.stop_gradient(estimate)
        estimate = estimate + 0.1 * _field(params, jnp.concatenate([x, 0.05 * estimate], -1), dtype)
        losses.append(0.8 ** (5 - i) * jnp.abs(estimate - target))
    return sum(losses)


def layers_by_index(params, x, target, *, dtype=F32):
    """A residual network whose layers a `fori_loop` indexes; small residues on a large stream."""

    def layer(i, h):
        w, b = params["w"][i], params["b"][i]
        return h + 0.1 * jnp.tanh(h.astype(dtype) @ w.astype(dtype) + b.astype(dtype)).astype(F32)

    return jnp.square(lax.fori_loop(0, 24, layer, x) - target)


def inner_descent(params, x, y, x_test, y_test, *, dtype=F32):
    """Meta-learning: some steps of descent inside, differentiated through."""
    loss = lambda p: jnp.mean(jnp.square(mlp(p, x, dtype) - y))
    for _ in range(5):
        params = jax.tree.map(lambda p, g: p - 0.01 * g, params, jax.grad(loss)(params))
    return jnp.square(mlp(params, x_test, dtype) - y_test)


def _states(out=WIDTH, layers=1, rows=BATCH):
    def inputs(rng):
        params = mlp_weights(rng, WIDTH, *[32] * layers, out)
        return params, rng.normal(size=(rows, WIDTH)), rng.normal(size=(rows, out))

    return inputs


def _noise(rng):
    return *_states()(rng)[:2], rng.normal(size=(10, BATCH, WIDTH)), rng.normal(size=(BATCH, WIDTH))


def _refined(rng):
    params = mlp_weights(rng, 2 * WIDTH, 32, WIDTH)
    return params, rng.normal(size=(BATCH, WIDTH)), 20.0 + rng.normal(size=(BATCH, WIDTH))


def _stack(rng):
    params = {"w": rng.normal(size=(24, WIDTH, WIDTH)) / 4, "b": 0.1 * rng.normal(size=(24, WIDTH))}
    return params, 4 * rng.normal(size=(BATCH, WIDTH)), rng.normal(size=(BATCH, WIDTH))


def _tasks(rng):
    return *_states(1)(rng), *_states(1)(rng)[1:]


WRITTEN_OUT = "loops written out"
PROGRAMS = (
    Program(runge_kutta_unrolled, _states(), (0,), WRITTEN_OUT),
    Program(runge_kutta_scanned, _states(), (0,), WRITTEN_OUT),
    Program(momentum_unrolled, _states(), (0,), WRITTEN_OUT),
    Program(euler_with_frozen_noise, _noise, (0,), WRITTEN_OUT),
    Program(refinement, _refined, (0,), WRITTEN_OUT),
    Program(layers_by_index, _stack, (0,), WRITTEN_OUT),
    Program(inner_descent, _tasks, (0, 1, 3), WRITTEN_OUT),
)
