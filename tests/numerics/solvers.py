"""Iterations to convergence, steps of integrators, and gradients through both."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.numerics._networks import F32, clusters, dense, mlp, mlp_weights
from tests.numerics._program import Program
from tests.numerics.unrolled import _states

BATCH, WIDTH = 16, 16


MOST = 200  # Iterations.


def _until(step, distance, x, tolerance):
    """Iterates until a step moves less than a tolerance; the result, and the number of steps."""

    def going(state):
        x, before, count = state
        return (distance(x, before) > tolerance) & (count < MOST)

    def body(state):
        x, _, count = state
        return step(x), x, count + 1

    x, _, count = lax.while_loop(going, body, (step(x), x, 1))
    return x, count


def _largest_move(x, y):
    return jnp.max(jnp.abs(x - y))


def _fixed_point(f, params, x, start):
    """A fixed point of `f(params, x, z)` and its implicit gradient, both by iteration; and how many steps it took."""

    @jax.custom_vjp
    def solve(params, x, start):
        return _until(lambda z: f(params, x, z), _largest_move, start, 1e-5)

    def forward(params, x, start):
        z, count = solve(params, x, start)
        return (z, count), (params, x, z)

    def backward(kept, cotangents):
        params, x, z = kept
        _, pull = jax.vjp(lambda z: f(params, x, z), z)
        u, _ = _until(lambda u: cotangents[0] + pull(u)[0], _largest_move, cotangents[0], 1e-5 * MOST)
        _, pull = jax.vjp(lambda params, x: f(params, x, z), params, x)
        return *pull(u), jnp.zeros_like(z)

    solve.defvjp(forward, backward)
    return solve(params, x, start)


def implicit_graph(params, adjacency, x, target, *, dtype=F32):
    """An implicit graph network: node states that stop to change, and the gradient of them."""

    def update(params, graph, z):
        adjacency, x = graph
        return jnp.tanh(0.4 * adjacency @ dense(params[1], z, F32) + dense(params[0], x, F32))

    z, count = _fixed_point(update, params, (adjacency, x), jnp.zeros((len(x), WIDTH)))
    return jnp.square(dense(params[2], z, dtype).astype(F32) - target), count


def sinkhorn(params, x, y, *, dtype=F32):
    """Optimal transport between two sets of features: scalings to convergence, the plan held fixed in the gradient."""
    a, b = mlp(params, x, dtype), mlp(params, y, dtype)
    cost = jnp.sum((a[:, None] - b[None]) ** 2, -1)
    kernel = jnp.exp(-lax.stop_gradient(cost / jnp.mean(cost)) / 0.3)

    def step(u):
        return 1.0 / (kernel @ (1.0 / (kernel.T @ u)))

    u, count = _until(step, lambda u, v: jnp.max(jnp.abs(u / v - 1.0)), jnp.ones(len(x)) / len(x), 1e-4)
    plan = u[:, None] * kernel / (kernel.T @ u)
    return jnp.sum(plan * cost, 1), count


def spectral_norm(params, x, target, *, dtype=F32):
    """A layer divided by its largest singular value, by power iteration until that settles."""
    w = lax.stop_gradient(params[0]["w"])

    def step(state):
        v, _ = state
        u = w @ v
        v = w.T @ (u / jnp.linalg.norm(u))
        sigma = jnp.linalg.norm(v)
        return v / sigma, sigma

    distance = lambda new, old: jnp.abs(new[1] - old[1])
    (v, _), count = _until(step, distance, (jnp.ones(w.shape[1]) / 4.0, jnp.float32(0)), 1e-5)
    sigma = jnp.linalg.norm(params[0]["w"] @ v)
    h = jnp.tanh(dense({"w": params[0]["w"] / sigma, "b": params[0]["b"]}, x, dtype))
    return jnp.square(dense(params[1], h, dtype).astype(F32) - target), count


def conjugate_gradients(params, x, target, *, dtype=F32):
    """Kernel ridge regression on features, solved by conjugate gradients to a residual."""
    h = jnp.tanh(mlp(params, x, dtype))
    kernel = h @ h.T + 0.1 * jnp.eye(len(x))

    def going(state):
        _, r, _, count = state
        return (jnp.vdot(r, r) > 1e-8) & (count < MOST)

    def body(state):
        s, r, p, count = state
        q = frozen @ p
        alpha = jnp.vdot(r, r) / jnp.vdot(p, q)
        after = r - alpha * q
        return s + alpha * p, after, after + jnp.vdot(after, after) / jnp.vdot(r, r) * p, count + 1

    frozen = lax.stop_gradient(kernel)
    start = (jnp.zeros_like(target), target, target, 0)
    weights, _, _, count = lax.while_loop(going, body, start)
    return jnp.square(kernel @ weights - 0.5 * target), count


def value_iteration(params, x, rewards, transitions, *, dtype=F32):
    """Values of a small decision process until they settle, as targets of a network."""
    step = lambda v: jnp.max(rewards + 0.8 * jnp.einsum("ast,t->as", transitions, v), 0)
    values, count = _until(step, _largest_move, jnp.zeros(rewards.shape[1]), 1e-5)
    return jnp.square(mlp(params, x, dtype)[:, 0] - lax.stop_gradient(values)), count


def lasso(params, x, target, *, dtype=F32):
    """Sparse codes by proximal gradient steps until they move no more; the dictionary is trained."""
    dictionary = params[0]["w"]
    frozen = lax.stop_gradient(dictionary)
    rate = 1.0 / jnp.sum(frozen**2)

    def step(z):
        z = z - 4.0 * rate * (z @ frozen - target) @ frozen.T
        return jnp.sign(z) * jnp.maximum(jnp.abs(z) - 4.0 * rate * 0.1, 0.0)

    z, count = _until(step, _largest_move, jnp.zeros((len(target), len(frozen))), 1e-4)
    return jnp.square((z.astype(dtype) @ dictionary.astype(dtype)).astype(F32) + 0.0 * x[:, :1] - target), count


def adaptive_heun(params, x, target, *, dtype=F32):
    """A loop of steps whose size follows an error estimate, the end held fixed in the gradient of a readout."""
    field = lambda z: jnp.tanh(dense(params[0], z, F32)) - z

    def body(state):
        z, t, dt, count = state
        dt = jnp.minimum(dt, 1.0 - t)
        a = field(z)
        b = field(z + dt * a)
        error = jnp.max(jnp.abs(0.5 * dt * (b - a))) / 1e-4
        accept = error < 1.0
        z = jnp.where(accept, z + 0.5 * dt * (a + b), z)
        factor = jnp.clip(0.9 / jnp.sqrt(error + 1e-10), 0.2, 5.0)
        return z, jnp.where(accept, t + dt, t), dt * factor, count + 1

    going = lambda state: (state[1] < 1.0) & (state[3] < MOST)
    z, _, _, count = lax.while_loop(going, body, (x, jnp.float32(0), jnp.float32(0.1), 0))
    z = lax.stop_gradient(z)
    return jnp.square(dense(params[1], z, dtype).astype(F32) - target), count


def adaptive_third_order(params, x, target, *, dtype=F32):
    """Bogacki and Shampine's method at a tight tolerance; its error estimate is a difference of four slopes."""
    field = lambda z: jnp.tanh(dense(params[0], z, F32)) - 0.5 * z

    def body(state):
        z, t, dt, count = state
        dt = jnp.minimum(dt, 1.0 - t)
        a = field(z)
        b = field(z + 0.5 * dt * a)
        c = field(z + 0.75 * dt * b)
        after = z + dt / 9.0 * (2.0 * a + 3.0 * b + 4.0 * c)
        wrong = dt / 72.0 * (-5.0 * a + 6.0 * b + 8.0 * c - 9.0 * field(after))
        error = jnp.sqrt(jnp.mean((wrong / (1e-6 + 1e-5 * jnp.abs(z))) ** 2))
        accept = error < 1.0
        factor = jnp.clip(0.9 * (error + 1e-10) ** (-1.0 / 3.0), 0.2, 5.0)
        return jnp.where(accept, after, z), jnp.where(accept, t + dt, t), dt * factor, count + 1

    going = lambda state: (state[1] < 1.0) & (state[3] < MOST)
    z, _, _, count = lax.while_loop(going, body, (x, jnp.float32(0), jnp.float32(0.1), 0))
    return jnp.square(dense(params[1], lax.stop_gradient(z), dtype).astype(F32) - target), count


