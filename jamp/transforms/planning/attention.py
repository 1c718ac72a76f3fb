"""What becomes of an attention that was found: one function of queries, keys and values in half."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from jamp._compat import Var
from jamp._primitives import Trait, has
from jamp.transforms.analysis.patterns import Match
from jamp.transforms.analysis.regimes import Products
from jamp.transforms.planning.float32_products import is_computed
from jamp.transforms.planning.site import Site
from jamp.transforms.program.attention import refused_everywhere
from jamp.transforms.program.flow import Flow
from jamp.transforms.program.marks import Mark
from jamp.transforms.program.plan import Plan, Step
from jamp.transforms.program.rewrites import FusedAttention


class Declined(NamedTuple):
    """Why an equation where something was found is planned like any other.

    Attributes:
        reason: The reason, for the report.
    """

    reason: str


def plan_attention(site: Site, match: Match) -> Step | Declined | None:
    """An attention whose products are both in half, as one step that reads its operands.

    The equations that it consists of are planned once more, on their own: that plan is what runs where no kernel does.
    """
    if site.context.in_attention or match.attention is None:
        return None
    found = match.attention
    if found.attention is None or found.written is None:
        return Declined(found.reason)
    if site.regime.products is Products.TRACED:
        return Declined("its products are float32")
    reads = found.written.invars
    states = tuple(site.states[var] for var in reads)
    if any(flow is not None and flow.has(Mark.TANGENT) for flow in states):
        return Declined("it is inside of a derivative rule")
    attention = dataclasses.replace(found.attention, half=site.half)
    main = {operand.place: operand for operand in (attention.query, attention.key, attention.value)}
    if any(states[index] is None for index in main):
        return Declined("its operands are neither float32 nor half")
    if refused := refused_everywhere(attention):
        return Declined(refused)
    pairs = enumerate(zip(reads, states, strict=True))
    ins = tuple(
        _in_half(site, var, flow, attention.is_repeated(main[index])) if index in main else flow
        for index, (var, flow) in pairs
    )
    plan = site.planner.plan(found.written, ins, site.wants, site.around._replace(in_attention=True))
    if not all(_takes_half(site, step) for step in _products(plan)):
        return Declined("its products are float32")
    casts = tuple(
        site.cast(before, after and after.dtype) for before, after in zip(states, ins, strict=True)
    )  # fmt: skip
    rewrite = FusedAttention(plans=(plan,), reads=reads, attention=attention)
    return Step(site.eqn, states, casts, plan.outs, "attention", rewrite)


def _in_half(site: Site, var: Var, flow: Flow | None, is_repeated: bool) -> Flow | None:
    """A state as a product would read it; arguments stay that, for the scores of arguments are float32.

    Arguments that are repeated, such as keys that all heads or all examples share, are rounded behind that: their many
    cotangents add up in float32.
    """
    if flow is None or site.pair.is_narrow(flow.dtype):
        return flow
    computed = is_computed(site, var, flow)
    if is_repeated and not computed:
        return flow
    half = site.rounded(flow)
    return half if computed else half._replace(kind=flow.kind)


def _products(plan: Plan) -> Iterator[Step]:
    """Products that add up: others, which weigh heads, say, may be in any precision."""
    for step in plan.steps:
        if has(step.eqn, Trait.MATRIX) and step.eqn.params["dimension_numbers"][0][0]:
            yield step
        for inner in step.plans:
            yield from _products(inner)


def _takes_half(site: Site, step: Step) -> bool:
    dtypes = (cast.dtype if cast else flow and flow.dtype for cast, flow in zip(step.casts, step.ins, strict=True))
    return all(dtype is not None and site.pair.is_narrow(dtype) for dtype in dtypes)
