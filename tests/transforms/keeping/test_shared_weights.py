"""Gradients of weights that are read many times: their cotangents add up in float32, as they do without the transform.

In half, adding 1 again and again ends at 256 (bfloat16) or 2048 (float16).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import LEVELS, both_halves, casts_to, check, find, run, trace

STEPS = 3000
ONES = jnp.ones((STEPS, 2, 4))
WEIGHT = jnp.eye(4)


def scanned(w, xs):
    return lax.scan(lambda _, x: (_, x @ w), 0, xs)[1]


def with_bias(w, xs):
    return lax.scan(lambda _, x: (_, x @ WEIGHT + w[0]), 0, xs)[1]


def through_a_call(w, xs):
    layer = jax.jit(lambda w, x: x @ w)
    return lax.scan(lambda _, x: (_, layer(w, x)), 0, xs)[1]


def in_a_loop(w, xs):
    return lax.fori_loop(0, len(xs), lambda i, total: total + xs[i] @ w, jnp.zeros((2, 4)))


def nested(w, xs):
    inner = lambda _, x: (_, x @ w)  # noqa: E731
    return lax.scan(lambda _, x: (_, lax.scan(inner, 0, x)[1]), 0, xs.reshape(-1, 60, 2, 4))[1]


def rematerialized(w, xs):
    return lax.scan(lambda _, x: (_, jax.checkpoint(jnp.matmul)(x, w)), 0, xs)[1]


def of_stacked_weights(w, xs):
    """The inner loop's weight is another one in each iteration of the outer loop."""
    return lax.scan(lambda _, w: (_, scanned(w, xs)), 0, jnp.stack([w, w]))[1] / 2


def of_stacked_weights_in_calls(w, xs):
    return lax.scan(lambda _, w: (_, jax.checkpoint(jax.jit(scanned))(w, xs)), 0, jnp.stack([w, w]))[1] / 2


FORMS = [scanned, with_bias, through_a_call, in_a_loop, nested, rematerialized]
STACKED = [of_stacked_weights, of_stacked_weights_in_calls]


@pytest.mark.nightly
@pytest.mark.parametrize("loop", FORMS)
@both_halves
@pytest.mark.parametrize("level", LEVELS)
def test_three_thousand_steps_sum_exactly(loop, level, half):
    loss = lambda w: jnp.sum(jamp.cast_fn(loop, f"{level}:{half}")(w, ONES))  # noqa: E731
    gradient = run(jax.grad(loss), WEIGHT)
    if loop is with_bias:
        gradient = gradient[0]
    np.testing.assert_array_equal(gradient, np.full(gradient.shape, 2.0 * STEPS, np.float32))


@pytest.mark.parametrize("policy", ["O2:bfloat16", "O2:bfloat16,residuals=all"])
def test_a_gradient_inside_of_the_function_sums_exactly(policy):
    gradient = jamp.cast_fn(jax.grad(lambda w, xs: jnp.sum(scanned(w, xs))), policy)
    np.testing.assert_array_equal(run(gradient, WEIGHT, ONES), np.full((4, 4), 2.0 * STEPS, np.float32))


def test_unrolled_steps_sum_exactly():
    def unrolled(w, xs):
        return sum(jnp.sum(x @ w) for x in xs)

    gradient = run(jax.grad(jamp.cast_fn(unrolled, "O2:bfloat16")), WEIGHT, 1.5 * ONES[:120])
    np.testing.assert_array_equal(gradient, np.full((4, 4), 360.0, np.float32))


def test_a_weight_is_cast_once_and_outside_of_the_loop():
    jaxpr = trace(jamp.cast_fn(scanned, "O2:bfloat16"), WEIGHT, ONES)
    (loop,) = find(jaxpr, "scan")
    casts = [eqn for eqn in casts_to(jaxpr, jnp.bfloat16) if eqn.invars[0].aval.shape == (4, 4)]
    assert len(casts) == 1
    assert casts[0] not in find(loop.params["jaxpr"], "convert_element_type")


