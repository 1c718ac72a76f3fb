"""Simulators, filters, controllers, and choices among candidates: what adds up, or ends, step after step."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.numerics._networks import F32, dense, mlp, mlp_weights
from tests.numerics._program import Program
from tests.numerics.unrolled import _states

CONVERGES = "loops that stop by themselves"
ADDS_UP = "accumulators in loops"
BATCH, WIDTH = 16, 16


def frozen_iterations(params, x, target, *, dtype=F32):
    """A deep equilibrium by a fixed number of steps, which stops to change when it has settled."""

    def step(carry, _):
        z, done, count = carry
        new = jnp.tanh(0.4 * dense(params[1], z, F32) + dense(params[0], x, F32))
        still = done | (jnp.max(jnp.abs(new - z)) < 1e-4)
        return (jnp.where(done, z, new), still, count + jnp.where(done, 0, 1)), None

    (z, _, count), _ = lax.scan(step, (jnp.zeros((len(x), WIDTH)), False, 0), length=60)
    return jnp.square(dense(params[2], z, dtype).astype(F32) - target), count


def searched_descent(params, x, target, *, dtype=F32):
    """Features fitted by gradient descent until it settles; how long a step may be, a search inside finds."""
    h = jnp.tanh(mlp(params, x, dtype))
    frozen = lax.stop_gradient(h)

    def loss(w):
        return jnp.mean(jnp.square(frozen @ w - target)) + 0.05 * jnp.sum(w**2)

    def step(carry):
        w, _, count = carry
        value, slope = jax.value_and_grad(loss)(w)
        enough = 0.3 * jnp.sum(slope**2)
        too_long = lambda s: (loss(w - s[0] * slope) > value - s[0] * enough) & (s[1] < 20)
        size, halvings = lax.while_loop(too_long, lambda s: (0.5 * s[0], s[1] + 1), (jnp.float32(4.0), 0))
        return w - size * slope, jnp.sqrt(jnp.sum(slope**2)), count + 1 + halvings

    start = jnp.zeros((h.shape[1], target.shape[1])), jnp.float32(1.0), 0
    w, _, count = lax.while_loop(lambda c: (c[1] > 2e-2) & (c[2] < 400), step, start)
    return jnp.square(h @ w - target), count


def rolled_history(params, x, target, *, dtype=F32):
    """A window over the last states, shifted in each step, to which a network adds."""

    def step(window, _):
        new = window[-1] + 0.1 * jnp.tanh(mlp(params[:2], window[-1], dtype))
        return jnp.roll(window, -1, 0).at[-1].set(new), None

    window, _ = lax.scan(step, jnp.stack([x] * 3), length=40)
    return jnp.square(dense(params[2], window.mean(0), dtype).astype(F32) - target)


def best_candidates(params, x, value, *, dtype=F32):
    """Scores far from zero, whose best choose what they are multiplied with."""
    score = 300.0 + mlp(params, x, dtype)[:, 0]
    best, index = lax.top_k(score, 6)
    return jnp.square(jnp.take(value, index) - (best - 300.0))


def quaternions(params, x, points, target, *, dtype=F32):
    """Attitudes as learned quaternions, which turn points that a camera far away sees."""
    q = mlp(params, x, dtype)
    q = q / jnp.linalg.norm(q, axis=-1, keepdims=True)
    w, u = q[:, None, :1], q[:, None, 1:]
    turned = points + 2.0 * jnp.cross(u, jnp.cross(u, points) + w * points)
    seen = 800.0 * turned[..., :2] / (turned[..., 2:] + 3000.0)
    return jnp.sum(jnp.square(seen - target), -1)


def resonators(params, x, audio, *, dtype=F32):
    """Filters of second order, with poles near the circle that a network places, over a signal."""
    p = mlp(params, x, dtype)
    radius, angle = 1.0 - 0.05 * jax.nn.sigmoid(p[:, 0]), 1.0 + 0.3 * jnp.tanh(p[:, 1])
    a1, a2 = 2.0 * radius * jnp.cos(angle), -(radius**2)

    def step(state, sample):
        one, two = state
        y = sample + a1 * one + a2 * two
        return (y, one), y

    _, y = lax.scan(step, (jnp.zeros(len(x)), jnp.zeros(len(x))), audio)
    return jnp.mean(jnp.square(y), 0)


def preferences(params, reference, x, chosen, rejected, *, dtype=F32):
    """Direct preference optimization: how much likelier than a reference model a sequence is than another."""

    def log_likelihood(p, tokens):
        logits = jax.nn.log_softmax(mlp(p, x, dtype))
        return jnp.sum(jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0], -1)

    def gain(tokens):
        return log_likelihood(params, tokens) - lax.stop_gradient(log_likelihood(reference, tokens))

    return -jax.nn.log_sigmoid(0.1 * (gain(chosen) - gain(rejected)))


def natural_splines(params, x, at, target, *, dtype=F32):
    """Cubic splines through values that a network gives, by a tridiagonal system."""
    y = mlp(params, x, dtype).T
    n = y.shape[0]
    bend = 6.0 * (y[2:] - 2.0 * y[1:-1] + y[:-2])
    ones = jnp.ones(n - 2)
    lower, upper = ones.at[0].set(0.0), ones.at[-1].set(0.0)
    inner = lax.linalg.tridiagonal_solve(lower, 4.0 * ones, upper, bend)
    second = jnp.pad(inner, ((1, 1), (0, 0)))
    left = jnp.clip(jnp.floor(at).astype(jnp.int32), 0, n - 2)
    t = (at - left)[:, None]
    before, after = y[left], y[left + 1]
    curved = ((1 - t) ** 3 - (1 - t)) * second[left] + (t**3 - t) * second[left + 1]
    return jnp.square((1 - t) * before + t * after + curved / 6.0 - target)


def linear_control(params, x, *, dtype=F32):
    """The cost of the best controller of a learned linear system, by Riccati's recursion."""
    moves = 0.3 * mlp(params, x, dtype).reshape(-1, 4, 6)
    a, b = jnp.eye(4) + moves[..., :4], moves[..., 4:]

    def step(p, _):
        gain = jnp.linalg.solve(0.1 * jnp.eye(2) + jnp.einsum("nki,nkl,nlj->nij", b, p, b), b.mT @ p @ a)
        return jnp.eye(4) + a.mT @ p @ (a - b @ gain), None

    p, _ = lax.scan(step, jnp.broadcast_to(jnp.eye(4), a.shape), length=12)
    return jnp.trace(p, axis1=-2, axis2=-1)


