"""Finding the loss scale in an optax state, and differentiating and reporting with it."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jamp
from tests.helpers import assert_bitwise_equal, spec

PARAMS = {"w": jnp.array([1.0, 2.0]), "b": jnp.float32(3.0)}
SCALER = jamp.DynamicLossScale(2.0**10)
INNER = jamp.loss_scaled(SCALER, inner=optax.adam(0.1))

STATES = {
    "inner": INNER,
    "chain": optax.chain(jamp.loss_scaled(SCALER), optax.sgd(0.1)),
    "nested chain": optax.chain(optax.identity(), optax.chain(optax.identity(), optax.chain(INNER))),
    "named chain": optax.named_chain(("scale", jamp.loss_scaled(SCALER)), ("sgd", optax.sgd(0.1))),
    "masked": optax.masked(INNER, {"w": True, "b": False}),
    "partition": optax.partition({"a": INNER, "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}),
    "inject": optax.inject_hyperparams(lambda lr: jamp.loss_scaled(SCALER, optax.sgd(lr)))(lr=0.1),
    "multisteps inside": jamp.loss_scaled(SCALER, optax.MultiSteps(optax.adam(0.1), 2)),
    "multisteps outside": optax.MultiSteps(INNER, 2),
    "inside a dict": optax.GradientTransformation(lambda p: {"model": INNER.init(p), "step": 0}, None),
}


@pytest.mark.parametrize("tx", STATES.values(), ids=list(STATES))
def test_finds_the_scale_however_deep(tx):
    state = tx.init(PARAMS)
    assert jamp.loss_scale(state) == SCALER
    assert set(jamp.metrics(state)) == {"loss_scale", "grads_finite", "skipped", "consecutive_skipped"}


@pytest.mark.parametrize("scaler", [SCALER, jamp.StaticLossScale(2.0), jamp.NoOpLossScale()])
def test_a_loss_scale_is_itself(scaler):
    assert jamp.loss_scale(scaler) is scaler
    assert jamp.loss_scale(jamp.loss_scaled(scaler).init(PARAMS)) == scaler


@pytest.mark.parametrize("state", [optax.adam(0.1).init(PARAMS), optax.EmptyState(), (), None, 3.0])
def test_none_is_an_error(state):
    for find in (jamp.loss_scale, jamp.metrics, lambda s: jamp.scaled_value_and_grad(jnp.sum, s)):
        with pytest.raises(ValueError, match=r"no loss scale.*jamp.loss_scaled\(jamp.DynamicLossScale"):
            find(state)


def test_several_are_an_error_that_tells_where():
    both = {"a": INNER, "b": INNER}
    state = optax.partition(both, {"w": "a", "b": "b"}).init(PARAMS)
    with pytest.raises(ValueError, match="2 loss scales") as error:
        jamp.loss_scale(state)
    assert "opt_state.inner_states['a'].inner_state\n" in str(error.value)
    assert "opt_state.inner_states['b'].inner_state" in str(error.value)
    assert jamp.loss_scale(state.inner_states["a"]) == SCALER


@pytest.mark.parametrize("scaler", [SCALER, jamp.StaticLossScale(8.0), jamp.NoOpLossScale()])
def test_metrics_are_strong_scalar_arrays(scaler):
    state = jamp.loss_scaled(scaler, optax.sgd(0.1)).init(PARAMS)
    metrics = jax.jit(jamp.metrics)(state)
    assert {name: spec(value) for name, value in metrics.items()} == {
        "loss_scale": ((), jnp.float32, False),
        "grads_finite": ((), jnp.bool_, False),
        "skipped": ((), jnp.int32, False),
        "consecutive_skipped": ((), jnp.int32, False),
    }


@pytest.mark.parametrize("tx", STATES.values(), ids=list(STATES))
def test_sets_the_scale_and_nothing_else(tx):
    before = tx.init(PARAMS)
    after = jax.jit(jamp.set_loss_scale)(before, jnp.float32(64.0))
    assert jamp.loss_scale(after).loss_scale == 64.0
    assert_bitwise_equal(jamp.set_loss_scale(after, SCALER), before)


def test_sets_a_whole_scaler_and_refuses_what_it_cannot_set():
    state = jamp.loss_scaled(jamp.NoOpLossScale(), optax.sgd(0.1)).init(PARAMS)
    static = jamp.StaticLossScale(4.0)
    assert jamp.loss_scale(jamp.set_loss_scale(state, static)) == static
    with pytest.raises(TypeError, match=r"NoOpLossScale\(\) has no scale to set"):
        jamp.set_loss_scale(state, 4.0)
    with pytest.raises(ValueError, match="no loss scale"):
        jamp.set_loss_scale(optax.sgd(0.1).init(PARAMS), 4.0)
    with pytest.raises(ValueError, match="loss_scale"):
        jamp.set_loss_scale(INNER.init(PARAMS), -1.0)


def loss(params, x):
    return (params["w"] * x).sum() + params["b"]


def test_loss_is_true_and_gradients_are_scaled():
    state = INNER.init(PARAMS)
    value, grads = jamp.scaled_value_and_grad(loss, state)(PARAMS, x=2.0)
    expected_value, expected = jax.value_and_grad(loss)(PARAMS, x=2.0)
    assert value == expected_value
    assert_bitwise_equal(grads, SCALER.scale(expected))


def test_gradients_keep_the_dtype_of_the_parameters():
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    _, grads = jamp.scaled_value_and_grad(loss, INNER.init(half))(half, 1.0)
    assert grads["w"].dtype == jnp.bfloat16 and grads["w"].tolist() == [2.0**10] * 2


def test_argnums_and_aux():
    def with_aux(params, x):
        return loss(params, x), "aux"

    (value, aux), (gx,) = jamp.scaled_value_and_grad(with_aux, INNER.init(PARAMS), (1,), True)(PARAMS, 2.0)
    assert (value, aux, gx) == (9.0, "aux", 3.0 * 2**10)


def test_integer_parameters_are_named():
    with pytest.raises(TypeError, match=r"argument 0\['n'\]: int32\[\]"):
        jamp.scaled_value_and_grad(lambda p: p["w"], SCALER)({"w": 1.0, "n": jnp.int32(1)})
    allowed = jamp.scaled_value_and_grad(lambda p: p["w"] * p["n"], SCALER, allow_int=True)
    value, grads = allowed({"w": 1.0, "n": jnp.int32(1)})
    assert (value, grads["w"], grads["n"].dtype) == (1, 2.0**10, jax.dtypes.float0)
