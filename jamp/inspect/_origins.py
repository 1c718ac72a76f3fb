"""Follows values that are not finite from where they are made, or come in, to the results of a plan."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jamp._compat import ClosedJaxpr, Literal, bind, equation_context, open_jaxpr, scan_counts
from jamp.inspect._as_traced import as_traced, inner_plans
from jamp.inspect._nonfinite import NonFinite, nonfinite, severity
from jamp.inspect._operations import CALLS, Place, operation_name
from jamp.inspect.numerics.search import Search
from jamp.inspect.numerics.sites import choosing, sites, to_blame
from jamp.transforms.emission.control_flow import select_going
from jamp.transforms.emission.execute import execute
from jamp.transforms.emission.rewrites import new_run
from jamp.transforms.program.plan import Plan, Step, loop_dtypes


class Origin(NamedTuple):
    """Where the values of a variable that are not finite come from.

    Attributes:
        found: The same for the user.
        order: When they were made, among others of the same plan.
        came_in: They are infinities that came in from outside. Those may be meant, as in a mask, and are to blame for
            nothing until an operation makes NaN of them.
    """

    found: NonFinite
    order: int
    came_in: bool = False


Origins = Sequence[Origin | None]


def of_inputs(names: Iterable[str], values: Iterable[Any]) -> list[Origin | None]:
    """Origins of values that come in from outside."""
    return [
        Origin(nonfinite(name, [], [value]), order, severity([value]) == 1) if severity([value]) else None
        for order, (name, value) in enumerate(zip(names, values, strict=True))
    ]


def first_of(origins: Origins) -> Origin | None:
    """The first that was made; if there is none, the first that came in."""
    return min(filter(None, origins), key=lambda origin: (origin.came_in, origin.order), default=None)


def search(
    plan: Plan, args: Sequence[Any], given: Origins, place: Place, iterations: tuple[int, ...], dtypes: Any = None
) -> tuple[list[Any], Origins]:
    """Runs a plan.

    Args:
        plan: The plan.
        args: Its arguments.
        given: Where what is not finite in the arguments comes from.
        place: Where the plan is.
        iterations: Iterations of the loops around it.
        dtypes: Dtypes to give the results in.

    Returns:
        The results, and for each of them where its infinities and NaNs come from. None where all is finite, or where
        the program itself writes the infinities.
    """
    inner = open_jaxpr(plan.jaxpr)
    origins = dict(zip(inner.invars, given, strict=True))
    # A mask that the function closes over is the program's own: it comes after whatever else came in.
    constants = of_inputs(["constant"] * len(plan.consts), plan.consts)
    origins |= {v: o and o._replace(order=sys.maxsize) for v, o in zip(inner.constvars, constants, strict=True)}

    def of(atom: Any) -> Origin | None:
        return None if isinstance(atom, Literal) else origins.get(atom)

    def probe(step: Step, carried: list[Any], operands: list[Any], results: list[Any]) -> None:
        if not severity(results):
            return
        origin = first_of(known := [of(atom) for atom in step.operands])
        if origin is None or origin.came_in:
            made = _made_here(step, carried, operands, results, known, place.enter(step.eqn), iterations)
            origin = Origin(made, order=len(origins)) if made else origin
        for var, result in zip(step.eqn.outvars, results, strict=True):
            if severity([result]):
                origins[var] = origin

    outs = execute(plan, args, new_run(probe=probe), dtypes)
    return outs, [of(atom) for atom in inner.outvars]


def _made_here(
    step: Step, carried: list[Any], operands: list[Any], results: list[Any], known: Origins, place: Place,
    iterations: tuple[int, ...],
) -> NonFinite | None:  # fmt: skip
    """Where inside a step results that are not finite were made; None if they are what came in with the operands."""
    name = step.eqn.primitive.name
    for index, (before, after) in enumerate(zip(carried, operands, strict=True)):
        if severity([after]) > severity([before]):
            return nonfinite(name, [before], [after], place, iterations, cast=index)
    inside, name = _descend(step, operands, known, place, iterations), operation_name(step.eqn)
    if inside is not None or severity(results) <= severity(operands):
        return inside
    made = nonfinite(name, operands, results, place, iterations)
    infinity = first_of(known)
    return dataclasses.replace(infinity.found, nan_made_by=made) if infinity else made


def _descend(
    step: Step, operands: list[Any], known: Origins, place: Place, iterations: tuple[int, ...]
) -> NonFinite | None:
    """Looks for the origin in the jaxprs inside of a step."""
    name, plans = step.eqn.primitive.name, inner_plans(step)
    if name in CALLS and len(plans) == 1:
        return _made_among(search(plans[0], operands, known, place, iterations)[1])
    if name == "cond":
        return _made_among(search(plans[int(operands[0])], operands[1:], known[1:], place, iterations)[1])
    if name == "scan":
        return _search_scan(step, plans[0], operands, known, place, iterations)
    if name == "while":
        return _search_while(step, operands, known, place, iterations)
    return _search_devices(step, operands, place, iterations) if name == "shard_map" else None


def _made_among(origins: Origins) -> NonFinite | None:
    origin = first_of(origins)
    return None if origin is None or origin.came_in else origin.found


def _search_scan(
    step: Step, plan: Plan, operands: list[Any], known: Origins, place: Place, iterations: tuple[int, ...]
) -> NonFinite | None:
    consts, carries = scan_counts(step.eqn.params)
    first, count = consts + carries, len(step.eqn.invars)  # A step may read more than its equation; the body does not.
    carry, origins = operands[consts:first], known[consts:first]
    length = step.eqn.params["length"]
    for i in reversed(range(length)) if step.eqn.params["reverse"] else range(length):
        args = [*operands[:consts], *carry, *(x[i] for x in operands[first:count])]
        given = [*known[:consts], *origins, *known[first:count]]
        outs, found = search(plan, args, given, place, (*iterations, i), loop_dtypes(step))
        if made := _made_among(found):
            return made
        carry, origins = outs[:carries], found[:carries]
    return None


def _search_while(
    step: Step, operands: list[Any], known: Origins, place: Place, iterations: tuple[int, ...]
) -> NonFinite | None:
    params = step.eqn.params
    for_cond, first = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    cond, body = step.plans or (as_traced(params["cond_jaxpr"]), as_traced(params["body_jaxpr"]))
    carry, origins, i = operands[first:], known[first:], 0
    while np.any(going := execute(cond, [*operands[:for_cond], *carry], new_run())[0]):
        args, given = [*operands[for_cond:first], *carry], [*known[for_cond:first], *origins]
        after, origins = search(body, args, given, place, (*iterations, i), loop_dtypes(step))
        carry = after if going.ndim == 0 else [select_going(going, *pair) for pair in zip(after, carry, strict=True)]
        if made := _made_among(origins):
            return made
        i += 1
    return None


def _search_devices(step: Step, operands: list[Any], place: Place, iterations: tuple[int, ...]) -> NonFinite | None:
    """Looks into a `shard_map` on all devices at once: what is inside cannot run operation by operation."""
    run = new_run()
    emit = run.emit if step.rewrite is not None else lambda step, args, run: bind(step.eqn, args)
    with equation_context(step.eqn):
        program = jax.make_jaxpr(lambda *args: emit(step, args, run))(*operands)
    found = search_compiled(program, operands)
    if found is None:
        return None
    scope = "/".join(filter(None, [place.scope, found.scope.removeprefix(place.scope).strip("/")]))
    return dataclasses.replace(found, scope=scope, iterations=(*iterations, *found.iterations))


def search_compiled(program: ClosedJaxpr, args: Sequence[Any]) -> NonFinite | None:
    """The first operation of a program that makes an infinity or a NaN, whatever becomes of it."""
    everywhere = choosing(["*"])
    listed = list(sites(program, everywhere))
    found = jax.jit(lambda *args: Search(everywhere)(program, args)[1])(*args)
    bad = to_blame(listed, found)
    if not bad:
        return None
    site, first = listed[bad[0]], int(found.first[bad[0]])
    # Those of all iterations were counted.
    infinities, nans = (min(int(count), site.size) for count in found.counts[bad[0]])
    return NonFinite(
        site.operation, None, site.scope, site.line, site.function, (first,) if first >= 0 else (), site.dtype,
        infinities, nans, site.size, None,
    )  # fmt: skip
