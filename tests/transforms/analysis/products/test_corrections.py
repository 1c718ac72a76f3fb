"""Iterations that correct a vector by what solves a system, as Newton's method does, are those of float32."""

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import jamp
from tests.transforms.harness import both_halves, product_dtypes, run, trace

rng = np.random.default_rng(0)
SIZE = 24
MATRIX = np.float32(rng.standard_normal((SIZE, SIZE)) / SIZE**0.5 + np.diag(np.linspace(0.01, 3, SIZE)))
RIGHT = np.float32(rng.standard_normal(SIZE))
DATA = np.float32(rng.standard_normal((90, 8)) @ rng.standard_normal((8, 8)))
LABELS = np.float32(rng.random(90) < jax.nn.sigmoid(DATA @ rng.standard_normal(8)))


def rest(x, matrix, right):
    return matrix @ x + 0.1 * x**3 - right


def newton(jacobian, solve=jnp.linalg.solve, steps=8):
    def fn(matrix, right):
        x = jnp.zeros_like(right)
        for _ in range(steps):
            x = x - solve(jacobian(rest)(x, matrix, right), rest(x, matrix, right))
        return x

    return fn


def split(matrix, right):
    """The vector is read in parts, in another shape and as a column."""

    def left(x):
        halves = matrix[:, :9] @ x[:9] + matrix[:, 9:] @ x[9:]
        return halves + 0.1 * jnp.tanh((matrix @ x.reshape(6, 4).reshape(SIZE, 1))[:, 0]) - right

    x = jnp.zeros_like(right)
    for _ in range(4):
        x = x - jnp.linalg.solve(jax.jacfwd(left)(x), left(x))
    return x


def chosen(choose):
    """Steps that are taken if they lead to less."""

    def fn(matrix, right):
        x = jnp.zeros_like(right)
        for _ in range(4):
            x = choose(lambda x: rest(x, matrix, right), x)
        return x

    return fn


def step(left, x):
    return x - jnp.linalg.solve(jax.jacfwd(left)(x), left(x))


def by_where(left, x):
    after = step(left, x)
    return jnp.where(jnp.sum(left(after) ** 2) < jnp.sum(left(x) ** 2), after, x)


def by_cond(left, x):
    return jax.lax.cond(jnp.sum(left(x) ** 2) > 1e-12, lambda x: step(left, x), lambda x: x, x)


def solved_anew(matrix, right):
    x = jnp.zeros_like(right)
    for _ in range(4):
        slope = jax.jacfwd(rest)(x, matrix, right)
        x = jnp.linalg.solve(slope, slope @ x - rest(x, matrix, right))
    return x


def picard(matrix, right):
    step = lambda x: jnp.linalg.solve(jnp.diag(2 + x**2), right - jnp.tanh(matrix @ x))  # noqa: E731
    return jax.lax.fori_loop(0, 6, lambda _, x: step(x), right)


def iterated_filter(loop):
    """The update of an iterated extended Kalman filter."""

    def fn(matrix, right):
        mean, cov = jnp.zeros_like(right), jnp.eye(SIZE)

        def show(x):
            return matrix @ x + 0.1 * jnp.tanh(matrix @ x)

        def step(x, _):
            slope = jax.jacfwd(show)(x)
            gain = cov @ slope.T @ jnp.linalg.inv(slope @ cov @ slope.T + 1e-3 * jnp.eye(SIZE))
            return mean + gain @ (right - show(x) - slope @ (mean - x)), None

        if loop:
            return jax.lax.scan(step, mean, None, length=4)[0]
        x = mean
        for _ in range(4):
            x, _ = step(x, None)
        return x

    return fn


def by_lu(matrix, right):
    return jsp.linalg.lu_solve(jsp.linalg.lu_factor(matrix), right)


def of_several(matrix, right):
    """Vectors side by side, of which the first Jacobian is one."""
    return jax.vmap(lambda right: newton(jax.jacfwd)(matrix, right))(jnp.stack([right, 2 * right, -right]))


def in_functions(matrix, right):
    step = jax.jit(lambda x: x - jnp.linalg.solve(jax.jacfwd(rest)(x, matrix, right), rest(x, matrix, right)))
    return step(step(step(jnp.zeros_like(right))))


