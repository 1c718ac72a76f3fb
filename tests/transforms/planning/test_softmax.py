"""Softmax, logits and masks: float32 inside, half outside, nothing infinite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import (
    EYE,
    HALVES,
    SIZE,
    W,
    X,
    both_halves,
    casts_to,
    find,
    o2,
    operand_dtypes,
    out_dtypes,
    product_dtypes,
    run,
    trace,
)


class TestLogits:
    """A product that only float32 operations read keeps its accumulator; log-probabilities stay float32."""

    @both_halves
    @pytest.mark.parametrize(
        "head", [jax.nn.log_softmax, jax.nn.logsumexp, jnp.exp], ids=["log_softmax", "logsumexp", "exp"]
    )
    def test_logits_reach_a_float32_function_unrounded(self, head, half):
        jaxpr = trace(o2(lambda w, x: head(jnp.tanh(x @ w) @ w), half), W, X)
        dot = find(jaxpr, "dot_general")[-1]
        assert operand_dtypes(dot) == [half, half]
        assert dot.params["preferred_element_type"] == jnp.float32

    def test_returned_logits_are_unrounded(self):
        x = jnp.array([[1.0, 2**-10]])
        assert run(o2(lambda x: x @ jnp.ones((2, 1))), x) == 1 + 2**-10  # In bfloat16 it would be 1.

    @both_halves
    @pytest.mark.parametrize(
        "transposed",
        [
            lambda w, x: (x @ w).T,
            lambda w, x: jnp.exp(jnp.moveaxis(x @ w, 0, 1)),
            lambda w, x: jax.jit(jnp.dot)(x, w).T.reshape(4, 4, 4),
            lambda w, x: jax.vmap(lambda row: w.T @ row)(x),
            lambda w, x: jax.checkpoint(jnp.dot)(x, w).T.sum(0),
            lambda w, x: jnp.einsum("kb,kpq->pqb", x.T, w.reshape(16, 4, 4)),
            lambda w, x: jnp.einsum("pkq,bk->qbp", w.reshape(4, 16, 4), x),
        ],
        ids=["transpose", "exp", "jit", "vmap", "remat", "two free axes", "two free axes apart"],
    )
    def test_unrounded_logits_may_be_transposed(self, transposed, half):
        # XLA folds the transpose into the product, for which it has no kernel on a CPU unless it is kept from it.
        cast = o2(transposed, half)
        np.testing.assert_allclose(jax.jit(cast)(EYE, X), transposed(EYE, X), rtol=0.01)
        jax.block_until_ready(jax.jit(jax.grad(lambda w: cast(w, X).sum()))(W))

    def test_logits_beyond_float16_do_not_overflow(self):
        cast = o2(lambda x: jax.nn.logsumexp(x @ jnp.full((2, 3), 256.0)), "float16")
        np.testing.assert_allclose(run(cast, jnp.full((1, 2), 256.0)), 2 * 256.0**2 + np.log(3), rtol=1e-6)

    def test_the_backward_products_of_float32_logits_are_in_half(self):
        cast = o2(lambda w, x: jax.nn.log_softmax(x @ w)[:, 0].sum())
        assert product_dtypes(trace(jax.grad(cast, (0, 1)), W, X)) == [["bfloat16"] * 2] * 3

    def test_log_softmax_is_float32(self):
        def loss(w, x):
            return jnp.take_along_axis(jax.nn.log_softmax(x @ w), jnp.zeros((4, 1), jnp.int32), 1)

        assert not [eqn for eqn in casts_to(trace(o2(loss), W, X), jnp.bfloat16) if find_source(eqn, "log")]


def find_source(eqn, name):
    return name in str(eqn.source_info.name_stack)


def attention(w, x, mask=None):
    scores = (x @ w) @ (x @ w).T / 4.0
    if mask is not None:
        scores = jnp.where(mask, scores, -1e9)
    return jax.nn.softmax(scores) @ (x @ w)


class TestSoftmax:
    """Softmax is computed in float32 and returns half."""

    @both_halves
    @pytest.mark.parametrize("inside", [lambda f: f, jax.jit], ids=["bare", "jit"])
    def test_softmax_exponentiates_in_float32_and_returns_half(self, inside, half):
        jaxpr = trace(o2(inside(attention), half), W, X)
        assert out_dtypes(jaxpr, "exp") == {"float32"}
        assert product_dtypes(jaxpr)[-1] == [half, half]

    def test_the_backward_pass_is_given_the_half_probabilities_alone(self):
        pull = jax.eval_shape(lambda w, x: jax.vjp(o2(attention), w, x)[1], W, X)
        of_scores = [leaf for leaf in jax.tree.leaves(pull) if leaf.shape == (4, 4)]
        assert of_scores
        assert {leaf.dtype.name for leaf in of_scores} == {"bfloat16"}

    @pytest.mark.parametrize("half", HALVES)
    def test_rows_of_softmax_sum_to_one(self, half):
        cast = o2(lambda x: jax.nn.softmax(x @ EYE) @ jnp.ones((SIZE, 1)), half.dtype.name)
        np.testing.assert_allclose(run(cast, X), 1.0, atol=2**-7)

    def test_a_softmax_written_by_hand_is_one_too(self):
        def by_hand(w, x):  # The result has another shape than the arguments, so that it can be told from them.
            scores = x @ w
            e = jnp.exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))
            return (e / e.sum(-1, keepdims=True)) @ w.T

        jaxpr = trace(o2(by_hand), W[:, :8], X)
        assert out_dtypes(jaxpr, "exp") == {"float32"}
        pull = jax.eval_shape(lambda w, x: jax.vjp(o2(by_hand), w, x)[1], W[:, :8], X)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(pull) if leaf.shape == (4, 8)} == {"bfloat16"}


def heads(w, x, cap=None, scale=1.0):
    """Two heads of attention, batched as all libraries batch them."""
    query, key, value = ((x @ (w * i) + w[0]).reshape(4, 2, 8) for i in (1, 2, 3))
    scores = jnp.einsum("qhd,khd->hqk", query, key) / scale
    if cap is not None:
        scores = jnp.tanh(scores / cap) * cap
    scores = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), scores, -1e9)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), value)


def product_of_keys(fn, policy, *args):
    return next(
        eqn for eqn in find(trace(jamp.cast_fn(fn, policy), *args), "dot_general") if eqn.outvars[0].aval.ndim > 2
    )


class TestScores:
    """Queries times keys are as large as the square of the length: half in bfloat16, which has float32's range."""

    @pytest.mark.parametrize("level", ["O1", "O2"])
    @pytest.mark.parametrize("cap", [None, 30.0])
    def test_scores_are_half_and_their_softmax_float32(self, level, cap):
        def fn(w, x):
            return heads(w, x, cap)

        assert product_of_keys(fn, f"{level}:bfloat16", W, X).outvars[0].aval.dtype == jnp.bfloat16
        assert out_dtypes(trace(jamp.cast_fn(fn, f"{level}:bfloat16"), W, X), "exp") == {"float32"}
        np.testing.assert_allclose(run(jamp.cast_fn(fn, f"{level}:bfloat16"), W, X), run(fn, W, X), atol=0.1)

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_scores_beyond_float16_that_are_scaled_after_the_product_do_not_overflow(self, level):
        def fn(w, x):
            return heads(w, x * 200, scale=1e5)

        assert jnp.abs(jnp.einsum("qd,kd->qk", X @ W, X @ W)).max() * 200**2 * 2 > 65504
        assert product_of_keys(fn, f"{level}:float16", W, X).outvars[0].aval.dtype == jnp.float32
        np.testing.assert_allclose(run(jamp.cast_fn(fn, f"{level}:float16"), W, X), run(fn, W, X), rtol=0.02, atol=1)

    @pytest.mark.parametrize(
        "read",
        [
            jax.nn.logsumexp,
            lambda product: jnp.sqrt(jnp.abs(product)),
            jax.nn.softmax,
            lambda product: jax.nn.softmax(-jnp.sqrt(product**2 + 1)) @ X,
        ],
        ids=["logsumexp", "distances", "returned probabilities", "softmax of distances"],
    )
    def test_other_products_of_data_stay_float32(self, read):
        def fn(w, x):
            key = (x @ w).reshape(4, 2, 8)
            return read(jnp.einsum("qhd,khd->hqk", key, key))

        assert product_of_keys(fn, "O2:bfloat16", W, X).outvars[0].aval.dtype == jnp.float32

    @pytest.mark.parametrize("level", ["O1", "O2"])
    @both_halves
    @pytest.mark.parametrize(
        "product",
        [
            lambda w, x: lax.conv_general_dilated(x[None, None], w[:1, :1][None, None], (1, 1), "SAME")[0, 0],
            lambda w, x: lax.ragged_dot(x, w[None], jnp.array([4])),
        ],
        ids=["convolution", "ragged_dot"],
    )
    def test_weights_made_of_other_products_than_dot_general_run_and_differentiate(self, product, half, level):
        def fn(w, x):
            return (jax.nn.softmax(product(w, x)) @ w).sum()

        gradient = jax.grad(jamp.cast_fn(fn, f"{level}:{half}"))(W, X)
        np.testing.assert_allclose(gradient, jax.grad(fn)(W, X), atol=0.05)

    def test_scores_that_are_also_logits_stay_float32(self):
        """Such as those of a router, whose logsumexp is a loss too."""

        def fn(w, x):
            key = (x @ w).reshape(4, 2, 8)
            scores = jnp.einsum("qhd,khd->hqk", key, key)
            return jax.nn.softmax(scores) @ X, jax.nn.logsumexp(scores)

        assert product_of_keys(fn, "O2:bfloat16", W, X).outvars[0].aval.dtype == jnp.float32

    def test_models_that_are_mapped_over_have_float32_logits(self):
        def fn(ws, x):
            return jax.vmap(lambda w: jax.nn.softmax(jnp.tanh(x @ w) @ w) @ X.T[:, :3])(ws)

        products = find(trace(o2(fn), jnp.stack([W, W])[:, :, :16], X), "dot_general")
        assert products[1].params["preferred_element_type"] == jnp.float32


