"""Programs with more operations in a row than Python's stack is deep: JAX traces them, and so does a cast function."""

import sys

import jax
import jax.numpy as jnp
import pytest

import jamp
from tests.transforms.harness import product_dtypes, trace

MANY = sys.getrecursionlimit() + 100
X, W = jnp.ones((4, 4)), jnp.eye(4)
KEYS = jnp.arange(4)
STEPS = {
    "scaled": lambda y, i: y * 1.01,
    "bent": lambda y, i: jnp.sin(y),
    "added": lambda y, i: y + X,
    "turned": lambda y, i: y.T,
    "numbers": lambda y, i: y * 0.5 + 1,
}
MASKS = {
    "and": lambda y, i: jnp.where(y > i, y, -1e9),
    "less": lambda y, i: jnp.minimum(y, jnp.where(i < X, 0.0, -1e9)),
    "times": lambda y, i: y * (i < X),
    "numbers": lambda y, i: y * 0.5 + 1,
    "turned": lambda y, i: y.T,
}


def repeated(step, y):
    for i in range(MANY):
        y = step(y, i)
    return y


def distances(y):
    squares = (y * y).sum(1)
    return squares[:, None] + squares - 2 * y @ y.T


def fit(y):
    return jnp.linalg.solve(y.T @ y + jnp.eye(4), y.T @ X)


def attention(bias):
    return jax.nn.softmax(X @ W.T + bias) @ X


@pytest.mark.parametrize("step", STEPS)
def test_a_long_row_of_operations_is_traced(step):
    trace(jamp.cast_fn(lambda x, w: distances(repeated(STEPS[step], x @ w)), "O2:bfloat16"), X, W)


@pytest.mark.parametrize(("step", "end"), [("scaled", fit), ("added", attention), ("numbers", jnp.tanh)])
def test_a_long_row_may_stand_in_front_of_anything(step, end):
    trace(jamp.cast_fn(lambda x, w: end(repeated(STEPS[step], x @ w)), "O2:bfloat16"), X, W)


@pytest.mark.parametrize("step", MASKS.values(), ids=MASKS)
def test_a_long_row_of_masks_is_traced(step):
    trace(jamp.cast_fn(lambda x: attention(repeated(step, x)), "O2:bfloat16,attention=fused"), X)


def test_places_and_booleans_may_be_made_in_many_operations():
    def places(x):
        return attention(jnp.where(repeated(lambda i, _: i + 1, KEYS[:, None]) >= KEYS, 0.0, -1e9) + x)

    def booleans(x):
        return attention(jnp.where(repeated(lambda m, i: m & (x > i), x > 0), 0.0, -1e9))

    for fn in (places, booleans):
        trace(jamp.cast_fn(fn, "O2:bfloat16,attention=fused"), X)


def test_products_behind_a_long_row_are_found():
    fn = jamp.cast_fn(lambda x: distances(repeated(STEPS["bent"], x)), "O2:bfloat16")
    assert product_dtypes(trace(fn, X)) == [["float32", "float32"]]
