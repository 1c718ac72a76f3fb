"""What stands around `tx.update` where it must not: other transformations, and `cast_fn`."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jamp
from tests.optim.train_steps import (
    BFLOAT16,
    PARAMS,
    SCALER,
    STATE,
    TX,
    X,
    Y,
    loop_by_scan,
    loss,
    make_loss,
    model,
    right,
    step_with,
    told,
)  # fmt: skip


def test_apply_if_finite_around():
    tx = optax.apply_if_finite(TX, 5)
    with pytest.raises(ValueError, match="abort_after=n"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    tx = optax.apply_if_finite(BFLOAT16, 5)
    tx.update(PARAMS, tx.init(PARAMS), PARAMS)


CHOOSING = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    "conditionally_transform": lambda tx: optax.conditionally_transform(tx, lambda step: step >= 0),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, lambda step: step != 1),
}
WITH_HALF_PARAMS = {
    "master_weights": jamp.master_weights,
    "split": lambda tx: jamp.master_weights(tx, "split"),
    "stochastic_rounding": lambda tx: jamp.stochastic_rounding(tx, jax.random.key(0)),
    "mixed_precision": lambda tx: jamp.mixed_precision(tx, "O3:bfloat16"),
    "8 bits": lambda tx: jamp.low_precision_state(jamp.master_weights(tx), "int8"),
}


@pytest.mark.in_turns(3)
@pytest.mark.filterwarnings("ignore:The policy 'O3")
@pytest.mark.parametrize("inner", WITH_HALF_PARAMS)
@pytest.mark.parametrize("outer", CHOOSING)
def test_what_chooses_belongs_inside_of_exact_updates(outer, inner):
    """Around them it takes updates for arrays; inside it skips a step, and float32 parameters have arrays anyway."""
    choose, wrap = CHOOSING[outer], WITH_HALF_PARAMS[inner]
    half = {"w": jnp.ones((8, 8), jnp.bfloat16), "norm": jnp.ones(8)}
    grads = jax.tree.map(jnp.ones_like, half)
    around = choose(wrap(optax.sgd(1.0)))
    state = around.init(half)
    told_name = "stochastic_rounding" if inner == "stochastic_rounding" else "master_weights"
    for update in (around.update, jax.jit(around.update)):
        with pytest.raises(ValueError, match=rf"jamp.{told_name}\(optax.{outer}\(optimizer"):
            update(grads, state, half)
    whole = jax.tree.map(lambda p: p.astype(jnp.float32), half)
    around.update(whole, around.init(whole), whole)
    inside, params = wrap(choose(optax.sgd(2.0**-3))), half
    state = inside.init(params)
    for step in range(3):
        skips = step == 1 and outer != "conditionally_transform"
        given = jax.tree.map(lambda g: g * jnp.nan, grads) if skips and outer == "apply_if_finite" else grads
        before = params
        updates, state = jax.jit(inside.update)(given, state, params)
        params = optax.apply_updates(params, updates)
        assert float(before["w"][0, 0] - params["w"][0, 0]) == (0 if skips else 2.0**-3)


@pytest.mark.parametrize(
    "outer",
    [
        lambda tx: jamp.mixed_precision(tx, "O2:float16"),
        lambda tx: jamp.mixed_precision(tx, "O3:float16"),
        lambda tx: jamp.loss_scaled(SCALER, tx),
        lambda tx: jamp.loss_scaled(jamp.NoOpLossScale(), optax.chain(optax.clip(1.0), tx)),
        lambda tx: jamp.loss_scaled(SCALER, optax.masked(tx, True)),
        lambda tx: jamp.MixedPrecision("O2:float16", tx).tx,
    ],
)
@pytest.mark.filterwarnings("ignore:The policy 'O3")
def test_nested_loss_scaling(outer):
    with pytest.raises(ValueError, match="unscaled twice"):
        outer(TX).init(PARAMS)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(
    "before",
    [
        optax.adam(1e-3), optax.adamw(1e-3), optax.sgd(1e-2, momentum=0.9), optax.trace(0.9), optax.clip(1.0),
        optax.clip_by_global_norm(1.0), optax.adaptive_grad_clip(0.1), optax.zero_nans(),
        optax.add_decayed_weights(0.1), optax.ema(0.9), optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("jit", [False, True])
def test_transformations_before_the_scaling(before, jit):
    tx = optax.chain(before, jamp.loss_scaled(SCALER))
    update = jax.jit(tx.update) if jit else tx.update
    with pytest.raises(ValueError, match="comes before jamp's loss scaling"):
        update(PARAMS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("before", [optax.adam(1e-3), optax.clip(1.0), optax.add_decayed_weights(0.1)])
def test_transformations_before_the_scaling_by_name(before):
    tx = optax.named_chain(("before", before), ("scaled", jamp.loss_scaled(SCALER)))
    with pytest.raises(ValueError, match="comes before jamp's loss scaling"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    tx = optax.named_chain(("scaled", jamp.loss_scaled(SCALER)), ("after", before))
    tx.update(PARAMS, tx.init(PARAMS), PARAMS)


LABELS = {"w": "a", "b": "b"}
FROZEN = {"w": False, "b": True}


@pytest.mark.parametrize(
    "tx",
    [
        optax.multi_transform({"a": TX, "b": optax.sgd(0.1)}, LABELS),
        optax.partition({"b": optax.chain(optax.clip(1.0), optax.sgd(0.1)), "a": TX}, LABELS),
        optax.masked(TX, {"w": True, "b": False}),
        optax.masked(TX, lambda tree: {"w": True, "b": False}),
        optax.chain(optax.masked(TX, {"w": True, "b": False}), optax.scale(0.5)),
    ],
)
def test_gradients_that_stay_scaled(tx):
    (message,) = told(lambda: jax.jit(step_with(right, tx))(PARAMS, tx.init(PARAMS)))
    assert "['b'] stay multiplied by the loss scale" in message
    in_part = lambda p, s, x, y: right(p, s, x, y) | {"b": jax.grad(loss)(p, x, y)["b"]}  # noqa: E731
    jax.jit(step_with(in_part, tx))(PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize(
    "tx",
    [
        optax.multi_transform({"a": TX, "b": optax.set_to_zero()}, LABELS),
        optax.multi_transform({"a": TX, "b": optax.sgd(0.1)}, {"w": "a", "b": "a"}),
        optax.masked(TX, True),
        optax.chain(
            optax.masked(TX, {"w": True, "b": False}), optax.masked(optax.set_to_zero(), {"w": False, "b": True})
        ),
        optax.multi_transform({"a": optax.masked(TX, True), "b": optax.set_to_zero()}, LABELS),
        jamp.mixed_precision(optax.masked(optax.sgd(0.1), LABELS | {"w": True, "b": False}), "O2:float16"),
    ],
)
def test_groups_of_which_none_stays_scaled(tx):
    jax.jit(step_with(right, tx))(PARAMS, tx.init(PARAMS))


def test_groups_with_a_scale_for_each():
    tx = optax.multi_transform({"a": TX, "b": TX}, LABELS)
    of = lambda s: s.inner_states["a"]  # noqa: E731
    (message,) = told(lambda: jax.jit(step_with(lambda p, s, x, y: right(p, of(s), x, y), tx))(PARAMS, tx.init(PARAMS)))
    assert "another loss scale" in message


def test_a_mask_where_nothing_is_scaled():
    tx = optax.masked(BFLOAT16, {"w": True, "b": False})
    bfloat16 = lambda p, s, x, y: jax.grad(make_loss("O2:bfloat16"))(p, x, y)  # noqa: E731
    jax.jit(step_with(bfloat16, tx))(PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize("before", [optax.identity(), optax.sgd(0.1), optax.scale(-1.0), optax.scale_by_schedule(abs)])
def test_linear_transformations_before_the_scaling(before):
    tx = optax.chain(before, jamp.loss_scaled(SCALER))
    tx.update(PARAMS, tx.init(PARAMS), PARAMS)


def test_clipping_before_where_nothing_is_scaled():
    tx = optax.chain(optax.clip_by_global_norm(1.0), BFLOAT16)
    tx.update(PARAMS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("policy", ["O1:float16", "O2:float16", "O3:float16", "O2:bfloat16", "p=f32,c=f16,o=f32"])
def test_an_optimizer_inside_of_a_cast_function(policy):
    (message,) = told(lambda: jax.jit(jamp.cast_fn(step_with(right), policy))(PARAMS, STATE))
    assert "Cast the model and not the step" in message


def test_an_optimizer_inside_of_a_cast_function_that_casts_nothing():
    jamp.cast_fn(step_with(right), "O0")(PARAMS, STATE)
    with jamp.disable():
        jamp.cast_fn(step_with(right), "O2:float16")(PARAMS, STATE)


@pytest.mark.parametrize("tx", [optax.adam(1e-3), optax.sgd(0.1), optax.chain(optax.clip(1.0), optax.adamw(1e-3))])
@pytest.mark.parametrize(
    "wrap", [lambda step: step, jax.jit, lambda step: lambda *c: loop_by_scan(lambda c: step(*c), c)]
)
def test_a_plain_optimizer_inside_of_a_cast_function(tx, wrap):
    step = wrap(step_with(lambda p, s, x, y: jax.grad(lambda p: ((model(p, X) - Y) ** 2).mean())(p), tx))
    state = tx.init(PARAMS)
    (message,) = told(lambda: jax.jit(jamp.cast_fn(step, "O3:float16"))(PARAMS, state))
    assert "Cast the model and not the step" in message and "second moments" in message
    (message,) = told(lambda: jax.jit(jamp.cast_fn(step, "O3:bfloat16"))(PARAMS, state))
    assert "Cast the model and not the step" in message and "float16 " not in message
    for level in ("O1", "O2"):  # Where its arithmetic is float32.
        jamp.cast_fn(step, f"{level}:float16")(PARAMS, state)


@pytest.mark.parametrize("policy", ["O2:bfloat16", "O2:float16"])
def test_a_line_search_that_calls_a_function_in_half(policy):
    curvature, tx = jnp.arange(1.0, 5.0), optax.lbfgs()

    def minimize(fn, x):
        def step(carry, _):
            x, state = carry
            value, grad = optax.value_and_grad_from_state(fn)(x, state=state)
            updates, state = tx.update(grad, state, x, value=value, grad=grad, value_fn=fn)
            return (optax.apply_updates(x, updates), state), value

        return jax.lax.scan(step, (x, tx.init(x)), length=2)[0][0]

    jamp.cast_fn(lambda x: minimize(lambda x: 0.5 * jnp.vdot(x, curvature * x) - x.sum(), x), policy)(jnp.ones(4))
    jamp.cast_fn(lambda x: minimize(lambda x: jnp.mean(jnp.tanh(X @ jnp.diag(x)) ** 2), x), policy)(jnp.ones(4))


def test_losses_and_inner_optimizers_in_a_cast_function():
    def tuned_loss(params, x):
        tx = optax.sgd(0.1)
        inner = jax.grad(lambda p: optax.l2_loss(model(p, x)).mean())(params)
        updates, _ = tx.update(inner, tx.init(params), params)
        return optax.l2_loss(model(optax.apply_updates(params, updates), x)).mean()

    jamp.cast_fn(tuned_loss, "O2:float16")(PARAMS, X)


@pytest.mark.parametrize("policy", ["O1:float16", "O2:float16", "O3:float16"])
def test_updates_are_float32_inside_of_a_cast_function(policy):
    grads = {"w": jnp.full((4, 4), 2.0**-10), "b": jnp.full(4, 3 * 2.0**-12)}  # Their squares are zero in float16.
    scaled = jax.tree.map(lambda g: g * 2.0**15, grads)
    expected = TX.update(scaled, STATE, PARAMS)
    with pytest.warns(jamp.PrecisionWarning, match="Cast the model"):
        actual = jamp.cast_fn(lambda g, s, p: TX.update(g, s, p), policy)(scaled, STATE, PARAMS)
    jax.tree.map(lambda a, b: assert_close(a, b), actual, expected)


def assert_close(a, b):
    assert jnp.allclose(a, b, rtol=1e-6, atol=0), (a, b)
