"""Where the half copies of weights are made, and whether the backward pass is given them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jamp._primitives import Rule, rule_of
from jamp.transforms.keeping.segments import Entering
from jamp.transforms.program.flow import num_elements
from jamp.transforms.program.heuristics import Heuristics
from jamp.transforms.program.plan import Step


def cast_inside(
    steps: Sequence[Step], weights: Sequence[Entering], values: Sequence[Any], in_loop: bool, heuristics: Heuristics
) -> bool:
    """Whether a segment is given its weights as they are, and not their half copies.

    Copies that are small beside the data are made before the checkpoint, and kept for the backward pass, as
    hand-written mixed precision keeps them. Those that are not would be most of what is kept: the backward pass casts
    again, and XLA, which takes both casts for one except in a loop, is left to decide what it keeps. Of a program for
    several devices XLA does not take the two for one before it has had each of them gathered.

    Args:
        steps: The segment.
        weights: What enters it through half copies alone.
        values: Their values.
        in_loop: Whether the segment is in a loop's body, whose backward pass is a loop of its own.
        heuristics: The thresholds.
    """
    if not in_loop and any(map(_is_for_several_devices, values)):
        return False
    copies = sum(2 * num_elements(entry.var.aval) for entry in weights)
    return heuristics.small_beside * copies > sum(map(_bytes_kept, steps))


def _is_for_several_devices(value: Any) -> bool:
    meshes = jax.typeof(value).sharding.mesh, jax.sharding.get_abstract_mesh()
    return any(not mesh.empty and mesh.size > 1 and not mesh.are_all_axes_manual for mesh in meshes)


def _bytes_kept(step: Step) -> int:
    """Bytes of what products make, in half."""
    if step.plans:
        return sum(_bytes_kept(inner) for plan in step.plans for inner in plan.steps)
    if rule_of(step.eqn) is not Rule.HALF:
        return 0
    return sum(2 * num_elements(var.aval) for var in step.eqn.outvars)
