"""Which products run in 8 bits, and why the others do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from jax import lax

from jamp._compat import Eqn
from jamp._primitives import MOVED, Trait, has
from jamp.transforms.analysis.regimes import Float8, Products
from jamp.transforms.planning.site import Site
from jamp.transforms.program.flow import Flow
from jamp.transforms.program.heuristics import Heuristics
from jamp.transforms.program.marks import Mark
from jamp.transforms.program.rewrites import Float8Product
from jamp.transforms.program.setting import EightBits, Scaling


class _Sizes(NamedTuple):
    """Sizes of a matrix product; a convolution is one at each offset of its kernel."""

    rows: int
    columns: int
    contracted: int
    offsets: int = 1

    def told(self, of: Callable[[int], bool]) -> str:
        """The sizes of which something is true, in words: `"72 columns and 24 contracted elements are"`."""
        names = ("rows", "columns", "contracted elements")
        found = [f"{size} {name}" for size, name in zip(self, names, strict=False) if of(size)]
        return f"{' and '.join(found)} are" if found else ""


def float8_product(site: Site, gives_float32: bool) -> Float8Product | None:
    """What a product in half is rewritten to where it runs in 8 bits; None where it stays half.

    Of attention, whose operands are computed both, and of logits each digit counts.

    Args:
        site: The product.
        gives_float32: Whether its result is float32, because float32 operations alone read it: logits.
    """
    if _reason(site, gives_float32):
        return None
    options = site.planner.setting.eight_bits
    # Of two stored operands the program may differentiate either.
    stored = [_is_stored(flow) for flow in site.ins]
    in_half = (options.weight_grad_in_half and stored[0], options.weight_grad_in_half and stored[1])
    if has(site.eqn, Trait.CONVOLVES):  # XLA has no float8 kernel for the gradient of a convolution's kernel.
        in_half = (in_half[0], True)
    scalings = _scalings(site.eqn, options)
    wide = gives_float32 or site.regime.products is Products.HALF_ONLY
    out = site.wide if wide else site.half
    return Float8Product(
        half=site.half,
        out=out,
        options=options,
        scalings=scalings,
        in_half=in_half,
        wide_gradients=site.planner.setting.wide_gradients,
    )


def _scalings(eqn: Eqn, options: EightBits) -> tuple[Scaling, Scaling]:
    """Which elements of both operands share a scale."""
    first, second = (len(atom.aval.shape) for atom in eqn.invars[:2])
    if has(eqn, Trait.MATRIX):
        contracted, batch = eqn.params["dimension_numbers"]
        return (
            options.scaling(tuple(contracted[0]), tuple(batch[0]), first),
            options.scaling(tuple(contracted[1]), tuple(batch[1]), second),
        )
    if has(eqn, Trait.GROUPS):
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        return Scaling(ragged=numbers.lhs_ragged_dimensions[0]), options.scaling(
            (), numbers.rhs_group_dimensions, second
        )
    return Scaling(), Scaling()


def why_not_in_8_bits(site: Site, rule: str) -> str:
    """In words, why a product does not run in 8 bits.

    Args:
        site: The product.
        rule: The name of the rule that decided what it runs in.
    """
    if rule == "explicit precision":
        return "its `precision` asks for more than half"
    if rule in _OF_FLOAT32:
        return f"it is float32: {_OF_FLOAT32[rule]}"
    because = _reason(site, rule == "half, float32 out")
    return because or (_reason(site, True) if rule == "half" else "") or f"its rule is {rule!r}"


_OF_FLOAT32 = {
    "phase": "it makes angles, coordinates or indices",
    "count": "it adds up integers",
    "short": "it is over the dimensions of space",
    "frame": "it multiplies matrices near an identity",
    "stencil": "it is a stencil of one channel",
    "mean": "it is a weighted mean",
    "divisor": "it is a product with a vector that is divided by",
    "kernel": "it is a product with exponentials that is divided by their sum, or with a power spectrum",
    "written": "one operand is numbers that the program writes",
    "difference": "it takes differences, by a matrix that the program writes",
    "cancelling": "it cancels with squares of what it multiplies, or belongs to a system of equations",
    "scaled": "numbers beyond the half range scale what it is given",
    "solution": "it cancels what linear algebra or a solver made",
    "literals": "the program writes both operands",
}


def _reason(site: Site, gives_float32: bool) -> str:
    """Why a product that could be half does not run in 8 bits; empty where it does."""
    if site.regime.float8 is Float8.NONE:
        return "rules of the policy, or a mark in the program, leave it out"
    reason = _impossible(site)
    if reason or site.regime.float8 is Float8.ALL:
        return reason
    return "float32 operations alone read it, as they read logits" if gives_float32 else _unsuitable(site)


def _is_stored(flow: Flow | None) -> bool:
    return flow is not None and flow.has(Mark.STORED)


def _sizes(eqn: Eqn) -> _Sizes | None:
    """Sizes of a product, of that of a group on the mean; None where they are not known."""
    shapes = [atom.aval.shape for atom in eqn.invars[:2]]
    if not all(type(size) is int for shape in shapes for size in shape):
        return None
    if has(eqn, Trait.CONVOLVES):
        outputs, inputs, *_ = eqn.params["dimension_numbers"].rhs_spec
        columns, contracted = shapes[1][outputs], shapes[1][inputs]
        rows = math.prod(eqn.outvars[0].aval.shape) // max(columns, 1)
        return _Sizes(rows, columns, contracted, math.prod(shapes[1]) // max(columns * contracted, 1))
    (contracted, _), (batch, _) = _dot_numbers(eqn)
    inner = math.prod(shapes[0][axis] for axis in contracted)
    if has(eqn, Trait.GROUPS):
        groups = max(math.prod(eqn.invars[2].aval.shape), 1)
        rows, columns = (math.prod(shape) // max(inner * groups, 1) for shape in shapes)
        return _Sizes(rows, columns, inner)
    outer = math.prod(shapes[0][axis] for axis in batch)
    rows, columns = (math.prod(shape) // max(inner * outer, 1) for shape in shapes)
    return _Sizes(rows, columns, inner)


def _dot_numbers(eqn: Eqn) -> lax.DotDimensionNumbers:
    """The dimension numbers of a matrix product, or of the matrix product of each group."""
    if has(eqn, Trait.MATRIX):
        return eqn.params["dimension_numbers"]
    return eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers


def _is_plain(eqn: Eqn) -> bool:
    """Whether a convolution has all channels in one group, or a grouped product a matrix for each group."""
    params = eqn.params
    if has(eqn, Trait.CONVOLVES):
        return params["feature_group_count"] == params["batch_group_count"] == 1
    numbers = params["ragged_dot_dimension_numbers"]
    (contracted, _), (batch, _) = numbers.dot_dimension_numbers
    if len(numbers.rhs_group_dimensions) != 1 or len(eqn.invars[2].aval.shape) != 1:
        return False
    return not batch and not {*numbers.lhs_ragged_dimensions} & {*contracted}


def _impossible(site: Site) -> str:
    """Why no device can, or JAX cannot round the operands in a backward pass; empty where they can."""
    if any(flow is None or flow.has(Mark.TANGENT) for flow in site.ins[:2]):
        return "it is of a tangent or a cotangent, in a rule of `custom_jvp` or `custom_vjp`"
    return why_never_in_8_bits(site.eqn, site.planner.setting.eight_bits, site.heuristics)


def why_never_in_8_bits(eqn: Eqn, options: EightBits, heuristics: Heuristics) -> str:
    """In words, why no rule brings a product into 8 bits, whatever its operands are; empty where one does."""
    if not has(eqn, Trait.MATRIX):
        kind = "convolution" if has(eqn, Trait.CONVOLVES) else "grouped product"
        if options.scales != "tensor":
            return f"an operand of a {kind} has one scale" + (" for each group" if has(eqn, Trait.GROUPS) else "")
        if not _is_plain(eqn):
            return f"it is a {kind} in groups of its own"
        if eqn.params.get("out_sharding") is not None:
            return f"it is a {kind} with an `out_sharding`"
    elif getattr(getattr(eqn.params.get("out_sharding"), "spec", None), "unreduced", None):
        return "its `out_sharding` leaves a sum over devices to later"  # Which scales would be multiplied with.
    sizes, multiple = _sizes(eqn), heuristics.float8_multiple
    if sizes is None:
        return "its sizes are not known while tracing"
    aligned = sizes if has(eqn, Trait.MATRIX) else sizes._replace(rows=multiple)
    if odd := aligned.told(lambda size: size == 0 or size % multiple > 0):
        return f"{odd} no multiple of {multiple}"
    if options.blocks and not _has_blocks(eqn):
        return f"what it contracts is not one axis in blocks of {Scaling.BLOCK}"
    return ""


def _has_blocks(eqn: Eqn) -> bool:
    """Whether what is contracted is one axis that can be cut in blocks."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return len(contracted) == 1 and eqn.invars[0].aval.shape[contracted[0]] % Scaling.BLOCK == 0


