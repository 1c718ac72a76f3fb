"""What reverse mode keeps between forward and backward: half values and small statistics, as far as possible.

The measurements behind this file are in `docs/design/residuals.md`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jamp._compat import Literal, called_jaxpr, inner_jaxprs, open_jaxpr
from jamp.transforms._emit import KEEP
from jamp.transforms._flow import FLOAT32, Kind, is_half, num_elements
from jamp.transforms._rules import CALLS, FOLLOW, FULL_ELEMENTWISE, FULL_REDUCTION, PROMOTE, TRACED
from jamp.transforms._steps import Plan, Step

_COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})
# Reads of a whole array for each result, or traffic between devices: never done twice.
_EXPENSIVE_MOVES = frozenset({
    "all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "argmax", "argmin", "cummax", "cummin",
    "device_put", "pmax", "pmin", "ppermute", "psum", "psum_invariant", "reduce_max", "reduce_min", "reduce_scatter",
    "reduce_window_max", "reduce_window_min", "sort", "top_k", "unreduced_psum",
})  # fmt: skip
_CHEAP = (FULL_ELEMENTWISE | PROMOTE | FOLLOW | TRACED) - _EXPENSIVE_MOVES


def keep_half(primitive: Any, *avals: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy: what to keep for the backward pass; the rest is recomputed, elementwise.

    Kept are products, convolutions and whatever else is not elementwise, reductions, elementwise results in half, and
    what is named so (casts, masks of dropout). Recomputed are casts, data movement, masks, and float32 of full size.
    """
    name = primitive.name
    if name in ("complex", "fft") or any(
        jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in avals if hasattr(aval, "dtype")
    ):
        return False  # `jax.checkpoint` cannot keep complex residuals: it rounds them with reduce_precision.
    if name == "name":
        return params["name"] == KEEP
    if name == "custom_jvp_call" and _is_elementwise(called_jaxpr(params)):
        inner = open_jaxpr(called_jaxpr(params))
        return bool(inner.eqns) and any(is_half(var.aval.dtype) for var in inner.outvars)
    if name not in _CHEAP:
        return True
    dtype = getattr(avals[0], "dtype", None) if avals else None
    return name in PROMOTE and name not in _COMPARISONS and is_half(dtype)


def _is_elementwise(jaxpr: Any) -> bool:
    """Whether a function with a rule of its own, such as relu or softplus, consists of cheap operations."""
    return all(
        eqn.primitive.name in _CHEAP
        or (eqn.primitive.name in CALLS | {"custom_jvp_call"} and all(map(_is_elementwise, inner_jaxprs(eqn))))
        for eqn in open_jaxpr(jaxpr).eqns
    )


def mask_is_kept(step: Step) -> bool:
    """Whether a step compares random numbers, as dropout does: a byte each is less than to draw them again."""
    drawn = any(flow is not None and flow.size > 1 and not flow.given for flow in step.ins)
    return drawn and step.eqn.primitive.name in _COMPARISONS


def half_copy_is_kept(step: Step, index: int) -> bool:
    """Whether a result is float32 data that is not computed again, such as a `cumsum`, so that its cast is to be kept.

    Otherwise `keep_half` would keep the float32 that the cast is made of, for a reader that takes half.
    """
    flow = step.out[index]
    if flow is None or flow.dtype != FLOAT32 or flow.kind != Kind.ISLAND:
        return False
    if step.eqn.primitive.name not in CALLS:
        return step.eqn.primitive.name in FULL_REDUCTION
    (plan,) = step.plans
    result = open_jaxpr(plan.jaxpr).outvars[index]
    makers = ((inner, i) for inner in plan.steps for i, var in enumerate(inner.eqn.outvars) if var is result)
    return any(half_copy_is_kept(inner, i) for inner, i in makers)


# Steps under one checkpoint. JAX looks every residual up among all equations of a checkpoint, which is quadratic in
# their number: 48 transformer blocks under one checkpoint take 1.5 times as long to trace as under several.
_SEGMENT = 256


def segments(steps: Sequence[Step], outvars: Sequence[Any]) -> list[tuple[bool, list[Step]]]:
    """Splits steps into runs: those that give way to the user's remat (True), and those to checkpoint (False).

    Values that cross from one checkpoint to the next are kept, so long runs are cut where the fewest bytes cross.
    """
    last_read = {
        atom: index for index, step in enumerate(steps) for atom in step.operands if not isinstance(atom, Literal)
    }
    last_read |= {atom: len(steps) for atom in outvars if not isinstance(atom, Literal)}
    crossing = _crossing_bytes(steps, last_read)
    groups = []
    for free, run in itertools.groupby(range(len(steps)), key=lambda index: gives_way(steps[index])):
        indices = list(run)
        while not free and len(indices) > 2 * _SEGMENT:
            cut = min(range(_SEGMENT, 2 * _SEGMENT), key=lambda offset: crossing[indices[offset]])
            groups.append((False, [steps[index] for index in indices[: cut + 1]]))
            indices = indices[cut + 1 :]
        groups.append((free, [steps[index] for index in indices]))
    return groups


def _crossing_bytes(steps: Sequence[Step], last_read: dict[Any, int]) -> list[int]:
    """Bytes of the values that are made up to each step and read after it."""
    live, ends = 0, [0] * (len(steps) + 1)
    crossing = []
    for index, step in enumerate(steps):
        for var, flow in zip(step.eqn.outvars, step.out, strict=True):
            if last_read.get(var, index) > index and flow is not None:
                size = num_elements(var.aval) * flow.dtype.itemsize
                live += size
                ends[last_read[var]] += size
        live -= ends[index]
        crossing.append(live)
    return crossing


def gives_way(step: Step) -> bool:
    """Whether a step stays outside of jamp's own checkpoint: the user's remat wins, and effects happen once."""
    return bool(step.eqn.effects) or has_remat(step)


def has_remat(step: Step) -> bool:
    """Whether the user rematerialises something inside a step."""
    return step.eqn.primitive.name in ("remat2", "checkpoint") or any(plan_has_remat(plan) for plan in step.plans)


def plan_has_remat(plan: Plan) -> bool:
    """Whether the user rematerialises something inside a plan."""
    return any(has_remat(step) for step in plan.steps)
