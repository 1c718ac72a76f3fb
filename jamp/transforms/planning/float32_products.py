"""Matrix products and convolutions that stay float32: their absolute error counts, and no matrix unit would help."""

from __future__ import annotations

from jamp._compat import Atom, Eqn, nominal_size
from jamp._primitives import FUNCTIONS, MOVED, Rule, Trait, has, holds, is_outer, rule_of
from jamp.transforms.analysis.reading.axes import (
    free_sizes,
    has_one_channel,
    is_moment,
    makes_one_channel,
    num_contracted,
    operators,
    weights,
)  # fmt: skip
from jamp.transforms.planning.site import Site
from jamp.transforms.program.flow import Flow, num_elements
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import Mark
from jamp.transforms.program.plan import Step
from jamp.transforms.program.want import Want


def float32_because(site: Site) -> str | None:
    """Why a product is float32, in a word for the report: its absolute error counts, and no matrix unit would help."""
    if _is_of_positions(site):
        return "phase"
    if is_outer(site.eqn):  # What was found of it apart, it is as elementwise as `x * y`.
        return _known(site)
    if _counts(site):
        return "count"
    if _is_short(site):
        return "short"
    if is_of_frames(site):
        return "frame"
    if _is_stencil(site):
        return "stencil"
    if _takes_differences(site):
        return "difference"
    if (found := _known(site)) is not None:
        return found
    if _weighs(site) or _selects(site) or _is_written(site):
        return "written"
    return "solution" if _has_solution(site) else None


def _known(site: Site) -> str | None:
    """What analyses of the whole jaxpr found of a product."""
    if of_tangents(site):
        return None
    facts, product = site.planner.demand.facts, site.eqn.outvars[0]
    if product in facts.cancelling:
        return "cancelling"
    if product in facts.means:
        return "mean"
    if product in facts.divisors and _none_is_half(site):
        return "divisor"
    return "kernel" if product in facts.kernels else None


def is_computed(site: Site, atom: Atom, flow: Flow | None) -> bool:
    """Whether an operand is no argument, such as a weight."""
    if flow is not None and (flow.kind > Kind.LAZY or any(root.role == "carry" for root in flow.roots)):
        return True
    step, _ = site.behind(atom, lambda eqn: rule_of(eqn) is Rule.FOLLOW)
    return step is not None


def is_of_frames(site: Site) -> bool:
    """Whether both operands are matrices near an identity, as in `f.T @ f - eye(n)` and `turn @ turn`.

    What was added to the identity is all that counts, and products of such matrices go on adding to it.
    """
    return has(site.eqn, Trait.MATRIX) and all(
        flow is not None
        and flow.has(Mark.FRAME)
        and not flow.has(Mark.TANGENT)
        and flow.kind != Kind.HALF
        and atom.aval.shape[-2:-1] == atom.aval.shape[-1:]
        for atom, flow in _pairs(site)
    )


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


def _none_is_half(site: Site) -> bool:
    return not any(flow and flow.kind == Kind.HALF for flow in site.ins)


def _counts(site: Site) -> bool:
    """Whether both operands are integers by construction: one-hot rows, triangles of ones, ids.

    257 is 256 in bfloat16. Gathers of a learned table by one-hot rows multiply fractions, and stay half.
    """
    return all(flow is None or not flow.has(Mark.FRACTION) for flow in site.ins)


