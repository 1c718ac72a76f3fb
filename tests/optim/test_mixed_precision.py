"""`jamp.mixed_precision`: every policy gets what it needs, and one train step serves them all."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import jamp
from tests.helpers import assert_bitwise_equal, assert_same_spec

TABLE = [
    ("O0", jamp.NoOpLossScale, False),
    ("OD:bfloat16", jamp.NoOpLossScale, False),
    ("O1:bfloat16", jamp.NoOpLossScale, False),
    ("O2:bfloat16", jamp.NoOpLossScale, False),
    ("O3:bfloat16", jamp.NoOpLossScale, True),
    ("OD:float16", jamp.DynamicLossScale, False),
    ("O1:float16", jamp.DynamicLossScale, False),
    ("O2:float16", jamp.DynamicLossScale, False),
    ("O3:float16", jamp.DynamicLossScale, True),
    ("p=f32,c=f16,o=f32", jamp.DynamicLossScale, False),
    ("p=bf16,c=bf16,o=f32", jamp.NoOpLossScale, True),
    ("p=bf16,c=f32,o=f32", jamp.NoOpLossScale, True),
]


@pytest.mark.parametrize("policy, scaler, has_masters", TABLE)
def test_each_policy_gets_what_it_needs(policy, scaler, has_masters):
    policy = jamp.get_policy(policy)
    params = policy.cast_to_param({"w": jnp.ones((4, 2))})
    state = jamp.mixed_precision(optax.adam(1e-3), policy).init(params)
    assert type(jamp.loss_scale(state)) is scaler
    assert isinstance(state.inner_state, jamp.optim.MasterWeightsState) == has_masters
    if scaler is jamp.DynamicLossScale:
        assert jamp.loss_scale(state).loss_scale == 2**15


@pytest.mark.parametrize("policy", [row[0] for row in TABLE])
def test_one_train_step_serves_every_policy(key, policy):
    policy = jamp.get_policy(policy)
    x = jax.random.normal(key, (32, 4))
    y = x @ jnp.array([[1.0], [-1.0], [0.5], [2.0]])
    tx = jamp.mixed_precision(optax.adam(0.1), policy)
    params = policy.cast_to_param({"w": jnp.zeros((4, 1)), "b": jnp.zeros(1)})

    def step(params, opt_state):
        def loss_fn(params, x, y):
            x = x.astype(policy.compute_dtype)
            out = x @ params["w"].astype(x.dtype) + params["b"].astype(x.dtype)
            return ((out.astype(jnp.float32) - y) ** 2).mean()

        loss, grads = jamp.scaled_value_and_grad(loss_fn, opt_state)(params, x, y)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    step = jax.jit(chex.assert_max_traces(step, n=1))
    opt_state, losses = tx.init(params), []
    for _ in range(100):
        new_params, new_state, loss = step(params, opt_state)
        assert_same_spec((new_params, new_state), (params, opt_state))
        params, opt_state = new_params, new_state
        losses.append(float(loss))
    assert losses[-1] < 0.01 * losses[0]
    assert set(jamp.metrics(opt_state)) == {"loss_scale", "grads_finite", "skipped", "consecutive_skipped"}


def test_overrides():
    params = jnp.ones(4, jnp.bfloat16)
    tx = jamp.mixed_precision(optax.sgd(1.0), "O3:bfloat16", loss_scale=jamp.StaticLossScale(8.0), storage="split")
    state = tx.init(params)
    assert jamp.loss_scale(state).loss_scale == 8
    assert state.inner_state.masters.dtype == jnp.int16
    updates, _ = tx.update(jnp.full(4, 8.0), state, params)
    assert (optax.apply_updates(params, updates) == 0).all()


@pytest.mark.parametrize("storage", ["float32", "split"])
def test_skipped_step_leaves_half_parameters_and_masters_alone(storage):
    params = jnp.array([1.0, -0.0, 1e-39], jnp.bfloat16)
    tx = jamp.mixed_precision(optax.adamw(1e-3), "O3:bfloat16", storage=storage)
    state = tx.init(params)
    updates, new_state = jax.jit(tx.update)(jnp.array([1.0, jnp.nan, 1.0]), state, params)
    assert_bitwise_equal(optax.apply_updates(params, updates), params)
    assert_bitwise_equal(new_state.inner_state, state.inner_state)
    assert int(new_state.skipped) == 1


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="O4"):
        jamp.mixed_precision(optax.sgd(1.0), "O4")
    with pytest.raises(ValueError, match="halves"):
        jamp.mixed_precision(optax.sgd(1.0), "O3", storage="halves")
    with pytest.raises(ValueError, match="'dynamic', a number"):
        jamp.mixed_precision(optax.sgd(1.0), "O2", loss_scale="1024")
    with pytest.raises(TypeError, match="expected a loss scale"):
        jamp.mixed_precision(optax.sgd(1.0), "O2", loss_scale=True)
    with pytest.raises(ValueError, match="the policy is 'O3:float16'"):
        jamp.mixed_precision(optax.sgd(1.0), "O3:float16", storage="split")


def test_abort_is_handed_on():
    errors = []
    tx = jamp.mixed_precision(optax.sgd(1.0), "O2:bfloat16", abort_after=1, on_abort=errors.append)
    tx.update({"w": jnp.array(jnp.nan)}, tx.init({"w": jnp.array(1.0)}))
    jax.effects_barrier()
    assert [error.path for error in errors] == ["['w']"]


def test_master_weights_put_inside_by_hand():
    params = jamp.half_params({"w": jnp.ones(3)}, "bfloat16")
    tx = jamp.mixed_precision(jamp.master_weights(optax.sgd(2.0**-12)), "O2:bfloat16")
    state = tx.init(params)
    for _ in range(16):  # Each step is less than the parameters can hold.
        updates, state = jax.jit(tx.update)({"w": jnp.ones(3)}, state, params)
        params = optax.apply_updates(params, updates)
    assert (params["w"] == 1 - 16 * 2.0**-12).all()


def test_a_storage_that_is_none():
    with pytest.raises(ValueError, match="'float32', 'split'"):
        jamp.mixed_precision(optax.sgd(1.0), "O2:bfloat16", storage="half")
