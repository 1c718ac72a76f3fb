"""What reverse mode keeps between forward and backward: half values and small statistics, as far as possible.

The measurements behind this file are in `docs/design/residuals.md`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jamp.transforms._emit import KEEP
from jamp.transforms._flow import FLOAT32, is_half
from jamp.transforms._rules import FOLLOW, FULL_ELEMENTWISE, PROMOTE, TRACED
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
    the masks that comparisons of float32 values make (dropout). Recomputed are casts, data movement, and float32 of full size.
    """
    name = primitive.name
    if name in ("complex", "fft") or any(jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in avals if hasattr(aval, "dtype")):
        return False  # `jax.checkpoint` cannot keep complex residuals: it rounds them with reduce_precision.
    if name == "name":
        return params["name"] == KEEP
    if name not in _CHEAP:
        return True
    dtype = getattr(avals[0], "dtype", None) if avals else None
    if name in _COMPARISONS:
        return dtype == FLOAT32
    return name in PROMOTE and name not in _COMPARISONS and is_half(dtype)


def gives_way(step: Step) -> bool:
    """Whether a step stays outside of jamp's own checkpoint: the user's remat wins, and effects happen once."""
    return bool(step.eqn.effects) or has_remat(step)


def has_remat(step: Step) -> bool:
    """Whether the user rematerialises something inside a step."""
    return step.eqn.primitive.name in ("remat2", "checkpoint") or any(plan_has_remat(plan) for plan in step.plans)


def plan_has_remat(plan: Plan) -> bool:
    """Whether the user rematerialises something inside a plan."""
    return any(has_remat(step) for step in plan.steps)