def _is_short(site: Site) -> bool:
    """Whether a product of float32 operands contracts so few elements that it is a map of coordinates.

    Rotations, cells, cameras, moments: no matrix unit makes these faster, and their absolute error counts. One operand
    is as small as space in all that is no batch; else it would be the gradient of a layer, contracted over a batch of
    two.
    """
    if not has(site.eqn, Trait.MATRIX):
        return False
    # Not so the weights of an attention over three tokens, which are quotients.
    no_place = Mark.TANGENT | Mark.QUOTIENT
    if any(flow is None or flow.has(no_place) for flow in site.ins):
        return False
    if is_moment(site.eqn, site.heuristics.short) and _none_is_half(site):
        return True
    wide = [(atom, flow) for atom, flow in _pairs(site) if flow is not None and flow.kind != Kind.HALF]
    # What a network places, such as the points of a frame, is half; weights that it is multiplied with are a layer's.
    if not wide or (len(wide) == 1 and not is_computed(site, *wide[0])):
        return False
    contracted, short = num_contracted(site.eqn), site.heuristics.short
    others = _shortest_axes(site.eqn)
    if contracted == short:
        return min(others) <= short
    # Moments of points, such as their inertia, and not the scores of three tokens.
    of_points = others == [short, short] and short in free_sizes(site.eqn)  # Of one set, or of each of several.
    if of_points and len(wide) == 2 and Want.SCORE not in site.wants:
        return True
    in_space = abs(contracted - short) == 1 and any(0 < size <= contracted for size in others)
    return in_space and any(_is_built(site, *operand) for operand in _pairs(site))


def _shortest_axes(eqn: Eqn) -> list[int]:
    """The shortest axis of each operand beside the contracted ones and those of the batch; zero of a vector."""
    contracted, batch = eqn.params["dimension_numbers"]
    return [
        min(
            (nominal_size(size) for axis, size in enumerate(atom.aval.shape) if axis not in (*of_sum, *of_batch)),
            default=0,
        )
        for atom, of_sum, of_batch in zip(eqn.invars, contracted, batch, strict=True)
    ]


def _is_built(site: Site, atom: Atom, flow: Flow | None) -> bool:
    """Whether an operand is a frame, a pose, or points with a number beside them."""
    if flow is None:
        return False
    # As it is, an identity turns nothing.
    if flow.has(Mark.BUILT) or (flow.has(Mark.FRAME) and flow.has(Mark.TRAINED)):
        return True
    rows, columns = (0, *atom.aval.shape)[-2:]
    is_of_plane = columns < site.heuristics.short and not flow.has(Mark.TRAINED)
    return rows == columns and (is_of_plane or flow.has(Mark.SOLUTION))


def _is_stencil(site: Site) -> bool:
    """Whether a convolution is a difference, a blur, a window: of one channel that the program writes, or into one."""
    if not has_one_channel(site.eqn) or site.ins[1] is None:
        return False
    return makes_one_channel(site.eqn) or not site.ins[1].has(Mark.TRAINED)


def _takes_differences(site: Site) -> bool:
    """Whether one operand is a matrix of both signs that the program writes, and the other float32.

    Derivatives, Laplacians, what centres data: of numbers around 1000 a difference by a matrix of ones was 12 times too
    large in bfloat16.
    """
    if not has(site.eqn, Trait.MATRIX) or of_tangents(site):
        return False
    pairs, of_operators = _pairs(site), operators(site.eqn, site.heuristics.tallest)
    return any(
        one is not None
        and one.has(Mark.SIGNED)
        and not one.has(Mark.SAMPLED)
        and atom in of_operators
        and num_elements(atom.aval) > 1
        and other is not None
        and other.kind != Kind.HALF
        for (atom, one), (_, other) in (pairs, pairs[::-1])
    )


def _weighs(site: Site) -> bool:
    """Whether one operand is a few columns of numbers that are no weights: bins, a grid.

    `softmax(h) @ arange(400.0)` is an expectation, a weighted sum as `jnp.sum` is a sum.
    """
    flows = [site.ins[index] for index in weights(site.eqn, site.heuristics.short)]
    return not of_tangents(site) and any(
        flow is not None and not flow.has(Mark.TRAINED | Mark.SAMPLED) and flow.has(Mark.FRACTION | Mark.ROUNDS)
        for flow in flows
    )


