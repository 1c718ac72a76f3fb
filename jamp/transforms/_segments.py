"""Segments: the parts of a program under one checkpoint each, and what goes into them."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import Any

import numpy as np

from jamp._compat import Literal
from jamp.transforms._flow import BFLOAT16, is_half, num_elements
from jamp.transforms._rules import op_class
from jamp.transforms._steps import Step

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
    """Whether a step stays outside of jamp's own checkpoint.

    The user's remat wins; effects happen once; and a loop over layers or over time has the checkpoint inside, for each
    iteration. Around the loop it would have all iterations recomputed in a loop of its own, before the backward pass.
    """
    return bool(step.eqn.effects) or _is_free(step)


def _is_free(step: Step) -> bool:
    name = step.eqn.primitive.name
    loops = name == "scan" and any(flow is not None for flow in step.out)
    return loops or name in ("remat2", "checkpoint") or any(_is_free(i) for plan in step.plans for i in plan.steps)


# Readers of a cast whose cotangents may add up in half, before the cast turns the sum to float32. In 48 steps of an
# unrolled RNN that would double the error of its gradient.
READERS = 4


@dataclasses.dataclass
class Entering:
    """A variable that a segment reads and does not make.

    Attributes:
        var: The variable.
        reads: By dtype that it is read at (a half dtype; None for its own): the first reader, and whether what it reads
            may be huge.
        as_it_is: Whether the value itself is read, not only half copies of it.
    """

    var: Any
    reads: dict[np.dtype | None, tuple[Step, bool]] = dataclasses.field(default_factory=dict)
    as_it_is: bool = False

    def reads_where(self, cast_inside: bool, first: Step) -> Iterable[tuple[np.dtype | None, tuple[Step, bool]]]:
        """What to hand to the segment: all that it reads, or what that is cast of."""
        return [(None, (first, False))] if cast_inside else self.reads.items()


def entering(steps: Sequence[Step], half_states: Container[Any]) -> list[Entering]:
    """What steps read that is made before them, in the order of the first readers; of `half_states` in half as well."""
    made = {var for step in steps for var in step.eqn.outvars}
    found: dict[Any, Entering] = {}
    readers = Counter[Any]()
    for step in steps:
        for index, (atom, dtype, flow) in enumerate(zip(step.operands, step.casts, step.ins, strict=True)):
            if isinstance(atom, Literal) or atom in made:
                continue
            entry = found.setdefault(atom, Entering(atom))
            half = dtype if dtype is not None and is_half(dtype) else None
            entry.reads.setdefault(half, (step, half is not None and flow is not None and flow.huge))
            if atom in half_states:
                entry.reads.setdefault(BFLOAT16, (step, False))
            # What a loop over a half copy is given besides is there for its derivative alone.
            entry.as_it_is |= half is None and index < len(step.eqn.invars)
            readers[atom] += half is not None
            if readers[atom] == READERS:
                entry.reads.setdefault(None, (step, False))
            if index == 0 and step.pins is not None:
                entry.reads.setdefault(None, (step, False))
                entry.as_it_is = True
    return list(found.values())


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


def casting(steps: Sequence[Step], weights: Sequence[Entering], in_loop: bool) -> Casting:
    """How to cast weights: before where they are small beside the data, inside where they are small altogether.

    The two passes of a loop are loops of their own, of which XLA merges nothing: there is no between.
    """
    copies = sum(2 * num_elements(entry.var.aval) for entry in weights)
    if _SMALL_BESIDE * copies <= sum(map(_bytes_kept, steps)):
        return Casting.BEFORE
    return Casting.INSIDE if in_loop or copies <= _SMALL else Casting.BETWEEN


_SMALL_BESIDE, _SMALL = 4, 2**26


def _bytes_kept(step: Step) -> int:
    """Bytes of what products make, in half."""
    if step.plans:
        return sum(_bytes_kept(inner) for plan in step.plans for inner in plan.steps)
    if op_class(step.eqn.primitive.name) != "half":
        return 0
    return sum(2 * num_elements(var.aval) for var in step.eqn.outvars)
