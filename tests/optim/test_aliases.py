"""What every wrapper promises, for the optimizers of optax: a table of optimizers against common contracts."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from tests.helpers import assert_bitwise_equal, assert_same_spec

OPTIMIZERS = {
    "adabelief": optax.adabelief(1e-2),
    "adadelta": optax.adadelta(1e-1),
    "adafactor": optax.adafactor(1e-2),
    "adagrad": optax.adagrad(1e-2),
    "adam": optax.adam(1e-2),
    "adam, bfloat16 momentum": optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "adamax": optax.adamax(1e-2),
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "adan": optax.adan(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "clip, schedule": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(optax.linear_schedule(1e-2, 0, 50))),
    "fromage": optax.fromage(1e-2),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(1e-2),
    "lamb": optax.lamb(1e-2, weight_decay=0.1),
    "lars": optax.lars(1.0, weight_decay=0.1),
    "lion": optax.lion(1e-3),
    "masked": optax.masked(optax.adam(1e-2), {"w": True, "b": False}),
    "multi_transform": optax.partition({1: optax.adam(1e-2), 2: optax.sgd(1e-2)}, {"w": 1, "b": 2}),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "nadam": optax.nadam(1e-2),
    "noisy_sgd": optax.noisy_sgd(1e-2, key=0),
    "novograd": optax.novograd(1e-2),
    "radam": optax.radam(1e-2),
    "rmsprop": optax.rmsprop(1e-2),
    "schedule_free": optax.contrib.schedule_free_sgd(1e-2),
    "sgd, momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "sm3": optax.sm3(1e-2),
    "yogi": optax.yogi(1e-2),
}
WRAPPERS = {
    "master_weights": jamp.master_weights,
    "split": lambda tx: jamp.master_weights(tx, "split"),
    "stochastic_rounding": lambda tx: jamp.stochastic_rounding(tx, jax.random.key(0)),
    "mixed_precision": lambda tx: jamp.mixed_precision(tx, "O3:bfloat16"),
}
STEPS = 4


def start(dtype):
    w = jnp.linspace(-1, 1, 12).reshape(4, 3)
    return {"w": w.astype(dtype), "b": jnp.linspace(0.1, 0.3, 3)}


def gradients(key):
    w, b = jax.random.split(key)
    return {"w": jax.random.normal(w, (STEPS, 4, 3)).astype(jnp.bfloat16), "b": jax.random.normal(b, (STEPS, 3))}


def run(tx, params, grads):
    """Op by op: compiled, XLA rounds the sum of a product once or twice, depending on what else is in the program."""
    state = tx.init(params)
    for i in range(STEPS):
        updates, state = tx.update(jax.tree.map(lambda g: g[i], grads), state, params)  # noqa: B023
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_equal_plain_float32_training(key, name):
    """Bit for bit: the inner optimizer has to see nothing but float32."""
    grads, params = gradients(key), start(jnp.bfloat16)
    full, plain_state = run(OPTIMIZERS[name], jamp.cast_to_full(params), jamp.cast_to_full(grads))
    for storage in ("float32", "split"):
        half, state = run(jamp.master_weights(OPTIMIZERS[name], storage), params, grads)
        assert_bitwise_equal(jamp.master_params(state, half), full)
        assert_bitwise_equal(state.inner_state, plain_state)
        assert (half["w"] != params["w"]).any()


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_keeps_its_shapes_and_dtypes(name, wrapper):
    """So that a step is compiled once and can be scanned (optax issues 1207 and 1098)."""
    tx, params = WRAPPERS[wrapper](OPTIMIZERS[name]), start(jnp.bfloat16)
    state = jax.eval_shape(tx.init, params)

    def step(params, state):
        updates, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
        return optax.apply_updates(params, updates), state

    new_params, new_state = jax.eval_shape(step, params, state)
    chex.assert_trees_all_equal_shapes_and_dtypes((new_params, new_state), (params, state))


def test_plain_optax_does_not_keep_them():
    """The reason for the test above. Once this fails, optax has solved it."""
    params = start(jnp.bfloat16)
    tx = optax.trace(0.9)
    state = tx.init(params)
    _, new_state = tx.update(jamp.cast_to_full(params), state, params)
    assert (state.trace["w"].dtype, new_state.trace["w"].dtype) == (jnp.bfloat16, jnp.float32)


def test_lookahead_synchronizes_on_masters(key):
    tx = optax.lookahead(optax.sgd(1e-2), sync_period=3, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced(start(jnp.bfloat16))
    full, _ = run(tx, jamp.cast_to_full(params), jamp.cast_to_full(gradients(key)))
    half, state = run(jamp.master_weights(tx), params, gradients(key))
    assert_bitwise_equal(jamp.master_params(state, half), full)


def test_linesearch_sees_masters():
    """Its extra arguments are functions of the parameters it is given: float32."""

    def loss(params):
        assert params.dtype == jnp.float32
        return (params**2).sum()

    tx, params = jamp.master_weights(optax.lbfgs()), jnp.array([1.0, -2.0], jnp.bfloat16)
    state = tx.init(params)
    for _ in range(3):
        full = jamp.master_params(state, params)
        value, grad = jax.value_and_grad(loss)(full)
        updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=loss)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(np.asarray(params, np.float32), 0, atol=1e-6)


def test_specs_are_strong(key):
    params = start(jnp.bfloat16)
    for wrapper in WRAPPERS.values():
        tx = wrapper(optax.adamw(1e-2))
        grads = jax.tree.map(lambda x: x[0], gradients(key))
        _, state = tx.update(grads, tx.init(params), params)
        assert_same_spec(tx.init(params), state)
