"""What axes say: those of a product's operands, and of a value that was transposed, reshaped or broadcast."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax import lax

from jamp._compat import Atom, Eqn, function_names, nominal_size
from jamp._primitives import Trait, has, is_outer
from jamp.transforms.program.attention import Labels, Layout, Size


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


def is_moment(eqn: Eqn, space: int) -> bool:
    """Whether a product adds up weighted points of each of several sets: no matrix unit makes that faster.

    Such are the derivatives of products over the dimensions of space, each of one point with many.

    Args:
        eqn: The equation.
        space: The dimensions of space.
    """
    if not has(eqn, Trait.MATRIX) or is_outer(eqn) or not any(eqn.params["dimension_numbers"][1]):
        return False
    few, many = sorted(free_sizes(eqn))
    return few == 1 < many <= space


def operators(eqn: Eqn, tallest: int) -> list[Atom]:
    """The operands of a matrix product that are not so much taller than wide as data is: differences are not."""
    limit = tallest * num_contracted(eqn) if has(eqn, Trait.MATRIX) else 0
    return [atom for atom, size in zip(eqn.invars, free_sizes(eqn), strict=False) if size <= limit]


def weights(eqn: Eqn, few: int) -> list[int]:
    """Positions of the operands of a matrix product that are a few columns, as bins are; few rows are a small batch.

    Args:
        eqn: The equation.
        few: How many columns are.
    """
    sizes = zip(free_sizes(eqn), (1, few), strict=False)
    return [index for index, (size, limit) in enumerate(sizes) if size <= limit]


def num_contracted(eqn: Eqn) -> int:
    """Number of products that a matrix product adds up for each element."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return nominal_size(math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted))


def places(eqn: Eqn) -> range:
    """Which operands say where an equation looks up, or puts in: one array, or a number for each axis."""
    if not has(eqn, Trait.PLACES):
        return range(0)
    if "dimension_numbers" in eqn.params:
        return range(1, 2)
    return range(len(eqn.invars) - eqn.invars[0].aval.ndim, len(eqn.invars))


class Axes:
    """The labels of one attention. A reshape that takes an axis apart splits its label."""

    def __init__(self) -> None:
        self.sizes: list[Size] = []
        self._parts: dict[int, Labels] = {}

    def new(self, size: Size) -> Labels:
        """A label for an axis; none for an axis of one element."""
        if _is_one(size):
            return ()
        self.sizes.append(size)
        return (len(self.sizes) - 1,)

    def fresh(self, shape: Sequence[Size]) -> Layout:
        """A layout with a label for each axis."""
        return tuple(self.new(size) for size in shape)

    def whole(self, labels: Labels) -> Labels:
        """Labels, with the parts of those that were split."""
        return tuple(part for label in labels for part in self._whole(label))

    def _whole(self, label: int) -> Labels:
        return self.whole(self._parts[label]) if label in self._parts else (label,)

    def labels(self, layout: Layout) -> Labels:
        """All labels of a layout, with the parts of those that were split."""
        return self.whole(tuple(label for labels in layout for label in labels))

    def layout(self, layout: Layout) -> Layout:
        """A layout, with the parts of labels that were split."""
        return tuple(map(self.whole, layout))

    def fitting(self, layout: Layout, shape: Sequence[Size]) -> Layout:
        """The layout of an operand that may have one element where the result of its equation has many."""
        if len(shape) != len(layout):
            return ()
        return tuple(() if _is_one(size) else labels for size, labels in zip(shape, layout, strict=True))

    def before(self, eqn: Eqn, layout: Layout) -> Layout | None:
        """The layout of the operand of a view, from that of its result; None where it cannot be told."""
        shape, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        if "permutation" in eqn.params:
            found: list[Labels] = [()] * len(shape)
            for place, axis in enumerate(eqn.params["permutation"]):
                found[axis] = layout[place]
            return tuple(found)
        if "broadcast_dimensions" in eqn.params:
            axes = [int(axis) for axis in eqn.params["broadcast_dimensions"]]
            return tuple(() if _is_one(size) else layout[axis] for size, axis in zip(shape, axes, strict=True))
        if has(eqn, Trait.TURNS | Trait.GROWS):  # Such as `rev`, whose shape says nothing.
            return None
        return layout if tuple(shape) == tuple(out) else self._reshaped(layout, shape)

    def _reshaped(self, layout: Layout, shape: Sequence[Size]) -> Layout | None:
        left = [label for labels in layout for label in self.whole(labels)]
        found: list[Labels] = []
        for size in shape:
            group: list[int] = []
            while not _is_one(size):
                if not left:
                    return None
                label = left.pop(0)
                if self.sizes[label] != size and not self._divides(label, size):
                    # The axis ends inside of the label.
                    if type(size) is not int or type(self.sizes[label]) is not int or self.sizes[label] % size:
                        return None
                    label, rest = self._split(label, size)
                    left.insert(0, rest)
                group.append(label)
                size = 1 if self.sizes[label] == size else size // self.sizes[label]
            found.append(tuple(group))
        return None if left else tuple(found)

    def _divides(self, label: int, size: Size) -> bool:
        part = self.sizes[label]
        return type(size) is int and type(part) is int and size % part == 0

    def _split(self, label: int, first: int) -> tuple[int, int]:
        (a,), (b,) = self.new(first), self.new(self.sizes[label] // first)
        self._parts[label] = (a, b)
        return a, b


def is_view(eqn: Eqn) -> bool:
    """Whether an equation shows the same numbers in another shape, and hands derivatives on."""
    return has(eqn, Trait.VIEW) and len(eqn.invars) == 1 and not has(eqn, Trait.PARTS)


def _is_one(size: Size) -> bool:
    return type(size) is int and size == 1


def insists_on_full(eqn: Eqn) -> bool:
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
