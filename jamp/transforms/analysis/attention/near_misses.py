"""Products that are nearly the last one of an attention: what keeps them from being one, for the report."""

from __future__ import annotations

import dataclasses

from jamp._compat import Literal
from jamp._primitives import SCALES, Trait, has
from jamp.transforms.analysis.attention.conditions import Knows
from jamp.transforms.analysis.attention.trail import Trail
from jamp.transforms.analysis.attention.weights import Weights
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source
from jamp.transforms.program.flow import num_elements

_PASSES = (
    Trait.VIEW | Trait.CONVERTS | Trait.ADDS | SCALES | Trait.NEGATES | Trait.SELECTS
    | Trait.EXTREMUM | Trait.TAKES_EXTREMUM | Trait.SUMS_AXES | Trait.SLICES | Trait.ASSEMBLES | Trait.EXPONENTIAL
    | Trait.OF_RESULT | Trait.LOGARITHM | Trait.POWER
)  # fmt: skip
_MOST = 200  # Equations that are looked at.


@dataclasses.dataclass
class _Seen:
    """What weights are made of, as far back as products.

    Attributes:
        above: Equations that nothing makes an exponential of.
        below: Equations in front of an exponential.
        products: Products of scores in front of an exponential.
        plain: Products of scores that no exponential is between.
    """

    above: list[Flat] = dataclasses.field(default_factory=list)
    below: list[Flat] = dataclasses.field(default_factory=list)
    products: list[Flat] = dataclasses.field(default_factory=list)
    plain: list[Flat] = dataclasses.field(default_factory=list)


def near_miss(opened: Opened, last: Flat, known: Knows) -> str:
    """Why a product is no attention, if it nearly is one; empty elsewhere.

    Args:
        opened: The jaxpr.
        last: The product.
        known: What is known of inputs and constants.
    """
    for side in (0, 1):
        seen = _look(opened, last.ins[side])
        if reason := _of_exponentials(opened, last, side, seen, known) or _of_no_softmax(last, seen):
            return reason
    return ""


def _look(opened: Opened, source: Source) -> _Seen:
    seen, done = _Seen(), set[tuple[int, bool]]()
    left = [(source, False)]
    while left and len(done) < _MOST:
        source, below = left.pop()
        flat = opened.maker(source)
        if flat is None or (id(flat), below) in done:
            continue
        done.add((id(flat), below))
        if has(flat.eqn, Trait.MATRIX):
            (seen.products if below else seen.plain).append(flat)
            continue
        if not has(flat.eqn, _PASSES):
            continue
        (seen.below if below else seen.above).append(flat)
        below = below or has(flat.eqn, Trait.EXPONENTIAL)
        left += [(each, below) for each in flat.ins if not isinstance(each, Literal) and each.aval.ndim]
    return seen


def _of_exponentials(opened: Opened, last: Flat, side: int, seen: _Seen, known: Knows) -> str:
    size = num_elements(last.ins[side].aval)
    exponentials = [
        flat for flat in seen.above
        if has(flat.eqn, Trait.EXPONENTIAL) and num_elements(flat.outs[0].aval) >= size
    ]  # fmt: skip
    if not exponentials or not any(map(_is_of_rows, seen.products)):
        return ""
    if any(has(flat.eqn, Trait.LOGARITHM) for flat in seen.below):
        return "its weights are the exponential of a log-softmax: write jax.nn.softmax"
    if len(seen.products) > 1 and len(exponentials) > 1:
        return "its weights are made of several softmaxes"
    if any(has(flat.eqn, Trait.ASSEMBLES) for flat in seen.below):
        return "its softmax has columns beside those of its keys, as attention sinks"
    if not any(has(flat.eqn, Trait.SUMS_AXES) for flat in seen.above):
        return "its weights are not divided by their sum before the product with the values"
    if _is_over_others(opened, last, side, known):
        return "its softmax is over another axis than the product with its weights"
    if any(has(flat.eqn, Trait.DIVIDES) and _adds_to_sum(opened, flat.ins[-1]) for flat in seen.above):
        return "something is added to the sum that its softmax divides by"
    return "its weights are more than a softmax of its scores"


def _is_of_rows(product: Flat) -> bool:
    """Whether both operands of a product have an axis of their own."""
    contracted, batch = product.eqn.params["dimension_numbers"]
    sides = zip(product.ins, contracted, batch, strict=True)
    return all(source.aval.ndim > len(bound) + len(together) for source, bound, together in sides)


def _is_over_others(opened: Opened, last: Flat, side: int, known: Knows) -> bool:
    trail, weights = Trail(opened, known), last.ins[side]
    layout = trail.axes.fresh(weights.aval.shape)
    return Weights(trail, any_axis=True).logits(weights, layout) is not None


def _adds_to_sum(opened: Opened, source: Source) -> bool:
    flat = opened.maker(source)
    while flat is not None and has(flat.eqn, Trait.VIEW | Trait.CONVERTS):
        flat = opened.maker(flat.ins[0])
    return flat is not None and has(flat.eqn, Trait.ADDS)


def _of_no_softmax(last: Flat, seen: _Seen) -> str:
    """Of products that each have at least two axes in common, as batch and heads: others are layers."""
    scores = [flat for flat in seen.plain if _is_of_rows(flat) and _in_common(flat) >= 2]
    if not scores or _in_common(last) < 2 or any(has(flat.eqn, Trait.EXPONENTIAL) for flat in seen.above):
        return ""
    functions = Trait.OF_RESULT | Trait.EXTREMUM
    names = [flat.eqn.primitive.name for flat in seen.above if has(flat.eqn, functions)]
    if names:
        return f"it has no softmax: its scores go through `{names[0]}`"
    return "it has no softmax, as linear attention"


def _in_common(product: Flat) -> int:
    return len(product.eqn.params["dimension_numbers"][1][0])
