"""An update that brings a half-precision parameter to an exact value.

`optax.apply_updates` adds. For master weights no number does: after an overflow the parameter is inf, and inf plus
anything is not the finite value that the master has come back to; 1 plus a float32 number is never 2^-30, nor -0.0; and
CPUs and TPUs flush what is denormal. So the update adds to the *bits* of the parameter, which always works, and keeps
what matters of an ordinary update: its leaves are arrays of the parameter's shape, and zeros mean "no change".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExactUpdate:
    """The update of one half-precision parameter: `param + update` is the new parameter, bit for bit.

    Take it as what `optax.apply_updates` needs, and as nothing else: transformations that scale, clip or average belong
    *inside* the wrapper that makes these updates. Zeros in place of `bits` leave the parameter as it is, so skipping a
    step by zeroing every array of an update tree works as it does for numbers.

    Attributes:
        bits: Signed integers of the parameter's shape and width: the difference between the new and the old bit
            pattern, modulo 2 to the width.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from jamp.optim import ExactUpdate
        >>> param = jnp.array([1.0, jnp.inf], jnp.bfloat16)
        >>> update = ExactUpdate.between(param, jnp.array([2.0**-30, 3.0], jnp.bfloat16))
        >>> optax.apply_updates(param, update).tolist() == [2.0**-30, 3.0]
        True
    """

    bits: jax.Array
    __array_ufunc__ = None  # So that `numpy_array + update` comes here too.

    @classmethod
    def between(cls, param: jax.Array, new_param: jax.Array) -> ExactUpdate:
        """The update that turns `param` into `new_param`, two arrays of the same dtype and shape."""
        return cls(_to_bits(new_param) - _to_bits(param))

    def __radd__(self, param: Any) -> jax.Array:
        dtype = jnp.result_type(param)
        if not jnp.issubdtype(dtype, jnp.floating) or self.bits.dtype != _bits_dtype(dtype):
            raise TypeError(
                f"Cannot add an ExactUpdate of {self.bits.dtype} bits to a parameter of dtype {dtype}. Something has "
                "changed the update, or the parameter's dtype, after the wrapper made it. Put transformations that "
                "change updates inside: master_weights(optax.chain(…))."
            )
        return lax.bitcast_convert_type(_to_bits(param) + self.bits, dtype)

    __add__ = __radd__


def _bits_dtype(dtype: Any) -> np.dtype:
    return np.dtype(f"int{8 * np.dtype(dtype).itemsize}")


def _to_bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, _bits_dtype(x.dtype))
