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


ALL = (squared_magnitude, sum_of_squares, times_conjugate, mean_of_frames)


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


def test_a_layer_behind_a_transform_is_half():
    assert product_dtypes(jax.make_jaxpr(jamp.cast_fn(mixed, "O2:float16"))(SOUND, FILTERS)) == [["float16"] * 2]
