"""Weights that go to other devices on their way to products in half: they are cast in front of that, and not behind.

`lax.all_gather(w, "fsdp") @ x` sends half numbers then, and what says that `w` is the same on all devices is said of
half ones, so that its gradients are summed over the devices in half: as in code that casts its weights first. Products
in 8 bits round what they are given, so that half does for them on the way.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

from jamp._compat import Atom, Literal, open_jaxpr
from jamp._primitives import Rule, Trait, has, rule_of, traits_of
from jamp.transforms.program.flow import Flow
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.plan import Cast, Casts, Plan, Step
from jamp.transforms.program.rewrites import Float8Product


def with_half_traffic(plan: Plan) -> Plan:
    """The plan, with casts of what goes to other devices in front of that, where all readers have the same cast."""
    if plan.setting.wide_gradients or not any(_goes(step) for step in plan.steps):
        return plan
    wanted = _wanted(plan)
    moved: dict[Atom, Cast] = {}
    steps = []
    for step in plan.steps:
        cast = wanted.get(step.eqn.outvars[0]) if step.eqn.outvars else None
        if cast is not None and (_goes(step) or step.eqn.invars[0] in moved):
            step = _in_half(step, cast, moved)
        elif any(atom in moved for atom in step.operands if not isinstance(atom, Literal)):
            step = _reading(step, moved)
        steps.append(step)
    return dataclasses.replace(plan, steps=tuple(steps)) if moved else plan


def _goes(step: Step) -> bool:
    traits = traits_of(step.eqn)
    return bool(traits & Trait.VARIES or (traits & Trait.TRAFFIC and _hands_on(step)))


def _hands_on(step: Step) -> bool:
    """Whether a step moves one float32 argument, and nothing else."""
    flow = step.ins[0] if len(step.eqn.invars) == len(step.eqn.outvars) == 1 else None
    moves = rule_of(step.eqn) is Rule.FOLLOW and has(step.eqn, Trait.MOVES) and step.rewrite is None
    return moves and flow is not None and flow.kind == Kind.LAZY and not any(step.casts)


def _wanted(plan: Plan) -> Mapping[Atom, Cast]:
    """By value that a step hands on, what all of its readers cast it to, those of what they hand on included."""
    casts: dict[Atom, set[Cast | None]] = defaultdict(set)
    for atom in open_jaxpr(plan.jaxpr).outvars:
        if not isinstance(atom, Literal):
            casts[atom].add(None)
    wanted: dict[Atom, Cast] = {}
    for step in reversed(plan.steps):
        results = casts[step.eqn.outvars[0]] if step.eqn.outvars else set()
        cast = next(iter(results), None) if len(results) == 1 and _hands_on(step) else None
        if cast is not None and plan.pair.is_narrow(cast.dtype):
            wanted[step.eqn.outvars[0]] = cast
        for atom, to in zip(step.operands, _read_as(step, plan), strict=True):
            if not isinstance(atom, Literal):
                casts[atom].add(wanted.get(step.eqn.outvars[0]) if _hands_on(step) else to)
    return wanted


def _read_as(step: Step, plan: Plan) -> Casts:
    """What a step casts its operands to; or would, for a product in 8 bits, which rounds what it is given itself."""
    if not isinstance(step.rewrite, Float8Product):
        return step.casts
    half, wide = Cast(step.rewrite.half), plan.pair.wide
    return tuple(
        half if to is None and flow is not None and flow.dtype == wide else to
        for to, flow in zip(step.casts, step.ins, strict=True)
    )


def _in_half(step: Step, cast: Cast, moved: dict[Atom, Cast]) -> Step:
    before = step.eqn.invars[0] in moved
    moved[step.eqn.outvars[0]] = cast
    ins = tuple(_narrow(flow, cast) for flow in step.ins) if before else step.ins
    out = tuple(_narrow(flow, cast) for flow in step.out)
    return dataclasses.replace(step, ins=ins, casts=(None if before else cast,), out=out)


def _reading(step: Step, moved: Mapping[Atom, Cast]) -> Step:
    cast = [None if isinstance(atom, Literal) else moved.get(atom) for atom in step.operands]
    return dataclasses.replace(
        step,
        ins=tuple(_narrow(flow, to) if to else flow for flow, to in zip(step.ins, cast, strict=True)),
        casts=tuple(None if to else own for own, to in zip(step.casts, cast, strict=True)),
    )


def _narrow(flow: Flow | None, cast: Cast) -> Flow | None:
    return flow and flow._replace(dtype=cast.dtype, kind=Kind.HALF)
