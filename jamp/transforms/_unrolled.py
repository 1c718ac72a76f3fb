"""Unrolled loops: sums over iterations that apply the same weights, as in `x = x + dt * f(w, x)` written out.

What adds up for many steps has to add up in float32. In a `scan` that shows in the carry; written out, it shows in a
chain of sums whose terms depend on the sum before and multiply with the same arguments. Layers of a network make such
a chain as well, but each with weights of its own, and stay half.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from jamp._compat import Literal, inner_jaxprs, open_jaxpr
from jamp.transforms._rules import CALLS, FOLLOW, HALF

_VIEWS = (FOLLOW | {"convert_element_type"}) - {"argmax", "argmin", "sort", "top_k"}
_SUMS = frozenset({"add", "add_any", "sub"})


def repeated_sums(jaxpr: Any) -> frozenset[Any]:
    """Variables of a jaxpr that are sums over the iterations of an unrolled loop."""
    reads = _reads_of_products(jaxpr)
    counts = Counter(argument for found in reads for argument in found)
    repeated = {argument for argument, count in counts.items() if count > 1}
    return _chains(jaxpr, [found & repeated for found in reads]) if repeated else frozenset()


def _reads_of_products(jaxpr: Any) -> list[set[Any]]:
    """For each equation, the arguments of the jaxpr that are operands of matrix products there."""
    source = {var: var for var in (*jaxpr.invars, *jaxpr.constvars)}
    reads = []
    for eqn in jaxpr.eqns:
        name, operands = eqn.primitive.name, [None if isinstance(a, Literal) else source.get(a) for a in eqn.invars]
        found = set()
        if name in HALF:
            found = {argument for argument in operands if argument is not None}
        elif name in CALLS:
            (inner,) = map(open_jaxpr, inner_jaxprs(eqn))
            if any(argument is not None for argument in operands):
                inside = set().union(*_reads_of_products(inner))
                found = {a for a, var in zip(operands, inner.invars, strict=True) if a is not None and var in inside}
        elif name in _VIEWS and operands[0] is not None:
            source[eqn.outvars[0]] = operands[0]
        reads.append(found)
    return reads


def _chains(jaxpr: Any, reads: list[set[Any]]) -> frozenset[Any]:
    made_at = {var: index for index, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    chains: dict[
        Any, tuple[list[Any], set[Any]]
    ] = {}  # By the last sum of a chain, its sums and the last term's reads.
    found: set[Any] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name not in _SUMS or any(isinstance(atom, Literal) for atom in eqn.invars):
            continue
        before, term = sorted(eqn.invars, key=lambda var: made_at.get(var, -1))
        term_reads = _reads_since(before, term, jaxpr, made_at, reads)
        if not term_reads:
            continue
        sums, last_reads = chains.get(before, ([], set()))
        chains[eqn.outvars[0]] = ([*sums, eqn.outvars[0]], term_reads)
        if last_reads & term_reads:
            found.update(chains[eqn.outvars[0]][0])
    return frozenset(found)


def _reads_since(before: Any, term: Any, jaxpr: Any, made_at: dict[Any, int], reads: list[set[Any]]) -> set[Any]:
    """What products between `before` and `term` read; nothing if the one does not depend on the other."""
    first, todo, seen, depends = made_at.get(before, -1), [term], {term}, False
    result: set[Any] = set()
    while todo:
        index = made_at.get(todo.pop(), -1)
        if index <= first:
            continue
        result |= reads[index]
        operands = {atom for atom in jaxpr.eqns[index].invars if not isinstance(atom, Literal)}
        depends |= before in operands
        todo += operands - seen
        seen |= operands
    return result if depends else set()