@pytest.mark.parametrize("readers", [3, 20])
def test_all_readers_share_one_cast(readers):
    def fn(w, x):
        for _ in range(readers):
            x = jnp.tanh(x @ w)
        return x

    jaxpr = trace(jamp.cast_fn(fn, "O2:bfloat16"), WEIGHT, ONES[0])
    assert len([eqn for eqn in casts_to(jaxpr, jnp.bfloat16) if eqn.invars[0].aval.shape == (4, 4)]) == 1


@pytest.mark.parametrize("policy", ["O2:bfloat16", "O2:float16", "O1:bfloat16"])
def test_forward_and_higher_derivatives_of_such_a_loop(policy):
    def fn(w, xs):
        step = lambda h, x: (jnp.tanh(x @ w + h @ w), None)  # noqa: E731
        return lax.scan(step, jnp.zeros((2, 4)), xs)[0]

    w, xs = jax.random.normal(jax.random.key(0), (4, 4)) / 4, jax.random.normal(jax.random.key(1), (6, 2, 4))
    check(fn, w, xs, policy=policy)
    check(lambda w, xs: jax.jvp(lambda w: fn(w, xs), (w,), (WEIGHT,))[1], w, xs, policy=policy)
    cast = jamp.cast_fn(fn, policy)
    forward = jax.jacfwd(lambda w: jnp.sum(cast(w, xs)))(w)
    np.testing.assert_allclose(forward, jax.grad(lambda w: jnp.sum(cast(w, xs)))(w), atol=0.1)
    of_float32 = jax.hessian(lambda w: jnp.sum(fn(w, xs)))(w)
    np.testing.assert_allclose(jax.hessian(lambda w: jnp.sum(cast(w, xs)))(w), of_float32, atol=0.1)
    assert jnp.abs(of_float32).max() > 1


def _forward_over_reverse(gradient):
    return lambda w: jax.jvp(gradient, (w,), (jnp.ones_like(w),))[1]


def _reverse_over_reverse(gradient):
    return lambda w: jax.vjp(gradient, w)[1](jnp.ones_like(w))[0]


# Reverse over reverse, JAX takes the copy out of a loop, and its cotangents add up in half.
DERIVED = [(loop, _forward_over_reverse) for loop in FORMS + STACKED] + [
    (loop, _reverse_over_reverse) for loop in STACKED
]


@pytest.mark.each_case
@pytest.mark.parametrize(("loop", "derive"), DERIVED)
def test_second_derivatives_are_exact(loop, derive):
    """The half copy that a loop reads has the derivatives of the weight, the second one too."""

    def second(fn):
        return run(derive(jax.grad(lambda w: jnp.sum(fn(w, ONES[:60]) ** 2))), WEIGHT)

    np.testing.assert_array_equal(second(jamp.cast_fn(loop, "O2:bfloat16")), second(loop))


@pytest.mark.parametrize("loop", [scanned, of_stacked_weights])
def test_a_batch_of_weights(loop):
    gradient = jax.vmap(jax.grad(lambda w: jnp.sum(jamp.cast_fn(loop, "O2:bfloat16")(w, ONES[:600]))))
    np.testing.assert_array_equal(run(gradient, jnp.stack([WEIGHT, 2 * WEIGHT])), np.full((2, 4, 4), 1200.0))


@pytest.mark.parametrize("loop", [False, True], ids=["unrolled", "scan"])
def test_tangents_that_are_read_many_times_are_transposed(loop):
    @jax.custom_jvp
    def fn(x, ws):
        return x @ ws[0]

    @fn.defjvp
    def _(primals, tangents):
        (x, ws), (dx, _) = primals, tangents
        products = lax.scan(lambda c, w: (c, dx @ w), 0, ws)[1] if loop else jnp.stack([dx @ w for w in ws])
        return fn(x, ws), products.sum(0)

    x, ws = jnp.ones((2, 4)), jnp.stack([WEIGHT] * 9)
    for level in LEVELS:
        gradient = jax.grad(lambda x: jamp.cast_fn(fn, f"{level}:float16")(x, ws).sum())(x)  # noqa: B023
        np.testing.assert_array_equal(gradient, jnp.full((2, 4), 9))