def within_steps(matrix, right):
    """An implicit step of a differential equation, by Newton's method in a loop."""

    def step(x, _):
        def left(z):
            return z - x + 0.1 * (z**3 - jnp.tanh(matrix @ z))

        def correct(_, z):
            return z - jnp.linalg.solve(jax.jacfwd(left)(z), left(z))

        return jax.lax.fori_loop(0, 3, correct, x), None

    return jax.lax.scan(step, right, None, length=5)[0]


def rosenbrock(matrix, right):
    def field(x):
        return jnp.tanh(matrix @ x) - x**3

    def step(x):
        return x + jnp.linalg.solve(jnp.eye(SIZE) - 0.1 * jax.jacfwd(field)(x), 0.2 * field(x))

    return jax.lax.fori_loop(0, 10, lambda _, x: step(x), right)


def constrained(matrix, right):
    """Sequential quadratic programming."""

    def goal(x):
        return x @ (matrix.T @ (matrix @ x)) / 2 - right @ x + 0.1 * jnp.sum(x**4)

    def bound(x):
        return matrix[:3] @ x - 1 + 0.1 * x[:3] ** 2

    x = jnp.zeros_like(right)
    for _ in range(4):
        slope = jax.jacrev(bound)(x)
        system = jnp.block([[jax.hessian(goal)(x), slope.T], [slope, jnp.zeros((3, 3))]])
        x = x + jnp.linalg.solve(system, jnp.concatenate([-jax.grad(goal)(x), -bound(x)]))[:SIZE]
    return x


SYSTEMS = {
    "forward": newton(jax.jacfwd),
    "backward": newton(jax.jacrev),
    "an inverse": newton(jax.jacfwd, lambda matrix, right: jnp.linalg.inv(matrix) @ right),
    "factors": newton(jax.jacfwd, by_lu),
    "least squares": newton(jax.jacfwd, lambda matrix, right: jnp.linalg.lstsq(matrix, right)[0]),
    "damped": newton(jax.jacfwd, lambda matrix, right: 0.7 * jnp.linalg.solve(matrix + jnp.eye(SIZE), right)),
    "a pseudoinverse": newton(jax.jacfwd, lambda matrix, right: jnp.linalg.pinv(matrix) @ right),
    "in parts": split,
    "taken if better": chosen(by_where),
    "taken if needed": chosen(by_cond),
    "a derivative": lambda matrix, right: jax.grad(lambda *given: newton(jax.jacfwd)(*given).sum(), (0, 1))(
        matrix, right
    ),
    "solved anew": solved_anew,
    "Picard": picard,
    "an iterated filter": iterated_filter(loop=False),
    "an iterated filter in a loop": iterated_filter(loop=True),
    "several": of_several,
    "functions": in_functions,
    "within steps": within_steps,
    "Rosenbrock": rosenbrock,
    "constrained": constrained,
}


@both_halves
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("solver", SYSTEMS.values(), ids=SYSTEMS)
def test_newtons_method_is_that_of_float32(solver, level, half):
    products = product_dtypes(trace(jamp.cast_fn(solver, f"{level}:{half}"), MATRIX, RIGHT))
    assert {dtype for operands in products for dtype in operands} == {"float32"}


def test_a_root_is_as_exact_as_in_float32():
    found, traced = (
        run(jamp.cast_fn(newton(jax.jacfwd), "O2:bfloat16"), MATRIX, RIGHT),
        newton(jax.jacfwd)(MATRIX, RIGHT),
    )
    np.testing.assert_allclose(found, traced, rtol=0, atol=1e-4 * np.abs(traced).max())


def loss(weights, data, labels):
    logits = data @ weights
    return jnp.mean(jnp.logaddexp(0, logits) - labels * logits) + 1e-3 * jnp.sum(weights**2)


def step_of(loss, weights, *given):
    return jnp.linalg.solve(jax.hessian(loss)(weights, *given), jax.grad(loss)(weights, *given))


def fit(data, labels):
    weights = jnp.zeros(8)
    for _ in range(3):
        weights = weights - step_of(loss, weights, data, labels)
    return weights


def fit_by_a_loop(data, labels):
    def step(s):
        return (s[0] + 1, s[1] - step_of(loss, s[1], data, labels))

    return jax.lax.while_loop(lambda s: s[0] < 5, step, (0, jnp.zeros(8)))[1]


