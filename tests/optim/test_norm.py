"""Norms of scaled gradients, and clipping by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp

TRUE = {"w": jnp.float32([3, 0]), "b": jnp.float32(4), "step": jnp.int32(7)}
FLOATS = {name: TRUE[name] for name in ("w", "b")}
POLICIES = ["O0", "O2:bfloat16", "O2:float16", "O3:float16"]


def loss(params):
    return sum((x.astype(jnp.float32) ** 2).sum() / 2 for x in params.values())


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_norm_is_that_of_the_true_gradients(policy, jit):
    small = jax.tree.map(lambda x: x / 16, FLOATS)  # Times the scale of 2**15 they fit float16.
    params = jamp.get_policy(policy).cast_to_param(small)
    opt_state = jamp.mixed_precision(optax.sgd(1.0), policy).init(params)
    norm = jit(lambda p, s: jamp.global_norm(jamp.scaled_value_and_grad(loss, s)(p)[1], s))(params, opt_state)
    assert norm == 5 / 16 and norm.dtype == jnp.float32 and not norm.weak_type


def test_half_precision_gradients_are_squared_in_float32():
    grads = jnp.full(4, 2.0**12, jnp.float16)  # Squares beyond float16, a sum of small ones that bfloat16 loses.
    assert jamp.global_norm(grads) == 2.0**13
    assert jamp.global_norm(grads, jamp.StaticLossScale(2.0**12)) == 2
    assert jamp.global_norm(jnp.ones(4096, jnp.bfloat16)) == 64


def test_updates_of_half_parameters_are_no_numbers():
    params = jamp.half_params({"w": jnp.ones((4, 4))}, "bfloat16")
    tx = jamp.mixed_precision(optax.sgd(0.25), "O3:bfloat16")
    updates, _ = tx.update({"w": jnp.ones((4, 4), jnp.bfloat16)}, tx.init(params), params)
    with pytest.raises(TypeError, match="differences of bits"):
        jamp.global_norm(updates)
    new_params = optax.apply_updates(params, updates)
    step = jax.tree.map(jnp.subtract, *map(jamp.cast_to_full, (new_params, params)))
    assert jamp.global_norm(step) == 1.0


def test_what_is_not_floating_does_not_count():
    assert jamp.global_norm(TRUE) == 5
    assert jamp.global_norm({"step": jnp.int32(7), "none": None}) == 0
    assert jamp.global_norm(jnp.complex64([3 + 4j])) == 5


@pytest.mark.parametrize("max_norm, factor", [(2.5, 0.5), (5.0, 1), (100.0, 1)])
def test_clipped_gradients_stay_scaled(max_norm, factor):
    scaler = jamp.DynamicLossScale(2.0**10)
    scaled = scaler.scale(FLOATS) | {"step": TRUE["step"], "half": jnp.zeros(2, jnp.float16)}
    clipped = jax.jit(lambda g, s: jamp.clip_by_global_norm(g, max_norm, s))(scaled, scaler)
    for name, value in scaled.items():
        assert clipped[name].dtype == value.dtype
        np.testing.assert_array_equal(clipped[name], value if name == "step" else value * factor)


def test_clipping_by_hand_is_clipping_inside():
    inside = jamp.mixed_precision(optax.chain(optax.clip_by_global_norm(2.5), optax.sgd(1.0)), "O2:float16")
    by_hand = jamp.mixed_precision(optax.sgd(1.0), "O2:float16")

    @jax.jit
    def step(params, state):
        grads = jamp.scaled_value_and_grad(loss, state)(params)[1]
        clipped = jamp.clip_by_global_norm(grads, 2.5, state)
        same_scale = jamp.set_loss_scale(inside.init(params), jamp.loss_scale(state))
        return inside.update(grads, same_scale, params)[0], by_hand.update(clipped, state, params)[0]

    ours, theirs = step(FLOATS, by_hand.init(FLOATS))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert optax.tree.norm(ours) == 2.5


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan])
def test_what_is_not_finite_stays_so_and_the_step_is_skipped(bad):
    tx = jamp.mixed_precision(optax.sgd(1.0), "O2:float16")
    params = {"a": jnp.float32([1, bad]), "b": jnp.ones(2)}
    state = tx.init(params)
    assert not jnp.isfinite(jamp.global_norm(params, state))
    clipped = jamp.clip_by_global_norm(params, 1.0, state)
    assert not any(jnp.isfinite(x).all() for x in clipped.values())
    updates, state = tx.update(clipped, state, params)
    assert state.skipped == 1 and not updates["b"].any()


@pytest.mark.parametrize("power", [-125, -100, -64, 0, 64, 100, 124])
def test_norms_whose_squares_float32_cannot_hold(power):
    size = np.float32(2.0**power)
    grads = {"w": jnp.float32([3, 0]) * size, "b": jnp.float32(4) * size, "step": jnp.int32(7)}
    assert jax.jit(jamp.global_norm)(grads) == 5 * size
    clipped = jax.jit(jamp.clip_by_global_norm)(grads, 2.5 * size)
    np.testing.assert_array_equal(clipped["w"], jnp.float32([1.5, 0]) * size)
    np.testing.assert_array_equal(jamp.clip_by_global_norm(grads, 5 * size)["b"], grads["b"])


def test_clips_where_float32_cannot_hold_the_norm():
    grads = jnp.full(16, 2.0**127)
    assert jnp.isinf(jamp.global_norm(grads))
    np.testing.assert_array_equal(jax.jit(jamp.clip_by_global_norm)(grads, 4.0), jnp.ones(16))
    scaled = jamp.clip_by_global_norm(grads, 4.0, jamp.StaticLossScale(2.0**10))  # 2**119 is true.
    np.testing.assert_array_equal(scaled, jnp.full(16, 2.0**10))


def test_ordinary_norms_are_those_of_optax():
    grads = {"a": jax.random.normal(jax.random.key(0), (64, 8)), "b": jax.random.normal(jax.random.key(1), (7,))}
    clip = optax.clip_by_global_norm(1.5)
    theirs, ours = clip.update(grads, clip.init(grads))[0], jamp.clip_by_global_norm(grads, 1.5)
    np.testing.assert_allclose(jamp.global_norm(grads), optax.tree.norm(grads), rtol=2e-7)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=4e-7), ours, theirs)


def test_gradients_of_zero_stay_zero():
    assert not jamp.clip_by_global_norm(jnp.zeros(3), 1.0).any()
    assert jamp.global_norm(jnp.zeros(3)) == 0


@pytest.mark.parametrize("max_norm", [0.0, -1.0, float("nan"), np.ones(2)])
def test_an_impossible_norm(max_norm):
    with pytest.raises(ValueError, match="`max_norm`"):
        jamp.clip_by_global_norm(TRUE, max_norm)


def test_metrics_have_the_norm_by_the_scale_that_the_gradients_were_made_with():
    tx = jamp.loss_scaled(jamp.DynamicLossScale(8.0, period=2), inner=optax.sgd(0.0))
    state = tx.init(FLOATS)
    for scale in (8, 8, 16, 16):
        grads = jamp.scaled_value_and_grad(loss, state)(FLOATS)[1]
        assert jamp.global_norm(grads, state) == 5
        _, state = tx.update(grads, state, FLOATS)
        found = jamp.metrics(state, grads)
        assert (state.scale_used, found["grad_norm"]) == (scale, 5)
    assert "grad_norm" not in jamp.metrics(state)
