"""How half precision flows: weak literals, lazy arguments, one cast, islands, backward demand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import (
    EYE,
    FINE,
    SIZE,
    W,
    X,
    both_halves,
    casts_to,
    find,
    layer_norm,
    mixed_levels,
    o2,
    operand_dtypes,
    out_dtypes,
    product_dtypes,
    run,
    trace,
)


class TestWeakLiterals:
    """Literals and scalars take the dtype of what they meet."""

    @both_halves
    @pytest.mark.parametrize(
        "scale",
        [
            lambda h: h * 0.5,
            lambda h: h * jnp.float32(0.5),
            lambda h: h * np.float32(0.5),
            lambda h: h + jnp.zeros((SIZE,)) * 2.0,
            lambda h: jnp.where(h > 0, h, 0.0),
            lambda h: jnp.where(h > 0, h, jnp.full_like(h, 0.25)),
            lambda h: jnp.maximum(h, jnp.zeros_like(h)),
        ],
        ids=["python", "jax scalar", "numpy scalar", "computed array", "zero", "filled array", "zeros"],
    )
    def test_a_constant_does_not_raise_half_data(self, scale, half):
        jaxpr = trace(o2(lambda w, x: scale(x @ w) @ w @ w, half), W, X)
        on_data = [eqn for eqn in find(jaxpr, "mul", "add", "select_n", "max") if eqn.outvars[0].aval.shape == X.shape]
        assert [eqn.outvars[0].aval.dtype.name for eqn in on_data] == [half]
        assert len(casts_to(jaxpr, jnp.float32)) <= 1  # The result.

    @both_halves
    def test_a_number_that_is_computed_scales_in_float32(self, half):
        """It may have more digits than half has; the result is rounded, and all products are half."""
        jaxpr = trace(o2(lambda w, x: x @ w * (1.0 / jnp.sqrt(jnp.float32(SIZE))) @ w @ w, half), W, X)
        assert product_dtypes(jaxpr) == [[half, half]] * 3
        assert [eqn.outvars[0].aval.dtype.name for eqn in find(jaxpr, "mul")] == ["float32"]

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_a_literal_does_not_raise_half_data_at_any_level(self, level):
        jaxpr = trace(jamp.cast_fn(lambda w, x: jnp.tanh((x @ w) * 0.5 + 1.0) @ w, f"{level}:bfloat16"), W, X)
        assert out_dtypes(jaxpr, "mul", "add", "tanh") == {"bfloat16"}

    def test_a_closed_over_scalar_array_does_not_raise_half_data(self):
        scale = jnp.float32(0.125)
        jaxpr = trace(o2(lambda w, x: jnp.tanh((x @ w) * scale) @ w), W, X)
        assert out_dtypes(jaxpr, "mul", "tanh") == {"bfloat16"}


class TestLazyArguments:
    """A float32 argument is cast where it is used in half, and nowhere else."""

    @mixed_levels
    @both_halves
    def test_an_embedding_is_gathered_and_its_gradient_accumulated_in_float32(self, level, half):
        def fn(table, w, index):
            return jnp.tanh(table[index] @ w)

        cast = jamp.cast_fn(fn, f"{level}:{half}")
        index = jnp.array([0, 0, 3])
        assert operand_dtypes(find(trace(cast, W, W, index), "gather")[0]) == ["float32"]
        jaxpr = trace(jax.grad(lambda table: jnp.sum(cast(table, W, index))), W)
        assert {tuple(operand_dtypes(eqn)) for eqn in find(jaxpr, "scatter-add")} == {("float32", "float32")}

    def test_the_gradient_of_an_embedding_counts_to_more_than_half_can(self):
        index = jnp.zeros(300, jnp.int32)  # A count of ones in bfloat16 ends at 256.
        loss = o2(lambda table: jnp.sum(table[index] @ jnp.ones((1, 1))))
        assert run(jax.grad(loss), jnp.ones((2, 1)))[0, 0] == 300

    @pytest.mark.parametrize("level", ["OD", "O1", "O2"])
    def test_running_statistics_never_pass_through_half(self, level):
        def fn(x, w, mean, var):
            h = x @ w
            new_mean = 0.5 * mean + 0.5 * h.mean(0)
            new_var = 0.5 * var + 0.5 * ((h - h.mean(0)) ** 2).mean(0)
            return (h - new_mean) * lax.rsqrt(new_var + 1.0), new_mean, new_var

        cast = jamp.cast_fn(fn, f"{level}:bfloat16")
        old = jnp.full(SIZE, FINE)
        _, mean, var = run(cast, jnp.ones((16, SIZE)), EYE, old, old)
        np.testing.assert_array_equal(mean, np.full(SIZE, 0.5 * FINE + 0.5, np.float32))
        np.testing.assert_array_equal(var, np.full(SIZE, 0.5 * FINE, np.float32))

    def test_statistics_used_in_evaluation_never_pass_through_half(self):
        jaxpr = trace(o2(lambda w, x, mean, var: ((x @ w - mean) * lax.rsqrt(var)) @ w), W, X, X[0], X[1] ** 2)
        assert find(jaxpr, "sub")[0].outvars[0].aval.dtype == jnp.float32
        assert all(eqn.invars[0].aval.shape != (SIZE,) for eqn in casts_to(jaxpr, jnp.bfloat16))

    def test_the_scale_and_bias_of_a_norm_meet_its_statistics_in_float32(self):
        jaxpr = trace(o2(lambda w, x, s, b: layer_norm(x @ w, s, b) @ w), W, X, X[0], X[1])
        assert all(eqn.invars[0].aval.shape != (SIZE,) for eqn in casts_to(jaxpr, jnp.bfloat16))

    @pytest.mark.parametrize("level", ["OD", "O1", "O2"])
    def test_an_argument_that_is_returned_is_not_rounded(self, level):
        x = jnp.float32(FINE)
        assert jamp.cast_fn(lambda x: x, f"{level}:bfloat16")(x) == x
        assert jamp.cast_fn(lambda x: {"a": jnp.reshape(x, 1)[0]}, f"{level}:bfloat16")(x)["a"] == x

    def test_a_function_without_products_runs_in_float32(self):
        jaxpr = trace(o2(lambda p, g: p - 0.1 * g), W, W)
        assert not casts_to(jaxpr, jnp.bfloat16)


class TestOneCast:
    """A value is cast to a dtype once, whoever asks."""

    @pytest.mark.parametrize("level", ["O1", "O2", "O3"])
    def test_a_weight_that_is_used_twice_is_cast_once(self, level):
        jaxpr = trace(jamp.cast_fn(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w), f"{level}:bfloat16"), W, X)
        assert [eqn.invars[0].aval.shape for eqn in casts_to(jaxpr, jnp.bfloat16)].count((SIZE, SIZE)) == 1

    def test_a_weight_that_a_loop_closes_over_is_cast_outside(self):
        def fn(w, x):
            return lax.scan(lambda h, x: (jnp.tanh(x @ w + h @ w), None), jnp.zeros_like(x), jnp.stack([x, x]))[0]

        jaxpr = trace(o2(fn), W, X)
        (scan,) = find(jaxpr, "scan")
        inside = [eqn.invars[0].aval.shape for eqn in casts_to(scan.params["jaxpr"], jnp.bfloat16)]
        assert (SIZE, SIZE) not in inside
        assert [eqn.invars[0].aval.shape for eqn in casts_to(jaxpr, jnp.bfloat16)].count((SIZE, SIZE)) == 1

    def test_a_weight_that_calls_share_is_cast_once(self):
        def fn(w, x):
            step = jax.jit(lambda x, w: jnp.tanh(x @ w))
            return step(step(x, w), w)

        casts = casts_to(trace(o2(fn), W, X), jnp.bfloat16)
        assert [eqn.invars[0].aval.shape for eqn in casts].count((SIZE, SIZE)) == 1

    def test_a_half_value_raised_and_lowered_is_the_half_value(self):
        def fn(w, x):
            h = jnp.tanh(x @ w)
            return jnp.tanh(h.astype(jnp.float16).astype(jnp.float32) @ w) @ w

        casts = [
            eqn for eqn in casts_to(trace(o2(fn, "float16"), W, X), jnp.float16) if eqn.invars[0].aval.shape == X.shape
        ]
        assert len(casts) <= 2  # `x`, and at most one of `h`.

    def test_inner_functions_that_repeat_are_traced_once(self):
        step = jax.jit(lambda x, w: jnp.tanh(x @ w))

        def fn(w, x):
            for _ in range(4):
                x = step(x, w)
            return x @ w

        calls = find(trace(o2(fn), W, X), "jit")
        in_half = [call for call in calls if call.invars[0].aval.dtype == jnp.bfloat16]
        assert len(in_half) >= 3
        assert len({id(call.params["jaxpr"]) for call in in_half}) == 1


class TestIslands:
    """Storage half, arithmetic full: float32 around a statistic, half again outside."""

    @both_halves
    def test_a_norm_computes_in_float32_and_gives_half(self, half):
        jaxpr = trace(o2(lambda w, x: layer_norm(x @ w) @ w, half), W, X)
        assert out_dtypes(jaxpr, "sub", "rsqrt", "reduce_sum") == {"float32"}
        assert {tuple(dtypes) for dtypes in product_dtypes(jaxpr)} == {(half, half)}

    @both_halves
    def test_without_scopes_an_island_meets_half_data_of_its_size_in_half(self, half):
        jaxpr = trace(o2(lambda w, x: (x @ w + layer_norm(x @ w)) @ w, half), W, X)
        last_add = [eqn for eqn in find(jaxpr, "add") if eqn.outvars[0].aval.shape == X.shape][-1]
        assert operand_dtypes(last_add) == [half, half]

    def test_without_scopes_half_data_that_meets_a_statistic_is_raised(self):
        jaxpr = trace(o2(lambda w, x: (x @ w - (x @ w).mean(-1, keepdims=True)) @ w), W, X)
        assert out_dtypes(jaxpr, "sub") == {"float32"}

    def test_an_island_ends_where_its_scope_ends(self):
        def fn(w, x):
            with jax.named_scope("norm"):
                y = layer_norm(x @ w)
            with jax.named_scope("activation"):
                return jnp.tanh(y) @ w

        assert out_dtypes(trace(o2(fn), W, X), "tanh") == {"bfloat16"}

    def test_an_island_goes_on_inside_its_scope(self):
        def fn(w, x):
            with jax.named_scope("norm"):
                return jnp.tanh(layer_norm(x @ w)) @ w

        assert out_dtypes(trace(o2(fn), W, X), "tanh") == {"float32"}

    def test_a_statistic_that_leaves_its_scope_is_not_rounded(self):
        def fn(w, x):
            h = x @ w
            with jax.named_scope("statistics"):
                mean = h.mean(-1, keepdims=True)
            return jnp.tanh(h - mean) @ w

        jaxpr = trace(o2(fn), W, X)
        assert out_dtypes(jaxpr, "sub") == {"float32"}
        assert all(eqn.invars[0].aval.shape != (4, 1) for eqn in casts_to(jaxpr, jnp.bfloat16))

    def test_half_data_alone_stays_half(self):
        jaxpr = trace(o2(lambda w, x: (jnp.tanh(x @ w) * jax.nn.sigmoid(x @ w) + x @ w) @ w), W, X)
        assert out_dtypes(jaxpr, "tanh", "logistic", "mul", "add") == {"bfloat16"}

    @pytest.mark.parametrize("level", ["O1"])
    def test_at_o1_the_widest_operand_decides(self, level):
        jaxpr = trace(
            jamp.cast_fn(lambda w, x, b: jnp.tanh(x @ w + b) + jnp.tanh(x @ w) @ w, f"{level}:bfloat16"), W, X, X[0]
        )
        assert sorted(eqn.outvars[0].aval.dtype.name for eqn in find(jaxpr, "tanh")) == ["bfloat16", "float32"]


class TestBackwardDemand:
    """What only float32 operations read is computed in float32."""

    @pytest.mark.parametrize(
        ("reduce", "expected"),
        [
            (lambda h: jnp.sum(h * h), SIZE * 300.0**2),
            (lambda h: jnp.sum(jnp.square(h)), SIZE * 300.0**2),
            (lambda h: jnp.sqrt(jnp.sum(h * h)), 4 * 300.0),
            (jnp.linalg.norm, 4 * 300.0),
            (lambda h: jnp.vdot(h, h), SIZE * 300.0**2),
            (lambda h: jnp.mean(h * 300.0), 300.0**2),
            (lambda h: jnp.sum(jnp.reshape(h * h, (2, -1)).T), SIZE * 300.0**2),
            (lambda h: jnp.var(jnp.concatenate([h, -h])), 300.0**2),
        ],
        ids=["product", "square", "root", "norm", "vdot", "mean", "moved", "variance"],
    )
    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_the_operand_of_a_sum_does_not_overflow_float16(self, reduce, expected, level):
        cast = jamp.cast_fn(lambda x: reduce(x @ EYE), f"{level}:float16")
        np.testing.assert_allclose(run(cast, jnp.full((1, SIZE), 300.0)), expected, rtol=1e-6)

    @pytest.mark.parametrize("level", ["O1", "O2"])
    @pytest.mark.parametrize(
        "choose",
        [
            lambda h: jnp.argmax(h, -1),
            lambda h: jnp.argmin(-h, -1),
            lambda h: lax.top_k(h, 2)[1][:, 0],
            lambda h: lax.top_k(jax.nn.softmax(h / 64), 2)[1][:, 0],
            lambda h: jnp.argmin(jnp.sum((h - 300) ** 2) - 2 * h, -1),
        ],
        ids=["argmax", "argmin", "top_k", "top_k of softmax", "nearest code"],
    )
    def test_the_best_of_many_is_no_tie(self, choose, level):
        """The last logit is 257, the others 256: sums of numbers that bfloat16 has, but no bfloat16 is 257."""
        parts = jnp.stack([jnp.full(SIZE, 256.0), (jnp.arange(SIZE) == SIZE - 1) * 1.0])
        cast = jamp.cast_fn(lambda x, w: choose(x @ w), f"{level}:bfloat16")
        assert run(cast, jnp.ones((1, 2)), parts).tolist() == [SIZE - 1]

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_sampling_adds_its_noise_in_float32(self, level):
        jaxpr = trace(
            jamp.cast_fn(lambda w, x, key: jax.random.categorical(key, x @ w), f"{level}:bfloat16"),
            W, X, jax.random.key(0),
        )  # fmt: skip
        assert out_dtypes(jaxpr, "dot_general", "add", "neg", "log") == {"float32"}

    def test_demand_passes_through_a_call(self):
        square = jax.jit(lambda h: h * h)
        cast = o2(lambda x: jnp.sum(square(x @ EYE)), "float16")
        assert run(cast, jnp.full((1, SIZE), 300.0)) == SIZE * 300.0**2

    def test_the_gradient_of_such_a_sum_is_finite(self):
        cast = o2(lambda x: jnp.sum((x @ EYE) ** 2) / 1024, "float16")
        np.testing.assert_array_equal(run(jax.grad(cast), jnp.full((1, SIZE), 512.0)), np.ones((1, SIZE), np.float32))

    @pytest.mark.parametrize("level", ["OD", "O1", "O2"])
    @pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
    def test_seventy_thousand_ones_sum_to_seventy_thousand(self, level, dtype):
        assert jamp.cast_fn(jnp.sum, f"{level}:float16")(jnp.ones(70_000, dtype)) == 70_000


def test_interpolation_of_images_is_half():
    """`jax.image.resize` asks for the highest precision at any dtype: that is not the user's word."""
    image = jnp.ones((1, 4, 4, SIZE))
    fn = o2(lambda w, x: jax.image.resize(x @ w, (1, 8, 8, SIZE), "linear") @ w)
    assert {tuple(dtypes) for dtypes in product_dtypes(trace(fn, W, image))} == {("bfloat16", "bfloat16")}
    assert jnp.array_equal(fn(EYE, image), image.repeat(2, 1).repeat(2, 2))
