"""Physics: second derivatives, forces, coordinates, cells, cameras, stencils, units."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.numerics._networks import F32, mlp, mlp_weights
from tests.numerics._program import Program
from tests.numerics.geometry import _atoms, _net, _pairs

POINTS, WIDTH = 32, 16


def burgers(params, points, *, dtype=F32):
    """A physics-informed network of Burgers' equation: the residual holds a second derivative."""
    u = lambda x, t: mlp(params, jnp.stack([x, t]), dtype, jnp.tanh)[0]
    u_t, u_x, u_xx = jax.grad(u, 1), jax.grad(u), jax.grad(jax.grad(u))
    residual = lambda x, t: u_t(x, t) + u(x, t) * u_x(x, t) - 0.01 / jnp.pi * u_xx(x, t)
    return jnp.square(jax.vmap(residual)(points[:, 0], points[:, 1]))


def helmholtz(params, points, *, dtype=F32):
    """A network on Fourier features of high frequency: coordinates by a short product, angles of a hundred radians."""

    def u(p):
        angles = p @ params["frequencies"]
        return mlp(params["net"], jnp.concatenate([jnp.sin(angles), jnp.cos(angles)]), dtype, jnp.tanh)[0]

    laplacian = lambda p: jnp.trace(jax.hessian(u)(p))
    return (jax.vmap(laplacian)(points) / 1e4 + jax.vmap(u)(points)) ** 2


def eikonal(params, points, *, dtype=F32):
    """A signed distance, whose slope is one."""
    f = lambda p: mlp(params, p, dtype, jax.nn.softplus)[0] + jnp.linalg.norm(p)
    slope = jax.vmap(jax.grad(f))(points)
    return (jnp.sqrt(jnp.sum(slope**2, -1) + 1e-12) - 1.0) ** 2


def hamiltonian(params, q, p, target, *, dtype=F32):
    """A Hamiltonian network integrated by leapfrog in a scan."""
    h = lambda q, p: jnp.sum(mlp(params, jnp.concatenate([q, p], -1), dtype, jnp.tanh)) + 0.5 * jnp.sum(q**2 + p**2)

    def step(state, _):
        q, p = state
        p = p - 0.01 * jax.grad(h)(q, p)
        q = q + 0.02 * jax.grad(h, 1)(q, p)
        p = p - 0.01 * jax.grad(h)(q, p)
        return (q, p), None

    (q, _), _ = lax.scan(step, (q, p), length=25)
    return jnp.square(q - target)


def _energy(params, positions, dtype):
    """A pair potential: radial features of distances under a cutoff, read by a network."""
    r = jnp.sqrt(jnp.sum(_pairs(positions) ** 2, -1))
    centers = jnp.linspace(0.5, 4.0, WIDTH)
    features = jnp.exp(-8.0 * (r[:, None] - centers) ** 2)
    envelope = jnp.where(r < 4.0, 0.5 * (jnp.cos(jnp.pi * r / 4.0) + 1.0), 0.0)
    return jnp.sum(mlp(params, features, dtype)[:, 0] * envelope)


def force_field(params, positions, forces, *, dtype=F32):
    """Force matching: the loss is of a gradient, and its gradient of a second derivative."""
    predicted = jax.vmap(jax.grad(lambda r: -_energy(params, r, dtype)))(positions)
    return jnp.sum((predicted - forces) ** 2, (1, 2))


def lennard_jones(params, positions, energies, *, dtype=F32):
    """An analytic potential whose depth and size are learned from types: powers of 12."""
    size, depth = jnp.exp(0.1 * mlp(params, jnp.eye(WIDTH), dtype)[:2])
    r = jnp.sqrt(jnp.sum(jax.vmap(_pairs)(positions) ** 2, -1))
    s = (size[0] / r) ** 6
    energy = jnp.sum(jnp.where(r < 5.0, 4.0 * depth[0] * (s * s - s), 0.0), -1)
    return (energy - energies) ** 2


def coulomb(params, positions, energies, *, dtype=F32):
    """Charges in coulombs: their products are 1e-38, the constant of the force 9e9."""
    charge = (1.0 + 0.1 * mlp(params, jnp.eye(WIDTH)[: positions.shape[1]], dtype)[:, 0]) * 1.602e-19
    i, j = np.triu_indices(len(charge), 1)
    r = jnp.sqrt(jnp.sum(jax.vmap(_pairs)(positions) ** 2, -1)) * 1e-10
    return jnp.square(jnp.sum(8.988e9 * charge[i] * (charge[j] / 1.602e-19) / r, -1) / 1.44e1 - energies)


def _coordinates(dims, out=1):
    def inputs(rng):
        return mlp_weights(rng, dims, 32, 32, out), rng.uniform(-1, 1, size=(POINTS, dims))

    return inputs


def _waves(rng):
    params = {"net": mlp_weights(rng, 2 * WIDTH, 32, 1), "frequencies": 60.0 * rng.normal(size=(2, WIDTH))}
    return params, rng.uniform(-1, 1, size=(POINTS, 2))


def _phase_space(rng):
    q, p, target = 0.5 * rng.normal(size=(3, POINTS, 3))
    return mlp_weights(rng, 6, 32, 1), q, p, target


def _force_field(rng):
    return _net()(rng), _atoms(rng), rng.normal(size=(8, 6, 3))


def _energies(rng):
    return _net(2)(rng), _atoms(rng), rng.normal(size=8)


ABSOLUTE, RANGE, DERIVATIVES = "coordinates", "range", "second derivatives"

PROGRAMS = (
    Program(burgers, _coordinates(2), (0,), DERIVATIVES),
    Program(helmholtz, _waves, (), DERIVATIVES),
    Program(eikonal, _coordinates(3), (0,), DERIVATIVES),
    Program(hamiltonian, _phase_space, (0,), DERIVATIVES),
    Program(force_field, _force_field, (0,), DERIVATIVES),
    Program(lennard_jones, _energies, (0,), ABSOLUTE),
    Program(coulomb, _energies, (0,), RANGE),
)
