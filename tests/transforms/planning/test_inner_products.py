"""Inner products of what was computed in float32: sums, as `jnp.sum` is one, at every level that takes care."""

import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.transforms.harness import both_halves, product_dtypes, trace

rng = np.random.default_rng(0)
SIZE = 6
MATRIX = np.float32(np.vander(np.linspace(0.5, 1.5, SIZE)) + 0.2 * rng.standard_normal((SIZE, SIZE)))
VECTOR, OTHER = (np.float32(5 + 0.1 * rng.standard_normal(SIZE)) for _ in range(2))


def eliminated(matrix, x, y):
    """Gauss' elimination, and its substitution backwards."""
    for i in range(SIZE - 1):
        factor = matrix[i + 1 :, i] / matrix[i, i]
        matrix, x = matrix.at[i + 1 :].add(-factor[:, None] * matrix[i]), x.at[i + 1 :].add(-factor * x[i])
    result = jnp.zeros(SIZE)
    for i in reversed(range(SIZE)):
        result = result.at[i].set((x[i] - matrix[i] @ result) / matrix[i, i])
    return result


def by_differences(matrix, x, y):
    """Dirichlet's energy on a graph."""
    return x @ (jnp.diag(jnp.abs(matrix).sum(1)) - jnp.abs(matrix)) @ x


def centred(matrix, x, y):
    return x @ (jnp.eye(SIZE) - jnp.ones((SIZE, SIZE)) / SIZE) @ y


@both_halves
@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
@pytest.mark.parametrize("program", [eliminated, by_differences, centred])
def test_inner_products_are_sums(program, level, half):
    products = product_dtypes(trace(jamp.cast_fn(program, f"{level}:{half}"), MATRIX, VECTOR, OTHER))
    assert {dtype for operands in products for dtype in operands} == {"float32"}


@both_halves
@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
def test_inner_products_of_arguments_are_half(level, half):
    products = product_dtypes(trace(jamp.cast_fn(lambda x, y: x @ y, f"{level}:{half}"), VECTOR, OTHER))
    assert products == [[half, half]]
