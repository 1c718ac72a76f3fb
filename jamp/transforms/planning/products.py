"""Matrix products and convolutions: half in, half or float32 out, and the few that are float32 throughout."""

from __future__ import annotations

import dataclasses

from jax import lax

from jamp._compat import Atom, Eqn, function_names, inner_jaxprs, open_jaxpr
from jamp._dtypes import FLOAT16
from jamp._primitives import Rule, Trait, has, rule_of
from jamp.transforms.analysis.demand import (
    free_sizes,
    has_one_channel,
    is_outer,
    is_reduction,
    makes_one_channel,
    num_contracted,
)  # fmt: skip
from jamp.transforms.analysis.regimes import Products
from jamp.transforms.planning.float8 import float8_product, why_not_in_8_bits
from jamp.transforms.planning.operations import plan_promote, plan_traced
from jamp.transforms.planning.site import Site
from jamp.transforms.program.flow import Flow, Kind, Mark, Root, num_elements
from jamp.transforms.program.plan import Cast, Float8Product, Retyped, Step, WideGradient, WideProduct
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
    if full or _insists_on_full(site.eqn) or any(map(site.pair.is_other_inexact, dtypes)):
        step = plan_traced(site, regime.label if full else "explicit precision", Kind.STAT)
        step = dataclasses.replace(step, out=tuple(flow and flow._replace(kind=Kind.STAT) for flow in step.out))
        return _exactly(site, step) if regime.highest else step
    if not site.strong:
        return site.step("literals", site.wide, Kind.WEAK)
    size = num_elements(site.eqn.outvars[0].aval)
    if regime.delicate and (rule := _float32_because(site)):
        # A rotation, or a filter's prediction, continues what it is given, as elementwise products do.
        roots = frozenset().union(*(flow.roots for flow in site.ins if flow))
        step = _in_float32(site, rule).making(size=size, roots=roots)
        # Products of frames, such as a blend of them, are maps of space as much as they are.
        return step.marked(Mark.SOLUTION) if rule == "short" else step
    if regime.delicate and site.is_scaled:  # As it is written: its digits are half's, its range is not.
        return site.step("scaled", site.wide, Kind.STAT if is_reduction(site.eqn) else Kind.ISLAND).making(size=size)
    if is_outer(site.eqn):
        return _outer(site)
    layers = _layers(site)
    gives_float32 = regime.delicate and has(site.eqn, Trait.MATRIX) and _gives_float32(site)
    if (rewrite := float8_product(site, gives_float32)) is not None:
        return _in_float8(site, rewrite, layers).making(size=size)
    if regime.products is Products.HALF_ONLY:
        step = site.step("half", site.half, Kind.LAZY)
        rewrite = Retyped(params=site.retyped(site.half), out_casts=(Cast(site.wide),))
        return dataclasses.replace(step, rewrite=rewrite, layers=layers).making(dtype=site.wide, size=size)
    if regime.delicate and is_reduction(site.eqn) and any(flow.kind >= Kind.ISLAND for flow in site.strong):
        return site.step("full", site.wide, Kind.STAT).making(size=size)
    if gives_float32:
        kind = Kind.STAT if is_reduction(site.eqn) else Kind.ISLAND
        step = site.step("half, float32 out", site.half, kind, WideProduct())
        return dataclasses.replace(step, layers=layers).making(dtype=site.wide, size=size)
    return dataclasses.replace(site.step("half", site.half, Kind.HALF), layers=layers).making(size=size)


def _in_float8(site: Site, rewrite: Float8Product, layers: frozenset[Root]) -> Step:
    """A product in 8 bits: what is stored in float32 is rounded once, and what is computed is half before."""
    firm = Kind.LAZY if site.regime.products is Products.HALF_ONLY else Kind.ISLAND
    step = site.step("float8", rewrite.out, firm if rewrite.out == site.wide else Kind.HALF, rewrite)
    casts = tuple(
        None if flow is not None and flow.has(Mark.STORED) and flow.kind <= Kind.LAZY else site.cast(flow, site.half)
        for flow in site.ins
    )
    return dataclasses.replace(step, casts=casts, layers=layers)


def _float32_because(site: Site) -> str | None:
    """Why a product is float32, in a word for the report: its absolute error counts, and no matrix unit would help."""
    if _is_of_positions(site):
        return "phase"
    if _counts(site):
        return "count"
    if _is_short(site):
        return "short"
    if _is_stencil(site):
        return "stencil"
    if _weighs(site) or _selects(site) or _is_written(site):
        return "written"
    return "solution" if _has_solution(site) else None


