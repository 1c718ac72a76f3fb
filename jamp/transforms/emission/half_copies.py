"""Half copies of weights, which a checkpoint's barrier does not concern.

In the backward pass, JAX hands everything that a checkpoint reads through an optimization barrier, so that XLA does not
merge what is recomputed with the original and keep that. Weights have no need of it, and suffer from it: XLA:TPU writes
half copies, which it would otherwise make inside of the products, and a GPU casts twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array, lax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import ad, batching, mlir

# A conversion like others, for all who look for them in a jaxpr, but for how it is lowered.
_half_copy = Primitive("convert_element_type")
_BARRIER = "stablehlo.optimization_barrier"
_ANNOTATION = "sdy.sharding_constraint"  # What JAX puts behind an operation where types hold shardings.


def half_copy(weight: Array, dtype: np.dtype) -> Array:
    """A weight in half, made of what lies in front of barriers.

    That is found when the program is lowered, where a barrier is an operation that a value is a result of. There is
    none outside of the function that is lowered, such as that of an inner `jax.jit`.

    Args:
        weight: A weight, or its half copy that was made in front of a checkpoint.
        dtype: The half dtype.
    """
    return _half_copy.bind(weight, new_dtype=dtype, weak_type=False, sharding=None)


def _lowered(
    context: mlir.LoweringRuleContext, value: ir.Value, *, new_dtype: np.dtype, **_: Any
) -> Sequence[ir.Value]:
    source = _in_front_of_barriers(value)
    if context.avals_in == context.avals_out:
        return [source]
    convert = mlir.lower_fun(lambda x: lax.convert_element_type(x, new_dtype), multiple_results=False)
    return convert(context, source)


def _in_front_of_barriers(value: ir.Value) -> ir.Value:
    found = value
    while (operation := _maker(found)) is not None and operation.name in (_BARRIER, _ANNOTATION):
        found = operation.operands[ir.OpResult(found).result_number]
        if operation.name == _BARRIER:
            value = found
    return value


def _maker(value: ir.Value) -> ir.Operation | None:
    """The operation that a value is a result of; None for an argument of a function."""
    return None if isinstance(value.owner, ir.Block) else value.owner.operation


def _converted(value: Array, *, new_dtype: np.dtype, **_: Any) -> Array:
    return lax.convert_element_type(value, new_dtype)


def _transposed(cotangent: Any, weight: Any, **_: Any) -> list[Any]:
    return [lax.convert_element_type(cotangent, weight.aval.dtype)]


_half_copy.def_impl(_converted)
_half_copy.def_abstract_eval(lambda aval, *, new_dtype, **_: aval.update(dtype=new_dtype, weak_type=False))
ad.deflinear2(_half_copy, _transposed)
batching.defvectorized(_half_copy)
# JAX would lower one that repeats to a function of its own, which sees no barrier.
mlir.register_lowering(_half_copy, _lowered, cacheable=False)
