"""Recurrences: what adds up for many steps has to add up in float32, wherever the steps are.

A loop shows it in its carry, and `planning.loops` marks the states of carries and scanned inputs with a `Root`. Written
out, as in `x = x + dt * f(w, x)` forty times, a loop shows in a chain of sums whose terms depend on a sum before, and
multiply with no arguments that the terms before did not multiply with: found here. Layers of a network make such a
chain as well, but each with weights of its own, and stay half. A recurrence that is written as a tree, by
`jax.lax.associative_scan`, is a pattern of `analysis.patterns`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from jamp._compat import Atom, Jaxpr, Literal, Var, inner_jaxprs, open_jaxpr
from jamp._primitives import Rule, Trait, has, rule_of
from jamp.transforms.analysis.passages import Passage, Passages

_VIEWS = Trait.VIEW | Trait.MOVES | Trait.CONVERTS
_ENTERED = Trait.CALLS | Trait.REMAT

Sums = Mapping[Var, int | None]
_ITSELF: Any = object()  # Stands for the sums of a chain themselves, where products read nothing else.


class Call(NamedTuple):
    """A call of a function that adds to one of its operands: an iteration.

    Attributes:
        operand: Position of what it adds to.
        before: The same, as the caller names it.
        reads: Other operands that products inside of it read.
    """

    operand: int
    before: Atom
    reads: frozenset[Atom]


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
        counts = Counter(argument for found in reads for argument in found)
        if max(counts.values(), default=0) < 2:
            return {}
        calls = self._calls(jaxpr)
        repeated = _Chains(jaxpr, reads, calls, Passages(self._functions)).repeated()
        return {var: calls[var].operand if var in calls else None for var in repeated}

    def _calls(self, jaxpr: Jaxpr) -> dict[Var, Call]:
        """The results of functions, checkpointed ones too, that are sums of an operand and more."""
        calls: dict[Var, Call] = {}
        for eqn in jaxpr.eqns:
            if has(eqn, _ENTERED):
                for index, (operand, read) in self._steps_of(open_jaxpr(inner_jaxprs(eqn)[0])).items():
                    others = frozenset(eqn.invars[i] for i in read if not isinstance(eqn.invars[i], Literal))
                    calls[eqn.outvars[index]] = Call(operand, eqn.invars[operand], others)
        return calls

    def _steps_of(self, jaxpr: Jaxpr) -> dict[int, tuple[int, frozenset[int]]]:
        """The results of a function that add to an operand: position of that, and of others that products read."""
        if id(jaxpr) not in self._steps:
            reads, calls = self._reads_of_products(jaxpr), self._calls(jaxpr)
            chains = _Chains(jaxpr, reads, calls, Passages(self._functions))
            position: dict[Atom, int] = {var: index for index, var in enumerate(jaxpr.invars)}
            found = {}
            for index, var in enumerate(jaxpr.outvars):
                if isinstance(var, Literal) or (start := chains.start(var)) not in position:
                    continue
                others = frozenset(position[a] for a in chains.all_reads(var) - {start} if a in position)
                found[index] = position[start], others
            self._steps[id(jaxpr)] = found
        return self._steps[id(jaxpr)]

    def _reads_of_products(self, jaxpr: Jaxpr) -> list[frozenset[Atom]]:
        """For each equation, the variables that products there read, seen through views."""
        source: dict[Atom, Var] = {}
        reads = []
        for eqn in jaxpr.eqns:
            operands = [None if isinstance(atom, Literal) else source.get(atom, atom) for atom in eqn.invars]
            found = frozenset()
            if rule_of(eqn) is Rule.HALF:
                found = frozenset(argument for argument in operands if argument is not None)
            elif has(eqn, _ENTERED):
                (inner,) = map(open_jaxpr, inner_jaxprs(eqn))
                if id(inner) not in self._inside:
                    self._inside[id(inner)] = frozenset().union(*self._reads_of_products(inner))
                inside = self._inside[id(inner)]
                found = frozenset(
                    a for a, var in zip(operands, inner.invars, strict=True) if a is not None and var in inside
                )
            elif has(eqn, _VIEWS) and operands and operands[0] is not None:
                source[eqn.outvars[0]] = operands[0]
            reads.append(found)
        return reads


class _Chains:
    """Sums of a jaxpr, each continuing one before it, and what the products in its other term read."""

    def __init__(
        self, jaxpr: Jaxpr, reads: list[frozenset[Atom]], calls: Mapping[Var, Call], passages: Passages
    ) -> None:
        self._jaxpr, self._read = jaxpr, reads
        self._reads_of_calls: dict[Atom, frozenset[Atom]] = {var: call.reads for var, call in calls.items()}
        self._made_at: dict[Atom, int] = {var: index for index, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
        self._same: dict[Atom, Atom] = {}  # By variable, what it is a view or a multiple of.
        self._terms: dict[Atom, tuple[Atom, Atom | None]] = {}
        self._links: dict[Atom, tuple[Atom, frozenset[Atom]]] = {}
        self._all: dict[Atom, frozenset[Atom]] = {}
        self._others: dict[Atom, list[Atom]] = {}  # By variable that is a sum in places, what else it is made of.
        for eqn, read in zip(jaxpr.eqns, reads, strict=True):
            found = passages.through(eqn, bool(read))
            for passage in found:
                self._go_on(passage, passages.learned)
            if not found and has(eqn, Trait.ADDS) and not any(isinstance(a, Literal) for a in eqn.invars):
                older, newer = sorted(map(self._resolved, eqn.invars), key=self._age)
                self._terms[eqn.outvars[0]] = older, newer
            for var in eqn.outvars:
                if var in calls:
                    self._terms[var] = self._resolved(calls[var].before), None

    def _go_on(self, passage: Passage, learned: Collection[Atom]) -> None:
        """A sum goes on behind what hands it on: behind a limit or a choice as a sum that has no other term."""
        candidates = {self._resolved(atom) for atom in passage.handed_on}
        sums = [atom for atom in candidates if atom in self._terms and atom in learned]
        if sums and not passage.whole:
            self._terms[passage.result] = max(sums, key=self._age), None
            self._others[passage.result] = [*(candidates - {*sums}), *map(self._resolved, passage.others)]
        elif passage.whole or (len(candidates) == 1 and not passage.others):
            self._same[passage.result] = candidates.pop()

    def _age(self, atom: Atom) -> int:
        return self._made_at.get(atom, -1)

    def _resolved(self, atom: Atom) -> Atom:
        return self._same.get(atom, atom)

    def _link(self, var: Atom) -> tuple[Atom, frozenset[Atom]]:
        """What a sum goes on from, and what products between that and the sum read."""
        if var not in self._links:
            before, term = self._terms[var]
            if var in self._others:
                reads = frozenset().union(*(self._walk(before, other) for other in self._others[var]))
            else:
                reads = self._walk(before, term) if term is not None else self._reads_of_calls[var]
            # Of two terms that do not depend on each other, the one that adds up goes on: `c * (x - eps) + d * eps`.
            if not reads and term is not None and self.all_reads(term):
                before = term
            self._links[var] = before, reads
        return self._links[var]

    def all_reads(self, var: Atom) -> frozenset[Atom]:
        """What products in all terms of a chain read."""
        row = []
        while var in self._terms and var not in self._all:
            row.append(var)
            var = self._link(var)[0]
        for var in reversed(row):
            before, reads = self._link(var)
            self._all[var] = reads | self._all.get(before, frozenset())
        return self._all.get(row[0] if row else var, frozenset())

    def start(self, var: Atom) -> Atom | None:
        """What a chain of sums starts from; None if it is no chain."""
        var, start = self._resolved(var), None
        while var in self._terms and self.all_reads(var):
            start = var = self._link(var)[0]
        return start

    def repeated(self) -> list[Var]:
        """The sums of all chains in which a term reads what terms before it read, and nothing else."""
        found: dict[Atom, None] = {}
        for var, (before, _) in self._terms.items():
            # Only of sums that go on: a walk back to an argument, as of `w - rate * gradient`, is a long one.
            if before not in self._terms or not (known := self.all_reads(before)):
                continue
            reads = self._link(var)[1]
            if reads <= known and (reads or before in found):
                found[var] = None
                while before in self._terms and before not in found and self.all_reads(before):
                    found[before] = None
                    before = self._link(before)[0]
        return list(found)  # pyright: ignore[reportReturnType]

    def _walk(self, before: Atom, term: Atom) -> frozenset[Atom]:
        """What products between a sum and the sum before it read that is older than both.

        Nothing if the term does not depend on the sum before; that sum if the term is made of nothing else, as in
        `1.5 * x - 0.5 * x @ x.T @ x`.
        """
        first, todo, seen, depends = self._made_at.get(before, -1), [term], {term}, False
        multiplies = False
        result: set[Atom] = set()
        while todo:
            index = self._made_at.get(todo.pop(), -1)
            if index <= first:
                continue
            result |= self._read[index]
            multiplies |= bool(self._read[index])
            operands = {self._resolved(a) for a in self._jaxpr.eqns[index].invars if not isinstance(a, Literal)}
            depends |= before in operands
            todo += operands - seen
            seen |= operands
        # Where the sum before is an argument, other arguments alone are as old.
        result = {atom for atom in result if self._made_at.get(atom, -1) < max(first, 0)} - {before}
        if depends and multiplies and all(atom is before or self._made_at.get(atom, -1) > first for atom in seen):
            result = {_ITSELF}
        return frozenset(result) if depends else frozenset()
