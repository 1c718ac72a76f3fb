"""States that a loop changes a little at a time, or takes something off again, are carried in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import find, trace

rng = np.random.default_rng(0)
STATE = np.float32(rng.standard_normal((16, 16)) / 4)
XS = np.float32(rng.standard_normal((400, 16)) * np.linspace(0.3, 1.5, 16))
BATCHES = np.float32(rng.standard_normal((100, 8, 16)))
WEIGHTS = np.float32(rng.standard_normal((6, 16, 16)) / 4)


def over(step):
    """A loop that changes a state by what it is given."""
    return lambda state, xs: lax.scan(lambda state, x: (step(state, x), None), state, xs)[0]


def oja(state, x):
    y = x @ state
    return state + 0.001 * (jnp.outer(x, y) - state @ jnp.outer(y, y))


def oja_of_batches(state, x):
    y = x @ state
    return state + 0.001 * (x.T @ y - state @ (y.T @ y))


def by_keys(state, x):
    key = x / jnp.linalg.norm(x)
    return state + 0.1 * jnp.outer(key, jnp.roll(x, 1) - key @ state)


RULES = {
    "Hebb's": (lambda s, x: s + 0.001 * jnp.outer(x, x @ s), XS),
    "with decay": (lambda s, x: 0.999 * s + 0.001 * jnp.outer(x, x @ s), XS),
    "bent": (lambda s, x: s + 0.001 * jnp.outer(x, jnp.tanh(x @ s)), XS),
    "the delta rule": (lambda s, x: s + 0.001 * jnp.outer(x, jnp.roll(x, 1) - x @ s), XS),
    "the delta rule, divided": (lambda s, x: s + jnp.outer(x, jnp.roll(x, 1) - x @ s) / 1000, XS),
    "a rate that is data": (lambda s, x: s + 0.003 * x[0] ** 2 * jnp.outer(x, jnp.roll(x, 1) - x @ s), XS),
    "normalized keys": (by_keys, XS),
    "Oja's": (oja, XS),
    "Oja's, of batches": (oja_of_batches, BATCHES),
    "of batches": (lambda s, x: s + 0.002 * x.T @ jnp.tanh(x @ s), BATCHES),
    "in a function": (jax.jit(lambda s, x: s + 0.002 * x.T @ jnp.tanh(x @ s)), BATCHES),
    "in a checkpoint": (jax.checkpoint(lambda s, x: s + 0.002 * x.T @ jnp.tanh(x @ s)), BATCHES),
    "clipped": (lambda s, x: s + jnp.clip(0.002 * x.T @ jnp.tanh(x @ s), -1, 1), BATCHES),
    "where it is finite": (lambda s, x: jnp.where(jnp.isfinite(s), s + 0.002 * x.T @ jnp.tanh(x @ s), s), BATCHES),
    "masked": (lambda s, x: s + jnp.where(s > 0, 0.002 * x.T @ jnp.tanh(x @ s), 0.0), BATCHES),
    "in place": (lambda s, x: s.at[:].add(0.002 * x.T @ jnp.tanh(x @ s)), BATCHES),
    "limited": (lambda s, x: jnp.maximum(s + 0.002 * x.T @ jnp.tanh(x @ s), -2.0), BATCHES),
    "in a branch": (
        lambda s, x: lax.cond(x[0, 0] > -9, lambda s: s + 0.002 * x.T @ jnp.tanh(x @ s), lambda s: s, s),
        BATCHES,
    ),
    "by a root": (lambda s, x: s + x.T @ jnp.tanh(x @ s) / jnp.sqrt(250000.0), BATCHES),
    "in two terms": (lambda s, x: s + 0.002 * x.T @ jnp.tanh(x @ s) - 1e-4 * s, BATCHES),
}


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_state_that_learns_is_float32(rule, half):
    step, xs = rule
    cast = jamp.cast_fn(over(step), f"O2:{half}")
    (loop,) = find(trace(cast, STATE, xs), "scan")
    assert loop.outvars[0].aval.dtype == jnp.float32
    got, traced = cast(STATE, xs), over(step)(STATE, xs)
    np.testing.assert_allclose(got, traced, rtol=0, atol=5e-3 * np.abs(traced).max())


def test_a_rate_may_be_an_argument():
    def program(state, xs, rate):
        return lax.scan(lambda s, x: (s + rate * (x.T @ jnp.tanh(x @ s)), None), state, xs)[0]

    cast = jamp.cast_fn(program, "O2:bfloat16")
    for run in (cast, jax.jit(cast)):
        got, traced = run(STATE, BATCHES, np.float32(1e-4)), program(STATE, BATCHES, 1e-4)
        np.testing.assert_allclose(got, traced, rtol=0, atol=5e-3 * np.abs(traced - STATE).max())


STREAMS = {
    "layers": lambda h, w: h + jnp.tanh(h @ w),
    "scaled layers": lambda h, w: h + 0.1 * jnp.tanh(h @ w),
    "layers from the left": lambda h, w: h + jnp.tanh(w @ h),
    "two products": lambda h, w: h + jnp.tanh(h @ w) @ w.T,
    "a gain of the layer": lambda h, w: h + w[0, 0] * jnp.tanh(h @ w),
    "a mean over neighbours": lambda h, w: h + jnp.ones((16, 16)) @ jnp.tanh(h @ w) / 16,
    "a number": lambda h, w: h + jnp.tanh(h @ w) + 0.01,
    "attention that is linear": lambda h, w: h + (h @ w / 16) @ (jnp.tanh(h).T @ h / 16),
    "scaled queries": lambda h, w: h + 0.04 * (h @ w) @ (h @ w).T @ h,
}


@pytest.mark.parametrize("layer", STREAMS.values(), ids=STREAMS)
def test_the_stream_of_layers_is_half(layer):
    (loop,) = find(trace(jamp.cast_fn(over(layer), "O2:bfloat16"), STATE, WEIGHTS), "scan")
    assert loop.outvars[0].aval.dtype == jnp.bfloat16


def filtered(size, update):
    """A Kalman filter, and its covariance after it."""
    eye = jnp.eye(size)
    move, noise = eye + 0.1 * jnp.eye(size, k=1), 1e-5 * eye

    def program(seen, observe):
        def step(state, z):
            x, cov = state
            x, cov = move @ x, move @ cov @ move.T + noise
            gain = jnp.linalg.solve(observe @ cov @ observe.T + 0.1 * jnp.eye(2), observe @ cov).T
            return (x + gain @ (z - observe @ x), update(eye - gain @ observe, cov, gain)), None

        return lax.scan(step, (jnp.zeros(size), 10 * eye), seen)[0][1]

    return program


UPDATES = {"short": lambda a, cov, gain: a @ cov, "Joseph's": lambda a, cov, k: a @ cov @ a.T + 0.1 * k @ k.T}


@pytest.mark.parametrize("policy", ["O2:bfloat16", "O2:float16", "O1:bfloat16", "OD:bfloat16"])
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_the_covariance_of_a_filter_is_float32(update, size, policy):
    seen = np.float32(np.cumsum(0.1 * np.ones((100, 2)), 0) + 0.3 * rng.standard_normal((100, 2)))
    observe = np.zeros((2, size), np.float32)
    observe[0, 0] = observe[1, 2] = 1
    traced = filtered(size, update)(seen, observe)
    cast = jamp.cast_fn(filtered(size, update), policy)(seen, observe)
    np.testing.assert_allclose(cast, traced, rtol=0, atol=1e-3 * np.abs(traced).max())


@pytest.mark.parametrize("policy", ["O2:bfloat16", "O1:bfloat16", "OD:bfloat16", "OD:float16"])
def test_recursive_least_squares_are_float32(policy):
    xs, ys = XS[:100, :6], XS[:100, 6]

    def program(xs, ys):
        def step(state, row):
            (w, inverse), (x, y) = state, row
            gain = inverse @ x / (0.99 + x @ inverse @ x)
            return (w + gain * (y - w @ x), (inverse - jnp.outer(gain, x @ inverse)) / 0.99), None

        return lax.scan(step, (jnp.zeros(6), 100 * jnp.eye(6)), (xs, ys))[0]

    for cast, traced in zip(jamp.cast_fn(program, policy)(xs, ys), program(xs, ys), strict=True):
        np.testing.assert_allclose(cast, traced, rtol=0, atol=1e-5 * np.abs(traced).max())


def test_what_iterates_over_the_best_is_float32():
    moves, reward = jax.nn.softmax(jnp.asarray(WEIGHTS)), np.float32(1 + np.abs(XS[:6]))
    better = lambda moves, reward: lax.scan(  # noqa: E731
        lambda v, _: ((reward + 0.95 * jnp.einsum("ast,t->as", moves, v)).max(0), None), jnp.zeros(16), length=60
    )[0]
    (loop,) = find(trace(jamp.cast_fn(better, "O2:bfloat16"), moves, reward), "scan")
    assert loop.outvars[0].aval.dtype == jnp.float32
