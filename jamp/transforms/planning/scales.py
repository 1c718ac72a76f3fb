"""What numbers beyond the half range do to data: how many powers of two away from its own size they bring it.

What the program computes from numbers that it writes is a number too, and the largest of its elements tells. A number
that half holds changes no scale, so that layers which divide by the root of their width never add up to one. What a
primitive makes of scaled data is what it makes of a number as large: `tanh` of 2**20 is 1, and ends the scale; `rsqrt`
of 2**40 is 2**-20, and multiplied with data of 2**20 gives 1. Of several things that are added up the largest counts,
and of several that are put together the one that is farthest from what half holds.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from jamp._compat import Atom, Literal
from jamp._primitives import PRODUCTS, SCALES, Rule, Trait, has, rule_of
from jamp.transforms.analysis.reading.arithmetic import computed
from jamp.transforms.analysis.reading.axes import is_reduction
from jamp.transforms.planning.site import Site
from jamp.transforms.program.flow import Flow
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.lattice import scale_of_all
from jamp.transforms.program.marks import Mark
from jamp.transforms.program.plan import Step
from jamp.transforms.program.scale import Range, exponent

_HANDS_ON = Trait.SPREADS | Trait.MOVES | Trait.VIEW | Trait.REDUCES | Trait.LINEAR


def with_scale(site: Site, step: Step) -> Step:
    """The step with the scale of its results, which is that of its operands where these are moved."""
    if site.pair.lacks_range and any(site.ranges):
        out = tuple(flow and _of_number(site, flow, number) for flow, number in zip(step.out, site.ranges, strict=True))
    elif rule_of(site.eqn) is Rule.FOLLOW:
        if not any(flow and flow.number for flow in step.out):
            return step
        out = tuple(flow and flow._replace(number=None) for flow in step.out)
    elif site.is_scaled:
        scale = _scale(site)
        out = tuple(flow and flow._replace(scale=0 if flow.kind == Kind.HALF else scale) for flow in step.out)
    else:
        return step
    return dataclasses.replace(step, out=out)


def _of_number(site: Site, flow: Flow, number: Range | None) -> Flow:
    """The state of a number with what it is: as `literal_flow` has it of one that the program writes."""
    if number is None or flow.kind == Kind.HALF:
        return flow
    scale = exponent(number.largest, site.pair)
    flow = flow.without(Mark.HUGE)
    marks = flow.marks | Mark.HUGE if scale and not flow.has(Mark.TANGENT) else flow.marks
    return flow._replace(marks=marks, scale=scale, number=number)


def _scale(site: Site) -> int:
    flows = [flow for flow in site.ins if flow is not None]
    if site.traits & PRODUCTS:
        return _held(site, sum(flow.scale for flow in flows))
    if site.traits & Trait.ADDS:  # Numbers that are added are masks, or an epsilon.
        return max(min(flow.scale, 0) if flow.is_number else flow.scale for flow in flows)
    if site.traits & (SCALES) and len(flows) == 2:
        return _held(site, _multiplied(site, flows))
    found = _computed(site)
    if found is None:
        return scale_of_all(flows) if site.traits & _HANDS_ON else 0
    return exponent(found, site.pair)


def _held(site: Site, scale: int) -> int:
    """A scale; zero if half holds numbers that large."""
    most = np.finfo(site.pair.wide).maxexp - 1
    return exponent(2.0 ** min(max(scale, -most), most), site.pair)


def _multiplied(site: Site, flows: list[Flow]) -> int:
    """Scale of a product or a quotient.

    A sum that a number makes smaller is a mean, as large as its terms. An integer that a number makes larger is a mask:
    zero, or as far off as can be. One that it makes smaller is a part of that number, as `pixels / 65535` are.
    Statistics that data is divided by, and a number that was taken off it before, say how large it was.
    """
    signs = (1, -1 if site.traits & Trait.DIVIDES else 1)
    terms = [(flow, sign * flow.scale) for flow, sign in zip(flows, signs, strict=True)]
    pairs = zip(site.eqn.invars, site.ins, strict=True)
    data = [(atom, flow) for atom, flow in pairs if flow is not None and not flow.is_number]
    by_arrays = sum(scale for flow, scale in terms if flow.is_number and _is_at_hand(flow))
    by_numbers = sum(scale for flow, scale in terms if flow.is_number) - by_arrays
    is_mean = by_numbers < 0 and all(flow.size == 1 or _is_sum(site, atom) for atom, flow in data)
    is_mask = by_numbers > 0 and not any(flow.has(Mark.FRACTION) for _, flow in data)
    was_large = by_numbers < 0 and any(_is_moved_far(site, atom) or _is_count(site, atom) for atom, _ in data)
    if data and (is_mean or is_mask or was_large):
        by_numbers = 0
    scale = by_numbers + sum(scale for flow, scale in terms if not flow.is_number)
    return max(scale + by_arrays, min(scale, 0)) if by_arrays < 0 else scale + by_arrays


def _is_at_hand(flow: Flow) -> bool:
    """Whether what is known of a value is that of an array that the program closes over."""
    return flow.kind != Kind.WEAK and flow.size > 1


def _maker(site: Site, atom: Atom) -> Step | None:
    """The step that computes a value, before what only moves it."""
    return site.behind(atom, lambda eqn: rule_of(eqn) is Rule.FOLLOW)[0]


def _is_moved_far(site: Site, atom: Atom) -> bool:
    """Whether a value is a sum with a number beyond half: what it is added to is of its size, or masked."""
    step = _maker(site, atom)
    if step is None or not has(step.eqn, Trait.ADDS):
        return False
    return any(flow is not None and flow.is_number and flow.scale > 0 for flow in step.ins)


def _is_count(site: Site, atom: Atom) -> bool:
    """Whether a value is an integer that was converted, which numbers may have been added to, or have scaled."""
    while (step := _maker(site, atom)) is not None and not has(step.eqn, Trait.CONVERTS):
        terms = zip(step.eqn.invars, step.ins, strict=False)
        data = [each for each, flow in terms if flow is not None and not flow.is_number]
        if len(data) != 1 or not has(step.eqn, SCALES | Trait.ADDS):
            return False
        atom = data[0]
    return step is not None and np.issubdtype(step.eqn.invars[0].aval.dtype, np.integer)


def _is_sum(site: Site, atom: Atom) -> bool:
    """Whether a value adds up many others. Of what a loop adds up, a number that makes it smaller says nothing."""
    step = _maker(site, atom)
    return step is not None and (has(step.eqn, Trait.SUMS_AXES) or is_reduction(step.eqn))


def _computed(site: Site) -> float | None:
    """The magnitude of what arithmetic makes of numbers as large as the operands; None for what is no arithmetic."""
    operands = (
        float(atom.val) if isinstance(atom, Literal) else _magnitude(flow)
        for atom, flow in zip(site.eqn.invars, site.ins, strict=True)
    )
    found = computed(site.eqn, operands)
    return abs(found) if found else None


def _magnitude(flow: Flow | None) -> float:
    if flow is None or flow.number is None:
        return 2.0 ** (flow.scale if flow else 0)
    return flow.number.low if flow.number.low == flow.number.high else flow.number.largest
