"""Numbers beyond float16 that the program computes from what it writes do what written ones do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from jamp.transforms._traced import Traced
from tests.transforms.harness import W, X, mixed_levels, product_dtypes, run, trace

HALF, FULL = ["float16"] * 2, ["float32"] * 2
V = W.T / 2


def inside(change):
    """A program that changes data between two layers to something of its own size."""
    return lambda w, x: jnp.tanh(change(x @ w) @ V)


def there_and_back(number):
    return inside(lambda h: (h * number()) / number())


def factorial(n):
    return jnp.prod(jnp.arange(1.0, n + 1))


@jax.custom_jvp
def scaled(h, by):
    return h * by


scaled.defjvp(lambda primals, tangents: (scaled(*primals), tangents[0] * primals[1]))

# Which of these half took for infinity, or for zero, and which it merely rounded, is not told apart.
NUMBERS = {
    "exp": lambda: jnp.exp(14.0),
    "exp of a negative number": lambda: jnp.exp(-20.0),
    "power": lambda: jnp.power(10.0, 6),
    "power of an array": lambda: jnp.float32(10) ** 6,
    "product": lambda: jnp.float32(1000) * 1000,
    "square": lambda: jnp.square(1000.0),
    "array": lambda: jnp.ones(16) * 1e3 * 1e3,
    "cumulative product": lambda: jnp.cumprod(jnp.full(6, 10.0))[-1],
    "sum": lambda: jnp.sum(jnp.ones((1024,))) * 1024,
    "contracted": lambda: jnp.ones(1000) @ jnp.full(1000, 100.0),
    "integer": lambda: jnp.int32(10) ** 6,
    "product of a shape": lambda: jnp.prod(jnp.array([1000, 500])).astype(jnp.float32),
    "in a function": lambda: jax.jit(lambda speed: jnp.square(speed))(299.792458),
    "angle": lambda: jnp.deg2rad(1.0) ** 4,
    "root of the smallest": lambda: jnp.sqrt(jnp.finfo(jnp.float32).tiny),
    "thermal energy": lambda: 1 / (jnp.float32(8.617e-5) * 0.1),
    "gamma": lambda: jax.scipy.special.factorial(11.0),
    "factorial": lambda: 1 / factorial(12),
    "integer factorial": lambda: 1 / jnp.prod(jnp.arange(1, 11)),
    "chosen": lambda: jnp.where(jnp.arange(16) > 3, jnp.exp(13.0), jnp.exp(12.0)),
}


@pytest.mark.in_turns(3)
@mixed_levels
@pytest.mark.parametrize("name", NUMBERS)
def test_data_scaled_by_a_computed_number(name, level):
    fn = there_and_back(NUMBERS[name])

    def loss(fn):
        return lambda w: jnp.mean(fn(w, X) ** 2)

    cast = jamp.cast_fn(fn, f"{level}:float16")
    np.testing.assert_allclose(run(cast, W, X), run(fn, W, X), rtol=0.01, atol=0.005)
    actual, expected = run(jax.grad(loss(cast)), W), run(jax.grad(loss(fn)), W)
    np.testing.assert_allclose(actual, expected, atol=0.01 * np.abs(expected).max())


@mixed_levels
@pytest.mark.parametrize("name", NUMBERS)
def test_layers_around_it_stay_half(name, level):
    dtypes = product_dtypes(trace(jamp.cast_fn(there_and_back(NUMBERS[name]), f"{level}:float16"), W, X))
    assert dtypes == [HALF, *([FULL] if name == "contracted" else []), HALF] or dtypes[::2] == [HALF, FULL]


PLACES = {
    "argument of a function": inside(lambda h: jax.jit(lambda h, s: h * s**2 / 1e8)(h, 1e4)),
    "made in a function": inside(lambda h: jax.jit(lambda h: h * (jnp.float32(1e3) * 1e3 * 1e3))(h) * 1e-9),
    "made in a scan": lambda w, x: lax.scan(
        lambda h, _: (jnp.tanh((h @ w) * jnp.square(1e3) / jnp.square(1e3)), None), x, None, length=3)[0],
    "read in a scan": lambda w, x: (lambda s: lax.scan(
        lambda h, _: (jnp.tanh((h @ w) * s / s), None), x, None, length=3)[0])(jnp.exp(13.0)),
    "scales a carry": lambda w, x: (lambda s: lax.scan(
        lambda h, _: (jnp.tanh((h / s) @ w) * s, None), x * s, None, length=3)[0] / s)(jnp.exp(13.0)),
    "carried": lambda w, x: lax.scan(
        lambda c, _: ((jnp.tanh((c[0] @ w) * c[1] / c[1]), c[1]), None), (x, jnp.exp(13.0)), None, length=3)[0][0],
    "one of two scales": inside(lambda h: jnp.where(h > 0, h * jnp.exp(13.0), h * jnp.exp(12.0)) * jnp.exp(-13.0)),
    "scanned over": inside(lambda h: lax.scan(
        lambda h, s: ((h * s) * (1 / s), None), h, jnp.cumprod(jnp.full((6, 2, 1), 10.0), 0)[3:, 0])[0]),
    "stacked": inside(lambda h: h * jnp.sum(lax.scan(
        lambda c, _: (c, c * jnp.arange(1.0, 3.0) * 1e3), 1e3, None, length=2)[1]) / 6e6),
    "an exponent from outside": inside(lambda h: jax.jit(lambda h, t: h * jnp.exp(t * jnp.log(10.0)))(h, 7.0) * 1e-7),
    "returned": inside(lambda h: h * jnp.exp(jax.jit(lambda t: t + 10)(4.0)) * jnp.exp(-14.0)),
    "converted in a function": inside(lambda h: jax.jit(lambda h, n: h * n.astype(jnp.float32))(h, 10**7) * 1e-7),
    "operand of a cond": inside(lambda h: lax.cond(
        h[0, 0] < 9, lambda h, s: h * s, lambda h, s: h / s, h, jnp.exp(13.0)) * jnp.exp(-13.0)),
    "result of a cond": inside(lambda h: h * lax.cond(h[0, 0] < 9, jnp.square, jnp.negative, jnp.float32(1e3)) * 1e-6),
    "mapped": inside(jax.vmap(lambda h: (h * jnp.power(10.0, 7)) * jnp.power(10.0, -7))),
    "beside what is mapped": inside(lambda h: jax.vmap(lambda h, s: (h * s) / s, (0, None))(h, jnp.power(10.0, 7))),
    "in a checkpoint": inside(lambda h: jax.checkpoint(lambda h, s: (h * s) * (1 / s))(h, jnp.exp(15.0))),
    "in a function with a rule": inside(lambda h: scaled(h, jnp.exp(14.0)) * jnp.exp(-14.0)),
    "a series": inside(lambda h: sum(h * (1 / factorial(k)) * factorial(k) for k in range(9, 12)) / 3),
}  # fmt: skip


@mixed_levels
@pytest.mark.parametrize("name", PLACES)
def test_computed_numbers_go_anywhere(name, level):
    fn = PLACES[name]
    np.testing.assert_allclose(run(jamp.cast_fn(fn, f"{level}:float16"), W, X), run(fn, W, X), rtol=0.02, atol=0.005)


MASK = jnp.tril(jnp.ones((4, 4)))


def attended(scores, x, w):
    return jax.nn.softmax(scores) @ (x @ w) @ w


def causal():
    return jnp.arange(4)[:, None] >= jnp.arange(4)


def rotated(h, base):
    angles = jnp.arange(4.0)[:, None] * base ** (-jnp.arange(8.0) / 8)
    return h[:, :8] * jnp.cos(angles) - h[:, 8:] * jnp.sin(angles)


NOT_SCALED = {
    "a selected mask": lambda w, x: attended(jnp.where(MASK > 0, x @ x.T, jnp.float32(-1e4) * 1e5), x, w),
    "an infinite mask": lambda w, x: attended(jnp.where(MASK > 0, x @ x.T, -jnp.inf * jnp.ones(())), x, w),
    "half of the smallest": lambda w, x: attended(
        jnp.where(causal(), x @ x.T, jnp.float32(jnp.finfo(jnp.float32).min) / 2), x, w),
    "an added mask": lambda w, x: attended(x @ x.T + (1 - MASK) * (jnp.float32(-1e4) * 100), x, w),
    "a mask of one's own": lambda w, x: attended(x @ x.T + (1 - (x[:, :4] > 0)) * (jnp.float32(-1e4) * 100), x, w),
    "a mask made of places": lambda w, x: attended(
        x @ x.T + jnp.minimum(jnp.arange(4)[:, None] - jnp.arange(4), 0) * 1e9, x, w),
    "a mask made of ones": lambda w, x: attended(x @ x.T + (1 - jnp.tril(jnp.ones((4, 4)))) * (-1e3 * 1e6), x, w),
    "a mask from a function": lambda w, x: attended(
        jax.jit(lambda s, v: jnp.where(causal(), s, v * 10.0))(x @ x.T, -1e8), x, w),
    "a bound": lambda w, x: lax.fori_loop(
        0, 2, lambda i, m: jnp.maximum(m, x @ w), jnp.full(x.shape, -1e10) * 1e5) @ w,
    "an epsilon": lambda w, x: ((x @ w) / (jnp.abs(x) + jnp.float32(1e-4) ** 2)) @ w,
    "a root": lambda w, x: ((x @ w) * (1 / jnp.sqrt(64.0))) @ w,
    "rotary embeddings": lambda w, x: rotated(x @ w, 10000.0) @ w[:8],
    "rotary embeddings of long texts": lambda w, x: rotated(x @ w, 500000.0) @ w[:8],
    "sinusoids": lambda w, x: ((x @ w)[:, :8] + jnp.sin(
        jnp.arange(4.0)[:, None] * jnp.exp(jnp.arange(8.0) * (-jnp.log(10000.0) / 8)))) @ w[:8],
    "undone before it is used": lambda w, x: ((x @ w) * (jnp.exp(14.0) * jnp.exp(-14.0))) @ w,
}  # fmt: skip


@mixed_levels
@pytest.mark.parametrize("name", NOT_SCALED)
def test_masks_tables_and_roots_leave_products_in_half(name, level):
    jaxpr = trace(jamp.cast_fn(NOT_SCALED[name], f"{level}:float16"), W, X)
    assert {tuple(dtypes) for dtypes in product_dtypes(jaxpr)} == {tuple(HALF)}


def test_bfloat16_holds_such_numbers():
    for number in (NUMBERS["exp"], NUMBERS["factorial"]):
        assert (
            product_dtypes(trace(jamp.cast_fn(there_and_back(number), "O2:bfloat16"), W, X)) == [["bfloat16"] * 2] * 2
        )


@mixed_levels
def test_a_computed_mask_is_cast_as_a_written_one(level):
    def masked(number):
        return lambda w, x: (jax.nn.relu(jnp.where(x > 0, x @ w, number())) + jnp.where(x > 0, x @ w, number())) @ w

    written, computed = (jamp.cast_fn(masked(n), f"{level}:float16") for n in (lambda: -1e9, lambda: jnp.negative(1e9)))
    np.testing.assert_array_equal(run(computed, W, X), run(written, W, X))


@mixed_levels
@pytest.mark.parametrize("epsilon", [lambda: jnp.float32(1e-4) ** 2, lambda: jnp.sqrt(1e-16), lambda: jnp.exp(-18.42)])
def test_computed_epsilons(epsilon, level):
    """Roots are as large at zero as in float32, and so is their derivative; quotients are as with a written number."""

    def roots(w):
        h = jnp.zeros_like(X) @ w
        return jnp.sum(jnp.sqrt(h * h + epsilon()))

    cast = jamp.cast_fn(roots, f"{level}:float16")
    np.testing.assert_allclose(run(cast, W), run(roots, W), rtol=1e-3)
    np.testing.assert_array_equal(run(jax.grad(cast), W), 0)

    def quotients(w, x):
        h = x @ w
        return h / (jnp.abs(h) + epsilon()) + h / jnp.maximum(jnp.linalg.norm(h), epsilon())

    small = X * 1e-3
    np.testing.assert_allclose(
        run(jamp.cast_fn(quotients, f"{level}:float16"), W, small), run(quotients, W, small), rtol=0.02, atol=1e-3
    )


def plans_of_layers(layer):
    """The plans of four calls of one function, each with another number; the first of them is given an argument."""

    def net(w, x):
        for index in range(4):
            x = layer(x, w, 0.07 * (index + 1))
        return x

    steps = Traced(net, (W, X.astype(jnp.float16)), {}).plan(jamp.get_policy("O2:float16")).steps
    return [id(plan) for step in steps for plan in step.plans]


@pytest.mark.parametrize(
    ("scale", "count"),
    [
        (lambda rate: rate, 2),
        (lambda rate: 1 - jnp.sqrt(rate), 2),
        (lambda rate: jax.jit(jnp.square)(rate) / 2, 2),
        (lambda rate: rate * 1e5 * 1e2, 4),  # Half holds none of these.
        (lambda rate: 1e-6 / rate, 4),
    ],
)
def test_layers_that_are_given_several_numbers_share_a_plan(scale, count):
    layer = jax.jit(lambda h, w, rate: (jnp.tanh(h @ w) * scale(rate)).astype(jnp.float16))
    plans = plans_of_layers(layer)
    assert len(plans) == 4
    assert len(set(plans)) == count


@mixed_levels
@pytest.mark.parametrize("compare", [lax.gt, lax.ge, lax.eq, lax.max], ids=lambda fn: fn.__name__)
def test_numbers_are_compared_with_zero(compare, level):
    """`4.0 > 0`, as densities write it, holds no variable: looking for rectified values ended in a TypeError."""

    def program(x, w):
        number = compare(np.float32(4.0), np.float32(0.0)).astype(jnp.float32)
        return jnp.sum(number * jnp.maximum(x @ w, 0))

    x, w = jnp.ones((4, 8)), jnp.ones((8, 8))
    expected = jax.grad(program)(x, w)
    np.testing.assert_array_equal(jax.grad(jamp.cast_fn(program, f"{level}:bfloat16"))(x, w), expected)
