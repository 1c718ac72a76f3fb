"""Conditions on places: that an integer made of the indices of an array is not negative, as in a causal mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jamp._compat import Var
from jamp._primitives import Trait, has
from jamp.transforms.analysis.attention.nesting import limited
from jamp.transforms.analysis.reading.axes import Axes, is_view
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source, Value
from jamp.transforms.program.attention import Layout

# What holds any place. (No array has more than 2^24 elements along an axis of queries or keys.)
_WIDE = frozenset(map(np.dtype, ("int32", "int64", "float32", "float64")))


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
        return self.minus(other.negated())

    def negated(self) -> Affine:
        """The same with the other sign."""
        return Affine({}, 0).minus(self)

    def renamed(self, labels: Mapping[int, int]) -> Affine | None:
        """The same of other labels; None where one of them is missing."""
        slopes, offset = self
        if not set(slopes) <= set(labels):
            return None
        return Affine({labels[label]: slope for label, slope in slopes.items()}, offset)


class Ordered(NamedTuple):
    """That an affine function of the indices is not negative.

    Attributes:
        difference: The function.
        added: Whether other scores are made small by adding to them; see `conditions.Leaf`.
    """

    difference: Affine
    added: bool = False

    def negated(self) -> Ordered:
        """That it is negative."""
        return Ordered(Affine({}, -1).minus(self.difference))

    def renamed(self, labels: Mapping[int, int]) -> Ordered | None:
        """The same of other labels; None where one of them is missing."""
        difference = self.difference.renamed(labels)
        return None if difference is None else Ordered(difference)

    def along(self, query: int, key: int) -> tuple[int, int] | None:
        """`(sign, offset)` where it says `sign * (query - key) + offset >= 0` of two labels; None elsewhere."""
        slopes, offset = self.difference
        if set(slopes) != {query, key}:
            return None
        sign = slopes[query]
        return (sign, offset) if abs(sign) == 1 and slopes[key] == -sign else None


# That a comparison holds: which operand is the larger, and what is added to it less the other to be not negative.
_HOLDS: Mapping[str, tuple[int, int]] = {"ge": (0, 0), "gt": (0, -1), "le": (1, 0), "lt": (1, -1)}
_FAILS = {"ge": "lt", "gt": "le", "le": "gt", "lt": "ge"}


class Places:
    """Reads integers of an opened jaxpr that are made of indices.

    Attributes:
        opened: The jaxpr.
        axes: The labels.
        known: What is known of an input or a constant.
        depth: How deep it is in what it reads.
    """

    def __init__(self, opened: Opened, axes: Axes, known: Callable[[Var], object]) -> None:
        self.opened = opened
        self.axes = axes
        self.known = known
        self.depth = 0

    def compared(self, flat: Flat, layout: Layout, holds: bool, seen: list[Flat]) -> list[Ordered] | None:
        """What a comparison says that holds, or does not, one order and another; None where it is not of places.

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
        place, more = _HOLDS[name]
        larger = self.affine(flat.ins[place], layout, seen)
        smaller = self._within(flat.ins[1 - place], layout, seen)
        if larger is None or smaller is None:  # That a magnitude is the larger says that one of two things holds.
            return None
        return [Ordered(larger.minus(each).plus(Affine({}, more))) for each in smaller]

    def _within(self, source: Source, layout: Layout, seen: list[Flat]) -> list[Affine] | None:
        """What a value is the largest of: itself, or a number and its negative."""
        flat = self.opened.maker(source)
        if flat is None or not has(flat.eqn, Trait.MAGNITUDE):
            found = self.affine(source, layout, seen)
            return None if found is None else [found]
        seen.append(flat)
        found = self.affine(flat.ins[0], layout, seen)
        return None if found is None else [found, found.negated()]

    @limited
    def affine(self, source: Source, layout: Layout, seen: list[Flat]) -> Affine | None:
        """What a value is, of the indices of labels; None where it is something else, or its dtype cannot hold that.

        Unsigned places wrap around where one is taken off another, and in bfloat16 place 257 is 256.
        """
        found = self._affine(source, layout, seen)
        return found if found is not None and self._fits(found, source.aval.dtype) else None

    def _fits(self, found: Affine, dtype: np.dtype) -> bool:
        if dtype in _WIDE:
            return True
        sizes = [self.axes.sizes[label] for label in found.slopes]
        if not all(type(size) is int for size in sizes):
            return False
        ends = [slope * (int(size) - 1) for slope, size in zip(found.slopes.values(), sizes, strict=True)]
        least, most = (found.offset + sum(limit(end, 0) for end in ends) for limit in (min, max))
        if jnp.issubdtype(dtype, jnp.bool_):
            return least >= 0 and most <= 1
        if jnp.issubdtype(dtype, jnp.integer):
            return least >= int(jnp.iinfo(dtype).min) and most <= int(jnp.iinfo(dtype).max)
        return jnp.issubdtype(dtype, jnp.floating) and max(-least, most) <= 2 / float(jnp.finfo(dtype).eps)

    def _affine(self, source: Source, layout: Layout, seen: list[Flat]) -> Affine | None:
        known = self.opened.number(source)
        if known is not None:
            return Affine({}, int(known)) if known == int(known) else None
        layout = self.axes.fitting(layout, source.aval.shape)
        flat = self.opened.maker(source)
        if flat is None:
            found = self.known(source.var) if isinstance(source, Value) else None
            labels = {axis: row[0] for axis, row in enumerate(self.axes.layout(layout)) if len(row) == 1}
            return found.renamed(labels) if isinstance(found, Affine) else None
        seen.append(flat)
        eqn = flat.eqn
        if has(eqn, Trait.COUNTS) and not flat.ins:
            labels = self.axes.whole(layout[eqn.params["dimension"]])
            if not labels and flat.outs[0].aval.shape[eqn.params["dimension"]] == 1:  # One query is at the first place.
                return Affine({}, 0)
            return Affine({labels[0]: 1}, 0) if len(labels) == 1 else None
        if has(eqn, Trait.ADDS):
            first, second = (self.affine(each, layout, seen) for each in flat.ins)
            if first is None or second is None:
                return None
            return first.minus(second) if has(eqn, Trait.SUBTRACTS) else first.plus(second)
        if has(eqn, Trait.CONVERTS) or (has(eqn, Trait.SLICES) and is_prefix(flat)):
            return self.affine(flat.ins[0], layout, seen)
        before = self.axes.before(eqn, layout) if is_view(eqn) else None
        return None if before is None else self.affine(flat.ins[0], before, seen)


def is_prefix(flat: Flat) -> bool:
    """Whether a slice begins at the first element of each axis, and takes every one."""
    params = flat.eqn.params
    starts, strides = params.get("start_indices", (1,)), params.get("strides")
    first = all(type(start) is int and start == 0 for start in starts)
    return first and (strides is None or all(stride == 1 for stride in strides))
