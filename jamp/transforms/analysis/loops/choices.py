"""Discrete choices: what `argmax` or a sort chose, what was drawn, and what a network tells as a probability.

A rounding error makes another choice where two were as good as each other. It keeps no loop from ending, since nothing
has to become small; so what decides about a choice need not be what it is in float32.
"""

from __future__ import annotations

import numpy as np

from jamp._primitives import MOVED, Trait, has
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source, Value
from jamp.transforms.analysis.reading.freezing import is_a
from jamp.transforms.analysis.reading.walks import back, operands, parts_of


class Choices:
    """Tells the discrete choices in a jaxpr."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened

    def by_draw(self, flat: Flat) -> bool:
        """Whether an equation chooses by a random number: compares with it, or looks it up, as in a loop inside."""
        compares = has(flat.eqn, Trait.COMPARES)
        looks_up = has(flat.eqn, Trait.LOOPS) and not any(is_a(np.floating, out) for out in flat.outs)
        return (compares or looks_up) and any(map(self._is_scaled_draw, flat.values))

    def by_rank(self, flat: Flat) -> bool:
        """Whether an equation tells which of several is the best."""
        return has(flat.eqn, Trait.CHOOSES) and (len(flat.eqn.invars) > 1 or not has(flat.eqn, Trait.SORTS))

    def among(self, flat: Flat, result: Value) -> bool:
        """Whether a result is one of several choices, whatever decides which: the best token, or one that is drawn."""
        if is_a(np.floating, result) or not (flat.cases or has(flat.eqn, Trait.SELECTS)):
            return False
        parts = parts_of(self._opened, result)
        makers = [None if part is None else self._opened.maker(part) for part in parts]
        return all(made is not None and (self.by_rank(made) or self.by_draw(made)) for made in makers)

    def is_probability(self, flat: Flat) -> bool:
        """Whether an equation makes shares of one, or their logarithms."""
        if has(flat.eqn, Trait.PROBABILITY):
            return True
        if has(flat.eqn, Trait.DIVIDES) and len(flat.ins) == 2:
            return self._is_sum_of(flat.ins[1], flat.ins[0])
        if has(flat.eqn, Trait.SUBTRACTS):
            total = self._made(flat.ins[1], Trait.LOGARITHM)
            return total is not None and self._sums_exponentials(total.ins[0])
        return False

    def _is_sum_of(self, total: Source, value: Source) -> bool:
        made, of = self._made(total, Trait.SUMS_AXES), self._made(value, Trait.EXPONENTIAL)
        return made is not None and of is not None and self._made(made.ins[0], Trait.EXPONENTIAL) is of

    def _sums_exponentials(self, total: Source) -> bool:
        made = self._made(total, Trait.SUMS_AXES)
        return made is not None and self._made(made.ins[0], Trait.EXPONENTIAL) is not None

    def _made(self, source: Source, by: int) -> Flat | None:
        """The equation with a trait that makes a value, which may be moved."""
        flat = self._opened.maker(source)
        while flat is not None and has(flat.eqn, MOVED) and flat.ins:
            flat = self._opened.maker(flat.ins[0])
        return flat if flat is not None and has(flat.eqn, by) else None

    def _is_scaled_draw(self, value: Value) -> bool:
        """Whether a value is a random number, maybe times something, as one between zero and the sum of all weights."""
        if self._is_drawn(value):
            return True
        flat = self._opened.maker(value)
        if flat is None or not has(flat.eqn, MOVED | Trait.MULTIPLIES):
            return False
        looked_at = flat.values if has(flat.eqn, Trait.MULTIPLIES) else flat.values[:1]
        return any(map(self._is_scaled_draw, looked_at))

    def _is_drawn(self, value: Value) -> bool:
        """Whether a value is a random number, made of nothing else that is floating."""
        draws = False
        behind = back(self._opened, [value], lambda flat, x: () if has(flat.eqn, Trait.DRAWS) else operands(flat, x))
        for made, flat in behind:
            if flat is None and is_a(np.floating, made):
                return False
            draws |= flat is not None and has(flat.eqn, Trait.DRAWS)
        return draws
