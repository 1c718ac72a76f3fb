"""`custom_jvp` and `custom_vjp`: the function is planned here, and the user's rule once it is known."""

from __future__ import annotations

from jax.core import ShapedArray

from jamp._compat import ClosedJaxpr, Eqn, Var, closed_over
from jamp._primitives import Trait, has
from jamp.transforms.analysis.patterns import rectifies
from jamp.transforms.planning.inner import boundary, entered, inward, plan_inside
from jamp.transforms.planning.operations import plan_opaque
from jamp.transforms.planning.site import Site
from jamp.transforms.program.flow import Flows, Kind, Mark
from jamp.transforms.program.plan import CustomRule, Plan, Step
from jamp.transforms.program.want import Wants


def captures_of(eqn: Eqn, captured: frozenset[Var]) -> tuple[Var, ...]:
    """Which of the captured variables of a program the rule of an equation closes over."""
    if not captured or not has(eqn, Trait.CUSTOM_JVP | Trait.CUSTOM_VJP):
        return ()
    return tuple(var for var in closed_over([eqn]) if var in captured)


def plan_custom_rule(site: Site) -> Step:
    """A function with a forward-mode or reverse-mode rule of its own.

    References have the dtype that they were made with, and so has the rule that is given one: it runs as it was traced.
    """
    if not all(isinstance(atom.aval, ShapedArray) for atom in (*site.eqn.invars, *site.eqn.outvars)):
        return plan_opaque(site)
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

    # The function says nothing about its reverse-mode rule, which is not known yet: a kernel has products in it all the
    # same. And the rule of a relu of what flows is better off planned.
    replans = has(site.eqn, Trait.CUSTOM_VJP) and not site.regime.all_full
    may_change = (replans or rectifies(site.eqn)) and any(flow is not None for flow in site.ins)
    # A rule that closes over values of the program can only run where emission gives it these.
    captures = captures_of(site.eqn, site.planner.captured)
    as_traced = plan.unchanged and not may_change and not captures
    rewrite = CustomRule(plans=(plan,), replan=replan, residual=residual, captures=captures, as_traced=as_traced)
    return entered(site, boundary(site, site.ins, ins), plan.outs, rewrite)
