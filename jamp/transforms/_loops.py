"""Loops: `scan` and `while`, rebuilt around bodies that are planned for carries that come out as they went in."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jamp._compat import inner_jaxprs, nominal_size, open_jaxpr, scan_counts, scope_path
from jamp.transforms._control_flow import boundary, entered, inward, plan_hoisted, plan_inside
from jamp.transforms._demand import Want, Wants
from jamp.transforms._emit import rounded_outside
from jamp.transforms._execute import Run, execute
from jamp.transforms._flow import FLOAT32, Flow, Kind
from jamp.transforms._states import half_states
from jamp.transforms._steps import Flows, Plan, Site, Step


def plan_scan(site: Site) -> Step:
    """`scan`: carries are iterated to a fixpoint; scanned inputs are cast inside, constants outside."""
    params = site.eqn.params
    consts, carries = scan_counts(params)
    jaxpr, length = params["jaxpr"], max(nominal_size(params["length"]), 1)
    wants = site.wants
    fixed = list(inward(site, _per_iteration(site.ins, consts + carries, length), jaxpr, wants))
    for index in range(consts + carries, len(fixed)):
        flow = fixed[index]
        # Stacked weights come in from outside, in half where they are stored so; half that was made here is data.
        if flow is not None and (flow.kind == Kind.LAZY or site.eqn.invars[index] not in site.made_by):
            fixed[index] = flow._replace(roots=frozenset({("xs", id(site.eqn), index)}))
    plan = _fixpoint(site, jaxpr, fixed, consts, carries, wants)
    plan = dataclasses.replace(plan_hoisted(site, plan, range(consts), wants), constants=consts, carries=carries)
    states = half_states(plan, site.planner.half) if site.mode == "O2" else frozenset()
    if states and not _takes_gradients(jaxpr):
        plan = dataclasses.replace(plan, half_states=states)
    outs = [_after_loop(flow, site, 1) for flow in plan.ins[consts : consts + carries]]
    outs += [
        _stored(flow, want, site, length) for flow, want in zip(plan.outs[carries:], site.wants[carries:], strict=True)
    ]
    step = entered(site, boundary(site.ins, plan.ins), tuple(outs), None, plan)
    shared = [i for i in range(consts) if step.casts[i] is not None and _is_weight(site.ins[i])]
    return dataclasses.replace(
        step,
        emit=functools.partial(_emit_scan, shared),
        ins=(*site.ins, *(site.ins[i] for i in shared)),
        casts=(*step.casts, *(None for _ in shared)),
        atoms=(*site.eqn.invars, *(site.eqn.invars[i] for i in shared)),
    )


def _is_weight(flow: Flow | None) -> bool:
    return flow is not None and flow.kind == Kind.LAZY and not flow.tangent  # JAX transposes no `stop_gradient`.


def _per_iteration(ins: Flows, first: int, length: int) -> list[Flow | None]:
    """States with the scanned operands as one iteration sees them."""
    return [f and f._replace(size=max(f.size // length, 1)) if i >= first else f for i, f in enumerate(ins)]


def _stored(flow: Flow | None, want: Want, site: Site, length: int) -> Flow | None:
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
    return flow._replace(kind=kind, size=flow.size * length, roots=roots)


def _fixpoint(site: Site, jaxpr: Any, ins: list[Flow | None], first: int, carries: int, wants: Wants) -> Plan:
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
        # The body multiplies its carry with scanned weights: a loop over layers.
        over_layers = not trains and any(root[1] == id(site.eqn) for root in site.planner.layer_scans)
        after = [
            _inheriting(_meet(ins[index], out, index, over_layers, want, site), out)
            for index, out, want in zip(where, plan.outs, wants, strict=False)
        ]
        if after == [ins[index] for index in where]:
            return plan
        for index, flow in zip(where, after, strict=True):
            ins[index] = flow


def _inheriting(carry: Flow | None, after: Flow | None) -> Flow | None:
    """A carry is before an iteration what it is after one: zeros to which tangents are added are a tangent too."""
    if carry is None or after is None:
        return carry
    return carry._replace(tangent=carry.tangent or after.tangent, given=carry.given or after.given)


def _takes_gradients(jaxpr: Any) -> bool:
    """Whether an iteration differentiates: a loop over batches, whose carried parameters are no residual stream."""
    return any(
        "transpose(" in scope_path(eqn) or any(map(_takes_gradients, inner_jaxprs(eqn)))
        for eqn in open_jaxpr(jaxpr).eqns
    )


def _meet(
    before: Flow | None, after: Flow | None, index: int, over_layers: bool, want: Want, site: Site
) -> Flow | None:
    """The state of a carry, from the state that it went into an iteration with and the one that it came out with.

    Monotone in the order weak, lazy, half, firm, so that the fixpoint exists.
    """
    if before is None or after is None or before.kind >= Kind.STAT:
        return before
    if site.mode not in ("O2", "O3") and {before.dtype, after.dtype} > {FLOAT32}:  # The wider of the two.
        return before._replace(kind=Kind.STAT, dtype=FLOAT32)
    adds_up = ("carry", id(site.eqn), index) in after.roots and after.kind >= Kind.HALF
    is_stream = over_layers and before.kind in (Kind.LAZY, Kind.HALF)
    if after.kind == Kind.FULL or (site.mode != "O3" and (want or (adds_up and not is_stream))):
        return before._replace(kind=Kind.FULL, dtype=FLOAT32)
    if after.kind == Kind.STAT and before.kind != Kind.HALF:
        return before._replace(kind=Kind.STAT, dtype=FLOAT32)
    if after.kind in (Kind.WEAK, Kind.LAZY):
        return before._replace(kind=max(before.kind, after.kind))
    return before._replace(kind=Kind.HALF, dtype=site.planner.half)


def _emit_scan(shared: Sequence[int], step: Step, operands: Sequence[Any], run: Run) -> list[Any]:
    """Emits a scan. `shared` are constants cast to half outside; what they are cast of follows the operands."""
    (plan,), params = step.plans, step.eqn.params
    consts, carries = scan_counts(params)
    count = len(step.eqn.invars)
    dtypes = [flow and flow.dtype for flow in step.out]
    fixed, init, xs = operands[:consts], operands[consts : consts + carries], operands[consts + carries : count]
    casts = [(i, x, lax.stop_gradient(fixed[i])) for i, x in zip(shared, operands[count:], strict=True)]
    inner = run._replace(in_loop=True)

    def body(carry: Any, x: Any) -> Any:
        constants = list(fixed)
        for index, original, half in casts:
            constants[index] = rounded_outside(original, half)
        outs = execute(plan, [*constants, *carry, *x], inner, dtypes)
        return outs[:carries], outs[carries:]

    # The length of an exported program may be an unknown, which `lax.scan` takes from its operands alone.
    options = {name: params[name] for name in ("reverse", "unroll")} | ({} if xs else {"length": params["length"]})
    final, ys = lax.scan(body, [*map(_as_array, init)], list(xs), **options)
    return [*final, *ys]


def _as_array(value: Any) -> Any:
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def plan_while(site: Site) -> Step:
    """`while`: like `scan`, without scanned operands; never over layers."""
    params = site.eqn.params
    for_cond, for_body = params["cond_nconsts"], params["body_nconsts"]
    first = for_cond + for_body
    carries = len(site.ins) - first
    wants = site.wants
    body_ins = inward(site, site.ins[for_cond:], params["body_jaxpr"], wants)
    body = _fixpoint(site, params["body_jaxpr"], list(body_ins), for_body, carries, wants)
    body = plan_hoisted(site, body, range(for_body), wants)
    cond_ins = inward(site, (*site.ins[:for_cond], *body.ins[for_body:]), params["cond_jaxpr"], (Want.HALF,))
    cond = plan_inside(site, params["cond_jaxpr"], (*cond_ins[:for_cond], *body.ins[for_body:]), (Want.HALF,))
    outs = tuple(_after_loop(flow, site, 1) for flow in body.ins[for_body:])
    casts = boundary(site.ins, (*cond_ins[:for_cond], *body.ins))
    return entered(site, casts, outs, _emit_while, cond, body)


def _emit_while(step: Step, operands: Sequence[Any], run: Run) -> list[Any]:
    (cond, body), params = step.plans, step.eqn.params
    for_cond, first = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    inner = run._replace(keep_half=False, in_loop=True)  # Reverse mode does not pass through a while loop.
    dtypes = [flow and flow.dtype for flow in step.out]

    def goes_on(carry: Any) -> Any:
        return execute(cond, [*operands[:for_cond], *carry], inner)[0]

    def iteration(carry: Any) -> Any:
        after = execute(body, [*operands[for_cond:first], *carry], inner, dtypes)
        if not batched:
            return after
        going = goes_on(carry)
        return [select_going(going, new, old) for new, old in zip(after, carry, strict=True)]

    # Under vmap the condition is one for each member of the batch. The loop goes on while one of them does, and what
    # has come to its end stays as it is: the meaning that JAX gives to such an equation, which `while_loop` refuses.
    batched = open_jaxpr(cond.jaxpr).outvars[0].aval.shape != ()
    final = lax.while_loop(
        lambda carry: jnp.any(goes_on(carry)) if batched else goes_on(carry),
        iteration,
        [*map(_as_array, operands[first:])],
    )
    return list(final)


def select_going(going: Any, new: Any, old: Any) -> Any:
    """The new value for the members of a batch whose loop goes on, the old one for the others."""
    return lax.select(lax.broadcast_in_dim(going, new.shape, range(going.ndim)), new, old)


PLANNERS = {"scan": plan_scan, "while": plan_while}