def _gives_float32(site: Site) -> bool:
    """Whether a `dot_general` of half operands returns its float32 accumulator.

    Not so of a tangent, in a rule of `custom_jvp`: JAX would transpose that to products with float32 cotangents.
    """
    if _of_tangents(site):
        return False
    return is_reduction(site.eqn) or (site.wants[0].full and not _makes_scores(site))


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
        _is_computed(site, *operand) for operand in zip(site.eqn.invars, site.ins, strict=True)
    )


def _is_computed(site: Site, atom: Atom, flow: Flow | None) -> bool:
    """Whether an operand is no argument, such as a weight."""
    if flow is not None and flow.kind > Kind.LAZY:
        return True
    step, _ = site.behind(atom, lambda eqn: rule_of(eqn) is Rule.FOLLOW)
    return step is not None


def _is_of_positions(site: Site) -> bool:
    """Whether angles, coordinates or indices come out: of positions alone, or of a few of them with anything else."""
    if Want.PHASE not in site.wants:
        return False
    given = [flow.has(Mark.GIVEN) for flow in site.ins if flow]
    # Of counters, or read off by one-hot rows.
    if not any(given) or not all(flow.has(Mark.FRACTION) for flow in site.ins if flow):
        return True
    if not has(site.eqn, Trait.MATRIX) or num_contracted(site.eqn) > site.heuristics.short_phase:
        return False
    return not all(given) or (_all_float32(site) and num_contracted(site.eqn) <= site.heuristics.coordinates)


def _all_float32(site: Site) -> bool:
    return all(flow.kind <= Kind.LAZY and flow.dtype == site.wide for flow in site.ins if flow)


def _counts(site: Site) -> bool:
    """Whether both operands are integers by construction: one-hot rows, triangles of ones, ids.

    257 is 256 in bfloat16. Gathers of a learned table by one-hot rows multiply fractions, and stay half.
    """
    return all(flow is None or not flow.has(Mark.FRACTION) for flow in site.ins)


def _is_short(site: Site) -> bool:
    """Whether a product of float32 operands contracts so few elements that it is a map of coordinates.

    Rotations, cells, cameras: no matrix unit makes these faster, and their absolute error counts. One operand is as
    small as space in all that is no batch; else it would be the gradient of a layer, contracted over a batch of two.
    """
    if not has(site.eqn, Trait.MATRIX):
        return False
    # Not so the weights of an attention over three tokens, which are quotients.
    no_place = Mark.TANGENT | Mark.QUOTIENT
    if any(flow is None or flow.kind == Kind.HALF or flow.has(no_place) for flow in site.ins):
        return False
    contracted, short = num_contracted(site.eqn), site.heuristics.short
    if contracted == short:
        return _maps_space(site.eqn, short)
    return abs(contracted - short) == 1 and _has_built_frame(site, contracted)


def _maps_space(eqn: Eqn, short: int) -> bool:
    """Whether an operand has an axis beside the contracted ones that is as short, or none at all."""
    contracted, batch = eqn.params["dimension_numbers"]
    for atom, bound in zip(eqn.invars, zip(contracted, batch, strict=True), strict=True):
        free = [size for axis, size in enumerate(atom.aval.shape) if axis not in (*bound[0], *bound[1])]
        if not free or any(type(size) is int and size <= short for size in free):
            return True
    return False


def _has_built_frame(site: Site, size: int) -> bool:
    """Whether one operand is a square matrix that the program writes or puts together: a rotation, a pose."""
    for atom, flow in zip(site.eqn.invars, site.ins, strict=True):
        if atom.aval.shape[-2:] != (size, size):
            continue
        step, _ = _maker_behind_views(site, atom)
        if step is not None and (has(step.eqn, Trait.ASSEMBLES) or step.rule == "short"):
            return True
        if size < site.heuristics.short and flow is not None and not flow.has(Mark.TRAINED):
            return True
    return False


def _is_stencil(site: Site) -> bool:
    """Whether a convolution is a difference, a blur, a window: of one channel that the program writes, or into one."""
    if not has_one_channel(site.eqn) or site.ins[1] is None:
        return False
    return makes_one_channel(site.eqn) or not site.ins[1].has(Mark.TRAINED)


def _weighs(site: Site) -> bool:
    """Whether one operand is a few columns of numbers that are no weights: bins, a grid.

    `softmax(h) @ arange(400.0)` is an expectation, a weighted sum as `jnp.sum` is a sum.
    """
    limits = (1, site.heuristics.short)  # A few rows on the left are a small batch of data.
    return not _of_tangents(site) and any(
        flow is not None
        and not flow.has(Mark.TRAINED | Mark.RANDOM)
        and flow.has(Mark.FRACTION | Mark.ROUNDS)
        and size <= limit
        for flow, size, limit in zip(site.ins, free_sizes(site.eqn), limits, strict=False)
    )