def _selects(site: Site) -> bool:
    """Whether one operand is of integers that the program makes, such as one-hot rows, and the other float32.

    A selection from log-probabilities gives log-probabilities, of which the absolute error counts, if that is what its
    readers want. A table that is learned, and half data, stay half. What an identity selects is all of a matrix, which
    is a Jacobian: that of a filter's transition is what its covariance is moved by.
    """
    return _wants_all_digits(site) and any(
        one is not None
        and not one.has(Mark.FRACTION | Mark.GIVEN)
        and other is not None
        and other.kind != Kind.HALF
        and (one.has(Mark.FRAME) or is_computed(site, atom, other))
        for one, (atom, other) in zip(site.ins, _pairs(site)[::-1], strict=True)
    )


def _is_written(site: Site) -> bool:
    """Whether one operand is of numbers that the program makes and half would change, and the other float32.

    Powers of a discount, the basis of a cosine transform: no layer.
    """
    return _wants_all_digits(site) and any(
        one is not None
        and not one.has(Mark.GIVEN | Mark.SAMPLED)
        and one.has(Mark.FRACTION | Mark.ROUNDS)
        and other is not None
        and other.kind != Kind.HALF
        for one, other in ((site.ins[:2]), (site.ins[1::-1]))
    )


def _has_solution(site: Site) -> bool:
    """Whether one operand solves an equation, and the other was computed in float32: their product cancels.

    Such are residuals, predictions of a Gaussian process, and what is left of a covariance. A product of a solution
    with weights is a layer, as behind a deep equilibrium model. float16 has no range for an inverse, whose numbers are
    as large as those of the matrix are small, whatever it multiplies.
    """
    if of_tangents(site):
        return False
    if site.eqn.outvars[0] in site.planner.demand.facts.solved and _none_is_half(site):
        return True
    if not has(site.eqn, Trait.MATRIX):
        return False
    pairs = _pairs(site)
    return any(
        one is not None
        and one.has(Mark.SOLUTION)
        and other is not None
        and (other.kind != Kind.HALF or (site.pair.lacks_range and _is_inverse(site, solution)))
        and (other.has(Mark.SOLUTION) or is_computed(site, atom, other) or _made_of(site, solution, atom))
        for (solution, one), (atom, other) in (pairs, pairs[::-1])
    )


def _made_of(site: Site, solution: Atom, atom: Atom) -> bool:
    """Whether a solution is that of a system in a matrix: what is left of it is their product, less what was asked."""
    step, matrix = _maker_behind_views(site, solution)[0], _maker_behind_views(site, atom)[1]
    if step is None or not holds([step.eqn], Trait.SOLVES, Trait.CALLS):
        return False  # One more iteration of a deep equilibrium is a layer.
    return any(_maker_behind_views(site, operand)[1] is matrix for operand in step.operands)


def _is_inverse(site: Site, solution: Atom) -> bool:
    """Whether a solution is a square matrix, as that is of whose system it is."""
    step, solution = _maker_behind_views(site, solution)
    if step is None or not holds([step.eqn], Trait.SOLVES, FUNCTIONS):
        return False
    rows, columns = solution.aval.shape[-2:] if len(solution.aval.shape) > 1 else (0, 1)
    return rows == columns and any(atom.aval.shape == solution.aval.shape for atom in step.eqn.invars)


def _maker_behind_views(site: Site, atom: Atom) -> tuple[Step | None, Atom]:
    """The step that makes a value, and the value, before it was moved."""
    return site.behind(atom, lambda eqn: has(eqn, MOVED))


def _wants_all_digits(site: Site) -> bool:
    """Whether an equation is a matrix product whose readers want float32, not for scores alone."""
    want = site.wants[0]
    return has(site.eqn, Trait.MATRIX) and want.full and want is not Want.SCORE and not of_tangents(site)


def of_tangents(site: Site) -> bool:
    """Whether an operand is a tangent, in a rule of `custom_jvp`, and none of a solution's."""
    return any(flow is not None and flow.has(Mark.TANGENT) and not flow.has(Mark.SOLUTION) for flow in site.ins)


def _pairs(site: Site) -> list[tuple[Atom, Flow | None]]:
    return list(zip(site.eqn.invars, site.ins, strict=True))
