"""Segments: the parts of a program under one checkpoint each, what goes into them, and where weights are cast."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jamp._compat import Literal, Var
from jamp._dtypes import BFLOAT16
from jamp._primitives import Rule, Trait, acts, has, rule_of
from jamp.transforms.keeping.kept import Keeping, Kept
from jamp.transforms.keeping.repeats import Copy, Crossing, Life, copies, crossings, product_bytes
from jamp.transforms.program.flow import num_elements
from jamp.transforms.program.heuristics import Heuristics
from jamp.transforms.program.marks import Mark
from jamp.transforms.program.plan import Cast, Plan, Step
from jamp.transforms.program.rewrites import Pinned
from jamp.transforms.program.setting import Setting

_FREE = Trait.REMAT | Trait.CUSTOM_VJP


class Segment(NamedTuple):
    """Steps that are emitted together.

    Attributes:
        steps: The steps.
        free: Whether they stay outside of jamp's own checkpoint.
        scopes: How many of the outermost scopes of the steps are entered around all of them: those in which layers that
            repeat differ.
    """

    steps: list[Step]
    free: bool = False
    scopes: int = 0


def segments(plan: Plan, keeping: Keeping, keep: Kept) -> list[Segment]:
    """Splits steps into runs that give way to the user's remat, and runs to checkpoint.

    Values that cross from one checkpoint to the next are kept, so programs are cut where the fewest bytes cross that
    would not be kept otherwise: in front of layers that repeat, and where a run is long.

    Args:
        plan: The plan of a program.
        keeping: What can be computed again.
        keep: What of that is kept.
    """
    steps = plan.steps
    lives = _lives(steps, keeping, keep)
    groups = []
    for free, run in itertools.groupby(range(len(steps)), key=lambda index: gives_way(steps[index])):
        indices = list(run)
        start, stop = indices[0], indices[-1] + 1
        if free:
            groups.append(Segment(list(steps[start:stop]), free))
        else:
            groups += _cut(steps[start:stop], list(_lives_inside(lives, start, stop)), plan)
    return [group for group in groups if group.steps]


def _cut(steps: Sequence[Step], lives: Sequence[Life], plan: Plan) -> Iterator[Segment]:
    """Layers that repeat, each by itself, and what lies between them in parts that are not too long."""
    heuristics = plan.setting.heuristics
    found = copies(steps, lives, plan.weights, heuristics)
    crossing = crossings(lives, len(steps))
    gaps = map(range, [0, *(copy.stop for copy in found)], [*(copy.start for copy in found), len(steps)])
    apart = (Copy(*part, 0) for gap in gaps for part in _parts(gap, crossing, heuristics.segment))
    for start, stop, scopes, own in sorted([*found, *apart]):
        if own:
            yield Segment([steps[index] for index in own], free=True)
        kept = [step for index, step in enumerate(steps[start:stop], start) if index not in own]
        yield Segment(kept, scopes=scopes)


def _parts(indices: range, crossing: Sequence[Crossing], longest: int) -> Iterator[tuple[int, int]]:
    """Cuts what is long where the fewest bytes cross into a step."""
    while len(indices) > 2 * longest:
        cut = min(range(longest, 2 * longest), key=lambda offset: crossing[indices[offset]])
        yield indices[0], indices[cut]
        indices = indices[cut:]
    if indices:
        yield indices[0], indices[-1] + 1


def _lives(steps: Sequence[Step], keeping: Keeping, keep: Kept) -> list[Life]:
    """The values that steps make and others read, in order."""
    last_read = {
        atom: index for index, step in enumerate(steps) for atom in step.operands if not isinstance(atom, Literal)
    }
    lives = []
    for index, step in enumerate(steps):
        for place, (var, flow) in enumerate(zip(step.eqn.outvars, step.out, strict=True)):
            last = last_read.get(var, index)
            if last > index and flow is not None:
                size = num_elements(var.aval) * flow.dtype.itemsize
                lives.append(Life(index, last, size, var in keep.values or not keeping.recomputable(step, place)))
    return lives


def _lives_inside(lives: Iterable[Life], start: int, stop: int) -> Iterator[Life]:
    """The values that are needed in a run of steps, by their positions in it. What is given is kept as it is."""
    for made, last, size, is_kept in lives:
        if made < stop and last >= start:
            yield Life(made - start, last - start, size, is_kept or made < start)


def gives_way(step: Step) -> bool:
    """Whether a step stays outside of jamp's own checkpoint.

    The user's remat wins; effects happen once, those of a reverse-mode rule too, which are not known before; and a loop
    over layers or over time has the checkpoint inside, for each iteration. Around the loop it would have all iterations
    recomputed in a loop of its own, before the backward pass. What is opaque may be differentiated by a linearization
    rule alone, which `jax.checkpoint` does not ask for. What a rule closes over is made outside.
    """
    return acts(step.eqn) or _is_free(step)


def _is_free(step: Step) -> bool:
    scans = has(step.eqn, Trait.LOOPS) and "jaxpr" in step.eqn.params and any(flow is not None for flow in step.out)
    opaque = rule_of(step.eqn) is Rule.OPAQUE and any(flow is not None for flow in (*step.ins, *step.out))
    free = scans or opaque or bool(step.captures) or has(step.eqn, _FREE)
    return free or any(_is_free(inner) for plan in step.plans for inner in plan.steps)


@dataclasses.dataclass
class Entering:
    """A variable that a segment reads and does not make.

    Attributes:
        var: The variable.
        reads: By cast to half that it is read through (None for as it is): the first reader.
        as_it_is: Whether the value itself is read, not only half copies of it.
    """

    var: Var
    reads: dict[Cast | None, Step] = dataclasses.field(default_factory=dict)
    as_it_is: bool = False

    def add(self, cast: Cast | None, step: Step) -> None:
        """Notes a reader; one cast serves all that read at its dtype."""
        dtypes = {known and known.dtype for known in self.reads}
        if (cast and cast.dtype) not in dtypes:
            self.reads[cast] = step

    def reads_where(self, cast_inside: bool, first: Step) -> Iterable[tuple[Cast | None, Step]]:
        """What to hand to the segment: all that it reads, or what that is cast of."""
        return [(None, first)] if cast_inside else self.reads.items()


def entering(steps: Sequence[Step], half_states: Container[Var], setting: Setting) -> list[Entering]:
    """What steps read that is made before them, in the order of the first readers; of `half_states` in half as well."""
    made = {var for step in steps for var in step.eqn.outvars}
    found: dict[Var, Entering] = {}
    readers = Counter[Var]()
    for step in steps:
        for index, (atom, cast) in enumerate(zip(step.operands, step.casts, strict=True)):
            if isinstance(atom, Literal) or atom in made:
                continue
            entry = found.setdefault(atom, Entering(atom))
            half = cast if cast is not None and setting.pair.is_narrow(cast.dtype) else None
            entry.add(half, step)
            if atom in half_states:
                entry.add(Cast(BFLOAT16), step)
            # A loop reads what its half constants are cast of too, but for their derivative alone.
            entry.as_it_is |= half is None and index < len(step.eqn.invars)
            readers[atom] += half is not None
            if readers[atom] == setting.heuristics.readers:
                entry.add(None, step)
            if index == 0 and isinstance(step.rewrite, Pinned):
                entry.add(None, step)
                entry.as_it_is = True
    return list(found.values())


def raised_alike(groups: Sequence[Segment], setting: Setting) -> list[set[Var]]:
    """For each group of steps, the half values that it and another group read in float32: their cotangents add up."""
    found = [{atom for step in group.steps for atom in _raised(step, setting)} for group in groups]
    times = Counter(itertools.chain.from_iterable(found))
    return [{var for var in raised if times[var] > 1} for raised in found]


def _raised(step: Step, setting: Setting) -> Iterator[Var]:
    narrow, wide = setting.pair.is_narrow, setting.pair.wide
    for atom, flow, cast in zip(step.operands, step.ins, step.casts, strict=True):
        if isinstance(atom, Literal) or flow is None or cast is None or not flow.has(Mark.TRAINED):
            continue
        if narrow(flow.dtype) and cast.dtype == wide and not flow.has(Mark.TANGENT):
            yield atom


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
    in_half = sum(2 * num_elements(entry.var.aval) for entry in weights)
    return heuristics.small_beside * in_half > sum(map(product_bytes, steps))


def _is_for_several_devices(value: Any) -> bool:
    meshes = jax.typeof(value).sharding.mesh, jax.sharding.get_abstract_mesh()
    return any(not mesh.empty and mesh.size > 1 and not mesh.are_all_axes_manual for mesh in meshes)
