"""How gradients came to be, read from the trace of the step that they are in.

While a step is traced, JAX keeps for every value the equation that made it. So an optimizer can ask whether its
gradients were differentiated here, and to what power they are proportional to the scale that it is about to divide by.
The answer is found once for each trace, and puts nothing into the program. Of gradients that have values already, and
of those that come into the trace from outside, nothing is known.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import keystr, tree_leaves_with_path

from jamp._compat import (
    Eqn,
    Producer,
    captured,
    inner_jaxprs,
    is_in_loop,
    jit_tracer,
    open_jaxpr,
    producer,
    scope_path,
    traced_for,
    traces_around,
)  # fmt: skip
from jamp.optim._degree_rules import Origin, Value, constant
from jamp.optim._degrees import ARGUMENT, PLAIN, Degree
from jamp.optim._following import Following
from jamp.scalers._base import is_traced
from jamp.transforms._labels import TRACED_SCOPE


class Provenance(NamedTuple):
    """What is known of gradients.

    Attributes:
        degrees: Of which degree each leaf is, by its key path.
        scale: What stands in the degrees for the scale that the gradients are to be divided by.
        scale_is_carried: Whether that scale belongs to the body of a loop.
        scales: What stands for the scales that went into the gradients, also those that were divided out again.
        numbers: Magnitudes of the numbers that were written on the way to them.
        differentiated: Whether this trace holds the derivative that made them.
        averaged: Whether devices exchanged anything on the way to them.
    """

    degrees: list[tuple[str, Degree]]
    scale: Hashable
    scale_is_carried: bool
    scales: frozenset[Hashable]
    numbers: frozenset[float]
    differentiated: bool
    averaged: bool


def provenance(grads: Any, params: Any, scale: Any) -> Provenance:
    """Looks at how gradients came to be.

    Args:
        grads: Tree of gradients.
        params: The parameters, behind which lies what is past: the steps before this one. May be None.
        scale: The loss scale that the gradients are to be divided by.
    """
    past = {id(jit_tracer(p)) for p in jax.tree.leaves(params)}
    origin = _Values(past, None).of(jit_tracer(scale)).origin
    values = _Values(past, origin if isinstance(origin, Origin) else None)  # A number may stand for itself.
    leaves = [(keystr(path), jit_tracer(leaf)) for path, leaf in tree_leaves_with_path(grads)]
    leaves = [(path, leaf) for path, leaf in leaves if is_traced(leaf)]
    degrees = [(path, values.of(leaf).degree) for path, leaf in leaves]
    return Provenance(
        degrees=degrees,
        scale=origin,
        scale_is_carried=is_in_loop(jit_tracer(scale)),
        scales=frozenset(values.following.scales),
        numbers=frozenset(values.following.numbers),
        differentiated=values.following.differentiated,
        averaged=values.following.averaged,
    )


class _Values:
    """The values in a trace, each found once."""

    def __init__(self, params: set[int], scale: Hashable) -> None:
        self.following = Following(scale)
        self._params = params
        self._known: dict[int, Value] = {}
        self._made: dict[int, list[Value]] = {}
        self._kept: list[Any] = []  # So that no id is used again.

    def of(self, tracer: Any) -> Value:
        """The value of a tracer, found after those that it was made from."""
        pending = [tracer]
        while pending:
            here = pending[-1]
            if id(here) not in self._known and not self._is_found(here, pending):
                continue
            pending.pop()
        return self._known[id(tracer)]

    def _is_found(self, here: Any, pending: list[Any]) -> bool:
        """Finds a value, or adds what has to be found before."""
        made_by = producer(here)
        if not is_traced(here):
            self._known[id(here)] = constant(here)
        elif id(here) in self._params:
            self._known[id(here)] = Value(PLAIN)
        elif made_by is not None:
            unknown = [x for x in made_by.operands if id(x) not in self._known]
            pending += unknown
            if unknown:
                return False
            self._known[id(here)] = self._all_of(made_by, here)[made_by.position]
        elif is_traced(outer := captured(here)):
            outer = jit_tracer(outer)
            self._kept.append(outer)
            if id(outer) not in self._known:
                pending.append(outer)
                return False
            self._known[id(here)] = self._known[id(outer)]
        elif outer is not None:
            self._known[id(here)] = constant(outer)
        else:
            self._known[id(here)] = self.following.settled(Value(ARGUMENT, _argument(here)), here)
        return True

    def _all_of(self, made_by: Producer, here: Any) -> list[Value]:
        key = id(made_by.outputs[0])
        if key not in self._made:
            ins = [self._known[id(x)] for x in made_by.operands]
            self.following.traces = traces_around(here)
            self._made[key] = self.following.equation(made_by, ins)
        return self._made[key]


def _argument(tracer: Any) -> Origin:
    """What stands for an argument: that of a step or of a loop is a value of its own, any other may be one of them."""
    traces = traces_around(tracer)
    is_of_step = len(traces) <= 1 and traced_for(tracer) in ("jit", "pmap", "")
    return Origin("argument" if is_of_step or is_in_loop(tracer) else "operand", id(tracer), traces)


def cast_dtypes(grads: Any) -> frozenset[str]:
    """Names of the dtypes in which `cast_fn` computed cotangents, from the gradients back to the loss.

    What a backward pass reads of the forward pass is not followed: data that another model made, teachers, and steps
    before this one lie behind that.
    """
    pending, seen, found = [(jit_tracer(leaf), False) for leaf in jax.tree.leaves(grads)], set(), frozenset()
    memo: dict[Hashable, frozenset[str]] = {}
    while pending:
        tracer, inside = pending.pop()
        made_by = None if id(tracer) in seen else producer(tracer)
        seen.add(id(tracer))
        if made_by is None:
            continue
        here = _backward_dtypes(made_by, made_by.scope, made_by.outputs, memo)
        if here or not inside:
            found |= here
            pending += [(operand, inside or bool(here)) for operand in made_by.operands]
    return found - {_ANY}


_ANY = "any"  # Of a backward pass, whatever computes it.


def _backward_dtypes(
    eqn: Producer | Eqn, scope: str, outputs: Sequence[Any], memo: dict[Hashable, frozenset[str]]
) -> frozenset[str]:
    """The dtypes in which an equation computes cotangents in a `cast_fn`, and `_ANY` if it computes any at all."""
    found: frozenset[str] = frozenset()
    if _is_backward(scope):
        cast = {var.aval.dtype.name for var in outputs if TRACED_SCOPE in scope and hasattr(var.aval, "dtype")}
        found = frozenset({_ANY, *cast})
    for jaxpr in inner_jaxprs(eqn):
        key = (id(jaxpr), _is_backward(scope), TRACED_SCOPE in scope)
        if key not in memo:
            memo[key] = frozenset()
            memo[key] = frozenset().union(
                *(_backward_dtypes(e, f"{scope}/{scope_path(e)}", e.outvars, memo) for e in open_jaxpr(jaxpr).eqns)
            )
        found |= memo[key]
    return found


def _is_backward(scope: str) -> bool:
    """Whether a scope belongs to a backward pass, and not to what a checkpoint computes in it again."""
    _, backward, after = scope.rpartition("transpose(")
    return bool(backward) and "rematted_computation" not in after
