"""Integers of 8 bits that a program is given are data, as in float32: pixels, and weights that were rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.transforms.harness import both_halves, mixed_levels, product_dtypes, trace

rng = np.random.default_rng(0)
PIXELS = rng.integers(0, 256, (16, 64), np.uint8)
W, V = (np.float32(rng.standard_normal((64, 64)) / 8) for _ in range(2))
STORED = rng.integers(0, 16, (64, 64), np.uint8)


NORMALIZED = {
    "scaled": lambda x: x.astype(jnp.float32) / 255,
    "as they are": lambda x: x.astype(jnp.float32),
    "shifted": lambda x: x / 127.5 - 1,
    "by their mean": lambda x: (x / 255.0 - 0.1307) / 0.3081,
    "one by one": lambda x: (x.astype(jnp.float32) - jnp.arange(64.0)) / 64,
}
READ = {
    "a network": lambda h, v: jax.nn.relu(h) @ v,
    "a mean": lambda h, v: jax.nn.relu(h).reshape(4, 4, 64).mean(1) @ v,
    "a sum": lambda h, v: jax.nn.relu(h).reshape(4, 4, 64).sum(1) @ v,
}


@both_halves
@mixed_levels
@pytest.mark.parametrize("read", READ.values(), ids=READ)
@pytest.mark.parametrize("normalize", NORMALIZED.values(), ids=NORMALIZED)
def test_layers_of_pixels_are_half(normalize, read, level, half):
    cast = jamp.cast_fn(lambda w, v, x: (read(normalize(x) @ w, v) ** 2).mean(), f"{level}:{half}")
    products = product_dtypes(trace(jax.grad(cast, (0, 1)), W, V, PIXELS))
    assert {dtype for dtypes in products for dtype in dtypes[:2]} == {half}


@both_halves
@mixed_levels
@pytest.mark.parametrize(
    "weights", [lambda q: q - 8.0, lambda q: q.astype(jnp.float32)], ids=["shifted", "as they are"]
)
def test_layers_of_rounded_weights_are_half(weights, level, half):
    cast = jamp.cast_fn(lambda x, q: x @ weights(jnp.asarray(q)) * 0.02, f"{level}:{half}")
    assert product_dtypes(trace(cast, W, STORED)) == [[half, half]]


@both_halves
def test_what_is_counted_in_8_bits_is_counted(half):
    ones = np.ones((300, 300), np.uint8)
    cast = jamp.cast_fn(lambda a, b: a.astype(jnp.float32) @ b.astype(jnp.float32), f"O2:{half}")
    assert (cast(jnp.asarray(ones), jnp.asarray(ones)) == 300).all()