def _unsuitable(site: Site) -> str:
    """Why a product is better left in half: what it multiplies, or its sizes; empty where it is not."""
    batch = () if has(site.eqn, Trait.CONVOLVES) else _dot_numbers(site.eqn)[1][0]
    sizes, heuristics = _sizes(site.eqn), site.heuristics
    stored = [_is_stored(flow) for flow in site.ins[:2]]
    repeated = [flow is not None and flow.has(Mark.REPEATED) for flow in site.ins[:2]]
    if any(repeated):
        return "a loop would round its weight anew in each iteration"
    if not any(stored):
        return "both operands are computed" + (", as in attention" if batch else ": none is a weight, or data")
    if batch and all(stored) and _is_as_given(site, 0) and _is_as_given(site, 1):
        return "both operands are given, with axes of a batch"
    assert sizes is not None  # Or it were impossible.
    if small := sizes.told(lambda size: size < heuristics.float8_least):
        return f"{small} few: less than {heuristics.float8_least}"
    factors = sizes.offsets * sizes.columns
    if has(site.eqn, Trait.CONVOLVES) and factors < heuristics.float8_convolution:
        return f"{factors} factors of each number are few: less than {heuristics.float8_convolution}"
    given = [index for index in range(2) if stored[index] and _is_as_given(site, index)]
    weights = given if len(given) < 2 else [_side_of_weight(site.eqn)]
    return next(filter(None, (_few_beside(sizes, index, heuristics) for index in weights)), "")


