"""`cast_fn` inside of `cast_fn`: the inner policy rules its part."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp

W = jnp.eye(4) * 0.5
X = jnp.arange(8.0).reshape(2, 4)
LEVELS = ("O0", "O1:float16", "O2:bfloat16", "O3:float16")


def layer(w, x):
    return jnp.exp(x @ w * 0.1)


def layers(w, x):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, jnp.stack([w] * 3))


def branches(w, x):
    return lax.cond(x[0, 0] > 0, lambda w: layer(w, x), lambda w: layer(w, -x), w)


def product_dtypes(fn, *args):
    """Number of products by the dtype of their first operand, in a function that is left as it is."""
    operations = jamp.report(lambda *args: fn(*args), *args, policy="O0").operations
    return {op.inputs[0]: op.count for op in operations if op.primitive == "dot_general"}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("outer", LEVELS)
@pytest.mark.parametrize(
    ("inner", "dtype"), [("O0", "float32"), ("O2:float16", "float16"), ("O3:bfloat16", "bfloat16")]
)
def test_products_have_the_dtype_of_the_inner_policy(outer, inner, dtype):
    for fn in (layer, layers, branches, jax.jit(layer), jax.checkpoint(layer)):
        nested = jamp.cast_fn(lambda w, x, fn=fn: jamp.cast_fn(fn, inner)(w, x), outer)
        assert set(product_dtypes(nested, W, X)) == {dtype}


@pytest.mark.parametrize("outer", LEVELS)
def test_an_inner_float32_is_bit_for_bit_float32(outer):
    for fn in (layer, layers, branches):
        nested = jamp.cast_fn(lambda w, x, fn=fn: jamp.cast_fn(fn, "O0")(w, x), outer)
        same = jax.tree.map(lambda a, b: (a == b).all(), nested(W, X), fn(W, X))
        assert jax.tree.all(same)
        gradient = jax.grad(lambda w, fn=nested: jax.tree.leaves(fn(w, X))[0].sum())(W)
        expected = jax.grad(lambda w, fn=fn: jax.tree.leaves(fn(w, X))[0].sum())(W)
        assert jnp.array_equal(gradient, expected)


def test_what_is_around_it_follows_the_outer_policy():
    def model(w, x):
        return jamp.cast_fn(layer, "O0")(w, x @ w) @ w

    assert product_dtypes(jamp.cast_fn(model, "O2:float16"), W, X) == {"float16": 2, "float32": 1}


@pytest.mark.parametrize("outer", LEVELS)
def test_a_reverse_rule_may_differentiate_an_inner_cast_fn(outer):
    def gated(w, x):
        return jamp.cast_fn(lambda h: jax.nn.silu(h) * h, "O1:float16")(x @ w)

    ruled = jax.custom_vjp(gated)
    ruled.defvjp(lambda *args: jax.vjp(gated, *args), lambda pull, g: pull(g))
    ours, plain = (
        jax.grad(lambda w, fn=fn: jamp.cast_fn(fn, outer)(w, X).sum())(W) for fn in (ruled, jax.checkpoint(gated))
    )
    assert jnp.allclose(ours, plain, rtol=0.02)
