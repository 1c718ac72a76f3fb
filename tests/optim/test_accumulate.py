"""`jamp.accumulate_gradients`: a batch in several passes is the batch."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jamp
from tests.helpers import assert_bitwise_equal, assert_same_spec


def loss_fn(params, x, y):
    return ((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2).mean()


@pytest.fixture
def problem(key):
    keys = jax.random.split(key, 4)
    params = {"w": jax.random.normal(keys[0], (4, 8)), "v": jax.random.normal(keys[1], (8, 2))}
    return params, jax.random.normal(keys[2], (24, 4)), jax.random.normal(keys[3], (24, 2))


@pytest.mark.parametrize("microbatches", [1, 2, 3, 24])
def test_equals_the_whole_batch(problem, microbatches):
    expected = jax.value_and_grad(loss_fn)(*problem)
    actual = jax.jit(jamp.accumulate_gradients(jax.value_and_grad(loss_fn), microbatches))(*problem)
    assert_same_spec(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=2e-6, atol=1e-6)


def test_half_gradients_are_raised_before_they_are_added():
    """4096 gradients of one: their sum in float16 stops at 2048."""
    grad_fn = jax.value_and_grad(lambda w, x: (w * x).mean())
    value, grad = jamp.accumulate_gradients(grad_fn, 4096)(jnp.float16(2), jnp.ones(4096, jnp.float16))
    assert (value, grad) == (2, 1) and value.dtype == grad.dtype == jnp.float32


def test_aux_is_stacked_and_examples_are_dealt_out_in_turn():
    grad_fn = jax.value_and_grad(lambda w, x: ((w * x).mean(), x), has_aux=True)
    (value, aux), grad = jamp.accumulate_gradients(grad_fn, 2)(jnp.float32(2), jnp.arange(6.0))
    assert aux.tolist() == [[0, 2, 4], [1, 3, 5]]
    assert (value, grad) == (5, 2.5)


def test_keyword_arguments_go_to_every_pass_as_they_are():
    grad_fn = jax.value_and_grad(lambda w, x, factor, name: (w * x).mean() * factor if name == "mean" else None)
    value, _ = jamp.accumulate_gradients(grad_fn, 2)(jnp.float32(2), jnp.ones(4), factor=jnp.float32(3), name="mean")
    assert value == 6


def test_several_differentiated_arguments_are_a_tree():
    grad_fn = jax.value_and_grad(lambda params, x: (params[0] * x + params[1]).mean())
    _, grads = jamp.accumulate_gradients(grad_fn, 2)((jnp.float32(2), jnp.float32(1)), jnp.arange(4.0))
    assert grads == (1.5, 1)


def test_random_keys_can_be_part_of_the_batch(key):
    grad_fn = jax.value_and_grad(lambda w, keys: (w * jax.vmap(jax.random.normal)(keys)).mean())
    keys = jax.random.split(key, 8)
    np.testing.assert_allclose(
        jamp.accumulate_gradients(grad_fn, 4)(jnp.float32(1), keys), grad_fn(jnp.float32(1), keys), rtol=1e-6
    )


@pytest.mark.parametrize("bad", [0, 5, 11])
def test_a_bad_microbatch_discards_its_window_and_no_other(bad):
    """With the loss scale of the window in all passes: after the skip it is half, and nothing else has changed."""
    tx = jamp.loss_scaled(jamp.DynamicLossScale(1024.0), inner=optax.adam(0.1))
    params = {"w": jnp.ones(3)}

    @jax.jit
    def step(params, opt_state, x):
        grad_fn = jamp.scaled_value_and_grad(lambda p, x: (x @ p["w"]).mean(), opt_state)
        loss, grads = jamp.accumulate_gradients(grad_fn, 4)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    x = jnp.arange(36.0).reshape(12, 3)
    clean, clean_state, loss = step(params, tx.init(params), x)
    np.testing.assert_allclose(loss, x.sum() / 12)
    skipped, state, _ = step(params, tx.init(params), x.at[bad, 0].set(jnp.nan))
    assert_bitwise_equal(skipped, params)
    assert int(state.skipped) == 1 and jamp.loss_scale(state).loss_scale == 512
    assert_bitwise_equal(step(skipped, state, x)[0], clean)
    assert_bitwise_equal(step(skipped, state, x)[1].inner_state, clean_state.inner_state)


def test_the_loss_is_traced_once(problem):
    once = chex.assert_max_traces(n=1)
    accumulated = jamp.accumulate_gradients(jax.value_and_grad(once(loss_fn)), 4)
    step = jax.jit(once(lambda *args: accumulated(*args)))
    for _ in range(3):
        step(*problem)


def test_examples_stay_on_their_device():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones((64, 4)), NamedSharding(mesh, PartitionSpec("data")))
    grad_fn = jax.value_and_grad(lambda w, x: jnp.tanh(x @ w).mean())
    hlo = jax.jit(jamp.accumulate_gradients(grad_fn, 4)).lower(jnp.ones(4), x).compile().as_text()
    assert "all-reduce" in hlo
    assert not any(op in hlo for op in ("all-gather", "all-to-all", "collective-permute"))


def test_errors_name_all_that_is_wrong():
    grad_fn = jax.value_and_grad(lambda w, batch, key=None: w)
    for wrong in (0, -1, 2.0, True, "4"):
        with pytest.raises(ValueError, match="expected a positive integer"):
            jamp.accumulate_gradients(grad_fn, wrong)
    accumulated = jamp.accumulate_gradients(grad_fn, 4)
    batch = {"x": jnp.ones((6, 2)), "y": jnp.ones(8), "rate": jnp.float32(1)}
    with pytest.raises(
        ValueError, match=r"argument 1\['rate'\]: shape \(\)\n  argument 1\['x'\]: shape \(6, 2\)\nPass"
    ):
        accumulated(jnp.float32(1), batch)
    with pytest.raises(ValueError, match=r"different lengths \[4, 8\]: argument 1 \(8,\), argument 2 \(4,\)"):
        accumulated(jnp.float32(1), jnp.ones(8), jnp.ones(4))
    with pytest.raises(ValueError, match="There is no batch"):
        accumulated(jnp.float32(1), key=jnp.ones(8))


def test_answers_in_the_form_of_the_function():
    x, params = jnp.arange(12.0).reshape(4, 3), {"w": jnp.ones(3), "n": jnp.int32(2)}
    grad_fn = jax.value_and_grad(lambda p, x: (p["w"] * x).mean() * p["n"], allow_int=True)
    accumulated = jamp.accumulate_gradients(grad_fn, 2)
    for run in (accumulated, jax.jit(accumulated)):
        value, grads = run(params, x)
        assert (value, grads["n"].dtype, grads["n"].shape) == (11, jax.dtypes.float0, ())
        np.testing.assert_allclose(grads["w"], grad_fn(params, x)[1]["w"], rtol=1e-6)
    without_aux = jax.value_and_grad(lambda w, x: ((w * x).mean(), None), has_aux=True)
    (value, aux), _ = jamp.accumulate_gradients(without_aux, np.int64(2))(params["w"], x)
    assert (value, aux) == (5.5, None)


def test_parameters_that_are_none():
    """Equinox and `optax.masked` leave None where there is nothing to train."""
    grad_fn = jax.value_and_grad(lambda p, x: (p["w"] * x).mean(), allow_int=True)
    params = {"w": jnp.float32(3), "frozen": None, "n": jnp.int32(2)}
    loss, grads = jamp.accumulate_gradients(grad_fn, 2)(params, jnp.arange(4.0))
    assert (loss, grads["w"], grads["frozen"]) == (4.5, 1.5, None)
    assert grads["n"].dtype == jax.dtypes.float0


def test_refuses_what_does_not_answer_as_value_and_grad():
    with pytest.raises(TypeError, match=r"Write jax.value_and_grad\(loss_fn\)"):
        jamp.accumulate_gradients(3, 2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"expected `\(value, grads\)`.* jax.grad does not"):
        jamp.accumulate_gradients(jax.grad(lambda w, x: (w * x).mean()), 2)(jnp.ones(3), jnp.ones((4, 3)))
    with pytest.raises(TypeError, match="expected a scalar loss"):
        jamp.accumulate_gradients(lambda w, x: (w, w), 2)(jnp.ones(3), jnp.ones((4, 3)))
