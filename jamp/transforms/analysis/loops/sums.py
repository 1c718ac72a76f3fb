"""Chains of sums of a jaxpr, each of which goes on from one before it, and what products in its other term read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, cast

from jamp._compat import Atom, Jaxpr, Literal, Var
from jamp._primitives import Trait, has
from jamp.transforms.analysis.loops.passages import Passage, Passages

_ITSELF = cast(Atom, object())  # Stands for the sums of a chain themselves, where products read nothing else.
_NUMBER = cast(Atom, object())  # Stands for a number that a chain starts from.


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


class Chains:
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
        self._ancestry: dict[Atom, tuple[int, int]] | None = None
        self._bits: dict[Atom, int] = {}  # By argument, the position of its bit.
        self._named: dict[int, frozenset[Atom]] = {}
        self._since: dict[Atom, Atom] = {}  # By sum whose term depends on what lies further back, that.
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
                    before = calls[var].before
                    self._terms[var] = _NUMBER if isinstance(before, Literal) else self._resolved(before), None

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
        found: dict[Atom, frozenset[Atom]] = {}
        ahead = [var]  # Thousands of sums may be terms of one another.
        while ahead:
            now = ahead[-1]
            if now in self._links:
                ahead.pop()
                continue
            before, term = self._terms[now]
            if now not in found:
                found[now] = self._reads_between(now)
            if not found[now] and term is not None and (behind := self._not_linked(term)) is not None:
                ahead.append(behind)
                continue
            # Of two terms that do not depend on each other, the one that adds up goes on: `c * (x - eps) + d * eps`.
            if not found[now] and term is not None and self.all_reads(term):
                before = term
            self._links[now] = before, found[now]
        return self._links[var]

    def _not_linked(self, var: Atom) -> Atom | None:
        """The first sum of a chain of which it is not known what it goes on from."""
        while var in self._links and var not in self._all:
            var = self._links[var][0]
        return var if var in self._terms and var not in self._all else None

    def _reads_between(self, var: Atom) -> frozenset[Atom]:
        """What products between a sum and what it goes on from read."""
        before, term = self._terms[var]
        if var in self._others:
            walks = [self._walk(before, other) for other in self._others[var]]
            return frozenset().union(*(reads for reads, depends in walks if depends))
        return self._reads_of_calls[var] if term is None else self._reads_of(var, before, term)

    def _reads_of(self, var: Atom, before: Atom, term: Atom) -> frozenset[Atom]:
        """What products between a sum and the sum before it read, or the one before that.

        In `q, m = q + dt * m, m - dt * force(q)` each term depends on the last value of the other state, and so on the
        last but one of its own.
        """
        reads, depends = self._walk(before, term)
        earlier = self._terms.get(before, (before,))[0]
        if not depends and earlier in self._terms:
            reads, depends = self._walk(earlier, term)
            if depends and reads:
                self._since[var] = earlier
        return reads if depends else frozenset()

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

    def moved(self, jaxpr: Jaxpr) -> dict[int, tuple[Atom, frozenset[Atom]]]:
        """By position of the results that are sums, what they start from, and what products in their terms read.

        The terms depend on that, or on what another result starts from: states that move each other.
        """
        found, others = {}, {}
        results = {i: self._resolved(var) for i, var in enumerate(jaxpr.outvars) if not isinstance(var, Literal)}
        for index, var in results.items():
            if (start := self._start(var)) is not None:
                found[index] = start, self.all_reads(var)
            elif var in self._terms:
                others[index] = self._oldest(var)
        states = {start for start, _ in (*found.values(), *others.values())}
        made_of = self._made_of(states) if others else {}
        for index, (start, read) in others.items():
            if read and made_of.get(results[index], frozenset()) - {start}:
                found[index] = start, read
        return found

    def _start(self, var: Atom) -> Atom | None:
        """What a chain of sums starts from; None if it is no chain."""
        start = None
        while var in self._terms and self.all_reads(var):
            start = var = self._link(var)[0]
        return start

    def _oldest(self, var: Atom) -> tuple[Atom, frozenset[Atom]]:
        """The oldest term of a sum, and what products in the others read, whatever they depend on."""
        read = frozenset[Atom]()
        while var in self._terms:
            before, term = self._terms[var]
            read |= self._reads_of_calls.get(var, frozenset())
            read |= frozenset() if term is None else self._walk(before, term)[0]
            var = before
        return var, read

    def _made_of(self, states: set[Atom]) -> dict[Atom, frozenset[Atom]]:
        """Which of some values each variable depends on."""
        made_of: dict[Atom, frozenset[Atom]] = {state: frozenset({state}) for state in states}
        for eqn in self._jaxpr.eqns:
            found = [made_of[a] for a in eqn.invars if not isinstance(a, Literal) and a in made_of]
            made_of.update((var, frozenset().union(made_of.get(var, ()), *found)) for var in eqn.outvars)
        return made_of

    def repeated(self) -> list[Var]:
        """The sums of all chains in which a term reads what terms before it read, and nothing else."""
        found: dict[Atom, None] = {}
        for var, (before, _) in self._terms.items():
            # Only of sums that go on: a walk back to an argument, as of `w - rate * gradient`, is a long one.
            if before not in self._terms or not self.all_reads(before):
                continue
            reads = self._link(var)[1]
            known = self.all_reads(self._since.get(var, before))
            if (reads or before in found) and all(self._goes_on(atom, known) for atom in reads):
                found[var] = None
                while before not in found and (self.all_reads(before) or self._begins(before, known)):
                    found[before] = None
                    before = self._link(before)[0]
        return list(found)  # pyright: ignore[reportReturnType]

    def _goes_on(self, atom: Atom, known: frozenset[Atom]) -> bool:
        """Whether a value is one of those known, or a sum that goes on from one: another state of the same loop.

        States that move each other are read in turns, as positions and momenta are, or the weights and the biases that
        descent adapts: no step reads what the step before has read, but what has become of it.
        """
        todo, seen = [atom], {atom}
        while todo and known.isdisjoint(seen):
            terms = {term for term in self._terms.get(todo.pop(), ()) if term is not None}
            todo += terms - seen
            seen |= terms
        return not known.isdisjoint(seen)

    def _begins(self, var: Atom, known: frozenset[Atom]) -> bool:
        """Whether a sum is the first of a chain, whose term multiplies with what later terms multiply with.

        The first momentum does not depend on the momentum that it is added to. A bias is added to what other weights
        make.
        """
        before, term = self._terms.get(var, (var, None))
        return term is not None and not known.isdisjoint(self._walk(before, term)[0])

    def _walk(self, before: Atom, term: Atom) -> tuple[frozenset[Atom], bool]:
        """What products between a sum and one before read that is older than both, and whether it depends on that.

        Of a term that is made of the sum before alone, as in `1.5 * x - 0.5 * x @ x.T @ x`, that sum.
        """
        if before not in self._made_at:
            return self._walk_to_arguments(before, term)
        first, todo, seen, depends = self._made_at[before], [term], {term}, False
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
        if depends and multiplies and all(atom is before or self._made_at.get(atom, -1) > first for atom in seen):
            return frozenset({_ITSELF}), depends
        return frozenset(atom for atom in result if self._made_at.get(atom, -1) < first), depends

    def _walk_to_arguments(self, before: Atom, term: Atom) -> tuple[frozenset[Atom], bool]:
        """A walk as far back as there is: all of them at once, since a step of descent has one for each weight."""
        if self._ancestry is None:
            self._ancestry = self._ancestors()
        made_of, read = self._ancestry.get(term, (0, 0))
        if read not in self._named:
            self._named[read] = frozenset(a for a, bit in self._bits.items() if read >> bit & 1)
        depends = before in self._bits and bool(made_of >> self._bits[before] & 1)
        if depends and read and made_of == 1 << self._bits[before]:
            return frozenset({_ITSELF}), depends
        return self._named[read] - {before}, depends

    def _ancestors(self) -> dict[Atom, tuple[int, int]]:
        """For each result, the arguments that it depends on, and those that products on the way read, as bits."""
        found: dict[Atom, tuple[int, int]] = {}
        for eqn, read in zip(self._jaxpr.eqns, self._read, strict=True):
            made_of = reads = 0
            for atom in (self._resolved(a) for a in eqn.invars if not isinstance(a, Literal)):
                made_of |= found[atom][0] if atom in found else self._bit(atom)
                reads |= found[atom][1] if atom in found else 0
            for atom in read:
                reads |= 0 if atom in self._made_at else self._bit(atom)
            found.update((var, (made_of, reads)) for var in eqn.outvars)
        return found

    def _bit(self, argument: Atom) -> int:
        return 1 << self._bits.setdefault(argument, len(self._bits))
