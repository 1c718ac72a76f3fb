"""Linear iterations by a learned or given matrix: what an iteration computes is a state, not a layer's activation."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.numerics._networks import F32, matmul, mlp, mlp_weights
from tests.numerics._program import Program

NODES, WIDTH = 24, 16


def power(params, x, *, dtype=F32):
    """The largest singular value of a learned matrix by twenty iterations, as spectral normalization has it."""
    w = params["w"]

    def step(_, v):
        v = matmul(w.T, matmul(w, v, dtype), dtype)
        return v / jnp.linalg.norm(v)

    v = lax.fori_loop(0, 20, step, jnp.ones(WIDTH) / 4)
    sigma = jnp.linalg.norm(matmul(w, v, dtype))
    return jnp.square(matmul(jnp.tanh(x), w / sigma, dtype)).sum(1)


def richardson(params, x, *, dtype=F32):
    """The solution of a system by Richardson's iteration `x + s (b - A x)` in a scan."""
    a, b = params["a"], mlp(params["net"], x, dtype)

    def step(z, _):
        return z + 0.3 * (b - matmul(z, a, dtype)), None

    z, _ = lax.scan(step, jnp.zeros_like(b), length=30)
    return jnp.sum(z**2, 1)


def jacobi(params, x, *, dtype=F32):
    """The same by Jacobi's iteration, `(b - R x) / d`, in a fori_loop."""
    diagonal = jnp.diag(params["a"])
    rest = params["a"] - jnp.diag(diagonal)
    b = mlp(params["net"], x, dtype)
    z = lax.fori_loop(0, 30, lambda _, z: (b - matmul(z, rest, dtype)) / diagonal, jnp.zeros_like(b))
    return jnp.sum(z**2, 1)


def chebyshev(params, adjacency, x, *, dtype=F32):
    """Chebyshev's polynomials of a graph's Laplacian, by their recursion in a scan: `2 L t1 - t0`."""
    h = mlp(params["net"], x, dtype)
    laplacian = -adjacency

    def step(state, weight):
        before, now = state
        return (now, 2 * matmul(laplacian, now, dtype) - before), weight * now

    _, terms = lax.scan(step, (h, matmul(laplacian, h, dtype)), params["weights"])
    return jnp.sum(terms.sum(0) ** 2, 1)


def pagerank(params, x, *, dtype=F32):
    """Ranks of nodes by a graph that features make: damped iterations in a fori_loop."""
    h = mlp(params, x, dtype)
    share = jax.nn.softmax(matmul(h, h.T, dtype), 0)
    rank = lax.fori_loop(0, 25, lambda _, r: 0.15 / NODES + 0.85 * matmul(share, r, dtype), jnp.full(NODES, 1 / NODES))
    return jnp.log(rank)


def label_propagation(params, x, labels, *, dtype=F32):
    """Labels handed on along a graph that features make, the known ones set again in each step."""
    h = mlp(params, x, dtype)
    square = jnp.sum((h[:, None] - h) ** 2, -1)
    share = jax.nn.softmax(-square, 1)
    known = (jnp.arange(NODES) < 6)[:, None]

    def step(y, _):
        return jnp.where(known, labels, matmul(share, y, dtype)), None

    y, _ = lax.scan(step, jnp.where(known, labels, 0.25), length=20)
    return -jnp.log(y[6:] + 1e-6).mean(1)


def personalized(params, adjacency, x, *, dtype=F32):
    """Predictions handed on by a given graph, `0.9 A z + 0.1 h`: APPNP."""
    h = mlp(params["net"], x, dtype)
    z = lax.fori_loop(0, 15, lambda _, z: 0.9 * matmul(adjacency, z, dtype) + 0.1 * h, h)
    return jax.nn.logsumexp(z, 1)


def markov(params, x, *, dtype=F32):
    """A distribution over states moved by a learned chain, step by step, and how much of it is where at the end."""
    chain = jax.nn.softmax(params["a"][:WIDTH, :WIDTH], -1)
    start = jax.nn.softmax(mlp(params["net"], x, dtype)[:, :WIDTH], -1)
    end, _ = lax.scan(lambda p, _: (matmul(p, chain, dtype), None), start, length=12)
    return -jnp.log(end[:, 0])


