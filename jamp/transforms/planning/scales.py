"""What numbers beyond the half range do to data: how many powers of two away from its own size they bring it.

A number that half holds changes no scale, so that layers which divide by the root of their width never add up to one.
What a primitive makes of scaled data is what it makes of a number as large: `tanh` of 2**20 is 1, and ends the scale;
`rsqrt` of 2**40 is 2**-20, and multiplied with data of 2**20 gives 1. Of several things that are added up the largest
counts, and of several that are put together the one that is farthest from what half holds.
"""

from __future__ import annotations

import dataclasses

from jamp._compat import Literal
from jamp._primitives import PRODUCTS, Rule, Trait, rule_of
from jamp.transforms.analysis.flat import computed
from jamp.transforms.planning.site import Site
from jamp.transforms.program.flow import Flow, Kind, Mark, scale_of_all
from jamp.transforms.program.plan import Step
from jamp.transforms.program.scale import exponent

_HANDS_ON = Trait.SPREADS | Trait.MOVES | Trait.VIEW | Trait.REDUCES | Trait.LINEAR


def with_scale(site: Site, step: Step) -> Step:
    """The step with the scale of its results, which is that of its operands where these are moved."""
    if not site.is_scaled or rule_of(site.eqn) is Rule.FOLLOW:
        return step
    scale = _scale(site)
    out = tuple(flow and flow._replace(scale=0 if flow.kind == Kind.HALF else scale) for flow in step.out)
    return dataclasses.replace(step, out=out)


def _scale(site: Site) -> int:
    flows = [flow for flow in site.ins if flow is not None]
    if site.traits & PRODUCTS:
        return _held(site, sum(flow.scale for flow in flows))
    if site.traits & Trait.ADDS:  # Numbers that are added are masks, or an epsilon.
        return max(min(flow.scale, 0) if flow.kind == Kind.WEAK else flow.scale for flow in flows)
    if site.traits & (Trait.MULTIPLIES | Trait.DIVIDES) and len(flows) == 2:
        return _held(site, _multiplied(site, flows))
    found = _computed(site)
    if found is None:
        return scale_of_all(flows) if site.traits & _HANDS_ON else 0
    return exponent(found, site.pair)


def _held(site: Site, scale: int) -> int:
    """A scale; zero if half holds numbers that large."""
    return exponent(2.0**scale, site.pair)


def _multiplied(site: Site, flows: list[Flow]) -> int:
    """Scale of a product or a quotient.

    A sum that a number makes smaller is a mean, as large as its terms. An integer that a number makes larger is a mask:
    zero, or as far off as can be.
    """
    signs = (1, -1 if site.traits & Trait.DIVIDES else 1)
    terms = [(flow, sign * flow.scale) for flow, sign in zip(flows, signs, strict=True)]
    data = [flow for flow in flows if flow.kind != Kind.WEAK]
    by_numbers = sum(scale for flow, scale in terms if flow.kind == Kind.WEAK)
    is_mean = by_numbers < 0 and all(flow.kind >= Kind.STAT or flow.size == 1 for flow in data)
    is_mask = by_numbers > 0 and not any(flow.has(Mark.FRACTION) for flow in data)
    if data and (is_mean or is_mask):
        by_numbers = 0
    return by_numbers + sum(scale for flow, scale in terms if flow.kind != Kind.WEAK)


def _computed(site: Site) -> float | None:
    """The magnitude of what arithmetic makes of numbers as large as the operands; None for what is no arithmetic."""
    operands = (
        float(atom.val) if isinstance(atom, Literal) else 2.0 ** (flow.scale if flow else 0)
        for atom, flow in zip(site.eqn.invars, site.ins, strict=True)
    )
    found = computed(site.eqn, operands)
    return abs(found) if found else None
