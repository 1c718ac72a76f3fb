"""Calls, checkpoints, branches and device maps: each jaxpr inside is planned for the states that arrive."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jamp._compat import ClosedJaxpr, called_jaxpr, open_jaxpr
from jamp.transforms.analysis.regimes import Elementwise
from jamp.transforms.planning.inner import boundary, entered, inward, plan_hoisted, plan_inside
from jamp.transforms.planning.site import Site
from jamp.transforms.program.flow import Flow, Flows, Kind, Root, join, num_elements
from jamp.transforms.program.plan import Branches, Call, OptimizedRemat, Plan, Remat, ShardMap, Step
from jamp.transforms.program.want import Want, Wants


def plan_call(site: Site) -> Step:
    """`jit` and its like: the jaxpr inside is planned for the states that its operands arrive in."""
    jaxpr = called_jaxpr(site.eqn.params)
    ins = list(inward(site, site.ins, jaxpr, site.wants))
    for var in site.eqn.outvars:
        if site.regime.recurrences and (index := site.sums.get(var)) is not None:
            flow, root = ins[index], Root("sum", id(jaxpr), index)
            ins[index] = flow and flow._replace(kind=Kind.FULL, dtype=site.wide, roots=frozenset({root}))
    plan = plan_inside(site, jaxpr, tuple(ins), site.wants)
    plan = plan_hoisted(site, plan, range(len(ins)), site.wants)
    return entered(
        site, boundary(site, site.ins, plan.ins), plan.outs, Call(plans=(plan,), as_traced=plan.unchanged)
    )  # fmt: skip


def plan_optimized_remat(site: Site) -> Step:
    """A forward rule with `optimize_remat`: as a call, whose residuals come first."""

    def replan(jaxpr: ClosedJaxpr, states: Flows, wants: Wants) -> Plan:
        return site.planner.plan(jaxpr, states, wants, site.inner_context)

    step = plan_call(site)
    rewrite = OptimizedRemat(plans=step.plans, as_traced=step.unchanged, replan=replan)
    return dataclasses.replace(step, rewrite=rewrite)


def plan_remat(site: Site) -> Step:
    """`jax.checkpoint`: policy and CSE barrier as the user set them, around a planned body."""
    jaxpr = site.eqn.params["jaxpr"]
    ins = inward(site, site.ins, jaxpr, site.wants)
    plan = plan_inside(site, jaxpr, ins, site.wants)
    return entered(site, boundary(site, site.ins, ins), plan.outs, Remat(plans=(plan,)))


def plan_cond(site: Site) -> Step:
    """Branches are planned apart; a result has the firmest dtype that any of them gives it."""
    branches = site.eqn.params["branches"]
    entries = [inward(site, site.ins[1:], branch, site.wants) for branch in branches]
    ins = tuple(_agree(site, states) for states in zip(*entries, strict=True))
    plans = tuple(plan_inside(site, branch, ins, site.wants) for branch in branches)
    outs = tuple(
        _agree(site, states, want)
        for states, want in zip(zip(*(plan.outs for plan in plans), strict=True), site.wants, strict=True)
    )
    return entered(site, (None, *boundary(site, site.ins[1:], ins)), outs, Branches(plans=plans))


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
    wanted = site.regime.elementwise is Elementwise.WIDEST or (site.regime.demand and want.full)
    if joined.kind == Kind.HALF and some_wide and wanted:
        return joined._replace(kind=Kind.ISLAND, dtype=site.wide)
    return joined


def plan_shard_map(site: Site) -> Step:
    """`shard_map` (and `pmap`, which is one inside): specs and mesh as they were, around a planned body."""
    jaxpr = site.eqn.params["jaxpr"]
    local = [
        flow and flow._replace(size=min(flow.size, num_elements(var.aval)))
        for flow, var in zip(site.ins, open_jaxpr(jaxpr).invars, strict=True)
    ]
    ins = inward(site, local, jaxpr, site.wants)
    plan = plan_inside(site, jaxpr, ins, site.wants)
    return entered(site, boundary(site, site.ins, ins), plan.outs, ShardMap(plans=(plan,)))
