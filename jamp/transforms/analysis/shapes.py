"""What the shapes of the operands of a product say of it."""

from __future__ import annotations

import math

from jamp._compat import Atom, Eqn, nominal_size
from jamp._primitives import Trait, has


def has_one_channel(eqn: Eqn) -> bool:
    """Whether an equation is a convolution whose kernel reads one channel: a difference, a blur, a window."""
    if not has(eqn, Trait.CONVOLVES):
        return False
    _, in_channels, *_ = eqn.params["dimension_numbers"].rhs_spec
    return eqn.invars[1].aval.shape[in_channels] == 1


def makes_one_channel(eqn: Eqn) -> bool:
    """Whether a convolution has one result for each window: no matrix unit makes it faster, learned or not."""
    out_channels, *_ = eqn.params["dimension_numbers"].rhs_spec
    return eqn.invars[1].aval.shape[out_channels] == 1


def is_reduction(eqn: Eqn) -> bool:
    """A product without free axes on either side is a sum, and belongs with the reductions."""
    if not has(eqn, Trait.MATRIX):
        return False
    (contract, _), (batch, _) = eqn.params["dimension_numbers"]
    return all(var.aval.ndim == len(contract) + len(batch) for var in eqn.invars)


def free_sizes(eqn: Eqn) -> tuple[int, ...]:
    """Of each operand of a matrix product, the elements for each contracted one of each batch; nothing for others."""
    if not has(eqn, Trait.MATRIX):
        return ()
    contracted, batch = eqn.params["dimension_numbers"]
    return tuple(
        nominal_size(math.prod(size for axis, size in enumerate(atom.aval.shape) if axis not in (*bound[0], *bound[1])))
        for atom, bound in zip(eqn.invars, zip(contracted, batch, strict=True), strict=True)
    )


def operators(eqn: Eqn, tallest: int) -> list[Atom]:
    """The operands of a matrix product that are not so much taller than wide as data is: differences are not."""
    limit = tallest * num_contracted(eqn) if has(eqn, Trait.MATRIX) else 0
    return [atom for atom, size in zip(eqn.invars, free_sizes(eqn), strict=False) if size <= limit]


def is_outer(eqn: Eqn) -> bool:
    """A product that contracts nothing, such as `einsum("bld,dn->bldn")`, is elementwise."""
    return has(eqn, Trait.MATRIX) and not eqn.params["dimension_numbers"][0][0]


def num_contracted(eqn: Eqn) -> int:
    """Number of products that a matrix product adds up for each element."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return nominal_size(math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted))
