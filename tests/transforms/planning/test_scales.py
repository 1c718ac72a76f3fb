"""Data that numbers beyond float16 scale: in products and in carries it stays float32, until it is of its own size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import W, X, find, mixed_levels, operand_dtypes, product_dtypes, run, trace

HALF, FULL = ["float16"] * 2, ["float32"] * 2
V = W.T / 2
MASK = jnp.tril(jnp.ones((4, 4)))
# Arrays that programs close over.
MEAN, DEVIATION = np.full(16, 3e5, np.float32), np.full(16, 1e5, np.float32)
NUMBERS = np.float32(np.random.default_rng(0).standard_normal(W.shape))
HIDDEN = np.float32(np.where(MASK > 0, 0, -1e9))


def convolved(x, w):
    return lax.conv_general_dilated(x[:, None], w[:3, None, :5], (1,), "SAME")


def counted(x):
    return jnp.round(1e4 * x).astype(jnp.int32).astype(jnp.float32)


def normalized(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


# Each with the dtypes of its products.
SCALED = {
    "large operand": (lambda w, x: jnp.tanh((x * 1e6) @ (w * 1e-5)), [FULL]),
    "large in front of a layer": (lambda w, x: (jnp.tanh(x @ w) * 1e5) @ (w * 1e-5), [HALF, FULL]),
    "tiny operand": (lambda w, x: ((x * 1e-9) @ w) * 1e9, [FULL]),
    "divided": (lambda w, x: ((x / 1e9) @ w) / 1e-9, [FULL]),
    "convolution": (lambda w, x: jnp.tanh(convolved(x * 1e6, w * 1e-6)), [FULL]),
    "einsum": (lambda w, x: jnp.einsum("bi,ij->bj", x * 1e6, w) * 1e-6, [FULL]),
    "moved": (lambda w, x: (jnp.concatenate([x * 1e6, w]).reshape(-1, 16)[:, ::-1] @ w) * 1e-6, [FULL]),
    "added": (lambda w, x: ((x @ w + x * 1e6) @ w) * 1e-6, [HALF, FULL]),
    "islands added": (lambda w, x: (((x @ w) * 1e6 + jnp.tanh(x @ w)) @ w) * 1e-6, [HALF, HALF, FULL]),
    "multiplied": (lambda w, x: ((jnp.tanh(x @ w) * (x * 1e6)) @ w) * 1e-6, [HALF, FULL]),
    "squared": (lambda w, x: (((x @ w) * 1e-5) ** 2 @ w) * 1e10, [HALF, FULL]),
    "rectified": (lambda w, x: (jax.nn.relu((x @ w) * 1e-8) @ w) * 1e8, [HALF, FULL]),
    "twice large, once tiny": (lambda w, x: ((x * 1e6 * 1e6 * 1e-6) @ w) * 1e-6, [FULL]),
    "two layers": (lambda w, x: (((x * 1e6) @ w) @ V) * 1e-6, [FULL, FULL]),
    "in a call": (lambda w, x: (jax.jit(lambda x: x * 1e6)(x @ w) @ w) * 1e-6, [HALF, FULL]),
    "in a branch": (lambda w, x: (lax.cond(x[0, 0] < 9, lambda h: h * 1e6, lambda h: h, x @ w) @ w) * 1e-6,
                    [HALF, FULL]),
    "through tanh": (lambda w, x: (jnp.tanh((x @ w) * 1e-8) @ w) * 1e8, [HALF, FULL]),
    "by an array": (lambda w, x: (x @ (NUMBERS * 1e6)) * 1e-6, [FULL]),
    "by a tiny array": (lambda w, x: (x @ jnp.asarray(NUMBERS * 1e-9)) * 1e9, [FULL]),
    "by an array, one by one": (lambda w, x: ((x * (NUMBERS[0] * 1e6)) @ W) * 1e-6, [FULL]),
    "one of two tiny numbers": (lambda w, x: ((x > 0) * 1e-9 @ w) * 1e9, [FULL]),
    "a float and a count": (lambda w, x: ((x + counted(x)) * 1e-9 @ w) * 1e9, [FULL]),
    # What is of its own size again is half.
    "standardized": (lambda w, x: ((x * 2e4 + 1e5 - NUMBERS[0] * 1e5) / np.full(16, 2e4, np.float32)) @ w, [HALF]),
    "scaled back": (lambda w, x: ((x @ w) * 1e-9 * 1e9) @ w, [HALF, HALF]),
    "bounded": (lambda w, x: jnp.tanh((x @ w) * 1e6) @ w, [HALF, HALF]),
    "clipped": (lambda w, x: jnp.clip((x @ w) * 1e6, -1.0, 1.0) @ w, [HALF, HALF]),
    "normalized": (lambda w, x: normalized((x @ w) * 1e6) @ w, [HALF, HALF]),
    "divided by its norm": (lambda w, x: (lambda h: (h / jnp.sqrt(jnp.sum(h * h))) @ w)((x @ w) * 1e6), [HALF, HALF]),
    "softmax": (lambda w, x: jax.nn.softmax((x @ w) * 1e6) @ w, [HALF, HALF]),
    "added to larger data": (lambda w, x: ((x @ w) * 1e-6 + x) @ w, [HALF, HALF]),
}  # fmt: skip


@mixed_levels
@pytest.mark.parametrize("name", SCALED)
def test_products_of_scaled_data_are_float32(name, level):
    fn, expected = SCALED[name]
    cast = jamp.cast_fn(fn, f"{level}:float16")
    jaxpr = trace(cast, W, X)
    found = [operand_dtypes(eqn) for eqn in find(jaxpr, "dot_general", "conv_general_dilated")]
    assert found == expected
    np.testing.assert_allclose(run(cast, W, X), run(fn, W, X), rtol=0.02, atol=0.01)


@pytest.mark.parametrize("name", SCALED)
def test_bfloat16_holds_such_numbers(name):
    fn, expected = SCALED[name]
    assert product_dtypes(trace(jamp.cast_fn(fn, "O2:bfloat16"), W, X)) == [["bfloat16"] * 2] * len(expected)


@mixed_levels
def test_gradients_of_scaled_data(level):
    def loss(w, x):
        return jnp.mean(((jnp.tanh(x @ w) * 1e5) @ (w * 1e-5)) ** 2)

    actual = run(jax.grad(jamp.cast_fn(loss, f"{level}:float16"), (0, 1)), W, X)
    for a, e in zip(actual, run(jax.grad(loss, (0, 1)), W, X), strict=True):
        np.testing.assert_allclose(a, e, atol=2e-3 * np.abs(e).max())


@mixed_levels
@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: lax.scan(lambda h, _: (jnp.tanh((h * 1e-6) @ w) * 1e6, None), x * 1e6, None, length=3)[0] * 1e-6,
        lambda w, x: lax.scan(lambda h, _: (jnp.tanh((h * 1e8) @ w) * 1e-8, None), x * 1e-8, None, length=3)[0] * 1e8,
        lambda w, x: lax.fori_loop(0, 3, lambda i, h: jnp.tanh((h * 1e-5) @ w) * 1e5, x * 1e5) * 1e-5,
        # The first value is scaled, and the others are; or only the others.
        lambda w, x: lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x * 1e-8, None, length=2)[0] * 1e8,
        lambda w, x: lax.fori_loop(0, 2, lambda i, h: h * 1e3 * 1e3, jnp.tanh(x @ w)) * 1e-12,
        lambda w, x: lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h * 1e-6 + x @ w) * 1e6, x @ w) * 1e-6,
        # What is stacked, and what is scanned over.
        lambda w, x: lax.scan(lambda h, _: (jnp.tanh(h @ w), h * 1e6), x, None, length=3)[1] * 1e-6,
        lambda w, x: lax.scan(lambda c, h: (c, jnp.tanh((h * 1e8) @ w)), 0.0, (x @ w) * 1e-8)[1],
    ],
)
def test_scaled_carries_are_float32(fn, level):
    np.testing.assert_allclose(run(jamp.cast_fn(fn, f"{level}:float16"), W, X), run(fn, W, X), rtol=0.02, atol=0.005)


def attended(scores, x, w):
    return jax.nn.softmax(scores) @ (x @ w)


# Numbers beyond float16 that are added or selected, and those that make a mean.
def scoped_mask(w, x):
    """A mask of integers, made in one scope, and read as data in another."""
    with jax.named_scope("mask"):
        mask = (x > 0).astype(jnp.float32) * -1e9
    with jax.named_scope("layer"):
        return jax.nn.relu((x @ w) + mask) @ w


NOT_SCALED = {
    "a mask in another scope": scoped_mask,
    "a mask that is selected": lambda w, x: attended(jnp.where(MASK > 0, x @ x.T, -1e9), x, w) @ w,
    "a mask that is added": lambda w, x: attended(x @ x.T + (1 - MASK) * -1e9, x, w) @ w,
    "a mask of one's own": lambda w, x: attended(x @ x.T + (x[:, :4] > 0) * -1e9, x, w) @ w,
    "a mask that is subtracted": lambda w, x: attended(x @ x.T - 1e10 * (1.0 - MASK), x, w) @ w,
    "a mask at hand": lambda w, x: attended(x @ x.T + HIDDEN, x, w) @ w,
    "a mask at hand, selected": lambda w, x: attended(jnp.where(HIDDEN < 0, HIDDEN, x @ x.T), x, w) @ w,
    "an infinite mask": lambda w, x: attended(x @ x.T + np.where(HIDDEN < 0, -np.inf, 0), x, w) @ w,
    "a bound": lambda w, x: jnp.maximum(jnp.minimum(x @ w, 1e9), -1e9) @ w,
    "an infinite bound": lambda w, x: jnp.maximum(x @ w, -jnp.inf) @ w,
    "statistics at hand": lambda w, x: jax.nn.relu(((x - MEAN) / DEVIATION) @ w) @ w,
    "statistics": lambda w, x: jax.nn.relu(((x - 3e5) / 1e5) @ w) @ w,
    "some statistics": lambda w, x: jax.nn.relu((x / np.where(np.arange(16) < 1, DEVIATION, 1.0)) @ w) @ w,
    "there and back": lambda w, x: ((((x @ w) * DEVIATION + MEAN) - MEAN) / DEVIATION) @ w,
    "pixels": lambda w, x: jax.nn.relu((counted(x) / 65535) @ w) @ w,
    "centred pixels": lambda w, x: jax.nn.relu(((2 * counted(x)[:, ::-1] - 32768) * (1 / 65535)) @ w) @ w,
    "seconds": lambda w, x: jax.nn.relu(jnp.sin(2 * jnp.pi * counted(x) / 86400) @ w) @ w,
    "an epsilon": lambda w, x: ((x @ w) / (jnp.abs(x) + 1e-8)) @ w,
    "a carry that begins at a mask": lambda w, x: lax.fori_loop(
        0, 2, lambda i, m: jnp.maximum(m, x @ w), jnp.full(x.shape, -1e30)) @ w,
    "a mean": lambda w, x: ((x @ w) - jnp.mean(jnp.broadcast_to((x @ w)[None], (2000, *x.shape)))) @ w,
    "a small step": lambda w, x: (w - 1e-6 * (x.T @ x)) @ w,
    "roots of widths": lambda w, x: (lambda h: (h / 1024) @ w)((((x @ w) / 1024) @ w) / 1024),
}  # fmt: skip


@mixed_levels
@pytest.mark.parametrize("name", NOT_SCALED)
def test_other_large_numbers_leave_products_in_half(name, level):
    jaxpr = trace(jamp.cast_fn(NOT_SCALED[name], f"{level}:float16"), W, X)
    assert {tuple(dtypes) for dtypes in product_dtypes(jaxpr)} == {tuple(HALF)}


def small(w, x):
    return jnp.tanh(((x * 3e-9) @ w) * 3e8) + 0.5 * x


IN_A_ROW = {
    "one by one": lambda w, x: small(w, small(w, x)),
    "in a loop": lambda w, x: lax.fori_loop(0, 2, lambda i, x: small(w, x), x),
    "in a scan of weights": lambda w, x: lax.scan(lambda x, w: (small(w, x), None), x, jnp.stack([w, w]))[0],
}


@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
@pytest.mark.parametrize("name", IN_A_ROW)
def test_float32_data_is_no_sum_that_a_number_makes_a_mean(name, level):
    """Numbers of the size of data are those of the data, whatever they were added up from."""
    fn = IN_A_ROW[name]
    assert jnp.abs(jax.jit(jamp.cast_fn(fn, f"{level}:float16"))(W, X) - fn(W, X)).max() < 0.02


def layer(w, x):
    return x * jnp.tanh(x @ w[:, 0])[:, None]


EPSILONS = {
    "above and below": lambda w, x: (lambda h: (h + 1e-8) / (h + 1e-8))(jax.nn.relu(layer(w, x))),
    "behind a product": lambda w, x: (lambda h: (h + 1e-8) / (h + 1e-8))(jax.nn.relu(jnp.tanh(x @ w) @ w)),
    "that is computed": lambda w, x: (lambda h, e: (e + h) / (h + e))(
        jax.nn.relu(layer(w, x)), jnp.float32(1e-4) * 1e-4
    ),
    "that is taken off": lambda w, x: (lambda h: (h - 1e-8) / (h - 1e-8))(-jax.nn.relu(layer(w, x))),
}


@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
@pytest.mark.parametrize("name", EPSILONS)
def test_an_epsilon_that_half_takes_for_zero_is_added_in_float32(name, level):
    fn = EPSILONS[name]
    assert jnp.abs(jax.jit(jamp.cast_fn(fn, f"{level}:float16"))(W, X) - 1).max() < 1e-2


@pytest.mark.parametrize("factor", [1e-60, 1e60])
def test_a_float64_program_scales_beyond_float32(factor):
    fn = lambda w, x: ((x * factor) @ w) / factor  # noqa: E731
    policy = "O2:float32,p=float64,o=float64"
    with jax.enable_x64(True):
        w, x = (np.asarray(each, np.float64) for each in (W, X))
        assert product_dtypes(trace(jamp.cast_fn(fn, policy), w, x)) == [["float64"] * 2]
        assert product_dtypes(trace(jamp.cast_fn(lambda w, x: x @ w, policy), w, x)) == [FULL]


def test_arrays_of_any_size_are_looked_at_without_a_word():
    """Where they are cast, summed or compared, NumPy warns of overflows and of what infinities add up to."""
    largest = np.where(np.eye(16) > 0, np.finfo(np.float32).max, -np.inf).astype(np.float32)
    fn = lambda w, x: jnp.tanh((x @ w)[:, None] + largest)  # noqa: E731
    for policy in ("O2:float16", "O2:bfloat16"):
        np.testing.assert_allclose(run(jamp.cast_fn(fn, policy), W, X), run(fn, W, X), atol=0.02)
    with jax.enable_x64(True):
        policy, huge = "O2:float32,p=float64,o=float64", np.full((16, 16), 1e300)
        cast = jamp.cast_fn(lambda w, x: jnp.minimum(x @ w, huge[0]) + huge * 1e-300, policy)
        assert cast(np.float64(W), np.float64(X)[:1]).dtype == np.float64


def test_the_report_says_why():
    report = jamp.report(lambda w, x: (x * 1e6) @ w, W, X, policy="O2:float16")
    (operation,) = [op for op in report.operations if op.primitive == "dot_general"]
    assert operation.rule == "scaled"
    assert "scaled" in str(report)


def test_a_region_in_half_stays_half():
    fn = jamp.half_precision(lambda w, x: ((x * 1e-9) @ w) * 1e9)
    assert product_dtypes(trace(jamp.cast_fn(fn, "O2:float16"), W, X)) == [HALF]
