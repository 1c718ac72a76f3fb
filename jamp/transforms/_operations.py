"""How each class of operation moves precision: one planner a class, from operand states to a step."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from jax import lax

from jamp._compat import Literal
from jamp.transforms import _emit as emit
from jamp.transforms._demand import makes_phase
from jamp.transforms._flow import FLOAT32, Flow, Kind, flows, is_half, is_other_inexact, num_elements
from jamp.transforms._rules import FULL_REDUCTION
from jamp.transforms._steps import Site, Step

# A reduction to an eighth or less of its operand is a statistic of it; anything larger is data.
_STATISTIC = 8


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
    if _undoes_reduction(site):
        return Step(site.eqn, site.ins, (None,), (flow,), "full", emit=emit.forward)
    if target == FLOAT32 and not is_half(site.eqn.invars[0].aval.dtype):  # Only the weak type changes.
        return Step(site.eqn, site.ins, (None,), (flow,), "follow", emit=emit.forward)
    out = _converted(site, Kind.ISLAND if flow.kind == Kind.HALF else max(flow.kind, Kind.LAZY))
    out = out and out._replace(size=flow.size, roots=flow.roots)
    ins = (flow._replace(huge=False),)  # The user's cast overflows as it does without jamp.
    return Step(site.eqn, ins, (target if flow.dtype != target else None,), (out,), "explicit", emit=emit.forward)


def _undoes_reduction(site: Site) -> bool:
    """`jnp.sum` of half data raises it, sums, and rounds the sum; the rounding is not the user's, and may overflow."""
    total = _maker(site, site.eqn.invars[0])
    if site.mode == "O3" or total is None or total.eqn.primitive.name not in FULL_REDUCTION:
        return False
    raised = _maker(site, total.eqn.invars[0])
    return (
        raised is not None
        and raised.eqn.primitive.name == "convert_element_type"
        and raised.eqn.invars[0].aval.dtype == site.eqn.outvars[0].aval.dtype
    )


def _converted(site: Site, kind: Kind) -> Flow | None:
    aval = site.eqn.outvars[0].aval
    if not flows(aval):
        return None
    return Flow(aval.dtype, Kind.HALF if is_half(aval.dtype) else kind, num_elements(aval), site.here)


def plan_half(site: Site) -> Step:
    """Matrix products and convolutions: half in, half out, float32 accumulation."""
    if site.mode == "full" or _insists_on_full(site.eqn) or any(is_other_inexact(v.aval) for v in site.eqn.invars):
        step = plan_traced(site, "full" if site.mode == "full" else "explicit precision", Kind.STAT)
        return dataclasses.replace(step, out=tuple(flow and flow._replace(kind=Kind.STAT) for flow in step.out))
    if not site.strong:
        return site.step("literals", FLOAT32, Kind.WEAK)
    size = num_elements(site.eqn.outvars[0].aval)
    positions = any(flow and not flow.given for flow in site.ins)
    if positions and site.mode != "O3" and makes_phase(site.eqn, site.wants):
        return _sized(_phase(site), size=size)
    _note_layer_scan(site)
    if site.mode == "OD":
        step = site.step("half", site.half, Kind.LAZY, out_casts=(FLOAT32,))
        return _sized(step, dtype=FLOAT32, size=size)
    if site.mode != "O3" and site.name == "dot_general" and (site.wants[0] or _is_reduction(site.eqn)):
        kind = Kind.STAT if _is_reduction(site.eqn) else Kind.ISLAND
        step = site.step("half, float32 out", site.half, kind, params=None, emit=emit.dot_float32_out)
        return _sized(step, dtype=FLOAT32, size=size)
    return _sized(site.step("half", site.half, Kind.HALF), size=size)


def _phase(site: Site) -> Step:
    """Angles and coordinates: float32 that is as firm as elementwise products of the same operands would make it."""
    kind = Kind.ISLAND if any(flow.kind > Kind.LAZY for flow in site.strong) else Kind.LAZY
    step = site.step("phase", FLOAT32, kind)
    exactly = (lax.Precision.HIGHEST,) * 2  # By default XLA multiplies float32 in bfloat16 on TPUs, in TF32 on GPUs.
    return dataclasses.replace(step, params={**(step.params or site.eqn.params), "precision": exactly})


