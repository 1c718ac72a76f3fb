"""Convolutions and grouped products of operands in 8 bits, whose derivatives are such products too.

As in `eight_bits`, the tangent of a product is a primitive of its own, whose transpose rounds the cotangent. What that
transpose computes JAX knows: it is taken from there, as a jaxpr, and evaluated on float8 operands.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad

from jamp._compat import Atom, Aval, ClosedJaxpr, Eqn, Literal, bind, jaxpr_consts, open_jaxpr
from jamp._dtypes import E4M3, FLOAT32
from jamp._primitives import Trait, has
from jamp.transforms.emission.eight_bits import gradient_dtype, stand_in
from jamp.transforms.emission.quantized import (
    Quantized,
    dequantize,
    numbers,
    of_groups,
    of_rows,
    power_of_two,
    quantize,
    scales,
    smaller_first,
)
from jamp.transforms.emission.tangents import added, product_of_two, ruled, tangent_primitive, varying_alike
from jamp.transforms.emission.taylor import is_taylor_mode
from jamp.transforms.emission.wide_gradients import with_wide_transpose
from jamp.transforms.program.rewrites import Float8Product
from jamp.transforms.program.setting import Scaling, unscaled_dtype

T = TypeVar("T")


class Rows(NamedTuple):
    """Where rows that belong to groups are in a grouped product.

    Attributes:
        left: The axis of rows of its left operand.
        groups: The axis of groups of its right operand.
        result: The axis of rows of its result.
    """

    left: int
    groups: int
    result: int

    @classmethod
    def of(cls, eqn: Eqn) -> Rows | None:
        """That of an equation; None of a convolution."""
        if not has(eqn, Trait.GROUPS):
            return None
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (left,), (groups,) = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
        contracted = numbers.dot_dimension_numbers[0][0]
        return cls(left, groups, sum(axis not in contracted for axis in range(left)))


class Bilinear(NamedTuple):
    """A primitive that is linear in each of its first two operands, in 8 bits.

    Attributes:
        primitive: The primitive.
        params: Its parameters, but for the dtype of the result.
        half: What is multiplied in where 8 bits are not.
        out: Dtype of the result.
        grad_dtype: The float8 format of cotangents.
        in_half: For each operand, whether the product that makes its gradient is in half.
        rows: Where the rows of groups are, which have scales of their own; None where all share one.
        wide_gradients: Whether operands that are float32 have gradients that never were half.
    """

    primitive: Primitive
    params: tuple[tuple[str, object], ...]
    half: np.dtype
    out: np.dtype
    grad_dtype: np.dtype
    in_half: tuple[bool, bool]
    rows: Rows | None
    wide_gradients: bool

    def of(self, pair: Sequence[Array], rest: Sequence[Array], dtype: np.dtype) -> Array:
        """The product, with a result in some dtype."""
        return self.primitive.bind(*pair, *rest, **dict(self.params), preferred_element_type=dtype)


def float8_product(eqn: Eqn, rewrite: Float8Product, operands: Sequence[Array]) -> list[Array]:
    """A product in 8 bits, of all operands as they are, and of the bits and exponents of the first two."""
    pair, rest, rounded = operands[:2], operands[2:-4], operands[-4:]
    params = tuple((name, value) for name, value in eqn.params.items() if name != "preferred_element_type")
    # Operands of a convolution are of one dtype.
    grad_dtype = E4M3 if has(eqn, Trait.CONVOLVES) else rewrite.options.grad_dtype
    spec = Bilinear(
        eqn.primitive, params, rewrite.half, rewrite.out, grad_dtype, rewrite.in_half, Rows.of(eqn),
        rewrite.wide_gradients,
    )  # fmt: skip
    if is_taylor_mode():  # Series, of which bytes have none.
        return [_in_half(spec, pair, rest)]
    quantized = Quantized(*rounded[:2]), Quantized(*rounded[2:])
    return [product_of_two(functools.partial(_multiply, spec), functools.partial(_moved, spec), pair, quantized, rest)]


def _multiply(spec: Bilinear, quantized: Sequence[Quantized], rest: Sequence[Array]) -> Array:
    out = spec.of([numbers(q, E4M3) for q in quantized], rest, unscaled_dtype(spec.out))
    return _scaled(spec, None, out, quantized, rest).astype(spec.out)


def _scaled(
    spec: Bilinear, side: int | None, out: Array, quantized: Sequence[Quantized], rest: Sequence[Array]
) -> Array:
    """A product of float8 numbers times the scales of both.

    Args:
        spec: The product that it is, or whose gradient of one operand it makes.
        side: The side of that operand; None for the product itself.
        out: What is scaled.
        quantized: Both factors. Of the gradient the first is the cotangent.
        rest: What the product is given besides.
    """
    if spec.rows is None:
        factors, axis = [lax.reshape(scales(q, out.dtype), ()) for q in quantized], ()
    else:
        (sizes,) = rest
        first, second = (lax.reshape(q.exponents, (q.exponents.size,)) for q in quantized)
        if side == 1:  # Both have a scale for each row, and the result is of groups.
            factors, axis = [of_groups(first, sizes), of_groups(second, sizes)], (spec.rows.groups,)
        else:
            factors = [first, of_rows(second, sizes, first.size)]
            axis = (spec.rows.result if side is None else spec.rows.left,)
        factors = [power_of_two(factor, out.dtype) for factor in factors]
    for factor in smaller_first(*factors):
        out = lax.mul(out, lax.broadcast_in_dim(factor, out.shape, axis))
    return out


def _in_half(spec: Bilinear, pair: Sequence[Array], rest: Sequence[Array]) -> Array:
    return spec.of([x.astype(spec.half) for x in pair], rest, spec.half).astype(spec.out)


def _ordered(side: int, first: T, other: T) -> tuple[T, T]:
    """Two operands as the product takes them, the first of which belongs on one side."""
    return (first, other) if side == 0 else (other, first)


def _moved(
    spec: Bilinear, side: int, tangent: Array, other: Array, quantized: Quantized, rest: Sequence[Array]
) -> Array:
    """What the tangent of one operand adds to that of the result."""
    # Sums over devices are of what has the dtype of the gradient.
    tangent = tangent.astype(gradient_dtype(spec.half, spec.wide_gradients, tangent.dtype))
    if not spec.in_half[side]:
        return tangent_p.bind(*varying_alike([tangent, *quantized, stand_in(other), *rest]), spec=spec, side=side)

    def in_half(tangent: Array, other: Array, *rest: Array) -> Array:
        return _in_half(spec, _ordered(side, tangent, other), rest)

    if tangent.dtype == FLOAT32:
        return with_wide_transpose(in_half, tangent, other, *rest)
    return in_half(tangent, other, *rest)


# ---- The transpose.


def _gradient(
    spec: Bilinear, side: int, of: Aval, cotangent: Array, other: Array, q: Quantized, rest: Sequence[Array]
) -> Array:
    """The gradient of the operand on one side: the cotangent, rounded to 8 bits, times the other operand.

    It has derivatives in half.
    """
    rows = None if spec.rows is None else spec.rows.result
    rounded = quantize(cotangent, spec.grad_dtype, Scaling(ragged=rows), *rest)
    leaves, treedef = jax.tree.flatten((cotangent, other, rounded, q, list(rest)))
    dtype = gradient_dtype(spec.half, spec.wide_gradients, of.dtype)

    def gradient(*leaves: Array) -> Array:
        _, _, rounded, q, rest = treedef.unflatten(leaves)
        bits = numbers(rounded, spec.grad_dtype), numbers(q, E4M3)
        out = _transposed(spec, side, of, *bits, rest, unscaled_dtype(dtype))
        return _scaled(spec, side, out, [rounded, q], rest).astype(dtype)

    def derivative(primals: Sequence[Array], moves: Sequence[bool], tangents: Sequence[Array]) -> Array:
        cotangent, _, _, q, rest = treedef.unflatten(primals)
        given = iter(tangents)
        pairs = [(next(given), dequantize(q, E4M3, spec.half))] if moves[0] else []
        pairs += [(cotangent, next(given))] if moves[1] else []
        halves = [(a.astype(spec.half), b.astype(spec.half)) for a, b in pairs]
        return added([_transposed(spec, side, of, a, b, rest, dtype) for a, b in halves])

    return ruled(gradient, derivative, *leaves)


def _transposed(
    spec: Bilinear, side: int, of: Aval, cotangent: Array, other: Array, rest: Sequence[Array], dtype: np.dtype
) -> Array:
    """The transpose of a product with respect to one operand, of a cotangent and the other operand in any dtype."""

    def transpose(cotangent: Array, other: Array, *rest: Array) -> Array:
        linear = lambda x: spec.of(_ordered(side, x, other), rest, FLOAT32)  # noqa: E731
        return jax.linear_transpose(linear, jax.ShapeDtypeStruct(of.shape, FLOAT32))(cotangent)[0]

    wide = [jax.ShapeDtypeStruct(x.shape, FLOAT32) for x in (cotangent, other)]
    jaxpr = jax.make_jaxpr(transpose)(*wide, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in rest))
    return _evaluate(jaxpr, [cotangent, other, *rest], spec.primitive, dtype)


def _evaluate(jaxpr: ClosedJaxpr, args: Sequence[Array], product: Primitive, dtype: np.dtype) -> Array:
    """A product and what moves its operands and its result, in other dtypes than those that it was traced in."""
    inner = open_jaxpr(jaxpr)
    values: dict[Atom, Array] = dict(zip([*inner.constvars, *inner.invars], [*jaxpr_consts(jaxpr), *args], strict=True))
    for eqn in inner.eqns:
        if has(eqn, Trait.CONVERTS):
            values[eqn.outvars[0]] = values[eqn.invars[0]]
            continue
        # A literal is what pads, in the dtype of what is padded.
        operands = [
            np.asarray(atom.val).astype(values[eqn.invars[0]].dtype) if isinstance(atom, Literal) else values[atom]
            for atom in eqn.invars
        ]
        params = eqn.params | ({"preferred_element_type": dtype} if eqn.primitive is product else {})
        values |= zip(eqn.outvars, bind(eqn, operands, params), strict=True)
    return values[inner.outvars[0]]


# ---- The tangent: linear in its first operand, whose transpose rounds. The next two are the other operand in 8 bits,
# the one behind them stands for its derivative, and the rest has none.


def _forward(
    tangent: Array, bits: Array, exponents: Array, other: Array, *rest: Array, spec: Bilinear, side: int
) -> Array:
    del other
    whole = dequantize(Quantized(bits, exponents), E4M3, spec.half)
    return _in_half(spec, _ordered(side, tangent, whole), rest)


def _mapped(
    tangent: Array, bits: Array, exponents: Array, other: Array, *rest: Array, spec: Bilinear, side: int
) -> Array:
    """The same with a derivative, in half."""
    whole = dequantize(Quantized(bits, exponents), E4M3, spec.half) + other.astype(spec.half)
    return _in_half(spec, _ordered(side, tangent, whole), rest)


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Array | ad.Zero], *, spec: Bilinear, side: int
) -> tuple[Array, Array | ad.Zero]:
    tangent, bits, exponents, other, *rest = primals
    moves, other_moves = tangents[0], tangents[3]
    out = tangent_p.bind(*primals, spec=spec, side=side)
    terms = []
    if not isinstance(moves, ad.Zero):
        terms.append(tangent_p.bind(*varying_alike([moves, bits, exponents, other, *rest]), spec=spec, side=side))
    if not isinstance(other_moves, ad.Zero):
        terms.append(_in_half(spec, _ordered(side, tangent, other_moves), rest))
    return out, added(terms) if terms else ad.Zero(jax.typeof(out).to_tangent_aval())


def _transpose(
    cotangent: Array | ad.Zero, tangent: ad.UndefinedPrimal, *known: Array, spec: Bilinear, side: int
) -> list[Array | ad.Zero | None]:
    bits, exponents, other, *rest = known
    none = [None] * len(known)
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(tangent.aval), *none]
    gradient = _gradient(spec, side, tangent.aval, cotangent, other, Quantized(bits, exponents), rest)
    return [gradient.astype(tangent.aval.dtype), *none]


def _batch(operands: Sequence[Array], dims: Sequence[int | None], *, spec: Bilinear, side: int) -> tuple[Array, int]:
    return jax.vmap(functools.partial(_mapped, spec=spec, side=side), tuple(dims))(*operands), 0


tangent_p = tangent_primitive("float8_tangent_of_transposed", _forward, _jvp, _transpose, _batch)
