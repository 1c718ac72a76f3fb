"""Numbers that programs write."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jamp._compat import Literal
from jamp.transforms.analysis.reading.flat import written


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (np.float32(0.5), 0.5),
        (np.asarray(2, ml_dtypes.bfloat16), 2.0),
        (np.int32(-3), -3.0),
        (np.bool_(True), 1.0),
        (np.complex64(1), None),
        (np.ones(2, np.float32), None),
        # As equinox writes what has no tangent: the gradient of an implicit function under `vmap` was an error.
        (np.zeros((), jax.dtypes.float0), None),
    ],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_what_number_a_literal_is(value, number):
    aval = jax.core.ShapedArray(np.shape(value), jnp.asarray(0.0).dtype)
    assert written(Literal(value, aval)) == number
