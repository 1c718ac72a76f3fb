"""Which regime an equation runs under: the policy's level, unless a scope, a called function or a rule says else."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

from jamp._compat import function_names, scope_path
from jamp.policy import Policy, Rule
from jamp.transforms._rules import FULL_ELEMENTWISE, HALF, PROMOTE

# Named scopes that mark regions in a traced function. They survive jit, grad, vmap and scan, and do nothing elsewhere.
FULL_SCOPE = "jamp_full_precision"
HALF_SCOPE = "jamp_half_precision"
TRACED_SCOPE = "jamp_cast_fn"

_MARKS = {FULL_SCOPE: "full", HALF_SCOPE: "O3"}
_REGION = {"full": "full", "half": "O3", "promote": "promote"}
# What may run in any dtype; sums and the like carry a float32 computation with them, whatever a rule says.
_CAN_PROMOTE = HALF | FULL_ELEMENTWISE | PROMOTE
_TRANSFORMS = re.compile(r"[\w.]+\(|\)")


def plain_scope(path: str) -> str:
    """A scope path without the transformations in it: `transpose(jvp(Model))/Dense_0` is `Model/Dense_0`."""
    return _TRANSFORMS.sub("", path).strip("/") if "(" in path else path


class Modes:
    """Finds the regime of an equation.

    A mode is a level (`"OD" "O1" "O2" "O3"`), `"full"` (everything in float32), `"promote"` (everything, products
    too, in the widest dtype of its operands) or `"traced"` (everything as the user
    wrote it, such as inside a nested `cast_fn`, whose own policy has already been applied).
    """

    def __init__(self, policy: Policy) -> None:
        self.base = policy.level or "O2"
        self._rules = policy.rules
        self._functions = any(rule.kind == "function" for rule in self._rules)
        self.scope_matters = any(rule.kind != "primitive" for rule in self._rules)

    def enter(self, eqn: Any, mode: str, scope: str) -> tuple[str, str | None]:
        """The mode of `eqn`, and the class that a rule puts it in instead of its own.

        Args:
            eqn: The equation.
            mode: Mode of the jaxpr that it is in.
            scope: Scope path of that jaxpr; the paths of its equations are relative to it.
        """
        path = scope_path(eqn)
        if mode == "traced" or TRACED_SCOPE in path:
            return "traced", None
        if self._rules:
            mode = self._by_rule(eqn, mode, f"{scope}/{path}")
        if "jamp_" in path:
            marks = [_MARKS[part] for part in plain_scope(path).split("/") if part in _MARKS]
            mode = marks[-1] if marks else mode
        return mode, "promote" if mode == "promote" and eqn.primitive.name in _CAN_PROMOTE else None

    def _by_rule(self, eqn: Any, mode: str, path: str) -> str:
        path = plain_scope(path).strip("/")
        called = function_names(eqn) if self._functions else []
        for rule in self._rules:
            if rule.kind == "primitive":
                if rule.pattern == eqn.primitive.name and _params_match(rule, eqn):
                    return _REGION[rule.precision]
            elif rule.kind == "function":
                if rule.pattern in called or rule.pattern == eqn.params.get("name"):
                    return _REGION[rule.precision]
            elif _scope_matches(rule.pattern, path):
                return _REGION[rule.precision]
        return mode


def _params_match(rule: Rule, eqn: Any) -> bool:
    return all(name in eqn.params and value in (eqn.params[name], str(eqn.params[name])) for name, value in rule.params)


def _scope_matches(pattern: str, path: str) -> bool:
    """Whether a glob matches a scope path or any scope that encloses it; `block/*` is also what stands in `block`."""
    parts = path.split("/")
    enclosing = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(scope, pattern) for scope in [*enclosing, f"{path}/"])