def lanczos_free_trace(params, x, *, dtype=F32):
    """A log determinant by a power series of a random vector: `v A^k v / k`."""
    a = 0.5 * params["w"] / jnp.linalg.norm(params["w"])

    def term(state, k):
        u, total = state
        u = matmul(u, a, dtype)
        return (u, total - jnp.sum(u * x, 1) / k), None

    (_, total), _ = lax.scan(term, (x, jnp.zeros(len(x))), jnp.arange(1.0, 9.0))
    return total


def polar_factor(params, x, *, dtype=F32):
    """The orthogonal factor of weights by Newton and Schulz' iteration, as the Muon optimizer has it."""
    w = params["w"] / jnp.linalg.norm(params["w"])
    for _ in range(8):
        w = 1.5 * w - 0.5 * matmul(matmul(w, w.T, dtype), w, dtype)
    return jnp.square(matmul(jnp.tanh(x), w, dtype)).sum(1)


def coupled(params, x, *, dtype=F32):
    """The inverse root of a Gram matrix by coupled Newton iterations in a scan, as Shampoo has it."""
    h = jnp.tanh(mlp(params, x, dtype))
    gram = h.T @ h / len(h) + 0.1 * jnp.eye(h.shape[1])
    scale = jnp.trace(gram)

    def step(state, _):
        y, z = state
        both = 1.5 * jnp.eye(len(y)) - 0.5 * z @ y
        return (y @ both, both @ z), None

    (_, root), _ = lax.scan(step, (gram / scale, jnp.eye(h.shape[1])), length=12)
    return jnp.sum((h @ root / jnp.sqrt(scale)) ** 2, 1)


def heat(params, x, *, dtype=F32):
    """Diffusion with a learned conductance, explicit steps `u + dt (K u)` for a hundred steps."""
    del dtype
    k = params["k"] + params["k"].T
    k = k - jnp.diag(k.sum(1))
    u, _ = lax.scan(lambda u, _: (u + 0.02 * u @ k, None), x, length=100)
    return jnp.sum((u - u.mean(1, keepdims=True)) ** 2, 1)


def _matrix(rng):
    return {"w": rng.normal(size=(WIDTH, WIDTH)) / 4}, rng.normal(size=(NODES, WIDTH))


def _system(rng):
    a = np.eye(WIDTH) + 0.3 * rng.normal(size=(WIDTH, WIDTH)) / 4
    return {"a": a, "net": mlp_weights(rng, WIDTH, 32, WIDTH)}, rng.normal(size=(NODES, WIDTH))


def _graph(rng):
    a = (rng.uniform(size=(NODES, NODES)) < 0.2).astype(float)
    a = np.maximum(a, a.T) + np.eye(NODES)
    root = 1 / np.sqrt(a.sum(1))
    return root[:, None] * a * root


def _on_graph(rng):
    params = {"net": mlp_weights(rng, WIDTH, 32, 8), "weights": rng.normal(size=8)}
    return params, _graph(rng), rng.normal(size=(NODES, WIDTH))


def _features(rng):
    return mlp_weights(rng, WIDTH, 32, 8), rng.normal(size=(NODES, WIDTH))


def _labelled(rng):
    return *_features(rng), np.eye(4)[rng.integers(0, 4, NODES)]


def _conducting(rng):
    return {"k": rng.uniform(size=(WIDTH, WIDTH)) / 4}, rng.normal(size=(NODES, WIDTH)) + 2


ITERATION = "linear iterations"

PROGRAMS = (
    Program(power, _matrix, (0, 1), ITERATION),
    Program(richardson, _system, (0, 1), ITERATION),
    Program(jacobi, _system, (0, 1), ITERATION),
    Program(chebyshev, _on_graph, (0, 1, 2), ITERATION),
    Program(pagerank, _features, (0, 1), ITERATION),
    Program(label_propagation, _labelled, (0, 1), ITERATION),
    Program(personalized, _on_graph, (0, 1, 2), ITERATION),
    Program(markov, _system, (0, 1), ITERATION),
    Program(lanczos_free_trace, _matrix, (0,), ITERATION),
    Program(polar_factor, _matrix, (0, 1), ITERATION),
    Program(coupled, _features, (0, 1), ITERATION),
    Program(heat, _conducting, (0, 1), ITERATION),
)
