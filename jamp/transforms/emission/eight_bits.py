"""Products of operands in 8 bits, whose derivatives are such products too.

JAX transposes the derivative of a product, which is linear, to the products of the backward pass. In these a cotangent
has a scale of its own and is rounded, which is no transpose that JAX could find. A `custom_vjp` would say so, but has
no forward mode. So the tangent of a product is a primitive, which in forward mode multiplies in half.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.interpreters import ad, batching
from jax.sharding import NamedSharding

from jamp._compat import Aval, Eqn, open_jaxpr
from jamp._dtypes import E4M3, E5M2, FLOAT32
from jamp._shardings import explicit_sharding
from jamp.transforms.emission.blocks import product_of_blocks
from jamp.transforms.emission.casts import zeros
from jamp.transforms.emission.for_platforms import laid_out
from jamp.transforms.emission.quantized import Quantized, dequantize, numbers, quantize, scales, smaller_first, spread
from jamp.transforms.emission.tangents import (
    added,
    product_of_two,
    ruled,
    tangent_primitive,
    varying_alike,
)
from jamp.transforms.emission.taylor import is_taylor_mode
from jamp.transforms.emission.wide_gradients import with_wide_transpose
from jamp.transforms.emission.wide_products import accumulator, unfolded
from jamp.transforms.program.rewrites import Float8Product
from jamp.transforms.program.setting import EightBits, Scaling, unscaled_dtype

Axes = tuple[int, ...]
Numbers = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]
_NO_SCALE = 127  # The exponent of 1.


class Product(NamedTuple):
    """A product in 8 bits.

    Attributes:
        numbers: Dimension numbers, as of `lax.dot_general`.
        formats: Float8 formats of the operands.
        half: What is multiplied in where 8 bits are not.
        out: Dtype of the result.
        options: How cotangents are rounded.
        in_half: For each operand, whether the product that makes its gradient is in half.
        wide_gradients: Whether operands that are float32 have gradients that never were half.
        backward: Whether it is of a backward pass, which adds up with more care.
        sharding: Of the result on a mesh with explicit axes, where it has to be said.
        members: Of a tangent, how many of the first free axes of its operand `vmap` put there. The other operand lacks
            them, so that they are no batch; their cotangents have scales of their own all the same.
    """

    numbers: Numbers
    formats: tuple[np.dtype, np.dtype]
    half: np.dtype
    out: np.dtype
    options: EightBits
    in_half: tuple[bool, bool] = (False, False)
    wide_gradients: bool = False
    backward: bool = False
    sharding: NamedSharding | None = None
    members: int = 0


def float8_product(eqn: Eqn, rewrite: Float8Product, operands: Sequence[Array]) -> list[Array]:
    """A `dot_general` in 8 bits, of both operands as they are, and of the bits and exponents of both."""
    a, b, *rounded = operands
    (contract_a, contract_b), (batch_a, batch_b) = eqn.params["dimension_numbers"]
    axes = (tuple(contract_a), tuple(contract_b)), (tuple(batch_a), tuple(batch_b))
    spec = Product(axes, (E4M3, E4M3), rewrite.half, rewrite.out, rewrite.options, rewrite.in_half)
    spec = spec._replace(wide_gradients=rewrite.wide_gradients, sharding=eqn.params.get("out_sharding"))
    if is_taylor_mode():  # Series, of which bytes have none.
        return [_in_half(spec, 0, a, b)]
    return [product(spec, [a, b], [Quantized(*rounded[:2]), Quantized(*rounded[2:])])]


def product(spec: Product, operands: Sequence[Array], quantized: Sequence[Quantized]) -> Array:
    """A product of two operands in 8 bits: see `product_of_two`."""
    return product_of_two(
        lambda quantized, _: _multiply(spec, *quantized),
        lambda side, tangent, other, q, _: _moved(spec, side, tangent, other, q),
        operands,
        quantized,
    )


def _multiply(spec: Product, a: Quantized, b: Quantized) -> Array:
    """The product itself. XLA converts float8 numbers where a device has no product of them: the result is the same."""
    if spec.options.blocks:
        return _multiply_blocks(spec, a, b)
    x, y = (_contracted_last(spec, side, numbers(q, spec.formats[side])) for side, q in enumerate((a, b)))
    leading = tuple(range(len(spec.numbers[1][0])))
    count = len(spec.numbers[0][0])
    axes = (tuple(range(x.ndim - count, x.ndim)), tuple(range(y.ndim - count, y.ndim))), (leading, leading)
    # At this precision alone cuBLASLt adds up in all bits of float32.
    precision = lax.Precision.HIGHEST if spec.backward else None
    dtype = unscaled_dtype(spec.out)
    out = lax.dot_general(x, y, axes, precision=precision, preferred_element_type=dtype, out_sharding=spec.sharding)
    factors = [_of_result(scales(q, dtype), spec, side, out.ndim) for side, q in enumerate((a, b))]
    shape = jnp.broadcast_shapes(*(factor.shape for factor in factors))
    for factor in smaller_first(*(spread(factor, shape) for factor in factors)):
        out = lax.mul(out, spread(factor, out.shape))
    return out.astype(spec.out)


def _contracted_last(spec: Product, side: int, x: Array) -> Array:
    """An operand of a product with its axes of the batch first and the contracted ones last.

    GPUs before Blackwell multiply float8 numbers in no other layout. Where XLA itself transposes them, it does so
    within what its own kernels read, and where it then takes cuBLASLt's, a slow transpose is left: on an H100 6 of the
    35 ms of a gradient (`benchmarks.studies.float8_widths`).
    """
    contracted, free = spec.numbers[0][side], _free_axes(spec.numbers, side, x.ndim)
    order = (*spec.numbers[1][side], *free, *contracted)
    if order == tuple(range(x.ndim)):
        return x
    return laid_out(lax.transpose(x, order), contracted=len(contracted), free=len(free))


def _multiply_blocks(spec: Product, a: Quantized, b: Quantized) -> Array:
    """A product with a scale for each block of what is contracted, as devices have it: of two stacks of matrices.

    On a mesh with explicit axes it is written out: JAX does not say how the result of that primitive is sharded.
    """
    if explicit_sharding(jax.typeof(a.bits), ()) or explicit_sharding(jax.typeof(b.bits), ()):
        x, y = (dequantize(q, form, spec.half) for q, form in zip((a, b), spec.formats, strict=True))
        dtype = unscaled_dtype(spec.out)
        return lax.dot_general(x, y, spec.numbers, None, dtype, out_sharding=spec.sharding).astype(spec.out)
    stacks: list[Quantized] = []
    shape: list[int] = []
    for side, q in enumerate((a, b)):
        contracted, batch = spec.numbers[0][side], spec.numbers[1][side]
        free = _free_axes(spec.numbers, side, q.bits.ndim)
        shape += [q.bits.shape[axis] for axis in ([*batch, *free] if side == 0 else free)]
        sizes = [math.prod(q.bits.shape[axis] for axis in axes) for axes in (batch, free)]
        order = (*batch, *free, *contracted)
        stacks.append(Quantized(*(lax.reshape(lax.transpose(x, order), (*sizes, x.shape[contracted[0]])) for x in q)))
    out = product_of_blocks(stacks, spec.formats, unscaled_dtype(spec.out))
    return lax.reshape(unfolded(out) if spec.out == FLOAT32 else out, shape).astype(spec.out)


def _free_axes(axes: Numbers, side: int, ndim: int) -> Axes:
    """Axes of an operand that are neither contracted nor of a batch."""
    contracted, batch = axes
    return tuple(axis for axis in range(ndim) if axis not in (*contracted[side], *batch[side]))


def _of_result(scale: Array, spec: Product, side: int, ndim: int) -> Array:
    """Scales of an operand, which are the same along its contracted axes, with the axes of the result."""
    contracted, batch = spec.numbers[0][side], spec.numbers[1][side]
    free = _free_axes(spec.numbers, side, scale.ndim)
    first = len(batch) if side == 0 else ndim - len(free)
    shape = [1] * ndim
    for place, axis in zip([*range(len(batch)), *range(first, first + len(free))], [*batch, *free], strict=True):
        shape[place] = scale.shape[axis]
    return lax.reshape(lax.transpose(scale, (*batch, *free, *contracted)), shape)


def _moved(spec: Product, side: int, tangent: Array, other: Array, quantized: Quantized) -> Array:
    """What the tangent of one operand adds to that of the result."""
    # Sums over devices are of what has the dtype of the gradient.
    tangent = tangent.astype(gradient_dtype(spec.half, spec.wide_gradients, tangent.dtype))
    if not spec.in_half[side]:
        return _bind_tangent([tangent, *quantized, stand_in(other)], spec=spec, side=side)
    if tangent.dtype == FLOAT32:
        return with_wide_transpose(functools.partial(_in_half, spec, side), tangent, other)
    return _in_half(spec, side, tangent, other)


def gradient_dtype(half: np.dtype, wide: bool, of: np.dtype) -> np.dtype:
    """In which dtype a product makes the gradient of an operand of a dtype, half if those of float32 are not wide."""
    return FLOAT32 if wide and of == FLOAT32 else half


def _in_half(spec: Product, side: int, tangent: Array, other: Array) -> Array:
    first, second = (tangent, other) if side == 0 else (other, tangent)
    pair = first.astype(spec.half), second.astype(spec.half)
    out = lax.dot_general(pair[0], pair[1], spec.numbers, None, spec.half, out_sharding=spec.sharding)
    return out.astype(spec.out)


def stand_in(x: Array) -> Array:
    """Zeros with the derivative of an operand, for which they stand where it is read for second derivatives alone.

    To keep it for those would take the memory that 8 bits save.
    """
    return ruled(lambda x: zeros(jax.typeof(x)), lambda _, __, tangents: tangents[0], x)


# ---- The tangent of a product: linear in its first operand, whose transpose rounds. The next two are the other operand
# in 8 bits, and the last stands for its derivative.


def _bind_tangent(operands: Sequence[Array], **params: Any) -> Array:
    return tangent_p.bind(*varying_alike(operands), **params)


def _forward(tangent: Array, bits: Array, exponents: Array, other: Array, *, spec: Product, side: int) -> Array:
    del other
    return _in_half(spec, side, tangent, dequantize(Quantized(bits, exponents), spec.formats[1 - side], spec.half))


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> tuple[Array, Any]:
    tangent, bits, exponents, other = primals
    moves, _, _, other_moves = tangents
    out = tangent_p.bind(*primals, **params)
    terms = []
    if not isinstance(moves, ad.Zero):
        terms.append(_bind_tangent([moves, bits, exponents, other], **params))
    if not isinstance(other_moves, ad.Zero):
        terms.append(_in_half(params["spec"], params["side"], tangent, other_moves))
    return out, added(terms) if terms else ad.Zero(jax.typeof(out).to_tangent_aval())


def _transpose(
    cotangent: Any, tangent: Any, bits: Array, exponents: Array, other: Array, *, spec: Product, side: int
) -> list[Any]:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(tangent.aval), None, None, None]
    gradient = _gradient(spec, side, tangent.aval, cotangent, Quantized(bits, exponents), other)
    return [gradient.astype(tangent.aval.dtype), None, None, None]


def _gradient(spec: Product, side: int, of: Aval, cotangent: Array, q: Quantized, other: Array) -> Array:
    """The gradient of the operand on one side: the cotangent, rounded to 8 bits, times the other operand.

    It is rounded to half, as gradients are that a product in half makes, if float32 is not asked for.
    """
    contracted, batch = spec.numbers
    mine, others = _free_axes(spec.numbers, side, len(of.shape)), _free_axes(spec.numbers, 1 - side, q.bits.ndim)
    first = len(batch[0]) + (len(mine) if side == 0 else 0)
    read = tuple(range(first, first + len(others)))
    leading = tuple(range(len(batch[0])))
    # Axes of the result: those of the batch, the free ones, and the contracted ones in the order of the other's. Of a
    # right operand, such as a weight, the contracted ones come first, so that mostly there is nothing to transpose.
    by_other = [contracted[side][i] for i in np.argsort(contracted[1 - side])]
    axes = [*batch[side], *(mine if side == 0 else by_other), *(by_other if side == 0 else mine)]
    turned = spec._replace(
        numbers=((read, others), (leading, batch[1 - side])),
        # No device multiplies E5M2 with E5M2.
        formats=(E4M3 if spec.formats[1 - side] == E5M2 else spec.options.grad_dtype, spec.formats[1 - side]),
        out=gradient_dtype(spec.half, spec.wide_gradients, of.dtype),
        in_half=(False, False),
        backward=True,
        sharding=explicit_sharding(of, axes),
        members=0,
    )
    first = len(batch[0]) + (0 if side == 0 else len(others))
    apart = (*leading, *range(first, first + spec.members))
    result = _product_of_cotangent(turned, side == 1, cotangent, q, other, apart)
    return lax.transpose(result, tuple(int(i) for i in np.argsort(axes)))


def _product_of_cotangent(
    spec: Product, swaps: bool, cotangent: Array, q: Quantized, other: Array, apart: Axes
) -> Array:
    """A cotangent times an operand, or if it swaps, the operand times the cotangent.

    Each index of the axes that are apart has a scale of its own.
    """
    (read, others), _ = spec.numbers
    mine, theirs = spec.formats
    if not spec.options.blocks:
        cotangent, other, q = _fold(spec.numbers, cotangent, other, q)
        rounded = [quantize(cotangent, mine, spec.options.scaling(read, apart, cotangent.ndim)), q]
        return _ordered(spec, swaps, [cotangent, other], rounded)
    # Blocks lie along other axes than those of the operand. Bytes have no derivative, what stands for the operand has.
    wide = dequantize(q, theirs, spec.half) + other.astype(spec.half)
    if len(others) != 1 or wide.shape[others[0]] % Scaling.BLOCK:
        pair, axes = [cotangent.astype(spec.half), wide], spec.numbers
        if swaps:
            pair, axes = pair[::-1], _swapped(axes)

        def half(a: Array, b: Array) -> Array:
            return lax.dot_general(a, b, axes, None, spec.half, out_sharding=spec.sharding)

        if spec.out != FLOAT32:
            return half(*pair)
        (eqn,) = open_jaxpr(jax.make_jaxpr(half)(*pair)).eqns
        return accumulator(eqn, pair, FLOAT32)
    rounded = [quantize(cotangent, mine, Scaling(block=read[0])), quantize(wide, theirs, Scaling(block=others[0]))]
    return _ordered(spec, swaps, [cotangent, other], rounded)


def _swapped(axes: Numbers) -> Numbers:
    (a, b), (batch_a, batch_b) = axes
    return (b, a), (batch_b, batch_a)


def _ordered(spec: Product, swaps: bool, operands: list[Array], quantized: list[Quantized]) -> Array:
    if not swaps:
        return product(spec, operands, quantized)
    turned = spec._replace(numbers=_swapped(spec.numbers), formats=spec.formats[::-1], in_half=spec.in_half[::-1])
    return product(turned, operands[::-1], quantized[::-1])


def _fold(axes: Numbers, cotangent: Array, other: Array, q: Quantized) -> tuple[Array, Array, Quantized]:
    """Scales that differ along the axes to be contracted now go into the cotangent, before it is rounded."""
    (read, others), (leading, batch) = axes
    if all(q.exponents.shape[axis] == 1 for axis in others):
        return cotangent, other, q
    order = [*batch, *others]
    rest = [axis for axis in range(q.bits.ndim) if axis not in order]  # Contracted before: of one element.
    scale = lax.transpose(scales(q), (*order, *rest))
    shape = [1] * cotangent.ndim
    for axis, size in zip([*leading, *read], scale.shape, strict=False):
        shape[axis] = size
    cotangent = lax.mul(cotangent.astype(FLOAT32), spread(lax.reshape(scale, shape), cotangent.shape))
    other = lax.div(other.astype(FLOAT32), spread(scales(q), other.shape))
    return cotangent, other, q._replace(exponents=lax.full_like(q.exponents, _NO_SCALE, shape=(1,) * q.bits.ndim))


def _shifted(pair: tuple[Axes, Axes], on: Sequence[bool]) -> tuple[Axes, Axes]:
    first, second = (tuple(axis + moved for axis in axes) for axes, moved in zip(pair, on, strict=True))
    return first, second


def _batch(operands: Sequence[Array], dims: Sequence[Any], *, spec: Product, side: int) -> tuple[Array, int]:
    mapped = [dims[0] is not None, any(dim is not None for dim in dims[1:])]
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    tangent, *group = (
        batching.bdim_at_front(x, dim, size) if on else x
        for x, dim, on in zip(operands, dims, [mapped[0], *mapped[1:] * 3], strict=True)
    )
    on = mapped if side == 0 else mapped[::-1]  # By operand of the product.
    contracted, batch = (_shifted(pair, on) for pair in spec.numbers)
    if all(mapped):
        batch, where = ((0, *batch[0]), (0, *batch[1])), 0
        members = spec.members
    else:  # One more free axis, the first.
        free = _free_axes((contracted, batch), 0, (tangent if side == 0 else group[0]).ndim)
        where = len(batch[0]) + (0 if on[0] else len(free))
        members = spec.members + mapped[0]
    spec = spec._replace(numbers=(contracted, batch), members=members)
    return tangent_p.bind(tangent, *group, spec=spec, side=side), where


tangent_p = tangent_primitive("float8_tangent", _forward, _jvp, _transpose, _batch)
