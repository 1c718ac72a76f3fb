"""What a system is solved for, `a.T @ y`, has the products of float32, if the matrix of the system is made of `a`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.sparse import linalg

import jamp
from tests.transforms.harness import both_halves

rng = np.random.default_rng(0)
SEEN, SIZE = 24, 32
MATRIX = np.float32(rng.standard_normal((SEEN, SIZE)) / SIZE**0.5)
SIGNAL = np.float32(rng.standard_normal(SEEN))
RIDGE = 0.01


def step_of(apply, state):
    x, rest, ahead, norm = state
    moved = apply(ahead)
    rate = norm / (ahead @ moved)
    x, rest = x + rate * ahead, rest - rate * moved
    return x, rest, rest + rest @ rest / norm * ahead, rest @ rest


def scanned(apply, right):
    start = jnp.zeros_like(right), right, right, right @ right
    return jax.lax.scan(lambda state, _: (step_of(apply, state), None), start, None, 20)[0][0]


def written_out(apply, right):
    state = jnp.zeros_like(right), right, right, right @ right
    for _ in range(6):
        state = step_of(apply, state)
    return state[0]


def descent(apply, right):
    def step(x, _):
        return x - 0.2 * (apply(x) - right), None

    return jax.lax.scan(step, jnp.zeros_like(right), None, 60)[0]


def steepest(apply, right):
    def step(x, _):
        rest = right - apply(x)
        return x + rest @ rest / (rest @ apply(rest)) * rest, None

    return jax.lax.scan(step, jnp.zeros_like(right), None, 20)[0]


SOLVERS = {
    "cg": lambda apply, right: linalg.cg(apply, right, maxiter=40)[0],
    "gmres": lambda apply, right: linalg.gmres(apply, right, maxiter=3)[0],
    "bicgstab": lambda apply, right: linalg.bicgstab(apply, right, maxiter=40)[0],
    "scanned": scanned,
    "written out": written_out,
    "descent": descent,
    "steepest": steepest,
    "direct": lambda apply, right: jnp.linalg.solve(jax.vmap(apply, 1, 1)(jnp.eye(SIZE)), right),
}


def weigh(seen):
    return jnp.exp(-(seen**2))


def solve(solver, weighted):
    def fn(matrix, seen):
        weights = weigh(seen) if weighted else jnp.ones_like(seen)
        return solver(lambda x: matrix.T @ (weights * (matrix @ x)) + RIDGE * x, matrix.T @ (weights * seen))

    return fn


def halves(fn, *args, half="bfloat16"):
    """How many of its products are half, and how many there are."""
    found = [op for op in jamp.report(fn, *args, policy=f"O2:{half}").operations if op.primitive == "dot_general"]
    return sum(op.count for op in found if op.rule.startswith("half")), sum(op.count for op in found)


@both_halves
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_normal_equations_are_those_of_float32(solver, weighted, half):
    assert halves(solve(solver, weighted), MATRIX, SIGNAL, half=half)[0] == 0


@both_halves
@pytest.mark.parametrize("solver", [SOLVERS["cg"], SOLVERS["direct"], scanned], ids=["cg", "direct", "scanned"])
def test_normal_equations_of_a_batch_are_those_of_float32(solver, half):
    """Each row has a rate of its own."""
    fn = jax.vmap(solve(solver, weighted=False), (None, 0))
    assert halves(fn, MATRIX, np.stack([SIGNAL, -SIGNAL, SIGNAL**2]), half=half)[0] == 0


@jax.jit
def descended(gram, right):
    """A function that two systems are solved by."""
    return jax.lax.scan(lambda x, _: (x - 0.2 * (gram @ x - right), None), jnp.zeros_like(right), None, 20)[0]


@both_halves
@pytest.mark.parametrize("transposed", [False, True])
def test_descents_by_a_gram_matrix_are_those_of_float32(transposed, half):
    def fn(matrix, seen):
        found = descended(matrix.T @ matrix, matrix.T @ seen)
        return (found, descended(matrix @ matrix.T, seen)) if transposed else found

    assert halves(fn, MATRIX, SIGNAL, half=half)[0] == 0


def by_hand(matrix, seen, weights, x):
    return matrix.T @ (weights * (matrix @ x - seen))


def by_grad(matrix, seen, weights, x):
    return jax.grad(lambda x: (weights * (matrix @ x - seen) ** 2).sum() / 2)(x)


@both_halves
@pytest.mark.parametrize("slope", [by_hand, by_grad])
@pytest.mark.parametrize("loop", [True, False])
def test_weighted_least_squares_by_a_descent_is_that_of_float32(slope, loop, half):
    def fn(matrix, seen, weights):
        def step(x, _):
            return x - 0.2 * slope(matrix, seen, weights, x), None

        start = jnp.zeros(SIZE)
        return jax.lax.scan(step, start, None, 20)[0] if loop else step(step(step(start, None)[0], None)[0], None)[0]

    given = MATRIX, SIGNAL, weigh(SIGNAL)
    assert halves(fn, *given, half=half)[0] == 0
    np.testing.assert_allclose(jamp.cast_fn(fn, f"O2:{half}")(*given), fn(*given), atol=1e-5)


@both_halves
@pytest.mark.parametrize("solver", [SOLVERS["cg"], SOLVERS["gmres"], scanned], ids=["cg", "gmres", "scanned"])
def test_a_network_beside_what_is_solved_for_is_half(solver, half):
    weights = np.float32(rng.standard_normal((SEEN, 64)) / 5), np.float32(rng.standard_normal((64, SIZE)) / 8)

    def fn(matrix, seen, weights):
        prior = jax.nn.relu(seen @ weights[0]) @ weights[1]
        return solver(lambda x: matrix.T @ (matrix @ x) + RIDGE * x, matrix.T @ seen + RIDGE * prior)

    assert halves(fn, MATRIX, SIGNAL, weights, half=half)[0] == 2


@both_halves
def test_gated_layers_that_share_a_matrix_are_half(half):
    """A gate is no weight of a descent: it bends what it multiplies."""

    def fn(matrix, x):
        for _ in range(3):
            x = x - matrix.T @ (jax.nn.sigmoid(matrix @ x) * (matrix @ x))
        return x

    found, products = halves(fn, MATRIX, SIGNAL.repeat(2)[:SIZE], half=half)
    assert found == products
