"""Operations that are emitted as something else than one primitive with other dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jamp._compat import bind, checkpoint_name

# Name (see `jax.ad_checkpoint.checkpoint_name`) of the values that the backward pass should be given, not recompute.
KEEP = "jamp_keep"


def forward(step: Any, operands: Sequence[Any], run: Any) -> list[Any]:
    """Emits nothing: the operand, brought to its dtype, is the result."""
    del step, run
    return list(operands)


SCATTERS = {"scatter-add": lax.scatter_add, "scatter-mul": lax.scatter_mul, "scatter-sub": lax.scatter_sub}


def scatter(step: Any, operands: Sequence[Any], run: Any) -> list[Any]:
    """A scatter of half data in float32. Its parameters hold a function of two numbers that was traced in half."""
    del run
    options = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    params = {name: step.eqn.params[name] for name in options}
    return [SCATTERS[step.eqn.primitive.name](*operands, **params)]


def scaled_sum(terms: Sequence[Sequence[tuple[Any, int]]]) -> Callable[..., list[Any]]:
    """A sum of scaled terms.

    Args:
        terms: For each term, the equations that scale it, each with the position of the operand that it scales. The
            emission reads, for each term, what is scaled and the other operands of these equations.
    """

    def emit(step: Any, operands: Sequence[Any], run: Any) -> list[Any]:
        del run
        values = iter(operands)
        scaled = []
        for scalings in terms:
            value = next(values)
            for eqn, index in scalings:
                args = [next(values) for _ in eqn.invars[1:]]
                args.insert(index, value)
                (value,) = bind(eqn, args)
            scaled.append(value)
        return bind(step.eqn, scaled, step.params)

    return emit


def dot_float32_out(step: Any, operands: Sequence[Any], run: Any) -> list[Any]:
    """A product of half operands whose float32 accumulator is the result, with a derivative in half.

    Left to JAX, the transpose of this product would multiply a float32 cotangent with a half operand, in float32.
    """
    del run
    eqn, half = step.eqn, operands[0].dtype

    def product(a: Any, b: Any, dtype: Any) -> Any:
        return bind(eqn, (a, b), {**eqn.params, "preferred_element_type": np.dtype(dtype)})[0]

    @jax.custom_jvp
    def dot(a: Any, b: Any) -> Any:
        if half != jnp.bfloat16:
            return product(a, b, np.float32)
        # Changes no bit. Without it XLA folds a transpose of the result into the product, too late to raise its
        # operands, and has no kernel for it on a CPU ("Unsupported element type for DotThunk", jaxlib 0.10, 0.12). It
        # has to follow upon the product as XLA makes it, with one free axis on the right.
        flat, params, free = _one_free_axis(b, eqn.params)
        out = bind(eqn, (a, flat), {**params, "preferred_element_type": np.dtype(np.float32)})[0]
        out = lax.reduce_precision(out, 8, 23)
        return out if flat is b else lax.reshape(out, (*out.shape[:-1], *free))

    def rule(primals: Any, tangents: Any) -> Any:
        (a, b), (da, db) = primals, tangents
        out = dot(a, b)
        terms = []
        if not isinstance(da, SymbolicZero):
            terms.append(product(da, b, half))
        if not isinstance(db, SymbolicZero):
            terms.append(product(a, db, half))
        if not terms:
            return out, jnp.zeros_like(out)
        return out, sum(terms[1:], terms[0]).astype(out.dtype)

    dot.defjvp(rule, symbolic_zeros=True)
    return [dot(*operands)]


def _one_free_axis(b: Any, params: dict[str, Any]) -> tuple[Any, dict[str, Any], list[int]]:
    """The right operand of a product with its free axes as one, the parameters of that product, and the free sizes."""
    (contract_a, contract_b), (batch_a, batch_b) = params["dimension_numbers"]
    bound = sorted({*contract_b, *batch_b})
    free = [axis for axis in range(b.ndim) if axis not in bound]
    sizes = [b.shape[axis] for axis in free]
    # On other devices there is nothing to work around, and XLA would have to gather an axis that is sharded.
    if len(free) < 2 or jax.default_backend() != "cpu" or any(jax.typeof(b).sharding.spec):
        return b, params, sizes
    moved = lax.transpose(b, (*bound, *free))
    flat = lax.reshape(moved, (*moved.shape[: len(bound)], math.prod(sizes)))
    numbers = (contract_a, tuple(map(bound.index, contract_b))), (batch_a, tuple(map(bound.index, batch_b)))
    return flat, {**params, "dimension_numbers": numbers}, sizes


# The derivatives of functions that are made of their results, as JAX writes them.
OF_RESULT: dict[str, Callable[[Any, Any], Any]] = {
    "logistic": lambda dx, y: lax.mul(dx, lax.mul(y, lax.sub(lax.full_like(y, 1), y))),
    "tanh": lambda dx, y: lax.mul(lax.add(dx, lax.mul(dx, y)), lax.sub(lax.full_like(y, 1), y)),
}


def replaced(values: Sequence[Any], where: Sequence[int], by: Sequence[Any]) -> list[Any]:
    """A list of values, with others in some places."""
    replaced = list(values)
    for index, value in zip(where, by, strict=True):
        replaced[index] = value
    return replaced


def keeping_result(name: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of `OF_RESULT` whose derivative is made of the result that is kept: its operand need not be."""

    @jax.custom_jvp
    def keeping(x: Any) -> Any:
        return checkpoint_name(function(x), KEEP)

    @keeping.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        y = checkpoint_name(function(primals[0]), KEEP)
        return y, OF_RESULT[name](tangents[0], y)

    return keeping


