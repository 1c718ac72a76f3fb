"""Least squares, mixtures, Gaussian processes and rays are as exact as in float32, and layers beside them half."""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest

import jamp
from tests.transforms.harness import both_halves, product_dtypes, run, trace

rng = np.random.default_rng(0)


def drawn(*shape):
    return np.float32(rng.standard_normal(shape))


def by_qr(x, y):
    q, r = jnp.linalg.qr(x)
    return jsp.linalg.solve_triangular(r, q.T @ y)


def by_svd(x, y):
    """A ridge, by the singular values."""
    u, s, vt = jnp.linalg.svd(x, full_matrices=False)
    return vt.T @ (s / (s**2 + 0.1) * (u.T @ y))


def by_square_root(x, y):
    """The factor of a Cholesky decomposition, whitening both sides."""
    factor = jnp.linalg.cholesky(x.T @ x + jnp.eye(x.shape[1]))
    return jsp.linalg.solve_triangular(factor.T, jsp.linalg.solve_triangular(factor, x.T @ y, lower=True))


def ensemble(states, seen):
    """The step of an ensemble filter: what was seen, less what was expected, on the other side of a system."""
    observe = jnp.eye(states.shape[0])[::2]
    mean = states.mean(1, keepdims=True)
    moved = observe @ (states - mean)
    inner = jnp.linalg.inv(states.shape[1] * jnp.eye(states.shape[1]) + moved.T @ moved)
    return (states - mean) @ (inner @ (moved.T @ (seen - (observe @ mean)[:, 0])))


def left_of_a_prior(kernel):
    def variance(x, at):
        factor = jnp.linalg.cholesky(kernel(x, x) + 0.1 * jnp.eye(len(x)))
        taken = jsp.linalg.solve_triangular(factor, kernel(x, at), lower=True)
        return jnp.diag(kernel(at, at)) - (taken**2).sum(0), kernel(at, at) - taken.T @ taken

    return variance


def mixture(weighted):
    """The density of a mixture with variances, written out."""

    def density(x, means):
        shares = jnp.exp(-jnp.linspace(-1, 1, x.shape[1]))
        return jax.nn.logsumexp(weighted(x, means, shares), -1)

    return density


def by_ray(rays, centres):
    """The discriminant of rays and spheres."""
    origin = jnp.float32([100, 0, 0])
    along = (origin * rays).sum(1)[:, None] - rays @ centres.T
    return along * along - ((origin - centres) ** 2).sum(1) + 0.49


def superposed(frames, one):
    """Covariances of points in many frames with those in one."""
    return jnp.linalg.svd(jnp.einsum("tni,nj->tij", frames, one))[1].sum(-1)


FITS = {
    "QR": (by_qr, drawn(90, 40) + 5, drawn(90)),
    "a singular value decomposition": (by_svd, drawn(90, 40) + 5, drawn(90)),
    "a square root": (by_square_root, drawn(90, 40) + 5, drawn(90)),
    "an ensemble": (ensemble, drawn(60, 20) + 280, drawn(30) + 280),
    "a linear kernel": (left_of_a_prior(lambda a, b: a @ b.T + 1), drawn(48, 8) + 3, drawn(16, 8) + 3),
    "a polynomial kernel": (left_of_a_prior(lambda a, b: (a @ b.T / 8 + 1) ** 2), drawn(48, 8), drawn(16, 8)),
    "a mixture": (
        mixture(lambda x, m, w: -0.5 * ((x**2) @ w)[:, None] + x @ (m * w).T - 0.5 * ((m**2) @ w)[None]),
        drawn(60, 16) + 5, drawn(8, 16) + 5,
    ),
    "a mixture, by squares": (
        mixture(lambda x, m, w: x @ (m * w).T - 0.5 * (jnp.square(x) @ w)[:, None] - 0.5 * (jnp.square(m) @ w)),
        drawn(60, 16) + 5, drawn(8, 16) + 5,
    ),
    "rays": (by_ray, np.float32(np.c_[drawn(60, 2) * 0.15, np.ones(60)]), drawn(8, 3) + np.float32([100, 0, 20])),
    "frames": (superposed, drawn(6, 40, 3), drawn(40, 3)),
}  # fmt: skip


@both_halves
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("fit", FITS)
def test_they_are_those_of_float32(fit, level, half):
    fn, *given = FITS[fit]
    products = product_dtypes(trace(jamp.cast_fn(fn, f"{level}:{half}"), *given))
    assert {dtype for operands in products for dtype in operands} == {"float32"}
    got, traced = run(jamp.cast_fn(fn, f"{level}:{half}"), *given), run(fn, *given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max()), got, traced)


def depth(corners, origins, rays):
    """Where rays meet triangles."""
    one, other = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
    across = jnp.cross(rays[:, None], other[None])
    size = jnp.einsum("ti,rti->rt", one, across)
    shift = origins[:, None] - corners[None, :, 0]
    turned = jnp.cross(shift, one[None])
    return jnp.mean(jnp.tanh(jnp.einsum("ti,rti->rt", other, turned) / (jnp.abs(size) + 0.1)))


@both_halves
def test_derivatives_of_products_over_space_are_float32(half):
    given = drawn(24, 3, 3) + np.float32([0, 0, 10]), drawn(40, 3) * 0.1, drawn(40, 3)
    slope = jax.grad(depth)
    products = product_dtypes(trace(jamp.cast_fn(slope, f"O2:{half}"), *given))
    assert {dtype for operands in products for dtype in operands} == {"float32"}


def head(steps):
    """A network in front of a linear fit."""

    def program(w, x, y):
        h = jax.nn.relu(jax.nn.relu(x @ w) @ w)
        return steps(h, y)

    return program


def refitted(h, y):
    q, r = jnp.linalg.qr(h)
    return jsp.linalg.solve_triangular(r, q.T @ y)


LAYERS = {
    "squared rectifiers": lambda w, x, y: x @ w + jnp.square(jax.nn.relu(x @ w)) @ w,
    "factors of a network": lambda w, x, y: (x @ w) ** 2 - jnp.tanh(x @ w) @ w,
    "three outputs for each": lambda w, x, y: jax.vmap(lambda h: jax.nn.relu(h @ w) @ w[:, :3])(x),
}


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_layers_are_half(layers):
    given = drawn(32, 32), drawn(64, 32), drawn(64)
    products = product_dtypes(trace(jamp.cast_fn(layers, "O2:bfloat16"), *given))
    assert {dtype for operands in products for dtype in operands} == {"bfloat16"}


def test_a_network_in_front_of_a_fit_is_half():
    given = drawn(32, 32), drawn(64, 32), drawn(64)
    products = product_dtypes(trace(jamp.cast_fn(head(refitted), "O2:bfloat16"), *given))
    assert products[:2] == [["bfloat16"] * 2] * 2
