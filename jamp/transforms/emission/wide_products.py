"""Products of half operands whose float32 accumulator is the result, in a form that every platform has a kernel for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from jamp._compat import Eqn, bind
from jamp._primitives import Trait, has
from jamp.transforms.emission.for_platforms import held_apart
from jamp.transforms.emission.taylor import is_taylor_mode, with_rule

_PREFERRED, _NUMBERS = "preferred_element_type", "dimension_numbers"


def wide_product(eqn: Eqn, operands: Sequence[Array], wide: np.dtype) -> list[Array]:
    """A product of half operands whose float32 accumulator is the result, with a derivative in half.

    Left to JAX, the transpose of this product would multiply a float32 cotangent with a half operand, in float32.
    """
    # One operand may be integers: with these as the dtype of its result the derivative was cut off to zero.
    half = next(x.dtype for x in operands if jnp.issubdtype(x.dtype, jnp.floating))

    def product(a: Array, b: Array) -> Array:
        return bind(eqn, (a, b), {**eqn.params, _PREFERRED: half})[0]

    @jax.custom_jvp
    def dot(a: Array, b: Array) -> Array:
        return accumulator(eqn, (a, b), wide)

    def rule(primals: Sequence[Array], tangents: Sequence[Array]) -> Any:
        (a, b), (da, db) = primals, tangents
        out = dot(a, b)
        terms = []
        if not isinstance(da, SymbolicZero):
            terms.append(product(da, b))
        if not isinstance(db, SymbolicZero):
            terms.append(product(a, db))
        if not terms:
            return out, jnp.zeros_like(out)
        return out, sum(terms[1:], terms[0]).astype(out.dtype)

    dot.defjvp(rule, symbolic_zeros=True)
    return [with_rule(dot)(*operands)]


def accumulator(eqn: Eqn, operands: Sequence[Array], wide: np.dtype) -> Array:
    """The float32 accumulator of a product of half operands.

    XLA:CPU (jaxlib 0.10, 0.12) has kernels for some of those in bfloat16, and raises the operands of others. It makes
    up its mind before it has moved axes, and folded transposes into the product, and then may have no kernel for what
    has become of it ("Unsupported element type for DotThunk"). It leaves alone what has the batch axes of both
    operands in front, on the left the contracted ones last, on the right one free axis, and something behind it that no
    transpose is folded through, of two matrices in front of the left one too.
    """
    params = {**eqn.params, _PREFERRED: np.dtype(wide)}
    if operands[0].dtype != jnp.bfloat16 or operands[1].dtype != jnp.bfloat16 or is_taylor_mode():
        return bind(eqn, operands, params)[0]

    def as_written(a: Array, *others: Array) -> Array:
        return unfolded(bind(eqn, (held_apart(a), *others), params)[0])

    def in_order(a: Array, b: Array) -> Array:
        left, right = _axes(eqn, a, b)
        sizes = [b.shape[axis] for axis in right.free]
        a = lax.transpose(a, (*left.batch, *left.free, *left.contracted))
        b = lax.transpose(b, (*right.batch, *right.contracted, *right.free))
        flat = lax.reshape(b, (*b.shape[: b.ndim - len(sizes)], math.prod(sizes)))
        batch, contracted = range(len(left.batch)), range(len(left.contracted))
        last = [a.ndim - len(contracted) + axis for axis in contracted]
        numbers = ((tuple(last), tuple(len(batch) + axis for axis in contracted)), (tuple(batch), tuple(batch)))
        out = unfolded(bind(eqn, (a, flat), {**params, _NUMBERS: numbers})[0])
        return lax.reshape(out, (*out.shape[:-1], *sizes))

    # Of a sharded axis that is flattened XLA would gather the whole.
    if not has(eqn, Trait.MATRIX) or _is_plain(eqn, *operands) or any(map(_is_sharded, operands)):
        return as_written(*operands)
    return lax.platform_dependent(*operands, cpu=in_order, default=as_written)


def unfolded(product: Array) -> Array:
    """The product, with an operation behind it that changes no bit."""
    return lax.reduce_precision(product, 8, 23)


def _is_sharded(x: Array) -> bool:
    return any(jax.typeof(x).sharding.spec)


class _Axes(NamedTuple):
    """The axes of an operand."""

    batch: tuple[int, ...]
    contracted: tuple[int, ...]
    free: tuple[int, ...]


def _axes(eqn: Eqn, *operands: Array) -> list[_Axes]:
    contracted, batch = eqn.params[_NUMBERS]
    return [
        _Axes(tuple(of_batch), tuple(of_sum), tuple(i for i in range(x.ndim) if i not in (*of_batch, *of_sum)))
        for x, of_batch, of_sum in zip(operands, batch, contracted, strict=True)
    ]


def _is_plain(eqn: Eqn, a: Array, b: Array) -> bool:
    """Whether a product is of two matrices, or of a stack of rows and a matrix: XLA:CPU has kernels for these."""
    left, right = _axes(eqn, a, b)
    return not left.batch and len(right.free) < 2