def k_means(params, x, *, dtype=F32):
    """Centres of features until they rest; the loss is the distance to them."""
    h = mlp(params, x, dtype)
    frozen = lax.stop_gradient(h)

    def step(c):
        distance = jnp.sum(c**2, -1) - 2.0 * frozen @ c.T
        one_hot = jax.nn.one_hot(jnp.argmin(distance, -1), len(c))
        return (one_hot.T @ frozen) / (jnp.sum(one_hot, 0)[:, None] + 1e-6)

    c, count = _until(step, _largest_move, frozen[:4], 1e-6)
    return jnp.min(jnp.sum((h[:, None] - c) ** 2, -1), -1), count


def newton_schulz(params, x, target, *, dtype=F32):
    """Whitening by the iterative inverse square root of a covariance, until its residual is small."""
    h = mlp(params, x, dtype)
    h = h - h.mean(0)
    cov = lax.stop_gradient(h.T @ h / len(h) + 0.05 * jnp.eye(h.shape[1]))
    scale = jnp.trace(cov)

    def step(state):
        y, z = state
        t = 0.5 * (3.0 * jnp.eye(len(cov)) - z @ y)
        return y @ t, t @ z

    distance = lambda new, old: jnp.linalg.norm(new[1] @ new[0] - jnp.eye(len(cov)))
    (_, z), count = _until(step, distance, (cov / scale, jnp.eye(len(cov))), 1e-3)
    return jnp.square(h @ z / jnp.sqrt(scale) - target), count