def _side_of_weight(eqn: Eqn) -> int:
    """Of two operands that are given, the one that is the weight as layers are written.

    In `x @ w` it is on the right, and its first axis is added up. A layer of one member, `w @ x`, that is mapped over a
    batch has it on the left: there the first axis on the right is the batch.
    """
    if not has(eqn, Trait.MATRIX):
        return 1
    (_, contracted), (_, batch) = eqn.params["dimension_numbers"]
    first = min(axis for axis in range(eqn.invars[1].aval.ndim) if axis not in batch)
    return 1 if first in contracted else 0


def _few_beside(sizes: _Sizes, index: int, heuristics: Heuristics) -> str:
    """In words, what is few beside the operand on one side, if that is the weight; empty where it is enough."""
    rows, longest = sizes[1 - index], max(sizes[index], sizes.contracted)
    rows *= sizes.offsets if index == 0 else 1  # How often an element is multiplied.
    if longest < heuristics.float8_rows * rows or rows >= heuristics.float8_enough:
        return ""
    return f"{rows} {sizes._fields[1 - index]} are few beside a weight with a side of {longest}"


def _is_as_given(site: Site, index: int) -> bool:
    """Whether an operand was moved at most: weights, and not the norm of an embedding, which costs no pass to read."""
    moves = MOVED | Trait.ASSEMBLES
    step, _ = site.behind(site.eqn.invars[index], lambda eqn: has(eqn, moves))
    return step is None
