"""Where the half copies of weights are made, and whether the backward pass keeps them."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from jamp._primitives import Rule, rule_of
from jamp.transforms.keeping.segments import Entering
from jamp.transforms.program.flow import num_elements
from jamp.transforms.program.heuristics import Heuristics
from jamp.transforms.program.plan import Step


class Casting(enum.Enum):
    """Where the half copies of a segment's weights are made.

    Before the checkpoint, copies are kept for the backward pass, as hand-written mixed precision keeps them. Inside,
    nothing is kept but the weights. They are cast again, since XLA merges no computation across a checkpoint's barrier;
    for large weights that is much of what a small batch has to do. (A step of three layers of 4096 at batch 512,
    compiled for an H100, moved 1.4 times the bytes: XLA also copied weights that it could otherwise update in place.)
    Between two checkpoints, of which the outer one has no barrier, XLA takes both casts for one, for a sixth more time
    to trace.
    """

    BEFORE = enum.auto()
    INSIDE = enum.auto()
    BETWEEN = enum.auto()


def casting(steps: Sequence[Step], weights: Sequence[Entering], in_loop: bool, heuristics: Heuristics) -> Casting:
    """How to cast weights: before where they are small beside the data, inside where they are small altogether.

    The two passes of a loop are loops of their own, of which XLA merges nothing: there is no between.
    """
    copies = sum(2 * num_elements(entry.var.aval) for entry in weights)
    if heuristics.small_beside * copies <= sum(map(_bytes_kept, steps)):
        return Casting.BEFORE
    return Casting.INSIDE if in_loop or copies <= heuristics.small else Casting.BETWEEN


def _bytes_kept(step: Step) -> int:
    """Bytes of what products make, in half."""
    if step.plans:
        return sum(_bytes_kept(inner) for plan in step.plans for inner in plan.steps)
    if rule_of(step.eqn) is not Rule.HALF:
        return 0
    return sum(2 * num_elements(var.aval) for var in step.eqn.outvars)
