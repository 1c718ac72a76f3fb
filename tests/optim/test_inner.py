"""What the wrappers take for an optimizer, and what they hand on to it."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jamp

WRAPPERS = {
    "loss_scaled": lambda inner: jamp.loss_scaled(jamp.NoOpLossScale(), inner),
    "master_weights": jamp.master_weights,
    "stochastic_rounding": lambda inner: jamp.stochastic_rounding(inner, jax.random.key(0)),
    "mixed_precision": lambda inner: jamp.mixed_precision(inner, "O3:bfloat16"),
}
PLATEAU = optax.chain(optax.sgd(0.5), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_extra_arguments_reach_an_optimizer_in_multisteps(wrap):
    def train(tx, params):
        state = tx.init(params)
        for _ in range(8):
            updates, state = tx.update(jnp.ones_like(params), state, params, value=jnp.float32(1))
            params = optax.apply_updates(params, updates)
        return params

    plain = optax.MultiSteps(PLATEAU, 2)
    expected = train(plain, jnp.float32(8))
    assert train(wrap(optax.MultiSteps(PLATEAU, 2)), jnp.bfloat16(8)) == expected < 8
    assert expected > train(optax.MultiSteps(optax.sgd(0.5), 2), jnp.float32(8))  # It did react to the plateau.


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("inner", ["adam", optax.adam, 3])
def test_what_is_no_optimizer_is_refused(wrap, inner):
    with pytest.raises(TypeError, match=r"expected an optax transformation. Write .*optax.adam\(1e-3\)"):
        wrap(inner)


@pytest.mark.parametrize("key", [0, None, jnp.zeros(2), jax.random.split(jax.random.key(0))])
def test_what_is_no_key_is_refused(key):
    with pytest.raises(TypeError, match=r"expected a PRNG key. Write jax.random.key\(0\)"):
        jamp.stochastic_rounding(optax.sgd(1.0), key)


def test_a_state_from_elsewhere_is_refused():
    tx = jamp.loss_scaled(jamp.NoOpLossScale(), optax.sgd(1.0))
    with pytest.raises(TypeError, match=r"got tuple.*jamp\.from_optax"):
        tx.update(jnp.ones(2), optax.sgd(1.0).init(jnp.ones(2)), jnp.ones(2))
    with pytest.raises(ValueError, match=r"not its state: pass `opt_state`"):
        jamp.scaled_value_and_grad(jnp.sum, tx)
    with pytest.raises(TypeError, match=r"\(LossScaledState\): .*jamp.scaled_value_and_grad\(fun, opt_state\)") as info:
        jamp.value_and_grad(jnp.sum, tx.init(jnp.ones(100)))
    assert len(str(info.value)) < 500
