"""Rules of a policy that change nothing in a function: most likely a mistake, and told when it is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jamp._compat import ClosedJaxpr, Eqn, Jaxpr, inner_jaxprs, open_jaxpr, rule_functions, scope_path
from jamp._policy.spec import RULE_LISTS, SETTINGS
from jamp._primitives import PRODUCTS, has
from jamp._warnings import warn_user
from jamp.policy import Policy, Rule
from jamp.transforms.analysis.regimes import REGIMES, Regime, Regimes, lines_match, plain_scope
from jamp.transforms.planning.float8 import why_never_in_8_bits
from jamp.transforms.planning.planner import eight_bits
from jamp.transforms.program.closures import HAS_RULES
from jamp.transforms.program.heuristics import DEFAULT

_NONE = REGIMES["O2"]._replace(label="none")


def warn_of_unmatched(policy: Policy, jaxpr: Jaxpr | ClosedJaxpr) -> None:
    """Warns of the rules of a policy that say nothing about a function."""
    if unmatched := unmatched_rules(policy, jaxpr):
        scopes = sorted({part for eqn in _equations(jaxpr) for part in plain_scope(scope_path(eqn)).split("/") if part})
        named = f" The scopes in it are {', '.join(scopes[:10])}{', …' if len(scopes) > 10 else ''}." if scopes else (
            " It names no scopes (Flax NNX and plain JAX do not; `jax.named_scope` does)."
        )  # fmt: skip
        named += " A float8 rule has to name products." if set(unmatched) & set(policy.float8) else ""
        warn_user(
            f"Rules of the policy match nothing in this function: {', '.join(map(repr, unmatched))}.{named} See all of "
            "them with print(jamp.report(fn, *args)). A policy for several functions has the rules that suit all; add "
            "those of one with `policy.with_rules(…)` where it is cast."
        )
    if refused := _refused_rules(policy, jaxpr):
        reasons = ", ".join(f"{entry!r} ({reason})" for entry, reason in refused.items())
        warn_user(
            f"Float8 rules of the policy name only products that cannot run in 8 bits: {reasons}. They stay half. "
            "Change their sizes, or leave the rule out."
        )


def _refused_rules(policy: Policy, jaxpr: Jaxpr | ClosedJaxpr) -> dict[str, str]:
    """The `float8` rules that name products, but none that can run in 8 bits, and why the first of them cannot."""
    refused: dict[str, str] = {}
    for entry in policy.float8:
        named = _named_by(_ruling(policy, "float8", entry), _ruling(policy), jaxpr)
        reasons = [why_never_in_8_bits(eqn, eight_bits(policy), DEFAULT) for eqn in named if has(eqn, PRODUCTS)]
        if reasons and all(reasons):
            refused[entry] = reasons[0]
    return refused


def unmatched_rules(policy: Policy, jaxpr: Jaxpr | ClosedJaxpr) -> tuple[str, ...]:
    """Entries of a policy's rules for scopes, and for functions and primitives of one's own, that change nothing.

    The names of jax and optax are checked where the policy is made, and not all of a preset's occur in every model.

    Args:
        policy: The policy.
        jaxpr: The function that it is applied to, as it was traced.
    """
    return tuple(
        entry for name in RULE_LISTS for entry in getattr(policy, name) if _says_nothing(policy, name, entry, jaxpr)
    )


def _says_nothing(policy: Policy, name: str, entry: str, jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    is_float8, own = name == "float8", _names_your_own(entry)
    if not (is_float8 or own):
        return False  # Before the function is walked, since presets have many such entries.
    ruling = _ruling(policy, name, entry)
    named = [*_named_by(ruling, _ruling(policy), jaxpr)]
    # Of products alone, because all else in the scope of a float8 rule stays as it is.
    ruled = [eqn for eqn in named if has(eqn, PRODUCTS)] if is_float8 else named
    return not ruled and (own or bool(named)) and not _may_be_in_a_rule(ruling.rules[0], jaxpr)


def _may_be_in_a_rule(rule: Rule, jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    """Whether the rule of a `custom_jvp` or `custom_vjp`, which is traced when it is differentiated, is or calls that.

    What functions call in turn is not known before, so that a rule of the policy for one of these is said to match
    nothing where nothing else calls it.
    """
    if rule.kind not in ("function", "line"):
        return False
    functions = [fn for eqn in _equations(jaxpr) if has(eqn, HAS_RULES) for fn in rule_functions(eqn)]
    if rule.kind == "function":
        return any(rule.pattern in (fn.__name__, *fn.__code__.co_names) for fn in functions)
    first, *callers = rule.pattern.rpartition(" at ")[2].split(" from ")
    written = [f"{fn.__code__.co_filename}:{line}" for fn in functions for *_, line in fn.__code__.co_lines() if line]
    return any(lines_match(end, [line], "") for end in (first, *callers) for line in written)


def _ruling(policy: Policy, name: str = "", entry: str = "") -> Policy:
    """A policy with one of its rules, or none, and without settings, of which some need rules."""
    plain = dict.fromkeys(SETTINGS, None)
    return dataclasses.replace(policy, **(dict.fromkeys(RULE_LISTS, ()) | plain | ({name: (entry,)} if name else {})))


def _equations(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Eqn]:
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from _equations(inner)


def _names_your_own(entry: str) -> bool:
    return any(sign in entry for sign in "*/:")


def _named_by(policy: Policy, bare: Policy, jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Eqn]:
    """The equations in which the one rule of `policy` has a say."""
    ruled, unruled = Regimes(policy), Regimes(bare)

    def walk(jaxpr: Jaxpr | ClosedJaxpr, scope: str, around: Regime) -> Iterator[Eqn]:
        for eqn in open_jaxpr(jaxpr).eqns:
            here = ruled.enter(eqn, around, scope)
            if here != unruled.enter(eqn, _NONE, scope):
                yield eqn
            for inner in inner_jaxprs(eqn):
                yield from walk(inner, f"{scope}/{scope_path(eqn)}".strip("/"), here.regime)

    # A regime of its own, so that whatever a rule says is a change.
    return walk(jaxpr, "", _NONE)
