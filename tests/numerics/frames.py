"""Identities and what is added to them: rotations, strains, filters, series, Neumann, Cayley, reflections."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.numerics._networks import F32, dense, matmul, mlp, mlp_weights
from tests.numerics._program import Program

BATCH, WIDTH, STATES = 16, 16, 6


def rodrigues(params, x, points, target, *, dtype=F32):
    """Small rotations by Rodrigues' formula: a network gives their axes."""
    a, b, c = jnp.moveaxis(0.1 * mlp(params, x, dtype), -1, 0)
    zero = jnp.zeros_like(a)
    cross = jnp.stack([jnp.stack([zero, -c, b], -1), jnp.stack([c, zero, -a], -1), jnp.stack([-b, a, zero], -1)], -2)
    angle = jnp.sqrt(a * a + b * b + c * c + 1e-12)[:, None, None]
    square = jnp.einsum("nij,njk->nik", cross, cross)
    turn = jnp.eye(3) + jnp.sin(angle) / angle * cross + (1 - jnp.cos(angle)) / angle**2 * square
    moved = jnp.einsum("nij,nkj->nki", turn, points)
    return jnp.sum((moved - points - target) ** 2, (1, 2))


def strain(params, points, *, dtype=F32):
    """The elastic energy of a displacement: Green's strain of a deformation that hardly deforms."""

    def energy(point):
        slope = jax.jacrev(lambda point: 0.05 * mlp(params, point, dtype, jnp.tanh))(point)
        frame = jnp.eye(3) + slope
        green = 0.5 * (frame.T @ frame - jnp.eye(3))
        return 50 * jnp.trace(green) ** 2 + 100 * jnp.sum(green * green)

    return jax.vmap(energy)(points)


def filtered_noise(params, x, *, dtype=F32):
    """A filter over six states whose noise a network tells, with the covariance's update `(I - K H) P`."""
    noise = jnp.exp(mlp(params, x, dtype))
    eye = jnp.eye(STATES)
    move = eye + 0.1 * jnp.eye(STATES, k=1)
    look = eye[:2]

    def step(state, seen):
        mean, spread = state
        mean, spread = move @ mean, move @ spread @ move.T + 0.01 * eye
        gain = spread @ look.T @ jnp.linalg.inv(look @ spread @ look.T + jnp.diag(seen[:2]))
        left = seen[2:4] - look @ mean
        return (mean + gain @ left, (eye - gain @ look) @ spread), jnp.sum(left**2)

    _, losses = lax.scan(step, (jnp.zeros(STATES), 10 * eye), jnp.concatenate([noise, x[:, :2]], 1))
    return losses


def orthogonal_series(params, x, target, *, dtype=F32):
    """An orthogonal map: the exponential of a small antisymmetric matrix by its series, and how far it moves data."""
    skew = 0.05 * (params["w"] - params["w"].T)
    term = turn = jnp.eye(WIDTH)
    for order in range(1, 6):
        term = matmul(term, skew, dtype) / order
        turn = turn + term
    h = jnp.tanh(dense(params["in"], x, dtype))
    return jnp.square(matmul(h, turn, dtype) - h.astype(F32) - target)


def orthogonality(params, x, *, dtype=F32):
    """A penalty on weights near an identity that are no rotation: `|w.T @ w - I|`."""
    w = jnp.eye(WIDTH) + 0.05 * params["w"]
    h = jnp.tanh(dense(params["in"], x, dtype))
    penalty = jnp.sum(jnp.square(w.T @ w - jnp.eye(WIDTH)))
    return jnp.mean(jnp.square(matmul(h, w, dtype)), -1) + penalty


def neumann(params, x, *, dtype=F32):
    """The series of `inv(I - A)` of a matrix that a network makes, and what it does to it: the result is near I."""
    h = jnp.tanh(mlp(params, x, dtype))
    a = matmul(h, h.T, dtype) / 64
    term = total = jnp.eye(len(x))
    for _ in range(5):
        term = matmul(term, a, dtype)
        total = total + term
    return jnp.sum((total - jnp.eye(len(x))) ** 2, -1)


