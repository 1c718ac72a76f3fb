"""Which regime an equation runs under: the policy's level, unless a scope, a called function or a rule says else."""

from __future__ import annotations

import enum
import fnmatch
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from jamp._compat import Eqn, called_name, code_locations, function_names, scope_path, shown_params
from jamp._policy.rule import line_parts
from jamp._primitives import Rule as Primitive
from jamp._primitives import Trait, has, rule_of
from jamp.policy import Policy, Rule
from jamp.transforms._labels import FULL_SCOPE, HALF_SCOPE, TRACED_SCOPE


class Products(enum.Enum):
    """What products run in."""

    HALF = enum.auto()
    HALF_ONLY = enum.auto()  # And their results go straight back to float32.
    TRACED = enum.auto()


class Functions(enum.Enum):
    """What the functions and sums of the full list run in."""

    FULL = enum.auto()
    HALF = enum.auto()  # Sums in float32, rounded after.
    TRACED = enum.auto()


class Elementwise(enum.Enum):
    """How an operation chooses one dtype for all of its operands."""

    BY_FLOW = enum.auto()  # Half data meets half data in half, and statistics in float32.
    WIDEST = enum.auto()
    HALF = enum.auto()
    FULL = enum.auto()


class Float8(enum.Enum):
    """Which products run in 8 bits, of those that do not run in float32."""

    NONE = enum.auto()
    CHOSEN = enum.auto()  # Those that it suits and that it pays for.
    ALL = enum.auto()  # All that a device can.


class Regime(NamedTuple):
    """How a level moves precision. A level is one of these.

    Attributes:
        label: Its name in reports.
        products: What products run in.
        functions: What the full list runs in.
        elementwise: How the operations between them choose.
        islands: Whether float32 data is rounded to half when it leaves the scope that it was computed in.
        demand: Whether elementwise operations that are read in float32 alone are computed in float32.
        delicate: Whether phases, products that are sums, and what decides when a loop ends are float32.
        recurrences: Whether what adds up over the steps of a loop written out, or of an associative scan, is float32.
        untouched: Whether all runs as it was traced, because an inner `cast_fn` has been there.
        float8: Which products run in 8 bits.
        highest: Whether products of float32 ask for `precision=HIGHEST`.
    """

    label: str
    products: Products = Products.HALF
    functions: Functions = Functions.FULL
    elementwise: Elementwise = Elementwise.BY_FLOW
    islands: bool = False
    demand: bool = False
    delicate: bool = True
    recurrences: bool = False
    untouched: bool = False
    float8: Float8 = Float8.NONE
    highest: bool = False

    @property
    def all_full(self) -> bool:
        """Whether everything in it is float32."""
        return self.untouched or (self.products is Products.TRACED and self.elementwise is Elementwise.FULL)

    @property
    def all_half(self) -> bool:
        """Whether everything in it is half, but what has no half kernel."""
        return self.elementwise is Elementwise.HALF


_WIDEST = Regime("O1", elementwise=Elementwise.WIDEST)
REGIMES = {
    "OD": _WIDEST._replace(label="OD", products=Products.HALF_ONLY, functions=Functions.TRACED),
    "O1": _WIDEST._replace(demand=True, recurrences=True),
    "O2": Regime("O2", islands=True, demand=True, recurrences=True),
    "O3": Regime("O3", functions=Functions.HALF, elementwise=Elementwise.HALF, delicate=False),
    "full": Regime("full", products=Products.TRACED, elementwise=Elementwise.FULL),
    "promote": _WIDEST._replace(label="promote"),
    "traced": Regime("traced", products=Products.TRACED, elementwise=Elementwise.FULL, untouched=True),
}
FULL, HALF, PROMOTE, TRACED = (REGIMES[name] for name in ("full", "O3", "promote", "traced"))
# What decides when a loop ends, computed as it was traced.
CONVERGES = FULL._replace(label="decides when a loop ends")

_MARKS = {FULL_SCOPE: FULL, HALF_SCOPE: HALF}
_REGION = {"full": FULL, "half": HALF, "promote": PROMOTE, "highest": FULL._replace(label="highest", highest=True)}
_TRANSFORMS = re.compile(r"[\w.]+\(|\)")


def plain_scope(path: str) -> str:
    """A scope path without the transformations in it: `transpose(jvp(Model))/Dense_0` is `Model/Dense_0`."""
    return _TRANSFORMS.sub("", path).strip("/") if "(" in path else path


class Ruled(NamedTuple):
    """The regime of an equation, where it stands, and who chose it.

    Attributes:
        regime: The regime.
        scope: Path of its named scopes, without transformations.
        promotes: Whether a rule puts the equation among those whose operands come to one dtype.
    """

    regime: Regime
    scope: str
    promotes: bool = False


