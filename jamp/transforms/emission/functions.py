"""Operations that are emitted as something else than one primitive with other dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from jamp._compat import Eqn, bind
from jamp.transforms.emission.for_platforms import left_out, written
from jamp.transforms.emission.taylor import kept, with_rule
from jamp.transforms.program.rewrites import ScaledSum, Softmax

_SCATTERS = {"scatter-add": lax.scatter_add, "scatter-mul": lax.scatter_mul, "scatter-sub": lax.scatter_sub}


def scatter(eqn: Eqn, operands: Sequence[Array]) -> list[Array]:
    """A scatter of half data in float32. Its parameters hold a function of two numbers that was traced in half."""
    options = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    data, indices, updates = operands
    return [_SCATTERS[eqn.primitive.name](data, indices, updates, **{name: eqn.params[name] for name in options})]


def scaled_sum(eqn: Eqn, rewrite: ScaledSum, operands: Sequence[Array]) -> list[Array]:
    """A sum of scaled terms."""
    values = iter(operands)
    scaled = []
    for scalings in rewrite.terms:
        value = next(values)
        for scaling, index in scalings:
            args = [next(values) for _ in scaling.invars[1:]]
            args.insert(index, value)
            (value,) = bind(scaling, args)
        scaled.append(value)
    return bind(eqn, scaled)


# The derivatives of functions that are made of their results, as JAX writes them.
_OF_RESULT: dict[str, Callable[[Array, Array], Array]] = {
    "logistic": lambda dx, y: lax.mul(dx, lax.mul(y, lax.sub(lax.full_like(y, 1), y))),
    "tanh": lambda dx, y: lax.mul(lax.add(dx, lax.mul(dx, y)), lax.sub(lax.full_like(y, 1), y)),
}


def keeping_result(name: str, function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """A function whose derivative is made of its result, which is kept: its operand need not be."""

    @jax.custom_jvp
    def keeping(x: Array) -> Array:
        return function(x)

    @keeping.defjvp
    def rule(primals: Sequence[Array], tangents: Sequence[Array]) -> Any:
        y = kept(function(primals[0]))
        return y, _OF_RESULT[name](tangents[0], y)

    return with_rule(keeping)


def softmax(rewrite: Softmax, logits: Array) -> list[Array]:
    """Softmax of float32 logits that gives, and keeps for the backward pass, a half result.

    The derivative, `p * dz - p * sum(p * dz)`, needs nothing but `p`; left to JAX it would keep float32 exponentials.

    It is that of a distribution, and a `p` that is rounded to half is none: its sum is not one. Where a probability of
    0.999 is 1, what is left of `1 - p` is all of the derivative, and was 20 % off. So sums are over `p / sum(p)`, which
    has `1 - p` from the others, that are rounded as finely as they are small. And the mean is taken off, which JAX
    transposes to `c = g - mean(g); p * (c - sum(p * c) / sum(p))`: what all of `g` have in common cancels before it
    meets `p`. XLA makes one pass of that on a GPU, where it makes two of `p * (g - sum(p * g))`. On a TPU the mean is
    left out, and the sums are written: so XLA computes them beside the product that `g` is, and not once more in each
    product that reads the result.
    """
    axes, half, digits = rewrite.axes, rewrite.half, jnp.finfo(rewrite.half)

    def over_rows(sums: Array, shape: Sequence[int]) -> Array:
        return lax.broadcast_in_dim(sums, shape, [axis for axis in range(len(shape)) if axis not in axes])

    def total(x: Array) -> Array:
        return over_rows(written(lax.reduce_sum(x, axes)), x.shape)

    # Of lax alone: the functions of jax.numpy take several times as long to trace.
    @jax.custom_jvp
    def normalize(z: Array) -> Array:
        e = lax.exp(z)
        p = lax.convert_element_type(lax.div(e, over_rows(lax.reduce_sum(e, axes), e.shape)), half)
        # Without this XLA adds up what lies in front of the rounding, which it computes once more, and gets one.
        return lax.reduce_precision(p, digits.nexp, digits.nmant)

    @normalize.defjvp
    def rule(primals: Sequence[Array], tangents: Sequence[Array]) -> Any:
        (z,), (dz,) = primals, tangents
        out = kept(normalize(z))
        p = lax.convert_element_type(out, z.dtype)
        weighted = lax.mul(p, dz)
        moved = lax.sub(weighted, lax.mul(p, lax.div(total(weighted), total(p))))
        count = math.prod(z.shape[axis] for axis in axes)
        # The size of an exported program may be an unknown, of which jax.numpy alone makes an array.
        count = np.asarray(count, z.dtype) if type(count) is int else jnp.asarray(count, z.dtype)
        mean = left_out(lax.div(total(moved), lax.full_like(moved, count)))
        return out, lax.convert_element_type(lax.sub(moved, mean), half)

    out = with_rule(normalize)(logits)
    for view in rewrite.views:
        (out,) = bind(view, [out])
    return [out]


def linearized_at(
    function: Callable[[Sequence[Array]], Sequence[Array]], operands: Sequence[Array], points: Sequence[Array]
) -> list[Array]:
    """Results of a function, with its derivative taken elsewhere.

    Args:
        function: A function of operands, to a sequence of results.
        operands: What to compute it of.
        points: Where to take its derivative, one for each operand.

    Returns:
        `function(operands)`.
    """

    @jax.custom_jvp
    def apart(operands: Sequence[Array], points: Sequence[Array]) -> list[Array]:
        del points
        return list(function(operands))

    def rule(primals: Sequence[Array], tangents: Sequence[Array]) -> Any:
        operands, points = primals
        # An operand that nobody differentiates needs no factor, which would have to be kept.
        moving = [i for i, tangent in enumerate(tangents[0]) if not isinstance(tangent, SymbolicZero)]

        def of_moving(*moved: Array) -> list[Array]:
            at = list(points)
            for index, value in zip(moving, moved, strict=True):
                at[index] = value
            return list(function(at))

        _, dots = jax.jvp(of_moving, [points[i] for i in moving], [tangents[0][i] for i in moving])
        return apart(operands, points), dots

    apart.defjvp(rule, symbolic_zeros=True)
    return with_rule(apart)(list(operands), list(points))
