"""Counting FLOPs and casts, on functions whose numbers one can work out by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jamp.inspect import casts, half_share, matmuls

F32, BF16 = jnp.float32, jnp.bfloat16


def counted(fun, *args):
    """FLOPs of `fun`, half and all."""
    found = list(matmuls(jax.make_jaxpr(fun)(*args)))
    return sum(m.flops for m in found if m.half), sum(m.flops for m in found)


def zeros(*shape, dtype=F32):
    return jnp.zeros(shape, dtype)


def test_matrix_product_is_two_mnk():
    assert counted(jnp.matmul, zeros(3, 5), zeros(5, 7)) == (0, 2 * 3 * 5 * 7)


def test_batched_einsum():
    assert counted(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), zeros(4, 3, 5), zeros(4, 5, 7)) == (0, 840)


def test_both_operands_must_be_half():
    half, full = zeros(2, 2, dtype=BF16), zeros(2, 2)
    assert counted(jnp.matmul, half, half) == (16, 16)
    numbers = (((1,), (0,)), ((), ()))
    assert counted(lambda a, b: lax.dot_general(a, b, numbers), half, full) == (0, 16)


def test_integer_product_is_not_half():
    assert counted(jnp.matmul, zeros(2, 2, dtype=jnp.int16), zeros(2, 2, dtype=jnp.int16)) == (0, 16)


@pytest.mark.parametrize("groups", [1, 2])
def test_convolution(groups):
    image, kernel = zeros(1, 6, 6, 4), zeros(3, 3, 4 // groups, 8)

    def conv(x, k):
        return lax.conv_general_dilated(
            x, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
        )

    assert counted(conv, image, kernel) == (0, 2 * (4 * 4 * 8) * (3 * 3 * 4 // groups))


def test_ragged_dot():
    sizes = jnp.array([2, 4], jnp.int32)
    assert counted(lambda a, b: lax.ragged_dot(a, b, sizes), zeros(6, 5), zeros(2, 5, 7)) == (0, 2 * 6 * 5 * 7)


def test_scan_counts_its_length():
    def loop(x):
        return lax.scan(lambda c, _: (c @ c, None), x, None, length=11)[0]

    assert counted(loop, zeros(2, 2)) == (0, 11 * 16)


def test_cond_counts_its_most_expensive_branch():
    def choose(x):
        return lax.cond(True, lambda x: x @ x, lambda x: x @ x @ x, x)

    assert counted(choose, zeros(2, 2)) == (0, 32)


def test_while_counts_once():
    assert counted(lambda x: lax.while_loop(lambda c: c.sum() < 1, lambda c: c @ c, x), zeros(2, 2)) == (0, 16)


def test_nested_calls_and_custom_derivatives():
    @jax.custom_vjp
    def square(x):
        return x @ x

    square.defvjp(lambda x: (square(x), x), lambda x, g: (g @ x,))
    assert counted(jax.jit(jax.checkpoint(square)), zeros(2, 2)) == (0, 16)
    assert counted(jax.grad(lambda x: square(x).sum()), zeros(2, 2)) == (0, 32)


def test_share_of_nothing_is_one():
    assert half_share([]) == 1.0


def test_source_names_this_file_and_the_scope():
    with_scope = jax.named_scope("layer")(lambda x: x @ x)
    (found,) = matmuls(jax.make_jaxpr(with_scope)(zeros(2, 2)))
    assert "test_flops.py:" in found.where and "(layer)" in found.where


def test_casts_are_those_between_float32_and_half():
    def cast(x):
        return x.astype(BF16).astype(F32) + x.astype(jnp.int32)

    assert casts(jax.make_jaxpr(jax.jit(cast))(zeros(2))) == 2


def test_products_that_contract_nothing_and_sums_are_not_counted():
    def program(x, y):
        return jnp.einsum("ab,a->ab", x, y), jnp.einsum("ab,ab->a", x, x), jnp.einsum("a,a->", y, y), x.T @ x

    (product,) = matmuls(jax.make_jaxpr(program)(jnp.ones((4, 8)), jnp.ones(4)))
    assert product.flops == 2 * 8 * 8 * 4
