"""Matrix products and convolutions: half in, half or float32 out, and the few that are float32 throughout."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax import lax

from jamp._compat import function_names
from jamp.transforms import _emit as emit
from jamp.transforms._demand import Want, is_reduction, makes_phase, num_contracted
from jamp.transforms._flow import FLOAT32, Flow, Kind, is_other_inexact, num_elements
from jamp.transforms._operations import plan_traced
from jamp.transforms._rules import FOLLOW
from jamp.transforms._steps import Site, Step


def plan_half(site: Site) -> Step:
    """Matrix products and convolutions: half in, half out, float32 accumulation."""
    if site.mode == "full" or _insists_on_full(site.eqn) or any(is_other_inexact(v.aval) for v in site.eqn.invars):
        step = plan_traced(site, "full" if site.mode == "full" else "explicit precision", Kind.STAT)
        return dataclasses.replace(step, out=tuple(flow and flow._replace(kind=Kind.STAT) for flow in step.out))
    if not site.strong:
        return site.step("literals", FLOAT32, Kind.WEAK)
    size = num_elements(site.eqn.outvars[0].aval)
    if site.mode != "O3" and _is_of_positions(site):
        return _phase(site).making(size=size)
    _note_layer_scan(site)
    if site.mode == "OD":
        step = site.step("half", site.half, Kind.LAZY, out_casts=(FLOAT32,))
        return step.making(dtype=FLOAT32, size=size)
    if site.mode != "O3" and is_reduction(site.eqn) and any(flow.kind >= Kind.ISLAND for flow in site.strong):
        return site.step("full", FLOAT32, Kind.STAT).making(size=size)
    if site.mode != "O3" and site.name == "dot_general" and _gives_float32(site):
        kind = Kind.STAT if is_reduction(site.eqn) else Kind.ISLAND
        step = site.step("half, float32 out", site.half, kind, params=None, emit=emit.dot_float32_out)
        return step.making(dtype=FLOAT32, size=size)
    return site.step("half", site.half, Kind.HALF).making(size=size)


def _gives_float32(site: Site) -> bool:
    """Whether a `dot_general` of half operands returns its float32 accumulator.

    Not so of a tangent, in a rule of `custom_jvp`: JAX would transpose that to products with float32 cotangents.
    """
    if any(flow is not None and flow.tangent for flow in site.ins):
        return False
    return is_reduction(site.eqn) or bool(site.wants[0] and not _makes_scores(site))


def _makes_scores(site: Site) -> bool:
    """Whether a `dot_general` is of queries and keys, for a softmax, in bfloat16: its result is half.

    Of all products this one's result is much larger than its operands, and a GPU writes it to memory and reads it
    several times: in float32, attention at 1024 tokens moved 7 % more bytes than in half, over the whole train step
    (docs/design/residuals.md). Float16 is not wide enough for scores that are scaled after the product.
    """
    if site.wants[0] is not Want.SCORE or site.half == np.float16:
        return False
    _, (batch, _) = site.eqn.params["dimension_numbers"]
    return len(batch) > 0 and all(
        _is_computed(site, *operand) for operand in zip(site.eqn.invars, site.ins, strict=True)
    )


def _is_computed(site: Site, atom: Any, flow: Flow | None) -> bool:
    """Whether an operand is no argument, such as a weight."""
    if flow is not None and flow.kind > Kind.LAZY:
        return True
    step = site.maker(atom)
    while step is not None and step.eqn.primitive.name in FOLLOW:
        step = site.maker(step.operands[0])
    return step is not None


# Arguments that are multiplied this many at a time may be times, or coordinates of space; more are a layer's inputs.
_COORDINATES = 3


def _is_of_positions(site: Site) -> bool:
    """Whether angles, coordinates or indices come out: of positions alone, or of a few of them with anything else."""
    given = [flow.given for flow in site.ins if flow]
    if Want.PHASE in site.wants and not any(given):
        return True
    if not makes_phase(site.eqn, site.wants):
        return False
    float32 = all(flow.kind <= Kind.LAZY and flow.dtype == FLOAT32 for flow in site.ins if flow)
    return not all(given) or (float32 and num_contracted(site.eqn) <= _COORDINATES)


def _phase(site: Site) -> Step:
    """Angles and coordinates: float32 that is as firm as elementwise products of the same operands would make it."""
    kind = Kind.ISLAND if any(flow.kind > Kind.LAZY for flow in site.strong) else Kind.LAZY
    step = site.step("phase", FLOAT32, kind)
    exactly = (lax.Precision.HIGHEST,) * 2  # By default XLA multiplies float32 in bfloat16 on TPUs, in TF32 on GPUs.
    return dataclasses.replace(step, params={**(step.params or site.eqn.params), "precision": exactly})


def _insists_on_full(eqn: Any) -> bool:
    """`precision=HIGHEST`, or an algorithm by name, is the user's word; not so in `jax.image`, which says it always."""
    precision = eqn.params.get("precision")
    if isinstance(precision, tuple):
        highest = any(p == lax.Precision.HIGHEST for p in precision)
        return highest and "_scale_and_translate" not in function_names(eqn)
    return precision is not None and precision not in (lax.Precision.DEFAULT, lax.Precision.HIGH)


def _note_layer_scan(site: Site) -> None:
    """A product of activations with a scanned weight tells that the scan runs over layers, not over time."""
    for weight, other in zip(site.ins[:2], site.ins[1::-1], strict=True):
        if weight is None or other is None or weight.kind not in (Kind.LAZY, Kind.HALF):
            continue
        if other.kind not in (Kind.LAZY, Kind.WEAK) or any(root[0] == "carry" for root in other.roots):
            site.planner.layer_scans.update(root for root in weight.roots if root[0] == "xs")
