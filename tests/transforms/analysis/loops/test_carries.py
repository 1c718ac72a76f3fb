"""The dtype of a loop carry is a fixpoint: residual streams stay half, accumulators stay float32."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import (
    FINE,
    W,
    X,
    both_halves,
    check,
    find,
    layer_norm,
    mixed_levels,
    o2,
    product_dtypes,
    run,
    trace,
)


def scan_carries(jaxpr):
    (scan,) = find(jaxpr, "scan")
    return [var.aval.dtype.name for var in scan.outvars]


def half_product(half):
    return lambda x, w: jnp.matmul(x.astype(half), w.astype(half), preferred_element_type=jnp.float32)


LIMITS = {
    "relu": jax.nn.relu,
    "minimum": lambda z: jnp.minimum(z, 4),
    "clip": lambda z: jnp.clip(z, -4, 4),
    "clamp": lambda z: lax.clamp(-4.0, z, 4.0),
    "abs": jnp.abs,
    "soft threshold": lambda z: jnp.sign(z) * jnp.maximum(jnp.abs(z) - 1e-3, 0),
}


class TestCarries:
    """The dtype of a loop carry is a fixpoint."""

    @both_halves
    def test_a_residual_stream_through_scanned_layers_is_half(self, half):
        def fn(ws, x):
            return lax.scan(lambda x, w: (x + jnp.tanh(layer_norm(x) @ w), None), x, ws)[0]

        assert scan_carries(trace(o2(fn, half), jnp.stack([W, W]), X)) == [half]

    def test_an_embedded_residual_stream_through_scanned_layers_is_half(self):
        def fn(ws, table):
            x = table[jnp.array([0, 1, 2, 3])]
            return lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, ws)[0]

        assert scan_carries(trace(o2(fn), jnp.stack([W, W]), W)) == ["bfloat16"]

    def test_a_half_stream_into_scanned_layers_is_half(self):
        def fn(ws, x):
            return lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x @ ws[0], ws)[0]

        assert scan_carries(trace(o2(fn), jnp.stack([W, W]), X)) == ["bfloat16"]

    def test_layers_of_half_weights_have_a_half_stream(self):
        def fn(ws, x):
            return lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, ws)[0]

        half = jnp.bfloat16
        assert scan_carries(trace(o2(fn), jnp.stack([W, W]).astype(half), X.astype(half))) == ["bfloat16"]

    def test_layers_of_merged_weights_have_a_half_stream(self):
        def fn(ws, a, b, x):
            return lax.scan(lambda x, p: (x + jnp.tanh(x @ (p[0] + p[1] @ p[2])), None), x @ ws[0], (ws, a, b))[0]

        stacked = jnp.stack([W, W])
        assert scan_carries(trace(o2(fn), stacked, stacked[:, :, :2], stacked[:, :2], X)) == ["bfloat16"]

    @mixed_levels
    @pytest.mark.parametrize(
        "zero", [lambda: 0.0, lambda: jnp.float32(0), lambda: jnp.zeros(())], ids=["python", "scalar", "array"]
    )
    def test_a_float32_accumulator_stays_float32(self, zero, level):
        def fn(w, xs):
            return lax.scan(lambda total, x: (total + (x @ w).sum(), None), zero(), xs)[0]

        jaxpr = trace(jamp.cast_fn(fn, f"{level}:bfloat16"), W, jnp.stack([X, X]))
        assert scan_carries(jaxpr) == ["float32"]

    def test_an_accumulator_of_data_size_stays_float32(self):
        def fn(w, xs):
            return lax.scan(lambda total, x: (total + x @ w, None), jnp.zeros((1, 1)), xs)[0]

        assert scan_carries(trace(o2(fn), jnp.ones((1, 1)), jnp.ones((3, 1, 1)))) == ["float32"]
        assert run(o2(fn), jnp.ones((1, 1)), jnp.ones((300, 1, 1))) == 300  # In bfloat16 the count ends at 256.

    @pytest.mark.parametrize(
        "entered",
        [
            lambda h, new: h.at[-1].set(new),
            lambda h, new: jnp.roll(h, -1, 0).at[-1].set(new),
            lambda h, new: h.at[:-1].set(h[1:]).at[-1].set(new),
            lambda h, new: jnp.concatenate([h[1:], new[None]]),
            lambda h, new: lax.dynamic_update_index_in_dim(h, new, 2, 0),
        ],
        ids=["set", "roll", "slices", "concatenate", "update"],
    )
    def test_a_history_whose_last_entry_adds_up_is_float32(self, entered):
        def fn(w, h):
            return lax.scan(lambda h, _: (entered(h, h[-1] + jnp.tanh(h[-1] @ w)), None), h, length=4)[0]

        assert scan_carries(trace(o2(fn), W, jnp.stack([X, X, X]))) == ["float32"]

    def test_an_accumulator_in_a_while_loop_stays_float32(self):
        def fn(w, x):
            return lax.while_loop(lambda s: s[0] < 300, lambda s: (s[0] + 1, s[1] + x @ w), (0, jnp.zeros((1, 1))))[1]

        assert run(o2(fn), jnp.ones((1, 1)), jnp.ones((1, 1))) == 300

    @both_halves
    @pytest.mark.parametrize("level", ["OD", "O1", "O2", "O3"])
    def test_an_lstm_with_zeros_as_initial_state_runs_in_half(self, level, half):
        def lstm(w, xs):
            def cell(carry, x):
                c, h = carry
                i, f, g, o = jnp.split(x @ w["i"] + h @ w["h"] + w["b"], 4, axis=-1)
                c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
                h = jax.nn.sigmoid(o) * jnp.tanh(c)
                return (c, h), h

            zeros = jnp.zeros((2, 4))
            return lax.scan(cell, (zeros, zeros), xs)

        w = {"i": W[:8, :16], "h": W[:4, :16], "b": jnp.zeros(16)}
        xs = jnp.stack([X[:2, :8], X[2:, 8:]])
        cast = jamp.cast_fn(lstm, f"{level}:{half}")
        assert {tuple(dtypes) for dtypes in product_dtypes(trace(cast, w, xs))} == {(half, half)}
        for actual, expected in zip(jax.tree.leaves(run(cast, w, xs)), jax.tree.leaves(run(lstm, w, xs)), strict=True):
            np.testing.assert_allclose(actual, expected, atol=0.02)

    def test_a_running_maximum_over_time_is_exact(self):
        def fn(x, xs):
            return lax.scan(lambda m, x: (jnp.maximum(m, x), None), x, xs)[0]

        assert run(o2(fn), jnp.float32(0), jnp.array([FINE, 0.5])) == jnp.float32(FINE)

    def test_an_exponential_average_over_time_is_float32(self):
        def fn(w, x, xs):
            return lax.scan(lambda m, x: (0.875 * m + 0.125 * (x @ w), None), x, xs)[0]

        assert scan_carries(trace(o2(fn), W, X, jnp.stack([X, X]))) == ["float32"]

    @both_halves
    @pytest.mark.parametrize("limited", LIMITS.values(), ids=LIMITS)
    def test_an_accumulator_that_is_limited_in_each_iteration_is_float32(self, limited, half):
        def scanned(w, x, product=jnp.matmul):
            return lax.scan(lambda z, _: (limited(z + 0.02 * jnp.tanh(product(z, w))), None), x, length=100)[0]

        def counted(w, x):
            return lax.fori_loop(0, 100, lambda i, z: limited(z) + 0.02 * jnp.tanh(z @ w), x)

        assert scan_carries(trace(o2(scanned, half), W, X)) == ["float32"]
        expected, careful = run(scanned, W, X), run(partial(scanned, product=half_product(half)), W, X)
        for fn in (scanned, counted):
            error = jnp.linalg.norm(run(o2(fn, half), W, X) - run(fn, W, X))
            assert error <= 1.5 * jnp.linalg.norm(careful - expected)

    @pytest.mark.parametrize("limited", LIMITS.values(), ids=LIMITS)
    def test_a_residual_stream_that_is_limited_between_layers_is_half(self, limited):
        def layers(ws, x):
            return lax.scan(lambda x, w: (limited(x + jnp.tanh(x @ w)), None), x, ws)[0]

        def blocks(ws, x):
            return lax.scan(lambda x, w: (limited(x + jax.nn.relu(jax.nn.gelu(x) @ w) @ w), None), x, ws)[0]

        for fn in (layers, blocks):
            assert scan_carries(trace(o2(fn), jnp.stack([W, W]), X)) == ["bfloat16"]

    @pytest.mark.parametrize(
        "step",
        [
            lambda h, x, w: jnp.maximum(h, jnp.tanh(h @ w)),
            lambda h, x, w: jax.nn.relu(x @ w + h @ w),
            lambda h, x, w: jnp.clip(jnp.abs(h @ w), 0, 6) + x,
        ],
        ids=["maximum", "relu", "clip"],
    )
    def test_what_is_limited_and_not_added_to_is_half(self, step):
        def fn(w, h, xs):
            return lax.scan(lambda h, x: (step(h, x, w), None), h, xs)[0] @ w

        assert scan_carries(trace(o2(fn), W, X, jnp.stack([X, X]))) == ["bfloat16"]

    @pytest.mark.in_turns(3)
    @both_halves
    @mixed_levels
    @pytest.mark.parametrize(
        "scaled",
        [
            lambda v, dt: 0.005 * v,
            lambda v, dt: v / 200.0,
            lambda v, dt: -(v * 0.01) / 2.0,
            lambda v, dt: dt * v,
            lambda v, dt: v * (0.5 * dt),
        ],
        ids=["literal", "division", "chain", "array", "product of scalars"],
    )
    def test_the_step_size_of_an_integrator_is_exact(self, scaled, level, half):
        def step(w, x, dt):
            return x + scaled(jnp.clip(x @ w, 3.0, 3.0), dt)

        def scanned(w, x, dt):
            return lax.scan(lambda x, _: (step(w, x, dt), x @ w), x, length=4)[0]

        def unrolled(w, x, dt):
            for _ in range(4):
                x = step(w, x, dt)
            return x, x @ w

        dt = jnp.float32(0.003)
        for integrate in (scanned, unrolled):
            actual, expected = (run(fn, W, X, dt) for fn in (jamp.cast_fn(integrate, f"{level}:{half}"), integrate))
            np.testing.assert_array_equal(jax.tree.leaves(actual)[0], jax.tree.leaves(expected)[0])

    def test_a_decay_is_not_computed_again_for_each_sum_that_reads_it(self):
        def fn(w, x, total):
            term = x @ w
            for _ in range(40):
                term = 0.9 * term
                total = total + term.mean(-1, keepdims=True) + term
            return total, term @ w

        assert len(find(trace(o2(fn), W, X, jnp.zeros((4, 1))), "mul")) <= 5 * 40

    def test_carries_that_change_places_agree(self):
        def fn(ws, x):
            def outer(carry, w):
                def inner(pair, _):
                    return (pair[1] @ w, pair[0]), pair[0].mean()

                (a, b), means = lax.scan(inner, carry[:2], length=2)
                return (b, a, carry[2] * 0.5 + means.sum()), a

            return lax.scan(outer, (x, x * 0, jnp.float32(0)), ws)

        check(fn, jnp.stack([W, W.T]), X)

    def test_keys_and_counters_are_carried(self):
        def fn(w, x):
            def step(carry, _):
                key, i, x = carry
                key, mask_key = jax.random.split(key)
                return (key, i + 1, jnp.where(jax.random.bernoulli(mask_key, 0.5, x.shape), jnp.tanh(x @ w), 0.0)), key

            return lax.scan(step, (jax.random.key(0), 0, x), length=2)[0][1:]

        check(fn, W, X)

    def test_a_weak_carry_takes_the_dtype_that_the_body_gives_it(self):
        check(lambda w, x: lax.fori_loop(0, 3, lambda i, s: s + 1.0, 0.0) * x @ w, W, X)
