"""Products of half operands whose weights have gradients in float32, from the product that makes them on.

JAX gives a cotangent the dtype of its primal, so that of a half copy of a weight is half, and so is the all-reduce that
adds it up over devices. Here the derivative goes past the copy to the weight itself, by a primitive that is linear in
the weight's tangent, and whose transpose is that of the product with a float32 result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from jamp._compat import ClosedJaxpr, Eqn, Literal, bind, eval_jaxpr, jaxpr_consts, open_jaxpr
from jamp._dtypes import HALF_DTYPES
from jamp.transforms.emission.casts import replaced, zeros
from jamp.transforms.emission.tangents import added, tangent_primitive, varying_alike
from jamp.transforms.emission.taylor import with_rule
from jamp.transforms.emission.wide_products import accumulator

Product = Callable[[Sequence[Array]], Sequence[Array]]
_PREFERRED = "preferred_element_type"


def wide_gradient(
    eqn: Eqn, product: Product, operands: Sequence[Array], weights: Sequence[int], wides: Sequence[Array]
) -> list[Array]:
    """A product with the derivative of its weights in float32.

    Args:
        eqn: The product as it was traced.
        product: What is emitted of it.
        operands: Its operands in half.
        weights: Which of them are weights.
        wides: The weights in float32.
    """

    @jax.custom_jvp
    def multiplied(operands: Sequence[Array], wides: Sequence[Array]) -> list[Array]:
        del wides
        return list(product(operands))

    def rule(primals: Any, tangents: Any) -> tuple[list[Array], list[Array]]:
        operands, wides = primals
        moves, wide_moves = tangents
        out = multiplied(operands, wides)
        moving = [i for i, dx in enumerate(moves) if i not in weights and not isinstance(dx, SymbolicZero)]
        terms = []
        if moving:
            run = lambda *moved: list(product(replaced(operands, moving, moved)))  # noqa: E731
            terms += jax.jvp(run, [operands[i] for i in moving], [moves[i] for i in moving])[1]
        for index, tangent in zip(weights, wide_moves, strict=True):
            if not isinstance(tangent, SymbolicZero):
                terms.append(_moved(eqn, index, tangent, operands, out[0].dtype))
        return out, [added(terms) if terms else zeros(jax.typeof(out[0]))]

    multiplied.defjvp(rule, symbolic_zeros=True)
    return list(with_rule(multiplied)(list(operands), list(wides)))


def _moved(eqn: Eqn, index: int, tangent: Array, operands: Sequence[Array], out: np.dtype) -> Array:
    """What the tangent of a weight adds to that of the result."""
    half = operands[index].dtype
    others = [x for place, x in enumerate(operands) if place != index]

    def forward(tangent: Array, *others: Array) -> Array:
        values = [*others]
        values.insert(index, lax.convert_element_type(tangent, half))
        params = eqn.params if eqn.params.get(_PREFERRED) is None else {**eqn.params, _PREFERRED: half}
        return lax.convert_element_type(bind(eqn, values, params)[0], out)

    return with_wide_transpose(forward, tangent, *others)


def with_wide_transpose(product: Callable[..., Array], tangent: Array, *others: Array) -> Array:
    """A product that is linear in its first operand, and whose transpose is float32 from the product on."""
    values = varying_alike([tangent, *others])
    return tangent_p.bind(*values, product=jax.make_jaxpr(product)(*values))


def _forward(*operands: Array, product: ClosedJaxpr) -> Array:
    return eval_jaxpr(open_jaxpr(product), jaxpr_consts(product), *operands)[0]


def _jvp(primals: Sequence[Array], tangents: Sequence[Array | ad.Zero], *, product: ClosedJaxpr) -> tuple[Array, Array]:
    dots = [ad.instantiate_zeros(tangent) for tangent in tangents]
    return jax.jvp(functools.partial(_forward, product=product), list(primals), dots)


def _transpose(
    cotangent: Array | ad.Zero, tangent: Any, *others: Array, product: ClosedJaxpr
) -> Sequence[Array | ad.Zero | None]:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(tangent.aval), *(None for _ in others)]

    def pull(cotangent: Array, *others: Array) -> Array:
        linear = lambda moved: _forward(moved, *others, product=product)  # noqa: E731
        return jax.linear_transpose(linear, tangent.aval)(cotangent)[0]

    pulled = jax.make_jaxpr(pull)(cotangent, *others)
    return [_raised(pulled, tangent.aval.dtype, [cotangent, *others]), *(None for _ in others)]


def _raised(jaxpr: ClosedJaxpr, wide: np.dtype, args: Sequence[Array]) -> Array:
    """Runs the transpose of a product: what the product makes is float32, and stays so as it is moved and added."""
    inner = open_jaxpr(jaxpr)
    env = dict(zip([*inner.constvars, *inner.invars], [*jaxpr_consts(jaxpr), *args], strict=True))
    raised = set()  # Results of the product, and what is made of them.
    for eqn in inner.eqns:
        values = [atom.val if isinstance(atom, Literal) else env[atom] for atom in eqn.invars]
        follows = any(not isinstance(atom, Literal) and atom in raised for atom in eqn.invars)
        if follows and eqn.outvars[0].aval.dtype in (*HALF_DTYPES, wide) and "new_dtype" in eqn.params:
            outs = values
        elif not follows and _PREFERRED in eqn.params:
            outs, follows = [accumulator(eqn, values, wide)], True
        else:
            outs = bind(eqn, values)
        raised.update(eqn.outvars if follows else ())
        env.update(zip(eqn.outvars, outs, strict=True))
    return lax.convert_element_type(env[inner.outvars[0]], wide)


def _batch(operands: Sequence[Array], axes: Sequence[int | None], *, product: ClosedJaxpr) -> tuple[Array, int]:
    run = jax.vmap(functools.partial(_forward, product=product), list(axes))
    return tangent_p.bind(*operands, product=jax.make_jaxpr(run)(*operands)), 0


# Linear in its first operand.
tangent_p = tangent_primitive("jamp_weight_tangent", _forward, _jvp, _transpose, _batch)
