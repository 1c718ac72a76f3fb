"""How each rule moves precision: one planner a rule, from operand states to a step."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from jamp._compat import Atom, Literal, nominal_size
from jamp._dtypes import FLOAT16
from jamp._primitives import Trait, has
from jamp.transforms.analysis.bounds import takes_from_number
from jamp.transforms.analysis.regimes import Elementwise, Functions
from jamp.transforms.planning.site import Site
from jamp.transforms.program.flow import NO_MARKS, Flow, Kind, Mark, num_elements, transmit
from jamp.transforms.program.plan import Cast, Step
from jamp.transforms.program.rewrites import Forward, Retyped, Scatter
from jamp.transforms.program.want import Want

# What broadcasts axes of one element.
_BROADCASTS = Trait.ADDS | Trait.MULTIPLIES | Trait.DIVIDES | Trait.EXTREMUM
_CENTRES = Trait.SUBTRACTS | Trait.DIVIDES
_SCALES = Trait.MULTIPLIES | Trait.DIVIDES


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
        return Mark.RANDOM
    (aval, *_) = (var.aval for var in site.eqn.outvars)
    counts = not site.eqn.invars and any(
        nominal_size(size) > 2 / float(jnp.finfo(site.pair.narrow).eps) for size in aval.shape
    )
    return Mark.ROUNDS if counts else NO_MARKS  # 257 is 256 in bfloat16.


def plan_opaque(site: Site) -> Step:
    """A primitive that the table does not know: never a crash, never a wrong dtype.

    What it returns may come from anywhere: a mutable array holds what a loop wrote into it, a callback reads a file.
    """
    step = plan_traced(site, "opaque")
    out = tuple(flow and flow._replace(marks=flow.marks | Mark.GIVEN | Mark.TRAINED) for flow in step.out)
    return dataclasses.replace(step, out=out)


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
    if jnp.issubdtype(site.eqn.invars[0].aval.dtype, jnp.integer) and kind == Kind.LAZY:
        marks |= Mark.ROUNDS
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
    return _quotient(site, site.step("full", site.wide, _full_kind(site, reduction), Scatter() if scatters else None))


def _quotient(site: Site, step: Step) -> Step:
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


def plan_promote(site: Site) -> Step:
    """Elementwise operations: all operands to one dtype, which the firmest of them chooses."""
    if site.is_given_other_inexact or any(site.pair.is_other_inexact(var.aval) for var in site.eqn.outvars):
        return plan_traced(site)
    if site.eqn.params.get("update_jaxpr") is not None:  # `x.at[i].apply(f)` holds `f` as it was traced.
        return plan_traced(site)
    if site.eqn.outvars[0] in site.sums and site.regime.recurrences and site.strong:
        return site.step("promote", site.wide, Kind.FULL).making(kind=Kind.FULL)
    dtype, kind = _choose(site)
    if kind == Kind.HALF and site.regime.delicate and _needs_wide_arithmetic(site):
        return site.step("promote", site.wide, Kind.HALF, rounded=True)
    rule = site.regime.label if site.regime.all_full else "promote"
    step = site.step(rule, dtype, kind, may_be_huge=dtype == FLOAT16)
    return _quotient(site, step) if kind != Kind.HALF else _spread_in_float32(site, step)


def _choose(site: Site) -> tuple[np.dtype, Kind]:
    strong, elementwise = site.strong, site.regime.elementwise
    if not strong:
        return site.wide, Kind.WEAK
    if elementwise is Elementwise.HALF:
        return site.half, Kind.HALF
    floats = [flow for flow in strong if flow.kind != Kind.HALF]
    if elementwise is Elementwise.FULL:
        return site.wide, Kind.STAT
    if floats and not any(site.pair.flows(var.aval) for var in site.eqn.outvars):  # Comparisons are exact.
        return site.wide, Kind.STAT
    if elementwise is Elementwise.WIDEST:
        return _choose_widest(site, floats)
    return _choose_by_flow(site)


def _choose_widest(site: Site, floats: list[Flow]) -> tuple[np.dtype, Kind]:
    if any(flow.kind == Kind.FULL for flow in floats):
        return site.wide, Kind.FULL
    moved = _adds_number(site) or _keeps_frame(site) or _is_taken_apart(site)
    if floats or site.want_full or _out_of_range(site) or moved:
        return site.wide, Kind.LAZY
    return site.half, Kind.HALF


def _choose_by_flow(site: Site) -> tuple[np.dtype, Kind]:
    """Half data meets half data in half; half data meets a float32 statistic in float32."""
    strong, want = site.strong, site.want_full
    if _keeps_frame(site) or _moves_points(site) or _is_taken_apart(site):
        return site.wide, Kind.FULL if any(flow.kind == Kind.FULL for flow in strong) else Kind.STAT
    if _out_of_range(site) or _adds_number(site):
        return site.wide, Kind.FULL if any(flow.kind == Kind.FULL for flow in strong) else Kind.ISLAND
    if has(site.eqn, _CENTRES):  # What data is centred or divided by.
        first, *others = strong
        strong = [first, *map(_subtracted, others)]
    halves: list[Flow] = []
    firm: list[Flow] = []
    stays = want or takes_from_number(site.eqn, {}, site.heuristics.part)
    for flow in strong:
        if flow.kind == Kind.HALF or (not stays and site.leaves(flow)):
            halves.append(flow)
        elif flow.kind > Kind.LAZY:
            firm.append(flow)
    if any(flow.kind == Kind.FULL for flow in firm):
        return site.wide, Kind.FULL
    if halves:
        data = max(flow.size for flow in halves)
        mixed = len({flow.dtype for flow in halves if flow.kind == Kind.HALF}) > 1
        fits = not mixed and not want and all(flow.size >= data for flow in firm)
        return (site.half, Kind.HALF) if fits else (site.wide, Kind.ISLAND)
    widest = max(strong, key=lambda flow: (flow.size, flow.kind))
    if any(flow.kind == Kind.ISLAND for flow in firm):
        return site.wide, Kind.ISLAND
    return site.wide, widest.kind


def _keeps_frame(site: Site) -> bool:
    """Whether half data is added to an identity, as in `eye(3) + sin(a) * k`: in half its digits would be those of one.

    Not so a mask of scores, of which a softmax makes weights.
    """
    if not site.regime.delicate or not site.adds_to_frame or Want.SCORE in site.wants:
        return False
    return any(flow.kind in (Kind.HALF, Kind.ISLAND) for flow in site.strong)


def _moves_points(site: Site) -> bool:
    """Whether float32 points are moved: they are far from zero beside what is left where they are centred or compared.

    A learned shift of coordinates around 20, rounded before the mean was taken off and multiplied, was 3 % off. Points
    have as few columns as space; a bias is added to more elements than it has.
    """
    if not has(site.eqn, Trait.ADDS) or not site.regime.delicate or Want.SCORE in site.wants:
        return False
    shape = site.eqn.outvars[0].aval.shape
    if len(shape) < 2 or nominal_size(shape[-1]) > site.heuristics.coordinates:
        return False
    size, strong = num_elements(site.eqn.outvars[0].aval), site.strong
    points = any(
        flow.dtype == site.wide and flow.size >= size and (flow.kind != Kind.ISLAND or flow.has(Mark.SOLUTION))
        for flow in strong
    )  # Given, moved before, or turned by a frame.
    return points and _has_data(site)


def _has_data(site: Site) -> bool:
    """Whether an operand is what half operations made."""
    return any(flow.kind in (Kind.HALF, Kind.ISLAND) and not flow.has(Mark.TANGENT) for flow in site.strong)


def _is_taken_apart(site: Site) -> bool:
    """Whether something is added to a number or to data of the program, and a reader takes as much off again."""
    if not has(site.eqn, Trait.ADDS) or not any(want.apart for want in site.wants):
        return False
    return _has_data(site) and any(
        _is_large_part(site, *operand) for operand in zip(site.eqn.invars, site.ins, strict=True)
    )


def _is_large_part(site: Site, atom: Atom, flow: Flow | None) -> bool:
    """Whether an operand may be larger than what it is added to: a number but for an epsilon, and data of the program.

    Biases and scales have fewer elements than what they are added to.
    """
    if flow is None or flow.kind not in (Kind.WEAK, Kind.LAZY, Kind.STAT):
        return False
    if flow.kind != Kind.WEAK:
        return flow.size >= num_elements(site.eqn.outvars[0].aval)
    return not isinstance(atom, Literal) or float(np.max(np.abs(atom.val))) >= site.heuristics.part


def _subtracted(flow: Flow) -> Flow:
    """An argument that data is centred or divided by is a statistic, as in BatchNorm's evaluation; biases are added."""
    return flow._replace(kind=Kind.STAT) if flow.kind == Kind.LAZY else flow


