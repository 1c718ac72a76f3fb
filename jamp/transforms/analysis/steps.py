"""Small steps: carries that a loop adds to a little at a time, as a learning rate does.

What a layer adds to the stream is of the size of the stream. What is added a thousandth at a time is a state: in half,
whose numbers are 0.4 % apart, it would stay where it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jamp._compat import Jaxpr
from jamp._primitives import Trait, has
from jamp.transforms.analysis.axes import num_contracted
from jamp.transforms.analysis.flat import Flat, Opened, Source, Value
from jamp.transforms.program.flow import num_elements

_THROUGH = Trait.VIEW | Trait.CONVERTS | Trait.NEGATES
_DEEPEST = 8  # Sums in a row: those of what is added, one after another.
_FACTORS = 5  # Products in a row.
_OF_RATES = 1e-6  # Small, whatever else scales the term.


def small_steps(body: Jaxpr, first: int, carries: int, most: float) -> frozenset[int]:
    """Positions of the carries of a loop to which something is added that a small number scales.

    A number that is the same in all iterations, and not known, is a rate too. One that comes with the layers is theirs.

    Args:
        body: The body of the loop.
        first: Position of the first carry among its inputs.
        carries: How many there are. They are its first results.
        most: The largest number that counts as small.
    """
    steps = _Steps(body, first, most)
    return frozenset(index for index, atom in enumerate(body.outvars[:carries]) if steps.taken(steps.source(atom)))


class _Steps:
    def __init__(self, body: Jaxpr, first: int, most: float) -> None:
        self._opened = Opened(body, deep=True)
        self.source = self._opened.source
        self._rates = {Value(0, var) for var in body.invars[:first] if num_elements(var.aval) == 1}
        self._most = most

    def taken(self, carried: Source | None) -> bool:
        """Whether what is carried on is a sum with a small term."""
        todo = [(carried, _DEEPEST)]
        while todo:
            source, depth = todo.pop()
            flat = self._opened.maker(source) if isinstance(source, Value) else None
            if flat is None or depth == 0:
                continue
            terms = _terms(flat)
            if any(0 < self._scale(term) <= self._most for term in terms if self._is_computed(term)):
                return True
            todo += [(each, depth - bool(terms)) for each in terms or self._parts(flat, source)]
        return False

    def _is_computed(self, source: Source) -> bool:
        return isinstance(source, Value) and self._opened.number(source) is None

    def _parts(self, flat: Flat, source: Source | None) -> Sequence[Source]:
        """What a value is, or is chosen among."""
        if flat.cases:
            return [case[flat.outs.index(source)] for case in flat.cases] if source in flat.outs else []
        if has(flat.eqn, Trait.SELECTS):
            return flat.ins[1:]
        return flat.ins if has(flat.eqn, _THROUGH | Trait.LIMITS) else []

    def _scale(self, source: Source, depth: int = _FACTORS) -> float:
        """By which numbers a value is scaled, together; a sum is as large as what it is of, times how many.

        So a mean is not small, nor are scores that are divided by the root of what they add up.
        """
        if (number := self._opened.number(source)) is not None:
            return abs(number)
        if source in self._rates:
            return _OF_RATES
        flat = self._opened.maker(source)
        if flat is None or depth == 0:
            return 1.0
        eqn, ins = flat.eqn, flat.ins
        if has(eqn, Trait.MULTIPLIES | Trait.MATRIX):
            terms = num_contracted(eqn) if has(eqn, Trait.MATRIX) else 1
            return terms * math.prod(self._scale(operand, depth - 1) for operand in ins)
        if has(eqn, Trait.SUMS_AXES):
            terms = num_elements(eqn.invars[0].aval) / max(num_elements(eqn.outvars[0].aval), 1)
            return terms * self._scale(ins[0], depth - 1)
        if has(eqn, Trait.DIVIDES) and len(ins) == 2:
            return self._scale(ins[0], depth) / (abs(self._opened.number(ins[1]) or 0.0) or 1.0)
        parts = [part for part in self._parts(flat, source) if self._is_computed(part)]
        return max((self._scale(part, depth - 1) for part in parts), default=1.0)


def _terms(flat: Flat) -> Sequence[Source]:
    """What is added up, element by element."""
    if has(flat.eqn, Trait.ADDS) and len(flat.ins) == 2:
        return flat.ins
    if has(flat.eqn, Trait.SCATTERS) and has(flat.eqn, Trait.REDUCES):
        return flat.ins[0], flat.ins[-1]
    return ()
