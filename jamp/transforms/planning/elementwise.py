"""How elementwise operations move precision: all operands to one dtype, which the firmest of them chooses."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jamp._compat import Atom, Eqn, Literal, nominal_size
from jamp._dtypes import FLOAT16
from jamp._primitives import SCALES, Trait, has
from jamp.transforms.analysis.apart import number_of, takes_from_number
from jamp.transforms.analysis.regimes import Elementwise
from jamp.transforms.planning.moves import spread_in_float32
from jamp.transforms.planning.operations import marked_quotient, plan_traced
from jamp.transforms.planning.site import Site
from jamp.transforms.program.flow import Flow, num_elements
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import Mark
from jamp.transforms.program.plan import Step
from jamp.transforms.program.want import Want

_CENTRES = Trait.SUBTRACTS | Trait.DIVIDES


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
    return marked_quotient(site, step) if kind != Kind.HALF else spread_in_float32(site, step)


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
    apart = _is_taken_apart(site)
    if _keeps_frame(site) or _moves_points(site) or (apart and _adds_large_part(site)):
        return site.wide, Kind.FULL if any(flow.kind == Kind.FULL for flow in strong) else Kind.STAT
    if _out_of_range(site) or _adds_number(site) or apart:
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
    """Whether something is computed of half data, and a reader takes something as large off the result."""
    return site.wanted_apart and _has_data(site)


def _adds_large_part(site: Site) -> bool:
    """Whether an operand may be larger than what it is added to: a number but for an epsilon, and data of the program.

    Biases and scales have fewer elements than what they are added to.
    """
    operands = zip(site.eqn.invars, site.ins, strict=True)
    return has(site.eqn, Trait.ADDS) and any(_is_large_part(site, *operand) for operand in operands)


def _is_large_part(site: Site, atom: Atom, flow: Flow | None) -> bool:
    if flow is None or flow.kind not in (Kind.WEAK, Kind.LAZY, Kind.STAT):
        return False
    if flow.kind != Kind.WEAK:
        return flow.size >= num_elements(site.eqn.outvars[0].aval)
    return not isinstance(atom, Literal) or float(np.max(np.abs(atom.val))) >= site.heuristics.part


def _subtracted(flow: Flow) -> Flow:
    """An argument that data is centred or divided by is a statistic, as in BatchNorm's evaluation; biases are added."""
    return flow._replace(kind=Kind.STAT) if flow.kind == Kind.LAZY else flow


def _scales(site: Site) -> bool:
    return has(site.eqn, SCALES)


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
    """Whether a number moves data far from zero, as in `50.0 + x @ w` and `1.0 + 0.01 * h`, or an array of numbers.

    In half its digits would be those of the number.
    """
    if not any(flow.kind > Kind.LAZY for flow in site.strong):
        return False
    if any(flow is not None and flow.has(Mark.FAR) and flow.kind == Kind.WEAK for flow in site.ins):
        return True
    sides = (site.eqn.invars, site.eqn.invars[::-1])
    return any(_is_far_from(site, number, data) for number, data in sides)


def _magnitude(site: Site, atom: Atom) -> float:
    """How large a number is, or half of the elements of an array that the program has at hand; zero for data."""
    if isinstance(atom, Literal):
        return abs(number_of(atom))
    _, origin = site.behind(atom, lambda eqn: has(eqn, Trait.VIEW))
    return 0.0 if isinstance(origin, Literal) else site.planner.magnitude(origin)


def _is_far_from(site: Site, number: Atom, data: Atom) -> bool:
    """Whether a number is far from zero beside data that is scaled down by numbers."""
    scale = 1.0
    for _ in range(site.heuristics.most_scalings):
        step = site.maker(data)
        scaling = None if step is None else _scaling(step.eqn)
        if scaling is None:
            break
        data, factor = scaling
        scale *= factor
    return scale < 1.0 and _magnitude(site, number) >= site.heuristics.far * scale


def _scaling(eqn: Eqn) -> tuple[Atom, float] | None:
    """What an equation multiplies by a number that it was written with, and by which; None for others."""
    if has(eqn, Trait.NEGATES | Trait.CONVERTS):
        return eqn.invars[0], 1.0
    if not has(eqn, SCALES) or len(eqn.invars) != 2:
        return None
    left, right = eqn.invars
    if isinstance(left, Literal) and has(eqn, Trait.MULTIPLIES):
        left, right = right, left
    if not isinstance(right, Literal) or isinstance(left, Literal) or not number_of(right):
        return None
    number = abs(number_of(right))
    return left, 1.0 / number if has(eqn, Trait.DIVIDES) else number


def _is_epsilon_added(site: Site) -> bool:
    """Whether a number is added that half takes for zero: `(h + 1e-8) / (h + 1e-8)` is one where `h` is zero."""
    if not site.pair.lacks_range:
        return False
    least = float(jnp.finfo(site.half).smallest_subnormal) / 2
    return any(flow is not None and flow.number is not None and 0 < flow.number.largest < least for flow in site.ins)


def _needs_wide_arithmetic(site: Site) -> bool:
    """Whether an operation whose result is half has an operand that must not be rounded first.

    Such are divisors that were computed in float32, because an epsilon in them may be zero in half; quotients, which
    may be as large as a divisor is small; and numbers that scale or move data, which half changes by up to 0.4 %, all
    elements alike: with the shift of `softplus(x) - log(2)` the mean was off. The operation rounds its result, in the
    same kernel.
    """
    if not _scales(site):
        # An argument may be a mask, for all that is known, which the sum would not saturate.
        return has(site.eqn, Trait.ADDS) and not site.is_scaled and _by_rounded_number(site, Kind.WEAK)
    pairs = list(zip(site.eqn.invars, site.ins, strict=True))
    if any(flow is not None and flow.has(Mark.QUOTIENT) and flow.kind != Kind.HALF for _, flow in pairs):
        return True
    atom, divisor = pairs[-1]
    computed = divisor is not None and divisor.kind in (Kind.ISLAND, Kind.STAT)
    if has(site.eqn, Trait.DIVIDES) and computed and not isinstance(atom, Literal):
        return True
    return _by_rounded_number(site, Kind.LAZY)


def _by_rounded_number(site: Site, firmest: Kind) -> bool:
    """Whether one of two operands is a number with more digits than half has, and the other is data."""
    rounds = any(
        flow is not None and flow.has(Mark.ROUNDS) and flow.size == 1 and flow.kind <= firmest for flow in site.ins
    )
    return rounds and any(flow.size > 1 for flow in site.strong)
