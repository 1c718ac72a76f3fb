"""Jaxprs inside equations: calls, branches and device maps, rebuilt around planned bodies.

Loops and branches are rebuilt through public `jax.lax`; calls (`jit`) are bound again with a new jaxpr in place of the
old one, which keeps their name, shardings, donation and compiler options whatever the version calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jamp._compat import Literal, bind, called_jaxpr, called_jaxpr_name, open_jaxpr
from jamp.transforms._demand import Want, Wants
from jamp.transforms._execute import Run, execute
from jamp.transforms._flow import FLOAT32, Flow, Kind, join, num_elements
from jamp.transforms._rules import CALLS
from jamp.transforms._steps import Flows, Plan, Site, Step


def inward(site: Site, flows_in: Sequence[Flow | None], jaxpr: Any, wants: Wants) -> Flows:
    """Operand states as a jaxpr inside sees them: scopes start anew, and islands that leave theirs arrive in half."""
    wanted = site.planner.demand(jaxpr, wants, site.mode, site.base)
    return tuple(
        _enter(site, flow, wanted.of(var)) for flow, var in zip(flows_in, open_jaxpr(jaxpr).invars, strict=True)
    )


def _enter(site: Site, flow: Flow | None, wanted: Want) -> Flow | None:
    if flow is None:
        return None
    if site.mode == "O2" and site.leaves(flow) and not wanted:
        flow = flow._replace(kind=Kind.HALF, dtype=site.planner.half)
    return flow._replace(scope="")


def outward(site: Site, outs: Flows) -> Flows:
    """Result states as the equation's readers see them."""
    return tuple(flow and flow._replace(scope=site.here) for flow in outs)


def boundary(ins: Flows, targets: Flows) -> tuple[np.dtype | None, ...]:
    """Casts that bring operands from one state to another."""
    return tuple(
        b.dtype if a is not None and b is not None and a.dtype != b.dtype else None
        for a, b in zip(ins, targets, strict=True)
    )


def entered(site: Site, casts: Any, outs: Flows, emit: Callable[..., list[Any]] | None, *plans: Plan) -> Step:
    """The step of an equation whose jaxprs were planned."""
    return Step(site.eqn, site.ins, casts, outward(site, outs), "recurse", emit=emit, plans=plans)


def plan_inside(site: Site, jaxpr: Any, ins: Flows, wants: Wants) -> Plan:
    """Plans a jaxpr inside the equation of a site."""
    return site.planner.plan(jaxpr, ins, wants, site.mode, site.base)


def plan_hoisted(site: Site, plan: Plan, candidates: range, wants: Wants) -> Plan:
    """The plan again, with the candidates that the body does nothing with but cast to half already cast, outside."""
    jaxpr, half = open_jaxpr(plan.jaxpr), site.planner.half
    reads: dict[Any, set[Any]] = {var: {None} for var in jaxpr.outvars if not isinstance(var, Literal)}
    for step in plan.steps:
        for atom, dtype in zip(step.operands, step.casts, strict=True):
            if not isinstance(atom, Literal):
                reads.setdefault(atom, set()).add(dtype)
    ins = list(plan.ins)
    for index in candidates:
        flow, var = ins[index], jaxpr.invars[index]
        if flow is not None and flow.kind == Kind.LAZY and reads.get(var) == {half}:
            ins[index] = flow._replace(kind=Kind.HALF, dtype=half)
    known = set(site.planner.layer_scans)
    plan = plan_inside(site, plan.jaxpr, tuple(ins), wants)
    site.planner.layer_scans = known  # Weights that come in half now look like activations.
    return plan


def plan_call(site: Site) -> Step:
    """`jit` and its like: the jaxpr inside is planned for the states that its operands arrive in."""
    jaxpr = called_jaxpr(site.eqn.params)
    ins = list(inward(site, site.ins, jaxpr, site.wants))
    for index in [index for var in site.eqn.outvars if (index := site.sums.get(var)) is not None]:
        flow, roots = ins[index], frozenset({("sum", id(jaxpr), index)})
        ins[index] = flow and flow._replace(kind=Kind.FULL, dtype=FLOAT32, roots=roots)
    ins = tuple(ins)
    plan = plan_hoisted(site, plan_inside(site, jaxpr, ins, site.wants), range(len(ins)), site.wants)
    emit = None if plan.unchanged else _emit_call
    return entered(site, boundary(site.ins, plan.ins), plan.outs, emit, plan)


