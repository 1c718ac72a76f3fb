"""Loss scaling around and in front of an optimizer: exact steps, exact skips, and every optax wrapper."""

import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp
from jamp.optim import LossScaledState
from tests.helpers import assert_bitwise_equal, assert_same_spec

PARAMS = {"w": jnp.array([1.0, -2.0, 0.5]), "b": jnp.float32(0.25)}
# Powers of two, so that scaling and unscaling are exact, and tests can ask for equal bits.
GRADS = [jax.tree.map(lambda p, i=i: jnp.full_like(p, 2.0**-i), PARAMS) for i in range(6)]
BAD = {"w": jnp.array([1.0, jnp.inf, 0.0]), "b": jnp.float32(jnp.nan)}
SCALER = jamp.DynamicLossScale(2.0**10, period=2)

INNER = {
    "sgd": lambda: optax.sgd(0.5),
    "momentum": lambda: optax.sgd(0.5, momentum=0.9),
    "adamw": lambda: optax.adamw(0.125),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.125)),
    "schedule": lambda: optax.adam(optax.cosine_decay_schedule(0.5, 10)),
    "lamb": lambda: optax.lamb(0.125),
    "inject": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.125),
    "masked": lambda: optax.masked(optax.adam(0.125), {"w": True, "b": False}),
    "partition": lambda: optax.partition({"x": optax.adam(0.125), "y": optax.sgd(0.5)}, {"w": "x", "b": "y"}),
    "multisteps": lambda: optax.MultiSteps(optax.adam(0.125), 2),
    "noise": lambda: optax.noisy_sgd(0.125, key=jax.random.key(0)),
}
inners = pytest.mark.parametrize("make", INNER.values(), ids=list(INNER))


def run(tx, grads, params=PARAMS, scaled=True):
    """Parameters and state after a gradient each step, scaled with the state's scale."""

    @jax.jit
    def step(params, state, g):
        g = jamp.loss_scale(state).scale(g) if scaled else g
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for g in grads:
        params, state = step(params, state, g)
    return params, state


def has_inner(tx):
    return tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx


# ---------------------------------------------------------------- steps and skips


