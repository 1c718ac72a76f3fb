"""Loops that multiply what they carry with a Gram matrix solve: the matrix and the products in them are float32."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from tests.transforms.harness import product_dtypes, trace

X = jax.random.normal(jax.random.key(0), (32, 8))
W = jax.random.normal(jax.random.key(1), (8, 8)) / 3
Y = jnp.sin(jnp.arange(32.0))


def loop(step, start):
    return lax.fori_loop(0, 20, lambda _, state: step(state), start)


def descend(k, a):
    return a - 0.03 * (k @ a + 0.1 * a - Y)


def shrink(z):
    return jnp.sign(z) * jnp.maximum(jnp.abs(z) - 0.01, 0)


def momentum(k, state):
    a, v = state
    v = 0.9 * v - 0.01 * (k @ a - Y)
    return a + v, v


SOLVERS = {
    "gradient descent": lambda k: loop(lambda a: descend(k, a), 0 * Y),
    "of a quadratic": lambda k: loop(lambda a: a - 0.03 * jax.grad(lambda a: 0.5 * a @ k @ a - a @ Y)(a), 0 * Y),
    "projected": lambda k: loop(lambda a: jnp.clip(descend(k, a), -0.5, 0.5), 0 * Y),
    "soft thresholds": lambda k: loop(lambda a: shrink(descend(k, a)), 0 * Y),
    "momentum": lambda k: loop(lambda s: momentum(k, s), (0 * Y, 0 * Y))[0],
    "jacobi": lambda k: loop(lambda a: (Y - k @ a) / (jnp.diag(k) + 30.0), 0 * Y),
    "scanned": lambda k: lax.scan(lambda a, _: (jnp.clip(descend(k, a), -1, 1), a), 0 * Y, None, length=20)[0],
    "to convergence": lambda k: lax.while_loop(
        lambda s: jnp.linalg.norm(s[0] - s[1]) > 1e-3, lambda s: (jnp.clip(descend(k, s[0]), -1, 1), s[0]), (Y, 0 * Y)
    )[0],
    "jitted": lambda k: loop(jax.jit(lambda a: jnp.clip(descend(k, a), -0.5, 0.5)), 0 * Y),
}  # fmt: skip
MATRICES = {
    "gram": lambda f: f @ f.T,
    "ridge": lambda f: f @ f.T + 0.1 * jnp.eye(32),
    "weighted": lambda f: (f @ f.T) * jnp.outer(Y, Y),
    "scaled": lambda f: f @ f.T / 8,
    "einsum": lambda f: jnp.einsum("id,jd->ij", f, f),
}


@pytest.mark.parametrize("level", ["O1:bfloat16", "O2:bfloat16", "OD:bfloat16", "O2:float16"])
@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("solver", SOLVERS)
def test_all_products_but_that_of_the_layer_are_float32(solver, matrix, level):
    def fn(w, x):
        return SOLVERS[solver](MATRICES[matrix](jnp.tanh(x @ w)))

    layer, *others = product_dtypes(trace(jamp.cast_fn(fn, level), W, X))
    assert layer == [level[3:]] * 2
    assert others
    assert all(dtypes == ["float32"] * 2 for dtypes in others if len(dtypes) == 2)


@pytest.mark.parametrize("level", ["O1:bfloat16", "O2:bfloat16"])
@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: loop(lambda h: jnp.tanh(h @ w + x), x),  # A recurrent layer.
        lambda w, x: loop(lambda h: jnp.tanh(h @ (w @ w[::-1])), x),  # No square.
        lambda w, x: loop(lambda h: jax.nn.softmax(h @ h.T) @ h @ w, x),  # Attention, of what is carried.
        lambda w, x: lax.scan(lambda h, v: (jnp.tanh(h @ v), None), x, jnp.stack([w, w]))[0],
    ],
)
def test_layers_stay_half(level, fn):
    found = product_dtypes(trace(jamp.cast_fn(fn, level), W, X))
    assert found
    assert all(dtypes == ["bfloat16"] * 2 for dtypes in found)


@pytest.mark.parametrize("solver", ["gradient descent", "momentum", "soft thresholds"])
def test_gradients(solver, key):
    """With a rounded matrix they were up to four times as far off as with a half network alone."""

    def loss(w, x):
        f = jnp.tanh(x @ w)
        return jnp.mean((f @ (f.T @ SOLVERS[solver](f @ f.T)) - Y) ** 2)

    x = jax.random.normal(key, (32, 8))
    expected = jax.grad(loss)(W, x)
    for level in ("O1:bfloat16", "O2:bfloat16"):
        error = jnp.linalg.norm(jax.grad(jamp.cast_fn(loss, level))(W, x) - expected) / jnp.linalg.norm(expected)
        assert error < 0.02
