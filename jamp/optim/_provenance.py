"""How gradients came to be, read from the trace of the step that they are in.

While a step is traced, JAX keeps for every value the equation that made it. So an optimizer can ask whether its
gradients were differentiated here, and whether the loss was multiplied by the scale that it is about to divide by. The
answer is found once for each trace, and puts nothing into the program. Of gradients that have values already, and of
those that come into the trace from outside, nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jamp._compat import Producer, inner_jaxprs, is_captured, is_in_loop, jit_tracer, open_jaxpr, producer, scope_path
from jamp.scalers._base import SCALED_SCOPE, UNSCALED_SCOPE
from jamp.transforms._labels import TRACED_SCOPE

_COLLECTIVES = ("psum", "pmean", "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "ppermute", "pmin", "pmax")


class Provenance(NamedTuple):
    """What is known of gradients.

    Attributes:
        differentiated: Whether this trace holds the backward pass that made them.
        scaled: Whether a loss scale went into them: the one asked for, or any by the methods of a scaler.
        scaled_before: Whether that one is of the time before the loop whose body this is.
        unscaled: Whether a scaler has divided all of them by its scale already.
        averaged: Whether devices exchanged anything on the way to them.
        cast_dtypes: Names of the floating dtypes that `cast_fn` computed with on the way.
    """

    differentiated: bool
    scaled: bool
    scaled_before: bool
    unscaled: bool
    averaged: bool
    cast_dtypes: frozenset[str]


def provenance(grads: Any, params: Any, scale: Any) -> Provenance:
    """Looks at how gradients came to be.

    Args:
        grads: Tree of gradients.
        params: The parameters, behind which lies what is past: the steps before this one. May be None.
        scale: The loss scale that the gradients are to be divided by.
    """
    leaves = _tracers(grads)
    scale_id = id(jit_tracer(scale))
    facts: set[str] = set()
    memo: dict[int, frozenset[str]] = {}
    for tracer, made_by in _ancestry(leaves, stop={id(p) for p in _tracers(params)}):
        if id(tracer) == scale_id:
            facts |= {"scaled", "scaled now"}
        if made_by is not None:
            facts |= _facts_of(made_by, memo)
            if SCALED_SCOPE in made_by.scope and any(map(is_captured, made_by.operands)):
                facts.add("scaled before")
    return Provenance(
        differentiated="backward" in facts,
        scaled="scaled" in facts,
        scaled_before="scaled before" in facts and "scaled now" not in facts and is_in_loop(jit_tracer(scale)),
        unscaled=_is_unscaled(leaves, memo),
        averaged="collective" in facts,
        cast_dtypes=frozenset(fact.removeprefix("cast ") for fact in facts if fact.startswith("cast ")),
    )


def _is_unscaled(leaves: list[Any], memo: dict[int, frozenset[str]]) -> bool:
    """Whether every way from the gradients back to the backward pass leads through an unscaling."""
    unscaled = False
    pending, seen = list(leaves), set()
    while pending:
        tracer = pending.pop()
        made_by = None if id(tracer) in seen else producer(tracer)
        seen.add(id(tracer))
        if made_by is None:
            continue
        facts = _facts_of(made_by, memo)
        if "unscaling" in facts:
            unscaled = True
        elif "backward" in facts or "scaling" in facts:
            return False
        else:
            pending += made_by.operands
    return unscaled


def _ancestry(leaves: list[Any], stop: set[int]) -> Iterator[tuple[Any, Producer | None]]:
    """Traced values and all that they were made from, with the equations that made them."""
    pending, seen = list(leaves), set(stop)
    while pending:
        tracer = pending.pop()
        if id(tracer) in seen:
            continue
        seen.add(id(tracer))
        made_by = producer(tracer)
        yield tracer, made_by
        if made_by is not None:
            pending += made_by.operands


def _facts_of(eqn: Producer, memo: dict[int, frozenset[str]]) -> set[str]:
    facts = _facts(eqn.primitive, eqn.scope, eqn.outputs)
    return facts.union(*(_facts_inside(inner, memo) for inner in inner_jaxprs(eqn)))


def _facts_inside(jaxpr: Any, memo: dict[int, frozenset[str]]) -> frozenset[str]:
    """The facts of all equations of a jaxpr, which several calls may share."""
    if id(jaxpr) not in memo:
        facts: set[str] = set()
        for eqn in open_jaxpr(jaxpr).eqns:
            facts |= _facts(eqn.primitive.name, scope_path(eqn), eqn.outvars)
            facts = facts.union(*(_facts_inside(inner, memo) for inner in inner_jaxprs(eqn)))
        memo[id(jaxpr)] = frozenset(facts)
    return memo[id(jaxpr)]


def _facts(primitive: str, scope: str, outputs: Sequence[Any]) -> set[str]:
    facts = set()
    if "transpose(" in scope:
        facts.add("backward")
    applied = "jvp(" not in scope  # To gradients, and not to something that is differentiated.
    if SCALED_SCOPE in scope:
        facts |= {"scaled", "scaling"} if applied else {"scaled"}
    if UNSCALED_SCOPE in scope and applied:
        facts.add("unscaling")
    if primitive.startswith(_COLLECTIVES):
        facts.add("collective")
    if TRACED_SCOPE in scope:
        facts |= {f"cast {var.aval.dtype}" for var in outputs if hasattr(var.aval, "dtype")}
    return facts


def _tracers(tree: Any) -> list[Any]:
    return [jit_tracer(leaf) for leaf in jax.tree.leaves(tree)]
