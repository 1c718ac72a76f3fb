"""What products with transposes of their own share: rules that stay, primitives for tangents, the sums of these.

`jax.custom_jvp` says of a function what its derivative is. But inside of a `lax.scan`, jax 0.10 forgets its rule where
it looks for what does not depend on the iteration (`JaxprTrace.process_custom_jvp_call`). Second derivatives are those
of the body then: right where the rule says what the derivative of the body is, and wrong where the body is of bytes,
which have none. A primitive keeps its rule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jamp._compat import Aval, ClosedJaxpr, eval_jaxpr, jaxpr_consts, open_jaxpr, traced, varying_axes
from jamp._dtypes import is_differentiable

# Of the operands, which of them move, and the tangents of those: the tangent of the result.
Derivative: TypeAlias = Callable[[Sequence[Array], Sequence[bool], Sequence[Array]], Array]


def ruled(function: Callable[..., Array], derivative: Derivative, *operands: Array) -> Array:
    """Calls a function that has a derivative of its own.

    Args:
        function: A function of arrays that makes one.
        derivative: The tangent of what it makes, given the operands, which of them have a tangent, and these tangents,
            of which there is at least one. It is differentiated for second derivatives.
        *operands: What to call it with.
    """
    return ruled_p.bind(*operands, jaxpr=traced(lambda *x: [function(*x)], operands), derivative=derivative)


def _forward(*operands: Array, jaxpr: ClosedJaxpr, derivative: Derivative) -> Array:
    del derivative
    return eval_jaxpr(open_jaxpr(jaxpr), jaxpr_consts(jaxpr), *operands)[0]


def _abstract(*avals: Aval, jaxpr: ClosedJaxpr, derivative: Derivative) -> Aval:
    inner = open_jaxpr(jaxpr)
    if all(var.aval == aval for var, aval in zip(inner.invars, avals, strict=True)):
        return inner.outvars[0].aval
    return jax.make_jaxpr(lambda *x: _forward(*x, jaxpr=jaxpr, derivative=derivative))(*avals).out_avals[0]


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Array | ad.Zero], *, jaxpr: ClosedJaxpr, derivative: Derivative
) -> tuple[Array, Array | ad.Zero]:
    out = ruled_p.bind(*primals, jaxpr=jaxpr, derivative=derivative)
    given = {
        index: tangent
        for index, (primal, tangent) in enumerate(zip(primals, tangents, strict=True))
        if not isinstance(tangent, ad.Zero) and is_differentiable(jax.typeof(primal))
    }
    if not given:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, derivative(primals, [index in given for index in range(len(primals))], list(given.values()))


def _batch(
    operands: Sequence[Array], dims: Sequence[int | None], *, jaxpr: ClosedJaxpr, derivative: Derivative
) -> tuple[Array, int]:
    dims = list(dims)

    def mapped(*operands: Array) -> Array:
        return jax.vmap(lambda *x: _forward(*x, jaxpr=jaxpr, derivative=derivative), dims)(*operands)

    def derivative_of_mapped(primals: Sequence[Array], moves: Sequence[bool], tangents: Sequence[Array]) -> Array:
        of_tangents = [dim for dim, on in zip(dims, moves, strict=True) if on]
        of_each = jax.vmap(lambda primals, tangents: derivative(primals, moves, tangents), (dims, of_tangents))
        return of_each(list(primals), list(tangents))

    return ruled(mapped, derivative_of_mapped, *operands), 0


def _transpose(*_: object, **__: object) -> None:
    raise NotImplementedError(
        "`jax.linear_transpose` is asked for the transpose of a product in 8 bits, which is not linear: it rounds its "
        "operands. Write `jax.vjp(fn, x)[1](cotangent)`, or multiply in half: `matmul=half`, and no `float8` rule."
    )


ruled_p = Primitive("jamp_ruled")
ruled_p.def_impl(_forward)
ruled_p.def_abstract_eval(_abstract)
ad.primitive_jvps[ruled_p] = _jvp
ad.primitive_transposes[ruled_p] = _transpose
batching.primitive_batchers[ruled_p] = _batch
mlir.register_lowering(ruled_p, mlir.lower_fun(_forward, multiple_results=False))


Q = TypeVar("Q")


def tangent_primitive(
    name: str,
    forward: Callable[..., Array],
    jvp: Callable[..., Any],
    transpose: Callable[..., Any],
    batch: Callable[..., Any],
) -> Primitive:
    """A primitive that is computed as `forward`, and has rules of its own.

    Args:
        name: Its name.
        forward: What it computes, a function of arrays with its parameters as keywords.
        jvp: Its rule in forward mode, as JAX asks for it.
        transpose: Its transpose.
        batch: Its rule under `vmap`.
    """

    def abstract(*avals: Aval, **params: Any) -> Aval:
        return jax.make_jaxpr(functools.partial(forward, **params))(*avals).out_avals[0]

    primitive = Primitive(name)
    primitive.def_impl(forward)
    primitive.def_abstract_eval(abstract)
    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(forward, multiple_results=False))
    return primitive


def varying_alike(operands: Sequence[Array]) -> list[Array]:
    """Operands of one primitive in `shard_map`, each with the axes along which any of them varies."""
    axes = frozenset().union(*map(varying_axes, operands))
    missing = [tuple(axes - varying_axes(x)) for x in operands]
    return [lax.pcast(x, m, to="varying") if m else x for x, m in zip(operands, missing, strict=True)]


def product_of_two(
    multiply: Callable[[Sequence[Q], Sequence[Array]], Array],
    moved: Callable[[int, Array, Array, Q, Sequence[Array]], Array],
    operands: Sequence[Array],
    quantized: Sequence[Q],
    rest: Sequence[Array] = (),
) -> Array:
    """A product of two operands in 8 bits.

    Args:
        multiply: Makes the product, of both operands in 8 bits and of the rest.
        moved: What the tangent of the operand on one side adds to that of the result: the side, the tangent, the other
            operand, the same in 8 bits, and the rest.
        operands: The operands that derivatives are of; their values are read for gradients in half alone.
        quantized: The same in 8 bits.
        rest: What the product is given besides, such as the sizes of groups.
    """
    leaves, treedef = jax.tree.flatten((list(operands), list(quantized), list(rest)))

    def multiplied(*leaves: Array) -> Array:
        _, quantized, rest = treedef.unflatten(leaves)
        return multiply(quantized, rest)

    def derivative(primals: Sequence[Array], moves: Sequence[bool], tangents: Sequence[Array]) -> Array:
        operands, quantized, rest = treedef.unflatten(primals)
        sides = [side for side in (0, 1) if moves[side]]  # Bytes have no derivative.
        return added(
            [
                moved(side, tangent, operands[1 - side], quantized[1 - side], rest)
                for side, tangent in zip(sides, tangents, strict=True)
            ]
        )

    return ruled(multiplied, derivative, *leaves)


def added(terms: Sequence[Array]) -> Array:
    """The sum of one term or two."""
    return sum(terms[1:], terms[0])
