"""Gradients of what picks an element, compiled: each maximum gives its cotangent to an element, whatever is kept.

XLA leaves out the rounding of a convolution that is raised to float32 again. So the maximum was of what had not been
rounded, and the backward pass looked for it among elements that it had computed again of rounded ones: it found none.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp

POLICIES = ("OD:bfloat16", "O1:bfloat16", "O2:bfloat16", "O2:float16")
IMAGES, CHANNELS, PLACES = 4, 8, 36
IMAGE = jax.random.normal(jax.random.key(0), (IMAGES, 8, 8, CHANNELS))
KERNEL = jax.random.normal(jax.random.key(1), (3, 3, CHANNELS, CHANNELS)) / 8
BIAS = jax.random.normal(jax.random.key(2), (CHANNELS,)) / 3
OF_IMAGE = jnp.arange(IMAGES * PLACES) // PLACES


def those(h, are):
    return jnp.where(are, h, 0).sum(1)


def by_place(h):
    return jnp.swapaxes(h, 1, 2)


LAYERS = {
    "convolution": lambda h: h,
    "bias": lambda h: h + BIAS,
    "relu": lambda h: jax.nn.relu(h + BIAS),
    "maximum": lambda h: jnp.maximum(h + BIAS, 0),
    "tanh": lambda h: jnp.tanh(h / 4),
}
# Of each image and channel one element; what is added to all of them has a gradient of one for each.
PICKS = {
    "max": lambda h: h.max(1),
    "min": lambda h: -(-h).min(1),
    "vmap": jax.vmap(jax.vmap(jnp.max, 1)),
    "branch": lambda h: lax.cond(h.sum() > -1e9, lambda h: h.max(1), lambda h: h.min(1), h),
    "segment_max": lambda h: jax.ops.segment_max(h.reshape(-1, CHANNELS), OF_IMAGE, IMAGES),
    "at": lambda h: jnp.full((IMAGES, CHANNELS), -9.0).at[OF_IMAGE].max(h.reshape(-1, CHANNELS)),
    "equal": lambda h: those(h, h == h.max(1, keepdims=True)),
    "at least": lambda h: those(h, h >= h.max(1, keepdims=True)),
    "sort": lambda h: those(h, h >= jnp.sort(h, 1)[:, -1:]),
    "top_k": lambda h: those(h, h >= by_place(lax.top_k(by_place(h), 2)[0][..., :1])),
    "percentile": lambda h: those(h, jnp.percentile(h, 100, 1, keepdims=True) <= h),
    "cummax": lambda h: lax.cummax(h, 1)[:, -1],
    "window": lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (1, PLACES, 1), (1, 1, 1), "VALID"),
    "argmax": lambda h: jnp.take_along_axis(h, h.argmax(1, keepdims=True), 1),
    "maxima": lambda h: functools.reduce(jnp.maximum, list(by_place(h).T[::6])),
    "scan": lambda h: lax.scan(lambda m, x: (jnp.maximum(m, x), None), h[:, 0], jnp.swapaxes(h, 0, 1))[0],
}


def gradient(layer, pick, policy, compiled=jax.jit):
    def loss(added, image, kernel):
        h = lax.conv_general_dilated(image, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return pick(layer(h).reshape(IMAGES, PLACES, CHANNELS) + added).sum()

    return compiled(jax.grad(jamp.cast_fn(loss, policy)))(jnp.full(CHANNELS, 0.25), IMAGE, KERNEL)


@pytest.mark.in_turns(8)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("around", [lambda pick: pick, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("pick", PICKS)
def test_each_maximum_gives_its_cotangent_to_an_element(pick, layer, around, policy):
    found = gradient(LAYERS[layer], around(PICKS[pick]), policy)
    chex.assert_trees_all_equal(found, jnp.full(CHANNELS, float(IMAGES)))


def residuals(fn, *args):
    return jamp.report(fn, *args, policy="O2:bfloat16").residual_bytes


def test_masks_of_comparisons_are_kept_and_not_those_of_numbers():
    """A byte an element is kept of `h >= most`, and none of `h > 0`, nor of a maximum with a number."""
    x, w = jax.random.normal(jax.random.key(0), (256, 256)), jax.random.normal(jax.random.key(1), (256, 256)) / 16

    def of(pick):
        return residuals(lambda x, w: (pick(jnp.sin(x @ w)) ** 2).sum(), x, w)

    assert of(lambda h: jnp.where(h >= h.max(1, keepdims=True), h, 0))["bool"] == x.size
    for pick in (lambda h: jnp.where(h > 0, h, 0), lambda h: jnp.maximum(h, 0), lambda h: h - h.max(1, keepdims=True)):
        assert "bool" not in of(pick)
    assert "bool" not in of(lambda h: jnp.where(jnp.isfinite(h), h, 0))
