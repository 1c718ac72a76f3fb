"""Jaxprs inside equations: calls, loops, branches and device maps, rebuilt around planned bodies.

Loops and branches are rebuilt through public `jax.lax`; calls (`jit`) are bound again with a new jaxpr in place of the
old one, which keeps their name, shardings, donation and compiler options whatever the version calls them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jamp._compat import Literal, bind, called_jaxpr, inner_jaxprs, open_jaxpr, scan_counts, scope_path
from jamp.transforms._execute import Run, execute
from jamp.transforms._flow import FLOAT32, Flow, Kind, join, num_elements
from jamp.transforms._steps import Flows, Plan, Site, Step


def inward(site: Site, flows_in: Sequence[Flow | None], jaxpr: Any, wants: tuple[bool, ...]) -> Flows:
    """Operand states as a jaxpr inside sees them: its scopes start anew, and islands that leave theirs arrive in half."""
    wanted = site.planner.demand(jaxpr, wants, site.mode, site.base)
    return tuple(
        _enter(site, flow, var in wanted.full) for flow, var in zip(flows_in, open_jaxpr(jaxpr).invars, strict=True)
    )


def _enter(site: Site, flow: Flow | None, wanted: bool) -> Flow | None:
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


def plan_inside(site: Site, jaxpr: Any, ins: Flows, wants: tuple[bool, ...]) -> Plan:
    """Plans a jaxpr inside the equation of a site."""
    return site.planner.plan(jaxpr, ins, wants, site.mode, site.base)


def hoisted(plan: Plan, half: np.dtype, candidates: range) -> Flows:
    """Input states with the candidates that the body does nothing with but cast to half already cast, outside."""
    jaxpr = open_jaxpr(plan.jaxpr)
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
    return tuple(ins)


def plan_call(site: Site) -> Step:
    """`jit` and its like: the jaxpr inside is planned for the states that its operands arrive in."""
    jaxpr = called_jaxpr(site.eqn.params)
    ins = inward(site, site.ins, jaxpr, site.wants)
    plan = plan_inside(site, jaxpr, ins, site.wants)
    ins = hoisted(plan, site.planner.half, range(len(ins)))
    plan = plan_inside(site, jaxpr, ins, site.wants)
    emit = None if plan.unchanged else _emit_call
    return Step(site.eqn, site.ins, boundary(site.ins, ins), outward(site, plan.outs), "recurse", emit=emit, plans=(plan,))


def _emit_call(step: Step, operands: Sequence[Any], run: Run) -> list[Any]:
    (plan,) = step.plans
    if step.eqn.primitive.name not in ("jit", "pjit"):
        return execute(plan, operands, run)
    key = (run, *map(jax.typeof, operands))
    if key not in plan.emitted:
        plan.emitted[key] = jax.make_jaxpr(lambda *args: execute(plan, args, run))(*operands)
    return bind(step.eqn, operands, {**step.eqn.params, "jaxpr": plan.emitted[key]})


def plan_remat(site: Site) -> Step:
    """`jax.checkpoint`: policy and CSE barrier as the user set them, around a planned body."""
    jaxpr = site.eqn.params["jaxpr"]
    ins = inward(site, site.ins, jaxpr, site.wants)
    plan = plan_inside(site, jaxpr, ins, site.wants)
    return Step(
        site.eqn, site.ins, boundary(site.ins, ins), outward(site, plan.outs), "recurse", emit=_emit_remat, plans=(plan,)
    )  # fmt: skip


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
    plans, entries = [], []
    for branch in branches:
        entries.append(inward(site, site.ins[1:], branch, site.wants))
    ins = tuple(_agree(states, site.planner.half) for states in zip(*entries, strict=True))
    plans = tuple(plan_inside(site, branch, ins, site.wants) for branch in branches)
    outs = tuple(_agree(states, site.planner.half) for states in zip(*(plan.outs for plan in plans), strict=True))
    return Step(
        site.eqn, site.ins, (None, *boundary(site.ins[1:], ins)), outward(site, outs), "recurse", emit=_emit_cond, plans=plans
    )  # fmt: skip


def _agree(states: Sequence[Flow | None], half: np.dtype) -> Flow | None:
    return None if any(state is None for state in states) else join(list(states), half)


def _emit_cond(step: Step, operands: Sequence[Any], run: Run) -> list[Any]:
    dtypes = [flow and flow.dtype for flow in step.out]
    branches = [_bound(plan, run, dtypes) for plan in step.plans]
    return list(lax.switch(operands[0], branches, *operands[1:]))


def _bound(plan: Plan, run: Run, dtypes: Sequence[Any]) -> Any:
    return lambda *args: execute(plan, args, run, dtypes)


def plan_scan(site: Site) -> Step:
    """`scan`: carries are iterated to a fixpoint; scanned inputs are cast inside, constants outside."""
    params = site.eqn.params
    consts, carries = scan_counts(params)
    jaxpr, length = params["jaxpr"], params["length"]
    wants = (False,) * carries + site.wants[carries:]
    fixed = list(inward(site, _per_iteration(site.ins, consts + carries, length), jaxpr, wants))
    for index in range(consts + carries, len(fixed)):
        if fixed[index] is not None:
            fixed[index] = fixed[index]._replace(roots=frozenset({("xs", id(site.eqn), index)}))
    plan = _fixpoint(site, jaxpr, fixed, consts, carries, wants)
    plan = plan_inside(site, jaxpr, hoisted(plan, site.planner.half, range(consts)), wants)
    outs = [_after_loop(flow, site, 1) for flow in plan.ins[consts : consts + carries]]
    outs += [_stored(flow, want, site, length) for flow, want in zip(plan.outs[carries:], site.wants[carries:], strict=True)]
    return Step(
        site.eqn, site.ins, boundary(site.ins, plan.ins), outward(site, tuple(outs)), "recurse", emit=_emit_scan, plans=(plan,)
    )  # fmt: skip


def _per_iteration(ins: Flows, first: int, length: int) -> list[Flow | None]:
    """States with the scanned operands as one iteration sees them."""
    return [f and f._replace(size=max(f.size // max(length, 1), 1)) if i >= first else f for i, f in enumerate(ins)]


def _stored(flow: Flow | None, want: bool, site: Site, length: int) -> Flow | None:
    """A result that a loop stacks: an island is stored in half, unless its readers want float32."""
    if flow is None:
        return None
    if flow.kind == Kind.ISLAND and not want and site.mode == "O2":
        flow = flow._replace(kind=Kind.HALF, dtype=site.planner.half)
    return _after_loop(flow, site, length)


def _after_loop(flow: Flow | None, site: Site, length: int) -> Flow | None:
    if flow is None:
        return None
    roots = frozenset(root for root in flow.roots if root[1] != id(site.eqn))
    kind = Kind.STAT if flow.kind == Kind.FULL else flow.kind
    return flow._replace(kind=kind, size=flow.size * max(length, 1), roots=roots)


def _fixpoint(site: Site, jaxpr: Any, ins: list[Flow | None], first: int, carries: int, wants: tuple[bool, ...]) -> Plan:
    """Plans a loop body for carries that come out as they went in, starting from the states that they come in with."""
    where = range(first, first + carries)
    for index in where:
        flow = ins[index]
        if flow is not None:
            kind = Kind.LAZY if flow.kind == Kind.ISLAND else flow.kind
            ins[index] = flow._replace(kind=kind, roots=flow.roots | {("carry", id(site.eqn), index)})
    trains = _takes_gradients(jaxpr)
    while True:
        plan = plan_inside(site, jaxpr, tuple(ins), wants)
        over_layers = not trains and any(root[1] == id(site.eqn) for root in site.planner.layer_scans)
        after = [_meet(ins[index], plan.outs[index - first], index, over_layers, site) for index in where]
        if after == [ins[index] for index in where]:
            return plan
        for index, flow in zip(where, after, strict=True):
            ins[index] = flow


def _takes_gradients(jaxpr: Any) -> bool:
    """Whether an iteration differentiates: a loop over batches, whose carried parameters are no residual stream."""
    return any(
        "transpose(" in scope_path(eqn) or any(map(_takes_gradients, inner_jaxprs(eqn))) for eqn in open_jaxpr(jaxpr).eqns
    )


def _meet(before: Flow | None, after: Flow | None, index: int, over_layers: bool, site: Site) -> Flow | None:
    """The state of a carry, from the state that it went into an iteration with and the one that it came out with.

    Monotone in the order weak, lazy, half, firm, so that the fixpoint exists.
    """
    if before is None or after is None or before.kind >= Kind.STAT:
        return before
    if after.kind in (Kind.STAT, Kind.FULL) and before.kind != Kind.HALF:
        return before._replace(kind=after.kind, dtype=FLOAT32)
    if after.kind in (Kind.WEAK, Kind.LAZY):
        return before._replace(kind=max(before.kind, after.kind))
    if before.kind == Kind.HALF:
        return before._replace(kind=Kind.FULL, dtype=FLOAT32) if after.kind == Kind.FULL else before
    accumulates = ("carry", id(site.eqn), index) in after.roots
    if site.mode != "O2" and before.dtype == FLOAT32 and after.dtype != before.dtype and site.mode != "O3":
        return before._replace(kind=Kind.STAT)
    if accumulates and site.mode == "O2" and not (over_layers and before.kind == Kind.LAZY):
        return before._replace(kind=Kind.FULL, dtype=FLOAT32)
    return before._replace(kind=Kind.HALF, dtype=site.planner.half)


def _emit_scan(step: Step, operands: Sequence[Any], run: Run) -> list[Any]:
    (plan,), params = step.plans, step.eqn.params
    consts, carries = scan_counts(params)
    dtypes = [flow and flow.dtype for flow in step.out]
    fixed, init, xs = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]
    inner = run._replace(in_loop=True)

    def body(carry: Any, x: Any) -> Any:
        outs = execute(plan, [*fixed, *carry, *x], inner, dtypes)
        return outs[:carries], outs[carries:]

    final, ys = lax.scan(
        body, [*map(_as_array, init)], list(xs), length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )  # fmt: skip
    return [*final, *ys]


def _as_array(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else jax.numpy.asarray(value)


def plan_while(site: Site) -> Step:
    """`while`: like `scan`, without scanned operands; never over layers."""
    params = site.eqn.params
    for_cond, for_body = params["cond_nconsts"], params["body_nconsts"]
    first = for_cond + for_body
    carries = len(site.ins) - first
    wants = (False,) * carries
    body_ins = inward(site, site.ins[for_cond:], params["body_jaxpr"], wants)
    body = _fixpoint(site, params["body_jaxpr"], list(body_ins), for_body, carries, wants)
    body = plan_inside(site, params["body_jaxpr"], hoisted(body, site.planner.half, range(for_body)), wants)
    cond_ins = inward(site, (*site.ins[:for_cond], *body.ins[for_body:]), params["cond_jaxpr"], (False,))
    cond = plan_inside(site, params["cond_jaxpr"], (*cond_ins[:for_cond], *body.ins[for_body:]), (False,))
    outs = tuple(_after_loop(flow, site, 1) for flow in body.ins[for_body:])
    casts = boundary(site.ins, (*cond_ins[:for_cond], *body.ins))
    return Step(site.eqn, site.ins, casts, outward(site, outs), "recurse", emit=_emit_while, plans=(cond, body))


def _emit_while(step: Step, operands: Sequence[Any], run: Run) -> list[Any]:
    (cond, body), params = step.plans, step.eqn.params
    for_cond, first = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    inner = run._replace(keep_half=False, in_loop=True)  # Reverse mode does not pass through a while loop.
    dtypes = [flow and flow.dtype for flow in step.out]
    final = lax.while_loop(
        lambda carry: execute(cond, [*operands[:for_cond], *carry], inner)[0],
        lambda carry: execute(body, [*operands[for_cond:first], *carry], inner, dtypes),
        [*map(_as_array, operands[first:])],
    )
    return list(final)


def plan_shard_map(site: Site) -> Step:
    """`shard_map` (and `pmap`, which is one inside): specs and mesh as they were, around a planned body."""
    jaxpr = site.eqn.params["jaxpr"]
    local = [
        flow and flow._replace(size=min(flow.size, num_elements(var.aval)))
        for flow, var in zip(site.ins, open_jaxpr(jaxpr).invars, strict=True)
    ]
    ins = inward(site, local, jaxpr, site.wants)
    plan = plan_inside(site, jaxpr, ins, site.wants)
    return Step(
        site.eqn, site.ins, boundary(site.ins, ins), outward(site, plan.outs), "recurse", emit=_emit_shard_map, plans=(plan,)
    )  # fmt: skip


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
    "jit": plan_call,
    "pjit": plan_call,
    "closed_call": plan_call,
    "core_call": plan_call,
    "remat_opt": plan_call,
    "remat2": plan_remat,
    "checkpoint": plan_remat,
    "cond": plan_cond,
    "scan": plan_scan,
    "while": plan_while,
    "shard_map": plan_shard_map,
}
