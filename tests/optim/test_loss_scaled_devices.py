"""In `shard_map` both forms skip on all devices where one overflows, with and without tracking of varying axes.

Whole training runs on many devices, under `jit` and `pmap` too, are in `test_devices.py`.
"""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jamp
from tests.helpers import assert_bitwise_equal

N = 4
PARAMS = jnp.arange(8.0)
X = jnp.ones((N, 8)).at[2, 5].set(jnp.inf)  # The third device overflows.


def mesh():
    return jax.make_mesh((N,), ("data",), devices=jax.devices()[:N], axis_types=(AxisType.Auto,))


def optimizer(form, axis_name):
    scaler = jamp.DynamicLossScale(2.0**10, period=1)
    if form == "inner":
        return jamp.loss_scaled(scaler, inner=optax.adam(0.125), axis_name=axis_name)
    return optax.chain(jamp.loss_scaled(scaler, axis_name=axis_name), optax.adam(0.125))


def loss(params, x):
    return (params * x).sum()


def train(step, x_good, x_bad, carry):
    for x in (x_good, x_bad, x_good):
        carry = step(*carry, x)
    return carry


def make_step(tx, mean_over=None):
    def step(params, state, x):
        _, grads = jamp.scaled_value_and_grad(loss, state)(params, x)
        if mean_over is not None:
            grads = jax.lax.pmean(grads, mean_over)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@pytest.fixture(params=["inner", "link"])
def form(request):
    return request.param


def expected(form):
    """The same training on one device, with the mean of the gradients."""
    step = jax.jit(make_step(optimizer(form, None)))
    return train(step, X.at[2, 5].set(1.0).mean(0), X.mean(0), (PARAMS, optimizer(form, None).init(PARAMS)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_of_replicated_parameters(form, check_vma):
    tx = optimizer(form, "data")
    # With check_vma JAX sums the gradients of replicated parameters over the devices by itself.
    step = make_step(tx, mean_over=None if check_vma else "data")
    specs = dict(in_specs=(P(), P(), P("data")), out_specs=(P(), P()))
    step = jax.jit(jax.shard_map(step, mesh=mesh(), **specs, check_vma=check_vma))
    weight = 1 / N if check_vma else 1
    params, state = train(step, X.at[2, 5].set(1.0) * weight, X * weight, (PARAMS, tx.init(PARAMS)))
    assert_bitwise_equal((params, state), expected(form))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_of_sharded_parameters_skips_where_gradients_are_finite(form, check_vma):
    # Every device has its own slice of the parameters, and only one of them sees the infinity.
    tx = optimizer(form, "data")
    specs = jax.tree.map(lambda x: P("data") if x.ndim else P(), tx.init(PARAMS))
    specs = dict(in_specs=(P("data"), specs, P("data")), out_specs=(P("data"), specs))
    step = jax.jit(jax.shard_map(make_step(tx), mesh=mesh(), **specs, check_vma=check_vma))
    params, state = train(step, X.at[2, 5].set(1.0).mean(0), X.mean(0), (PARAMS, tx.init(PARAMS)))
    assert_bitwise_equal((params, state), expected(form))


def test_a_flag_of_one_device_counts_on_all():
    tx = jamp.loss_scaled(jamp.StaticLossScale(2.0), inner=optax.sgd(1.0), axis_name="data")
    update = jax.vmap(lambda flag: tx.update(PARAMS, tx.init(PARAMS), grads_finite=flag)[0], axis_name="data")
    assert (update(jnp.array([True, False])) == 0).all()
