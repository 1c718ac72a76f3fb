"""Rules of a policy that match nothing, because of a misspelt scope or name that no check of the policy can know."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jamp._compat import ClosedJaxpr, Eqn, Jaxpr, inner_jaxprs, open_jaxpr, scope_path
from jamp._policy.spec import RULE_LISTS
from jamp._primitives import Trait, has
from jamp._warnings import warn_user
from jamp.policy import Policy
from jamp.transforms.analysis.regimes import REGIMES, Regimes, plain_scope

_NONE = REGIMES["O2"]._replace(label="none")


def warn_of_unmatched(policy: Policy, jaxpr: Jaxpr | ClosedJaxpr) -> None:
    """Warns of the rules of a policy that say nothing about a function."""
    if unmatched := unmatched_rules(policy, jaxpr):
        scopes = sorted({part for eqn in _equations(jaxpr) for part in plain_scope(scope_path(eqn)).split("/") if part})
        named = f" The scopes in it are {', '.join(scopes[:10])}{', …' if len(scopes) > 10 else ''}." if scopes else (
            " It names no scopes (Flax NNX and plain JAX do not; `jax.named_scope` does)."
        )  # fmt: skip
        warn_user(
            f"Rules of the policy match nothing in this function: {', '.join(map(repr, unmatched))}.{named} See all of "
            "them with print(jamp.report(fn, *args)). A policy for several functions has the rules that suit all; add "
            "those of one with `policy.with_rules(…)` where it is cast."
        )


def unmatched_rules(policy: Policy, jaxpr: Jaxpr | ClosedJaxpr) -> tuple[str, ...]:
    """Entries of a policy's rules for scopes, and for functions and primitives of one's own, that change nothing.

    The names of jax and optax are checked where the policy is made, and not all of a preset's occur in every model.

    Args:
        policy: The policy.
        jaxpr: The function that it is applied to, as it was traced.
    """
    bare = dataclasses.replace(policy, **dict.fromkeys(RULE_LISTS, ()))
    rules = [(name, entry) for name in RULE_LISTS for entry in getattr(policy, name)]
    return tuple(
        entry
        for name, entry in rules
        if _names_your_own(entry) and not any(_changes(dataclasses.replace(bare, **{name: entry}), bare, jaxpr))
    )


def _equations(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Eqn]:
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from _equations(inner)


def _names_your_own(entry: str) -> bool:
    return any(sign in entry for sign in "*/:")


def _changes(policy: Policy, bare: Policy, jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[bool]:
    """For every equation, whether the one rule of `policy` has a say in it."""
    ruled, unruled = Regimes(policy), Regimes(bare)
    of_products = bool(policy.float8)  # All else in the scope stays as it is.

    def walk(jaxpr: Jaxpr | ClosedJaxpr, scope: str) -> Iterator[bool]:
        for eqn in open_jaxpr(jaxpr).eqns:
            # Of a regime of its own, so that whatever a rule says is a change.
            has_a_say = ruled.enter(eqn, _NONE, scope) != unruled.enter(eqn, _NONE, scope)
            yield has_a_say and (has(eqn, Trait.MATRIX) or not of_products)
            for inner in inner_jaxprs(eqn):
                yield from walk(inner, f"{scope}/{scope_path(eqn)}".strip("/"))

    return walk(jaxpr, "")