def _selects(site: Site) -> bool:
    """Whether one operand is of integers that the program makes, such as one-hot rows, and the other float32.

    A selection from log-probabilities gives log-probabilities, of which the absolute error counts, if that is what its
    readers want. A table that is learned, and half data, stay half.
    """
    return _wants_all_digits(site) and any(
        one is not None
        and not one.has(Mark.FRACTION | Mark.GIVEN)
        and other is not None
        and other.kind != Kind.HALF
        and _is_computed(site, atom, other)
        for one, (atom, other) in zip(site.ins, _pairs(site)[::-1], strict=True)
    )


def _is_written(site: Site) -> bool:
    """Whether one operand is of numbers that the program makes and half would change, and the other float32.

    Powers of a discount, the basis of a cosine transform: no layer.
    """
    return _wants_all_digits(site) and any(
        one is not None
        and not one.has(Mark.GIVEN | Mark.RANDOM)
        and one.has(Mark.FRACTION | Mark.ROUNDS)
        and other is not None
        and other.kind != Kind.HALF
        for one, other in ((site.ins[:2]), (site.ins[1::-1]))
    )


def _has_solution(site: Site) -> bool:
    """Whether one operand solves an equation, and the other was computed in float32: their product cancels.

    Such are residuals, predictions of a Gaussian process, and what is left of a covariance. A product of a solution
    with weights is a layer, as behind a deep equilibrium model.
    """
    if not has(site.eqn, Trait.MATRIX) or _of_tangents(site):
        return False
    pairs = _pairs(site)
    return any(
        one is not None
        and one.has(Mark.SOLUTION)
        and other is not None
        and other.kind != Kind.HALF
        and (other.has(Mark.SOLUTION) or _is_computed(site, atom, other) or _made_of(site, solution, atom))
        for (solution, one), (atom, other) in (pairs, pairs[::-1])
    )


def _made_of(site: Site, solution: Atom, atom: Atom) -> bool:
    """Whether a solution is that of a system in a matrix: what is left of it is their product, less what was asked."""
    step, matrix = _maker_behind_views(site, solution)[0], _maker_behind_views(site, atom)[1]
    if step is None or not _solves(step.eqn):  # One more iteration of a deep equilibrium is a layer.
        return False
    return any(_maker_behind_views(site, operand)[1] is matrix for operand in step.operands)


def _solves(eqn: Eqn) -> bool:
    """Whether an equation is of linear algebra, or calls such a function, as `jnp.linalg.solve` does."""
    if has(eqn, Trait.CALLS):
        return any(_solves(inner) for jaxpr in inner_jaxprs(eqn) for inner in open_jaxpr(jaxpr).eqns)
    return has(eqn, Trait.SOLVES)


def _maker_behind_views(site: Site, atom: Atom) -> tuple[Step | None, Atom]:
    """The step that makes a value, and the value, before it was moved."""
    return site.behind(atom, lambda eqn: has(eqn, Trait.VIEW | Trait.MOVES | Trait.CONVERTS))


def _wants_all_digits(site: Site) -> bool:
    """Whether an equation is a matrix product whose readers want float32, not for scores alone."""
    want = site.wants[0]
    return has(site.eqn, Trait.MATRIX) and want.full and want is not Want.SCORE and not _of_tangents(site)


def _of_tangents(site: Site) -> bool:
    return any(flow is not None and flow.has(Mark.TANGENT) for flow in site.ins)


def _pairs(site: Site) -> list[tuple[Atom, Flow | None]]:
    return list(zip(site.eqn.invars, site.ins, strict=True))


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


def _insists_on_full(eqn: Eqn) -> bool:
    """Whether the call asks for more than the default: `precision=HIGHEST`, or an algorithm by name.

    What `jax.image` says always is no word about this product.
    """
    precision = eqn.params.get("precision")
    if precision is None:
        return False
    if isinstance(precision, tuple):
        highest = any(p == lax.Precision.HIGHEST for p in precision)
        return highest and "_scale_and_translate" not in function_names(eqn)
    return precision not in (lax.Precision.DEFAULT, lax.Precision.HIGH)


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
    for weight, other in zip(site.ins[:2], site.ins[1::-1], strict=True):
        if weight is None or other is None or weight.kind not in (Kind.LAZY, Kind.HALF):
            continue
        carried = any(root.role == "carry" and not root.limited for root in other.roots)
        if carried or other.kind not in (Kind.LAZY, Kind.WEAK):
            found.update(root for root in weight.roots if root.role == "xs")
    return frozenset(found)


def with_wide_gradients(site: Site, step: Step) -> Step:
    """A product whose weights, which are float32 and cast to half for it, have gradients in float32."""
    plain = isinstance(step.rewrite, Retyped | WideProduct | None)
    if not site.planner.setting.wide_gradients or rule_of(site.eqn) is not Rule.HALF or not plain:
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
