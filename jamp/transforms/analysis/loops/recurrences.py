"""Recurrences: what adds up for many steps has to add up in float32, wherever the steps are.

A loop shows it in its carry, and `planning.loops` marks the states of carries and scanned inputs with a `Root`. Written
out, as in `x = x + dt * f(w, x)` forty times, a loop shows in a chain of sums whose terms depend on a sum before, and
multiply with no arguments that the terms before did not multiply with: found here. Layers of a network make such a
chain as well, but each with weights of its own, and stay half. Several states may move each other, as positions and
momenta do, or weights and biases that steps of descent adapt: what one reads of another is a sum that goes on as well.
A recurrence that is written as a tree, by `jax.lax.associative_scan`, is a pattern of `analysis.patterns`.

What a layer adds to the stream is of the size of the stream. What is added a thousandth at a time, as a learning rate
does, is a state: in half, whose numbers are 0.4 % apart, it would stay where it is (`small_steps`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from jamp._compat import Atom, Jaxpr, Literal, Var, inner_jaxprs, open_jaxpr
from jamp._primitives import MOVED, SHOWN, Rule, Trait, has, having, rule_of, traits_of
from jamp.transforms.analysis.loops.passages import Passages
from jamp.transforms.analysis.loops.sums import Call, Chains
from jamp.transforms.analysis.reading.axes import num_contracted
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source, Value
from jamp.transforms.program.flow import num_elements

_ENTERED = Trait.CALLS | Trait.REMAT
_DEEPEST = 8  # Sums in a row: those of what is added, one after another.
_FACTORS = 5  # Products in a row.
_OF_RATES = 1e-6  # Small, whatever else scales the term.

Sums = Mapping[Var, int | None]


class Recurrences:
    """Finds the sums of loops written out; remembers them, since a body is planned until its carries settle."""

    def __init__(self) -> None:
        self._sums: dict[int, Sums] = {}
        self._inside: dict[int, frozenset[Var]] = {}
        self._steps: dict[int, dict[int, tuple[int, frozenset[int]]]] = {}
        self._functions: dict[int, list[frozenset[int]]] = {}

    def sums(self, jaxpr: Jaxpr) -> Sums:
        """Variables of a jaxpr that are sums over the iterations of a loop written out.

        An iteration may also be a call of a function that adds to an operand. The position of that operand is given;
        None for a sum.
        """
        if id(jaxpr) not in self._sums:
            self._sums[id(jaxpr)] = self._find(jaxpr)
        return self._sums[id(jaxpr)]

    def _find(self, jaxpr: Jaxpr) -> Sums:
        reads = self._reads_of_products(jaxpr)
        counts = Counter[object](argument for found in reads for argument in found)
        # Layers: a term that reads what terms before it read has a product without an argument of its own.
        own = {var for var in (*jaxpr.invars, *jaxpr.constvars) if counts[var] == 1}
        if not any(found and own.isdisjoint(found) for found in reads):
            return {}
        # A function that is called again may hold the data on which it moves its operands.
        entered = (eqn for eqn, read in zip(jaxpr.eqns, reads, strict=True) if read and has(eqn, _ENTERED))
        counts.update(id(inner_jaxprs(eqn)[0]) for eqn in entered)
        if max(counts.values(), default=0) < 2:
            return {}
        calls = self._calls(jaxpr)
        repeated = Chains(jaxpr, reads, calls, Passages(self._functions)).repeated()
        return {var: calls[var].operand if var in calls else None for var in repeated}

    def _calls(self, jaxpr: Jaxpr) -> dict[Var, Call]:
        """The results of functions, checkpointed ones too, that are sums of an operand and more."""
        calls: dict[Var, Call] = {}
        for eqn in having(jaxpr.eqns, _ENTERED):
            for index, (operand, read) in self._steps_of(open_jaxpr(inner_jaxprs(eqn)[0])).items():
                others = frozenset(eqn.invars[i] for i in read if not isinstance(eqn.invars[i], Literal))
                calls[eqn.outvars[index]] = Call(operand, eqn.invars[operand], others)
        return calls

    def _steps_of(self, jaxpr: Jaxpr) -> dict[int, tuple[int, frozenset[int]]]:
        """The results of a function that add to an operand: position of that, and of others that products read."""
        if id(jaxpr) not in self._steps:
            reads, calls = self._reads_of_products(jaxpr), self._calls(jaxpr)
            chains = Chains(jaxpr, reads, calls, Passages(self._functions))
            position: dict[Atom, int] = {var: index for index, var in enumerate(jaxpr.invars)}
            found = {}
            for index, (start, read) in chains.moved(jaxpr).items():
                if start in position:
                    found[index] = position[start], frozenset(position[a] for a in read - {start} if a in position)
            self._steps[id(jaxpr)] = found
        return self._steps[id(jaxpr)]

    def _reads_of_products(self, jaxpr: Jaxpr) -> list[frozenset[Atom]]:
        """For each equation, the variables that products there read, seen through views."""
        source: dict[Atom, Var] = {}
        reads = []
        for eqn in jaxpr.eqns:
            traits = traits_of(eqn)
            operands = [None if isinstance(atom, Literal) else source.get(atom, atom) for atom in eqn.invars]
            found = frozenset[Atom]()
            if rule_of(eqn) is Rule.HALF:
                found = frozenset(argument for argument in operands if argument is not None)
            elif traits & _ENTERED:
                (inner,) = map(open_jaxpr, inner_jaxprs(eqn))
                if id(inner) not in self._inside:
                    self._inside[id(inner)] = frozenset().union(*self._reads_of_products(inner))
                inside = self._inside[id(inner)]
                found = frozenset(
                    a for a, var in zip(operands, inner.invars, strict=True) if a is not None and var in inside
                )
            elif traits & MOVED and operands and operands[0] is not None:
                source[eqn.outvars[0]] = operands[0]
            reads.append(found)
        return reads


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
        return flat.ins if has(flat.eqn, SHOWN | Trait.LIMITS) else []

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
