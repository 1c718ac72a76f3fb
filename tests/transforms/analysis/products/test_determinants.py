"""Determinants of Gram matrices, `|x|^2 |y|^2 - (x @ y)^2`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.transforms.harness import both_halves, product_dtypes, trace

X, Y = (jax.random.normal(jax.random.key(seed), (24, 16)) for seed in (0, 1))


def root(z):
    return jnp.where(z > 0, jnp.sqrt(jnp.where(z > 0, z, 1.0)), 0.0)


def rectified(x, y):
    """The kernel of an infinitely wide layer with a rectifier, all pairs of rows."""
    covariances = 2.25 * (x @ x.T / 16) + 0.0025
    variances = 2.25 * (jnp.einsum("ij,ij->i", x, x) / 16) + 0.0025
    left = root(variances[:, None] * variances[None, :] - covariances**2)
    return (left + (jnp.pi - jnp.arctan2(left, covariances)) * covariances).mean()


def areas(x, y):
    """Of the parallelograms between rows, nearly parallel."""
    y = x + 1e-2 * y
    dot = jax.vmap(jnp.dot)
    return jnp.sqrt(dot(x, x) * dot(y, y) - dot(x, y) ** 2).mean()


def by_sums(x, y):
    squares = (x * x).sum(1)
    return root(squares[:, None] * squares - (x @ x.T) ** 2).mean()


def areas_by_sums(x, y):
    y = x + 1e-2 * y
    return jnp.sqrt(jnp.sum(x**2, 1) * jnp.sum(y**2, 1) - jnp.einsum("ij,ij->i", x, y) ** 2).mean()


def among_all(x, y):
    squares = jax.lax.dot_general(x, x, (((1,), (1,)), ((0,), (0,))))
    products = jnp.einsum("id,jd->ij", x, x)
    return root(squares * squares[:, None] - products * products).mean()


@both_halves
@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
@pytest.mark.parametrize("program", [rectified, areas, by_sums, areas_by_sums, among_all])
def test_determinants_are_those_of_float32(program, level, half):
    """Gradients were 4 to 190 % off."""
    expected, actual = (jax.jit(jax.grad(fn))(X, Y) for fn in (program, jamp.cast_fn(program, f"{level}:{half}")))
    assert np.linalg.norm(actual - expected) <= 1e-3 * np.linalg.norm(expected)


LAYERS = {
    "a variance": lambda x, y: (x @ y.T).var(),
    "another layer's square": lambda x, y: (x @ y.T) ** 2 - (x @ x.T) ** 2,
    "gates": lambda x, y: (x @ y.T) * (x @ x.T) - (x @ y.T),
    "attention to squares": lambda x, y: (x @ y.T) ** 2 - 1.0,
}


@both_halves
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_squares_of_layers_are_half(layer, half):
    products = product_dtypes(trace(jamp.cast_fn(layer, f"O2:{half}"), X, Y))
    assert {dtype for operands in products for dtype in operands} == {half}
