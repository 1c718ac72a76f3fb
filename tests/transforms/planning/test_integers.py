"""Layers of integers, flags and drawn signs are half as those of float32 data are; what a program counts is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import both_halves, mixed_levels, product_dtypes, trace

rng = np.random.default_rng(0)
F = jnp.float32
COUNTS = rng.integers(0, 256, (16, 64), np.int32)
FLAGS = rng.random((16, 64)) < 0.5
PIXELS = COUNTS.astype(np.uint8)
PACKED = rng.integers(0, 256, (16, 8), np.uint8)
X = np.float32(rng.standard_normal((16, 64)))
IDS = rng.integers(0, 16, 16)
KEY = jax.random.key(0)
W, V = (np.float32(rng.standard_normal((64, 64)) / 8) for _ in range(2))
TERNARY = np.float32([-1, 0, 1])

DATA = {
    "flags": (FLAGS, lambda b: b.astype(F)),
    "flags, centred": (FLAGS, lambda b: b - 0.5),
    "signs of flags": (FLAGS, lambda b: 2 * b.astype(F) - 1),
    "chosen by flags": (FLAGS, lambda b: jnp.where(b, 1.0, -1.0)),
    "chosen by their opposite": (FLAGS, lambda b: jnp.where(~b, 1.0, -1.0)),
    "counts": (COUNTS, lambda n: n.astype(F)),
    "counts, scaled": (COUNTS, lambda n: n / 255.0),
    "counts, centred": (COUNTS, lambda n: n / 127.5 - 1),
    "counts, by their mean": (COUNTS, lambda n: (n - n.astype(F).mean(0)) / n.astype(F).std(0)),
    "counts, masked": (COUNTS, lambda n: (n / 127.5 - 1) * (jnp.arange(16) < 12)[:, None]),
    "beside one-hot rows": (IDS, lambda i: jnp.hstack([jax.nn.one_hot(i, 60), (i - 8.0)[:, None].repeat(4, 1)])),
    "logarithms of counts": (COUNTS, lambda n: jnp.log1p(n) - 3),
    "counts above a number": (COUNTS, lambda n: 2.0 * (n > 128) - 1),
    "pixels": (PIXELS, lambda x: x.astype(F)),
    "pixels, scaled": (PIXELS, lambda x: x.astype(F) / 255),
    "pixels, centred": (PIXELS, lambda x: x / 127.5 - 1),
    "pixels, by their mean": (PIXELS, lambda x: (x / 255.0 - 0.1307) / 0.3081),
    "pixels, one by one": (PIXELS, lambda x: (x.astype(F) - jnp.arange(64.0)) / 64),
    "of 16 bits": (COUNTS.astype(np.uint16), lambda n: n / 127.5 - 1),
    "wider": (PIXELS, lambda n: n.astype(jnp.int32) / 127.5 - 1),
    "unpacked": (PACKED, lambda n: 2 * jnp.unpackbits(n, axis=1).astype(jnp.int32) - 1.0),
    "looked up": (COUNTS % 3, lambda n: jnp.asarray(TERNARY)[n]),
    "signs": (X, lambda x: jnp.where(x > 0, 1.0, -1.0)),
    "drawn signs": (KEY, lambda key: jax.random.rademacher(key, (16, 64), F)),
    "drawn flags": (KEY, lambda key: 2.0 * jax.random.bernoulli(key, 0.5, (16, 64)) - 1),
    "drawn integers": (KEY, lambda key: jax.random.randint(key, (16, 64), 0, 9) / 4 - 1.0),
    "drawn from numbers": (KEY, lambda key: jax.random.choice(key, jnp.array([-1.0, 1.0]), (16, 64))),
}
READ = {
    "a network": lambda h, v: jax.nn.relu(h) @ v,
    "a mean": lambda h, v: jax.nn.relu(h).reshape(4, 4, 64).mean(1) @ v,
    "a sum": lambda h, v: jax.nn.relu(h).reshape(4, 4, 64).sum(1) @ v,
    "a scan": lambda h, v: lax.scan(lambda c, row: (jnp.tanh(c + row), c), jnp.zeros(64), h)[1] @ v,
}


@both_halves
@mixed_levels
@pytest.mark.parametrize("read", READ.values(), ids=READ)
@pytest.mark.parametrize(("data", "prepare"), DATA.values(), ids=DATA)
def test_layers_of_data_are_half(data, prepare, read, level, half):
    cast = jamp.cast_fn(lambda w, v, x: (read(prepare(x) @ w, v) ** 2).mean(), f"{level}:{half}")
    products = product_dtypes(trace(jax.grad(cast, (0, 1)), W, V, data))
    assert {dtype for dtypes in products for dtype in dtypes[:2]} == {half}


@both_halves
@mixed_levels
def test_layers_in_a_loop_over_rows_are_half(level, half):
    def fn(w, flags):
        return lax.scan(lambda c, row: (jnp.tanh((2.0 * row - 1) @ w), None), jnp.zeros(64), flags)[0].sum()

    products = product_dtypes(trace(jax.grad(jamp.cast_fn(fn, f"{level}:{half}")), W, FLAGS))
    assert {dtype for dtypes in products for dtype in dtypes[:2]} == {half}


WEIGHTS = {
    "of 8 bits, shifted": (np.uint8, lambda q: q - 8.0),
    "of 8 bits": (np.uint8, lambda q: q.astype(F)),
    "of 32 bits, scaled": (np.int32, lambda q: (q - 128) * 0.01),
}


@both_halves
@mixed_levels
@pytest.mark.parametrize(("dtype", "weights"), WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("read", [lambda h: h * 0.02, lambda h: jax.nn.relu(h).mean(0)], ids=["scaled", "a mean"])
def test_layers_of_stored_weights_are_half(read, dtype, weights, level, half):
    cast = jamp.cast_fn(lambda x, q: read(x @ weights(q)), f"{level}:{half}")
    assert product_dtypes(trace(cast, X, rng.integers(0, 16, (64, 64), dtype))) == [[half, half]]


@both_halves
def test_what_is_counted_in_8_bits_is_counted(half):
    ones = np.ones((300, 300), np.uint8)
    cast = jamp.cast_fn(lambda a, b: a.astype(F) @ b.astype(F), f"O2:{half}")
    assert (cast(jnp.asarray(ones), jnp.asarray(ones)) == 300).all()


LINKS = rng.random((16, 16)) < 0.3
PLACES = 307 * np.arange(16)


def _forward_differences():
    return jnp.eye(16, k=1) - jnp.eye(16)


WRITTEN = {
    "how many": (LINKS, lambda b: b.astype(F) @ b.astype(F)),
    "differences, chosen": (LINKS, lambda b: jnp.where(b, _forward_differences(), 0.0) @ (100 + X)),
    "rows of differences": (IDS, lambda i: _forward_differences()[i] @ (100 + X)),
    "a Laplacian": (LINKS, lambda b: (jnp.diag(b.sum(1).astype(F)) - b.astype(F)) @ (100 + X)),
    "a centred choice": (IDS, lambda i: (jax.nn.one_hot(i, 16) - 1 / 16) @ (100 + X)),
    "means of groups": (IDS, lambda i: (jax.nn.one_hot(i, 16) / (1 + jnp.bincount(i, length=16))) @ jnp.exp(X)),
    "running means": (X, lambda x: (jnp.tri(16) / jnp.arange(1, 17.0)[:, None]) @ jnp.exp(x)),
    "of places": (PLACES, lambda p: jnp.sin((p / 7.0)[:, None] @ jnp.exp(-jnp.arange(8) / 4.0)[None])),
    "an expectation": (X, lambda x: jax.nn.softmax(x) @ jnp.arange(64)[:, None].astype(F)),
}


@both_halves
@mixed_levels
@pytest.mark.parametrize(("given", "fn"), WRITTEN.values(), ids=WRITTEN)
def test_what_the_program_writes_is_float32(given, fn, level, half):
    cast = jamp.cast_fn(fn, f"{level}:{half}")
    assert {dtype for dtypes in product_dtypes(trace(cast, given)) for dtype in dtypes[:2]} == {"float32"}


@both_halves
def test_positions_that_are_given_keep_their_digits(half):
    def fn(places):
        return jnp.sin(places[:, None] * jnp.exp(-jnp.arange(8) / 4.0))

    for level in ("OD", "O1", "O2", "O3"):
        np.testing.assert_allclose(
            np.float64(jamp.cast_fn(fn, f"{level}:{half}")(PLACES)), np.float64(fn(PLACES)), atol=4e-3
        )


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.float32])
def test_layers_of_stored_weights_are_in_8_bits_by_float8(dtype):
    of = jax.ShapeDtypeStruct

    def fn(x, w, stored):  # What both products of layers read is computed, or a weight.
        return jnp.tanh(jax.nn.relu(x @ w) @ (stored * 0.001)) @ w

    weights = of((1024, 1024), np.float32), of((1024, 1024), dtype)
    report = jamp.report(fn, of((4096, 1024), np.float32), *weights, policy="O2:bfloat16,matmul=float8")
    rules = {op.rule: op.count for op in report.operations if op.primitive == "dot_general"}
    assert rules == {"float8": 2, "half, float32 out": 1}


@both_halves
@pytest.mark.parametrize("dtype", [np.int32, np.uint8, bool])
@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
def test_products_with_integers_on_the_left_have_derivatives(level, dtype, half):
    rows, table = np.eye(8, dtype=dtype), np.arange(32.0, dtype=np.float32).reshape(8, 4)
    gradient = jax.grad(jamp.cast_fn(lambda v: jnp.matmul(rows, v).sum(), f"{level}:{half}"))(table)
    np.testing.assert_array_equal(gradient, np.ones((8, 4)))