def bisection(params, x, budget, *, dtype=F32):
    """A sparsemax threshold by bisection until the weights add up to one."""
    z = 3.0 * mlp(params, x, dtype)
    frozen = lax.stop_gradient(z)

    def body(state):
        low, high, count = state
        middle = 0.5 * (low + high)
        above = jnp.sum(jnp.maximum(frozen - middle[:, None], 0.0), -1) > budget
        return jnp.where(above, middle, low), jnp.where(above, high, middle), count + 1

    going = lambda state: (jnp.max(state[1] - state[0]) > 1e-5) & (state[2] < MOST)
    top = jnp.max(frozen, -1)
    low, _, count = lax.while_loop(going, body, (top - budget, top, 0))
    return jnp.sum(jnp.maximum(z - low[:, None], 0.0) ** 2, -1), count


def line_search(params, x, target, *, dtype=F32):
    """Armijo's backtracking of one inner step of gradient descent, and the loss after that."""
    loss = lambda p: jnp.mean(jnp.square(mlp(p, x, F32) - target))
    value, slope = jax.value_and_grad(loss)(lax.stop_gradient(params))
    square = sum(jnp.sum(g**2) for g in jax.tree.leaves(slope))
    moved = lambda rate: jax.tree.map(lambda p, g: p - rate * g, lax.stop_gradient(params), slope)
    too_far = lambda s: (loss(moved(s[0])) > value - 0.5 * s[0] * square) & (s[1] < MOST)
    rate, count = lax.while_loop(too_far, lambda s: (0.7 * s[0], s[1] + 1), (jnp.float32(20), 1))
    after = jax.tree.map(lambda p, g: p - rate * g, params, slope)
    return jnp.square(mlp(after, x, dtype) - target), count


def _graph(rng):
    params = [mlp_weights(rng, WIDTH, WIDTH)[0] for _ in range(3)]
    links = (rng.random((BATCH, BATCH)) < 0.3) + np.eye(BATCH)
    adjacency = links / links.sum(1, keepdims=True)
    return params, adjacency, rng.normal(size=(BATCH, WIDTH)), rng.normal(size=(BATCH, WIDTH))


def _process(rng):
    transitions = rng.dirichlet(np.ones(BATCH), size=(3, BATCH))
    return mlp_weights(rng, WIDTH, 32, 1), rng.normal(size=(BATCH, WIDTH)), rng.normal(size=(3, BATCH)), transitions


def _dictionary(rng):
    return mlp_weights(rng, WIDTH, WIDTH), rng.normal(size=(BATCH, WIDTH)), rng.normal(size=(BATCH, WIDTH))


def _two_sets(rng):
    return mlp_weights(rng, WIDTH, 32, 8), rng.normal(size=(BATCH, WIDTH)), 0.5 + rng.normal(size=(BATCH, WIDTH))


def _clustered(rng):
    return mlp_weights(rng, WIDTH, 32, 8), clusters(rng, 64, WIDTH, 4)[0]


def _flow(rng):
    return mlp_weights(rng, WIDTH, WIDTH, WIDTH), 0.5 * rng.normal(size=(BATCH, WIDTH)), rng.normal(size=(BATCH, WIDTH))


def _budget(rng):
    return mlp_weights(rng, WIDTH, 32, 24), rng.normal(size=(BATCH, WIDTH)), np.ones(BATCH)


CONVERGES, WRITTEN_OUT = "loops that stop by themselves", "loops written out"

PROGRAMS = (
    Program(implicit_graph, _graph, (0, 2), CONVERGES),
    Program(sinkhorn, _two_sets, (0, 1, 2), CONVERGES),
    Program(spectral_norm, _flow, (0, 1), CONVERGES),
    Program(conjugate_gradients, _states(4), (0, 1), CONVERGES),
    Program(value_iteration, _process, (0, 1), CONVERGES),
    Program(lasso, _dictionary, (0,), CONVERGES),
    Program(adaptive_heun, _flow, (0,), CONVERGES),
    Program(adaptive_third_order, _flow, (0,), CONVERGES),
    Program(k_means, _clustered, (0, 1), CONVERGES),
    Program(newton_schulz, _states(8, rows=64), (0, 1), CONVERGES),
    Program(bisection, _budget, (0, 1), CONVERGES),
    Program(line_search, _states(1), (0, 1), CONVERGES),
)
