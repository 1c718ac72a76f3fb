"""What the planners of calls, branches and loops share: how states go into jaxprs inside, and what their step is.

Casts of operands that only jaxprs inside would make are made in front of them: to half once, to float32 for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence

from jamp._compat import ClosedJaxpr, open_jaxpr
from jamp._primitives import Trait, has
from jamp.transforms.planning.context import constants_of
from jamp.transforms.planning.site import Site
from jamp.transforms.program.flow import Flow, Flows
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import Mark
from jamp.transforms.program.plan import Casts, Inside, Plan, Step
from jamp.transforms.program.rewrites import Remat, Scan
from jamp.transforms.program.scale import Range
from jamp.transforms.program.want import Want, Wants


def inward(site: Site, flows_in: Sequence[Flow | None], jaxpr: ClosedJaxpr, wants: Wants) -> Flows:
    """Operand states as a jaxpr inside sees them: scopes start anew, and islands that leave theirs arrive in half."""
    leaving = {index for index, flow in enumerate(flows_in) if flow and site.regime.islands and site.leaves(flow)}
    if leaving:  # Of most jaxprs nobody asks what they want.
        wanted = site.planner.demand(jaxpr, wants, site.regime, site.inner_context.scope, constants_of(flows_in))
        read = [wanted.of(var) for var in open_jaxpr(jaxpr).invars]
        leaving = {index for index in leaving if not (read[index].full or read[index] is Want.LEFT)}
    return tuple(
        flow and (site.rounded(flow) if index in leaving else flow)._replace(scope="")
        for index, flow in enumerate(flows_in)
    )


def boundary(site: Site, ins: Flows, targets: Flows) -> Casts:
    """Casts that bring operands from one state to another."""
    return tuple(
        site.cast(before, after.dtype) if after is not None else None
        for before, after in zip(ins, targets, strict=True)
    )


def entered(site: Site, casts: Casts, outs: Flows, rewrite: Inside, rule: str = "recurse") -> Step:
    """The step of an equation whose jaxprs were planned: their results belong to its scope."""
    here = [flow and flow._replace(scope=site.here) for flow in outs]
    if site.sums and site.regime.recurrences:  # A relu, or a choice, of what adds up.
        for index, (var, flow) in enumerate(zip(site.eqn.outvars, here, strict=True)):
            if flow is not None and flow.kind == Kind.ISLAND and var in site.sums:
                here[index] = flow._replace(kind=Kind.FULL)
    return Step(site.eqn, site.ins, casts, tuple(here), rule, rewrite)


def plan_inside(
    site: Site, jaxpr: ClosedJaxpr, ins: Flows, wants: Wants, numbers: tuple[Range | None, ...] = ()
) -> Plan:
    """Plans a jaxpr inside the equation of a site; `numbers` are what is known of inputs without a state."""
    return site.planner.plan(jaxpr, ins, wants, site.inner_context, numbers)


def plan_hoisted(
    site: Site, plan: Plan, candidates: range, wants: Wants, numbers: tuple[Range | None, ...] = ()
) -> Plan:
    """The plan again, with the candidates that the body does nothing with but cast to half already cast, outside."""
    reads, ins = site.planner.reads.of(plan), list(plan.ins)
    for index in candidates:
        flow = ins[index]
        if flow is not None and flow.kind == Kind.LAZY and reads[index] == {site.pair.narrow}:
            ins[index] = site.rounded(flow)
    return plan if tuple(ins) == plan.ins else plan_inside(site, plan.jaxpr, tuple(ins), wants, numbers)


def raised(site: Site, plans: Sequence[Plan], outs: Flows, again: Container[int] = ()) -> Flows:
    """The states that jaxprs inside are given, with half operands that these only raise raised outside.

    Others that read them share the cast, and cotangents then add up in float32. In half those of
    `x / jnp.linalg.norm(x)`, whose function is jitted, left little of a derivative that is the difference of both, and
    so did those of `log_softmax(x) - log_softmax(x + d)`. A softmax takes the maximum as well, which is the same of
    either. For a call it makes no difference if nobody else does; a checkpoint or a loop is given the half as well.

    Args:
        site: Their equation.
        plans: The jaxprs inside, which all have the same operands.
        outs: The results of the equation.
        again: Positions of what a loop reads in each iteration anew, so that its cotangents add up there already.
    """
    ins = list(plans[0].ins)
    given = site.eqn.invars[len(site.eqn.invars) - len(ins) :]
    halves = [
        i
        for i, (flow, atom) in enumerate(zip(ins, given, strict=True))
        if flow and flow.kind == Kind.HALF and not flow.has(Mark.TANGENT)
        if has(site.eqn, Trait.CALLS) or i in again or site.adds_cotangents_up(atom, flow)
    ]
    if not halves or not site.regime.delicate:
        return plans[0].ins
    if not has(site.eqn, Trait.LOOPS):  # What is only handed on, and then read in float32. A loop would stack that.
        wide = [flow and flow._replace(dtype=site.wide) for flow in outs]
        outs = tuple(after if want.full else flow for flow, after, want in zip(outs, wide, site.wants, strict=True))
    # A loop that moves it would do so anew in each iteration.
    through = 0 if has(site.eqn, Trait.LOOPS) else Trait.MOVES
    inside = [site.planner.reads.of(plan, outs, Trait.TAKES_EXTREMUM, through) for plan in plans]
    for index in halves:
        flow = ins[index]
        if flow is not None and frozenset[object]().union(*(reads[index] for reads in inside)) == {site.wide}:
            ins[index] = site.raised(flow)
    return tuple(ins)


def with_halves(site: Site, step: Step, given: Flows) -> Step:
    """The step of a checkpoint or loop, which reads at its end what the float32 that it is given was made of.

    Args:
        site: Its equation.
        step: The step.
        given: What the jaxpr inside is given, of each operand that may be kept; None for what may not.
    """
    which = tuple(i for i, flow in enumerate(given) if flow is not None and flow.has(Mark.RAISED))
    if not which or not isinstance(step.rewrite, Remat | Scan):
        return step
    rewrite = dataclasses.replace(
        step.rewrite, raised=which, reads=(*step.operands, *(site.eqn.invars[i] for i in which))
    )
    ins = (*step.ins, *(site.ins[i] for i in which))
    casts = (*step.casts, *(site.cast(site.ins[i], site.pair.narrow) for i in which))
    return dataclasses.replace(step, rewrite=rewrite, ins=ins, casts=casts)
