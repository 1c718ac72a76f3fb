"""Products with power spectra, which pass float16's range, are float32 there."""

import jax
import jax.numpy as jnp
import pytest

import jamp
from tests.transforms.harness import product_dtypes

KEYS = jax.random.split(jax.random.key(0), 2)
SOUND = 8 * jax.random.normal(KEYS[0], (4, 2048))
FILTERS = jax.random.uniform(KEYS[1], (1025, 16))


def squared_magnitude(x, filters):
    return jnp.log(jnp.abs(jnp.fft.rfft(x)) ** 2 @ filters + 1e-5)


def sum_of_squares(x, filters):
    spectrum = jnp.fft.rfft(x)
    return (spectrum.real**2 + spectrum.imag * spectrum.imag) @ filters


def times_conjugate(x, filters):
    spectrum = jnp.fft.rfft(x)
    return jnp.sqrt((spectrum * spectrum.conj()).real @ filters)


def mean_of_frames(x, filters):
    return jnp.square(jnp.abs(jnp.fft.rfft(x))).sum(0) @ filters


def moved_on_the_way(x, filters):
    parts = jnp.fft.rfft(x)[None].imag.transpose(0, 2, 1)
    conjugate = jnp.fft.rfft(x)[None]
    power = (conjugate * conjugate.conj()).reshape(4, 1025).real
    return (jnp.square(parts)[0, :1025].T + power) @ filters


def scaled(x, filters):
    """By a window's energy, and weights of the ear."""
    window = jnp.hanning(2048)
    power = jnp.abs(jnp.fft.rfft(x * window)) ** 2 / (window**2).sum() * 300
    return jnp.log(jnp.maximum(power * filters[:, 1], 1e-5).mean(0) @ filters)


def beside_a_number_of_a_loop(x, filters):
    """Which each iteration makes anew."""
    floor = jax.lax.fori_loop(0, 2, lambda i, floor: 1.0, 0.5)
    return (jnp.abs(jnp.fft.rfft(x)) ** 2 + floor) @ filters


def of_a_function(x, filters):
    return jax.jit(lambda x: jnp.abs(jnp.fft.rfft(x)) ** 2)(x) @ filters


def of_a_loop(x, filters):
    return jax.lax.map(lambda x: jnp.abs(jnp.fft.rfft(x)) ** 2, x) @ filters


def inside_of_a_loop(x, filters):
    return jax.lax.map(lambda x: (jnp.abs(jnp.fft.rfft(x)) ** 2)[None] @ filters, x)


LONG = (scaled, beside_a_number_of_a_loop, of_a_function, of_a_loop, inside_of_a_loop)
ALL = (*LONG, squared_magnitude, sum_of_squares, times_conjugate, mean_of_frames, moved_on_the_way)


@pytest.mark.parametrize("fn", ALL)
@pytest.mark.parametrize("level", ("O1", "O2"))
def test_power_spectra_are_float32_in_float16(fn, level):
    result = jamp.cast_fn(fn, f"{level}:float16")(SOUND, FILTERS)
    assert jnp.allclose(result, fn(SOUND, FILTERS), rtol=1e-5)


@pytest.mark.parametrize("fn", ALL)
def test_in_bfloat16_they_are_half(fn):
    assert product_dtypes(jax.make_jaxpr(jamp.cast_fn(fn, "O2:bfloat16"))(SOUND, FILTERS)) == [["bfloat16"] * 2]


def mixed(x, filters):
    """As in FNet: what is mixed is normalized, and squares of the norm are no spectrum."""
    mixed = jnp.fft.fft(x).real[:, :1025]
    mixed = mixed - mixed.mean(-1, keepdims=True)
    return mixed * jax.lax.rsqrt((mixed**2).mean(-1, keepdims=True)) @ filters


def gated(x, filters):
    """A part of the spectrum times something else is no square."""
    spectrum = jnp.fft.rfft(x)
    return (spectrum.real / 64 * jax.nn.sigmoid(x[:, :1025])) @ filters


def scaled_by_a_number(x, filters):
    return (jnp.fft.rfft(x).real * 0.01) @ filters


def normalized(x, filters):
    power = jnp.abs(jnp.fft.rfft(x / 64)) ** 2
    return (power - power.mean(0)) / (power.std(0) + 1e-3) @ filters


def phases(x, filters):
    return jnp.tanh((jnp.fft.rfft(x) * 2).imag / 999) @ filters


def squares_of_data(x, filters):
    return jnp.abs(jnp.fft.rfft(x)).mean() * (x[:, :1025] ** 2) / 64 @ filters


@pytest.mark.parametrize("layer", (mixed, gated, scaled_by_a_number, normalized, phases, squares_of_data))
def test_a_layer_behind_a_transform_is_half(layer):
    assert product_dtypes(jax.make_jaxpr(jamp.cast_fn(layer, "O2:float16"))(SOUND, FILTERS)) == [["float16"] * 2]
