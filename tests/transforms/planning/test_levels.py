"""What each level leaves in float32, and what is the user's word at every level."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import W, X, evaluate, find, layer_norm, o2, out_dtypes, product_dtypes, run, trace

BETWEEN = 1 + 2**-10  # Float16 holds it, bfloat16 does not.


class TestTheUsersWord:
    """What the user wrote explicitly is respected."""

    @pytest.mark.parametrize("level", ["OD", "O1", "O2", "O3"])
    @pytest.mark.parametrize(
        "precision", ["highest", lax.Precision.HIGHEST, (lax.Precision.HIGHEST,) * 2, "F32_F32_F32"]
    )
    def test_an_explicit_precision_stays_full(self, level, precision):
        jaxpr = trace(jamp.cast_fn(lambda w, x: jnp.dot(x, w, precision=precision), f"{level}:bfloat16"), W, X)
        assert product_dtypes(jaxpr) == [["float32", "float32"]]
        assert find(jaxpr, "dot_general")[0].params["precision"] is not None

    @pytest.mark.parametrize("level", ["OD", "O1", "O2"])
    @pytest.mark.parametrize("between", [lambda h: h, lambda h: h * 2 + h, jax.nn.silu, jax.jit(lambda h: -h)])
    def test_what_a_product_with_an_explicit_precision_reads_is_not_rounded(self, level, between):
        """As the derivatives of `slogdet` and `solve` are: the local energies of a wave function were off by 660 %."""

        def fn(w, x):
            return jnp.dot(between(x @ w), w.T, precision="highest")

        cast = jamp.cast_fn(fn, f"{level}:bfloat16")
        first, last = find(trace(cast, W, X), "dot_general")
        assert [eqn.outvars[0].aval.dtype for eqn in (first, last)] == [jnp.float32] * 2
        # What was rounded were the operands of the first product alone.
        half = [jnp.float32(operand.astype(jnp.bfloat16)) for operand in (W, X)]
        expected = jnp.dot(between(half[1] @ half[0]), W.T, precision="highest")
        assert jnp.allclose(run(cast, W, X), expected, rtol=1e-5, atol=1e-5)

    def test_the_default_matmul_precision_of_a_context_stays_full(self):
        def fn(w, x):
            with jax.default_matmul_precision("highest"):
                return x @ w

        assert product_dtypes(trace(o2(fn), W, X)) == [["float32", "float32"]]

    def test_an_explicit_low_precision_does_not_keep_a_product_full(self):
        assert product_dtypes(trace(o2(lambda w, x: jnp.dot(x, w, precision="default")), W, X)) == [["bfloat16"] * 2]

    def test_an_explicit_cast_to_half_rounds(self):
        assert run(o2(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)), jnp.float32(BETWEEN)) == 1
        assert run(o2(lambda x: x.astype(jnp.float16).astype(jnp.float32)), jnp.float32(BETWEEN)) == BETWEEN

    def test_an_explicit_cast_to_the_other_half_is_kept(self):
        jaxpr = trace(o2(lambda w, x: (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32)), W, X)
        assert product_dtypes(jaxpr) == [["float16", "float16"]]

    def test_an_explicit_cast_of_half_data_to_float32_computes_in_float32(self):
        jaxpr = trace(
            o2(lambda w, x: jnp.tanh((x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32))), W, X
        )
        assert out_dtypes(jaxpr, "tanh") == {"float32"}

    def test_half_inputs_are_raised_at_o0(self):
        jaxpr = trace(jamp.cast_fn(lambda w, x: jnp.tanh(x @ w), "O0"), W.astype(jnp.bfloat16), X.astype(jnp.float16))
        assert product_dtypes(jaxpr) == [["float32", "float32"]]

    @pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float8_e4m3fn, jnp.float8_e5m2])
    def test_o0_is_float32_whatever_comes_in(self, dtype):
        x = jnp.full(2048, 0.5, dtype)
        same, total = run(jamp.cast_fn(lambda x: (x, x.sum() + 2**-10), "O0"), x)
        assert same.dtype == total.dtype == jnp.float32 and total == 1024 + 2**-10
        with jamp.disable():
            assert jamp.cast_fn(lambda x: x, "O0")(x).dtype == dtype

    @pytest.mark.parametrize("level", ["O0", "OD", "O1", "O2", "O3"])
    def test_results_come_out_in_the_output_dtype(self, level):
        policy = jamp.get_policy(f"{level}:float16")
        half = jamp.cast_fn(lambda w, x: (x @ w, 1 - x, jnp.int32(2)), policy.with_output_dtype("bfloat16"))
        full = jamp.cast_fn(lambda w, x: (x @ w, x.astype(jnp.float16), jnp.int32(2)), policy)
        assert [x.dtype.name for x in jax.eval_shape(half, W, X)] == ["bfloat16", "bfloat16", "int32"]
        assert [x.dtype.name for x in jax.eval_shape(full, W, X)] == ["float32", "float32", "int32"]


class TestLevels:
    """What each level leaves in float32, and what not."""

    def test_o0_is_the_function_bit_for_bit(self):
        def fn(w, x):
            return jax.nn.softmax(layer_norm(x) @ w) @ w

        plain, cast = trace(fn, W, X), trace(jamp.cast_fn(fn, "O0"), W, X)
        assert [eqn.primitive.name for eqn in plain.eqns] == [eqn.primitive.name for eqn in cast.eqns]
        np.testing.assert_array_equal(evaluate(plain, W, X)[0], evaluate(cast, W, X)[0])

    def test_od_returns_to_float32_right_after_a_product(self):
        jaxpr = trace(jamp.cast_fn(lambda w, x: jnp.tanh(x @ w) @ w, "OD:bfloat16"), W, X)
        assert out_dtypes(jaxpr, "tanh") == {"float32"}
        assert product_dtypes(jaxpr) == [["bfloat16"] * 2] * 2

    def test_o1_adds_a_float32_bias_in_float32(self):
        jaxpr = trace(jamp.cast_fn(lambda w, x, b: x @ w + b, "O1:bfloat16"), W, X, X[0])
        assert out_dtypes(jaxpr, "add") == {"float32"}

    def test_o2_adds_a_float32_bias_in_half(self):
        jaxpr = trace(jamp.cast_fn(lambda w, x, b: jnp.tanh(x @ w + b) @ w, "O2:bfloat16"), W, X, X[0])
        assert out_dtypes(jaxpr, "add") == {"bfloat16"}

    def test_o3_exponentiates_in_half(self):
        jaxpr = trace(jamp.cast_fn(lambda w, x: jnp.exp(x @ w) @ w, "O3:bfloat16"), W, X)
        assert out_dtypes(jaxpr, "exp") == {"bfloat16"}

    @pytest.mark.parametrize("level", ["OD", "O1", "O2"])
    def test_exponentials_are_float32_below_o3(self, level):
        jaxpr = trace(jamp.cast_fn(lambda w, x: jnp.exp(x @ w) @ w, f"{level}:bfloat16"), W, X)
        assert out_dtypes(jaxpr, "exp") == {"float32"}

    def test_three_dtypes_cast_at_the_boundary_and_nowhere_else(self):
        cast = jamp.cast_fn(lambda w, x: jnp.exp(x @ w), "p=f32,c=bf16,o=f16")
        jaxpr = trace(cast, W, X)
        assert product_dtypes(jaxpr) == [["bfloat16", "bfloat16"]]
        assert out_dtypes(jaxpr, "exp") == {"bfloat16"}
        assert jax.eval_shape(cast, W, X).dtype == jnp.float16


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_what_is_float32_behind_a_product_does_not_overflow_in_it(scale):
    """OD says that results are float32: sums of 256 products of hundreds are beyond float16."""
    a, b = (scale * jax.random.normal(key, (256, 256)) for key in jax.random.split(jax.random.key(0)))

    def fn(a, b):
        return jnp.tanh(a @ b / scale**2 / 16)

    found, expected = jamp.cast_fn(fn, "OD:float16")(a, b), fn(a, b)
    assert jnp.linalg.norm(found - expected) < 2e-3 * jnp.linalg.norm(expected)


@pytest.mark.parametrize("policy", ["OD:bfloat16", "OD:float16", "O1:bfloat16", "O2:bfloat16"])
def test_logits_are_the_accumulators_of_their_product(policy):
    """Of operands that half holds, only the result could be rounded."""
    shapes = enumerate(((99, 32), (32, 4)))
    a, b = (jax.random.normal(jax.random.key(i), shape, "bfloat16").astype("float32") for i, shape in shapes)

    def fn(a, b):
        return a @ b, jax.nn.softmax(a @ b), (a @ b).argmax(-1)

    for found, expected in zip(jamp.cast_fn(fn, policy)(a, b), fn(a, b), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
