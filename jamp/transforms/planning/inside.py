"""What the planners of calls, branches and loops share: how states go into jaxprs inside, and what their step is."""

from __future__ import annotations

from collections.abc import Sequence

from jamp._compat import ClosedJaxpr, open_jaxpr
from jamp.transforms.planning.context import constants_of
from jamp.transforms.planning.site import Site
from jamp.transforms.program.flow import Flow, Flows
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.plan import Casts, Inside, Plan, Step
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
