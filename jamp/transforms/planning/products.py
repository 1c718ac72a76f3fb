"""Matrix products and convolutions: half in, half or float32 out, and the few that are float32 throughout."""

from __future__ import annotations

import dataclasses
import itertools

from jax import lax

from jamp._dtypes import FLOAT16
from jamp._primitives import Rule, Trait, has, is_outer, rule_of
from jamp.transforms.analysis.reading.axes import free_sizes, insists_on_full, is_reduction
from jamp.transforms.analysis.regimes import Products
from jamp.transforms.planning.elementwise import plan_promote
from jamp.transforms.planning.float8 import float8_product, why_not_in_8_bits
from jamp.transforms.planning.float32_products import float32_because, is_computed, is_of_frames, of_tangents
from jamp.transforms.planning.operations import plan_traced
from jamp.transforms.planning.site import Site
from jamp.transforms.program.flow import Root, num_elements
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import Mark
from jamp.transforms.program.plan import Cast, Step
from jamp.transforms.program.rewrites import Float8Product, Retyped, WideGradient, WideProduct
from jamp.transforms.program.want import Want


def plan_half(site: Site) -> Step:
    """Matrix products and convolutions: half in, half out, float32 accumulation; some of them in 8 bits."""
    step = _plan_product(site)
    if not site.planner.in_eight_bits or isinstance(step.rewrite, Float8Product):
        return step
    return dataclasses.replace(step, not_float8=why_not_in_8_bits(site, step.rule))


def _plan_product(site: Site) -> Step:
    regime = site.regime
    full = regime.products is Products.TRACED
    dtypes = (atom.aval for atom in (*site.eqn.invars, *site.eqn.outvars))
    if full or insists_on_full(site.eqn) or any(map(site.pair.is_other_inexact, dtypes)):
        step = plan_traced(site, regime.label if full else "explicit precision", Kind.STAT)
        step = dataclasses.replace(step, out=tuple(flow and flow._replace(kind=Kind.STAT) for flow in step.out))
        return _exactly(site, step) if regime.highest else step
    if not site.strong:
        return site.step("literals", site.wide, Kind.WEAK)
    size = num_elements(site.eqn.outvars[0].aval)
    if regime.delicate and (rule := float32_because(site)):
        # A rotation, or a filter's prediction, continues what it is given, as elementwise products do.
        roots = frozenset().union(*(flow.roots for flow in site.ins if flow))
        step = _in_float32(site, rule).making(size=size, roots=roots)
        # Products of frames, such as a blend of them, are maps of space as much as they are; points stay points.
        step = step.marked(Mark.SOLUTION | Mark.BUILT) if rule == "short" else step
        if site.eqn.outvars[0] in site.planner.demand.facts.points:  # Of moved points, which hold on to float32 too.
            step = step.making(kind=Kind.STAT)
        # What a rule of a solver is given is that, too: nothing in it tells how it was made.
        step = step.marked(Mark.SOLUTION) if rule == "cancelling" else step
        return step.marked(Mark.FRAME) if is_of_frames(site) else step
    if regime.delicate and site.is_scaled:  # As it is written: its digits are half's, its range is not.
        return site.step("scaled", site.wide, Kind.STAT if is_reduction(site.eqn) else Kind.ISLAND).making(size=size)
    if is_outer(site.eqn):
        return _outer(site)
    layers = _layers(site)
    gives_float32 = regime.delicate and has(site.eqn, Trait.MATRIX) and _gives_float32(site)
    if (rewrite := float8_product(site, gives_float32)) is not None:
        return _in_float8(site, rewrite, layers).making(size=size)
    if regime.delicate and _sums_up(site):
        return site.step("full", site.wide, Kind.STAT).making(size=size)
    if regime.products is Products.HALF_ONLY:
        step = site.step("half", site.half, Kind.LAZY)
        # What is float32 right behind the product need not overflow in it. Where it could not, results that no float32
        # operation asks for are rounded, which halves what is kept for the backward pass.
        may_overflow = site.pair.lacks_range and has(site.eqn, Trait.MATRIX) and not of_tangents(site)
        rounded = Retyped(params=site.retyped(site.half), out_casts=(Cast(site.wide),))
        rewrite = WideProduct() if gives_float32 or may_overflow else rounded
        return dataclasses.replace(step, rewrite=rewrite, layers=layers).making(dtype=site.wide, size=size)
    if gives_float32:
        kind = Kind.STAT if is_reduction(site.eqn) else Kind.ISLAND
        step = site.step("half, float32 out", site.half, kind, WideProduct())
        return dataclasses.replace(step, layers=layers).making(dtype=site.wide, size=size)
    return dataclasses.replace(site.step("half", site.half, Kind.HALF), layers=layers).making(size=size)


def _sums_up(site: Site) -> bool:
    """Whether a product adds up one value, as `jnp.sum` does, of what was computed in float32."""
    if not is_reduction(site.eqn):
        return False
    computed = [flow for atom, flow in zip(site.eqn.invars, site.ins, strict=True) if is_computed(site, atom, flow)]
    return any(flow is not None and flow.dtype == site.wide for flow in computed)