class TestMasks:
    """A mask of -1e9 is the half dtype's most negative finite number where it must be half, not -inf."""

    @pytest.mark.parametrize("level", ["OD", "O1", "O2", "O3"])
    @pytest.mark.parametrize("mask", [jnp.zeros((4, 4), bool), jnp.tril(jnp.ones((4, 4), bool))], ids=["all", "causal"])
    def test_masked_attention_in_float16_is_finite(self, level, mask):
        cast = jamp.cast_fn(lambda w, x: attention(w, x, mask), f"{level}:float16")
        out = run(cast, W, X)
        np.testing.assert_allclose(out, run(lambda w, x: attention(w, x, mask), W, X), atol=0.02)
        assert np.isfinite(run(jax.grad(lambda w, x: jnp.sum(cast(w, x) ** 2)), W, X)).all()

    @pytest.mark.parametrize("level", ["O2", "O3"])
    def test_an_added_mask_in_float16_is_finite(self, level):
        def fn(x, mask):
            scores = x @ x.T + (1.0 - mask) * -1e9
            return jax.nn.softmax(scores) @ x

        mask = jnp.tril(jnp.ones((4, 4)))
        out = run(jamp.cast_fn(fn, f"{level}:float16"), X, mask)
        np.testing.assert_allclose(out, run(fn, X, mask), atol=0.02)

    @pytest.mark.parametrize("level", ["OD", "O1", "O2"])
    def test_what_is_computed_from_masked_scores_is_cast_plainly(self, level):
        def fn(x):
            return jax.nn.softmax(jnp.where(jnp.eye(4), x @ x.T, -1e9)) @ x

        jaxpr = trace(jamp.cast_fn(fn, f"{level}:float16"), X)
        assert not find(jaxpr, "clamp", "is_finite")  # Exponentials are no masks.

    @pytest.mark.parametrize("level", ["OD", "O1", "O2"])
    def test_a_cast_that_the_user_wrote_overflows_as_without_jamp(self, level):
        def fn(x):
            return jnp.where(x > 0, x, -1e9).astype(jnp.float16)

        np.testing.assert_array_equal(run(jamp.cast_fn(fn, f"{level}:float16,o=f16"), X), run(fn, X))

    def test_infinity_stays_infinity(self):
        cast = o2(lambda x: jnp.where(jnp.arange(4) < 2, x @ jnp.eye(4), -jnp.inf), "float16")
        np.testing.assert_array_equal(run(cast, jnp.ones((1, 4))), [[1, 1, -np.inf, -np.inf]])

    @pytest.mark.parametrize("level", ["OD", "O1", "O2", "O3"])
    def test_a_mask_of_the_smallest_float32_in_a_rematerialized_scan_is_finite(self, level):
        def layer(x, _):
            scores = jnp.where(jnp.zeros((4, 4), bool), x @ x.T, jnp.finfo(jnp.float32).min)
            return x + jax.nn.softmax(scores) @ x, None

        cast = jamp.cast_fn(lambda x: lax.scan(jax.checkpoint(layer), x, length=2)[0], f"{level}:float16")
        assert np.isfinite(run(cast, X)).all()
        assert np.isfinite(run(jax.grad(lambda x: jnp.sum(cast(x))), X)).all()

    @pytest.mark.parametrize("level", ["OD", "O1", "O2"])
    def test_a_mask_that_comes_as_an_argument_is_finite(self, level):
        cast = jamp.cast_fn(lambda x, mask: jax.nn.softmax(x @ x.T + mask) @ x, f"{level}:float16")
        assert np.isfinite(run(cast, X, jnp.full((4, 4), -1e9))).all()


def test_what_all_cotangents_have_in_common_cancels():
    """The derivative sums to zero, and with a probability that is rounded to half a common part would leave a rest."""
    logits = jax.random.normal(jax.random.key(0), (8, 64))
    cotangent = jax.random.normal(jax.random.key(1), (8, 64)).astype(jnp.bfloat16)

    def gradient(offset, fn):
        return jax.vjp(fn, logits)[1]((cotangent + offset).astype(jnp.bfloat16).astype(jnp.float32))[0]

    cast = o2(lambda z: jax.nn.softmax(z @ jnp.eye(64)))
    for offset in (0, 8):
        exact = gradient(offset, jax.nn.softmax)
        assert jnp.linalg.norm(gradient(offset, cast) - exact) < 0.006 * jnp.linalg.norm(exact)
