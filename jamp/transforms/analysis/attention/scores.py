"""From a softmax to the product of queries and keys: through scales, biases and masks, which are noted."""

from __future__ import annotations

from jamp._primitives import SCALES, Trait, acts, has
from jamp.transforms.analysis.attention.conditions import NEVER, Condition, plain
from jamp.transforms.analysis.attention.masks import Masks
from jamp.transforms.analysis.attention.trail import Trail
from jamp.transforms.analysis.reading.axes import is_view
from jamp.transforms.analysis.reading.flat import Flat, Source
from jamp.transforms.program.attention import Layout
from jamp.transforms.program.flow import num_elements


class Scores:
    """Looks at the scores of an attention.

    Attributes:
        trail: The search.
        scale: What scores are multiplied with; where they are capped, in front of the `tanh`.
        cap: What its result is multiplied with; None where they are not capped.
        factors: What they are multiplied with that the program computes, or divided by (True).
        biases: What is added to them, each times a number.
        conditions: Which of them count: those for which all conditions hold.
    """

    def __init__(self, trail: Trail) -> None:
        self.trail = trail
        self.masks = Masks(trail.opened, trail.axes, trail.see, trail.known)
        self.scale = 1.0
        self.cap: float | None = None
        self.factors: list[tuple[tuple[Source, Layout], bool]] = []
        self.biases: list[tuple[Source, Layout, float]] = []
        self.conditions: list[Condition] = []

    def product(self, source: Source, layout: Layout) -> tuple[Flat, Layout] | None:
        """The product that scores are, after what lies on them is noted."""
        while True:
            flat = self.trail.opened.maker(source)
            if flat is None:
                return None
            if has(flat.eqn, Trait.MATRIX):
                return flat, layout
            self.trail.inside[id(flat)] = flat
            if (before := self.trail.passed(flat, layout)) is not None:
                source, layout = flat.ins[0], before
                continue
            following = self._step(flat, layout)
            if following is None:
                return None
            source = following

    def _step(self, flat: Flat, layout: Layout) -> Source | None:
        """Which operand of an equation on scores is the scores; what the others do is noted."""
        if has(flat.eqn, Trait.NEGATES):
            self.scale = -self.scale
            return flat.ins[0]
        if has(flat.eqn, Trait.SELECTS):
            return self._masked(flat, layout)
        if has(flat.eqn, SCALES) and len(flat.ins) == 2:
            return self._scaled(flat, layout)
        if has(flat.eqn, Trait.ADDS):
            return self._shifted(flat, layout)
        operand = next((each for each in flat.ins if self._leads(each)), None)
        if operand is None or operand.aval.shape != flat.outs[0].aval.shape:
            return None
        name = flat.eqn.primitive.name
        is_tanh = has(flat.eqn, Trait.OF_RESULT) and not has(flat.eqn, Trait.PROBABILITY)
        if is_tanh and self.cap is None and self.scale and not self.factors:
            # `tanh` is odd, so that a cap is never negative.
            self.cap, self.scale = abs(self.scale), 1.0 if self.scale > 0 else -1.0
        else:
            self.trail.refuse(f"its scores go through `{name}`")
        return operand

    def _shifted(self, flat: Flat, layout: Layout) -> Source | None:
        first, second = flat.ins
        self._check_not_capped("something is added to them")
        subtracts = has(flat.eqn, Trait.SUBTRACTS)
        if subtracts and self._is_shift(second, first, layout):
            return first
        found = self._scores_of(first, second, ordered=subtracts)
        if found is None:
            return None
        scores, bias = found
        self._add_bias(bias, layout, -self.scale if subtracts else self.scale)
        return scores

    def _scores_of(self, first: Source, second: Source, *, ordered: bool) -> tuple[Source, Source] | None:
        """Which of two operands may be scores, and the other; only the first, where their order counts.

        Where both may be, the larger product has all queries and all keys.
        """
        pairs = [(first, second)] if ordered else [(first, second), (second, first)]
        sizes = [self._leads(scores) for scores, _ in pairs]
        return pairs[sizes.index(max(sizes))] if any(sizes) else None

    def _check_not_capped(self, what: str) -> None:
        """Refuses what would be the same for all keys, or would leave nothing of a score, if no cap came after it."""
        if self.cap is not None:
            self.trail.refuse(f"its scores are capped after {what}")

    def _leads(self, source: Source, depth: int = 12) -> int:
        """The size of the product that a value may be, by way of what may lie on scores; 0 if it is none."""
        flat = self.trail.opened.maker(source)
        if flat is None or depth == 0:
            return 0
        if has(flat.eqn, Trait.MATRIX):
            return num_elements(flat.outs[0].aval)
        on_scores = Trait.VIEW | Trait.CONVERTS | SCALES | Trait.ADDS | Trait.SELECTS
        on_scores |= Trait.NEGATES | Trait.EXTREMUM | Trait.OF_RESULT | Trait.EXPONENTIAL
        whole = (each for each in flat.ins if each.aval.ndim)
        return max((self._leads(each, depth - 1) for each in whole), default=0) if has(flat.eqn, on_scores) else 0

    def _is_shift(self, source: Source, scores: Source, layout: Layout) -> bool:
        """Whether a value is the same for all keys, and made of the scores themselves: their maximum."""
        path: dict[int, Flat] = {}
        scores = self._in_front(scores)

        def of_scores(each: Source) -> bool:
            if each == scores or self.trail.opened.number(each) is not None:
                return True
            flat = self.trail.opened.maker(each)
            if flat is None or has(flat.eqn, Trait.MATRIX | Trait.LOOPS) or acts(flat.eqn):
                return False
            path[id(flat)] = flat
            # Of masked scores too: what is the same for all keys may be any number.
            return all(map(of_scores, flat.ins[1:] if has(flat.eqn, Trait.SELECTS) else flat.ins))

        at = self.trail.axes.fitting(layout, source.aval.shape)
        is_number = self.trail.opened.number(source) is not None
        if is_number or not self._is_same_for_all_keys(source, at) or not of_scores(source):
            return False
        self.trail.inside.update(path)
        return True

    def _is_same_for_all_keys(self, source: Source, at: Layout) -> bool:
        """Whether a value is made of nothing but numbers and of extrema over the keys."""
        if self.trail.opened.number(source) is not None:
            return True
        flat = self.trail.opened.maker(source)
        if flat is None:
            return False
        if has(flat.eqn, Trait.TAKES_EXTREMUM):
            return not self.trail.has_keys(at)
        if is_view(flat.eqn):
            before = self.trail.axes.before(flat.eqn, at)
            return before is not None and self._is_same_for_all_keys(flat.ins[0], before)
        plain = bool(flat.ins) and all(each.aval.shape in ((), flat.outs[0].aval.shape) for each in flat.ins)
        return plain and all(
            self._is_same_for_all_keys(each, self.trail.axes.fitting(at, each.aval.shape)) for each in flat.ins
        )

    def _in_front(self, source: Source) -> Source:
        """A value in front of views, masks and conversions: scores and their maximum may be seen by way of others."""
        while (flat := self.trail.opened.maker(source)) is not None:
            passed = flat.ins[:1] if is_view(flat.eqn) or has(flat.eqn, Trait.CONVERTS) else ()
            if has(flat.eqn, Trait.SELECTS):
                passed = [each for each in flat.ins[1:] if self.trail.opened.number(each) is None]
            if len(passed) != 1:
                break
            source = passed[0]
        return source

    def _masked(self, flat: Flat, layout: Layout) -> Source | None:
        """Scores where a condition holds, and a large negative number elsewhere."""
        if len(flat.ins) != 3:
            return None
        self._check_not_capped("they are masked")
        if self.factors:  # Of zero, it leaves nothing of the mask.
            self.trail.refuse("its scores are scaled by what is computed after they are masked")
        which, *cases = flat.ins
        for keeps, scores, other in ((False, *cases), (True, *reversed(cases))):
            never = self.trail.opened.number(other)
            if never is None or not self._leads(scores):
                continue
            if not never * self.scale <= NEVER:
                self.trail.refuse(f"its mask puts {never:g} in the place of scores")
            if which.aval.shape != flat.outs[0].aval.shape:
                self.trail.refuse("its mask is one number")
                return scores
            conditions = self.masks.conditions(which, layout, keeps)
            if conditions is None:
                return None
            self.conditions += conditions
            return scores
        return None

    def _scaled(self, flat: Flat, layout: Layout) -> Source | None:
        divides = has(flat.eqn, Trait.DIVIDES)
        found = self._scores_of(*flat.ins, ordered=divides)
        if found is None:
            return None
        scores, factor = found
        number = self.trail.opened.number(factor)
        if number is not None:
            self.scale = self.scale / number if divides else self.scale * number
            return scores
        if not divides and self.cap is None and self._is_masked_by(factor, layout):
            return scores
        source, at = self.trail.outermost(factor, layout)
        if self.trail.has_keys(at):
            self.trail.refuse("its keys are scaled apart")
            return scores
        self.factors.append(((source, at), divides))
        return scores

    def _is_masked_by(self, factor: Source, layout: Layout) -> bool:
        """Whether a factor is zero only where scores do not count anyway."""
        if not self.masks.is_boolean(factor):
            return False
        conditions = self.masks.conditions(factor, layout)
        if conditions is None or not all(plain(each) in map(plain, self.conditions) for each in conditions):
            return False
        # What is added to scores that are zero is all that there is.
        self.conditions = [plain(each) if plain(each) in conditions else each for each in self.conditions]
        return True

    def _add_bias(self, source: Source, layout: Layout, sign: float) -> None:
        if self.factors:
            self.trail.refuse("its biases are scaled by what is computed")
        if self.trail.opened.number(source) is not None:
            return  # The same for all keys.
        conditions = self.masks.of_numbers(source, layout, sign)
        if conditions is None:
            self.biases.append((*self.trail.outermost(source, layout), sign))
        else:
            self.conditions += conditions
