"""Biases, gates and conditions of whole images: their gradients are long sums."""

import jax
import jax.numpy as jnp
from jax import lax

from tests.numerics._networks import F32, cross_entropy, dense_weights, matmul
from tests.numerics._program import Program

SIDE, WIDTH = 24, 16


def layer(p, x, dtype):
    """A product in `dtype`, and the bias added in float32, in which it is not rounded and its gradient is summed."""
    return matmul(x, p["w"], dtype) + p["b"]


def conv(kernel, x, dtype):
    """A convolution in `dtype`, and float32 from there on."""
    dims = ("NHWC", "HWIO", "NHWC")
    y = lax.conv_general_dilated(x.astype(dtype), kernel.astype(dtype), (1, 1), "SAME", dimension_numbers=dims)
    return y.astype(F32)


def segmentation(params, images, labels, *, dtype=F32):
    """A class for each pixel: biases are read by all pixels of all images."""
    h = jax.nn.relu(layer(params[0], images, dtype))
    h = jax.nn.relu(layer(params[1], h, dtype))
    return cross_entropy(layer(params[2], h, dtype), labels).mean((1, 2))


def noise_at_a_time(params, images, times, noise, *, dtype=F32):
    """The noise in images, by a convolution net that is told the time by an addition to its channels."""
    t = jax.nn.silu(layer(params["t"], times, dtype))
    h = conv(params["in"], images, dtype) + layer(params["t2"], t, dtype)[:, None, None]
    h = jax.nn.silu(h.astype(dtype))
    return jnp.square(conv(params["out"], h, dtype) - noise).mean((1, 2, 3))


def squeezed_and_excited(params, images, target, *, dtype=F32):
    """Channels times gates that the means of the channels make."""
    h = jax.nn.silu(conv(params["in"], images, dtype))
    gate = jax.nn.sigmoid(layer(params["up"], jax.nn.silu(layer(params["down"], h.mean((1, 2)), dtype)), dtype))
    h = h + h * gate[:, None, None]
    return jnp.square(conv(params["out"], h, dtype) - target).mean((1, 2, 3))


def pairs_of_atoms(params, points, *, dtype=F32):
    """An energy as a sum over all pairs of atoms, by a network that reads their distance."""
    apart = points[:, None] - points
    distance = jnp.sqrt(jnp.square(apart).sum(-1) + 1e-2)
    features = jnp.exp(-jnp.square(distance[..., None] - jnp.linspace(0, 4, WIDTH)))
    h = jax.nn.silu(layer(params[0], features, dtype))
    return layer(params[1], h, dtype).sum((1, 2))


def conditioned_field(params, code, points, target, *, dtype=F32):
    """A field of points in a grid, conditioned on one code for all of them."""
    h = jnp.tanh(layer(params["x"], points, dtype) + layer(params["z"], code, dtype)[:, None, None])
    h = h * (1 + layer(params["film"], code, dtype)[:, None, None])
    return jnp.square(layer(params["out"], h, dtype) - target).mean((1, 2, 3))


def _segmented(rng):
    params = [dense_weights(rng, *widths) for widths in ((3, WIDTH), (WIDTH, WIDTH), (WIDTH, 4))]
    shape = 4, SIDE, SIDE
    return params, rng.random(size=(*shape, 3)), rng.integers(0, 2, shape)


def _kernel(rng, width, out):
    return rng.normal(size=(3, 3, width, out)) / (9 * width) ** 0.5


def _noisy(rng):
    params = {"t": dense_weights(rng, 8, WIDTH), "t2": dense_weights(rng, WIDTH, WIDTH)}
    params |= {"in": _kernel(rng, 3, WIDTH), "out": _kernel(rng, WIDTH, 3)}
    shape = 4, SIDE, SIDE, 3
    return params, rng.normal(size=shape), rng.normal(size=(4, 8)), 1 + rng.normal(size=shape)


def _excited(rng):
    params = {"down": dense_weights(rng, WIDTH, 4), "up": dense_weights(rng, 4, WIDTH)}
    params |= {"in": _kernel(rng, 3, WIDTH), "out": _kernel(rng, WIDTH, 3)}
    shape = 4, SIDE, SIDE, 3
    return params, rng.normal(size=shape), 1 + rng.normal(size=shape)


def _atoms(rng):
    return [dense_weights(rng, WIDTH, 32), dense_weights(rng, 32, 1)], rng.random(size=(SIDE, 3)) * 3


def _field(rng):
    sizes = {"x": (2, WIDTH), "z": (8, WIDTH), "film": (8, WIDTH), "out": (WIDTH, 3)}
    params = {name: dense_weights(rng, *widths) for name, widths in sizes.items()}
    shape = 2, SIDE, SIDE
    return params, rng.normal(size=(2, 8)), rng.random(size=(*shape, 2)), 1 + rng.normal(size=(*shape, 3))


BROADCASTS = "broadcasts, whose transposes are long sums"
PROGRAMS = (
    Program(segmentation, _segmented, (0, 1), BROADCASTS),
    Program(noise_at_a_time, _noisy, (0, 1, 2), BROADCASTS),
    Program(squeezed_and_excited, _excited, (0, 1), BROADCASTS),
    Program(pairs_of_atoms, _atoms, (0,), BROADCASTS),
    Program(conditioned_field, _field, (0, 1, 2), BROADCASTS),
)
