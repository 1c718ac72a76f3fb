"""Residuals of what solves a system, and of what is made of its solution, are those of float32; layers are half."""

import functools

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest

import jamp
from tests.transforms.harness import both_halves, product_dtypes, run, trace

rng = np.random.default_rng(0)
MATRIX = np.float32(np.vander(np.linspace(0, 1, 40), 4))
VALUES = np.float32(2 * np.exp(-1.5 * np.linspace(0, 1, 40)) + 0.01 * rng.standard_normal(40))


def of_columns(decompose):
    """What is left of a vector without its part in the columns of a matrix."""

    def left(matrix, values):
        columns = decompose(matrix)
        return values - columns @ (columns.T @ values)

    return left


RESIDUALS = {
    "pinv": lambda a, y: y - a @ (jnp.linalg.pinv(a) @ y),
    "pinv, first": lambda a, y: y - (a @ jnp.linalg.pinv(a)) @ y,
    "qr": of_columns(lambda a: jnp.linalg.qr(a)[0]),
    "svd": of_columns(lambda a: jnp.linalg.svd(a, full_matrices=False)[0]),
    "eigh": of_columns(lambda a: jnp.linalg.eigh(a @ a.T)[1][:, -4:]),
    "lstsq": lambda a, y: y - a @ jnp.linalg.lstsq(a, y)[0],
    "inv": lambda a, y: y - a @ (jnp.linalg.inv(a.T @ a) @ (a.T @ y)),
    "what was expected": lambda a, y: jnp.linalg.solve(jnp.exp(-jnp.abs(y[:, None] - y)) + jnp.eye(40), y - a @ y[:4]),
}


@both_halves
@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
@pytest.mark.parametrize("residual", RESIDUALS.values(), ids=RESIDUALS)
def test_residuals_are_those_of_float32(residual, level, half):
    products = product_dtypes(trace(jamp.cast_fn(residual, f"{level}:{half}"), MATRIX, VALUES))
    assert {dtype for operands in products for dtype in operands} == {"float32"}


def refined(solver, steps=3, start=None):
    """A solution that is corrected by that of what is left, a few times."""

    def fn(a, y):
        solve = solver(a)
        x = solve(y) if start is None else start(y)
        for _ in range(steps):
            x = x + solve(y - a @ x)
        return x

    return fn


def by_lu(a):
    factors = jsp.linalg.lu_factor(a)
    return lambda y: jsp.linalg.lu_solve(factors, y)


def by_cholesky(a):
    factor = jnp.linalg.cholesky(a)
    return lambda y: jsp.linalg.cho_solve((factor, True), y)


def by_qr(a):
    q, r = jnp.linalg.qr(a)
    return lambda y: jsp.linalg.solve_triangular(r, q.T @ y)


def newton(a, y):
    x = jnp.linalg.solve(a, y)
    for _ in range(3):
        x = x - jnp.linalg.solve(a + jnp.diag(0.3 * x**2), a @ x + 0.1 * x**3 - y)
    return x


def inside(a, y):
    """A solution between boundary values."""
    return y - a @ jnp.zeros_like(y).at[1:-1].set(jnp.linalg.solve(a[1:-1, 1:-1], y[1:-1]))


CORRECTED = {
    "solve": refined(lambda a: functools.partial(jnp.linalg.solve, a)),
    "lu": refined(by_lu),
    "cholesky": refined(by_cholesky, start=jnp.zeros_like),
    "qr": refined(by_qr),
    "inv": refined(lambda a: jnp.linalg.inv(a).__matmul__),
    "newton": newton,
    "boundary": inside,
    "in two": lambda a, y: y - a @ jnp.concatenate([jnp.linalg.solve(a, y)[:4], jnp.linalg.solve(a, y)[4:]]),
    "relaxed": lambda a, y: y - a @ (0.5 * jnp.linalg.solve(a, y) + 0.5 * y),
    "padded": lambda a, y: y - a @ jnp.pad(jnp.linalg.solve(a[1:-1, 1:-1], y[1:-1]), 1),
    "chosen": lambda a, y: y - a @ jnp.where(y > 0, jnp.linalg.solve(a, y), 0),
}


@both_halves
@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
@pytest.mark.parametrize("fn", CORRECTED.values(), ids=CORRECTED)
def test_what_is_made_of_a_solution_is_one(fn, level, half):
    """Two steps of refinement left 3e-3 of an error of 7e-8."""
    draw = np.random.default_rng(0)
    root = draw.standard_normal((12, 12))
    a, y = np.float32(root @ root.T / 4 + 2 * np.eye(12)), np.float32(draw.standard_normal(12))
    np.testing.assert_allclose(run(jamp.cast_fn(fn, f"{level}:{half}"), a, y), run(fn, a, y), rtol=1e-5, atol=1e-5)


@both_halves
def test_a_layer_behind_a_corrected_solution_is_half(half):
    def program(h, w, x):
        y = jnp.linalg.solve(h, x)
        return jnp.tanh((y + x) @ w) @ w

    given = [np.float32(rng.standard_normal((8, 8))) for _ in range(3)]
    products = product_dtypes(trace(jamp.cast_fn(program, f"O2:{half}"), *given))
    assert products[-2:] == [[half, half]] * 2


