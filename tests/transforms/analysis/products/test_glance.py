"""Layers of everyday networks, of which a glance says that no product of theirs cancels."""

import jax
import jax.numpy as jnp
import pytest

from jamp._compat import open_jaxpr
from jamp.transforms.analysis.products.glance import Glance

X = jnp.ones((4, 8))
W = jnp.ones((8, 8))


def normalized(x):
    """BatchNorm as Keras writes it: the mean is taken off behind the scale."""
    mean = x.mean(0)
    scale = jax.lax.rsqrt(x.var(0) + 1e-3)
    return x * scale + (-mean * scale)


def summed_behind_relu(w, x):
    """The last relu is summed, the others are multiplied: they share a jaxpr, but are no one value."""
    for _ in range(3):
        x = jax.nn.relu(normalized(x @ w))
    return x.sum(0)


def gated_layers(w, x):
    """The gate times what it gates is no matrix times itself."""

    def layer(x, weights):
        gate, up, down = weights
        return x + (jax.nn.silu(x @ gate) * (x @ up)) @ down, None

    return jax.lax.scan(layer, x, tuple(jnp.stack([w, w]) * scale for scale in (1, 2, 3)))[0]


def from_zeros(w, x):
    """A recurrent net begins with zeros, but goes on with its states."""
    states = jax.lax.scan(lambda h, _: (jnp.tanh(x @ w + h @ w),) * 2, jnp.zeros_like(x), None, length=3)[1]
    return normalized(states.sum(0) @ w)


@pytest.mark.parametrize("layers", (summed_behind_relu, gated_layers, from_zeros))
def test_a_glance_is_enough(layers):
    assert not Glance(()).finds(open_jaxpr(jax.make_jaxpr(layers)(W, X)))


def iterated(w, x):
    """Newton-Schulz: the Gram matrix of what the loop carries."""
    return jax.lax.scan(lambda x, _: (1.5 * x - 0.5 * (x @ x.T) @ x, None), x @ w, None, length=3)[0]


def shared_distances(w, x):
    """The norms come out of a call, and so do the products."""
    norms = jax.jit(lambda x: (x * x).sum(1))
    return norms(x)[:, None] + norms(w) - 2 * jax.jit(lambda x, w: x @ w.T)(x, w)


@pytest.mark.parametrize("program", (iterated, shared_distances))
def test_a_closer_look_is_needed(program):
    assert Glance(()).finds(open_jaxpr(jax.make_jaxpr(program)(W, X)))
