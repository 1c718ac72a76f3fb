"""The gradient of a solution solves with the matrix that the solution was made with: a rule is given that as it was."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from tests.transforms.harness import product_dtypes, trace

SIZE = 32
RIDGE = 0.1 * jnp.eye(SIZE)
cg = jax.scipy.sparse.linalg.cg


def residual(k, a):
    return k @ a + 0.1 * a


def squared(k):
    return (k + RIDGE).T @ (k + RIDGE)


def descent(matvec, b):
    """Normal equations by conjugate gradients, written as a loop."""

    def step(_, state):
        x, r, p = state
        moved = matvec(p)
        x, rest = x + (r @ r) / (p @ moved + 1e-20) * p, r - (r @ r) / (p @ moved + 1e-20) * moved
        return x, rest, rest + (rest @ rest) / (r @ r + 1e-20) * p

    return lax.fori_loop(0, 40, step, (0 * b, b, b))[0]


# Ways to solve `(k + ridge) u = g`.
WAYS = {
    "factorized": lambda k, g: jnp.linalg.solve(k + RIDGE, g),
    "by a Jacobian": lambda k, g: jnp.linalg.solve(jax.jacobian(functools.partial(residual, k))(g).T, g),
    "by a Hessian": lambda k, g: jnp.linalg.solve(jax.hessian(lambda a: 0.5 * a @ (k @ a) + 0.05 * a @ a)(g), g),
    "conjugate gradients": lambda k, g: cg(functools.partial(residual, k), g, maxiter=100)[0],
    "by a transpose": lambda k, g: cg(
        lambda u: jax.vjp(functools.partial(residual, k), g)[1](u)[0], g, maxiter=100
    )[0],
    "normal equations, iterated": lambda k, g: cg(
        lambda u: residual(k, residual(k, u)), residual(k, g), maxiter=100
    )[0],
    "normal equations, in a loop": lambda k, g: descent(lambda u: residual(k, residual(k, u)), residual(k, g)),
    "normal equations": lambda k, g: jnp.linalg.solve(squared(k), (k + RIDGE).T @ g),
    "inverted": lambda k, g: jnp.linalg.inv(k + RIDGE) @ g,
    "cholesky": lambda k, g: jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(k + RIDGE), g),
    "bicgstab": lambda k, g: jax.scipy.sparse.linalg.bicgstab(functools.partial(residual, k), g, maxiter=100)[0],
}  # fmt: skip


def with_rule(way, y):
    """A solver whose gradient is that of the implicit function."""

    @jax.custom_vjp
    def solve(k):
        return jnp.linalg.solve(k + RIDGE, y)

    def forward(k):
        a = solve(k)
        return a, (a, k)

    def backward(kept, g):
        a, k = kept
        return (-jnp.outer(WAYS[way](k, g), a),)

    solve.defvjp(forward, backward)
    return solve


def with_forward_rule(way, y):
    """The same by a forward-mode rule, which JAX transposes."""

    @jax.custom_jvp
    def solve(k):
        return jnp.linalg.solve(k + RIDGE, y)

    @solve.defjvp
    def _(primals, tangents):
        (k,), (dk,) = primals, tangents
        a = solve(k)
        return a, WAYS[way](k, -dk @ a)

    return solve


def log_determinant():
    @jax.custom_vjp
    def logdet(k):
        return jnp.linalg.slogdet(k + 0.01 * RIDGE)[1]

    logdet.defvjp(lambda k: (logdet(k), k), lambda k, g: (g * jnp.linalg.inv(k + 0.01 * RIDGE),))
    return logdet


def projected(way, y):
    """A fixed point of a projected gradient descent, with a rule."""

    def update(a, k, size):
        return jnp.clip(a - size * (residual(k, a) - y), -0.5, 0.5)

    @jax.custom_vjp
    def solve(k):
        return lax.fori_loop(0, 100, lambda _, a: update(a, k, 0.03), jnp.zeros(SIZE))

    def forward(k):
        a = solve(k)
        return a, (a, k)

    def backward(kept, g):
        a, k = kept
        free = jnp.abs(a) < 0.5
        inside = jnp.where(free[:, None] & free, k, 0.0)
        return (-jnp.outer(WAYS[way](inside, jnp.where(free, g, 0.0)), a),)

    solve.defvjp(forward, backward)
    return solve


def features(params, x, cast=lambda value: value):
    """A network, and the Gram matrix of what it makes."""
    a, b = (cast(each) for each in params)
    made = (jnp.tanh(cast(x) @ a) @ b).astype(jnp.float32)
    return made, made @ made.T


def data(key):
    keys = jax.random.split(key, 3)
    params = jax.random.normal(keys[0], (6, 24)) / 6**0.5, jax.random.normal(keys[1], (24, 8)) / 24**0.5
    x = jax.random.normal(keys[2], (SIZE, 6))
    return params, x, jnp.sign(jnp.sin(2 * x[:, 0]) + x[:, 1])


def off(got, expected):
    difference = jax.tree.map(lambda a, b: a - b, got, expected)
    return sum(jnp.vdot(d, d) for d in difference) ** 0.5 / sum(jnp.vdot(e, e) for e in expected) ** 0.5


def check(loss, params, x, y, levels):
    """The gradient is not much farther off than with a half network and all else in float32."""
    gradient = lambda fn: jax.jit(jax.grad(fn))(params, x, y)  # noqa: E731
    expected = gradient(loss)
    by_hand = gradient(functools.partial(loss, cast=lambda value: value.astype(jnp.bfloat16)))
    allowed = max(2.2 * off(by_hand, expected), 0.015)
    for level in levels:
        assert off(gradient(jamp.cast_fn(loss, level)), expected) < allowed


LEVELS = "OD:bfloat16", "O1:bfloat16", "O2:bfloat16"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("solver", [with_rule, projected])
def test_implicit_gradients(solver, way, key):
    """The matrix was rounded for the rule (O2), and so were the products of it there (all levels): 6 to 400 % off."""

    def loss(params, x, y, cast=lambda value: value):
        made, k = features(params, x, cast)
        a = solver(way, y)(k)
        return jnp.mean((made @ (made.T @ a) - y) ** 2) + jnp.mean(a**2)

    check(loss, *data(key), LEVELS)


@pytest.mark.parametrize("way", ["factorized", "by a Jacobian", "normal equations", "inverted", "cholesky"])
def test_forward_rules(way, key):
    """They were 7 to 2264 % off at all levels."""

    def loss(params, x, y, cast=lambda value: value):
        made, k = features(params, x, cast)
        a = with_forward_rule(way, y)(k)
        return jnp.mean((made @ (made.T @ a) - y) ** 2) + jnp.mean(a**2)

    check(loss, *data(key), LEVELS)


@pytest.mark.parametrize("way", ["factorized", "normal equations", "normal equations, in a loop", "by a Jacobian"])
def test_without_a_rule(way, key):
    def loss(params, x, y, cast=lambda value: value):
        made, k = features(params, x, cast)
        a = WAYS[way](k, y)
        return jnp.mean((made @ (made.T @ a) - y) ** 2) + jnp.mean(a**2)

    check(loss, *data(key), LEVELS)


def test_a_determinant(key):
    """Its gradient, the inverse of a rounded matrix, was off by 88 to 1777 % at O2."""

    def loss(params, x, y, cast=lambda value: value):
        return log_determinant()(features(params, x, cast)[1]) / SIZE

    check(loss, *data(key), LEVELS)


def test_a_half_cotangent(key):
    """A layer reads the solution, so that its cotangent is half; the matrix it meets is not."""

    def loss(params, x, y, cast=lambda value: value):
        _, k = features(params, x, cast)
        a = with_rule("normal equations, iterated", y)(k)
        read = (cast(jnp.stack([a, y], -1)) @ cast(params[0][:2])).astype(jnp.float32)
        return jnp.mean(jnp.tanh(read) ** 2)

    check(loss, *data(key), LEVELS)


def test_an_equilibrium_is_made_of_layers(key):
    """A rule of a fixed point, which solves by iterating: products with weights stay half, forward and backward."""
    w, u = jax.random.normal(key, (2, 16, 16)) / 8

    @jax.custom_vjp
    def equilibrium(w, x):
        return lax.fori_loop(0, 20, lambda _, z: jnp.tanh(z @ w + x), jnp.zeros_like(x))

    def forward(w, x):
        z = equilibrium(w, x)
        return z, (w, x, z)

    def backward(kept, g):
        w, x, z = kept
        pull = jax.vjp(lambda w, x, z: jnp.tanh(z @ w + x), w, x, z)[1]
        v = cg(lambda v: v - pull(v)[2], g, maxiter=5)[0]
        return pull(v)[:2]

    equilibrium.defvjp(forward, backward)

    def loss(w, u, x):
        return jnp.mean((equilibrium(w, x @ u) @ u) ** 2)

    found = product_dtypes(trace(jax.grad(jamp.cast_fn(loss, "O2:bfloat16"), (0, 1)), w, u, jnp.ones((8, 16))))
    in_half = [dtypes for dtypes in found if dtypes == ["bfloat16"] * 2]
    assert len(in_half) >= 7  # Three layers, and the gradients of two of them, and what pulls back in the rule.
