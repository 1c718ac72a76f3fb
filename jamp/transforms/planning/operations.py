"""How rules move precision that say one dtype for all operands: one planner a rule, from operand states to a step."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jamp._compat import Literal, nominal_size
from jamp._primitives import Trait, has
from jamp.transforms.analysis.regimes import Functions
from jamp.transforms.planning.site import Site
from jamp.transforms.program.flow import Flow, num_elements
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import NO_MARKS, Mark, transmit
from jamp.transforms.program.plan import Cast, Step
from jamp.transforms.program.rewrites import Forward, Scatter


def plan_untouched(site: Site) -> Step:
    """Integers, booleans, keys and complex alone: nothing to decide."""
    return Step(site.eqn, site.ins, (None,) * len(site.ins), (None,) * len(site.eqn.outvars), "not floating")


def plan_traced(site: Site, rule: str = "as traced", kind: Kind = Kind.LAZY) -> Step:
    """Every operand back at the dtype that it was traced with."""
    casts = tuple(
        site.cast(flow, var.aval.dtype) if flow else None for flow, var in zip(site.ins, site.eqn.invars, strict=True)
    )
    if any(flow is not None and flow.kind in (Kind.HALF, Kind.ISLAND) for flow in site.ins):
        kind = Kind.ISLAND
    elif not site.strong and all(site.ins):
        kind = Kind.WEAK
    out = []
    for var in site.eqn.outvars:
        flow = site.result(var.aval, var.aval.dtype, kind) if site.pair.flows(var.aval) else None
        narrow = flow is not None and site.pair.is_narrow(flow.dtype)
        kind_of = Kind.HALF if narrow else kind
        out.append(flow and flow._replace(kind=kind_of, size=num_elements(var.aval), marks=flow.marks | _born(site)))
    return Step(site.eqn, site.ins, casts, tuple(out), rule)


def _born(site: Site) -> Mark:
    """Marks of what is made of no floating values: of random bits, or of a counter beyond what half holds."""
    if has(site.eqn, Trait.REINTERPRETS):
        return Mark.SAMPLED
    (aval, *_) = (var.aval for var in site.eqn.outvars)
    counts = not site.eqn.invars and any(
        nominal_size(size) > 2 / float(jnp.finfo(site.pair.narrow).eps) for size in aval.shape
    )
    return Mark.ROUNDS if counts else NO_MARKS  # 257 is 256 in bfloat16.


def plan_opaque(site: Site) -> Step:
    """A primitive that the table does not know: never a crash, never a wrong dtype.

    What it returns may come from anywhere: a mutable array holds what a loop wrote into it, a callback reads a file. It
    may be an operand as it was, too: equinox's loops select in that way what they carry.
    """
    step = plan_traced(site, "opaque")
    out = []
    for var, flow in zip(site.eqn.outvars, step.out, strict=True):
        operands = zip(site.eqn.invars, site.ins, strict=True)
        alike = [it for atom, it in operands if it is not None and atom.aval.shape == getattr(var.aval, "shape", None)]
        roots = frozenset().union(*(it.roots for it in alike))
        adds_up = any(it.kind == Kind.FULL and it.roots for it in alike)
        found = flow and flow._replace(marks=flow.marks | Mark.GIVEN | Mark.TRAINED, roots=roots)
        out.append(found._replace(kind=Kind.FULL) if found and adds_up and found.kind != Kind.HALF else found)
    return dataclasses.replace(step, out=tuple(out))


def plan_known_traced(site: Site) -> Step:
    """Primitives that make or inspect values at a dtype the user chose; conversions among them."""
    return plan_convert(site) if has(site.eqn, Trait.CONVERTS) else plan_traced(site)


def plan_convert(site: Site) -> Step:
    """A conversion that the user wrote, or that promotion wrote for them, is kept; one that changes nothing goes."""
    (var,), (flow,) = site.eqn.outvars, site.ins
    target = var.aval.dtype
    if flow is None or not site.pair.flows(var.aval):
        return Step(site.eqn, site.ins, (None,), (_converted(site, Kind.LAZY),), "as traced")
    if target == site.wide and not site.pair.is_narrow(site.eqn.invars[0].aval.dtype):  # Only the weak type changes.
        return Step(site.eqn, site.ins, (None,), (flow,), "follow", Forward())
    out = _converted(site, Kind.ISLAND if flow.kind == Kind.HALF else max(flow.kind, Kind.LAZY))
    out = out and out._replace(size=flow.size, roots=flow.roots)
    # The user's cast overflows as it does without jamp.
    cast = Cast(target) if flow.dtype != target else None
    return Step(site.eqn, site.ins, (cast,), (out,), "explicit", Forward())


def _converted(site: Site, kind: Kind) -> Flow | None:
    aval = site.eqn.outvars[0].aval
    if not site.pair.flows(aval):
        return None
    kind = Kind.HALF if site.pair.is_narrow(aval.dtype) else kind
    marks = transmit(site.operand_marks, site.traits, kind)
    (before,) = site.eqn.invars
    if kind == Kind.LAZY and not jnp.issubdtype(before.aval.dtype, jnp.inexact):
        is_flag, is_wide = before.aval.dtype == bool, before.aval.dtype.itemsize > 1
        marks |= Mark.ROUNDS if is_wide else NO_MARKS
        # Of 8 bits are pixels and weights, wherever they come from: half holds them exactly.
        if not (is_flag or is_wide) or before in site.planner.samples:
            marks |= Mark.SAMPLED | Mark.STORED
    return Flow(aval.dtype, kind, num_elements(aval), site.here, marks)


def plan_full(site: Site) -> Step:
    """Inputs raised to float32; the result stays float32."""
    functions, reduction = site.regime.functions, has(site.eqn, Trait.REDUCES)
    if functions is Functions.TRACED:
        return plan_traced(site, site.regime.label)
    scatters = has(site.eqn, Trait.SCATTERS) and site.pair.is_narrow(site.eqn.outvars[0].aval.dtype)
    if functions is Functions.HALF and site.strong:
        label = site.regime.label
        if not reduction:
            return site.step(label, site.half, Kind.HALF)
        rewrite = Scatter(out_casts=(Cast(site.half),)) if scatters else None
        return site.step(label, site.wide, Kind.HALF, rewrite, rounded=True)
    return marked_quotient(
        site, site.step("full", site.wide, _full_kind(site, reduction), Scatter() if scatters else None)
    )


def marked_quotient(site: Site, step: Step) -> Step:
    """The step, with a result that is marked as a quotient where it is one: see `Mark.QUOTIENT`."""
    if not has(site.eqn, Trait.DIVIDES) or isinstance(site.eqn.invars[-1], Literal):
        return step
    out = tuple(f and (f if f.kind == Kind.WEAK else f._replace(marks=f.marks | Mark.QUOTIENT)) for f in step.out)
    return dataclasses.replace(step, out=out)


def _full_kind(site: Site, reduction: bool) -> Kind:
    if not site.strong:
        return Kind.WEAK
    kind = max(flow.kind for flow in site.strong)
    if not reduction:
        return Kind.ISLAND if kind in (Kind.HALF, Kind.FULL) else kind
    if has(site.eqn, Trait.REPLACES) and kind == Kind.FULL:
        return Kind.FULL
    if site.eqn.outvars[0] in site.planner.demand.facts.diagonals:  # Added to in place.
        return Kind.STAT
    operand, result = site.eqn.invars[0].aval, site.eqn.outvars[0].aval
    if num_elements(result) * site.heuristics.statistic <= num_elements(operand):
        return Kind.STAT
    return Kind.LAZY if kind == Kind.LAZY else Kind.ISLAND


def plan_no_half(site: Site) -> Step:
    """Linear algebra, FFT and series: float32 at every level, because no library has them in half."""
    step = plan_traced(site, "no half kernel")
    if not has(site.eqn, Trait.SOLVES):
        return step
    out = tuple(f if f is None or f.kind == Kind.HALF else f._replace(marks=f.marks | Mark.SOLUTION) for f in step.out)
    return dataclasses.replace(step, out=out)
