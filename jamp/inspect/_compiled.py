"""What XLA makes of a program: memory and traffic of the compiled step, and what it may do to float32 and to casts."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from jamp._compat import ClosedJaxpr, configured_precision, open_jaxpr
from jamp.inspect._flops import Matmul


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A step as XLA compiled it for the default device: the forward and backward pass, or the forward pass alone.

    Attributes:
        peak: Bytes of memory at the peak, arguments and results included.
        temporary: Bytes of these for what is neither argument nor result.
        traffic: Bytes read and written by all operations, as XLA estimates them; zero where it does not say.
    """

    peak: int
    temporary: int
    traffic: int


def compiled(program: ClosedJaxpr) -> Compiled:
    """Compiles a jaxpr for the default device."""
    avals = [var.aval.update(weak_type=False) for var in open_jaxpr(program).invars]
    found = jax.jit(jaxpr_as_fun(program)).lower(*avals).compile()  # pyright: ignore[reportArgumentType]
    memory: Any = found.memory_analysis()
    cost: Any = found.cost_analysis() or {}
    cost = cost[0] if isinstance(cost, list) else cost
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(
        int(held + memory.temp_size_in_bytes), int(memory.temp_size_in_bytes), int(cost.get("bytes accessed", 0))
    )


@dataclasses.dataclass(frozen=True)
class Multiplied:
    """Products of float32 that the default device multiplies in another format, unless they say `precision=`.

    Attributes:
        format: `"TF32"` or `"bfloat16"`.
        flops: FLOPs of all of them.
        where: Source line and scope of each, the dearest first.
    """

    format: str
    flops: int
    where: tuple[str, ...]


def multiplied_otherwise(found: Iterable[Matmul], device: Callable[[], Any]) -> Multiplied | None:
    """The float32 products that a device multiplies in fewer digits; None if there are none, and no device is asked."""
    found = [product for product in found if all(str(dtype) == "float32" for dtype in product.dtypes)]
    formats: dict[str, list[Matmul]] = {}
    for product in found:
        name = _format(device(), product)
        if name is not None:
            formats.setdefault(name, []).append(product)
    if not formats:
        return None
    ((name, products),) = formats.items()
    dearest = sorted(products, key=lambda product: -product.flops)
    where = tuple(dict.fromkeys(product.where for product in dearest))
    return Multiplied(name, sum(product.flops for product in products), where)


def _format(device: Any, product: Matmul) -> str | None:
    """What a device multiplies in; None for float32 itself.

    XLA allows TF32 at the precisions DEFAULT and HIGH, on GPUs since Ampere. On TPUs it makes one pass in bfloat16 at
    DEFAULT, and several, which are as good as more digits, above.
    """
    precision = configured_precision() if product.precision is None else product.precision
    names = {getattr(p, "name", str(p)) for p in (precision if isinstance(precision, tuple) else (precision,))}
    if device.platform == "tpu":
        return "bfloat16" if names <= {"DEFAULT", "None"} else None
    if device.platform in ("gpu", "cuda") and _capability(device) >= 8:
        return "TF32" if names <= {"DEFAULT", "HIGH", "None"} else None
    return None


def _capability(device: Any) -> float:
    try:
        return float(device.compute_capability)
    except (AttributeError, ValueError):  # AMD's, whose name is not a number, have no TF32 by default.
        return 0.0


def may_skip_roundings() -> bool:
    """Whether XLA is allowed to compute in float32 what the program rounds to half: its default."""
    given = re.findall(r"--xla_allow_excess_precision(?:=(\w+))?", os.environ.get("XLA_FLAGS", ""))
    return not given or given[-1].lower() not in ("false", "0")
