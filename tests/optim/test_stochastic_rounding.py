"""`jamp.stochastic_rounding`: half weights without a master, unbiased."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp
from jamp.optim._stochastic_rounding import round_stochastically

HALF = (jnp.dtype("bfloat16"), jnp.dtype("float16"))


def train(tx, params, grad, steps):
    def step(carry, _):
        params, opt_state = carry
        updates, opt_state = tx.update(jnp.full_like(params, grad), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    return jax.jit(lambda c: lax.scan(step, c, length=steps))((params, tx.init(params)))[0]


def test_learns_where_plain_bfloat16_stagnates(key):
    params = jnp.ones(1000, jnp.bfloat16)
    stuck, _ = train(optax.sgd(1.0), params, 1e-3, 1000)
    assert (stuck == 1).all()
    learned, _ = train(jamp.stochastic_rounding(optax.sgd(1.0), key), params, 1e-3, 1000)
    # The gradient itself is rounded to bfloat16. Standard deviation of a walk 0.06, of the mean of 1000 0.002.
    target = 1 - 1000 * float(jnp.bfloat16(1e-3))
    assert abs(np.asarray(learned, np.float64).mean() - target) < 0.006


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("x", [1.001, -1.001, 3.14159, -7e-5, 6.1e-5, 3e-6, 1e-7, -2e-8, 65500.1])
def test_rounding_is_unbiased_and_picks_a_neighbor(key, dtype, x):
    draws = jax.jit(lambda k: round_stochastically(jnp.full(200_000, x, jnp.float32), k, dtype))(key)
    values = np.unique(np.asarray(draws, np.float64))
    spacing = np.ptp(values)
    assert len(values) == 2 and values[0] < np.float32(x) < values[1]
    one_bit = np.ptp(np.asarray(draws).view(np.int16).astype(int)) == 1  # Neighbors differ by one in their bits.
    assert one_bit or 0 in values
    error = np.asarray(draws, np.float64).mean() - np.float32(x)
    assert abs(error) < 5 * spacing / 2 / np.sqrt(200_000)  # Five standard deviations.


@pytest.mark.parametrize("dtype", HALF)
def test_no_dtype_is_promoted_implicitly(key, dtype):
    with jax.numpy_dtype_promotion("strict"):
        assert round_stochastically(jnp.ones(3), key, dtype).dtype == dtype


@pytest.mark.parametrize("dtype", HALF)
def test_representable_values_stay_as_they_are(key, dtype):
    every = lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), jnp.dtype(dtype))
    every = every[~jnp.isnan(every)]
    if dtype == jnp.bfloat16:  # CPUs flush float32 denormals in arithmetic; float16's are normal float32 numbers.
        every = every[(jnp.abs(every) >= jnp.finfo(dtype).tiny) | (every == 0)]
    out = round_stochastically(every.astype(jnp.float32), key, dtype)
    np.testing.assert_array_equal(np.asarray(out).view(np.uint16), np.asarray(every).view(np.uint16))


@pytest.mark.parametrize("dtype, largest, inf_from", [(jnp.float16, 65504.0, 65520.0),
                                                      (jnp.bfloat16, 3.3895314e38, 3.3961776e38)])  # fmt: skip
def test_beyond_the_largest_value_rounds_to_nearest(key, dtype, largest, inf_from):
    x = jnp.array([np.nextafter(np.float32(inf_from), np.float32(0)), inf_from, jnp.inf, jnp.nan], jnp.float32)
    out = jax.vmap(lambda k: round_stochastically(x, k, dtype))(jax.random.split(key, 100))
    expected = np.array([largest, np.inf, np.inf, np.nan], jnp.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.tile(expected.astype(np.float32), (100, 1)))


def test_same_key_same_run_and_the_key_advances(key):
    params = jnp.ones(100, jnp.bfloat16)
    tx = jamp.stochastic_rounding(optax.adam(1e-3), key)
    (a, state), (b, _) = train(tx, params, 1.0, 10), train(tx, params, 1.0, 10)
    c, _ = train(jamp.stochastic_rounding(optax.adam(1e-3), jax.random.key(1)), params, 1.0, 10)
    assert (a == b).all() and (a != c).any()
    assert (jax.random.key_data(state.key) != jax.random.key_data(key)).any()


def test_leaves_draw_their_own_numbers_and_float32_passes_through(key):
    params = {"a": jnp.ones(100, jnp.bfloat16), "b": jnp.ones(100, jnp.bfloat16), "norm": jnp.ones(1)}
    tx = jamp.stochastic_rounding(optax.sgd(1.0), key)
    grads = jax.tree.map(lambda p: jnp.full_like(p, 2.0**-10), params)
    updates, _ = tx.update(grads, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    assert (new["a"] != new["b"]).any() and new["norm"] == 1 - 2.0**-10


def test_needs_the_parameters(key):
    params = jnp.ones(1, jnp.bfloat16)
    tx = jamp.stochastic_rounding(optax.sgd(1.0), key)
    with pytest.raises(ValueError, match=r"tx.update\(grads, opt_state, params\)"):
        tx.update(params, tx.init(params))
