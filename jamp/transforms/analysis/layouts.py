"""Which axis of a value is which axis of what it was made of, through transposes, reshapes and broadcasts."""

from __future__ import annotations

from collections.abc import Sequence

from jamp._compat import Eqn
from jamp._primitives import Trait, has
from jamp.transforms.program.attention import Labels, Layout, Size


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
        if tuple(shape) == tuple(out):
            return layout
        return None if has(eqn, Trait.TURNS | Trait.GROWS) else self._reshaped(layout, shape)

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
