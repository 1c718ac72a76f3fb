"""Rules of a policy that change nothing in a function: most likely a mistake, and told when it is called."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jamp._compat import (
    ClosedJaxpr,
    Eqn,
    Jaxpr,
    inner_jaxprs,
    open_jaxpr,
    rule_functions,
    scope_path,
    shown_params,
)  # fmt: skip
from jamp._policy.known_names import INLINED
from jamp._policy.presets import PRESETS
from jamp._policy.rule import line_parts
from jamp._policy.spec import RULE_LISTS, SETTINGS
from jamp._primitives import PRODUCTS, TABLE, has, rule_of
from jamp._primitives import Rule as Primitive
from jamp._warnings import warn_user
from jamp.policy import Policy, Rule
from jamp.transforms.analysis.regimes import REGIMES, Regime, Regimes, lines_match, plain_scope
from jamp.transforms.planning.float8 import why_never_in_8_bits
from jamp.transforms.planning.planner import eight_bits
from jamp.transforms.program.closures import HAS_RULES
from jamp.transforms.program.heuristics import DEFAULT

_AS_TRACED = (Primitive.OPAQUE, Primitive.NO_HALF)  # What no rule puts in half.
_NONE = REGIMES["O2"]._replace(label="none")


def warn_of_unmatched(policy: Policy, jaxpr: Jaxpr | ClosedJaxpr) -> None:
    """Warns of the rules of a policy that say nothing about a function."""
    if unmatched := _unmatched(policy, jaxpr):
        named = _scopes_in(jaxpr) if any(rule.kind == "scope" for rule in unmatched.values()) else ""
        hints = "".join(dict.fromkeys(_hint(rule, jaxpr) for rule in unmatched.values()))
        warn_user(
            f"Rules of the policy match nothing in this function: {', '.join(map(repr, unmatched))}.{named}{hints} See "
            "all of them with print(jamp.report(fn, *args)). A policy for several functions has the rules that suit "
            "all; add those of one with `policy.with_rules(…)` where it is cast."
        )
    if refused := _refused_rules(policy, jaxpr):
        reasons = ", ".join(f"{entry!r} ({reason})" for entry, reason in refused.items())
        warn_user(
            f"Float8 rules of the policy name only products that cannot run in 8 bits: {reasons}. They stay half. "
            "Change that, or leave the rule out."
        )


def _scopes_in(jaxpr: Jaxpr | ClosedJaxpr) -> str:
    scopes = sorted({part for eqn in _equations(jaxpr) for part in plain_scope(scope_path(eqn)).split("/") if part})
    if scopes:
        return f" The scopes in it are {', '.join(scopes[:10])}{', …' if len(scopes) > 10 else ''}."
    return " It names no scopes (Flax NNX and plain JAX do not; `jax.named_scope` does)."


def _hint(rule: Rule, jaxpr: Jaxpr | ClosedJaxpr) -> str:
    """What to write instead of a rule that matches nothing, where its kind tells."""
    if rule.precision == "float8":
        return " A float8 rule has to name products."
    if rule.kind == "function" and rule.pattern in INLINED:
        return (
            f" JAX inlines {rule.pattern!r}, which leaves no name: write its primitives, as jax.make_jaxpr prints them "
            "('dot_general' for products)."
        )
    known = _parameters(rule, jaxpr) if rule.kind == "primitive" else []
    if known and rule.params:
        return f" Parameters of {rule.pattern!r} are {', '.join(sorted(set().union(*known)))}."
    if known and rule.pattern in TABLE:
        return f" {rule.pattern!r} runs as it was traced."
    if known:
        register = f"jamp.register_primitive({rule.pattern!r}, {rule.precision!r})"
        return f" It runs as it was traced, unless what dtypes it takes is known: {register}."
    return ""


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
    """Entries of a policy's rules that change nothing, whatever function they are for.

    Such are scopes, functions and primitives of one's own, and lines, that do not occur; names that no jaxpr has;
    conditions on parameters that a primitive has not; and primitives that run as they are traced. Other names of jax
    and optax are checked where the policy is made, and not all of them need occur in every model.

    Args:
        policy: The policy.
        jaxpr: The function that it is applied to, as it was traced.
    """
    return tuple(_unmatched(policy, jaxpr))


def _unmatched(policy: Policy, jaxpr: Jaxpr | ClosedJaxpr) -> dict[str, Rule]:
    """The same entries, as they were written, and parsed. At O0 nobody decides, and nothing is missed."""
    lists = () if policy.level == "O0" else RULE_LISTS
    entries = [(name, entry) for name in lists for entry in getattr(policy, name)]
    found = ((entry, _saying_nothing(policy, name, entry, jaxpr)) for name, entry in entries)
    return {entry: rule for entry, rule in found if rule is not None}


def _saying_nothing(policy: Policy, name: str, entry: str, jaxpr: Jaxpr | ClosedJaxpr) -> Rule | None:
    """The rule of an entry, if it changes nothing."""
    is_float8 = name == "float8"
    has_to_occur = any(sign in entry for sign in "*/:") or entry in INLINED
    # Before the function is walked, since presets have many entries.
    if not (is_float8 or has_to_occur or "[" in entry or _is_as_traced(entry)) or _is_of_preset(policy, name, entry):
        return None
    ruling = _ruling(policy, name, entry)
    (rule,) = ruling.rules
    if rule.params and (known := _parameters(rule, jaxpr)):
        return None if any(names.issuperset(dict(rule.params)) for names in known) else rule
    named = [*_named_by(ruling, _ruling(policy), jaxpr)]
    # Of products alone, because all else in the scope of a float8 rule stays as it is.
    ruled = [eqn for eqn in named if has(eqn, PRODUCTS)] if is_float8 else named
    if name in ("half", "promote"):
        ruled = [eqn for eqn in named if rule_of(eqn) not in _AS_TRACED]
    occurs = ruled or not (has_to_occur or named) or _may_be_in_a_rule(rule, jaxpr)
    return None if occurs else rule


def _is_as_traced(entry: str) -> bool:
    return entry in TABLE and TABLE[entry].rule in _AS_TRACED


def _is_of_preset(policy: Policy, name: str, entry: str) -> bool:
    """Whether an entry comes from the op lists of a framework, which name what jax inlines too."""
    return any(
        entry in lists.get(name, ()) and {*lists[name]} <= {*getattr(policy, name)} for lists in PRESETS.values()
    )


def _parameters(rule: Rule, jaxpr: Jaxpr | ClosedJaxpr) -> list[set[str]]:
    """The names of the parameters of all equations of the primitive that a rule is for."""
    return [{*shown_params(eqn)} for eqn in _equations(jaxpr) if eqn.primitive.name == rule.pattern]


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
    ends = line_parts(rule.pattern)[1]
    written = [f"{fn.__code__.co_filename}:{line}" for fn in functions for *_, line in fn.__code__.co_lines() if line]
    return any(lines_match(end, [line], "") for end in ends for line in written)


def _ruling(policy: Policy, name: str = "", entry: str = "") -> Policy:
    """A policy with one of its rules, or none, and without settings, of which some need rules."""
    plain = dict.fromkeys(SETTINGS, None)
    return dataclasses.replace(policy, **(dict.fromkeys(RULE_LISTS, ()) | plain | ({name: (entry,)} if name else {})))


def _equations(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Eqn]:
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from _equations(inner)


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
