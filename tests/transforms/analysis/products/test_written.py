"""Products with numbers that the program writes, with frames and with solutions are float32; layers are half."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import EYE, SIZE, W, X, both_halves, mixed_levels, out_dtypes, product_dtypes, run, trace

BINS = 257 + jnp.arange(SIZE, dtype=jnp.float32) * 2  # Odd, so that bfloat16 holds none of them.
FULL = ["float32", "float32"]


def products(fn, policy, *args):
    return product_dtypes(trace(jamp.cast_fn(fn, policy), *args))


@both_halves
@mixed_levels
class TestNumbersThatAreWritten:
    def test_an_expectation_over_bins_is_a_sum(self, level, half):
        large = jnp.float32(8)  # 2057 is 2056 in float16.
        fn = lambda p: p @ (BINS * large + 1)  # noqa: E731
        np.testing.assert_array_equal(run(jamp.cast_fn(fn, f"{level}:{half}"), EYE), BINS * large + 1)

    def test_a_few_rows_are_a_small_batch(self, level, half):
        """So is what is in front of them: nothing wants it in float32."""
        fn = lambda x, w: (jnp.sin(BINS + jnp.arange(3)[:, None]) @ jnp.tanh(x @ w)) @ w  # noqa: E731
        jaxpr = trace(jamp.cast_fn(fn, f"{level}:{half}"), W, W)
        assert product_dtypes(jaxpr) == [[half] * 2] * 3
        assert out_dtypes(jaxpr, "tanh") == {half}

    def test_a_row_is_selected_as_it_is(self, level, half):
        """Log-probabilities, that a sum reads."""

        def fn(w, x):
            return jnp.sum(jax.nn.one_hot(jnp.arange(SIZE), SIZE) @ jax.nn.log_softmax(x @ w).T, 0)

        assert products(fn, f"{level}:{half}", W, X)[1:] == [FULL]

    def test_a_learned_table_is_half(self, level, half):
        fn = lambda table, w: (jax.nn.one_hot(jnp.arange(4), SIZE) @ table) @ w  # noqa: E731
        assert products(fn, f"{level}:{half}", W, W) == [[half] * 2] * 2

    def test_powers_of_a_discount_are_exact(self, level, half):
        def fn(rewards):
            ahead = jnp.maximum(jnp.arange(SIZE)[:, None] - jnp.arange(SIZE), 0)
            return jnp.sum(jnp.square(rewards @ (0.97**ahead)))

        assert products(fn, f"{level}:{half}", X) == [FULL]

    def test_random_features_are_half(self, level, half):
        fn = lambda x: jnp.sum(jnp.exp(x @ jax.random.normal(jax.random.key(0), (SIZE, 2))))  # noqa: E731
        assert products(fn, f"{level}:{half}", X) == [[half] * 2]


@both_halves
@mixed_levels
class TestSolutions:
    def test_what_is_left_of_a_system_is_float32(self, level, half):
        def fn(w, x):
            kernel = (x @ w) @ (x @ w).T + 9.0 * jnp.eye(4)
            return jnp.sum(jnp.square(kernel @ jnp.linalg.solve(kernel, x) - x))

        assert products(fn, f"{level}:{half}", W, X)[-1] == FULL

    def test_of_a_system_that_is_given_too(self, level, half):
        fn = lambda a, b: jnp.sum(jnp.square(a @ jnp.linalg.solve(a, b.T) - b.T))  # noqa: E731
        assert products(fn, f"{level}:{half}", EYE, X)[-1] == FULL

    def test_of_what_a_loop_converges_to_too(self, level, half):
        def fn(w, x):
            kernel = (x @ w) @ (x @ w).T + 9.0 * jnp.eye(4)

            def wrong(z):
                return x - lax.stop_gradient(kernel) @ z

            z = lax.while_loop(lambda z: jnp.max(wrong(z)) > 1e-3, lambda z: z + 0.1 * wrong(z), x)
            return jnp.sum(jnp.square(kernel @ z - 1.0))

        assert products(fn, f"{level}:{half}", W, X)[-1] == FULL

    def test_a_layer_behind_a_solution_is_half(self, level, half):
        fn = lambda w, x: jnp.linalg.inv(9.0 * EYE + x.T @ x) @ w  # noqa: E731
        assert products(fn, f"{level}:{half}", W, X)[-1] == [half] * 2


@both_halves
def test_data_moved_far_from_zero_keeps_its_digits(half):
    fn = lambda x, w: (lambda h: h - h[:1])(4096.0 + x @ w)  # noqa: E731
    x = jnp.full((4, SIZE), 0.5).at[:, 0].set(jnp.arange(4.0))
    np.testing.assert_array_equal(run(jamp.cast_fn(fn, f"O2:{half}"), x, EYE), run(fn, x, EYE))


@both_halves
def test_a_branch_that_is_given_float32_does_not_lose_it(half):
    """Beside one that computes in half, where float32 readers follow."""

    def fn(p, x, w):
        return jnp.sum(lax.cond(p, lambda x: x, lambda x: x @ w, x))

    x = jnp.full((1, SIZE), 1 + 2.0**-14)
    assert run(jamp.cast_fn(fn, f"O2:{half}"), True, x, EYE) == SIZE * (1 + 2.0**-14)


def test_the_derivative_of_a_saturated_softmax_is_not_rounded_away():
    """What is left of `1 - p` is all of it, where p is 1 in bfloat16."""
    logits = jnp.array([[7.0, 0.0]])
    fn = lambda z, w: jnp.sum((jax.nn.softmax(z @ w) @ w)[:, 0])  # noqa: E731
    of_half = jax.grad(jamp.cast_fn(fn, "O2:bfloat16"))(logits, jnp.eye(2))
    np.testing.assert_allclose(of_half, jax.grad(fn)(logits, jnp.eye(2)), rtol=2e-2)


@pytest.mark.parametrize("by", [jnp.subtract, lambda a, b: b - a])
def test_a_state_that_data_is_compared_with_is_kept_in_float32(by):
    """Where the difference is small, a state rounded to half leaves nothing of it."""

    def fn(w, xs):
        def step(mean, x):
            wrong = by(x @ w, mean)
            return mean + 0.5 * (x @ w), jnp.sum(wrong * wrong)

        return jnp.sum(lax.scan(step, jnp.full((SIZE,), 1 + 2.0**-10), xs)[1])

    xs = jnp.ones((1, SIZE))
    gradient = jax.grad(jamp.cast_fn(fn, "O2:bfloat16"))(EYE, xs)
    np.testing.assert_array_equal(gradient, jax.grad(fn)(EYE, xs).astype(jnp.bfloat16))


def test_an_outer_product_takes_float32_as_it_is():
    assert products(lambda x: jnp.einsum("bi,bj->bij", x, x), "O2:bfloat16", X) == [FULL]