def _sized(step: Step, **changes: Any) -> Step:
    """The step with results that are new data: their own size, no history."""
    return dataclasses.replace(
        step, out=tuple(flow and flow._replace(roots=frozenset(), **changes) for flow in step.out)
    )


def _insists_on_full(eqn: Any) -> bool:
    """`precision=HIGHEST`, or an algorithm by name, is the user's word."""
    precision = eqn.params.get("precision")
    if isinstance(precision, tuple):
        return any(p == lax.Precision.HIGHEST for p in precision)
    return precision is not None and precision not in (lax.Precision.DEFAULT, lax.Precision.HIGH)


def _is_reduction(eqn: Any) -> bool:
    """A product without free dimensions on either side is a sum, and belongs with the reductions."""
    if eqn.primitive.name != "dot_general":
        return False
    (contract, _), (batch, _) = eqn.params["dimension_numbers"]
    return all(var.aval.ndim == len(contract) + len(batch) for var in eqn.invars)


def _note_layer_scan(site: Site) -> None:
    """A product of activations with a scanned weight tells that the scan runs over layers, not over time."""
    for weight, other in zip(site.ins[:2], site.ins[1::-1], strict=True):
        if weight is None or other is None or weight.kind != Kind.LAZY:
            continue
        if other.kind not in (Kind.LAZY, Kind.WEAK) or any(root[0] == "carry" for root in other.roots):
            site.planner.layer_scans.update(root for root in weight.roots if root[0] == "xs")


def plan_full(site: Site) -> Step:
    """Inputs raised to float32; the result stays float32."""
    reduction = site.name in FULL_REDUCTION
    if site.mode == "O3" and site.strong:
        if not reduction:
            return site.step("O3", site.half, Kind.HALF)
        return _sized(site.step("O3", FLOAT32, Kind.HALF, out_casts=(site.half,)), dtype=site.half)
    if site.mode == "OD":
        return plan_traced(site, "OD")
    kind = _full_kind(site, reduction)
    return site.step("full", FLOAT32, kind)


def _full_kind(site: Site, reduction: bool) -> Kind:
    if not site.strong:
        return Kind.WEAK
    kind = max(flow.kind for flow in site.strong)
    if not reduction:
        return Kind.ISLAND if kind in (Kind.HALF, Kind.FULL) else kind
    shrinks = num_elements(site.eqn.outvars[0].aval) * _STATISTIC <= num_elements(site.eqn.invars[0].aval)
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
    if parts := _softmax_parts(site):
        return _plan_softmax(site, *parts)
    dtype, kind = _choose(site)
    step = site.step("promote", dtype, kind)
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


def _softmax_parts(site: Site) -> tuple[Step, Step] | None:
    """The steps of the exponential and of its sum, where a division is `exp(z) / sum(exp(z))` however it is written."""
    if site.name != "div" or site.mode != "O2" or any(site.wants):
        return None
    numerator, total = (_maker(site, atom) for atom in site.eqn.invars)
    while total is not None and total.eqn.primitive.name in ("broadcast_in_dim", "reshape", "stop_gradient"):
        total = _maker(site, total.eqn.invars[0])
    if numerator is None or total is None or numerator.eqn.primitive.name != "exp":
        return None
    same = total.eqn.primitive.name == "reduce_sum" and total.eqn.invars[0] is site.eqn.invars[0]
    state = numerator.out[0]
    return (numerator, total) if same and state is not None and state.kind == Kind.ISLAND else None


def _maker(site: Site, atom: Any) -> Step | None:
    return None if isinstance(atom, Literal) else site.made_by.get(atom)


def _plan_softmax(site: Site, exponential: Step, total: Step) -> Step:
    """Softmax lies in [0, 1]: given back in half, and its derivative needs only that half result."""
    (logits,) = exponential.ins
    dtype = FLOAT32 if logits is None or logits.dtype != FLOAT32 else None
    out = Flow(site.planner.half, Kind.HALF, num_elements(site.eqn.outvars[0].aval), site.here)
    return Step(
        site.eqn, (logits,), (dtype,), (out,), "softmax",
        emit=emit.softmax(total.eqn.params["axes"], site.planner.half), atoms=tuple(exponential.eqn.invars),
    )  # fmt: skip
