"""Whole train steps inside of the transform: gradients and updates reach the parameters in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp
from tests.transforms.harness import assert_products_in, find, o2, run, trace

ONES = jnp.ones((4, 4))
X = jax.random.normal(jax.random.key(1), (2, 4))
BATCHES = jnp.stack([X, -X, 2 * X])

at_mixed_levels = pytest.mark.parametrize("policy", ["O1:bfloat16", "O2:bfloat16"])


def gradient(params, x):
    return jax.grad(lambda params: jnp.mean((x @ params) ** 2))(params)


def sgd(params, x):
    return params - 2**-12 * gradient(params, x)  # The update is smaller than the spacing of bfloat16 at one.


def sgd_epoch(params, xs):
    return lax.scan(lambda params, x: (sgd(params, x), None), params, xs)[0]


def jitted_epoch(params, xs):
    step = jax.jit(lambda params, x: (sgd(params, x), None))
    return lax.scan(step, params, xs)[0]


def adam_epoch(params, xs):
    tx = optax.adam(1e-4)

    def step(i, carry):
        params, state = carry
        updates, state = tx.update(gradient(params, xs[i]), state, params)
        return optax.apply_updates(params, updates), state

    return lax.fori_loop(0, len(xs), step, (params, tx.init(params)))[0]


EPOCHS = [(sgd, X), (sgd_epoch, BATCHES), (jitted_epoch, BATCHES), (adam_epoch, BATCHES)]


@at_mixed_levels
@pytest.mark.parametrize(
    ("train", "data"), [(sgd, X), (sgd_epoch, BATCHES), (adam_epoch, BATCHES)], ids=["step", "scan", "adam"]
)
@pytest.mark.filterwarnings("ignore:An optimizer runs inside")  # It does, and works.
def test_updates_smaller_than_half_can_tell_arrive(train, data, policy):
    cast = jamp.cast_fn(train, policy)
    assert_products_in(trace(cast, ONES, data), jnp.bfloat16)
    moved, expected = run(cast, ONES, data) - ONES, run(train, ONES, data) - ONES
    np.testing.assert_allclose(moved, expected, atol=0.02 * float(np.abs(expected).max()))


def test_gradients_accumulate_over_microbatches_in_float32():
    def accumulate(params, xs):
        return lax.scan(lambda total, x: (total + gradient(params, x), None), jnp.zeros_like(params), xs)[0]

    (scan,) = find(trace(o2(accumulate), ONES, BATCHES), "scan")
    assert scan.outvars[0].aval.dtype == jnp.float32


@at_mixed_levels
def test_an_average_of_parameters_is_exact(policy):
    def average(params, mean):
        return 0.999 * mean + 0.001 * params

    params = jnp.full(4, 1 + 2**-14)
    np.testing.assert_array_equal(run(jamp.cast_fn(average, policy), params, params), run(average, params, params))