def standing(*shapes):
    return [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]


LAYERS = {
    "weights divided by their norm": (
        lambda x, w, v: jax.nn.gelu(jax.nn.gelu(x @ (w / jnp.linalg.norm(w, 2))) @ v) @ v,
        standing((16, 64), (64, 64), (64, 64)),
    ),
    "gates": (
        lambda x, w, v: (jax.nn.silu(x @ w) * (x @ v)) @ (w / jnp.linalg.norm(w, 2)),
        standing((16, 64), (64, 64), (64, 64)),
    ),
    "beside eigenvectors": (
        lambda x, graph, w: (lambda h: jax.nn.softmax((h @ w) @ (h @ w[::-1]).T) @ (h @ w))(
            jnp.concatenate([x, jnp.linalg.eigh(graph)[1][:, :8]], 1)
        ),
        standing((64, 56), (64, 64), (64, 64)),
    ),
    "behind an orthogonal weight": (
        lambda x, w, v: jnp.square(jax.nn.relu(x @ jnp.linalg.qr(w)[0] @ v)) @ v,
        standing((16, 64), (64, 64), (64, 64)),
    ),
    "gates behind an orthogonal weight": (
        lambda x, w, v: (lambda h: (jax.nn.silu(h @ v) * (h @ v[::-1])) @ v)(x @ jnp.linalg.qr(w)[0]),
        standing((16, 64), (64, 64), (64, 64)),
    ),
    "bilinear gates behind an orthogonal weight": (
        lambda x, w, v: (lambda h: ((h @ v) * (h @ v[::-1])) @ v)(x @ jnp.linalg.qr(w)[0]),
        standing((16, 64), (64, 64), (64, 64)),
    ),
}


@both_halves
@pytest.mark.parametrize("layers", LAYERS)
def test_layers_with_a_solution_in_them_are_half(layers, half):
    fn, given = LAYERS[layers]
    products = product_dtypes(trace(jamp.cast_fn(fn, f"O2:{half}"), *given))
    assert {dtype for operands in products for dtype in operands} == {half}


@both_halves
def test_layers_beside_a_solution_are_half(half):
    def program(u, v, w, h, x):
        features = jax.nn.gelu(x @ u) @ v
        return jnp.linalg.solve(h, (features @ w).T)

    given = [np.float32(rng.standard_normal((8, 8))) for _ in range(5)]
    products = product_dtypes(trace(jamp.cast_fn(program, f"O2:{half}"), *given))
    assert products[:3] == [[half, half]] * 3


def projected(update):
    """A step that projects the gradient of a weight, as GaLore, PowerSGD and Shampoo do."""

    def step(weights, x):
        def loss(weights):
            first, second, third = weights
            return -jax.nn.log_softmax(jax.nn.relu(jax.nn.relu(x @ first) @ second) @ third)[:, 0].mean()

        return update(jax.grad(loss)(weights)[0])

    return step


PROJECTED = {
    "galore": lambda g: (lambda p: p @ (p.T @ g))(jnp.linalg.svd(g, full_matrices=False)[0][:, :4]),
    "powersgd": lambda g: (lambda p: p @ (g.T @ p).T)(jnp.linalg.qr(g[:, :4])[0]),
}


@both_halves
@pytest.mark.parametrize("update", PROJECTED)
def test_layers_behind_a_gradient_that_is_projected_are_half(update, half):
    """The decomposition is of the gradient as it was rounded."""
    weights = [np.float32(rng.standard_normal((32, 32)) / 6) for _ in range(3)]
    products = product_dtypes(
        trace(jamp.cast_fn(projected(PROJECTED[update]), f"O2:{half}"), weights, np.float32(np.ones((16, 32))))
    )
    assert products == [[half, half]] * 6 + [["float32", "float32"]] * 2


INVERSES = {
    "an inverse": jnp.linalg.inv,
    "a pseudoinverse": lambda a: jnp.linalg.pinv(a, hermitian=True),
    "solved for": lambda a: jnp.linalg.solve(a, jnp.eye(8)),
}


@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
@pytest.mark.parametrize("invert", INVERSES.values(), ids=INVERSES)
def test_inverses_that_float16_has_no_range_for(invert, level):
    """The numbers of this one are a million: a product with what a layer computes was not a number."""

    def distances(x, w, covariance):
        left = 1e-3 * jnp.tanh(x @ w)
        return jnp.sum(left @ invert(covariance) * left, -1)

    x, w, spread = (np.float32(rng.standard_normal(shape)) for shape in ((16, 8), (8, 8), (8, 8)))
    given = (x, w, 1e-6 * np.float32(spread @ spread.T / 8 + np.eye(8)))
    np.testing.assert_allclose(run(jamp.cast_fn(distances, f"{level}:float16"), *given), run(distances, *given), 0.02)
    before = lambda x, w, m: invert(m) @ w @ x.T  # noqa: E731  (A layer has weights.)
    assert ["float16", "float16"] in product_dtypes(trace(jamp.cast_fn(before, f"{level}:float16"), *given))
