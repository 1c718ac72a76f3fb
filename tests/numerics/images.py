"""Stencils, differences of neighbours, and numbers in units of their own."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.numerics._networks import F32, dense, mlp, mlp_weights
from tests.numerics._program import Program
from tests.numerics.geometry import _net

POINTS, WIDTH = 32, 16


LAPLACIAN = np.array([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]], np.float32)


def heat_by_stencil(params, field, target, *, dtype=F32):
    """The heat equation by a convolution with the Laplacian, its source learned; a scan of steps."""
    return heat_by_given_stencil(params, LAPLACIAN, field, target, dtype=dtype)


def heat_by_given_stencil(params, kernel, field, target, *, dtype=F32):
    """The same of a kernel that comes as an argument."""
    source = mlp(params, jnp.eye(WIDTH), dtype)

    def step(u, _):
        return u + 0.1 * lax.conv(u, jnp.asarray(kernel)[None, None], (1, 1), "SAME") + 0.01 * source, None

    u, _ = lax.scan(step, field, length=20)
    return jnp.sum((u - target) ** 2, (1, 2, 3))


def curvature_penalty(params, x, heights, *, dtype=F32):
    """Smoothness of a predicted profile around 300: second differences by `jnp.convolve`."""
    profile = heights + mlp(params, x, dtype)
    second = jax.vmap(lambda p: jnp.convolve(p, jnp.array([1.0, -2.0, 1.0]), "valid"))(profile)
    return jnp.sum(second**2, -1)


def sobel_edges(params, x, image, *, dtype=F32):
    """A loss of image gradients: Sobel filters of a brightness around 128, for each channel alone."""
    predicted = 128.0 + mlp(params, x, dtype).reshape(-1, 12, 12, 2)
    sobel = np.array([[1.0, 0.0, -1.0], [2.0, 0.0, -2.0], [1.0, 0.0, -1.0]])
    kernel = np.tile(np.stack([sobel, sobel.T], -1)[:, :, None], (1, 1, 1, 2)).astype(np.float32)

    def edges(v):
        return lax.conv_general_dilated(
            v, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2
        )

    return jnp.mean(jnp.abs(edges(predicted) - edges(image)), (1, 2, 3))


def structural_similarity(params, x, image, *, dtype=F32):
    """SSIM by average pooling windows, of images up to 255."""
    predicted = image + 5.0 * mlp(params, x, dtype).reshape(image.shape)
    mean = lambda v: lax.reduce_window(v, 0.0, lax.add, (1, 5, 5, 1), (1, 1, 1, 1), "VALID") / 25.0
    a, b = mean(predicted), mean(image)
    variance_a, variance_b = mean(predicted**2) - a * a, mean(image**2) - b * b
    covariance = mean(predicted * image) - a * b
    ratio = (2 * a * b + 6.5) * (2 * covariance + 58.5) / ((a * a + b * b + 6.5) * (variance_a + variance_b + 58.5))
    return 1.0 - jnp.mean(ratio, (1, 2, 3))


def total_variation(params, x, image, *, dtype=F32):
    """Differences of neighbours, by slices."""
    v = image + mlp(params, x, dtype).reshape(image.shape)
    rows, columns = v[:, 1:] - v[:, :-1], v[:, :, 1:] - v[:, :, :-1]
    return jnp.sum(jnp.sqrt(rows**2 + 1e-8), (1, 2, 3)) + jnp.sum(jnp.sqrt(columns**2 + 1e-8), (1, 2, 3))


def reaction(params, x, yields, *, dtype=F32):
    """Rates in nanomolar: a layer's output times 1e5 saturates by Hill's law, before the next layer."""
    rate = jax.nn.softplus(dense(params[0], x, dtype).astype(F32)) * 1e5
    bound = rate / (rate + 8e4)
    return jnp.square(dense(params[1], bound, dtype).astype(F32)[:, 0] - yields)


def wavelengths(params, x, target, *, dtype=F32):
    """Thicknesses in nanometres, kept in metres: 1e-9 times a layer, a ratio of two such lengths for the next."""
    thickness = (5.0 + dense(params[0], x, dtype).astype(F32)) * 1e-9
    phase = thickness / (thickness + 4e-9)
    return jnp.square(dense(params[1], phase, dtype).astype(F32)[:, 0] - target)


def units_of_columns(params, x, target, *, dtype=F32):
    """Features of a layer in units of their own, an array of factors from 1e-7 to 1e6, and back after a bias."""
    units = jnp.logspace(-7.0, 6.0, WIDTH)
    h = dense(params[0], x, dtype).astype(F32) * units
    h = jnp.tanh((h + 0.1 * units) / units)
    return jnp.square(dense(params[1], h, dtype).astype(F32)[:, 0] - target)


def dollars(params, x, revenue, *, dtype=F32):
    """A head in millions, compared in dollars, weighed by the size of the customer."""
    predicted = mlp(params, x, dtype)[:, 0] * 1e6
    return jnp.abs(predicted - revenue) / jnp.maximum(jnp.abs(revenue), 1e5)


def _plate(rng):
    field = 20.0 + np.cumsum(0.1 * rng.normal(size=(4, 1, WIDTH, WIDTH)), -1)
    return _net(WIDTH)(rng), field, field + 0.1 * rng.normal(size=field.shape)


def _plate_of_a_metal(rng):
    params, *fields = _plate(rng)
    return params, LAPLACIAN * rng.uniform(0.5, 1.0), *fields


def _profile(rng):
    heights = 300.0 + np.cumsum(0.05 * rng.normal(size=(POINTS, 24)), -1)
    return mlp_weights(rng, WIDTH, 32, 24), rng.normal(size=(POINTS, WIDTH)), heights


def _pictures(channels, size=12):
    def inputs(rng):
        image = 128.0 + np.cumsum(3.0 * rng.normal(size=(8, size, size, channels)), 1)
        return mlp_weights(rng, WIDTH, 32, size * size * channels), rng.normal(size=(8, WIDTH)), image

    return inputs


def _two_layers(rng):
    params = mlp_weights(rng, WIDTH, WIDTH, 1)
    return params, rng.normal(size=(POINTS, WIDTH)), rng.normal(size=POINTS)


def _revenue(rng):
    return _net()(rng), rng.normal(size=(POINTS, WIDTH)), 1e6 * rng.normal(size=POINTS)


RANGE = "range"
PROGRAMS = (
    Program(heat_by_stencil, _plate, (0,), "stencils"),
    Program(heat_by_given_stencil, _plate_of_a_metal, (0,), "stencils"),
    Program(curvature_penalty, _profile, (0, 1), "stencils"),
    Program(sobel_edges, _pictures(2), (0, 1), "stencils"),
    Program(structural_similarity, _pictures(1), (0, 1), "stencils"),
    Program(total_variation, _pictures(1), (0, 1), "stencils"),
    Program(reaction, _two_layers, (0, 1), RANGE),
    Program(wavelengths, _two_layers, (0, 1), RANGE),
    Program(units_of_columns, _two_layers, (0, 1), RANGE),
    Program(dollars, _revenue, (0, 1), RANGE, 2.0**-6),
)
