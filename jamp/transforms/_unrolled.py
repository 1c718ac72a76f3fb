"""Unrolled loops: sums over iterations that apply the same weights, as in `x = x + dt * f(w, x)` written out.

What adds up for many steps has to add up in float32. In a `scan` that shows in the carry; written out, it shows in a
chain of sums whose terms depend on the sum before, and multiply with no arguments that the last term did not multiply
with. Layers of a network make such a chain as well, but each with weights of its own, and stay half.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from jamp._compat import Literal, inner_jaxprs, open_jaxpr
from jamp.transforms._rules import CALLS, FOLLOW, HALF, SUMS

_VIEWS = (FOLLOW | {"convert_element_type"}) - {"argmax", "argmin", "sort", "top_k"}
_ENTERED = CALLS | {"checkpoint", "remat2"}


class UnrolledLoops:
    """Finds the sums of unrolled loops; remembers them, since a loop body is planned until its carries settle."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[Any, int | None]] = {}
        self._inside: dict[int, frozenset[Any]] = {}
        self._steps: dict[int, dict[int, tuple[int, set[int]]]] = {}

    def sums(self, jaxpr: Any) -> dict[Any, int | None]:
        """Variables of a jaxpr that are sums over the iterations of an unrolled loop.

        An iteration may also be a call of a function that adds to an operand. The position of that operand is given;
        None for a sum.
        """
        if id(jaxpr) not in self._sums:
            self._sums[id(jaxpr)] = self._find(jaxpr)
        return self._sums[id(jaxpr)]

    def _find(self, jaxpr: Any) -> dict[Any, int | None]:
        reads = self._reads_of_products(jaxpr)
        counts = Counter(argument for found in reads for argument in found)
        if max(counts.values(), default=0) < 2:
            return {}
        calls = {}
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in CALLS:
                for index, (operand, read) in self._steps_of(open_jaxpr(inner_jaxprs(eqn)[0])).items():
                    weights = {eqn.invars[i] for i in read if not isinstance(eqn.invars[i], Literal)}
                    calls[eqn.outvars[index]] = (operand, eqn.invars[operand], weights)
        found = _Chains(jaxpr, reads, {var: call[1:] for var, call in calls.items()}).repeated()
        return {var: calls[var][0] if var in calls else None for var in found}

    def _steps_of(self, jaxpr: Any) -> dict[int, tuple[int, set[int]]]:
        """By result that is a sum of an operand and a term: that operand, and the others that products read."""
        if id(jaxpr) not in self._steps:
            chains = _Chains(jaxpr, self._reads_of_products(jaxpr), {})
            position = {var: index for index, var in enumerate(jaxpr.invars)}
            self._steps[id(jaxpr)] = {
                index: (position[start], {position[a] for a in chains.reads(var) - {start} if a in position})
                for index, var in enumerate(jaxpr.outvars)
                if (start := chains.start(var)) in position
            }
        return self._steps[id(jaxpr)]

    def _reads_of_products(self, jaxpr: Any) -> list[set[Any]]:
        """For each equation, the arguments of the jaxpr that are operands of matrix products there."""
        source = {var: var for var in (*jaxpr.invars, *jaxpr.constvars)}
        reads = []
        for eqn in jaxpr.eqns:
            name, operands = eqn.primitive.name, [None if isinstance(a, Literal) else source.get(a) for a in eqn.invars]
            found = set()
            if name in HALF:
                found = {argument for argument in operands if argument is not None}
            elif name in _ENTERED:
                (inner,) = map(open_jaxpr, inner_jaxprs(eqn))
                if id(inner) not in self._inside:
                    self._inside[id(inner)] = frozenset().union(*self._reads_of_products(inner))
                inside = self._inside[id(inner)]
                found = {a for a, var in zip(operands, inner.invars, strict=True) if a is not None and var in inside}
            elif name in _VIEWS and operands[0] is not None:
                source[eqn.outvars[0]] = operands[0]
            reads.append(found)
        return reads


class _Chains:
    """Sums of a jaxpr to which a term is added that depends on them, and what the products in that term read."""

    def __init__(self, jaxpr: Any, reads: list[set[Any]], calls: dict[Any, tuple[Any, set[Any]]]) -> None:
        self._jaxpr, self._read = jaxpr, reads
        self._made_at = {var: index for index, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
        self._operands = {
            eqn.outvars[0]: sorted(eqn.invars, key=lambda var: self._made_at.get(var, -1))
            for eqn in jaxpr.eqns
            if eqn.primitive.name in SUMS and not any(isinstance(atom, Literal) for atom in eqn.invars)
        }
        self._operands |= {var: (before, None) for var, (before, _) in calls.items()}
        self._known = {var: read for var, (_, read) in calls.items()}

    def start(self, var: Any) -> Any:
        """What a chain of sums starts from; None if it is no chain."""
        start = None
        while not isinstance(var, Literal) and var in self._operands and self.reads(var):
            start = var = self._operands[var][0]
        return start

    def repeated(self) -> frozenset[Any]:
        """The sums of all chains in which a term reads what the last one read, and nothing else."""
        found: set[Any] = set()
        for var, (before, _) in self._operands.items():
            # Only of sums that go on: a walk back to an argument, as of `w - rate * gradient`, is a long one.
            if before in self._operands and (reads := self.reads(var)) and reads <= self.reads(before):
                found.add(var)
                while before in self._operands and before not in found and self.reads(before):
                    found.add(before)
                    before = self._operands[before][0]
        return frozenset(found)

    def reads(self, var: Any) -> set[Any]:
        """What products between a sum and the sum before it read; nothing if the term does not depend on that."""
        if var not in self._known:
            self._known[var] = self._walk(*self._operands[var])
        return self._known[var]

    def _walk(self, before: Any, term: Any) -> set[Any]:
        first, todo, seen, depends = self._made_at.get(before, -1), [term], {term}, False
        result: set[Any] = set()
        while todo:
            index = self._made_at.get(todo.pop(), -1)
            if index <= first:
                continue
            result |= self._read[index]
            operands = {atom for atom in self._jaxpr.eqns[index].invars if not isinstance(atom, Literal)}
            depends |= before in operands
            todo += operands - seen
            seen |= operands
        return result if depends else set()
