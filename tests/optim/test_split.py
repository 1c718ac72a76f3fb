"""Bit arithmetic of split storage. `exhaustive` runs all 2^32 values: `python tests/optim/test_split.py` (20 s)."""

import jax
import jax.numpy as jnp
import numpy as np

from jamp.optim import join_float32, split_float32


@jax.jit
def check(patterns):
    """Whether a block of float32 bit patterns comes back, and rounds as it should, both against JAX's own rounding."""
    x = jax.lax.bitcast_convert_type(patterns, jnp.float32)
    half, remainder = split_float32(x)
    back = jax.lax.bitcast_convert_type(join_float32(half, remainder), jnp.uint32)
    to_even = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    rounds_to_even = to_even == jax.lax.bitcast_convert_type(half, jnp.uint16)
    tie_to_even_below = (patterns & 0x1FFFF) == 0x8000
    return (back == patterns).all(), (jnp.isnan(x) | (rounds_to_even != tie_to_even_below)).all()


def test_every_upper_half_with_every_kind_of_lower_half():
    lower = np.array([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], np.uint32)
    upper = np.arange(2**16, dtype=np.uint32) << 16
    assert all(check((upper[:, None] + lower).ravel()))


def test_every_lower_half_where_something_changes():
    upper = np.array([0, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF], np.uint32)
    upper = np.concatenate([upper, upper | 0x8000]) << 16
    assert all(check((upper[:, None] + np.arange(2**16, dtype=np.uint32)).ravel()))


def test_dtypes_and_known_values():
    half, remainder = split_float32(jnp.array([1.0, 1 + 2.0**-8, 1 + 2.0**-7 + 2.0**-8, -1 - 2.0**-8, 3.4e38]))
    assert (half.dtype, remainder.dtype) == (jnp.bfloat16, jnp.int16)
    # 1 + 2^-8 is the tie below which astype would go to 1; 3.4e38 is finite, and rounds to inf.
    assert half.astype(jnp.float32).tolist() == [1.0, 1 + 2.0**-7, 1 + 2.0**-6, -1 - 2.0**-7, np.inf]
    assert remainder[:4].tolist() == [0, -(2**15), -(2**15), -(2**15)]
    assert join_float32(half, remainder)[4] == np.float32(3.4e38)


def exhaustive():
    block = np.arange(2**24, dtype=np.uint32)
    for start in range(0, 2**32, 2**24):
        assert all(check(block + np.uint32(start))), hex(start)
    print("All 2^32 float32 values split and join exactly, and round as astype does but for ties.")


if __name__ == "__main__":
    exhaustive()
