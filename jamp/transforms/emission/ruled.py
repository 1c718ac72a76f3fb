"""Functions with a derivative of their own, which they keep in a loop that is differentiated twice.

`jax.custom_jvp` says the same of a function. But inside of a `lax.scan`, jax 0.10 forgets its rule where it looks for
what does not depend on the iteration (`JaxprTrace.process_custom_jvp_call`). Second derivatives are those of the body
then: right where the rule says what the derivative of the body is, and wrong where the body is of bytes, which have
none. A primitive keeps its rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jamp._compat import Aval, ClosedJaxpr, eval_jaxpr, jaxpr_consts, open_jaxpr
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
    return ruled_p.bind(*operands, jaxpr=jax.make_jaxpr(function)(*operands), derivative=derivative)


def _forward(*operands: Array, jaxpr: ClosedJaxpr, derivative: Derivative) -> Array:
    del derivative
    return eval_jaxpr(open_jaxpr(jaxpr), jaxpr_consts(jaxpr), *operands)[0]


def _abstract(*avals: Aval, jaxpr: ClosedJaxpr, derivative: Derivative) -> Aval:
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


ruled_p = Primitive("jamp_ruled")
ruled_p.def_impl(_forward)
ruled_p.def_abstract_eval(_abstract)
ad.primitive_jvps[ruled_p] = _jvp
batching.primitive_batchers[ruled_p] = _batch
mlir.register_lowering(ruled_p, mlir.lower_fun(_forward, multiple_results=False))
