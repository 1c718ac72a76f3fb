"""Counting what reverse mode keeps, on functions whose numbers one can work out by hand."""

import jax
import jax.numpy as jnp
from jax import lax

from jamp.inspect import COPY, bytes_by_dtype, residuals

F32, BF16 = jnp.float32, jnp.bfloat16


def zeros(*shape, dtype=F32):
    return jnp.zeros(shape, dtype)


def kept(fun, params, *inputs):
    """Residual bytes by dtype."""
    return bytes_by_dtype(residuals(fun, params, *inputs))


def test_arguments_are_not_counted():
    assert kept(lambda w, x: x @ w, zeros(4, 4), zeros(8, 4)) == {}


def test_transposed_and_reshaped_arguments_are_not_counted():
    assert kept(lambda w, x: x.reshape(8, 4) @ w.T, zeros(4, 4), zeros(2, 4, 4)) == {}


def test_an_elementwise_function_keeps_its_derivative():
    assert kept(lambda w: jnp.sin(w), zeros(8)) == {"float32": 32}


def test_a_hidden_layer_is_kept_once():
    def two_layers(w, x):
        return (x @ w) @ w  # the product is kept; x and w are arguments

    assert kept(two_layers, zeros(4, 4), zeros(8, 4)) == {"float32": 8 * 4 * 4}


def test_half_copies_of_weights_are_counted():
    def half_layer(w, x):
        return x @ w.astype(BF16)

    assert kept(lambda w, x: half_layer(w, x.astype(BF16)).sum(), zeros(4, 4), zeros(8, 4)) == {"bfloat16": 64}
    deep = kept(lambda w, x: (half_layer(w, x) @ w.astype(BF16)).sum(), zeros(4, 4), zeros(8, 4, dtype=BF16))
    assert deep == {"bfloat16": 8 * 4 * 2 + 4 * 4 * 2}  # the hidden layer and one copy of the weight


def test_a_value_that_is_kept_in_two_dtypes_counts_in_both():
    def both(w):
        h = jnp.exp(w)  # kept in float32 by exp, and in bfloat16 by the product
        return jnp.sum(h) + jnp.sum((h.astype(BF16) * h.astype(BF16)).astype(F32))

    assert kept(both, zeros(8)) == {"bfloat16": 16, "float32": 32}


def test_a_raised_half_value_counts_as_half():
    def raised(w):
        h = jnp.exp(w.astype(BF16)).astype(F32)  # kept in bfloat16 by exp, and in float32 by the product
        return h * h

    assert kept(raised, zeros(8)) == {"bfloat16": 16}


def test_booleans_count_a_byte():
    def masked(w, x):
        return jnp.where(x > 0, w, 0.0)

    assert kept(masked, zeros(8), zeros(8)) == {"bool": 8}


def test_a_broadcast_counts_as_what_is_broadcast():
    def scaled(w, x):
        return w * jnp.broadcast_to(jnp.sin(x), (16, 8))

    assert kept(scaled, zeros(16, 8), zeros(8)) == {"float32": 32}


def test_scan_counts_every_iteration():
    def loop(w, x):
        return lax.scan(lambda c, _: (c @ w, None), x, None, length=5)[0]

    assert kept(loop, zeros(4, 4), zeros(8, 4)) == {"float32": 5 * 8 * 4 * 4}  # the carries


def test_scanned_weights_are_arguments_and_their_half_copies_are_not():
    def layers(w, x):
        return lax.scan(lambda c, w: (jnp.tanh(c + (x * w).sum()), None), x, w)[0]

    scanned = residuals(layers, zeros(5, 4), zeros(4))
    assert not [r for r in scanned if r.where == COPY]

    def half_layers(w, x):
        return lax.scan(lambda c, w: (c @ w.astype(BF16), None), x, w)[0]

    found = kept(half_layers, zeros(5, 4, 4), zeros(8, 4, dtype=BF16))
    assert found == {"bfloat16": 5 * 8 * 4 * 2 + 5 * 4 * 4 * 2}


def test_checkpoint_keeps_its_arguments_only():
    def block(h, w):
        return jnp.sin(h @ w)

    def two_blocks(w, x):
        return jax.checkpoint(block)(jax.checkpoint(block)(x, w), w)

    assert kept(two_blocks, zeros(4, 4), zeros(8, 4)) == {"float32": 8 * 4 * 4}


def test_dots_saveable_keeps_the_products():
    saveable = jax.checkpoint(lambda w, x: jnp.sin(x @ w), policy=jax.checkpoint_policies.dots_saveable)
    assert kept(saveable, zeros(4, 4), zeros(8, 4)) == {"float32": 8 * 4 * 4}


def test_the_same_nested_call_twice_keeps_two_values():
    sine = jax.jit(lambda h: jnp.sin(h))
    assert kept(lambda w: sine(sine(w)), zeros(8)) == {"float32": 64}


def test_shapes_suffice():
    assert kept(jnp.sin, jax.ShapeDtypeStruct((8,), F32)) == {"float32": 32}


def test_what_is_kept_inside_of_a_call_has_the_scopes_around_it():
    """Functions with a rule of their own, such as a softmax, are traced without them."""

    @jax.custom_jvp
    def function(x):
        with jax.named_scope("inner"):
            return jnp.sin(x)

    function.defjvp(lambda primals, tangents: (function(*primals), tangents[0] * function(*primals)))

    def fn(w, x):
        with jax.named_scope("outer"):
            return (jnp.tanh(jax.jit(lambda y: function(y))(x @ w)) @ w).sum()

    found = residuals(fn, jnp.ones((4, 4)), jnp.ones((2, 4)))
    assert found and all("outer" in residual.where for residual in found)
    assert any("outer/inner" in residual.where for residual in found)