def _scales(site: Site) -> bool:
    return has(site.eqn, _SCALES)


def _out_of_range(site: Site) -> bool:
    """Whether data is scaled by a number that half cannot hold: `h * 1e5`, or `h * 1e-7 * 1e6`, in float16.

    Numbers that are added to data or selected are masks, and so may arguments be: their casts saturate.
    """
    if not _scales(site):
        return site.is_scaled and any(flow and flow.scale and flow.kind >= Kind.ISLAND for flow in site.ins)
    if site.is_scaled:
        return any(flow and not flow.is_number for flow in site.ins)
    if not site.pair.lacks_range:
        return False
    scales = [flow for flow in site.ins if flow is not None and flow.kind <= Kind.LAZY]
    # Numbers that the program computes, in units from 1e-7 to 1e6, are not known; learned ones are as data is.
    return any(flow.size > 1 and not flow.has(Mark.TRAINED) for flow in scales)


def _adds_number(site: Site) -> bool:
    """Whether a number is added to data of which, or to which, half leaves nothing."""
    adds = has(site.eqn, Trait.ADDS) and site.regime.delicate
    return adds and (_moves_far(site) or _is_epsilon_added(site))


def _moves_far(site: Site) -> bool:
    """Whether a number moves data far from zero, as in `50.0 + x @ w`: in half its digits would be those of the 50."""
    far = any(flow is not None and flow.has(Mark.FAR) and flow.kind == Kind.WEAK for flow in site.ins)
    return far and any(flow.kind > Kind.LAZY for flow in site.strong)