def _emit_call(step: Step, operands: Sequence[Any], run: Run) -> list[Any]:
    (plan,) = step.plans
    if step.eqn.primitive.name not in ("jit", "pjit", "composite"):
        return execute(plan, operands, run)
    key = (run, *map(jax.typeof, operands))
    if key not in plan.emitted or plan.asks_what_moves:
        plan.emitted[key] = jax.make_jaxpr(lambda *args: execute(plan, args, run))(*operands)
    params = step.eqn.params
    return bind(step.eqn, operands, {**params, called_jaxpr_name(params): plan.emitted[key]})


def plan_remat(site: Site) -> Step:
    """`jax.checkpoint`: policy and CSE barrier as the user set them, around a planned body."""
    jaxpr = site.eqn.params["jaxpr"]
    ins = inward(site, site.ins, jaxpr, site.wants)
    plan = plan_inside(site, jaxpr, ins, site.wants)
    return entered(site, boundary(site.ins, ins), plan.outs, _emit_remat, plan)


def _emit_remat(step: Step, operands: Sequence[Any], run: Run) -> list[Any]:
    (plan,), params = step.plans, step.eqn.params
    inner = run._replace(keep_half=False)
    if params["differentiated"]:  # The recomputing half of a gradient taken inside the function.
        closed = jax.make_jaxpr(lambda *args: execute(plan, args, inner))(*operands)
        if not closed.consts:
            return bind(step.eqn, operands, {**params, "jaxpr": open_jaxpr(closed)})

    key = ("remat", inner, params["policy"], params["prevent_cse"])
    if key not in plan.emitted:  # JAX traces a function once for each dtype, so a block that repeats is traced once.
        plan.emitted[key] = jax.checkpoint(
            lambda *args: execute(plan, args, inner), policy=params["policy"], prevent_cse=params["prevent_cse"]
        )
    return plan.emitted[key](*operands)


def plan_cond(site: Site) -> Step:
    """Branches are planned apart; a result has the firmest dtype that any of them gives it."""
    branches = site.eqn.params["branches"]
    entries = [inward(site, site.ins[1:], branch, site.wants) for branch in branches]
    ins = tuple(_agree(states, site.planner.half) for states in zip(*entries, strict=True))
    plans = tuple(plan_inside(site, branch, ins, site.wants) for branch in branches)
    outs = tuple(_agree(states, site.planner.half) for states in zip(*(plan.outs for plan in plans), strict=True))
    return entered(site, (None, *boundary(site.ins[1:], ins)), outs, _emit_cond, *plans)


def _agree(states: Sequence[Flow | None], half: np.dtype) -> Flow | None:
    known = [state for state in states if state is not None]
    return join(known, half) if len(known) == len(states) else None


def _emit_cond(step: Step, operands: Sequence[Any], run: Run) -> list[Any]:
    dtypes = [flow and flow.dtype for flow in step.out]
    branches = [_bound(plan, run._replace(keep_results=True), dtypes) for plan in step.plans]
    return list(lax.switch(operands[0], branches, *operands[1:]))


def _bound(plan: Plan, run: Run, dtypes: Sequence[Any]) -> Any:
    return lambda *args: execute(plan, args, run, dtypes)


def plan_shard_map(site: Site) -> Step:
    """`shard_map` (and `pmap`, which is one inside): specs and mesh as they were, around a planned body."""
    jaxpr = site.eqn.params["jaxpr"]
    local = [
        flow and flow._replace(size=min(flow.size, num_elements(var.aval)))
        for flow, var in zip(site.ins, open_jaxpr(jaxpr).invars, strict=True)
    ]
    ins = inward(site, local, jaxpr, site.wants)
    plan = plan_inside(site, jaxpr, ins, site.wants)
    return entered(site, boundary(site.ins, ins), plan.outs, _emit_shard_map, plan)


def _emit_shard_map(step: Step, operands: Sequence[Any], run: Run) -> list[Any]:
    (plan,), params = step.plans, step.eqn.params
    mapped = jax.shard_map(
        lambda *args: tuple(execute(plan, args, run)),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(params.get("newly_manual_axes", params.get("manual_axes", ()))),
        check_vma=params["check_vma"],
    )
    return list(mapped(*operands))


PLANNERS = {
    **dict.fromkeys(CALLS, plan_call),
    "composite": plan_call,
    "remat_opt": plan_call,
    "remat2": plan_remat,
    "checkpoint": plan_remat,
    "cond": plan_cond,
    "shard_map": plan_shard_map,
}
