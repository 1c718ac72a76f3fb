"""Rules: what a policy says about one operation, function or scope, and the strings that spell them."""

import ast
import re
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import Any, Literal

import jax

from jamp._dtypes import close_matches
from jamp._policy.known_names import function_names, in_jaxprs, primitives

Kind = Literal["line", "scope", "function", "primitive"]
Precision = Literal["half", "full", "promote", "float8", "highest"]

_CONDITIONAL = re.compile(r"(?P<name>[^\[\]*/]+)\[(?P<params>\w+=.*)\]")
# A path may have spaces and brackets in it, as "My Drive/net.py:5".
_LINE = re.compile(r"(?:(?P<primitive>[\w-]+) at )?(?P<lines>[^:*?]+:\d+( from [^:*?]+:\d+)*)")
_CALLED = re.compile(r"(.+?:\d+)(?: from |$)")
_PARAM = re.compile(r"(?:^|,)\s*(\w+)=")
_NEARLY_SURE = 0.7  # Names are many, and some are near to any word.


@dataclass(frozen=True)
class Rule:
    """One rule of a policy, parsed.

    Attributes:
        kind: What `pattern` names: a source line, the scopes that a glob matches, a called function, or a primitive.
        pattern: The `file.py:line`, with lines that call it, and a primitive in front if it is for that alone; the glob
            over scope paths; or the name.
        params: Pairs of a parameter's name and the value it must have for the rule to apply; mostly empty.
        precision: Where the operation runs: in half precision, in float32, in the widest dtype of its operands, in
            8 bits where it is a product, or in float32 with products of `precision=HIGHEST`.
    """

    kind: Kind
    pattern: str
    params: tuple[tuple[str, Any], ...]
    precision: Precision

    @property
    def specificity(self) -> tuple[int, int, str]:
        """Sort key that puts the most specific rule first.

        A line comes before everything (one with its callers before one without), then a scope (the longer its pattern,
        the earlier), then rules with a condition (the more conditions, the earlier), then function names, then
        primitive names.
        """
        if self.kind == "line":
            return (-1, -len(self.pattern), self.pattern)
        if self.kind == "scope":
            return (0, -len(self.pattern), self.pattern)
        if self.params:
            return (1, -len(self.params), self.pattern)
        return (2 if self.kind == "function" else 3, 0, self.pattern)


def entry_string(entry: str | Callable) -> str:
    """The string for one entry of a rule list: a string as it is, a callable as `"fn:<its name>"`.

    Raises:
        TypeError: If the entry is neither, or a callable without a name of its own.
    """
    if isinstance(entry, str):
        return entry
    name = getattr(entry, "__name__", None) if callable(entry) else None
    if name is None or name == "<lambda>":
        raise TypeError(
            f"A rule is a string such as 'softmax', 'dot_general' or '*lm_head*', or a named function; got {entry!r}."
        )
    # jax.lax functions bind their primitive without a call that a function rule could see; others are inlined.
    module = jax.lax if name in primitives() else jax.nn if hasattr(jax.nn, name) else jax.numpy
    is_primitive = in_jaxprs(name) in primitives() and getattr(module, name, None) is entry
    return name if is_primitive else f"fn:{name}"


def entry_strings(entries: str | Callable | Iterable[str | Callable]) -> tuple[str, ...]:
    """The strings for a rule list, each once; a lone entry counts as a list of one."""
    if isinstance(entries, str) or callable(entries):
        entries = (entries,)
    if not isinstance(entries, Iterable):
        raise TypeError(f"A list of rules is {entries!r}: expected names, functions or globs, such as ['softmax'].")
    found = dict.fromkeys(entry_string(e) for e in entries)
    return tuple(sorted(found) if isinstance(entries, Set) else found)  # In one order in every process.


