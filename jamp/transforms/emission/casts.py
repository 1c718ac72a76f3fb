"""Casts, and functions that agree with another one but for their derivative."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jamp._compat import Aval, varying_axes
from jamp._dtypes import is_differentiable
from jamp.transforms.program.plan import Cast, Casts


def cast(value: Array | np.ndarray, to: Cast) -> Any:
    """Converts a value; saturating, finite values beyond the range become the largest number, not infinity."""
    constant = isinstance(value, np.ndarray)
    if to.saturate:
        limit = np.asarray(float(jnp.finfo(to.dtype).max), value.dtype)
        if constant:
            value = np.where(np.isinf(value), value, np.clip(value, -limit, limit))
        else:
            value = lax.select(lax.is_finite(value), lax.clamp(-limit, value, limit), value)
    if not constant:
        return lax.convert_element_type(value, to.dtype)
    with np.errstate(over="ignore"):  # As on a device.
        return value.astype(to.dtype)


def zeros(aval: Aval) -> Any:
    """A zero tangent of an abstract value, sharded as it is; `float0` for what is not differentiable."""
    if not is_differentiable(aval):
        return np.zeros(aval.shape, jax.dtypes.float0)
    value = lax.broadcast(np.zeros((), aval.dtype), aval.shape, out_sharding=aval.sharding)
    axes = varying_axes(aval)
    return lax.pcast(value, tuple(axes), to="varying") if axes else value


def spread_out(operands: Sequence[Array], to: Casts, aval: Aval) -> list[Array]:
    """Operands of an elementwise operation, of which some get the shape of its result, and are cast then.

    Args:
        operands: The operands. Their shapes count, and not those that the operation was traced with: a layer that
            repeats is emitted once, and JAX traces that again where it meets another shape.
        to: What is done with each; None leaves it.
        aval: The result as it was traced, which says how it is sharded where no operand has its shape.
    """
    shape = jnp.broadcast_shapes(*(np.shape(x) for x in operands))
    whole = next((jax.typeof(x) for x in operands if np.shape(x) == shape), aval)

    def spread(x: Array) -> Array:
        axes = tuple(range(len(shape) - x.ndim, len(shape)))
        return lax.broadcast_in_dim(x, shape, axes, out_sharding=whole.sharding)

    return [x if each is None else cast(spread(x), each) for x, each in zip(operands, to, strict=True)]


def replaced(values: Sequence[Array], where: Sequence[int], by: Sequence[Array]) -> list[Array]:
    """A list of values, with others in some places."""
    result = list(values)
    for index, value in zip(where, by, strict=True):
        result[index] = value
    return result


def shortened(value: Any, wide: np.dtype, half: np.dtype) -> Array:
    """A value of a wide dtype with as many digits as `half` has; exponents stay its own, so that nothing overflows."""
    return lax.reduce_precision(value, jnp.finfo(wide).nexp, jnp.finfo(half).nmant)


@jax.custom_jvp
def exact(value: Array) -> Array:
    """A half value that XLA must round: it leaves out casts there and back, but not `reduce_precision`.

    The exponents stay those of float32, in which those below a half dtype's normal numbers are not zero.
    """
    raised = lax.convert_element_type(value, np.float32)
    return lax.convert_element_type(shortened(raised, np.dtype(np.float32), value.dtype), value.dtype)


@exact.defjvp
def _exact_rule(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
    return exact(*primals), tangents[0]


@jax.custom_jvp
def rounded(value: Array, half: Array) -> Array:
    """`half`, which is `value` rounded, with the derivative of `value`: many cotangents add up in float32 then."""
    del value
    return half


@rounded.defjvp
def _rounded_rule(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[Array, Array]:
    return primals[1], tangents[0].astype(primals[1].dtype)