def cayley(params, x, target, *, dtype=F32):
    """Cayley's transform of a small antisymmetric matrix that a network makes."""
    a = 0.1 * mlp(params, x, dtype).reshape(-1, 4, 4)
    a = a - jnp.swapaxes(a, 1, 2)
    turn = jnp.linalg.solve(jnp.eye(4) + a, jnp.eye(4) - a)
    return jnp.sum((turn @ target - target) ** 2, (1, 2))


def reflections(params, x, *, dtype=F32):
    """Products of reflections `I - 2 v v^T`, pairs of which nearly undo each other."""
    v = jnp.tanh(mlp(params, x, dtype))
    v = v / jnp.linalg.norm(v, axis=-1, keepdims=True)
    u = v + 0.1 * jnp.roll(v, 1, -1)
    u = u / jnp.linalg.norm(u, axis=-1, keepdims=True)

    def reflect(v):
        return jnp.eye(v.shape[-1]) - 2 * v[:, :, None] * v[:, None, :]

    return jnp.sum((reflect(v) @ reflect(u) - jnp.eye(v.shape[-1])) ** 2, (1, 2))


def integrated_rotation(params, x, target, *, dtype=F32):
    """An orientation turned step by step by what a network says: `R @ (I + dt [w])` in a scan."""
    rates = jnp.tanh(mlp(params, x, dtype))

    @jax.checkpoint
    def step(turn, rate):
        a, b, c = rate
        cross = jnp.array([[0, -c, b], [c, 0, -a], [-b, a, 0]])
        turn = turn @ (jnp.eye(3) + 0.02 * cross)
        return turn, turn[0]

    _, axes = lax.scan(step, jnp.eye(3), rates)
    return jnp.sum((axes - jnp.array([1.0, 0.0, 0.0]) - 0.1 * target) ** 2, -1)


def graph_smoothness(params, x, *, dtype=F32):
    """How much features differ along a graph that they make: `x.T (I - D^-1/2 A D^-1/2) x`, a normalized Laplacian."""
    h = mlp(params, x, dtype)
    a = jax.nn.softmax(matmul(h, h.T, dtype), -1)
    a = 0.5 * (a + a.T)
    root = lax.rsqrt(a.sum(-1))
    laplacian = jnp.eye(len(x)) - root[:, None] * a * root
    return jnp.sum(h * (laplacian @ h), -1)


def _with_points(rng):
    params = mlp_weights(rng, WIDTH, 32, 3)
    return params, rng.normal(size=(BATCH, WIDTH)), rng.normal(size=(BATCH, 5, 3)), 0.1 * rng.normal(size=(BATCH, 5, 3))


def _body(rng):
    return mlp_weights(rng, 3, 32, 3), rng.uniform(-1, 1, size=(BATCH, 3))


def _near_identity(rng):
    return {"w": rng.normal(size=(WIDTH, WIDTH)), "in": mlp_weights(rng, WIDTH, WIDTH)[0]}


def _mapped(rng):
    return _near_identity(rng), rng.normal(size=(BATCH, WIDTH)), 0.1 * rng.normal(size=(BATCH, WIDTH))


def _features(out):
    return lambda rng: (mlp_weights(rng, WIDTH, 32, out), rng.normal(size=(BATCH, WIDTH)))


def _frames(out, *shape):
    return lambda rng: (*_features(out)(rng), rng.normal(size=shape))


FRAME = "identities"

PROGRAMS = (
    Program(rodrigues, _with_points, (0,), FRAME),
    Program(strain, _body, (0,), FRAME),
    Program(filtered_noise, _features(2), (0,), FRAME),
    Program(orthogonal_series, _mapped, (0, 1), FRAME),
    Program(orthogonality, lambda rng: _mapped(rng)[:2], (0, 1), FRAME),
    Program(neumann, _features(8), (0, 1), FRAME),
    Program(cayley, _frames(16, BATCH, 4, 2), (0, 1), FRAME),
    Program(reflections, _features(8), (0, 1), FRAME),
    Program(integrated_rotation, _frames(3, BATCH, 3), (0, 1), FRAME),
    Program(graph_smoothness, _features(8), (0, 1), FRAME),
)
