"""A primitive that is one kernel or another, or what is written, by the platform that it is lowered for.

What platform that is, tracing does not know, and the kernels of a platform may not be traceable on another machine
(cuDNN's asks for cuDNN). So tracing, derivatives and `vmap` see the written form, as a jaxpr among the parameters, and
the rules for lowering choose. What the backward pass is given does not depend on the platform: it is the operands.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jamp._compat import (
    ClosedJaxpr,
    eval_jaxpr,
    is_partitioned_by_xla,
    jaxpr_consts,
    open_jaxpr,
    tell_devices_to_lowering,
)
from jamp.transforms.emission.casts import replaced
from jamp.transforms.emission.kernels import APPLY
from jamp.transforms.program.attention import KERNELS, Attention, Operand, refusals

attention_p = Primitive("jamp_attention")
tangent_p = Primitive("jamp_attention_tangent")
attention_p.multiple_results = tangent_p.multiple_results = True


Moving = tuple[int, ...]  # Operands that are differentiated.
Tangent = Array | ad.Zero
Function = Callable[..., Sequence[Array]]


class Params(TypedDict):
    """Parameters of the primitives.

    Attributes:
        written: What is to be computed, of all operands, as it is written. (Of the tangent: what is differentiated.)
        attention: The attention.
        moving: Operands that are differentiated; None for the attention itself.
    """

    written: ClosedJaxpr
    attention: Attention
    moving: Moving | None


def fused_attention(written: ClosedJaxpr, attention: Attention, operands: Sequence[Array]) -> Array:
    """An attention.

    Args:
        written: The attention as it is written, of `operands`, without constants.
        attention: What a kernel has to be told.
        operands: The operands.

    Returns:
        Its result.
    """
    (out,) = attention_p.bind(*operands, written=written, attention=attention, moving=None)
    return out


def _run(jaxpr: ClosedJaxpr) -> Callable[..., list[Array]]:
    return lambda *args: eval_jaxpr(open_jaxpr(jaxpr), jaxpr_consts(jaxpr), *args)


def _as_written(*operands: Array, **params: Unpack[Params]) -> list[Array]:
    """The primitive by the written form."""
    return _run(params["written"])(*operands)


def _pulled(run: Callable[..., Sequence[Array]], moving: Sequence[int], *operands: Array) -> list[Array]:
    """Cotangents of the operands in motion, where the last operand is the cotangent of the result."""
    *primals, cotangent = operands

    def of_moving(*moved: Array) -> Sequence[Array]:
        return run(*replaced(primals, moving, moved))

    _, back = jax.vjp(of_moving, *(primals[index] for index in moving))
    return list(back([cotangent]))


def _by_kernel(
    platform: str, *operands: Array, written: ClosedJaxpr, attention: Attention, moving: Moving | None
) -> list[Array]:
    """The primitive by the kernel of a platform, or by the written form where that refuses."""
    if platform in refusals(attention):
        return _run(written)(*operands)
    dtype = operands[-1].dtype if moving is not None else open_jaxpr(written).outvars[0].aval.dtype

    def run(*given: Array) -> list[Array]:
        return [APPLY[platform](attention, *given).astype(dtype)]

    try:
        return run(*operands) if moving is None else _pulled(run, moving, *operands)
    except (ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        _warn(platform, str(error).split("\n")[0])
        return _run(written)(*operands)


def _warn(platform: str, problem: str) -> None:
    name = KERNELS[platform].name
    warnings.warn(f"Attention is compiled as it is written, without {name}: {problem}", stacklevel=2)


def _rule(platform: str) -> Callable[..., Any]:
    """The rule for lowering the primitive for a platform with a kernel."""
    fused = mlir.lower_fun(functools.partial(_by_kernel, platform), multiple_results=True)
    plain = mlir.lower_fun(_as_written, multiple_results=True)

    def lower(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Unpack[Params]) -> Any:
        if KERNELS[platform].divides or not is_partitioned_by_xla(ctx):
            return fused(ctx, *operands, **params)
        if platform not in refusals(params["attention"]):
            _warn(platform, "XLA cannot divide it over devices. In a `jax.shard_map` each device has its own.")
        return plain(ctx, *operands, **params)

    return lower


# Types, eager calls, and lowering.


def _tangent_as_written(*operands: Array, **params: Unpack[Params]) -> list[Array]:
    """What the tangents of an attention, the last operands, make of its result."""
    moving = params["moving"] or ()
    primals, tangents = list(operands[: -len(moving)]), list(operands[-len(moving) :])

    def of_moving(*moved: Array) -> list[Array]:
        return _run(params["written"])(*replaced(primals, moving, moved))

    return list(jax.jvp(of_moving, [primals[index] for index in moving], tangents)[1])


def _types(function: Function, *avals: Any, **params: Unpack[Params]) -> list[Any]:
    return [var.aval for var in open_jaxpr(jax.make_jaxpr(functools.partial(function, **params))(*avals)).outvars]


def _eagerly(primitive: Primitive, *operands: Array, **params: Unpack[Params]) -> list[Array]:
    return jax.jit(functools.partial(primitive.bind, **params))(*operands)


for _primitive, _function in ((attention_p, _as_written), (tangent_p, _tangent_as_written)):
    _primitive.def_abstract_eval(functools.partial(_types, _function))
    _primitive.def_impl(functools.partial(_eagerly, _primitive))
    mlir.register_lowering(_primitive, mlir.lower_fun(_function, multiple_results=True))
tell_devices_to_lowering(attention_p)
for _platform in APPLY:
    mlir.register_lowering(attention_p, _rule(_platform), platform=_platform)


# Derivatives. Those of derivatives are those of the written form.


def _jvp(
    primals: Sequence[Array], tangents: Sequence[Tangent], **params: Unpack[Params]
) -> tuple[list[Array], list[Array]]:
    if params["moving"] is not None:
        return _jvp_as_written(_as_written, primals, tangents, **params)
    out = attention_p.bind(*primals, **params)
    params["moving"] = tuple(index for index, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero))
    return out, tangent_p.bind(*primals, *(tangents[index] for index in params["moving"]), **params)


def _jvp_as_written(
    function: Function, primals: Sequence[Array], tangents: Sequence[Tangent], **params: Unpack[Params]
) -> tuple[list[Array], list[Array]]:
    dots = [ad.instantiate_zeros(tangent) for tangent in tangents]
    return jax.jvp(functools.partial(function, **params), list(primals), dots)


def _transpose(cotangents: Sequence[Tangent], *operands: Array, **params: Unpack[Params]) -> Sequence[Array | None]:
    (cotangent,), moving = cotangents, params["moving"] or ()
    primals = operands[: -len(moving)]
    if isinstance(cotangent, ad.Zero):
        return [None] * len(operands)
    pulled = jax.make_jaxpr(functools.partial(_pulled, _run(params["written"]), moving))(*primals, cotangent)
    back = attention_p.bind(*primals, cotangent, written=pulled, attention=params["attention"], moving=moving)
    return [*([None] * len(primals)), *back]


ad.primitive_jvps[attention_p] = _jvp
ad.primitive_jvps[tangent_p] = functools.partial(_jvp_as_written, _tangent_as_written)
ad.primitive_transposes[tangent_p] = _transpose


# vmap: one more axis of the batch.


def _batched(
    operands: Sequence[Array], axes: Sequence[int | None], **params: Unpack[Params]
) -> tuple[list[Array], list[int]]:
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    operands = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(operands, axes, strict=True)]
    mapped = [axis is not None for axis in axes]
    # Each example has cotangents of its own, also of what they share.
    moving = params["moving"]
    for index in () if moving is None else (*moving, len(operands) - 1):
        if not mapped[index]:
            operands[index] = jnp.broadcast_to(operands[index], (size, *operands[index].shape))
            mapped[index] = True
    run = jax.vmap(_run(params["written"]), [0 if each else None for each in mapped], axis_size=size)
    batched = jax.make_jaxpr(run)(*operands)
    attention = _with_axis(params["attention"], mapped, size)
    out = attention_p.bind(*operands, written=batched, attention=attention, moving=moving)
    return out, [0] * len(out)


def _with_axis(attention: Attention, mapped: Sequence[bool], size: int) -> Attention:
    label = len(attention.sizes)

    def moved(operand: Operand) -> Operand:
        return operand._replace(layout=((label,), *operand.layout)) if mapped[operand.place] else operand

    return dataclasses.replace(
        attention,
        sizes=(*attention.sizes, size),
        batch=(label, *attention.batch),
        query=moved(attention.query),
        key=moved(attention.key),
        value=moved(attention.value),
        result=((label,), *attention.result),
        factors=tuple(factor._replace(operand=moved(factor.operand)) for factor in attention.factors),
        weighted=tuple(map(moved, attention.weighted)),
        biases=tuple((moved(operand), sign) for operand, sign in attention.biases),
        masks=tuple(mask._replace(operand=moved(mask.operand)) for mask in attention.masks),
        same=tuple((moved(one), moved(other)) for one, other in attention.same),
    )


def _tangent_batched(
    operands: Sequence[Array], axes: Sequence[int | None], **params: Unpack[Params]
) -> tuple[list[Array], list[int]]:
    out = jax.vmap(functools.partial(_tangent_as_written, **params), list(axes))(*operands)
    return out, [0] * len(out)


batching.primitive_batchers[attention_p] = _batched
batching.primitive_batchers[tangent_p] = _tangent_batched