@jax.custom_jvp
def rounded(value: Any, half: Any) -> Any:
    """`half`, which is `value` rounded, with the derivative of `value`: many cotangents add up in float32 then."""
    del value
    return half


@rounded.defjvp
def _rounded_rule(primals: Any, tangents: Any) -> Any:
    return primals[1], tangents[0].astype(primals[1].dtype)


@jax.custom_jvp
def rounded_outside(value: Any, half: Any) -> Any:
    """`rounded` for a loop, where `half` is a constant without a derivative of its own.

    A loop that reads a constant adds up its cotangents, one an iteration, in half: of 4,000 steps of an RNN little is
    left (a gradient error of 54 %, where float32 sums leave 0.2 %). Cotangents of `value` add up in float32.
    """
    del value
    return half


@rounded_outside.defjvp
def _rounded_outside_rule(primals: Any, tangents: Any) -> Any:
    # Not `primals[1]`: second derivatives would be zero.
    return rounded_outside(*primals), tangents[0].astype(primals[1].dtype)


def softmax(axes: tuple[int, ...], half: np.dtype) -> Callable[..., list[Any]]:
    """Softmax of float32 logits that gives, and keeps for the backward pass, a half result.

    The derivative, `p * dz - p * sum(p * dz)`, needs nothing but `p`; left to JAX it would keep float32 exponentials.

    It sums to zero, but not with a `p` that is rounded to half, so that its mean is taken off. JAX transposes that to
    `c = g - mean(g); p * (c - sum(p * c))`: what all of `g` have in common, which ought to cancel, is gone before it
    meets the rounding (where that is ten times as large as the rest, an eighth of the error is left). And XLA makes one
    pass of it on a GPU, where it makes two of `p * (g - sum(p * g))`.
    """

    def total(x: Any) -> Any:
        kept = [axis for axis in range(x.ndim) if axis not in axes]
        return lax.broadcast_in_dim(lax.reduce_sum(x, axes), x.shape, kept)

    # Of lax alone: the functions of jax.numpy take several times as long to trace.
    @jax.custom_jvp
    def normalize(z: Any) -> Any:
        e = lax.exp(z)
        return checkpoint_name(lax.convert_element_type(lax.div(e, total(e)), half), KEEP)

    @normalize.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (z,), (dz,) = primals, tangents
        out = normalize(z)
        p = lax.convert_element_type(out, z.dtype)
        weighted = lax.mul(p, dz)
        moved = lax.sub(weighted, lax.mul(p, total(weighted)))
        count = math.prod(z.shape[axis] for axis in axes)
        # The size of an exported program may be an unknown, of which jax.numpy alone makes an array.
        count = np.asarray(count, z.dtype) if type(count) is int else jnp.asarray(count, z.dtype)
        return out, lax.convert_element_type(lax.sub(moved, lax.div(total(moved), lax.full_like(moved, count))), half)

    def emit(step: Any, operands: Sequence[Any], run: Any) -> list[Any]:
        del step, run
        return [normalize(*operands)]

    return emit
