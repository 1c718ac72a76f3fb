"""Other train steps that run and train wrongly are told, each once and at the user's line.

See `test_wrong_gradients.py` for gradients, and `test_surroundings.py` for what is around an optimizer.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import jamp
from jamp.optim import _misuse
from tests.optim.train_steps import (
    MADE_OUTSIDE,
    PARAMS,
    SCALER,
    STATE,
    TX,
    X,
    loss,
    plain,
    right,
    stacked,
    step_with,
    told,
)  # fmt: skip


def test_devices_that_vmap_stands_for():
    step = lambda p, s, x: step_with(right)(p, s, x)[0]  # noqa: E731
    shared = jax.vmap(step, in_axes=(None, None, 0), axis_name="d")
    (message,) = told(lambda: jax.jit(shared)(PARAMS, STATE, X[None]))
    assert "drift apart" in message
    jax.jit(jax.vmap(step, axis_name="d"))(*stacked((PARAMS, STATE, X), 2))  # An ensemble.


def test_devices_that_train_models_of_their_own():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    one = lambda tree: jax.tree.map(lambda x: x[0], tree)  # noqa: E731
    step = lambda p, s: stacked(step_with(right)(one(p), one(s)), 1)  # noqa: E731
    P = jax.sharding.PartitionSpec("d")  # noqa: N806
    jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P, out_specs=P))(*stacked((PARAMS, STATE), 1))


@pytest.mark.parametrize("average", ["updates", "gradients", "by jamp", "loss", "axis_name", "nothing, no axis"])
def test_devices_that_drift_apart(average):
    tx = jamp.mixed_precision(optax.adam(1e-3), "O2:float16", axis_name="d" if average == "axis_name" else None)

    def step(params, state, x):
        mean = lambda p: jax.lax.pmean(loss(p, x), "d") if average == "loss" else loss(p, x)  # noqa: E731
        grads = jamp.scaled_value_and_grad(mean, state)(params)[1]
        if average == "gradients":
            grads = jax.lax.pmean(grads, "d")
        if average == "by jamp":
            grads = jamp.average_gradients(grads, "d")
        updates, state = tx.update(grads, state, params)
        if average in ("updates", "axis_name"):
            updates = jax.lax.pmean(updates, "d")
        return optax.apply_updates(params, updates), state

    mapped = jax.pmap(step) if "no axis" in average else jax.pmap(step, axis_name="d")
    messages = told(lambda: mapped(*stacked((PARAMS, STATE, X), 2)))
    assert len(messages) == (average == "updates") and all("drift apart" in message for message in messages)


def test_on_abort_that_is_never_called():
    for make in (
        lambda **k: jamp.loss_scaled(SCALER, **k),
        lambda **k: jamp.mixed_precision(optax.sgd(1.0), "O2", **k),
    ):
        with pytest.raises(ValueError, match="abort_after=20"):
            make(on_abort=print)


@pytest.mark.parametrize("policy", ["O3:float16", "O3:bfloat16", "half"])
def test_float32_parameters_where_the_policy_has_half(policy):
    tx = jamp.mixed_precision(optax.adam(1e-3), policy)
    half = jamp.half_params(PARAMS, jamp.get_policy(policy).param_dtype)
    state = tx.init(PARAMS)
    (message,) = told(lambda: tx.update(PARAMS, state, PARAMS))
    assert f"jamp.half_params(params, '{jamp.get_policy(policy).param_dtype}')" in message
    tx.update(half, tx.init(half), half)


@pytest.mark.parametrize("policy", ["O0", "O1:bfloat16", "O2:bfloat16", "O2:float16", "p=f32,c=bf16,o=f32"])
def test_half_parameters_where_the_policy_has_float32(policy):
    tx, half = jamp.mixed_precision(optax.sgd(1e-4), policy), jamp.half_params(PARAMS, "bfloat16")
    (message,) = told(lambda: tx.init(half))
    assert "these are half: ['b'], ['w']." in message and "'O3:bfloat16'" in message
    assert f"jamp.get_policy('{jamp.get_policy(policy)}').cast_to_param(params)" in message
    tx.init(jamp.get_policy(policy).cast_to_param(half))


def test_half_parameters_that_are_frozen_or_learn_by_other_means():
    params = {"w": jnp.ones(2), "base": jnp.ones(2, jnp.bfloat16)}
    frozen = {"w": False, "base": True}
    labels = {"w": "train", "base": "freeze"}
    sgd, freeze = optax.sgd(1.0), optax.set_to_zero()
    for inner in (
        optax.partition({"train": sgd, "freeze": freeze}, labels),
        optax.chain(sgd, optax.masked(freeze, frozen)),
        optax.MultiSteps(optax.chain(optax.masked(freeze, frozen), sgd), 2),
        optax.apply_if_finite(optax.chain(optax.masked(freeze, frozen), sgd), 3),
        jamp.master_weights(sgd),
        optax.chain(jamp.stochastic_rounding(sgd, jax.random.key(0))),
    ):
        jamp.mixed_precision(inner, "O2:bfloat16").init(params)
    jamp.mixed_precision(sgd, "O2:bfloat16").init({"w": params["w"], "base": optax.MaskedNode()})


@pytest.mark.parametrize("jit", [False, True])
def test_the_pair_in_place_of_the_gradients(jit):
    update = jax.jit(TX.update) if jit else TX.update
    with pytest.raises(ValueError, match=r"got a pair \(loss, grads\)"):
        update(MADE_OUTSIDE(PARAMS), STATE, PARAMS)
    pair = (jnp.ones(2), jnp.ones(3))  # A tuple of parameters is none.
    update(pair, TX.init(pair), pair)


def skipped(state, count, scale=1.0):
    return jamp.set_loss_scale(state, scale)._replace(consecutive_skipped=jnp.int32(count))


@pytest.mark.parametrize("ask", [jamp.metrics, jamp.loss_scale, jamp.scale_value])
def test_steps_skipped_without_end(ask):
    (message,) = told(lambda: ask(skipped(STATE, 100)))
    assert "jamp.first_nonfinite(grad_fn, params, batch)" in message
    for state in (skipped(STATE, 99), skipped(STATE, 500, scale=2.0), STATE):
        ask(state)
    jax.jit(ask)(skipped(STATE, 500))  # A trace knows no numbers.


def test_steps_skipped_without_end_are_said_once_in_a_loop():
    step, state = jax.jit(step_with(right)), STATE
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(150):
            _, state = step(PARAMS, state, X * jnp.nan)
            jax.block_until_ready(state)
            jamp.metrics(state)
    assert [w.category for w in caught] == [jamp.PrecisionWarning]


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(
    "ask",
    [
        jamp.metrics,
        jamp.loss_scale,
        jamp.scale_value,
        lambda state: jamp.scaled_value_and_grad(loss, state),
        lambda state: TX.update(PARAMS, state, PARAMS),
    ],
)
@pytest.mark.parametrize("donate", [(), (0,)])
def test_steps_skipped_without_end_are_told_to_who_asks_before_they_are_done(ask, donate, monkeypatch):
    monkeypatch.setattr(_misuse, "_told", False)

    @functools.partial(jax.jit, donate_argnums=donate)
    def step(state, x):  # Still runs when it is asked.
        zero = 0 * jax.lax.fori_loop(0, 20, lambda i, x: x @ x * 1e-3, x)[0, 0]
        return jax.tree.map(lambda a: a + zero.astype(a.dtype), state)

    def train():
        state = jax.tree.map(jnp.copy, skipped(STATE, 300))
        for _ in range(3):
            state = step(state, jnp.ones((500, 500)))
            ask(state)
            state.skipped.item()

    assert "jamp.first_nonfinite" in told(train)[0]


@pytest.fixture
def unfinished(monkeypatch):
    """Says whether what JAX computes is to look unfinished, of which nothing is known from before."""
    at_hand = _misuse._is_at_hand
    monkeypatch.setattr(_misuse, "_awaited", None)
    monkeypatch.setattr(_misuse, "_told", False)
    return lambda names: monkeypatch.setattr(
        _misuse, "_is_at_hand", lambda x: at_hand(x) and not any(x is leaf for leaf in jax.tree.leaves(names))
    )


def test_what_was_asked_for_is_looked_at_when_it_has_arrived(unfinished):
    stuck, fine = skipped(STATE, 100), skipped(STATE, 0)
    unfinished((stuck, fine))
    assert told(lambda: jamp.metrics(stuck)) == []
    _misuse._awaited.item()
    assert len(told(lambda: jamp.metrics(fine))) == 1
    assert told(lambda: [jamp.metrics(state) for state in (stuck, fine)]) == [] and _misuse._awaited is None


def test_what_has_not_arrived_is_asked_for_under_strict_promotion(unfinished):
    stuck = skipped(STATE, 100)
    unfinished(stuck)
    with jax.numpy_dtype_promotion("strict"):
        assert told(lambda: jamp.metrics(stuck)) == []
    assert _misuse._awaited.item() == 100


def test_what_has_arrived_is_judged_by_itself(unfinished):
    stuck, fine = skipped(STATE, 100), skipped(STATE, 0)
    unfinished(stuck)
    jamp.metrics(stuck)
    _misuse._awaited.item()
    assert told(lambda: [jamp.metrics(state) for state in (fine, fine)]) == []  # As of the next run.


def test_nothing_is_added_to_a_program_that_is_traced(unfinished):
    state = skipped(STATE, 100)
    unfinished(state)
    with jax.checking_leaks():
        assert not jax.make_jaxpr(lambda: jamp.loss_scale(state).loss_scale)().eqns
    assert _misuse._awaited.item() == 100


def test_steps_that_failed_are_none_that_were_skipped(unfinished, monkeypatch):
    class Failed:
        def __int__(self):
            raise jax.errors.JaxRuntimeError("INTERNAL")

    unfinished(STATE)
    monkeypatch.setattr(_misuse, "_is_at_hand", lambda x: isinstance(x, Failed))
    monkeypatch.setattr(_misuse, "_awaited", Failed())
    jamp.metrics(STATE)
    assert _misuse._awaited.item() == 0


def test_a_callback_that_warns():
    tx = jamp.mixed_precision(optax.adam(1e-3), "O2:float16", abort_after=3, on_abort="warn")
    step, state = jax.jit(step_with(right, tx)), tx.init(PARAMS)
    with pytest.warns(jamp.PrecisionWarning, match=r"\['b'\].*jamp.first_nonfinite"):
        for _ in range(3):
            _, state = step(PARAMS, state, X * jnp.nan)
        jax.effects_barrier()


def test_each_is_shown_once_for_a_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            jax.jit(step_with(plain))(PARAMS, STATE)
    assert len(caught) == 1


def test_nothing_is_put_into_the_program():
    step = lambda p, s: step_with(right)(p, s)  # noqa: E731
    assert "callback" not in str(jax.make_jaxpr(step)(PARAMS, STATE))
