"""`custom_jvp` and `custom_vjp`: the function is planned here, and the user's rule once it is known."""

from __future__ import annotations

from jamp._compat import ClosedJaxpr
from jamp.transforms.analysis.patterns import rectifies
from jamp.transforms.planning.inner import boundary, entered, inward, plan_inside
from jamp.transforms.planning.site import Site
from jamp.transforms.program.flow import Flows, Kind, Mark
from jamp.transforms.program.plan import CustomRule, Plan, Step
from jamp.transforms.program.want import Wants


def plan_custom_rule(site: Site) -> Step:
    """A function with a forward-mode or reverse-mode rule of its own."""
    jaxpr = site.eqn.params["call_jaxpr"]
    ins = inward(site, site.ins, jaxpr, site.wants)
    plan = plan_inside(site, jaxpr, ins, site.wants)

    def replan(rule: ClosedJaxpr, states: Flows, wants: Wants) -> Plan:
        in_rule = site.context.in_rule or any(flow and flow.has(Mark.TANGENT) for flow in states)
        return site.planner.plan(rule, states, wants, site.inner_context._replace(in_rule=in_rule))

    def residual(states: Flows) -> Flows:
        """A residual is stored: an island in half."""
        return tuple(
            site.rounded(f) if f is not None and f.kind == Kind.ISLAND and site.regime.islands else f for f in states
        )

    # The rule of a relu of what flows is better off planned.
    as_traced = plan.unchanged and not (rectifies(site.eqn) and site.ins[0] is not None)
    rewrite = CustomRule(plans=(plan,), replan=replan, residual=residual, as_traced=as_traced)
    return entered(site, boundary(site, site.ins, ins), plan.outs, rewrite)