def _in_float8(site: Site, rewrite: Float8Product, layers: frozenset[Root]) -> Step:
    """A product in 8 bits: what is stored in float32 is rounded once, and what is computed is half before."""
    firm = Kind.LAZY if site.regime.products is Products.HALF_ONLY else Kind.ISLAND
    step = site.step("float8", rewrite.out, firm if rewrite.out == site.wide else Kind.HALF, rewrite)
    casts = tuple(
        None if flow is not None and flow.has(Mark.STORED) and flow.kind <= Kind.LAZY else site.cast(flow, site.half)
        for flow in site.ins
    )
    return dataclasses.replace(step, casts=casts, layers=layers)


def _gives_float32(site: Site) -> bool:
    """Whether a `dot_general` of half operands returns its float32 accumulator.

    Not so of a tangent, in a rule of `custom_jvp`: JAX would transpose that to products with float32 cotangents.
    """
    if of_tangents(site):
        return False
    wanted = site.wants[0].full and site.wants[0] is not Want.GATE  # Of a gate all is float32 but products.
    return is_reduction(site.eqn) or (wanted and not _makes_scores(site))


def _makes_scores(site: Site) -> bool:
    """Whether a `dot_general` is of queries and keys, for a softmax, in bfloat16: its result is half.

    Of all products this one's result is much larger than its operands, and a GPU writes it to memory and reads it
    several times: in float32, attention at 1024 tokens moved 7 % more bytes than in half, over the whole train step
    (docs/design/residuals.md). Float16 is not wide enough for scores that are scaled after the product.
    """
    if site.wants[0] is not Want.SCORE or site.half == FLOAT16:
        return False
    _, (batch, _) = site.eqn.params["dimension_numbers"]
    return len(batch) > 0 and all(
        is_computed(site, *operand) for operand in zip(site.eqn.invars, site.ins, strict=True)
    )


def _in_float32(site: Site, rule: str) -> Step:
    """A product in float32 that is as firm as elementwise products of the same operands would make it."""
    kind = Kind.ISLAND if any(flow.kind > Kind.LAZY for flow in site.strong) else Kind.LAZY
    step = site.step(rule, site.wide, kind)
    return _exactly(site, step)


def _outer(site: Site) -> Step:
    """A product that contracts nothing: elementwise, and as exact as that."""
    step = plan_promote(site)
    return _exactly(site, step) if step.out[0] is not None and step.out[0].dtype == site.wide else step


def _exactly(site: Site, step: Step) -> Step:
    """A float32 product that is one: by default XLA multiplies in bfloat16 on TPUs, in TF32 on GPUs."""
    params = {**(site.retyped(site.wide) or site.eqn.params), "precision": (lax.Precision.HIGHEST,) * 2}
    return dataclasses.replace(step, rewrite=Retyped(params=params))


def at_configured_precision(site: Site, step: Step) -> Step:
    """A product that stays float32 at `jax_default_matmul_precision`, if its call said nothing.

    The program was traced without it (see `Traced`), so that it is no word about the products that are half.
    """
    precision, rewrite = site.planner.precision, step.rewrite
    if precision is None or rule_of(step.eqn) is not Rule.HALF or not isinstance(rewrite, Retyped | None):
        return step
    params = (rewrite and rewrite.params) or step.eqn.params
    dtypes = (cast.dtype if cast else flow and flow.dtype for cast, flow in zip(step.casts, step.ins, strict=True))
    if params["precision"] is not None or any(site.pair.is_narrow(dtype) for dtype in dtypes if dtype is not None):
        return step
    rewrite = dataclasses.replace(rewrite or Retyped(), params={**params, "precision": precision})
    return dataclasses.replace(step, rewrite=rewrite)


def _layers(site: Site) -> frozenset[Root]:
    """Scanned weights that are multiplied with activations: the scan runs over layers, not over time."""
    found: set[Root] = set()
    pairs = zip(site.ins[:2], site.ins[1::-1], strict=True)
    for (weight, other), size in itertools.zip_longest(pairs, free_sizes(site.eqn)):
        if size == 1:  # A vector: what each time step reads a state by.
            continue
        if weight is None or other is None or weight.kind not in (Kind.LAZY, Kind.HALF):
            continue
        carried = any(root.role == "carry" and not root.limited for root in other.roots)
        if carried or other.kind not in (Kind.LAZY, Kind.WEAK):
            found.update(root for root in weight.roots if root.role == "xs")
    return frozenset(found)


def with_wide_gradients(site: Site, step: Step) -> Step:
    """A product whose weights, which are float32 and cast to half for it, have gradients in float32."""
    if not site.planner.setting.wide_gradients or rule_of(site.eqn) is not Rule.HALF:
        return step
    if not isinstance(step.rewrite, Retyped | WideProduct | None):
        return step
    weights = tuple(
        index
        for index, (flow, to) in enumerate(zip(step.ins, step.casts, strict=True))
        if flow is not None and flow.kind == Kind.LAZY and flow.has(Mark.TRAINED) and to is not None
        if flow.dtype == site.wide and site.pair.is_narrow(to.dtype)
    )
    if not weights:
        return step
    reads = (*site.eqn.invars, *(site.eqn.invars[index] for index in weights))
    rewrite = WideGradient(product=step.rewrite, weights=weights, out_casts=step.out_casts, reads=reads)
    return dataclasses.replace(
        step,
        ins=(*step.ins, *(step.ins[index] for index in weights)),
        casts=(*step.casts, *(None for _ in weights)),
        rewrite=rewrite,
    )
