"""From the last product of an attention to the scores: through what may lie on weights, and a softmax in any form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jamp._primitives import SCALES, Trait, has
from jamp.transforms.analysis.attention.trail import Trail
from jamp.transforms.analysis.reading.axes import is_view
from jamp.transforms.analysis.reading.flat import Flat, Source, Value
from jamp.transforms.program.attention import Layout


class Weights:
    """Looks at the weights of an attention.

    Attributes:
        trail: The search.
        any_axis: Whether the softmax may be over any axis, instead of that of the keys.
    """

    def __init__(self, trail: Trail, any_axis: bool = False) -> None:
        self.trail, self.any_axis = trail, any_axis

    def logits(self, source: Source, layout: Layout) -> tuple[Source, Layout] | None:
        """What the softmax is of that weights are made with."""
        flat = self.trail.opened.maker(source)
        if flat is None:
            return None
        if (passed := self.trail.passed(flat, layout)) is not None:
            self.trail.inside[id(flat)] = flat
            return self.logits(flat.ins[0], passed)
        if (logits := self._quotient(flat, layout)) is not None:
            return logits
        if (above := self._weighted(flat, layout)) is not None:
            return above
        if (kept := self._kept(flat, layout)) is not None:
            self.trail.inside[id(flat)] = flat
            return self.logits(kept, layout)
        if has(flat.eqn, SCALES | Trait.SELECTS):
            for operand in flat.ins:
                if isinstance(operand, Value) and operand.aval.shape == flat.outs[0].aval.shape:
                    above = self.logits(operand, layout)
                    if above is not None:
                        self.trail.refuse("its weights are scaled or masked after the softmax, as by dropout")
                        return above
        return None

    def _weighted(self, flat: Flat, layout: Layout) -> tuple[Source, Layout] | None:
        """What the softmax is of, if a product multiplies its weights with what is the same for all keys."""
        pairs = self._factors(flat, layout)
        for (weights, at), (factor, factor_at) in (pairs, pairs[::-1]) if pairs else ():
            source, outermost = self.trail.outermost(factor, factor_at)
            if isinstance(source, Value) and outermost and not self.trail.has_keys(outermost):
                above = self.logits(weights, at)
                if above is not None:
                    self.trail.inside[id(flat)] = flat
                    self.trail.weighted.append((source, outermost))
                    return above
        return None

    def _factors(self, flat: Flat, layout: Layout) -> list[tuple[Source, Layout]]:
        """The operands of a product without a sum, and their layouts: a multiplication, or `einsum("hqk,h->hqk")`."""
        if has(flat.eqn, Trait.MULTIPLIES):
            return [(each, self.trail.axes.fitting(layout, each.aval.shape)) for each in flat.ins]
        if not has(flat.eqn, Trait.MATRIX) or flat.eqn.params["dimension_numbers"][0][0]:
            return []
        _, batch = flat.eqn.params["dimension_numbers"]
        place, found = len(batch[0]), list[tuple[Source, Layout]]()
        for source, together in zip(flat.ins, batch, strict=True):
            at = {axis: layout[number] for number, axis in enumerate(together)}
            for axis in range(source.aval.ndim):
                if axis not in together:
                    at[axis] = layout[place]
                    place += 1
            found.append((source, tuple(at[axis] for axis in range(source.aval.ndim))))
        return found

    def _walk(self, source: Source, layout: Layout, to: int) -> tuple[list[Flat], Layout] | None:
        """Equations from a value back to one with a trait, which is the last; and its layout."""
        path = []
        layout = self.trail.axes.fitting(layout, source.aval.shape)
        while (flat := self.trail.opened.maker(source)) is not None:
            path.append(flat)
            if has(flat.eqn, to):
                return path, layout
            if (kept := self._kept(flat, layout)) is not None:
                source = kept
                continue
            before = self.trail.passed(flat, layout)
            if before is None:
                return None
            source, layout = flat.ins[0], before
        return None

    def _kept(self, flat: Flat, layout: Layout) -> Source | None:
        """What a choice between something and zero chooses; which is noted."""
        if not has(flat.eqn, Trait.SELECTS) or len(flat.ins) != 3:
            return None
        which, *cases = flat.ins
        kept = [index for index, each in enumerate(cases) if self.trail.opened.number(each) != 0]
        if len(kept) != 1 or which.aval.shape != flat.outs[0].aval.shape:
            return None
        self.trail.masked.append((which, layout, bool(kept[0])))
        return cases[kept[0]]

    def _quotient(self, flat: Flat, layout: Layout) -> tuple[Source, Layout] | None:
        """What a softmax is of, at the division that makes it."""
        for top, bottom, between in self._fractions(flat):
            above = self._walk(top, layout, Trait.EXPONENTIAL)
            below = self._walk(bottom, layout, Trait.SUMS_AXES)
            if above is None or below is None:
                continue
            (path, at_exp), (views, at_sum) = above, below
            exponential, total = path[-1], views[-1]
            summed = [axis for axis in range(len(at_exp)) if axis not in total.eqn.params["axes"]]
            inner = self._walk(total.ins[0], at_exp, Trait.EXPONENTIAL)
            if inner is None or inner[0][-1] is not exponential or inner[1] != at_exp:
                continue
            if any(has(view.eqn, Trait.VIEW) for view in inner[0][:-1]) or len(at_sum) != len(summed):
                continue
            rows = self.trail.axes.layout(tuple(at_exp[axis] for axis in summed))
            added = tuple(at_exp[axis] for axis in total.eqn.params["axes"])
            if rows != self.trail.axes.layout(at_sum):
                continue
            if not self.any_axis and {*self.trail.labels(added)} != self._keys():
                continue
            for each in (flat, *between, *path, *views, *inner[0]):
                self.trail.inside[id(each)] = each
            return exponential.ins[0], at_exp
        return None

    def _keys(self) -> set[int]:
        return set(self.trail.axes.whole(self.trail.keys))

    def _fractions(self, flat: Flat) -> Iterable[tuple[Source, Source, Sequence[Flat]]]:
        """What an equation may divide by what, and the equations between."""
        if has(flat.eqn, Trait.DIVIDES) and len(flat.ins) == 2:
            yield flat.ins[0], flat.ins[1], ()
        if not has(flat.eqn, Trait.MULTIPLIES):
            return
        for top, other in (flat.ins, flat.ins[::-1]):
            between = []
            while (one := self.trail.opened.maker(other)) is not None:
                between.append(one)
                if has(one.eqn, Trait.DIVIDES) and not has(one.eqn, Trait.POWER):
                    *numerator, divisor = one.ins
                    is_one = len(one.ins) == 1 or self.trail.opened.number(numerator[0]) == 1
                    # Views behind the reciprocal have the layout of the result only where they add no axes.
                    if is_one and all(view.ins[0].aval.ndim == view.outs[0].aval.ndim for view in between[:-1]):
                        yield top, divisor, between
                    break
                if not is_view(one.eqn) or has(one.eqn, Trait.TURNS):
                    break
                other = one.ins[0]
