"""What reverse mode keeps of a function under `residuals="half"`."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from jamp.inspect import bytes_by_dtype, residuals
from tests.transforms.harness import EYE, SIZE, W, X, both_halves, find, layer_norm, o2, trace

INDEX = jnp.array([2, 0, 2, 1])


def running_sums(w, x):
    return jnp.tanh(jnp.cumsum(x @ w, 0) @ w) @ w


def sums_of_segments(w, x):
    return jnp.tanh(jax.ops.segment_sum(x @ w, INDEX, len(x)) @ w) @ w


def norms_and_activations(w, x):
    return jax.nn.gelu(layer_norm(x @ w) @ w) @ w


@pytest.mark.parametrize("fn", [running_sums, sums_of_segments, norms_and_activations])
def test_no_float32_of_data_size_is_kept(fn):
    """A sum that is as large as its operand is computed in float32, and kept in the half that its reader takes."""
    kept = bytes_by_dtype(residuals(lambda w, x: o2(fn)(w, x).sum(), W, X))
    assert kept.get("float32", 0) < X.size * 4
    assert kept["bfloat16"] <= 4 * X.size * 2 + W.size * 2
    assert kept["bfloat16"] >= 2 * len(X) * SIZE


class TestRelu:
    """A relu's derivative is made of its result: what comes out of the layer before need not be kept."""

    @pytest.mark.parametrize("level", ["O1", "O2", "O3"])
    @pytest.mark.parametrize("relu", [jax.nn.relu, jax.jit(jax.nn.relu)])
    def test_one_half_value_is_kept_per_unit(self, relu, level):
        def loss(w, x):
            return jamp.cast_fn(lambda w, x: relu(relu(x @ w) @ w) @ w, f"{level}:bfloat16")(w, x).sum()

        assert [r.dtype for r in residuals(loss, W, X) if r.shape == X.shape] == ["bfloat16"] * 2

    def test_in_a_loop_over_layers(self):
        def loss(ws, x):
            return o2(lambda ws, x: lax.scan(lambda h, w: (jax.nn.relu(h @ w), None), x, ws)[0])(ws, x).sum()

        kept = [r for r in residuals(loss, jnp.stack([W] * 3), X) if r.shape[-2:] == X.shape]
        assert sum(r.bytes for r in kept) <= 3 * 2 * X.size * 2  # Of each layer, what it reads and what it makes.

    @both_halves
    def test_the_derivative_is_that_of_relu(self, half):
        """At zero it is zero, and of a NaN as well."""
        fn = o2(lambda b: jax.nn.relu(EYE @ EYE * 0 + b) @ EYE, half)
        edges = jnp.array([-1.0, 0.0, -0.0, 2.0**-24, 1.0, -jnp.inf])
        values = jnp.zeros((1, SIZE)).at[0, : len(edges)].set(edges)
        gradient = jax.grad(lambda b: fn(b).sum())(values)
        assert (gradient[0, : len(edges)] / SIZE).tolist() == [0, 0, 0, 1, 1, 0]
        assert jax.grad(lambda b: o2(jax.nn.relu, half)(b.astype(half)).sum())(jnp.array(jnp.nan)) == 0

    def test_a_rule_of_the_users_own_is_kept(self):
        """Guided backpropagation, a straight-through relu: the same function with another derivative."""

        @jax.custom_jvp
        def relu(x):
            return jnp.maximum(x, 0)

        relu.defjvps(lambda dx, out, x: dx * jnp.where(x > -1, 3.0, 0.5))
        grad = jax.grad(lambda b: (o2(lambda b: relu(EYE @ EYE * 0 + b) @ EYE)(b)).sum())
        assert grad(jnp.full((1, SIZE), -0.5)).tolist() == [[3.0 * SIZE] * SIZE]
        assert grad(jnp.full((1, SIZE), -2.0)).tolist() == [[0.5 * SIZE] * SIZE]

    def test_maximum_with_zero_halves_a_tie_as_jax_does(self):
        fn = o2(lambda x: jnp.maximum(x @ EYE, 0) @ EYE)
        assert jax.grad(lambda x: fn(x).sum())(jnp.zeros((1, SIZE))).tolist() == [[0.5] * SIZE]


class TestMasks:
    """A comparison is made again in the backward pass, but not with random numbers."""

    @pytest.mark.parametrize("level", ["O1", "O2", "O3"])
    def test_the_mask_of_dropout_is_kept_and_its_numbers_drawn_once(self, level):
        def loss(w, x, key):
            def fn(w, x, key):
                h = jnp.tanh(x @ w)
                return jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0) @ w

            return jamp.cast_fn(fn, f"{level}:bfloat16")(w, x, key).sum()

        kept = bytes_by_dtype(residuals(loss, W, X, jax.random.key(0)))
        assert kept["bool"] == X.size
        assert len(find(trace(jax.grad(loss), W, X, jax.random.key(0)), "random_bits")) == 1

    @pytest.mark.parametrize("activation", [jax.nn.softplus, jax.nn.leaky_relu, jax.nn.elu, jnp.abs, jax.nn.hard_tanh])
    def test_no_mask_of_data_is_kept(self, activation):
        kept = bytes_by_dtype(residuals(lambda w, x: o2(lambda w, x: activation(x @ w) @ w)(w, x).sum(), W, X))
        assert "bool" not in kept

    def test_softplus_keeps_what_it_is_computed_of(self):
        kept = bytes_by_dtype(residuals(lambda w, x: o2(lambda w, x: jax.nn.softplus(x @ w) @ w)(w, x).sum(), W, X))
        assert kept.get("float32", 0) <= X.size * 4
