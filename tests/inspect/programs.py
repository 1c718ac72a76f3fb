"""A function whose numbers one can work out by hand, and what the tests of reports read of a report."""

import jax
import jax.numpy as jnp

F32 = jnp.float32


def shape(*dims, dtype=F32):
    return jax.ShapeDtypeStruct(dims, dtype)


def mlp(w1, w2, x):
    with jax.named_scope("hidden"):
        h = jax.nn.relu(x @ w1)
    with jax.named_scope("out"):
        return h @ w2


MLP_SHAPES = (shape(4, 8), shape(8, 2), shape(3, 4))
FORWARD = 2 * (3 * 4 * 8) + 2 * (3 * 8 * 2)


def raises_in_reverse(error):
    """A layer whose derivative raises an error while it is traced."""

    @jax.custom_vjp
    def squashed(x):
        return jnp.tanh(x)

    def backward(x, cotangent):
        raise error

    squashed.defvjp(lambda x: (squashed(x), x), backward)
    return lambda w, x: squashed(x @ w)


def rows(report, primitive):
    return [op for op in report.operations if op.primitive == primitive]