def _is_epsilon_added(site: Site) -> bool:
    """Whether a number is added that half takes for zero: `(h + 1e-8) / (h + 1e-8)` is one where `h` is zero."""
    if not site.pair.lacks_range:
        return False
    least = float(jnp.finfo(site.half).smallest_subnormal) / 2
    return any(flow is not None and flow.number is not None and 0 < flow.number.largest < least for flow in site.ins)


def _needs_wide_arithmetic(site: Site) -> bool:
    """Whether an operation whose result is half has an operand that must not be rounded first.

    Such are divisors that were computed in float32, because an epsilon in them may be zero in half; quotients, which
    may be as large as a divisor is small; and numbers that scale data, which half changes by up to 0.4 %. The operation
    rounds its result, in the same kernel.
    """
    if not _scales(site):
        return False
    pairs = list(zip(site.eqn.invars, site.ins, strict=True))
    if any(flow is not None and flow.has(Mark.QUOTIENT) and flow.kind != Kind.HALF for _, flow in pairs):
        return True
    atom, divisor = pairs[-1]
    computed = divisor is not None and divisor.kind in (Kind.ISLAND, Kind.STAT)
    if has(site.eqn, Trait.DIVIDES) and computed and not isinstance(atom, Literal):
        return True
    scales = any(flow is not None and flow.has(Mark.ROUNDS) and flow.size == 1 for _, flow in pairs)
    return scales and any(flow.size > 1 for flow in site.strong)