def _settling(rng):
    return mlp_weights(rng, 8, WIDTH, WIDTH, 4), rng.normal(size=(BATCH, 8)), rng.normal(size=(BATCH, 4))


def _history(rng):
    weights = mlp_weights(rng, WIDTH, WIDTH, WIDTH, 4)
    return weights, rng.normal(size=(BATCH, WIDTH)), rng.normal(size=(BATCH, 4))


def _candidates(rng):
    x = rng.normal(size=(64, 8))
    weights = mlp_weights(rng, 8, 16, 1)
    return weights, x, rng.normal(size=64)


def _turned(rng):
    points = 500.0 * rng.normal(size=(BATCH, 6, 3))
    return mlp_weights(rng, 8, 16, 4), rng.normal(size=(BATCH, 8)), points, 30.0 * rng.normal(size=(BATCH, 6, 2))


def _signal(rng):
    return mlp_weights(rng, 8, 16, 2), rng.normal(size=(BATCH, 8)), rng.normal(size=(100, 1))


def _preferred(rng):
    tokens = rng.integers(0, 12, (2, BATCH, 10))
    return mlp_weights(rng, 8, 16, 12), mlp_weights(rng, 8, 16, 12), rng.normal(size=(BATCH, 10, 8)), *tokens


def _curves(rng):
    at = rng.uniform(0.0, 9.0, size=40)
    return mlp_weights(rng, 8, 16, 10), rng.normal(size=(4, 8)), at, rng.normal(size=(40, 4))


def _systems(rng):
    return mlp_weights(rng, 8, 16, 24), rng.normal(size=(BATCH, 8))


PROGRAMS = [
    Program(frozen_iterations, _settling, (0, 1), CONVERGES),
    Program(searched_descent, _states(4), (0, 1), CONVERGES),
    Program(rolled_history, _history, (0,), ADDS_UP),
    Program(best_candidates, _candidates, (0, 1), "keys of sorts"),
    Program(quaternions, _turned, (0, 1), "coordinates", 2.0**-6),
    Program(resonators, _signal, (0, 1), ADDS_UP),
    Program(preferences, _preferred, (0, 1, 2)),
    Program(natural_splines, _curves, (0, 1)),
    Program(linear_control, _systems, (0, 1), loss_scale=2.0**-8),
]
