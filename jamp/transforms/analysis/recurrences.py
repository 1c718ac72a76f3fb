"""Recurrences: what adds up for many steps has to add up in float32, wherever the steps are.

A loop shows it in its carry, and `planning.loops` marks the states of carries and scanned inputs with a `Root`. Written
out, as in `x = x + dt * f(w, x)` forty times, a loop shows in a chain of sums whose terms depend on a sum before, and
multiply with no arguments that the terms before did not multiply with: found here. Layers of a network make such a
chain as well, but each with weights of its own, and stay half. Several states may move each other, as positions and
momenta do, or weights and biases that steps of descent adapt: what one reads of another is a sum that goes on as well.
A recurrence that is written as a tree, by `jax.lax.associative_scan`, is a pattern of `analysis.patterns`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from jamp._compat import Atom, Jaxpr, Literal, Var, inner_jaxprs, open_jaxpr
from jamp._primitives import Rule, Trait, has, having, rule_of, traits_of
from jamp.transforms.analysis.passages import Passages
from jamp.transforms.analysis.sums import Call, Chains

_VIEWS = Trait.VIEW | Trait.MOVES | Trait.CONVERTS
_ENTERED = Trait.CALLS | Trait.REMAT

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
            elif traits & _VIEWS and operands and operands[0] is not None:
                source[eqn.outvars[0]] = operands[0]
            reads.append(found)
        return reads
