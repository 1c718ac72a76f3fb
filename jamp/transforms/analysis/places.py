"""Conditions on places: that an integer made of the indices of an array is not negative, as in a causal mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from jamp._primitives import Trait, has
from jamp.transforms.analysis.axes import Axes, is_view
from jamp.transforms.analysis.flat import Flat, Opened, Source
from jamp.transforms.program.attention import Layout


class Affine(NamedTuple):
    """`slope . index + offset`, with a slope for each label."""

    slopes: dict[int, int]
    offset: int

    def minus(self, other: Affine) -> Affine:
        """The difference."""
        labels = {*self.slopes, *other.slopes}
        slopes = {label: self.slopes.get(label, 0) - other.slopes.get(label, 0) for label in labels}
        return Affine({label: slope for label, slope in slopes.items() if slope}, self.offset - other.offset)

    def plus(self, other: Affine) -> Affine:
        """The sum."""
        return self.minus(Affine({}, 0).minus(other))


class Ordered(NamedTuple):
    """That an affine function of the indices is not negative."""

    difference: Affine

    def negated(self) -> Ordered:
        """That it is negative."""
        return Ordered(Affine({}, -1).minus(self.difference))

    def renamed(self, labels: Mapping[int, int]) -> Ordered | None:
        """The same of other labels; None where one of them is missing."""
        slopes, offset = self.difference
        if not set(slopes) <= set(labels):
            return None
        return Ordered(Affine({labels[label]: slope for label, slope in slopes.items()}, offset))

    def along(self, query: int, key: int) -> tuple[int, int] | None:
        """`(sign, offset)` where it says `sign * (query - key) + offset >= 0` of two labels; None elsewhere."""
        slopes, offset = self.difference
        if set(slopes) != {query, key}:
            return None
        sign = slopes[query]
        return (sign, offset) if abs(sign) == 1 and slopes[key] == -sign else None


# That a comparison holds, and that it does not: a difference of its operands that is not negative.
_HOLDS: Mapping[str, Callable[[Affine, Affine], Affine]] = {
    "ge": lambda a, b: a.minus(b),
    "gt": lambda a, b: a.minus(b).minus(Affine({}, 1)),
    "le": lambda a, b: b.minus(a),
    "lt": lambda a, b: b.minus(a).minus(Affine({}, 1)),
}
_FAILS = {"ge": "lt", "gt": "le", "le": "gt", "lt": "ge"}


class Places:
    """Reads integers of an opened jaxpr that are made of indices.

    Attributes:
        opened: The jaxpr.
        axes: The labels.
    """

    def __init__(self, opened: Opened, axes: Axes) -> None:
        self.opened = opened
        self.axes = axes

    def compared(self, flat: Flat, layout: Layout, holds: bool, seen: list[Flat]) -> Ordered | None:
        """What a comparison says that holds, or does not; None where it is not of places.

        Args:
            flat: The comparison.
            layout: The layout of its result.
            holds: Whether it holds.
            seen: Is given the equations that were looked through.
        """
        name = flat.eqn.primitive.name
        name = name if holds else _FAILS.get(name, "")
        if name not in _HOLDS:
            return None
        first, second = (self._affine(each, layout, seen) for each in flat.ins)
        return None if first is None or second is None else Ordered(_HOLDS[name](first, second))

    def _affine(self, source: Source, layout: Layout, seen: list[Flat]) -> Affine | None:
        known = self.opened.number(source)
        if known is not None:
            return Affine({}, int(known)) if known == int(known) else None
        flat = self.opened.maker(source)
        if flat is None:
            return None
        layout = self.axes.fitting(layout, source.aval.shape)
        seen.append(flat)
        eqn = flat.eqn
        if has(eqn, Trait.COUNTS) and not flat.ins:
            labels = self.axes.whole(layout[eqn.params["dimension"]])
            return Affine({labels[0]: 1}, 0) if len(labels) == 1 else None
        if has(eqn, Trait.ADDS):
            first, second = (self._affine(each, layout, seen) for each in flat.ins)
            if first is None or second is None:
                return None
            return first.minus(second) if has(eqn, Trait.SUBTRACTS) else first.plus(second)
        if has(eqn, Trait.CONVERTS) or (has(eqn, Trait.SLICES) and is_prefix(flat)):
            return self._affine(flat.ins[0], layout, seen)
        before = self.axes.before(eqn, layout) if is_view(eqn) else None
        return None if before is None else self._affine(flat.ins[0], before, seen)


def is_prefix(flat: Flat) -> bool:
    """Whether a slice begins at the first element of each axis, and takes every one."""
    params = flat.eqn.params
    starts, strides = params.get("start_indices", (1,)), params.get("strides")
    first = all(type(start) is int and start == 0 for start in starts)
    return first and (strides is None or all(stride == 1 for stride in strides))
