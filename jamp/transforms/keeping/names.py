"""The primitive by which the backward pass is given a value, and what it computes again is held apart.

`jax.checkpoint_name` names a variable that the forward pass reads on, and the checkpoint keeps. JAX rounds such
variables by `reduce_precision`, so that XLA does not compute on with more digits than are kept, and looks for each of
them among all equations. And it hands all that a checkpoint reads through one barrier, weights and cotangents as well,
whatever the platform. Here the value that is kept is a variable of its own, which nothing in the forward pass reads;
and a barrier is put behind it alone, where the platform's compiler needs one (`docs/design/residuals.md`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeVar

from jax import Array, lax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import ad, batching, mlir

from jamp._compat import jit_tracer, kept_apart, lowered_platforms, producer

T = TypeVar("T")

keep_p = Primitive("jamp_keep")
keep_p.multiple_results = True


def keep(value: Array, saved: object = None) -> Array:
    """A value that the backward pass is given, where the policy of a checkpoint says so of `keep_p`.

    Args:
        value: The value.
        saved: What the policy of a user's checkpoint says of the equation that made it, where it was asked.
    """
    return keep_p.bind(value, count=1, given=False, barrier=False, saved=saved)[0]


def hold(value: Array) -> Array:
    """A value that a checkpoint is given: what is computed of it again is held apart."""
    return keep_p.bind(value, count=1, given=True, barrier=False, saved=None)[0]


def _copies(value: T, *, count: int, **_: object) -> list[T]:
    return [value] * count


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Array | ad.Zero], *, count: int, **flags: object
) -> tuple[list[Array], list[Array | ad.Zero]]:
    (value,) = primals
    # What a rule of differentiation keeps where it is made, and reads, would be kept once more behind it.
    outs = [value] * count if _is_kept(value) else keep_p.bind(value, count=count, **flags)
    return outs, [*tangents] * count  # Tangents are not kept.


def _is_kept(value: Array) -> bool:
    tracer = jit_tracer(value)
    made_by = None if tracer is None else producer(tracer)
    return made_by is not None and made_by.primitive == keep_p.name


def _transpose(cotangents: Sequence[Array | ad.Zero], value: object, **params: object) -> list[Array | ad.Zero]:
    """Of a linear function, which `jax.linear_transpose` is asked for."""
    del value, params
    return [functools.reduce(ad.add_tangents, cotangents)]


def _batch(
    operands: Sequence[Array], axes: Sequence[int | None], *, count: int, **flags: object
) -> tuple[list[Array], list[int | None]]:
    return keep_p.bind(*operands, count=count, **flags), [*axes] * count


def _lowered(
    context: mlir.LoweringRuleContext, value: ir.Value, *, count: int, barrier: bool, **_: object
) -> Sequence[ir.Value]:
    if not barrier or lowered_platforms(context) == ("tpu",):
        return [value] * count
    return mlir.lower_fun(lambda x: [lax.optimization_barrier(x)] * count, multiple_results=True)(context, value)


keep_p.def_impl(_copies)
keep_p.def_abstract_eval(_copies)
ad.primitive_jvps[keep_p] = _jvp
ad.primitive_transposes[keep_p] = _transpose
batching.primitive_batchers[keep_p] = _batch
mlir.register_lowering(keep_p, _lowered)
kept_apart(keep_p)