def fit_a_tree(data, labels):
    flat, unravel = ravel_pytree({"bias": jnp.zeros(()), "weights": jnp.zeros(8)})

    def of(flat):
        params = unravel(flat)
        logits = data @ params["weights"] + params["bias"]
        return jnp.mean(jnp.logaddexp(0, logits) - labels * logits) + 1e-3 * jnp.sum(flat**2)

    for _ in range(3):
        flat = flat - step_of(of, flat)
    return flat


def gauss_newton(solve):
    def fn(data, labels):
        def left(weights):
            return jnp.tanh(data @ weights) - labels

        weights = 0.1 * jnp.ones(8)
        for _ in range(4):
            weights = weights - solve(jax.jacfwd(left)(weights), left(weights))
        return weights

    return fn


def normal(slope, left):
    return jnp.linalg.solve(slope.T @ slope + 1e-3 * jnp.eye(8), slope.T @ left)


def orthogonal(slope, left):
    q, r = jnp.linalg.qr(slope)
    return jsp.linalg.solve_triangular(r, q.T @ left)


def levenberg(data, labels):
    def left(weights):
        return jax.nn.sigmoid(data @ weights) - labels

    def step(state, _):
        weights, damping = state
        slope, before = jax.jacfwd(left)(weights), left(weights)
        after = weights - jnp.linalg.solve(slope.T @ slope + damping * jnp.eye(8), slope.T @ before)
        better = jnp.sum(left(after) ** 2) < jnp.sum(before**2)
        return (jnp.where(better, after, weights), jnp.where(better, 0.3, 3.0) * damping), None

    return jax.lax.scan(step, (jnp.zeros(8), jnp.float32(0.1)), None, length=8)[0][0]


FITS = {
    "Newton": fit,
    "Newton in a loop": fit_by_a_loop,
    "Newton of a tree": fit_a_tree,
    "Gauss-Newton": gauss_newton(normal),
    "by QR": gauss_newton(orthogonal),
    "by least squares": gauss_newton(lambda slope, left: jnp.linalg.lstsq(slope, left)[0]),
    "Levenberg-Marquardt": levenberg,
}


@both_halves
@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_fits_are_those_of_float32(fit, half):
    products = product_dtypes(trace(jamp.cast_fn(fit, f"O2:{half}"), DATA, LABELS))
    assert {dtype for operands in products for dtype in operands} == {"float32"}


WIDE = np.float32(rng.standard_normal((32, 32)) / 32**0.5)
ROWS = np.float32(rng.standard_normal((16, 32)))


def a_step_of_training(weights, x):
    """Of a bias, by a whole matrix: what stands between is a network."""

    def loss(bias):
        return jnp.mean(jnp.sin(jax.nn.gelu(x @ weights + bias) @ weights))

    bias = jnp.zeros(32)
    slope = jax.grad(loss)(bias)
    return bias - jnp.linalg.solve(jnp.eye(32) + jnp.outer(slope, slope), slope)


def layers_with_solvers(weights, x):
    """Each is added to what solves a system of its own."""

    def layer(x, scale):
        moved = jnp.linalg.solve(jnp.diag(2 + scale), jnp.tanh(x @ weights).T).T
        return x + moved, None

    return jax.lax.scan(layer, x, jnp.zeros((3, 32)))[0]


def context(weights, x):
    """A network in front of an iteration, and a layer behind it."""
    h = jax.nn.gelu(x @ weights) @ weights
    z = jnp.zeros(32)
    for _ in range(3):

        def left(z):
            return jnp.tanh(z) + z - h[0]

        z = z - jnp.linalg.solve(jax.jacfwd(left)(z), left(z))
    return jnp.tanh(z) @ weights


def beside_a_state(weights, x):
    """A recurrent layer beside the state of a filter."""

    def step(state, row):
        h, cov = state
        cov = cov - jnp.linalg.solve(cov + jnp.eye(32), cov) + jnp.diag(row**2)
        return (jnp.tanh(weights @ h + row), cov), h

    return jax.lax.scan(step, (jnp.zeros(32), jnp.eye(32)), x)[1]


@both_halves
@pytest.mark.parametrize("network", [a_step_of_training, layers_with_solvers, context, beside_a_state])
def test_networks_between_are_half(network, half):
    found = jamp.report(network, WIDE, ROWS, policy=f"O2:{half}").operations
    rules = {op.rule for op in found if op.primitive == "dot_general"} - {"as traced"}  # `solve` has two of its own.
    assert rules <= {"half", "half, float32 out"}
