"""The measuring instruments, on functions whose numbers one can work out by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from benchmarks import flops, measure
from benchmarks.residuals import COPY, bytes_by_dtype, residuals

F32, BF16 = jnp.float32, jnp.bfloat16


def counted(fun, *args):
    """FLOPs of ``fun``, half and all."""
    found = list(flops.matmuls(jax.make_jaxpr(fun)(*args)))
    return sum(m.flops for m in found if m.half), sum(m.flops for m in found)


def zeros(*shape, dtype=F32):
    return jnp.zeros(shape, dtype)


class TestFlops:
    def test_matrix_product_is_two_mnk(self):
        assert counted(jnp.matmul, zeros(3, 5), zeros(5, 7)) == (0, 2 * 3 * 5 * 7)

    def test_batched_einsum(self):
        assert counted(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), zeros(4, 3, 5), zeros(4, 5, 7)) == (0, 840)

    def test_both_operands_must_be_half(self):
        half, full = zeros(2, 2, dtype=BF16), zeros(2, 2)
        assert counted(jnp.matmul, half, half) == (16, 16)
        numbers = (((1,), (0,)), ((), ()))
        assert counted(lambda a, b: lax.dot_general(a, b, numbers), half, full) == (0, 16)

    def test_integer_product_is_not_half(self):
        assert counted(jnp.matmul, zeros(2, 2, dtype=jnp.int16), zeros(2, 2, dtype=jnp.int16)) == (0, 16)

    @pytest.mark.parametrize("groups", [1, 2])
    def test_convolution(self, groups):
        image, kernel = zeros(1, 6, 6, 4), zeros(3, 3, 4 // groups, 8)

        def conv(x, k):
            return lax.conv_general_dilated(
                x, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
            )

        assert counted(conv, image, kernel) == (0, 2 * (4 * 4 * 8) * (3 * 3 * 4 // groups))

    def test_ragged_dot(self):
        sizes = jnp.array([2, 4], jnp.int32)
        assert counted(lambda a, b: lax.ragged_dot(a, b, sizes), zeros(6, 5), zeros(2, 5, 7)) == (0, 2 * 6 * 5 * 7)

    def test_scan_counts_its_length(self):
        def loop(x):
            return lax.scan(lambda c, _: (c @ c, None), x, None, length=11)[0]

        assert counted(loop, zeros(2, 2)) == (0, 11 * 16)

    def test_cond_counts_its_most_expensive_branch(self):
        def choose(x):
            return lax.cond(True, lambda x: x @ x, lambda x: x @ x @ x, x)

        assert counted(choose, zeros(2, 2)) == (0, 32)

    def test_while_counts_once(self):
        assert counted(lambda x: lax.while_loop(lambda c: c.sum() < 1, lambda c: c @ c, x), zeros(2, 2)) == (0, 16)

    def test_nested_calls_and_custom_derivatives(self):
        @jax.custom_vjp
        def square(x):
            return x @ x

        square.defvjp(lambda x: (square(x), x), lambda x, g: (g @ x,))
        assert counted(jax.jit(jax.checkpoint(square)), zeros(2, 2)) == (0, 16)
        assert counted(jax.grad(lambda x: square(x).sum()), zeros(2, 2)) == (0, 32)

    def test_share_of_nothing_is_one(self):
        assert flops.half_share([]) == 1.0

    def test_source_names_this_file_and_the_scope(self):
        with_scope = jax.named_scope("layer")(lambda x: x @ x)
        (found,) = flops.matmuls(jax.make_jaxpr(with_scope)(zeros(2, 2)))
        assert "test_measure.py:" in found.where and "(layer)" in found.where


def kept(fun, params, *inputs):
    """Residual bytes by dtype."""
    return bytes_by_dtype(residuals(fun, params, *inputs))


class TestResiduals:
    def test_arguments_are_not_counted(self):
        assert kept(lambda w, x: x @ w, zeros(4, 4), zeros(8, 4)) == {}

    def test_transposed_and_reshaped_arguments_are_not_counted(self):
        assert kept(lambda w, x: x.reshape(8, 4) @ w.T, zeros(4, 4), zeros(2, 4, 4)) == {}

    def test_an_elementwise_function_keeps_its_derivative(self):
        assert kept(lambda w: jnp.sin(w), zeros(8)) == {"float32": 32}

    def test_a_hidden_layer_is_kept_once(self):
        def two_layers(w, x):
            return (x @ w) @ w  # the product is kept; x and w are arguments

        assert kept(two_layers, zeros(4, 4), zeros(8, 4)) == {"float32": 8 * 4 * 4}

    def test_half_copies_of_weights_are_counted(self):
        def half_layer(w, x):
            return x @ w.astype(BF16)

        assert kept(lambda w, x: half_layer(w, x.astype(BF16)).sum(), zeros(4, 4), zeros(8, 4)) == {"bfloat16": 64}
        deep = kept(lambda w, x: (half_layer(w, x) @ w.astype(BF16)).sum(), zeros(4, 4), zeros(8, 4, dtype=BF16))
        assert deep == {"bfloat16": 8 * 4 * 2 + 4 * 4 * 2}  # the hidden layer and one copy of the weight

    def test_a_value_and_its_cast_count_once_at_the_narrower_dtype(self):
        def both(w):
            h = jnp.exp(w)  # kept in float32 by exp, and in bfloat16 by the product
            return jnp.sum(h) + jnp.sum((h.astype(BF16) * h.astype(BF16)).astype(F32))

        assert kept(both, zeros(8)) == {"bfloat16": 16}

    def test_a_raised_half_value_counts_as_half(self):
        def raised(w):
            h = jnp.exp(w.astype(BF16)).astype(F32)  # kept in bfloat16 by exp, and in float32 by the product
            return h * h

        assert kept(raised, zeros(8)) == {"bfloat16": 16}

    def test_booleans_count_a_byte(self):
        def masked(w, x):
            return jnp.where(x > 0, w, 0.0)

        assert kept(masked, zeros(8), zeros(8)) == {"bool": 8}

    def test_a_broadcast_counts_as_what_is_broadcast(self):
        def scaled(w, x):
            return w * jnp.broadcast_to(jnp.sin(x), (16, 8))

        assert kept(scaled, zeros(16, 8), zeros(8)) == {"float32": 32}

    def test_scan_counts_every_iteration(self):
        def loop(w, x):
            return lax.scan(lambda c, _: (c @ w, None), x, None, length=5)[0]

        assert kept(loop, zeros(4, 4), zeros(8, 4)) == {"float32": 5 * 8 * 4 * 4}  # the carries

    def test_scanned_weights_are_arguments_and_their_half_copies_are_not(self):
        def layers(w, x):
            return lax.scan(lambda c, w: (jnp.tanh(c + (x * w).sum()), None), x, w)[0]

        scanned = residuals(layers, zeros(5, 4), zeros(4))
        assert not [r for r in scanned if r.where == COPY]

        def half_layers(w, x):
            return lax.scan(lambda c, w: (c @ w.astype(BF16), None), x, w)[0]

        found = kept(half_layers, zeros(5, 4, 4), zeros(8, 4, dtype=BF16))
        assert found == {"bfloat16": 5 * 8 * 4 * 2 + 5 * 4 * 4 * 2}

    def test_checkpoint_keeps_its_arguments_only(self):
        def block(h, w):
            return jnp.sin(h @ w)

        def two_blocks(w, x):
            return jax.checkpoint(block)(jax.checkpoint(block)(x, w), w)

        assert kept(two_blocks, zeros(4, 4), zeros(8, 4)) == {"float32": 8 * 4 * 4}

    def test_dots_saveable_keeps_the_products(self):
        saveable = jax.checkpoint(lambda w, x: jnp.sin(x @ w), policy=jax.checkpoint_policies.dots_saveable)
        assert kept(saveable, zeros(4, 4), zeros(8, 4)) == {"float32": 8 * 4 * 4}

    def test_the_same_nested_call_twice_keeps_two_values(self):
        sine = jax.jit(lambda h: jnp.sin(h))
        assert kept(lambda w: sine(sine(w)), zeros(8)) == {"float32": 64}

    def test_shapes_suffice(self):
        assert kept(jnp.sin, jax.ShapeDtypeStruct((8,), F32)) == {"float32": 32}


class TestMeasure:
    def test_casts_are_those_between_float32_and_half(self):
        def cast(x):
            return x.astype(BF16).astype(F32) + x.astype(jnp.int32)

        assert measure.casts(jax.make_jaxpr(jax.jit(cast))(zeros(2))) == 2

    def test_relative_error_is_over_all_leaves(self):
        reference = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
        other = {"a": jnp.array([3.0], BF16), "b": jnp.array([5.0], BF16)}
        assert measure.relative_error(other, reference) == 0.2

    def test_perturbed_changes_floating_leaves_alone(self):
        tree = {"w": jnp.ones(4), "ids": jnp.arange(4), "key": jax.random.key(0)}
        changed = measure.perturbed(tree, 1)
        assert not jnp.array_equal(changed["w"], tree["w"]) and changed["w"].dtype == F32
        assert changed["ids"] is tree["ids"] and changed["key"] is tree["key"]
