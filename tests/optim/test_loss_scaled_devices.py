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


@pytest.mark.parametrize("check_vma", [True, False])
def test_abort_names_the_leaf_that_is_bad_on_another_device(check_vma):
    errors = []
    params = {"a": jnp.ones(2), "w": jnp.ones(2)}
    tx = jamp.loss_scaled(
        jamp.StaticLossScale(2.0), inner=optax.sgd(1.0), axis_name="data", abort_after=1, on_abort=errors.append
    )

    def step(state, x):
        return tx.update({"a": x[0], "w": x[0] / (jax.lax.axis_index("data") - 2)}, state, params)[1]

    step = jax.jit(jax.shard_map(step, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma))
    jax.block_until_ready(step(tx.init(params), jnp.ones((N, 2))))
    jax.effects_barrier()
    assert [error.path for error in errors] == ["['w']"] * N


def test_devices_that_do_not_agree_are_told_how():
    tx = jamp.loss_scaled(jamp.StaticLossScale(2.0), inner=optax.adam(1.0))
    update = jax.shard_map(
        lambda g: tx.update(g[0], tx.init(PARAMS), PARAMS)[0], mesh=mesh(), in_specs=P("data"), out_specs=P()
    )
    with pytest.raises(TypeError) as info:
        jax.eval_shape(update, X)
    assert any("axis_name='data'" in note for note in info.value.__notes__)


def test_complex_gradients_are_averaged():
    average = lambda g: jamp.average_gradients({"z": g, "n": 3}, "data", "bfloat16")  # noqa: E731
    means = jax.vmap(average, axis_name="data", out_axes={"z": 0, "n": None})(jnp.array([1 + 1j, 3 + 3j]))
    assert means["z"].tolist() == [2 + 2j, 2 + 2j] and means["z"].dtype == jnp.complex64


@pytest.mark.parametrize("check_vma", [True, False])
def test_sums_over_devices_are_not_averaged_again(check_vma):
    def grads_of(params, x):
        return jamp.average_gradients({"w": jax.grad(loss)(params, x[0])}, "data")

    mapped = jax.shard_map(grads_of, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)
    if not check_vma:
        assert (mapped(PARAMS, jnp.ones((N, 8)))["w"] == 1).all()
        return
    with pytest.raises(ValueError, match=r"of 'data', .*: \['w'\].*jax.lax.pcast\(params, 'data', to=\"varying\"\)"):
        mapped(PARAMS, jnp.ones((N, 8)))