@inners
def test_finite_steps_are_those_of_the_inner_optimizer(make):
    expected = run(has_inner(make()), GRADS, scaled=False)
    params, state = run(jamp.loss_scaled(SCALER, inner=make()), GRADS)
    for actual, wanted in zip(jax.tree.leaves((params, state.inner_state)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(jax.random.key_data(actual) if is_key(actual) else actual,
                                   jax.random.key_data(wanted) if is_key(wanted) else wanted, rtol=2e-6)  # fmt: skip
    assert state.loss_scale.loss_scale == 2.0**13


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


@inners
def test_a_skipped_step_leaves_everything_as_it_is(make):
    tx = jamp.loss_scaled(SCALER, inner=make())
    params, before = run(tx, GRADS[:3])
    updates, after = tx.update(BAD, before, params)
    assert_bitwise_equal(optax.apply_updates(params, updates), params)
    assert_bitwise_equal(after.inner_state, before.inner_state)
    assert (after.grads_finite, after.skipped, after.consecutive_skipped) == (False, 1, 1)
    assert after.loss_scale.loss_scale == before.loss_scale.loss_scale / 2


@inners
def test_a_run_with_overflows_equals_the_run_without_those_steps(make):
    with_bad = [GRADS[0], BAD, GRADS[1], BAD, BAD, GRADS[2], GRADS[3], BAD]
    tx = jamp.loss_scaled(jamp.StaticLossScale(2.0**10), inner=make())
    params, state = run(tx, with_bad)
    clean_params, clean_state = run(tx, GRADS[:4])
    assert_bitwise_equal(params, clean_params)
    assert_bitwise_equal(state.inner_state, clean_state.inner_state)
    assert (state.skipped, state.consecutive_skipped) == (4, 1)


@inners
def test_state_keeps_its_types_under_jit_scan_and_skip(make):
    tx = jamp.loss_scaled(SCALER, inner=make())
    state = tx.init(PARAMS)
    step = jax.jit(chex.assert_max_traces(tx.update, n=1))
    for g in [GRADS[0], BAD, GRADS[1], GRADS[2], GRADS[3]]:
        _, state = step(g, state, PARAMS)
        assert_same_spec(state, tx.init(PARAMS))
    stacked = jax.tree.map(lambda *g: jnp.stack(g), *GRADS, BAD)
    scanned, _ = lax.scan(lambda s, g: (tx.update(g, s, PARAMS)[1], None), tx.init(PARAMS), stacked)
    assert_same_spec(scanned, state)


def test_one_trace_over_growth_overflow_and_recovery():
    tx = jamp.loss_scaled(SCALER, inner=optax.adam(0.125))

    def train_step(params, state, x):
        loss, grads = jamp.scaled_value_and_grad(lambda p: (p["w"] * x).sum() + p["b"], state)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    step = jax.jit(chex.assert_max_traces(train_step, n=1))
    params, state, scales = PARAMS, tx.init(PARAMS), []
    for x in [1.0, 1.0, np.inf, 1.0, 1.0, 1.0]:
        params, state, _ = step(params, state, jnp.float32(x))
        scales.append(float(state.loss_scale.loss_scale))
    assert scales == [2.0**10, 2.0**11, 2.0**10, 2.0**10, 2.0**11, 2.0**11]
    assert jamp.all_finite(params)


def test_unscales_with_the_scale_of_the_forward_pass():
    # mpx and DeepSpeed#8588 unscale with the new scale: a gradient of half the size wherever the scale grows.
    tx = jamp.loss_scaled(jamp.DynamicLossScale(8.0, period=2), inner=optax.sgd(1.0))
    params, state = jnp.float32(0.0), None
    state = tx.init(params)
    for used, following in [(8, 8), (8, 16), (16, 16), (16, 32)]:
        _, grads = jamp.scaled_value_and_grad(lambda p: 3.0 * p, state)(params)
        updates, state = tx.update(grads, state, params)
        assert (updates, state.scale_used, jamp.loss_scale(state).loss_scale) == (-3.0, used, following)


def test_clipping_sees_true_gradients():
    # pytorch-lightning#9599 and others clip scaled gradients, which makes every update as good as zero.
    tx = jamp.loss_scaled(SCALER, inner=optax.chain(optax.clip_by_global_norm(8.0), optax.sgd(1.0)))
    params, _ = run(tx, [GRADS[0]])
    assert_bitwise_equal(params, jax.tree.map(lambda p: p - 1.0, PARAMS))


def test_gradients_that_overflow_only_when_unscaled_are_skipped():
    tx = jamp.loss_scaled(jamp.StaticLossScale(2.0**-10), inner=optax.sgd(1.0))
    updates, state = tx.update(jnp.float32(2.0**120), tx.init(jnp.float32(0)))
    assert updates == 0.0 and state.skipped == 1


def test_no_scale_but_the_skip():
    tx = jamp.loss_scaled(jamp.NoOpLossScale(), inner=optax.adam(0.125))
    params, state = run(tx, [GRADS[0], BAD, GRADS[1]])
    assert_bitwise_equal(params, run(tx, GRADS[:2])[0])
    assert state.skipped == 1


@pytest.mark.parametrize("flag", [True, False])
def test_300_in_a_row(flag):
    tx = jamp.loss_scaled(jamp.DynamicLossScale.preset("pytorch", period=1), inner=optax.sgd(1.0))
    grads = jnp.zeros(2) if flag else jnp.array([0.0, jnp.nan])
    step = jax.jit(lambda s: tx.update(grads, s)[1])
    state = tx.init(jnp.zeros(2))
    for _ in range(300):
        state = step(state)
    assert state.loss_scale.loss_scale == (2.0**126 if flag else 2.0**-126)
    assert state.consecutive_skipped == (0 if flag else 300)


@pytest.mark.parametrize("low", [1.0, 2.0**-20])
def test_gradients_are_read_once_before_the_optimizer(low):
    # Below 1 the scale enlarges gradients, so that they have to be unscaled to be checked; above, they are not stored.
    tx = jamp.loss_scaled(jamp.DynamicLossScale(2.0**10, min_loss_scale=low), inner=optax.adam(0.125))
    params = {"a": jnp.ones((256, 256)), "b": jnp.ones((256, 512))}
    hlo = jax.jit(tx.update).lower(params, tx.init(params), params).compile().as_text()
    entry = hlo[hlo.index("\nENTRY") :].split(" conditional(")[0].splitlines()
    names = [line.split("%")[1].split(" ")[0] for line in entry if 'op_name="updates[' in line]
    assert len(names) == 2
    for name in names:
        readers = [line for line in entry if f"%{name}" in line.split(" = ", 1)[-1] and " tuple(" not in line]
        assert len(readers) == 1 and readers[0].split(" = ")[1].startswith("f32[]"), readers  # Writes a scalar only.


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["adamw", "momentum", "lion", "adafactor"])
def test_optimizer_states_of_half_params_keep_their_dtypes(name, dtype):
    # optax#1207, #1098: float32 gradients turn half-precision moments into float32 ones after the first step.
    params = jax.tree.map(lambda p: jnp.broadcast_to(p, (2, 3)).astype(dtype), PARAMS)
    inner = {"momentum": lambda lr: optax.sgd(lr, momentum=0.9)}.get(name) or getattr(optax, name)
    tx = jamp.loss_scaled(SCALER, inner=inner(0.125))

    def step(carry, _):
        params, state = carry
        _, grads = jamp.scaled_value_and_grad(lambda p: sum(x.sum() for x in jax.tree.leaves(p)), state)(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    start = (params, tx.init(params))
    end, _ = lax.scan(step, start, length=4)
    assert_same_spec(end, start)


def test_the_optimizer_gets_float32_gradients():
    seen = []
    spy = optax.stateless(
        lambda updates, params: (seen.append(jax.tree.map(lambda u: u.dtype.name, updates)), updates)[1]
    )
    for scaler in (SCALER, jamp.NoOpLossScale(), jamp.StaticLossScale(2.0)):
        tx = jamp.loss_scaled(scaler, inner=spy)
        updates, _ = tx.update({"w": jnp.ones(2, "float16"), "b": jnp.ones(2, "bfloat16")}, tx.init({}))
        assert {u.dtype.name for u in updates.values()} == {"float32"}
    assert all(names == {"w": "float32", "b": "float32"} for names in seen)


def test_small_float16_gradients_survive_unscaling():
    tx = jamp.loss_scaled(jamp.StaticLossScale(2.0**24), inner=optax.sgd(1.0))
    updates, _ = tx.update(jnp.float16(1.5), tx.init(jnp.float32(0)))
    assert updates == -1.5 * 2.0**-24


@pytest.mark.parametrize("storage", ["float32", "split"])
def test_around_master_weights(storage):
    params = {"w": jnp.array([1.0, 2.0], jnp.bfloat16), "norm": jnp.ones(2)}
    tx = jamp.loss_scaled(SCALER, inner=jamp.master_weights(optax.sgd(1.0), storage=storage))
    state = tx.init(params)
    small = jax.tree.map(lambda p: jnp.full(p.shape, 2.0**-9), params)
    for grads in [small, jax.tree.map(lambda g: g * jnp.inf, small), small]:
        updates, state = tx.update(jamp.loss_scale(state).scale(grads), state, params)
        params = optax.apply_updates(params, updates)
    assert jamp.master_params(state, params)["w"].tolist() == [1.0 - 2.0**-8, 2.0 - 2.0**-8]
    assert params["w"].tolist() == [1.0 - 2.0**-8, 2.0]  # The second one is half a step of bfloat16: rounded to even.
    assert params["norm"].tolist() == [1.0 - 2.0**-8] * 2


# ---------------------------------------------------------------- as a link of a chain


@pytest.mark.parametrize("chain", [optax.chain, lambda *links: optax.named_chain(*zip("abc", links, strict=False))])
def test_first_link_of_a_chain(chain):
    tx = chain(jamp.loss_scaled(SCALER), optax.sgd(0.5))
    params, state = run(tx, [GRADS[0], BAD, GRADS[1]])
    assert_bitwise_equal(params, run(optax.sgd(0.5), GRADS[:2], scaled=False)[0])
    assert jamp.metrics(state)["skipped"] == 1


def test_later_links_see_a_gradient_of_zero():
    tx = optax.chain(jamp.loss_scaled(SCALER), optax.adam(0.5))
    _, state = run(tx, [BAD])
    assert state[1][0].count == 1 and jamp.all_finite(state)


def test_link_returns_float32_of_every_half_gradient():
    tx = jamp.loss_scaled(SCALER)
    updates, state = tx.update({"a": jnp.float16(1024.0), "n": None}, tx.init(None))
    assert updates["a"].dtype == jnp.float32 and updates["a"] == 1.0 and state.inner_state == optax.EmptyState()


# ---------------------------------------------------------------- inside and around other wrappers


def around(name):
    labels = {"w": "a", "b": "b"}
    return {
        "masked": lambda tx: optax.masked(tx, {"w": True, "b": True}),
        "partition": lambda tx: optax.partition({"a": tx, "b": optax.sgd(0.5)}, labels),
        "inject": lambda tx: optax.inject_hyperparams(lambda lr: optax.chain(tx, optax.scale(lr)))(lr=1.0),
        "chain": lambda tx: optax.chain(optax.chain(tx), optax.identity()),
        "conditionally": lambda tx: optax.conditionally_transform(tx, lambda step: step >= 0),
    }[name]


@pytest.mark.parametrize("name", ["masked", "partition", "inject", "chain", "conditionally"])
@pytest.mark.parametrize("form", ["inner", "link"])
def test_inside_other_wrappers(name, form):
    tx = jamp.loss_scaled(SCALER, optax.sgd(0.5)) if form == "inner" else (
        optax.chain(jamp.loss_scaled(SCALER), optax.sgd(0.5)))  # fmt: skip
    tx = around(name)(tx)
    step = jax.jit(chex.assert_max_traces(tx.update, n=1))
    params, state = PARAMS, tx.init(PARAMS)
    for g in [GRADS[0], {**BAD, "b": jnp.float32(0.0)}, GRADS[1]]:
        scaled = jamp.loss_scale(state).scale(g)
        if name == "partition":  # Only one of its two optimizers scales.
            scaled["b"] = g["b"]
        updates, state = step(scaled, state, params)
        params = optax.apply_updates(params, updates)
    assert_bitwise_equal(params, run(optax.sgd(0.5), GRADS[:2], scaled=False)[0])
    assert {k: v.item() for k, v in jamp.metrics(state).items()} == {
        "loss_scale": 2.0**9, "grads_finite": True, "skipped": 1, "consecutive_skipped": 0}  # fmt: skip


def test_extra_arguments_reach_the_inner_optimizer():
    def update(updates, state, params=None, *, factor, **extra):
        assert set(extra) == {"name"}
        return jax.tree.map(lambda u: u * factor, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = optax.chain(jamp.loss_scaled(SCALER, inner=inner))
    state = tx.init(jnp.float32(0))
    updates, _ = tx.update(jnp.float32(2.0**10), state, None, factor=jnp.float32(3.0), name="not an array")
    assert updates == 3.0


def test_reduce_on_plateau_is_not_moved_by_a_skipped_step():
    tx = jamp.loss_scaled(SCALER, inner=optax.contrib.reduce_on_plateau(patience=1))
    state = tx.init(PARAMS)
    _, state = tx.update(BAD, state, PARAMS, value=jnp.float32(1.0))
    assert state.inner_state.plateau_count == 0 and jnp.isinf(state.inner_state.best_value)


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: m.gradient_transformation()])
def test_accumulation_inside_skips_a_bad_microbatch_and_survives_a_change_of_scale(wrap):
    tx = jamp.loss_scaled(jamp.DynamicLossScale(2.0**10, period=1), inner=wrap(optax.MultiSteps(optax.sgd(1.0), 3)))
    params, state = run(tx, [GRADS[0], BAD, GRADS[1], GRADS[1], BAD, GRADS[0]])
    assert_bitwise_equal(params, jax.tree.map(lambda p: p - (1 + 0.5 + 0.5) / 3, PARAMS))
    assert state.inner_state.mini_step == 1 and state.skipped == 2


@pytest.mark.parametrize("form", ["inner", "link"])
@pytest.mark.parametrize("k", [1, 2])
def test_accumulation_outside_is_refused(form, k):
    # optax 0.2.8 clears its accumulator with `(1 - emit) * acc`, and 0 * inf is NaN.
    tx = jamp.loss_scaled(SCALER, optax.sgd(0.5)) if form == "inner" else (
        optax.chain(jamp.loss_scaled(SCALER), optax.sgd(0.5)))  # fmt: skip
    tx = optax.MultiSteps(tx, k)
    state = tx.init(PARAMS)
    for update in (tx.update, jax.jit(tx.update), tx.gradient_transformation().update):
        with pytest.raises(ValueError, match=r"Accumulate inside: jamp.loss_scaled\(scale, inner=optax.MultiSteps"):
            update(GRADS[0], state, PARAMS)


def test_optax_still_poisons_the_accumulator():
    # When this fails, optax has mended it; then look again at whether the nesting has to be refused.
    tx = optax.MultiSteps(optax.sgd(0.5), 2)
    _, state = run(tx, [BAD, GRADS[0], GRADS[0], GRADS[0]], scaled=False)
    assert not jamp.all_finite(state)


# ---------------------------------------------------------------- several losses, several optimizers


def test_any_overflow_counts_when_flags_combine():
    # In Paddle the last optimizer decides.
    first, second = (jamp.loss_scaled(SCALER, inner=optax.adam(0.125)) for _ in range(2))
    state = first.init(PARAMS)
    finite = jamp.all_finite(BAD) & jamp.all_finite(GRADS[0])
    for grads in (BAD, GRADS[0]):
        updates, after = second.update(grads, state, PARAMS, grads_finite=finite)
        assert_bitwise_equal(updates, jax.tree.map(jnp.zeros_like, PARAMS))
        assert (after.loss_scale.loss_scale, after.skipped) == (2.0**9, 1)
    _, after = second.update(BAD, state, PARAMS, grads_finite=True)
    assert after.skipped == 1
    _, after = second.update(GRADS[0], state, PARAMS, grads_finite=jnp.array(True))
    assert after.skipped == 0


def test_flag_passes_through_chain_and_partition():
    tx = optax.chain(jamp.loss_scaled(SCALER), optax.sgd(0.5))
    _, state = tx.update(GRADS[0], tx.init(PARAMS), PARAMS, grads_finite=False)
    assert jamp.metrics(state)["skipped"] == 1
    both = {
        "a": jamp.loss_scaled(SCALER, optax.sgd(0.5)),
        "b": jamp.loss_scaled(jamp.StaticLossScale(2.0), optax.sgd(1.0)),
    }
    tx = optax.partition(both, {"w": "a", "b": "b"})
    updates, _ = tx.update(GRADS[0], tx.init(PARAMS), PARAMS, grads_finite=False)
    assert_bitwise_equal(updates, jax.tree.map(jnp.zeros_like, PARAMS))


@pytest.mark.parametrize("flag", [jnp.array([True]), 1.0])
def test_flag_has_to_be_a_boolean_scalar(flag):
    tx = jamp.loss_scaled(SCALER, optax.sgd(0.5))
    with pytest.raises(ValueError, match="expected boolean scalar"):
        tx.update(GRADS[0], tx.init(PARAMS), PARAMS, grads_finite=flag)


def test_a_scale_for_each_loss():
    scales = {"gan": jamp.DynamicLossScale(2.0**10, period=1), "l1": jamp.DynamicLossScale(2.0**5, period=1)}
    slopes = {"gan": jnp.inf, "l1": 4.0}
    grads = {name: jamp.grad(lambda p, name=name: slopes[name] * p, scale)(1.0) for name, scale in scales.items()}
    scales = {name: scale.adjust(jamp.all_finite(grads[name])) for name, scale in scales.items()}
    assert {name: scale.loss_scale.item() for name, scale in scales.items()} == {"gan": 2.0**9, "l1": 2.0**6}


# ---------------------------------------------------------------- the state


def test_train_step_may_donate_the_state():
    tx = jamp.loss_scaled(SCALER, inner=optax.adam(0.125))
    step = jax.jit(lambda params, state, g: tx.update(g, state, params), donate_argnums=1)
    for _ in range(2):  # `init` again: donation must not have deleted what it is made of.
        state = tx.init(PARAMS)
        for g in GRADS[:3]:
            _, state = step(PARAMS, state, g)
    assert state.loss_scale.loss_scale == 2.0**11 and SCALER.loss_scale == 2.0**10


def test_state_is_a_pytree_that_can_be_saved(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    tx = jamp.loss_scaled(jamp.DynamicLossScale.preset("deepspeed"), inner=optax.adam(0.125))
    _, state = run(tx, [GRADS[0], BAD])
    assert_bitwise_equal(pickle.loads(pickle.dumps(state)), state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        assert_bitwise_equal(checkpointer.restore(tmp_path / "state", tx.init(PARAMS)), state)


def test_init_of_shapes_alone():
    tx = jamp.loss_scaled(SCALER, inner=optax.adam(0.125))
    assert_same_spec(jax.eval_shape(tx.init, PARAMS).skipped, jax.eval_shape(lambda: jnp.int32(0)))
    assert isinstance(tx.init(PARAMS), LossScaledState)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("wrong", [1024.0, None, optax.sgd(1.0), jamp.DynamicLossScale])
def test_wants_a_loss_scale(wrong):
    with pytest.raises(TypeError, match="expected a loss scale"):
        jamp.loss_scaled(wrong, optax.sgd(1.0))


@pytest.mark.parametrize("wrong", [0.1, "adam", optax.adam, jamp.StaticLossScale(2.0)])
def test_wants_an_optimizer(wrong):
    with pytest.raises(TypeError, match=r"expected an optax transformation.*inner=optax.adam"):
        jamp.loss_scaled(SCALER, inner=wrong)


def test_an_optimizer_that_cannot_take_half_parameters_is_told_of_masters():
    params = jnp.ones(2, jnp.bfloat16)
    tx = jamp.loss_scaled(jamp.NoOpLossScale(), inner=optax.apply_if_finite(optax.adam(1.0), 3))
    with pytest.raises(TypeError) as info:
        tx.update(params, tx.init(params), params)
    assert any("master_weights(inner)" in note for note in info.value.__notes__)


def test_a_step_outside_of_jit_compiles_nothing_once_it_ran(caplog):
    tx = jamp.mixed_precision(jamp.low_precision_state(optax.adam(1e-3), "int8"), "O2:float16")
    params = {"w": jnp.ones((64, 64))}
    state = tx.init(params)
    steps = [jax.tree.map(lambda x, by=by: x * by, params) for by in (1.0, jnp.inf)]
    for _ in range(2):
        for grads in steps:
            _, state = tx.update(grads, state, params)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for grads in steps:
            _, state = tx.update(grads, state, params)
    compiled = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Compiling")]
    # What looks for scales that are stuck compiles at a call of its own.
    assert not [message for message in compiled if "_skipped_at" not in message]
    assert int(state.skipped) == 3
    jitted, _ = jax.jit(tx.update)(steps[0], state, params)
    eager, _ = tx.update(steps[0], state, params)
    chex.assert_trees_all_close(jitted, eager, rtol=1e-5)
