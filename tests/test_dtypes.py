from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jamp
from jamp._dtypes import half_dtype_of, parse_dtype

FLOAT16, BFLOAT16 = np.dtype("float16"), parse_dtype("bfloat16")


@pytest.mark.parametrize(
    ("platform", "capability", "dtype"),
    [
        ("tpu", None, BFLOAT16),
        ("cpu", None, BFLOAT16),
        ("gpu", "6.1", FLOAT16),
        ("gpu", "7.5", FLOAT16),
        ("cuda", "7.0", FLOAT16),
        ("gpu", "8.0", BFLOAT16),
        ("gpu", "9.0", BFLOAT16),
        ("gpu", "10.0", BFLOAT16),  # A comparison of strings would put it before "8.0".
        ("gpu", "gfx942", BFLOAT16),
    ],
)
def test_half_dtype_of_device(platform, capability, dtype):
    assert half_dtype_of(SimpleNamespace(platform=platform, compute_capability=capability)) == dtype


def test_half_dtype_of_a_device_that_names_no_capability():
    assert half_dtype_of(SimpleNamespace(platform="gpu")) == BFLOAT16


def test_half_dtype_here():
    assert jamp.half_dtype() == half_dtype_of(jax.local_devices()[0])


@pytest.mark.parametrize("default", ["cpu", None])
def test_half_dtype_follows_the_default_device(default, monkeypatch):
    asked = []
    monkeypatch.setattr("jamp._dtypes.half_dtype_of", asked.append)
    device = jax.local_devices(backend="cpu")[3]
    with jax.default_device(default):
        jamp.half_dtype()
    with jax.default_device(device):
        jamp.half_dtype()
    assert asked == [jax.local_devices(backend=default)[0], device]