def parse_rule(entry: str, precision: Precision) -> Rule:
    """Parses an entry of a rule list.

    Args:
        entry: `"dot_general"` (a primitive), `"softmax"` (a function of jax or a loss of optax), `"fn:my_loss"` (any
            function), `"prim:my_op"` (any primitive), `"integer_pow[y=2]"` (a condition on a parameter's value),
            `"model.py:41"` (a source line, with as many of the folders above it as tell it from others),
            `"model.py:41 from model.py:87"` (where the second line calls what the first one is in),
            `"add at model.py:41"` (that primitive there), or a glob over the scope path, told by a `*` or `/` in it
            (`"decoder/*/LayerNorm_*"`). A bare name that jax uses for both is the primitive.
        precision: The list that the entry stands in.

    Returns:
        The parsed rule.

    Raises:
        ValueError: If the name is unknown.
    """
    if line := _LINE.fullmatch(entry):
        if (at := line["primitive"]) and at not in primitives():
            hint = close_matches(at, primitives())
            raise ValueError(f"Unknown rule {entry!r} in {precision!r}: {at!r} is no primitive of jax.{hint}")
        return Rule("line", entry, (), precision)
    match = _CONDITIONAL.fullmatch(entry)
    if match is None and ("*" in entry or "/" in entry):
        return Rule("scope", entry, (), precision)
    name, params = (match["name"], _parse_params(match["params"])) if match else (entry, ())
    prefix, colon, own_name = name.partition(":")
    is_own = bool(colon and prefix in ("fn", "prim") and own_name)
    found = own_name if is_own else in_jaxprs(name)
    if problem := _problem(entry, name, params, match is not None):
        raise ValueError(f"Rule {entry!r} in {precision!r}: {problem}")
    if prefix == "prim" if is_own else found in primitives():
        return Rule("primitive", found, params, precision)
    if not is_own and found not in function_names():
        raise ValueError(
            f"Unknown rule {entry!r} in {precision!r}: {name!r} is no primitive of jax, and no public function of jax "
            f"or loss of optax.{close_matches(name, primitives() | function_names(), _NEARLY_SURE)} Write 'fn:{name}' "
            f"for a function of your own, 'prim:{name}' for a primitive of your own, '*{name}*' for a scope."
        )
    if params:
        raise ValueError(
            f"Rule {entry!r} in {precision!r}: conditions are on parameters of a primitive, and {found!r} is a "
            f"function. Write {name!r} alone, or the primitives in it, as 'integer_pow[y=2]'."
        )
    return Rule("function", found, (), precision)


def line_parts(pattern: str) -> tuple[str, list[str]]:
    """What a line rule is for: one primitive, or the empty string for all; the line, and the lines that call it."""
    parts = _LINE.fullmatch(pattern)
    return ("", [pattern]) if parts is None else (parts["primitive"] or "", _CALLED.findall(parts["lines"]))


def _problem(entry: str, name: str, params: tuple[tuple[str, Any], ...], conditional: bool) -> str:
    """What is wrong with how an entry is written; empty if nothing is."""
    if name in ("", "fn:", "prim:"):
        return (
            "no name. Write that of a primitive or of a function of jax, 'softmax', 'fn:my_loss' for a function of "
            "your own, or '*lm_head*' for a scope."
        )
    if "[" in entry and not conditional:
        return "a condition is a parameter and its value. Write them as a jaxpr prints them: 'integer_pow[y=2]'."
    if empty := next((param for param, value in params if value == ""), None):
        return f"no value for {empty!r}. Write it as a jaxpr prints it: '{name}[{empty}=2]'."
    return ""


def _parse_params(text: str) -> tuple[tuple[str, Any], ...]:
    """`"y=2, axes=(0, 1)"` as pairs. A value that is no Python literal stays a string."""
    starts = list(_PARAM.finditer(text))
    ends = [m.start() for m in starts[1:]] + [len(text)]
    return tuple((m[1], _literal(text[m.end() : end].strip())) for m, end in zip(starts, ends, strict=True))


def _literal(text: str) -> Any:
    try:
        value = _as_tuples(ast.literal_eval(text))
        hash(value)
    except (ValueError, SyntaxError, TypeError):
        return text
    return value


def _as_tuples(value: Any) -> Any:
    """Jaxprs print as lists what are tuples."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def parse_rules(lists: dict[Precision, tuple[str, ...]]) -> tuple[Rule, ...]:
    """Parses the rule lists of a policy.

    Args:
        lists: The entries of each list.

    Returns:
        All rules, the most specific first.

    Raises:
        ValueError: If an entry is unknown, or the same rule stands in two lists.
    """
    found: dict[tuple, tuple[Rule, str]] = {}
    for precision, entries in lists.items():
        for entry in entries:
            rule = parse_rule(entry, precision)
            key = (rule.kind, rule.pattern, rule.params)
            other, other_entry = found.setdefault(key, (rule, entry))
            if other.precision != precision:
                raise ValueError(
                    f"Contradictory rules: {other_entry!r} in {other.precision!r} and {entry!r} in {precision!r}. "
                    f"Keep one of them; dataclasses.replace(policy, {precision}=...) sets a list anew."
                )
    return tuple(sorted((rule for rule, _ in found.values()), key=lambda rule: rule.specificity))
