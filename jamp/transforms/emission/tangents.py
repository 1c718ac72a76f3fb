"""What products with transposes of their own share: primitives for their tangents, and the sums of these."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jamp._compat import Aval, varying_axes
from jamp.transforms.emission.ruled import ruled

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


def explicit_sharding(aval: Aval, axes: Sequence[int]) -> NamedSharding | None:
    """How an array is sharded whose axes are some of another's; None where no mesh with explicit axes says it."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*(sharding.spec[axis] for axis in axes)))


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
