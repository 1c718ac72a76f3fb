"""Calls, checkpoints, branches, device maps and custom rules: each jaxpr inside is planned for what arrives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax.core import ShapedArray

from jamp._compat import ClosedJaxpr, called_jaxpr, open_jaxpr
from jamp._primitives import Trait, has, holds
from jamp.transforms.analysis.loops.deciders import converges
from jamp.transforms.analysis.patterns import rectifies
from jamp.transforms.analysis.regimes import Elementwise
from jamp.transforms.planning.borders import boundary, entered, inward, plan_hoisted, plan_inside, raised, with_halves
from jamp.transforms.planning.operations import plan_opaque
from jamp.transforms.planning.site import Site
from jamp.transforms.program.flow import Flow, Flows, Root, num_elements
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.lattice import join
from jamp.transforms.program.plan import Casts, Plan, Step
from jamp.transforms.program.rewrites import (
    Branches,
    Call,
    CustomBatching,
    CustomRule,
    OptimizedRemat,
    Remat,
    ShardMap,
)
from jamp.transforms.program.scale import Range
from jamp.transforms.program.want import Want


def _integers(site: Site) -> tuple[Range | None, ...]:
    """What is known of operands of a call that have no state: of integers, which it may convert."""
    if not site.pair.lacks_range:
        return ()
    known = tuple(None if flow else site.integer(atom) for atom, flow in zip(site.eqn.invars, site.ins, strict=True))
    return known if any(known) else ()


def plan_call(site: Site) -> Step:
    """`jit` and its like: the jaxpr inside is planned for the states that its operands arrive in."""
    jaxpr = called_jaxpr(site.eqn.params)
    ins = _added_to(site, jaxpr, inward(site, site.ins, jaxpr, site.wants))
    numbers = _integers(site)
    plan = plan_inside(site, jaxpr, ins, site.wants, numbers)
    plan = plan_hoisted(site, plan, range(len(ins)), site.wants, numbers)
    plan = plan_inside(site, jaxpr, raised(site, [plan], plan.outs), site.wants, numbers)
    return entered(
        site, boundary(site, site.ins, plan.ins), plan.outs, Call(plans=(plan,), as_traced=plan.unchanged)
    )  # fmt: skip


def _added_to(site: Site, jaxpr: ClosedJaxpr, ins: Flows) -> Flows:
    """Operand states of an iteration of a loop written out: what it adds to is an accumulator."""
    states = list(ins)
    for var in site.eqn.outvars:
        if site.regime.recurrences and (index := site.sums.get(var)) is not None:
            flow, root = states[index], Root("sum", id(jaxpr), index)
            states[index] = flow and flow._replace(kind=Kind.FULL, dtype=site.wide, roots=frozenset({root}))
    return tuple(states)


def plan_optimized_remat(site: Site) -> Step:
    """A forward rule with `optimize_remat`: as a call, whose residuals come first."""
    step = plan_call(site)
    rewrite = OptimizedRemat(plans=step.plans, as_traced=step.unchanged, replan=site.replan)
    return dataclasses.replace(step, rewrite=rewrite)


def plan_remat(site: Site) -> Step:
    """`jax.checkpoint`: policy and CSE barrier as the user set them, around a planned body."""
    jaxpr = site.eqn.params["jaxpr"]
    ins = _added_to(site, jaxpr, inward(site, site.ins, jaxpr, site.wants))
    before = plan_inside(site, jaxpr, ins, site.wants)
    plan = plan_inside(site, jaxpr, raised(site, [before], before.outs), site.wants)
    step = entered(site, boundary(site, site.ins, plan.ins), plan.outs, Remat(plans=(plan,)))
    return with_halves(site, step, plan.ins)


def plan_cond(site: Site) -> Step:
    """Branches are planned apart; a result has the firmest dtype that any of them gives it."""
    branches = site.eqn.params["branches"]
    entries = [inward(site, site.ins[1:], branch, site.wants) for branch in branches]
    ins = tuple(_agree(site, states) for states in zip(*entries, strict=True))
    plans, outs = _plan_branches(site, branches, ins)
    ins = raised(site, plans, outs)
    plans, outs = _plan_branches(site, branches, ins)
    return entered(site, (None, *boundary(site, site.ins[1:], ins)), outs, Branches(plans=plans))


def _plan_branches(site: Site, branches: Sequence[ClosedJaxpr], ins: Flows) -> tuple[tuple[Plan, ...], Flows]:
    """Plans of branches that are given the same, and the states of what any of them makes."""
    plans = tuple(plan_inside(site, branch, ins, site.wants) for branch in branches)
    results = zip(zip(*(plan.outs for plan in plans), strict=True), site.wants, strict=True)
    return plans, tuple(_agree(site, states, want) for states, want in results)


def _agree(site: Site, states: Sequence[Flow | None], want: Want = Want.NONE) -> Flow | None:
    """The state of what comes from one of several places; None where one of them does not tell.

    Where its readers want float32, or the level knows nothing but the widest of several dtypes, it is float32 if one of
    them is. `join` alone gives half for half data beside an argument.
    """
    known = [state for state in states if state is not None]
    if len(known) < len(states):
        return None
    joined = join(known, site.pair)
    some_wide = any(state.kind != Kind.WEAK and state.dtype == site.wide for state in known)
    wanted = site.regime.elementwise is Elementwise.WIDEST or (site.regime.demand and (want.full or want.apart))
    if joined.kind == Kind.HALF and some_wide and (wanted or (joined.scale and site.regime.delicate)):
        return joined._replace(kind=Kind.ISLAND, dtype=site.wide)
    return joined._replace(scale=0) if joined.kind == Kind.HALF else joined


def plan_shard_map(site: Site) -> Step:
    """`shard_map` (and `pmap`, which is one inside): specs and mesh as they were, around a planned body."""
    jaxpr = site.eqn.params["jaxpr"]
    local = [
        flow and flow._replace(size=min(flow.size, num_elements(var.aval)))
        for flow, var in zip(site.ins, open_jaxpr(jaxpr).invars, strict=True)
    ]
    plan = plan_inside(site, jaxpr, inward(site, local, jaxpr, site.wants), site.wants)
    plan = plan_inside(site, jaxpr, raised(site, [plan], plan.outs), site.wants)
    return entered(site, boundary(site, site.ins, plan.ins), plan.outs, ShardMap(plans=(plan,)))


def plan_custom_rule(site: Site) -> Step:
    """A function with a forward-mode or reverse-mode rule of its own.

    References have the dtype that they were made with, and so has the rule that is given one: it runs as it was traced.
    """
    if not all(isinstance(atom.aval, ShapedArray) for atom in (*site.eqn.invars, *site.eqn.outvars)):
        return plan_opaque(site)
    jaxpr = site.eqn.params["call_jaxpr"]
    plan = plan_inside(site, jaxpr, inward(site, site.ins, jaxpr, site.wants), site.wants)
    ins = raised(site, [plan], plan.outs)
    plan = plan_inside(site, jaxpr, ins, site.wants)
    ends = site.regime.delicate and not site.regime.all_full and has(site.eqn, Trait.CUSTOM_VJP)
    rewrite = CustomRule(
        plans=(plan,),
        replan=site.replan,
        as_traced=_rule_is_as_traced(site, plan),
        converges=ends and converges(jaxpr, site.planner.demand.carries.ended_by),
        loops=holds([site.eqn], Trait.LOOPS),
        solves=holds([site.eqn], Trait.SOLVES),
        halves=(None,) * len(plan.outs),
    )
    rewrite = dataclasses.replace(rewrite, halves=_halves(site, plan, rewrite))
    return entered(site, boundary(site, site.ins, ins), plan.outs, rewrite)


def _halves(site: Site, plan: Plan, rule: CustomRule) -> Casts:
    """Of each result, the half in which a reverse-mode rule keeps it if it does: one half copy serves all readers."""
    if rule.as_traced or not has(site.eqn, Trait.CUSTOM_VJP):
        return rule.halves
    return boundary(site, plan.outs, rule.residual(plan.outs))


def _rule_is_as_traced(site: Site, plan: Plan) -> bool:
    """Whether a rule that is not known yet may run as it was written.

    The function says nothing about its rule: that of a kernel has products in it all the same. The rule of a relu of
    what flows is better off planned. One that closes over values of the program can only run where emission gives it
    these.
    """
    replans = has(site.eqn, Trait.CUSTOM_VJP | Trait.CUSTOM_BATCHING) and not site.regime.all_full
    may_change = (replans or rectifies(site.eqn)) and any(flow is not None for flow in site.ins)
    return plan.unchanged and not may_change and not site.captures


def plan_custom_batching(site: Site) -> Step:
    """A function with a rule for batches of its own: as a call, and the rule likewise."""
    if not all(isinstance(atom.aval, ShapedArray) for atom in (*site.eqn.invars, *site.eqn.outvars)):
        return plan_opaque(site)
    step = plan_call(site)
    (plan,) = step.plans
    rewrite = CustomBatching(plans=step.plans, replan=site.replan, as_traced=_rule_is_as_traced(site, plan))
    return dataclasses.replace(step, rewrite=rewrite)
