"""Products with matrices that take differences are as exact as subtractions: in float32, as their operands are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from jamp.transforms.analysis.products.matrices import takes_differences
from tests.transforms.harness import both_halves, find, mixed_levels, product_dtypes, run, trace

SIZE = 48
U = 1000 + 10 * jnp.sin(jnp.linspace(0.0, 6.0, SIZE))
STEP = 0.05
FORWARD = (np.eye(SIZE, k=1) - np.eye(SIZE)).astype(np.float32)
LAPLACIAN = (np.eye(SIZE, k=1) + np.eye(SIZE, k=-1) - 2 * np.eye(SIZE)).astype(np.float32)
CENTRING = (np.eye(SIZE) - 1 / SIZE).astype(np.float32)
NODES = np.cos(np.pi * np.arange(9) / 8)


def chebyshev():
    """The derivative at nine points, dense: all of its numbers differ."""
    ends = np.where(np.isin(np.arange(9), (0, 8)), 2.0, 1.0) * (-1.0) ** np.arange(9)
    apart = NODES[:, None] - NODES + np.eye(9)
    matrix = np.outer(ends, 1 / ends) / apart
    return (matrix - np.diag(matrix.sum(1))).astype(np.float32)


@jax.jit
def laplacian():
    """Made in the program, in a function of its own."""
    return (jnp.eye(SIZE, k=1) + jnp.eye(SIZE, k=-1) - 2 * jnp.eye(SIZE)).at[0].set(0)


def by_comparisons():
    apart = jnp.arange(SIZE)[:, None] - jnp.arange(SIZE)
    return jnp.where(apart == 0, -2.0, jnp.where(jnp.abs(apart) == 1, 1.0, 0.0))


def of_a_graph():
    neighbours = (jnp.abs(jnp.arange(SIZE)[:, None] - jnp.arange(SIZE)) == 1).astype(jnp.float32)
    return jnp.diag(neighbours.sum(1)) - neighbours


def diffused(u):
    return lax.fori_loop(0, 10, lambda _, u: u + 0.2 * (LAPLACIAN @ u), u)


PROGRAMS = {
    "NumPy": lambda u: FORWARD @ u,
    "JAX": lambda u: jnp.asarray(FORWARD) @ u,
    "divided": lambda u: (FORWARD / STEP) @ u,
    "squared": lambda u: jnp.sum(jnp.square(FORWARD @ u)),
    "of columns": lambda u: LAPLACIAN @ jnp.stack([u, 2 * u], 1) / STEP**2,
    "on the right": lambda u: u @ LAPLACIAN.T,
    "centred": lambda u: CENTRING @ u,
    "spectral": lambda u: chebyshev() @ u[:9],
    "twice": lambda u: FORWARD.T @ (FORWARD @ u),
    "of two": lambda u: (FORWARD.T @ FORWARD) @ u,
    "with a coefficient": lambda u: (u[0] * LAPLACIAN) @ u,
    "made": lambda u: laplacian() @ u,
    "made of comparisons": lambda u: by_comparisons() @ u,
    "Toeplitz": lambda u: jax.scipy.linalg.toeplitz(jnp.array([-2.0, 1.0] + [0.0] * (SIZE - 2))) @ u,
    "a graph": lambda u: of_a_graph() @ u,
    "einsum": lambda u: jnp.einsum("ij,j->i", jnp.eye(SIZE - 1, SIZE, k=1) - jnp.eye(SIZE - 1, SIZE), u),
    "in a loop": diffused,
    "scanned": lambda u: lax.scan(lambda u, _: (u, FORWARD @ u), u, length=2)[1],
    "in a branch": lambda u: lax.cond(u[0] > 0, lambda u: FORWARD @ u, lambda u: u, u),
}


@both_halves
@mixed_levels
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_differences_are_those_of_float32(program, level, half):
    with jax.default_matmul_precision("highest"):
        np.testing.assert_array_equal(run(jamp.cast_fn(program, f"{level}:{half}"), U), run(program, U))


@both_halves
def test_a_network_that_is_differentiated_by_a_matrix_has_a_float32_result(half):
    """As one has whose results are subtracted from one another."""
    points, first, last = (
        jnp.linspace(0.1, 1.0, SIZE)[:, None] ** jnp.arange(8),
        jnp.full((8, 8), 0.3),
        jnp.full((8, 1), 0.7),
    )
    network = lambda x: jnp.tanh(x @ first) @ last + 10.0  # noqa: E731
    by_matrix = lambda x: jnp.mean(jnp.square(LAPLACIAN[1:-1] @ network(x)))  # noqa: E731
    by_slices = lambda x: (lambda u: jnp.mean(jnp.square(u[2:] - 2 * u[1:-1] + u[:-2])))(network(x))  # noqa: E731
    policy = f"O2:{half}"
    of_matrix, of_slices = (run(jamp.cast_fn(fn, policy), points) for fn in (by_matrix, by_slices))
    np.testing.assert_allclose(of_matrix, of_slices, rtol=1e-3)


WEIGHTS = jax.random.normal(jax.random.key(0), (SIZE, SIZE))
LAYERS = {
    "closed over": (lambda x, w: x @ WEIGHTS, (4, SIZE)),
    "integers": (lambda x, w: x @ jnp.round(4 * WEIGHTS), (4, SIZE)),
    "of ones": (lambda x, w: x @ np.ones((SIZE, SIZE), np.float32), (4, SIZE)),
    "of coordinates": (lambda x, w: jnp.tanh(jnp.linspace(-1.0, 1.0, 256).reshape(-1, 4) @ w[:4]) @ w, (4, SIZE)),
    "of random numbers": (lambda x, w: x @ jax.random.normal(jax.random.key(1), (SIZE, SIZE)), (4, SIZE)),
    "of negated weights": (lambda x, w: x @ -w, (4, SIZE)),
}


@both_halves
@mixed_levels
@pytest.mark.parametrize(("program", "shape"), LAYERS.values(), ids=LAYERS)
def test_layers_are_half(program, shape, level, half):
    cast = jamp.cast_fn(lambda x, w: jnp.tanh(program(x, w)), f"{level}:{half}")
    dtypes = product_dtypes(trace(cast, jnp.ones(shape), WEIGHTS))
    assert {dtype for operands in dtypes for dtype in operands} == {half}


@pytest.mark.parametrize("draw", [jax.random.normal, jax.random.uniform, jax.random.rademacher, jax.random.orthogonal])
def test_what_meets_random_numbers_may_be_half(draw):
    """Numbers are made of random bits by subtracting, but take no differences."""

    def numbers():
        of_shape = SIZE if draw is jax.random.orthogonal else (SIZE, SIZE)
        return draw(jax.random.key(1), of_shape).astype(jnp.float32)

    jaxpr = trace(jamp.cast_fn(lambda x, w: jnp.tanh(jax.nn.relu(x @ w) @ numbers()), "O2:bfloat16"), WEIGHTS, WEIGHTS)
    assert find(jaxpr, "dot_general")[0].outvars[0].aval.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        (FORWARD, True),
        (FORWARD.T, True),
        (LAPLACIAN.astype(np.float16), True),
        (chebyshev(), True),
        (np.array([1.0, -2.0, 1.0]), True),
        (np.stack([LAPLACIAN, LAPLACIAN]), True),
        (np.array([[1.0, -1.0], [1.0, 1.0], [0.0, 0.0]]), True),
        (np.array([[1.0, -1.0], [1.0, 1.0], [2.0, 1.0]]), False),
        (np.zeros((4, 4)), False),
        (LAPLACIAN - 0.1 * np.eye(SIZE), True),  # With a reaction.
        (np.array([-2.0, 1.0, 0.0, 0.0]), True),  # The first column of a circulant.
        (np.array([[-2.0, 1.0], [0.0, 1.0]]), False),
        (np.eye(4), False),
        (np.asarray(WEIGHTS), False),
        (np.array([[1.0, -0.99], [2.0, -1.99]]), False),
        (np.float32(0), False),
    ],
)
def test_what_takes_differences(matrix, expected):
    assert takes_differences(matrix) == expected
