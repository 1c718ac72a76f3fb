"""Bit arithmetic of split master weights: a float32 as a bfloat16 and the 16 bits that it lacks."""

import jax
import jax.numpy as jnp
from jax import lax


def split_float32(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits float32 values into the bfloat16 they round to and the rest.

    The two are exact together: `join_float32(*split_float32(x))` is `x` for each of the 2^32 bit patterns. bfloat16 is
    the upper half of a float32, so the rest is the lower half, read as a signed number of units between -32768 and
    32767. That leaves no room for the tie that would round down to an even bfloat16 (+32768), so **exact ties round
    away from zero** here, where `astype` rounds them to even; every other value rounds as `astype` does. Values whose
    rounding overflows become inf and come back exact.

    NaNs come back bit for bit too, but the bfloat16 of a NaN with an unusual payload need not be a NaN: rounding
    0x7f800001 gives inf and 0x7fffffff gives -0.0. `jamp.master_weights` stores the NaN 0x7fc00000 for all of them.

    Megatron-LM and Transformer Engine store optimizer state in this way (`store_param_remainders`).

    Args:
        x: float32 array of any shape.

    Returns:
        Two arrays of that shape: the rounded values, bfloat16, and the remainders, int16.

    Example:
        >>> import jax.numpy as jnp
        >>> from jamp.optim import join_float32, split_float32
        >>> half, remainder = split_float32(jnp.float32(1.0) + 2**-20)
        >>> float(half), int(remainder), float(join_float32(half, remainder)) == 1 + 2**-20
        (1.0, 8, True)
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    rounded = ((bits + 0x8000) >> 16).astype(jnp.uint16)
    remainder = bits.astype(jnp.uint16)
    return lax.bitcast_convert_type(rounded, jnp.bfloat16), lax.bitcast_convert_type(remainder, jnp.int16)


def join_float32(half: jax.Array, remainder: jax.Array) -> jax.Array:
    """Puts back together what `split_float32` took apart.

    Args:
        half: bfloat16 array.
        remainder: int16 array of the same shape.

    Returns:
        float32 array of that shape.
    """
    upper = lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.int32) << 16
    return lax.bitcast_convert_type(upper + remainder.astype(jnp.int32), jnp.float32)