def plan_follow(site: Site) -> Step:
    """Data movement: each result has the dtype of the operand it comes from."""
    pairwise = len(site.eqn.invars) == len(site.eqn.outvars)
    moved = [_rounded(site, flow) for flow in site.ins]
    casts = tuple(site.cast(before, after and after.dtype) for before, after in zip(site.ins, moved, strict=True))
    out = []
    for index, var in enumerate(site.eqn.outvars):
        source = moved[index if pairwise else 0]
        if not site.pair.flows(var.aval):
            out.append(None)
        elif source is None:
            out.append(Flow(var.aval.dtype, Kind.LAZY, num_elements(var.aval), site.here, Mark.FRACTION))
        else:
            size = source.size if has(site.eqn, Trait.TRAFFIC) else min(source.size, num_elements(var.aval))
            marks = transmit(source.marks, site.traits, source.kind)
            if marks & Mark.REPEATED and _takes_a_part(site):  # As one of many layers: an iteration has its own.
                marks = (marks & ~Mark.REPEATED) | Mark.STORED
            roots = source.roots if has(site.eqn, Trait.CONTINUES) else frozenset()
            out.append(source._replace(size=size, scope=site.here, marks=marks, roots=roots))
    step = Step(site.eqn, site.ins, casts, tuple(out), "follow")
    first = moved[0]
    if first is None or first.kind != Kind.HALF or not has(site.eqn, Trait.GROWS):
        return step
    return _added_up_in_float32(site, step) if _is_long_sum(site, first, _readers(site)) else step


def _takes_a_part(site: Site) -> bool:
    """Whether a movement takes what an index says that the program computes, such as the counter of a loop."""
    is_view = has(site.eqn, Trait.VIEW) or not has(site.eqn, Trait.MOVES)
    return not is_view and not all(isinstance(atom, Literal) for atom in site.eqn.invars[1:])


def _readers(site: Site) -> int:
    """How many elements of its result a movement gives one of its operand to."""
    before, after = num_elements(site.eqn.invars[0].aval), num_elements(site.eqn.outvars[0].aval)
    indices = [num_elements(var.aval) for var in site.eqn.invars[1:]]
    return max(indices) if indices else after // max(before, 1)


def _rounded(site: Site, flow: Flow | None) -> Flow | None:
    """An island that leaves its scope, as half data, unless its readers want it in float32 anyway."""
    if flow is None or not site.leaves(flow) or site.want_full or Want.LEFT in site.wants or not site.regime.islands:
        return flow
    if not any(site.pair.flows(var.aval) for var in site.eqn.outvars):
        return flow
    return site.rounded(flow)


def _is_long_sum(site: Site, flow: Flow, readers: int) -> bool:
    """Whether the transpose of what gives a value to so many readers is a long sum of cotangents."""
    derived = site.regime.delicate and flow.has(Mark.TRAINED) and not flow.has(Mark.TANGENT)
    return derived and readers >= site.heuristics.many_readers


def _added_up_in_float32(site: Site, step: Step) -> Step:
    """A movement of half data as raise, move, round, so that its transpose adds cotangents up in float32."""
    casts = (site.cast(site.ins[0], site.wide), *step.casts[1:])
    return dataclasses.replace(step, casts=casts, rewrite=Retyped(out_casts=(Cast(site.half),)))


def _spread_in_float32(site: Site, step: Step) -> Step:
    """An operation in half, each operand of which that has many readers is broadcast in float32, and then rounded.

    JAX sums the cotangent of a bias or of a gate over the axes that it lacks. In bfloat16 the gradient of a bias that
    50,000 pixels read was wrong by 98 %.
    """
    if not has(site.eqn, _BROADCASTS):  # Others promote too: what is concatenated has its own shape.
        return step
    whole = site.eqn.outvars[0].aval
    casts, spread = [], []
    for var, flow, to in zip(site.eqn.invars, site.ins, step.casts, strict=True):
        same_rank = len(var.aval.shape) == len(whole.shape)
        readers = num_elements(whole) // max(num_elements(var.aval), 1) if same_rank else 1
        many = flow is not None and _is_long_sum(site, flow, readers)
        casts.append(site.cast(flow, site.wide) if many else to)
        spread.append((to or Cast(site.half)) if many else None)
    if not any(spread):
        return step
    return dataclasses.replace(step, casts=tuple(casts), rewrite=Retyped(spread=tuple(spread)))
