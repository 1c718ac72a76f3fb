"""How each class of operation moves precision: one planner a class, from operand states to a step."""

from __future__ import annotations

import dataclasses

import numpy as np

from jamp.transforms import _emit as emit
from jamp.transforms import _patterns as patterns
from jamp.transforms._flow import FLOAT32, STATISTIC, Flow, Kind, flows, is_half, is_other_inexact, num_elements
from jamp.transforms._rules import FULL_REDUCTION
from jamp.transforms._steps import Site, Step


def plan_untouched(site: Site) -> Step:
    """Integers, booleans, keys, float64 and complex alone: nothing to decide."""
    return Step(site.eqn, site.ins, (None,) * len(site.ins), (None,) * len(site.eqn.outvars), "not floating")


def plan_traced(site: Site, rule: str = "as traced", kind: Kind = Kind.LAZY) -> Step:
    """Every operand back at the dtype that it was traced with."""
    casts = tuple(
        var.aval.dtype if flow is not None and flow.dtype != var.aval.dtype else None
        for flow, var in zip(site.ins, site.eqn.invars, strict=True)
    )
    if any(flow is not None and flow.kind in (Kind.HALF, Kind.ISLAND) for flow in site.ins):
        kind = Kind.ISLAND
    elif not site.strong and all(site.ins):
        kind = Kind.WEAK
    out = []
    for var in site.eqn.outvars:
        flow = site.result(var.aval, var.aval.dtype, kind) if flows(var.aval) else None
        out.append(flow and flow._replace(kind=Kind.HALF if is_half(flow.dtype) else kind, size=num_elements(var.aval)))
    return Step(site.eqn, site.ins, casts, tuple(out), rule)


def plan_opaque(site: Site) -> Step:
    """A primitive that the table does not know: never a crash, never a wrong dtype."""
    return plan_traced(site, "opaque")


def plan_known_traced(site: Site) -> Step:
    """Primitives that make or inspect values at a dtype the user chose; `convert_element_type` among them."""
    return plan_convert(site) if site.name == "convert_element_type" else plan_traced(site)


def plan_convert(site: Site) -> Step:
    """A conversion that the user wrote, or that promotion wrote for them, is kept; one that changes nothing goes."""
    (var,), (flow,) = site.eqn.outvars, site.ins
    target = var.aval.dtype
    if flow is None or not flows(var.aval):
        return Step(site.eqn, site.ins, (None,), (_converted(site, Kind.LAZY),), "as traced")
    if patterns.undoes_reduction(site):
        return Step(site.eqn, site.ins, (None,), (flow,), "full", emit=emit.forward)
    if target == FLOAT32 and not is_half(site.eqn.invars[0].aval.dtype):  # Only the weak type changes.
        return Step(site.eqn, site.ins, (None,), (flow,), "follow", emit=emit.forward)
    out = _converted(site, Kind.ISLAND if flow.kind == Kind.HALF else max(flow.kind, Kind.LAZY))
    out = out and out._replace(size=flow.size, roots=flow.roots)
    ins = (flow._replace(huge=False),)  # The user's cast overflows as it does without jamp.
    return Step(site.eqn, ins, (target if flow.dtype != target else None,), (out,), "explicit", emit=emit.forward)


def _converted(site: Site, kind: Kind) -> Flow | None:
    aval = site.eqn.outvars[0].aval
    if not flows(aval):
        return None
    return Flow(aval.dtype, Kind.HALF if is_half(aval.dtype) else kind, num_elements(aval), site.here)


def plan_full(site: Site) -> Step:
    """Inputs raised to float32; the result stays float32."""
    reduction = site.name in FULL_REDUCTION
    if site.mode == "OD":
        return plan_traced(site, "OD")
    half = is_half(site.eqn.outvars[0].aval.dtype)
    emitted = {"emit": emit.scatter} if half and site.name in emit.SCATTERS else {}
    if site.mode == "O3" and site.strong:
        if not reduction:
            return site.step("O3", site.half, Kind.HALF)
        return site.step("O3", FLOAT32, Kind.HALF, out_casts=(site.half,), **emitted).making(dtype=site.half)
    return site.step("full", FLOAT32, _full_kind(site, reduction), **emitted)


def _full_kind(site: Site, reduction: bool) -> Kind:
    if not site.strong:
        return Kind.WEAK
    kind = max(flow.kind for flow in site.strong)
    if not reduction:
        return Kind.ISLAND if kind in (Kind.HALF, Kind.FULL) else kind
    shrinks = num_elements(site.eqn.outvars[0].aval) * STATISTIC <= num_elements(site.eqn.invars[0].aval)
    if shrinks:
        return Kind.STAT
    return Kind.LAZY if kind == Kind.LAZY else Kind.ISLAND


def plan_no_half(site: Site) -> Step:
    """Linear algebra, FFT and series: float32 in every mode, because no library has them in half."""
    return plan_traced(site, "no half kernel")


