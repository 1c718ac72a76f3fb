"""Rules of a policy that match nothing, because of a misspelt scope or name that no check of the policy can know."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from jamp._compat import inner_jaxprs, open_jaxpr, scope_path
from jamp.policy import Policy
from jamp.transforms.analysis.regimes import REGIMES, Regimes

_NONE = REGIMES["O2"]._replace(label="none")


def unmatched_rules(policy: Policy, jaxpr: Any) -> tuple[str, ...]:
    """Entries of a policy's rules for scopes, and for functions and primitives of one's own, that change nothing.

    The names of jax and optax are checked where the policy is made, and not all of a preset's occur in every model.

    Args:
        policy: The policy.
        jaxpr: The function that it is applied to, as it was traced.
    """
    bare = dataclasses.replace(policy, half=(), full=(), promote=())
    rules = [(name, entry) for name in ("half", "full", "promote") for entry in getattr(policy, name)]
    return tuple(
        entry
        for name, entry in rules
        if _names_your_own(entry) and not any(_changes(dataclasses.replace(bare, **{name: entry}), bare, jaxpr))
    )


def _names_your_own(entry: str) -> bool:
    return "*" in entry or "/" in entry or entry.startswith(("fn:", "prim:"))


def _changes(policy: Policy, bare: Policy, jaxpr: Any) -> Iterator[bool]:
    """For every equation, whether the one rule of `policy` has a say in it."""
    ruled, unruled = Regimes(policy), Regimes(bare)

    def walk(jaxpr: Any, scope: str) -> Iterator[bool]:
        for eqn in open_jaxpr(jaxpr).eqns:
            # Of a regime of its own, so that whatever a rule says is a change.
            yield ruled.enter(eqn, _NONE, scope) != unruled.enter(eqn, _NONE, scope)
            for inner in inner_jaxprs(eqn):
                yield from walk(inner, f"{scope}/{scope_path(eqn)}".strip("/"))

    return walk(jaxpr, "")
