"""After too many overflows in a row: raise with the path of the first bad leaf, call back, or go on."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jamp

PARAMS = {"a": jnp.zeros(2), "b": {"kernel": jnp.zeros(3), "bias": jnp.zeros(1)}}
GOOD = jax.tree.map(jnp.ones_like, PARAMS)
BAD = {"a": jnp.ones(2), "b": {"kernel": jnp.array([1.0, jnp.nan, 1.0]), "bias": jnp.ones(1)}}
SCALER = jamp.DynamicLossScale(2.0**10)


def run(grads, jit=True, flags=None, **settings):
    tx = jamp.loss_scaled(SCALER, inner=optax.sgd(1.0), **settings)
    step = jax.jit(tx.update) if jit else tx.update
    state = tx.init(PARAMS)
    for i, g in enumerate(grads):
        _, state = step(g, state, PARAMS, grads_finite=jnp.array(True if flags is None else flags[i]))
        jax.block_until_ready(state)
        jax.effects_barrier()
    return state


def collect(grads, **settings):
    errors = []
    run(grads, abort_after=2, on_abort=errors.append, **settings)
    return [(e.path, e.consecutive_skipped, e.loss_scale) for e in errors]


@pytest.mark.parametrize("jit", [True, False])
def test_calls_back_from_the_nth_overflow_in_a_row_on(jit):
    assert collect([BAD, GOOD, BAD, BAD, BAD, GOOD, BAD], jit=jit) == [
        ("['b']['kernel']", 2, 2.0**8),
        ("['b']['kernel']", 3, 2.0**7),
    ]


def test_names_the_first_bad_leaf_of_several():
    everything = jax.tree.map(lambda p: p * jnp.nan, PARAMS)
    assert [path for path, _, _ in collect([BAD, everything])] == ["['a']"]


def test_a_flag_from_elsewhere_has_no_path():
    assert [path for path, _, _ in collect([GOOD, GOOD], flags=[False, False])] == [None]


# The callback logs what it raises, and the runtime reports it once more from its own thread.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_raises_with_the_path_and_what_to_look_at():
    run([BAD, GOOD, BAD], abort_after=2)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"NonFiniteGradientsError.* 2 steps in a row.*\['b'\]\['kernel'\]"
    ):
        run([BAD, BAD], abort_after=2)


def test_goes_on_by_default():
    assert run([BAD] * 5).consecutive_skipped == 5


def test_vmap_calls_back_for_those_that_overflow_only():
    errors = []
    tx = jamp.loss_scaled(SCALER, inner=optax.sgd(1.0), abort_after=1, on_abort=errors.append)
    states = jax.vmap(lambda _: tx.init(jnp.zeros(2)))(jnp.arange(3))
    grads = jnp.array([[1.0, 1.0], [1.0, jnp.inf], [2.0, 2.0]])
    _, states = jax.jit(jax.vmap(tx.update))(grads, states)
    jax.effects_barrier()
    assert states.skipped.tolist() == [0, 1, 0] and len(errors) == 1


def test_the_host_is_asked_in_the_abnormal_branch_alone():
    tx = jamp.loss_scaled(SCALER, inner=optax.sgd(1.0), abort_after=3)
    jaxpr = jax.make_jaxpr(tx.update)(GOOD, tx.init(PARAMS), PARAMS)
    assert not any("callback" in eqn.primitive.name for eqn in jaxpr.eqns), "a callback on every step"
    assert "debug_callback" in str(jaxpr)
    plain = jamp.loss_scaled(SCALER, inner=optax.sgd(1.0))
    assert "callback" not in str(jax.make_jaxpr(plain.update)(GOOD, plain.init(PARAMS), PARAMS))


@pytest.mark.parametrize(
    "settings", [{"abort_after": 0}, {"abort_after": 2.5}, {"abort_after": True}, {"on_abort": "stop"}]
)
def test_refuses_impossible_settings(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        jamp.loss_scaled(SCALER, **settings)
