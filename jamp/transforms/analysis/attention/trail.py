"""What a search for an attention has seen so far, and what each part of it asks of a jaxpr."""

from __future__ import annotations

from jamp._compat import Literal
from jamp._primitives import Trait, has
from jamp.transforms.analysis.attention.conditions import Knows
from jamp.transforms.analysis.reading.axes import Axes, is_view
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source
from jamp.transforms.program.attention import Labels, Layout


class Trail:
    """A search that began at one product.

    Attributes:
        opened: The jaxpr.
        known: What is known of an input or a constant of a jaxpr.
        axes: The labels.
        keys: Labels of the keys, which the last product adds up.
        inside: By `id`, equations that a kernel would do.
        seen: By `id`, other equations that were looked through.
        weighted: What weights are multiplied with that is the same for all keys.
        masked: What says which weights, or which exponentials, are zero: a boolean, its layout, and whether where it is
            zero.
        reason: Why no kernel can do it; empty as long as there is none.
    """

    def __init__(self, opened: Opened, known: Knows) -> None:
        self.opened = opened
        self.known = known
        self.axes = Axes()
        self.keys: Labels = ()
        self.inside: dict[int, Flat] = {}
        self.seen: dict[int, Flat] = {}
        self.weighted: list[tuple[Source, Layout]] = []
        self.masked: list[tuple[Source, Layout, bool]] = []
        self.reason = ""

    def see(self, flat: Flat) -> None:
        """Notes an equation that was looked through."""
        self.seen[id(flat)] = flat

    def refuse(self, reason: str) -> None:
        """Notes why no kernel can do it; the first reason counts."""
        self.reason = self.reason or reason

    def has_keys(self, layout: Layout) -> bool:
        """Whether a layout has an axis of the keys."""
        return bool(set(self.labels(layout)) & set(self.axes.whole(self.keys)))

    def labels(self, layout: Layout) -> Labels:
        """All labels of a layout."""
        return self.axes.labels(layout)

    def passed(self, flat: Flat, layout: Layout) -> Layout | None:
        """The layout in front of an equation that changes no number."""
        if has(flat.eqn, Trait.CONVERTS):
            return layout if flat.ins[0].aval.dtype.kind in "fV" else None
        if not is_view(flat.eqn) or isinstance(flat.ins[0], Literal):
            return None
        return self.axes.before(flat.eqn, layout)

    def outermost(self, source: Source, layout: Layout) -> tuple[Source, Layout]:
        """The value of the jaxpr itself, furthest back, that a value shows; itself where there is none."""
        layout = self.axes.fitting(layout, source.aval.shape)
        best, path = (source, layout), []
        seen: list[Flat] = []
        while (flat := self.opened.maker(source)) is not None:
            same = has(flat.eqn, Trait.CONVERTS) and flat.ins[0].aval.dtype == flat.outs[0].aval.dtype
            raises = has(flat.eqn, Trait.CONVERTS) and flat.ins[0].aval.dtype.name in ("bfloat16", "float16")
            before = layout if same or raises else self.axes.before(flat.eqn, layout) if is_view(flat.eqn) else None
            if before is None or isinstance(flat.ins[0], Literal):
                break
            seen.append(flat)
            source, layout = flat.ins[0], before
            if source.call == 0:
                best, path = (source, layout), [*seen]
        for flat in path:
            self.seen[id(flat)] = flat
        return best
