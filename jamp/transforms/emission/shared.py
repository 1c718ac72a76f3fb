"""Copies of a value in another precision than that its derivative has.

The first is the half copy of a weight, or half data, that a loop reads in each of its iterations, with a float32
derivative. A loop that reads a constant adds up its cotangents, one an iteration, in half: of 4,000 steps of an RNN
little is left (a gradient error of 54 %, where float32 sums leave 0.2 %). Cotangents of the weight add up in float32.
The copy is made outside of the loop, and has no derivative of its own. So it takes a primitive to say which it has: a
rule of `jax.custom_jvp` is forgotten in a loop within a loop (jax before 0.12, see `tangents`), and second derivatives
were zero there.

The other is float32 data made of half data inside of a checkpoint or a loop, which keeps the half alone, with the
derivative of what was made of the same data outside. So the cotangents of all who read it in float32 add up in float32,
as those of `checkpoint(layer)(z) - z` have to: rounded to half each by itself, they left an error of 9 %.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeVar

import jax
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jamp.transforms.emission.casts import exact

T = TypeVar("T")

shared_copy_p = Primitive("jamp_shared_copy")


def shared_copy(value: Array, half: Array) -> Array:
    """`half`, which is `value` rounded and has no derivative, with the derivative of `value`."""
    return shared_copy_p.bind(value, half)


def _copy(value: T, half: T) -> T:
    del value
    return half


def _rounded(value: Array, half: Array) -> Array:
    """The copy, as the backward pass reads it.

    XLA leaves out casts there and back, so that the loop would read what a product gave before it was rounded, and the
    backward pass what is kept: gradients through 100 of Sinkhorn's iterations were off by 70 %, where weights that add
    up to one did not in the backward pass.
    """
    del value
    return exact(half)


def _jvp(primals: Sequence[Array], tangents: Sequence[Array | ad.Zero]) -> tuple[Array, Array | ad.Zero]:
    out = shared_copy_p.bind(*primals)  # Not `half`, of which second derivatives would be zero.
    moved, _ = tangents
    if isinstance(moved, ad.Zero):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, lax.convert_element_type(moved, out.dtype)


def _batch(copy_p: Primitive, operands: Sequence[Array], axes: Sequence[int | None]) -> tuple[Array, int]:
    (size,) = {x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None}
    in_front = [batching.bdim_at_front(x, axis, size) for x, axis in zip(operands, axes, strict=True)]
    return copy_p.bind(*in_front), 0


def _transpose(
    cotangent: Array | ad.Zero, value: ad.UndefinedPrimal, half: Array | ad.UndefinedPrimal
) -> list[Array | ad.Zero | None]:
    """Of a program that is linear throughout, the copy is of the value."""
    back = cotangent if isinstance(cotangent, ad.Zero) else lax.convert_element_type(cotangent, value.aval.dtype)
    return [back, ad.Zero(half.aval) if isinstance(half, ad.UndefinedPrimal) else None]


shared_copy_p.def_impl(_copy)
shared_copy_p.def_abstract_eval(_copy)
ad.primitive_jvps[shared_copy_p] = _jvp
ad.primitive_transposes[shared_copy_p] = _transpose
batching.primitive_batchers[shared_copy_p] = functools.partial(_batch, shared_copy_p)
mlir.register_lowering(shared_copy_p, mlir.lower_fun(_rounded, multiple_results=False))

raised_copy_p = Primitive("jamp_raised_copy")


def raised_copy(value: Array, half: Array) -> Array:
    """`half` in the precision of `value`, which was made of it outside and whose derivative it has."""
    return raised_copy_p.bind(value, half)


def _raised(value: Array, half: Array) -> Array:
    return lax.convert_element_type(half, value.dtype)


def _raised_jvp(primals: Sequence[Array], tangents: Sequence[Array | ad.Zero]) -> tuple[Array, Array | ad.Zero]:
    # Not of `value`, or that would be kept. Second derivatives go by way of `half`, which it is made of.
    return _raised(*primals), tangents[0]


raised_copy_p.def_impl(_raised)
raised_copy_p.def_abstract_eval(lambda value, half: value)
ad.primitive_jvps[raised_copy_p] = _raised_jvp
ad.primitive_transposes[raised_copy_p] = _transpose
batching.primitive_batchers[raised_copy_p] = functools.partial(_batch, raised_copy_p)
mlir.register_lowering(raised_copy_p, mlir.lower_fun(_raised, multiple_results=False))
