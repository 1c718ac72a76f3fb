"""What planners of equations with jaxprs inside share: states on the way in, and on the way out."""

from __future__ import annotations

from collections.abc import Sequence

from jamp._compat import ClosedJaxpr, Literal, Var, open_jaxpr
from jamp.transforms.planning.site import Site, constants_of
from jamp.transforms.program.flow import Flow, Flows, Kind
from jamp.transforms.program.plan import Casts, Inside, Plan, Step
from jamp.transforms.program.want import Want, Wants


def inward(site: Site, flows_in: Sequence[Flow | None], jaxpr: ClosedJaxpr, wants: Wants) -> Flows:
    """Operand states as a jaxpr inside sees them: scopes start anew, and islands that leave theirs arrive in half."""
    wanted = site.planner.demand(jaxpr, wants, site.regime, site.inner_context.scope, constants_of(flows_in))
    return tuple(
        _enter(site, flow, wanted.of(var)) for flow, var in zip(flows_in, open_jaxpr(jaxpr).invars, strict=True)
    )


def _enter(site: Site, flow: Flow | None, wanted: Want) -> Flow | None:
    if flow is None:
        return None
    if site.regime.islands and site.leaves(flow) and not wanted.full:
        flow = site.rounded(flow)
    return flow._replace(scope="")


def boundary(site: Site, ins: Flows, targets: Flows) -> Casts:
    """Casts that bring operands from one state to another."""
    return tuple(
        site.cast(before, after.dtype) if after is not None else None
        for before, after in zip(ins, targets, strict=True)
    )


def entered(site: Site, casts: Casts, outs: Flows, rewrite: Inside, rule: str = "recurse") -> Step:
    """The step of an equation whose jaxprs were planned: their results belong to its scope."""
    here = tuple(flow and flow._replace(scope=site.here) for flow in outs)
    return Step(site.eqn, site.ins, casts, here, rule, rewrite)


def plan_inside(site: Site, jaxpr: ClosedJaxpr, ins: Flows, wants: Wants) -> Plan:
    """Plans a jaxpr inside the equation of a site."""
    return site.planner.plan(jaxpr, ins, wants, site.inner_context)


def plan_hoisted(site: Site, plan: Plan, candidates: range, wants: Wants) -> Plan:
    """The plan again, with the candidates that the body does nothing with but cast to half already cast, outside."""
    jaxpr, half = open_jaxpr(plan.jaxpr), site.pair.narrow
    reads: dict[Var, set[object]] = {var: {None} for var in jaxpr.outvars if not isinstance(var, Literal)}
    for step in plan.steps:
        for atom, cast in zip(step.operands, step.casts, strict=True):
            if not isinstance(atom, Literal):
                reads.setdefault(atom, set()).add(cast and cast.dtype)
    ins = list(plan.ins)
    for index in candidates:
        flow, var = ins[index], jaxpr.invars[index]
        if flow is not None and flow.kind == Kind.LAZY and reads.get(var) == {half}:
            ins[index] = site.rounded(flow)
    return plan if tuple(ins) == plan.ins else plan_inside(site, plan.jaxpr, tuple(ins), wants)
