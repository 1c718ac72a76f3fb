"""What a boolean says of scores: that keys come before queries, or are near them, or what an operand says."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping

import numpy as np

from jamp._primitives import Trait, has
from jamp.transforms.analysis.attention.conditions import NEVER, Condition, Known, Knows, Leaf, Same
from jamp.transforms.analysis.attention.nesting import limited
from jamp.transforms.analysis.attention.places import Ordered, Places, is_prefix
from jamp.transforms.analysis.reading.arithmetic import COMPARISONS, computed
from jamp.transforms.analysis.reading.axes import Axes, is_view
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source, Value
from jamp.transforms.analysis.reading.freezing import is_a
from jamp.transforms.program.attention import ABSORBS, Layout


class Logic(enum.Enum):
    """What a primitive says of booleans, or of zeros and ones."""

    ALL = enum.auto()
    ANY = enum.auto()
    NOT = enum.auto()


# The first that holds of a primitive. A choice between a boolean and zero, as `jnp.tril` makes it, says that both hold.
_LOGIC: Mapping[int, Logic] = {
    Trait.INVERTS: Logic.NOT,
    Trait.EITHER | Trait.MAXIMUM: Logic.ANY,
    Trait.BOTH | Trait.MULTIPLIES | Trait.EXTREMUM | Trait.SELECTS: Logic.ALL,
}
_BITWISE = Trait.BOTH | Trait.EITHER | Trait.INVERTS  # Of integers.


@dataclasses.dataclass
class Masks:
    """Reads booleans of an opened jaxpr.

    Attributes:
        opened: The jaxpr.
        axes: The labels.
        take: Is told every equation that was seen through.
        known: What is known of an input or a constant.
        depth: How deep it is in what it reads.
    """

    opened: Opened
    axes: Axes
    take: Callable[[Flat], None]
    known: Knows
    depth: int = 0

    def conditions(self, source: Source, layout: Layout, keeps: bool = True) -> list[Condition] | None:
        """What holds where a value is not zero (or where it is), one condition and another; None for never."""
        known = self.opened.number(source)
        if known is not None:
            return [] if bool(known) is keeps else None
        seen: list[Flat] = []
        layout = self.axes.fitting(layout, source.aval.shape)
        found = self._read(source, layout, keeps, seen)
        if found is None:
            return [Leaf(source, layout, keeps)]
        for flat in seen:
            self.take(flat)
        return found

    def of_numbers(self, source: Source, layout: Layout, sign: float) -> list[Condition] | None:
        """What holds where a value, times a sign, is zero, if it is a large negative number everywhere else."""
        seen: list[Flat] = []
        masks = self._masks(source, layout, sign, seen)
        if masks is None:
            return None
        found: list[Condition] = []
        for which, at, keeps, added in masks:
            conditions = self.conditions(which, at, keeps)
            if conditions is None:
                return None
            found += [each._replace(added=added) for each in conditions]
        for flat in seen:
            self.take(flat)
        return found

    @limited
    def _masks(self, source: Source, layout: Layout, sign: float, seen: list[Flat]) -> list[Leaf] | None:
        """Booleans all of which say that a value, times a sign, is zero, and not a large negative number.

        Masks of numbers are joined by adding them, by their minimum, or by one in the place of another's zeros.
        """
        layout = self.axes.fitting(layout, source.aval.shape)
        inner: list[Flat] = []
        found = self.two_numbers(source, layout, inner)
        if found is not None:
            which, at, off, on = found
            seen += inner
            least = min(off * sign, on * sign)
            return [Leaf(which, at, on == 0, least > ABSORBS)] if 0 in (off, on) and least <= NEVER else None
        flat = self.opened.maker(source)
        if flat is None:
            return None
        seen.append(flat)
        eqn, ins = flat.eqn, flat.ins
        if is_view(eqn) or has(eqn, Trait.CONVERTS):
            before = self.axes.before(eqn, layout) if is_view(eqn) else layout
            return None if before is None else self._masks(ins[0], before, sign, seen)
        joined: list[Leaf] = []
        if has(eqn, Trait.SELECTS) and len(ins) == 3 and ins[0].aval.shape == flat.outs[0].aval.shape:
            which, *cases = ins
            numbers = [self.opened.number(each) for each in cases]
            never = [number is not None and number * sign <= NEVER for number in numbers]
            if True not in never:
                return None
            least = numbers[0 if never[0] else 1]
            joined.append(Leaf(which, layout, never[0], least is not None and least * sign > ABSORBS))
            ins = (cases[1 if never[0] else 0],)
        elif not self._adds_or_takes_less(flat, sign):
            return None
        for each in ins:
            more = self._masks(each, layout, sign, seen)
            if more is None:
                return None
            joined += more
        return joined

    def _adds_or_takes_less(self, flat: Flat, sign: float) -> bool:
        if has(flat.eqn, Trait.EXTREMUM):
            return has(flat.eqn, Trait.MAXIMUM) is (sign < 0)
        return has(flat.eqn, Trait.ADDS) and not has(flat.eqn, Trait.SUBTRACTS)

    @limited
    def two_numbers(
        self, source: Source, layout: Layout, seen: list[Flat] | None = None
    ) -> tuple[Source, Layout, float, float] | None:
        """A boolean and its layout, and the numbers that a value is where that is zero, and where it is one."""
        layout = self.axes.fitting(layout, source.aval.shape)
        if source.aval.ndim and self.is_boolean(source):
            return source, layout, 0.0, 1.0
        flat = self.opened.maker(source)
        if flat is None:
            known = self._known(source)
            values = [] if known is None else [number for number in (known.off, known.on) if number]
            return (source, layout, 0.0, values[0]) if len(values) == 1 else None
        seen = [] if seen is None else seen
        seen.append(flat)
        eqn, ins = flat.eqn, flat.ins
        numbers = [self.opened.number(each) for each in ins]
        if has(eqn, Trait.SELECTS) and len(ins) == 3:
            _, off, on = numbers
            fitting = self.axes.fitting(layout, ins[0].aval.shape)
            return None if off is None or on is None else (ins[0], fitting, off, on)
        if is_view(eqn) or has(eqn, Trait.CONVERTS):
            before = self.axes.before(eqn, layout) if is_view(eqn) else layout
            return None if before is None else self.two_numbers(ins[0], before, seen)
        others = [each for each, number in zip(ins, numbers, strict=True) if number is None]
        inner = self.two_numbers(others[0], layout, seen) if len(others) == 1 else None
        if inner is None:
            return None
        which, at, *values = inner
        off, on = (computed(eqn, [value if n is None else n for n in numbers]) for value in values)
        return None if off is None or on is None else (which, at, off, on)

    @limited
    def _read(self, source: Source, layout: Layout, keeps: bool, seen: list[Flat]) -> list[Condition] | None:
        flat = self.opened.maker(source)
        if flat is None:
            return self._from_outside(source, layout, keeps)
        seen.append(flat)
        eqn = flat.eqn
        logic = next((logic for traits, logic in _LOGIC.items() if has(eqn, traits)), None)
        if logic is not None:
            return self._joined(flat, logic, layout, keeps, seen)
        if is_view(eqn) and (before := self.axes.before(eqn, layout)) is not None:
            return self._of(flat.ins[0], before, keeps, seen)
        if has(eqn, Trait.CONVERTS) and (is_a(np.bool_, flat.ins[0]) or is_a(np.bool_, flat.outs[0])):
            return self._of(flat.ins[0], layout, keeps, seen)
        if has(eqn, Trait.SLICES) and is_prefix(flat):
            inner: list[Flat] = []
            found = self._of(flat.ins[0], layout, keeps, inner)
            whole = found is not None and all(isinstance(each, Ordered) for each in found)
            seen.extend(inner if whole else ())
            return found if whole else None
        return self._compared(flat, layout, keeps, seen) if has(eqn, Trait.COMPARES) else None

    def _known(self, source: Source) -> Known | None:
        found = self.known(source.var) if isinstance(source, Value) else None
        return found if isinstance(found, Known) else None

    def _from_outside(self, source: Source, layout: Layout, keeps: bool) -> list[Condition] | None:
        """What holds where a value that no equation of the jaxpr makes is not zero, or where it is."""
        known = self._known(source)
        if known is None or bool(known.off) is bool(known.on):
            return None
        labels = {axis: row[0] for axis, row in enumerate(self.axes.layout(layout)) if len(row) == 1}
        orders = [order.renamed(labels) for order in known.orders]
        if bool(known.on) is not keeps:
            orders = [order and order.negated() for order in orders]
            if len(orders) != 1:
                return None
        return None if None in orders else [order for order in orders if order]

    def _of(self, source: Source, layout: Layout, keeps: bool, seen: list[Flat]) -> list[Condition] | None:
        """As `_read`, but for what cannot be seen through: that is an operand, if the jaxpr itself has it."""
        known = self.opened.number(source)
        if known is not None:
            return [] if bool(known) is keeps else None
        inner: list[Flat] = []
        layout = self.axes.fitting(layout, source.aval.shape)
        found = self._read(source, layout, keeps, inner)
        if found is not None:
            seen.extend(inner)
            return found
        return [Leaf(source, layout, keeps)] if isinstance(source, Value) and source.call == 0 else None

    def _joined(
        self, flat: Flat, logic: Logic, layout: Layout, keeps: bool, seen: list[Flat]
    ) -> list[Condition] | None:
        operands = self._operands(flat)
        if operands is None:
            return None
        if logic is Logic.NOT:
            return self._of(flat.ins[0], layout, not keeps, seen)
        # What holds, or does not, whatever the others say.
        neutral = logic is Logic.ALL
        left = [(each, holds) for each, holds in operands if self._constant(each) is not (holds is neutral)]
        if len(left) != 1 and neutral is not keeps:
            return None
        found: list[Condition] = []
        for source, holds in left:
            conditions = self._of(source, layout, keeps is holds, seen)
            if conditions is None:
                return None
            found += conditions
        return found

    def _operands(self, flat: Flat) -> list[tuple[Source, bool]] | None:
        """What an equation joins, each with whether it is to hold, or not to; None for what joins no booleans."""
        ins = flat.ins
        if has(flat.eqn, Trait.SELECTS):
            if len(ins) != 3 or ins[0].aval.shape != flat.outs[0].aval.shape:
                return None
            which, off, on = ins
            zeros = [self._constant(each) is False for each in (off, on)]
            if True not in zeros:
                return None
            return [(which, True), (on, True)] if zeros[0] else [(which, False), (off, True)]
        if has(flat.eqn, _BITWISE) and not is_a(np.bool_, flat.outs[0]):
            return None
        if has(flat.eqn, Trait.EXTREMUM) and not all(map(self.is_boolean, ins)):
            return None
        return [(each, True) for each in ins]

    def _constant(self, source: Source) -> bool | None:
        number = self.opened.number(source)
        return None if number is None else bool(number)

    @limited
    def is_boolean(self, source: Source) -> bool:
        """Whether a value is zero or one, and nothing else."""
        if is_a(np.bool_, source) or self.opened.number(source) in (0, 1):
            return True
        flat = self.opened.maker(source)
        if flat is None:
            known = self._known(source)
            return known is not None and {known.off, known.on} == {0, 1}
        if has(flat.eqn, Trait.MULTIPLIES | Trait.EXTREMUM):
            return all(map(self.is_boolean, flat.ins))
        if has(flat.eqn, Trait.SELECTS):
            return all(map(self.is_boolean, flat.ins[1:]))
        passes = is_view(flat.eqn) or has(flat.eqn, Trait.CONVERTS | Trait.SLICES)
        return bool(passes and self.is_boolean(flat.ins[0]))

    def _compared(self, flat: Flat, layout: Layout, keeps: bool, seen: list[Flat]) -> list[Condition] | None:
        if len(flat.ins) != 2:
            return None
        is_set = self._is_set(flat)
        if is_set is not None:
            return self._of(flat.ins[0], layout, keeps is is_set, seen)
        inner: list[Flat] = []
        ordered = Places(self.opened, self.axes, self.known).compared(flat, layout, keeps, inner)
        seen.extend(inner)
        if ordered is not None:
            return [*ordered]
        same = self._same(flat, layout, keeps, inner := [])
        seen.extend(inner)
        return None if same is None else [same]

    def _same(self, flat: Flat, layout: Layout, keeps: bool, seen: list[Flat]) -> Same | None:
        """That the operands of a comparison are equal, of which each has axes of its own."""
        compare = COMPARISONS.get(flat.eqn.primitive.name)
        if compare is None or [compare(*pair) is keeps for pair in ((0, 0), (0, 1), (1, 0))] != [True, False, False]:
            return None
        found = [self._given(each, layout, seen) for each in flat.ins]
        if None in found:
            return None
        (first, at), (second, beside) = (each for each in found if each)
        labels = [set(self.axes.labels(each)) for each in (at, beside)]
        is_id = all(map(_is_id, (first, second)))
        return Same(first, at, second, beside) if is_id and labels[0] - labels[1] and labels[1] - labels[0] else None

    def _given(self, source: Source, layout: Layout, seen: list[Flat]) -> tuple[Value, Layout] | None:
        """What a value shows, in the jaxpr itself."""
        layout = self.axes.fitting(layout, source.aval.shape)
        while (flat := self.opened.maker(source)) is not None and is_view(flat.eqn):
            before = self.axes.before(flat.eqn, layout)
            if before is None:
                break
            seen.append(flat)
            source, layout = flat.ins[0], before
        if isinstance(source, Value) and self.opened.outer(source) is not None:
            return source, layout
        return None

    def _is_set(self, flat: Flat) -> bool | None:
        """Whether a comparison with a number says that its first operand is not zero, or is; None for neither."""
        (first, second), compare = flat.ins, COMPARISONS.get(flat.eqn.primitive.name)
        number = self.opened.number(second)
        if compare is None or number is None:
            return None
        if not self.is_boolean(first) and (number != 0 or compare(1, 0) is not compare(-1, 0)):
            return None  # Of other numbers than booleans, `> 0` asks for a sign.
        clear, is_set = compare(0, number), compare(1, number)
        return None if clear is is_set else is_set


def _is_id(value: Value) -> bool:
    """Whether a value is of integers that a kernel can compare."""
    return (is_a(np.integer, value) or is_a(np.bool_, value)) and value.aval.dtype.itemsize <= 4