def plan_promote(site: Site) -> Step:
    """Elementwise operations: all operands to one dtype, which the firmest of them chooses."""
    if any(is_other_inexact(var.aval) for var in (*site.eqn.invars, *site.eqn.outvars)):
        return plan_traced(site)
    patterns.pin_extremum(site)
    if pattern := patterns.softmax(site) or patterns.rectified(site) or patterns.associative_scan(site):
        return pattern
    if site.eqn.outvars[0] in site.sums and site.mode in ("O1", "O2") and site.strong:
        step = site.step("promote", FLOAT32, Kind.FULL).making(kind=Kind.FULL)
        return patterns.with_exact_scales(site, step)
    dtype, kind = _choose(site)
    step = patterns.with_exact_scales(site, site.step("promote", dtype, kind))
    if dtype == np.float16:  # A mask of -1e9 that is an argument becomes float16's largest number, not infinity.
        ins = tuple(f and f._replace(huge=f.huge or f.kind == Kind.LAZY) for f in step.ins)
        step = dataclasses.replace(step, ins=ins)
    if site.name in ("concatenate", "stack", "pad", "dynamic_update_slice"):
        step = dataclasses.replace(
            step,
            out=tuple(
                f and f._replace(size=num_elements(v.aval)) for f, v in zip(step.out, site.eqn.outvars, strict=True)
            ),
        )
    return step


def _choose(site: Site) -> tuple[np.dtype, Kind]:
    strong, mode = site.strong, site.mode
    if not strong:
        return FLOAT32, Kind.WEAK
    if mode == "O3":
        return site.half, Kind.HALF
    floats = [flow for flow in strong if flow.kind != Kind.HALF]
    if mode == "full" or (not any(flows(var.aval) for var in site.eqn.outvars) and floats):  # Comparisons are exact.
        return FLOAT32, Kind.STAT
    if mode in ("O1", "OD", "promote"):
        return (FLOAT32, Kind.LAZY) if floats else (site.half, Kind.HALF)
    return _choose_by_flow(site)


def _choose_by_flow(site: Site) -> tuple[np.dtype, Kind]:
    """O2: half data meets half data in half; half data meets a float32 statistic in float32."""
    strong, want = site.strong, any(site.wants)
    if any(flow.tiny for flow in strong):
        return FLOAT32, Kind.ISLAND
    if site.name in ("sub", "div"):
        strong = [*strong[:1], *map(_subtracted, strong[1:])] if site.ins[0] in strong else strong
    halves = [flow for flow in strong if flow.kind == Kind.HALF or (site.leaves(flow) and not want)]
    firm = [flow for flow in strong if flow.kind >= Kind.ISLAND and flow not in halves]
    if any(flow.kind == Kind.FULL for flow in firm):
        return FLOAT32, Kind.FULL
    data = max((flow.size for flow in halves), default=0)
    mixed = len({flow.dtype for flow in halves if flow.kind == Kind.HALF}) > 1
    if halves and not mixed and not want and all(flow.size >= data for flow in firm):
        return site.half, Kind.HALF
    if halves:
        return FLOAT32, Kind.ISLAND
    widest = max(strong, key=lambda flow: (flow.size, flow.kind))
    if any(flow.kind == Kind.ISLAND for flow in firm):
        return FLOAT32, Kind.ISLAND
    return FLOAT32, widest.kind


def _subtracted(flow: Flow) -> Flow:
    """An argument that data is centred or divided by is a statistic, as in BatchNorm's evaluation; biases are added."""
    return flow._replace(kind=Kind.STAT) if flow.kind == Kind.LAZY else flow


def plan_follow(site: Site) -> Step:
    """Data movement: each result has the dtype of the operand it comes from."""
    if pattern := patterns.associative_scan(site):
        return pattern
    pairwise = len(site.eqn.invars) == len(site.eqn.outvars)
    casts, out = [], []
    moved = [_rounded(site, flow) for flow in site.ins]
    for before, after in zip(site.ins, moved, strict=True):
        casts.append(after.dtype if before is not None and after is not None and after.dtype != before.dtype else None)
    for index, var in enumerate(site.eqn.outvars):
        source = moved[index if pairwise else 0]
        if not flows(var.aval):
            out.append(None)
        elif source is None:
            out.append(Flow(var.aval.dtype, Kind.LAZY, num_elements(var.aval), site.here))
        else:
            size = source.size if site.name in ("psum", "all_gather") else min(source.size, num_elements(var.aval))
            out.append(source._replace(size=size, scope=site.here))
    return Step(site.eqn, site.ins, tuple(casts), tuple(out), "follow")


def _rounded(site: Site, flow: Flow | None) -> Flow | None:
    """An island that leaves its scope, as half data, unless its readers want it in float32 anyway."""
    if flow is None or not site.leaves(flow) or any(site.wants) or site.mode != "O2":
        return flow
    if not any(flows(var.aval) for var in site.eqn.outvars):
        return flow
    return flow._replace(kind=Kind.HALF, dtype=site.planner.half)
