"""How data movement moves precision, and what it does to cotangents, which its transpose adds up."""

from __future__ import annotations

import dataclasses

from jamp._compat import Atom, Literal
from jamp._primitives import SCALES, Trait, has
from jamp.transforms.planning.site import Site
from jamp.transforms.program.flow import Flow, num_elements
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import Mark, transmit
from jamp.transforms.program.plan import Cast, Step
from jamp.transforms.program.rewrites import Retyped
from jamp.transforms.program.want import Want

# What broadcasts axes of one element.
_BROADCASTS = Trait.ADDS | SCALES | Trait.EXTREMUM


def plan_follow(site: Site) -> Step:
    """Data movement: each result has the dtype of the operand it comes from."""
    pairwise = len(site.eqn.invars) == len(site.eqn.outvars)
    moved = [_raised(site, atom, _rounded(site, flow)) for atom, flow in zip(site.eqn.invars, site.ins, strict=True)]
    casts = tuple(site.cast(before, after and after.dtype) for before, after in zip(site.ins, moved, strict=True))
    out = []
    for index, var in enumerate(site.eqn.outvars):
        source = moved[index if pairwise else 0]
        if not site.pair.flows(var.aval):
            out.append(None)
        elif source is None:
            out.append(Flow(var.aval.dtype, Kind.LAZY, num_elements(var.aval), site.here, Mark.FRACTION))
        else:
            size = source.size if has(site.eqn, Trait.TRAFFIC) else min(source.size, num_elements(var.aval))
            marks = transmit(source.marks, site.traits, source.kind) | site.marks_of_choice
            if marks & Mark.REPEATED and _takes_a_part(site):  # As one of many layers: an iteration has its own.
                marks = (marks & ~Mark.REPEATED) | Mark.STORED
            roots = source.roots if has(site.eqn, Trait.CONTINUES) else frozenset()
            out.append(source._replace(size=size, scope=site.here, marks=marks, roots=roots))
    step = Step(site.eqn, site.ins, casts, tuple(out), "follow")
    first = moved[0]
    if first is None or first.kind != Kind.HALF or not has(site.eqn, Trait.GROWS):
        return step
    return _added_up_in_float32(site, step) if _is_long_sum(site, first, _readers(site)) else step


def _takes_a_part(site: Site) -> bool:
    """Whether a movement takes what an index says that the program computes, such as the counter of a loop."""
    is_view = has(site.eqn, Trait.VIEW) or not has(site.eqn, Trait.MOVES)
    return not is_view and not all(isinstance(atom, Literal) for atom in site.eqn.invars[1:])


def _readers(site: Site) -> int:
    """How many elements of its result a movement gives one of its operand to."""
    before, after = num_elements(site.eqn.invars[0].aval), num_elements(site.eqn.outvars[0].aval)
    indices = [num_elements(var.aval) for var in site.eqn.invars[1:]]
    return max(indices) if indices else after // max(before, 1)


def _rounded(site: Site, flow: Flow | None) -> Flow | None:
    """An island that leaves its scope, as half data, unless its readers want it in float32 anyway."""
    if flow is None or not site.leaves(flow) or site.want_full or Want.LEFT in site.wants or not site.regime.islands:
        return flow
    if not any(site.pair.flows(var.aval) for var in site.eqn.outvars):
        return flow
    return site.rounded(flow)


def _raised(site: Site, atom: Atom, flow: Flow | None) -> Flow | None:
    """Half data in float32 that is spread to be multiplied in several ways, or that others read too: cotangents add up.

    Of `f(z.T).T - z`, the cotangents of `z` cancel: that of `z.T` may not be rounded on its way.
    """
    if flow is None or flow.kind != Kind.HALF or not site.regime.delicate:
        return flow
    terms = has(site.eqn, Trait.GROWS) and site.eqn.outvars[0] in site.planner.demand.facts.terms
    moves = has(site.eqn, Trait.MOVES) and not has(site.eqn, Trait.TRAFFIC)
    others = moves and (site.want_full or site.wanted_apart) and site.adds_cotangents_up(atom, flow)
    return site.raised(flow) if terms or others else flow


def _is_long_sum(site: Site, flow: Flow, readers: int) -> bool:
    """Whether the transpose of what gives a value to so many readers is a long sum of cotangents."""
    derived = site.regime.delicate and flow.has(Mark.TRAINED) and not flow.has(Mark.TANGENT)
    return derived and readers >= site.heuristics.many_readers


def _added_up_in_float32(site: Site, step: Step) -> Step:
    """A movement of half data as raise, move, round, so that its transpose adds cotangents up in float32."""
    casts = (site.cast(site.ins[0], site.wide), *step.casts[1:])
    return dataclasses.replace(step, casts=casts, rewrite=Retyped(out_casts=(Cast(site.half),)))


def spread_in_float32(site: Site, step: Step) -> Step:
    """An operation in half, each operand of which that has many readers is broadcast in float32, and then rounded.

    JAX sums the cotangent of a bias or of a gate over the axes that it lacks. In bfloat16 the gradient of a bias that
    50,000 pixels read was wrong by 98 %.
    """
    if not has(site.eqn, _BROADCASTS):  # Others promote too: what is concatenated has its own shape.
        return step
    whole = site.eqn.outvars[0].aval
    casts, spread = [], []
    for var, flow, to in zip(site.eqn.invars, site.ins, step.casts, strict=True):
        same_rank = len(var.aval.shape) == len(whole.shape)
        readers = num_elements(whole) // max(num_elements(var.aval), 1)
        many = flow is not None and same_rank and _is_long_sum(site, flow, readers)
        casts.append(site.cast(flow, site.wide) if many else to)
        spread.append((to or Cast(site.half)) if many else None)
    if not any(spread):
        return step
    return dataclasses.replace(step, casts=tuple(casts), rewrite=Retyped(spread=tuple(spread)))
