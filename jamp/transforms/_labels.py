"""Named scopes that jamp writes: they mark regions in another precision, and label what a `cast_fn` emits.

Scopes survive whatever is done to a function before it is looked at: `jit` and its cache, `grad`, `vmap`, `scan`.
Outside of `cast_fn` they do nothing.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from urllib.parse import quote, unquote

import jax

from jamp.policy import Policy

FULL_SCOPE = "jamp_full_precision"
HALF_SCOPE = "jamp_half_precision"
TRACED_SCOPE = "jamp_cast_fn"

# Set while `jamp.inspect` traces: rules for float32 that the `cast_fn`s inside are to have besides, mostly none. In
# jit's key too, so that no label gets into what the user compiles.
_labelling: Any = jax.make_user_context(None)

_RULE = "jamp_rule"
_POLICY_LABEL, _RULE_LABEL = (re.compile(rf"{name}=([^/()]+)") for name in (TRACED_SCOPE, _RULE))


def labelling(full: tuple[str, ...] = ()) -> AbstractContextManager[None]:
    """A context in which `cast_fn` labels what it emits with its policy and rules.

    Args:
        full: Rules for float32 that every `cast_fn` of a level has there, besides its own.
    """
    return _labelling(full)


def is_labelling() -> bool:
    """Whether labels are wanted."""
    return _labelling.value is not None


def with_tried_rules(policy: Policy) -> Policy:
    """A policy with the rules that are tried out."""
    interpreted = _labelling.value and policy.level not in (None, "O0")
    return policy.with_rules(full=_labelling.value) if interpreted else policy


def cast_scope(policy: Policy) -> AbstractContextManager[object]:
    """The scope of all that a `cast_fn` emits, by which one around it knows that the precision is settled."""
    return jax.named_scope(_label(TRACED_SCOPE, str(policy)) if is_labelling() else TRACED_SCOPE)


def rule_scope(rule: str, not_float8: str = "") -> AbstractContextManager[object]:
    """The scope that labels operations with what was decided about them; none unless labels are wanted.

    Args:
        rule: The rule that decided.
        not_float8: Why a product does not run in 8 bits, if that is told.
    """
    if not is_labelling():
        return nullcontext()
    label = _label(_RULE, rule)
    return jax.named_scope(f"{label};{quote(not_float8, safe='')}" if not_float8 else label)


def _label(name: str, value: str) -> str:
    return f"{name}={quote(value, safe='')}"  # Slashes and brackets have a meaning in scope paths.


def policy_labels(path: str) -> list[str]:
    """Policies of the `cast_fn`s that a scope path is inside of, outermost first."""
    return [unquote(label) for label in _POLICY_LABEL.findall(path)]


def rule_label(path: str) -> str:
    """The rule that a scope path is labelled with; empty if it has none."""
    return _last_label(path)[0]


def not_float8_label(path: str) -> str:
    """Why a product does not run in 8 bits, as the label of its scope path tells beside the rule; empty if not told."""
    return _last_label(path)[1]


def _last_label(path: str) -> tuple[str, str]:
    rule, _, reason = ([""] + _RULE_LABEL.findall(path))[-1].partition(";")
    return unquote(rule), unquote(reason)


def without_labels(path: str) -> str:
    """A scope path without what `cast_fn` wrote into it."""
    return "/".join(part for part in path.split("/") if not part.startswith((TRACED_SCOPE, f"{_RULE}=")))