class Regimes:
    """Finds the regime of an equation."""

    def __init__(self, policy: Policy, base: Regime | None = None) -> None:
        level = REGIMES[policy.level or "O2"] if base is None else base
        self.base = level if policy.matmul in (None, "half") else level._replace(float8=Float8.CHOSEN)
        self._rules = policy.rules
        self.in_eight_bits = self.base.float8 is not Float8.NONE or any(r.precision == "float8" for r in self._rules)
        self._functions = any(rule.kind == "function" for rule in self._rules)
        self._lines = any(rule.kind == "line" for rule in self._rules)
        self.stacks_matter = self._functions or self._lines
        self.scope_matters = any(rule.kind != "primitive" for rule in self._rules)

    def enter(self, eqn: Eqn, regime: Regime, scope: str) -> Ruled:
        """The regime of `eqn`.

        Args:
            eqn: The equation.
            regime: Regime of the jaxpr that it is in.
            scope: Scope path of that jaxpr; the paths of its equations are relative to it.
        """
        path = scope_path(eqn)
        if regime.untouched or TRACED_SCOPE in path:
            return Ruled(TRACED, path)
        found = self._by_rule(eqn, path, scope) if self._rules else None
        if "jamp_" in path:
            marks = [_MARKS[part] for part in plain_scope(path).split("/") if part in _MARKS]
            found = marks[-1] if marks else found
        chosen = regime if found is None else found
        # The derivative of a block is part of it: what the block computed in float32 has not left it there.
        return Ruled(chosen, plain_scope(path), chosen is PROMOTE and _can_promote(eqn))

    def _by_rule(self, eqn: Eqn, path: str, scope: str) -> Regime | None:
        path, around = (plain_scope(p).strip("/") for p in (f"{scope}/{path}", scope))
        called = [called_name(eqn), *function_names(eqn)] if self._functions else []
        lines = _source_lines(eqn) if self._lines else []
        for rule in self._rules:
            if rule.kind == "primitive":
                if rule.pattern == eqn.primitive.name and _params_match(rule, eqn):
                    return self._region(rule)
            elif rule.kind == "function":
                if rule.pattern in called:
                    return self._region(rule)
            elif rule.kind == "line":
                if lines_match(rule.pattern, lines, eqn.primitive.name):
                    return self._region(rule)
            elif scope_matches(rule.pattern, path):
                # What holds around the jaxpr was decided there, where a line or a mark may have had the last word.
                return None if around and scope_matches(rule.pattern, around) else self._region(rule)
        return None

    def _region(self, rule: Rule) -> Regime:
        return self.base._replace(float8=Float8.ALL) if rule.precision == "float8" else _REGION[rule.precision]


def _source_lines(eqn: Eqn) -> list[str]:
    """`/path/to/file.py:line` of the user's code, and of its callers."""
    return [f"{os.path.abspath(path)}:{line}".replace("\\", "/") for path, line, _ in code_locations(eqn)]


def lines_match(pattern: str, lines: Sequence[str], primitive: str) -> bool:
    """Whether a pattern names the first line, or any end of it, and lines that call it, in their order.

    Args:
        pattern: The pattern. If it starts with a primitive (`"add at model.py:41"`), it is for that alone.
        lines: Source lines of an operation, innermost first.
        primitive: Name of its primitive.
    """
    name, (first, *callers) = line_parts(pattern)
    around = iter(lines[1:])
    return (
        name in ("", primitive)
        and any(_ends(line, first) for line in lines[:1])
        and all(any(_ends(line, caller) for line in around) for caller in callers)
    )


def _ends(line: str, end: str) -> bool:
    return f"/{line}".endswith(f"/{end}")


def _can_promote(eqn: Eqn) -> bool:
    """What may run in any dtype; sums and the like carry a float32 computation with them, whatever a rule says."""
    rule = rule_of(eqn)
    return rule in (Primitive.HALF, Primitive.PROMOTE) or (rule is Primitive.FULL and not has(eqn, Trait.REDUCES))


def _params_match(rule: Rule, eqn: Eqn) -> bool:
    params = shown_params(eqn) if rule.params else {}
    return all(name in params and value in (params[name], str(params[name])) for name, value in rule.params)


def scope_matches(pattern: str, path: str) -> bool:
    """Whether a glob matches a scope path or any scope that encloses it; `block/*` is also what stands in `block`."""
    parts = path.split("/")
    enclosing = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(scope, pattern) for scope in [*enclosing, f"{path}/"])
