"""The arguments of a program that its sites depend on, so that what came in is not blamed on an operation."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from functools import reduce

from jamp._compat import (
    ClosedJaxpr,
    Eqn,
    Jaxpr,
    Literal,
    Var,
    jaxpr_consts,
    open_jaxpr,
    scan_counts,
    while_parts,
)
from jamp.inspect._operations import Place
from jamp.inspect.numerics.sites import Chosen, Site, entered, is_floating, makes, sites

Masks = list[int]  # A bit for each floating argument.


def sites_of_program(jaxpr: ClosedJaxpr, chosen: Chosen) -> tuple[Site, ...]:
    """The sites of a whole program, each with the floating arguments that it depends on."""
    bits = (1 << number for number in range(len(open_jaxpr(jaxpr).invars)))
    given = [next(bits) if is_floating(var) else 0 for var in open_jaxpr(jaxpr).invars]
    _, masks = _walk(jaxpr, given, chosen, Place())
    return tuple(
        dataclasses.replace(site, arguments=mask) for site, mask in zip(sites(jaxpr, chosen), masks, strict=True)
    )


def _walk(jaxpr: Jaxpr | ClosedJaxpr, given: Sequence[int], chosen: Chosen, outer: Place) -> tuple[Masks, Masks]:
    """What the results depend on, and what the sites do, in the order of `sites`."""
    inner, found = open_jaxpr(jaxpr), []
    masks: dict[Var, int] = dict(zip([*inner.invars, *inner.constvars], [*given, *_none(jaxpr)], strict=True))
    for eqn in inner.eqns:
        place = outer.enter(eqn)
        taken = [0 if isinstance(atom, Literal) else masks[atom] for atom in eqn.invars]
        if bodies := entered(eqn):
            outs, within = _inside(eqn, bodies, taken, chosen, place)
            found += within
        else:
            together = reduce(operator.or_, taken, 0)
            outs = [together] * len(eqn.outvars)
            found += [together] if makes(eqn) and chosen(place) else []
        masks |= zip(eqn.outvars, outs, strict=True)
    return [0 if isinstance(atom, Literal) else masks[atom] for atom in inner.outvars], found


def _inside(eqn: Eqn, bodies: Sequence[ClosedJaxpr], taken: Masks, chosen: Chosen, place: Place) -> tuple[Masks, Masks]:
    name = eqn.primitive.name
    if name == "cond":
        walked = [_walk(body, taken[1:], chosen, place) for body in bodies]
        outs = [reduce(operator.or_, masks) for masks in zip(*(outs for outs, _ in walked), strict=True)]
        return outs, [mask for _, found in walked for mask in found]
    if name == "scan":
        first, carries = scan_counts(eqn.params)
    elif name == "while":
        parts = while_parts(eqn.params)
        taken, first = taken[parts.cond_consts :], parts.first_carry - parts.cond_consts
        carries = len(taken) - first
    else:
        return _walk(bodies[0], taken, chosen, place)
    while True:  # Until what a carry depends on grows no more.
        outs, found = _walk(bodies[0], taken, chosen, place)
        grown = [before | after for before, after in zip(taken[first : first + carries], outs, strict=False)]
        if grown == taken[first : first + carries]:
            return outs, found
        taken = [*taken[:first], *grown, *taken[first + carries :]]


def _none(jaxpr: Jaxpr | ClosedJaxpr) -> Masks:
    return [0] * len(jaxpr_consts(jaxpr))
