"""Train steps that donate their state delete nothing that the caller still holds, and donate nothing twice."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jamp

PARAMS = jnp.ones(4)


def donating(tx):
    return jax.jit(tx.update, donate_argnums=1)


@pytest.mark.parametrize("scaler", [jamp.DynamicLossScale.preset("mxnet"), jamp.DynamicLossScale.preset("megatron")])
def test_a_scaler_by_hand(scaler):
    def step(w, scaler):
        return w * scaler.loss_scale, scaler.adjust(jamp.all_finite(w))

    step = jax.jit(step, donate_argnums=(0, 1))
    w, scaler = step(*step(jnp.ones(4), scaler))
    w, scaler = step(w, scaler.set(1024.0))
    assert scaler.loss_scale == 1024


@pytest.mark.parametrize("new", [1024.0, jamp.DynamicLossScale.preset("mxnet", loss_scale=1024.0)])
def test_a_scale_set_by_hand(new):
    tx = jamp.loss_scaled(jamp.DynamicLossScale.preset("mxnet"), inner=optax.adam(1.0))
    for _ in range(2):  # The second round uses what the first must not have deleted.
        state = jamp.set_loss_scale(tx.init(PARAMS), new)
        _, state = donating(tx)(PARAMS, state, PARAMS)
        assert jamp.loss_scale(state).loss_scale == 1024


def test_metrics_outlive_the_state():
    tx = jamp.loss_scaled(jamp.DynamicLossScale(8.0), inner=optax.sgd(1.0))
    state = tx.init(PARAMS)
    metrics = jamp.metrics(state)
    donating(tx)(PARAMS, state, PARAMS)
    assert metrics["loss_scale"] == 8


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_the_key_of_stochastic_rounding(make_key):
    params = jnp.ones(4, jnp.bfloat16)
    tx = jamp.stochastic_rounding(optax.sgd(1.0), make_key(0))
    for _ in range(2):
        donating(tx)(params, tx.init(params), params)
