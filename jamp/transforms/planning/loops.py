"""Loops: `scan` and `while`, around bodies that are planned for carries that come out as they went in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jamp._compat import (
    ClosedJaxpr,
    Jaxpr,
    inner_jaxprs,
    nominal_size,
    open_jaxpr,
    scan_counts,
    scope_path,
    while_parts,
)
from jamp.transforms.analysis.loops.recurrences import small_steps
from jamp.transforms.analysis.regimes import Elementwise
from jamp.transforms.planning.borders import boundary, entered, inward, plan_hoisted, plan_inside, raised, with_halves
from jamp.transforms.planning.site import Site
from jamp.transforms.program.flow import Flow, Flows, Root
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.lattice import meet, scale_of_all
from jamp.transforms.program.marks import Mark
from jamp.transforms.program.plan import Cast, Plan, Step
from jamp.transforms.program.rewrites import Scan, While
from jamp.transforms.program.want import Want, Wants


def plan_scan(site: Site) -> Step:
    """`scan`: carries are iterated to a fixpoint; scanned inputs are cast inside, constants outside."""
    params = site.eqn.params
    consts, carries = scan_counts(params)
    jaxpr, length = params["jaxpr"], max(nominal_size(params["length"]), 1)
    wants = site.wants
    per_iteration = _per_iteration(site.ins, consts + carries, length)
    trains = site.planner.takes_gradients(jaxpr)
    fixed = [*inward(site, per_iteration, jaxpr, wants)]
    if not trains:
        fixed = _rounded_anew(fixed, consts, carries)
    for index in range(consts + carries, len(fixed)):
        flow = fixed[index]
        # Stacked weights come in from outside, in half where they are stored so; half that was made here is data.
        if flow is not None and (flow.kind == Kind.LAZY or site.eqn.invars[index] not in site.made_by):
            fixed[index] = flow._replace(roots=frozenset({Root("xs", id(site.eqn), index)}))
    plan = plan_hoisted(site, _fixpoint(site, jaxpr, fixed, consts, carries, wants), range(consts), wants)
    same = _same(open_jaxpr(jaxpr), consts, carries)
    ins = raised(site, [plan], plan.outs, same)
    ins = tuple(
        before if consts <= i < consts + carries and i not in same else after
        for i, (before, after) in enumerate(zip(plan.ins, ins, strict=True))
    )
    if ins != plan.ins:
        plan = _fixpoint(site, jaxpr, [*ins], consts, carries, wants)
    plan = dataclasses.replace(plan, constants=consts, carries=carries)
    outs = [_after_loop(flow, site, 1) for flow in plan.ins[consts : consts + carries]]
    outs += [
        _stored(flow, want, site, length) for flow, want in zip(plan.outs[carries:], site.wants[carries:], strict=True)
    ]
    casts = boundary(site, site.ins, plan.ins)
    shared = tuple(i for i in range(consts) if _adds_up_in_float32(site, site.ins[i], casts[i], length))
    rewrite = Scan(
        plans=(plan,),
        shared=shared,
        states_may_be_half=site.regime.islands and not trains,
        reads=(*site.eqn.invars, *(site.eqn.invars[i] for i in shared)),
    )
    latched = site.planner.demand.carries.latches(site.eqn)
    if latched and _converges(site, plan.ins[consts : consts + carries]):
        outs[:carries] = _solutions(outs[:carries])
    wide = (site.cast(site.ins[i], site.wide) for i in shared)
    step = entered(site, (*casts, *wide), tuple(outs), rewrite)
    step = dataclasses.replace(step, ins=(*site.ins, *(site.ins[i] for i in shared)))
    return with_halves(site, step, (*plan.ins[:consts], *[None] * carries, *plan.ins[consts + carries :]))


def _same(body: Jaxpr, consts: int, carries: int) -> frozenset[int]:
    """Positions of what is the same in all iterations: constants, and carries that the body hands on as they are."""
    carried = enumerate(zip(body.invars[consts : consts + carries], body.outvars, strict=False), consts)
    return frozenset({*range(consts), *(index for index, (before, after) in carried if before is after)})


def _rounded_anew(ins: Sequence[Flow | None], consts: int, carries: int) -> list[Flow | None]:
    """States of which the first, what a loop is given once, is not marked as stored, but as repeated.

    Weights of a recurrent net would be rounded to 8 bits anew in each iteration. Not so in a loop over batches.
    """
    given = [flow and _repeated(flow) if i < consts else flow for i, flow in enumerate(ins)]
    return [flow and flow.without(Mark.STORED) if i < consts + carries else flow for i, flow in enumerate(given)]


def _repeated(flow: Flow) -> Flow:
    return flow._replace(marks=flow.marks | Mark.REPEATED) if flow.has(Mark.STORED) else flow


def _adds_up_in_float32(site: Site, flow: Flow | None, cast: Cast | None, length: int) -> bool:
    """Whether the cotangents of a constant that a loop reads in half add up in float32.

    Such are weights, and half data with many readers, as what a decoder attends to in each of its steps.
    """
    if flow is None or flow.has(Mark.TANGENT):  # JAX transposes no `stop_gradient` of a tangent.
        return False
    if cast is not None:
        return flow.kind == Kind.LAZY
    return site.regime.delicate and flow.kind == Kind.HALF and length >= site.heuristics.many_readers


def _per_iteration(ins: Flows, first: int, length: int) -> list[Flow | None]:
    """States with the scanned operands as one iteration sees them."""
    return [f and f._replace(size=max(f.size // length, 1)) if i >= first else f for i, f in enumerate(ins)]


def _stored(flow: Flow | None, want: Want, site: Site, length: int) -> Flow | None:
    """A result that a loop stacks: an island is stored in half, unless its readers want float32.

    The covariances of a filter are a smoother's: of the difference of two that are nearly the same, half left nothing.
    """
    if flow is not None and flow.kind == Kind.ISLAND and site.regime.islands:
        stays = flow.scale or want.full or want.apart or flow.has(Mark.SOLUTION | Mark.BUILT)
        flow = flow if stays else site.rounded(flow)
    return _after_loop(flow, site, length)


def _after_loop(flow: Flow | None, site: Site, length: int) -> Flow | None:
    if flow is None:
        return None
    roots = frozenset(root for root in flow.roots if root.loop != id(site.eqn))
    # What goes on to add up in a loop around is still a sum.
    kind = Kind.STAT if flow.kind == Kind.FULL and not any(root.role == "carry" for root in roots) else flow.kind
    return flow._replace(kind=kind, size=flow.size * length, roots=roots)


def _fixpoint(site: Site, jaxpr: ClosedJaxpr, ins: list[Flow | None], first: int, carries: int, wants: Wants) -> Plan:
    """Plans a loop body for carries that come out as they went in, starting from the states that they come in with."""
    where = range(first, first + carries)
    for index in where:
        flow = ins[index]
        if flow is not None:
            kind = Kind.LAZY if flow.kind == Kind.ISLAND else flow.kind
            ins[index] = flow._replace(kind=kind, roots=flow.roots | {Root("carry", id(site.eqn), index)})
    # Nor is what a backward rule computes again, step by step, maybe by their inverse.
    trains = site.planner.takes_gradients(jaxpr) or site.context.replays
    over_layers, accumulated = False, frozenset[int]()
    while True:
        plan = plan_inside(site, jaxpr, tuple(ins), wants)
        # The body multiplies its carry with scanned weights: a loop over layers.
        if not (over_layers or trains) and any(root.loop == id(site.eqn) for root in plan.layers):
            over_layers = True
            accumulated = small_steps(open_jaxpr(jaxpr), first, carries, site.heuristics.small_step)
        after = [
            _carried(ins[index], out, index, over_layers and index - first not in accumulated, want, site)
            for index, out, want in zip(where, plan.outs, wants, strict=False)
        ]
        if after == [ins[index] for index in where]:
            return plan
        for index, flow in zip(where, after, strict=True):
            ins[index] = flow


def takes_gradients(jaxpr: ClosedJaxpr) -> bool:
    """Whether an iteration differentiates: a loop over batches, whose carried parameters are no residual stream."""
    return any(
        "transpose(" in scope_path(eqn) or any(map(takes_gradients, inner_jaxprs(eqn)))
        for eqn in open_jaxpr(jaxpr).eqns
    )


def _carried(
    before: Flow | None, after: Flow | None, index: int, over_layers: bool, want: Want, site: Site
) -> Flow | None:
    """The state of a carry, from the states that it went into an iteration with and came out of it with."""
    if before is None or after is None:
        return before
    return meet(before, after, _firmness(before, after, index, over_layers, want, site), site.pair)


def _firmness(before: Flow, after: Flow, index: int, over_layers: bool, want: Want, site: Site) -> Kind:
    """How firm a loop wants a carry: what adds up is float32, the stream of data through layers is half."""
    by_flow = site.regime.elementwise in (Elementwise.BY_FLOW, Elementwise.HALF)
    if not by_flow and {before.dtype, after.dtype} > {site.wide}:  # The wider of the two.
        return Kind.STAT
    # What is limited in between may be the stream of layers, if these begin with a function of it: it is taken for half
    # first, since a product of that with scanned weights shows them.
    first = before.kind <= Kind.LAZY
    itself = [root for root in after.roots if root.origin == Root("carry", id(site.eqn), index)]
    computed = after.kind >= Kind.HALF or not by_flow
    adds_up = computed and any(root.adds_up and not (first and root.limited) for root in itself)
    is_stream = over_layers and before.kind in (Kind.LAZY, Kind.HALF)
    if after.kind == Kind.FULL or (site.regime.delicate and (want.full or (adds_up and not is_stream))):
        return Kind.FULL
    if after.kind == Kind.STAT and before.kind != Kind.HALF:
        return Kind.STAT
    # A covariance, a pose: in half it would lose in each iteration what its product was float32 for.
    if site.regime.delicate and after.kind == Kind.ISLAND and after.has(Mark.SOLUTION | Mark.BUILT):
        return Kind.FULL
    if site.regime.delicate and scale_of_all((before, after)):
        return Kind.ISLAND
    return after.kind if after.kind in (Kind.WEAK, Kind.LAZY) else Kind.HALF


def plan_while(site: Site) -> Step:
    """`while`: like `scan`, without scanned operands."""
    parts = while_parts(site.eqn.params)
    first = parts.first_carry
    carries = len(site.ins) - first
    wants = site.wants
    body_ins = [*inward(site, site.ins[parts.cond_consts :], parts.body, wants)]
    if not site.planner.takes_gradients(parts.body):
        body_ins = _rounded_anew(body_ins, parts.body_consts, carries)
    body = _fixpoint(site, parts.body, body_ins, parts.body_consts, carries, wants)
    body = plan_hoisted(site, body, range(parts.body_consts), wants)
    carried = body.ins[parts.body_consts :]
    decides = (Want.EXACT if site.regime.delicate else Want.HALF,)
    cond_ins = inward(site, (*site.ins[: parts.cond_consts], *carried), parts.cond, decides)
    cond = plan_inside(site, parts.cond, (*cond_ins[: parts.cond_consts], *carried), decides)
    outs = [_after_loop(flow, site, 1) for flow in carried]
    casts = boundary(site, site.ins, (*cond_ins[: parts.cond_consts], *body.ins))
    if site.regime.delicate and _converges(site, carried):
        outs = _solutions(outs)
    return entered(site, casts, tuple(outs), While(plans=(cond, body)))


def _converges(site: Site, carried: Flows) -> bool:
    """Whether a loop ends when floating carries say so."""
    return any(want.decides and flow is not None for want, flow in zip(site.wants, carried, strict=False))


def _solutions(outs: list[Flow | None]) -> list[Flow | None]:
    """What a loop to convergence returns: what adds up beside what decides is as much a solution."""
    return [flow and flow._replace(marks=flow.marks | Mark.SOLUTION) for flow in outs]
