"""Which products run in 8 bits."""

from __future__ import annotations

import math

from jamp._primitives import Trait, has
from jamp.transforms.analysis.regimes import Float8, Products
from jamp.transforms.planning.site import Site
from jamp.transforms.program.flow import Mark
from jamp.transforms.program.plan import Float8Product, Scaling


def float8_product(site: Site, gives_float32: bool) -> Float8Product | None:
    """What a product in half is rewritten to where it runs in 8 bits; None where it stays half.

    Of attention, whose operands are computed both, and of logits each digit counts. Convolutions and grouped products
    have no kernel in 8 bits that XLA would take without a library of its own.

    Args:
        site: The product.
        gives_float32: Whether its result is float32, because float32 operations alone read it: logits.
    """
    chosen = site.regime.float8
    if chosen is Float8.NONE or not has(site.eqn, Trait.MATRIX) or not _is_possible(site):
        return None
    stored = [flow is not None and flow.has(Mark.STORED) for flow in site.ins]
    if chosen is Float8.CHOSEN and (gives_float32 or not _suits(site, stored)):
        return None
    options = site.planner.setting.eight_bits
    # Of two stored operands the program may differentiate either.
    in_half = (options.weight_grad_in_half and stored[0], options.weight_grad_in_half and stored[1])
    wide = gives_float32 or site.regime.products is Products.HALF_ONLY
    return Float8Product(half=site.half, out=site.wide if wide else site.half, options=options, in_half=in_half)


def _sizes(site: Site) -> tuple[int, int, int] | None:
    """Rows, columns and contracted elements of a matrix product; None where they are not known."""
    (contracted, _), (batch, _) = site.eqn.params["dimension_numbers"]
    shapes = [atom.aval.shape for atom in site.eqn.invars]
    if not all(type(size) is int for shape in shapes for size in shape):
        return None
    inner = math.prod(shapes[0][axis] for axis in contracted)
    outer = math.prod(shapes[0][axis] for axis in batch)
    rows, columns = (math.prod(shape) // max(inner * outer, 1) for shape in shapes)
    return rows, columns, inner


def _is_possible(site: Site) -> bool:
    """Whether a device can: sizes that a kernel takes, and operands that JAX may round in a backward pass."""
    if any(flow is None or flow.has(Mark.TANGENT) for flow in site.ins):
        return False
    if site.eqn.params.get("out_sharding") is not None:
        return False
    sizes, options = _sizes(site), site.planner.setting.eight_bits
    if sizes is None or any(size == 0 or size % site.heuristics.float8_multiple for size in sizes):
        return False
    return not options.blocks or _has_blocks(site)


def _has_blocks(site: Site) -> bool:
    """Whether what is contracted is one axis that can be cut in blocks."""
    (contracted, _), _ = site.eqn.params["dimension_numbers"]
    return len(contracted) == 1 and site.eqn.invars[0].aval.shape[contracted[0]] % Scaling.BLOCK == 0


def _suits(site: Site, stored: list[bool]) -> bool:
    """Whether one operand is a weight, or data, and the product is large enough, and large beside the weight."""
    _, (batch, _) = site.eqn.params["dimension_numbers"]
    sizes, heuristics = _sizes(site), site.heuristics
    if sizes is None or min(sizes) < heuristics.float8_least or not any(stored) or (batch and all(stored)):
        return False
    *free, inner = sizes
    return all(
        max(mine, inner) < heuristics.float8_rows * rows
        for is_stored, mine, rows in zip(stored, free, free[::-1], strict=True)
        if is_stored
    )
