"""Layers that repeat: where to cut a program so that the same steps come again, each time under a checkpoint.

What has the same signature is traced, differentiated and transposed once (`emission/checkpoints.py`), which is most of
what jamp takes to trace a program. Of twelve layers of a transformer eleven are found again.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from jamp._compat import Atom, Literal, scopes
from jamp._primitives import Rule, rule_of
from jamp.transforms.program.flow import num_elements
from jamp.transforms.program.heuristics import Heuristics
from jamp.transforms.program.plan import Step

# Bytes that cross from what is before a step: of values that are not kept anyway, and of all.
Crossing: TypeAlias = tuple[int, int]


class Life(NamedTuple):
    """How long a value is needed, by positions of steps; those of a part of a program may lie outside of it.

    Attributes:
        made: The step that makes it.
        last: The last that reads it.
        bytes: Its bytes.
        is_kept: Whether it is kept wherever a program is cut.
    """

    made: int
    last: int
    bytes: int
    is_kept: bool


def crossings(lives: Iterable[Life], count: int, period: int = 0) -> list[Crossing]:
    """What crosses into each of a number of steps, and behind the last; with a period, into the one that follows too.

    Args:
        lives: The values.
        count: The number of steps.
        period: Number of steps in a layer, for the values that are needed in the next layer as well.
    """
    of_others, of_all = [0] * (count + 2), [0] * (count + 2)  # How much more than into the step before.
    for made, last, size, is_kept in lives:
        begin, end = max(made + 1, 0), min(last, count) - period + 1
        if begin < end:
            of_all[begin] += size
            of_all[end] -= size
            if not is_kept:
                of_others[begin] += size
                of_others[end] -= size
    return list(zip(itertools.accumulate(of_others), itertools.accumulate(of_all), strict=True))[: count + 1]


class Copy(NamedTuple):
    """Steps that come again.

    Attributes:
        start: The first of them.
        stop: The first that is not of them.
        scopes: How many of the outermost scopes all of them are in. Inside of those the scopes are the same in all
            copies, as in `block_0/attention` and `block_1/attention`.
        own: Those that make integers or keys with a number of their own, such as the seed of a layer's dropout, and
            read nothing of the others: made in front of them.
    """

    start: int
    stop: int
    scopes: int
    own: tuple[int, ...] = ()


class _Run(NamedTuple):
    """Steps of which each is like the one a period after it."""

    start: int
    stop: int
    period: int


def copies(
    steps: Sequence[Step], lives: Sequence[Life], weights: Container[Atom], heuristics: Heuristics
) -> list[Copy]:
    """Finds layers that repeat.

    Args:
        steps: Steps in a row.
        lives: The values that they make. Layers begin where the fewest bytes cross.
        weights: Weights. Steps in time, which share theirs, are no layers: they share the half copies too.
        heuristics: The thresholds.

    Returns:
        The layers, in order. Of those that repeat there are two or more in a row.
    """
    if len(steps) < 2 * heuristics.repeated:
        return []
    numbers: dict[Hashable, int] = {}
    likenesses = np.array([numbers.setdefault(_likeness(step), len(numbers)) for step in steps])
    found: list[Copy] = []
    parts = [(0, len(steps))]
    while parts:
        start, stop = parts.pop()
        run = _longest_run(likenesses[start:stop], heuristics.repeated)
        if run is None:
            continue
        run = _Run(start + run.start, start + run.stop, run.period)
        # Without a product nothing of it need be kept, and what crosses a border is.
        made = sum(map(product_bytes, steps[run.start : run.start + run.period]))
        is_layers = made > 0 and _have_own_weights(run, steps, weights)
        placed = _placed(run, steps, lives, made // heuristics.crossing) if is_layers else []
        found += placed
        first, last = (placed[0].start, placed[-1].stop) if placed else (run.start, run.stop)
        parts += [(start, first), (last, stop)]
    return sorted(found)


def _have_own_weights(run: _Run, steps: Sequence[Step], weights: Container[Atom]) -> bool:
    starts = range(run.start, run.stop - run.period + 1, run.period)
    read = [_cast_of(steps[start : start + run.period], weights) for start in starts]
    return len(set().union(*read)) == sum(map(len, read))


def _cast_of(steps: Sequence[Step], weights: Container[Atom]) -> set[Atom]:
    both = ((atom, to) for step in steps for atom, to in zip(step.operands, step.casts, strict=True))
    return {atom for atom, to in both if to is not None and not isinstance(atom, Literal) and atom in weights}


def product_bytes(step: Step) -> int:
    """Bytes of what products make, in half."""
    if step.plans:
        return sum(product_bytes(inner) for plan in step.plans for inner in plan.steps)
    if rule_of(step.eqn) is not Rule.HALF:
        return 0
    return sum(2 * num_elements(var.aval) for var in step.eqn.outvars)


def _likeness(step: Step) -> Hashable:
    """Equal for steps that may have the same signature, and quick to make."""
    eqn = step.eqn
    dtypes = [flow and flow.dtype for flow in (*step.ins, *step.out)]
    # JAX hashes an abstract value in Python, with its sharding.
    shapes = [getattr(atom.aval, "shape", None) for atom in (*eqn.invars, *eqn.outvars)]
    likeness = eqn.primitive, type(step.rewrite), step.casts, *shapes, *dtypes
    if not step.plans:
        return likeness
    given = (flow for plan in step.plans for flow in plan.ins)
    return *likeness, *(flow and (flow.dtype, flow.kind, flow.size, flow.marks) for flow in given)


def _longest_run(likenesses: np.ndarray, least: int) -> _Run | None:
    """The run with the most steps that are like one before them."""
    best, most = None, 0
    for period in range(least, len(likenesses) // 2 + 1):
        if len(likenesses) - period <= most:
            break
        differs = likenesses[period:] != likenesses[:-period]
        if len(differs) - np.count_nonzero(differs) <= most:
            continue
        ends = np.flatnonzero(np.concatenate([[True], differs, [True]]))
        widths = np.diff(ends) - 1
        widest = int(np.argmax(widths))
        again = int(widths[widest]) // period * period
        if again > most:
            start = int(ends[widest])
            best, most = _Run(start, start + int(widths[widest]) + period, period), again
    return best


def _placed(run: _Run, steps: Sequence[Step], lives: Sequence[Life], most: int) -> list[Copy]:
    """The copies in a run, cut where the scopes agree and the fewest bytes cross; none where too many do.

    A mask or a bias that all layers read crosses every border, and is kept once.
    """
    entering = crossings(lives, len(steps))
    again = crossings(lives, len(steps), run.period)

    def crossing(border: range) -> Crossing:
        """What crosses from layers to the next, for each layer."""
        cuts, layers = border[1:-1], len(border) - 1
        others, every = (sum(entering[i][k] for i in cuts) - sum(again[i][k] for i in cuts[:-1]) for k in (0, 1))
        return others // layers, every // layers

    borders = [
        range(start, run.stop + 1, run.period)
        for start in range(run.start, min(run.start + run.period, run.stop - 2 * run.period + 1))
    ]
    stacks = {index: scopes(steps[index].eqn) for index in range(run.start, run.stop)}
    for border in sorted(borders, key=lambda border: (crossing(border), -len(border))):
        if crossing(border)[0] > most:
            break
        found = [_copy(start, stop, stacks) for start, stop in itertools.pairwise(border)]
        if _are_alike(found, stacks):
            return _with_own(found, steps)
    return []


def _copy(start: int, stop: int, stacks: Mapping[int, tuple[Hashable, ...]]) -> Copy:
    return Copy(start, stop, _shared([stacks[index] for index in range(start, stop)]))


def shared_scopes(steps: Sequence[Step]) -> int:
    """How many of their outermost scopes steps have in common."""
    return _shared([scopes(step.eqn) for step in steps])


def _shared(stacks: Sequence[tuple[Hashable, ...]]) -> int:
    return sum(1 for _ in itertools.takewhile(_are_one, zip(*stacks, strict=False)))


def _are_one(scopes: Sequence[Hashable]) -> bool:
    return len(set(scopes)) == 1


def _are_alike(found: Sequence[Copy], stacks: Mapping[int, tuple[Hashable, ...]]) -> bool:
    """Whether the scopes inside of those that differ are the same."""
    return all(
        stacks[i][copy.scopes :] == stacks[j][found[0].scopes :]
        for copy in found[1:]
        for i, j in zip(range(copy.start, copy.stop), range(found[0].start, found[0].stop), strict=True)
    )


def _with_own(found: Sequence[Copy], steps: Sequence[Step]) -> list[Copy]:
    made = [{var for step in steps[copy.start : copy.stop] for var in step.eqn.outvars} for copy in found]
    columns = zip(*(range(copy.start, copy.stop) for copy in found), strict=True)
    own = [
        column
        for column in columns
        if len({_numbers(steps[index]) for index in column}) > 1
        and not any(flow for index in column for flow in steps[index].out)  # Whose values are kept as they are.
        and not any(_reads(steps[index], inside) for index, inside in zip(column, made, strict=True))
    ]
    return [copy._replace(own=tuple(column[i] for column in own)) for i, copy in enumerate(found)]


def _numbers(step: Step) -> Hashable:
    return tuple(np.asarray(atom.val).tobytes() for atom in step.operands if isinstance(atom, Literal))


def _reads(step: Step, made: Container[Atom]) -> bool:
    return any(not isinstance(atom, Literal) and atom in made for atom in step.operands)
