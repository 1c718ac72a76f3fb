"""Networks that the programs share, in plain JAX, and their weights by NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

F32 = jnp.float32


def dense_weights(rng, width, out):
    return {"w": rng.normal(size=(width, out)) / np.sqrt(width), "b": 0.1 * rng.normal(size=out)}


def mlp_weights(rng, *widths):
    return [dense_weights(rng, width, out) for width, out in itertools.pairwise(widths)]


def dense(p, x, dtype=F32):
    return x.astype(dtype) @ p["w"].astype(dtype) + p["b"].astype(dtype)


def mlp(params, x, dtype=F32, activation=jax.nn.silu):
    """Layers in `dtype`, results in float32."""
    for p in params[:-1]:
        x = activation(dense(p, x, dtype))
    return dense(params[-1], x, dtype).astype(F32)


def layer_norm(x, scale=1.0):
    """In float32, returned in the dtype of `x`."""
    h = x.astype(F32)
    h = h - h.mean(-1, keepdims=True)
    return (h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]


def decided(rng, rows, width, scores):
    """The rows, of several times as many random ones, whose highest score is furthest from the second.

    A choice that is nearly a tie is a matter of luck in any precision.
    """
    x = rng.normal(size=(8 * rows, width))
    two = np.sort(np.asarray(scores(x)), -1)[:, -2:]
    return x[np.argsort(two[:, 0] - two[:, 1])[:rows]]


def clusters(rng, rows, width, count):
    """Rows around a few centres that lie far apart, and those centres."""
    centres = 3.0 * rng.normal(size=(count, width))
    return centres[np.arange(rows) % count] + 0.2 * rng.normal(size=(rows, width)), centres


def matmul(x, y, dtype=F32):
    """A product of operands in `dtype`, added up in float32 and left there."""
    return jnp.matmul(x.astype(dtype), y.astype(dtype), preferred_element_type=F32)
