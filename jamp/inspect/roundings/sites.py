"""The roundings of a program: where each of them is, and what a caller may write to take it out."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jamp._compat import Literal, open_jaxpr, scope_path
from jamp._dtypes import is_half
from jamp.inspect._flops import code_lines
from jamp.inspect._operations import CALLS, Place
from jamp.inspect.roundings.raised import inside
from jamp.inspect.roundings.single import decides, rounds
from jamp.inspect.roundings.steps import Key
from jamp.transforms._labels import FULL_SCOPE, HALF_SCOPE, policy_labels, rule_label

_READ_AS = {"O3": "half", "cast_fn": "result"}
_JITS = ("jit", "pjit")
_HANDS_ON = ("jamp_held_apart", "jamp_keep")  # The second to the backward pass as well.


# Scope, line, operation and dtype: roundings of which a reader of `error_sources` sees one row.
Row = tuple[str, str, str, str]


@dataclasses.dataclass(frozen=True)
class Rounding:
    """One equation that rounds.

    Attributes:
        key: Identifies it in the program.
        place: Scope, line and function; and the rule that put it in half.
        operation: Name of the primitive; of a cast that of the operation that reads it.
        dtype: What it rounds to.
        depth: How much of the program comes before it, from 0 to 1.
        backward: Whether it is of the backward pass.
        length: Iterations of the outermost loop around it; None outside of loops.
        around: Source lines of the loops and branches around it, outermost first.
        marked: Whether the program marks it with `jamp.half_precision`.
        policy: The policy of the innermost `cast_fn` around it; empty outside of all.
        lines: Its source line, and those that call it, innermost first; as far as the innermost `jax.jit` around it.
        call: Source line of the call of that `jax.jit`; empty outside of all.
    """

    key: Key
    place: Place
    operation: str
    dtype: str
    depth: float
    backward: bool
    length: int | None
    around: tuple[str, ...]
    marked: bool
    policy: str
    lines: tuple[str, ...]
    call: str

    @property
    def row(self) -> Row:
        """What it is shown with."""
        return self.place.scope, self.place.line, self.operation, self.dtype


class _Around(NamedTuple):
    """What is known of the equations around a jaxpr."""

    place: Place = Place()
    backward: bool = False
    length: int | None = None
    around: tuple[str, ...] = ()
    policy: str = ""
    lines: tuple[str, ...] = ()
    call: str = ""


def roundings(jaxpr: Any, trips: Mapping[Key, int] | None = None) -> list[Rounding]:
    """All roundings of a program, in order. Only the `while`s in `trips` are entered, or all if that is None."""
    found = list(_walk(jaxpr, (), _Around(), trips))
    return [dataclasses.replace(r, depth=i / max(len(found) - 1, 1)) for i, r in enumerate(found)]


def _walk(jaxpr: Any, key: Key, outer: _Around, trips: Mapping[Key, int] | None) -> Iterator[Rounding]:
    readers = _first_readers(jaxpr)
    for number, eqn in enumerate(open_jaxpr(jaxpr).eqns):
        here, path, name = (*key, number), scope_path(eqn), eqn.primitive.name
        place, lines = outer.place.enter(eqn), code_lines(eqn) or outer.lines
        backward = outer.backward or "transpose(" in path
        policy = (policy_labels(path) or [outer.policy])[-1]
        if rounds(eqn) or decides(eqn):
            operation, label = name, place.label
            reader, rule = _reader(eqn.outvars[0], readers) if name == "convert_element_type" else (None, "")
            if reader is not None:
                operation, label = reader.primitive.name, rule or label
                if place.line == "?":  # An argument, or a cotangent, that jamp casts at the border of the function.
                    place, lines = outer.place.enter(reader), code_lines(reader) or lines
            rule = _READ_AS.get(label, label) if rounds(eqn) else "decided otherwise"
            shown = dataclasses.replace(place, label=rule, scope=_named(place.scope, backward or "jvp(" in path))
            dtype = next((str(v.aval.dtype) for v in eqn.outvars if is_half(v.aval.dtype)), "float32")
            marked = _innermost_mark(place.scope) == HALF_SCOPE
            yield Rounding(
                here, shown, operation, dtype, 0.0, backward, outer.length, outer.around, marked, policy, lines,
                outer.call,
            )  # fmt: skip
        length, around = outer.length, outer.around
        if name in ("scan", "while", "cond") and place.line != "?":
            around = (*around, place.line)
        if name in ("scan", "while") and length is None:
            length = eqn.params["length"] if name == "scan" else (trips or {}).get(here)
        call = place.line if name in _JITS else outer.call
        if name != "while" or trips is None or here in trips:
            inner_place = _Around(place, backward, length, around, policy, lines, call)
            for i, inner in enumerate(inside(eqn)):
                if name != "while" or i == 1:
                    yield from _walk(inner, (*here, i), inner_place, trips)


def _innermost_mark(scope: str) -> str:
    return ([""] + [part for part in scope.split("/") if part in (FULL_SCOPE, HALF_SCOPE)])[-1]


def _named(scope: str, of_derivative: bool) -> str:
    """A scope path without the parts that `jax.checkpoint` and jamp write.

    In the jaxpr of a derivative JAX writes paths in full that are relative elsewhere: `model` and `model/block` inside
    of it are `model/block`.
    """
    written = ("checkpoint", "rematted_computation", FULL_SCOPE, HALF_SCOPE)
    parts = [part for part in scope.split("/") if part not in written]
    while of_derivative and (twice := [n for n in range(1, len(parts) // 2 + 1) if parts[:n] == parts[n : 2 * n]]):
        parts = parts[twice[0] :]
    return "/".join(parts)


def _first_readers(jaxpr: Any) -> dict[Any, tuple[Any, int]]:
    found: dict[Any, tuple[Any, int]] = {}
    for eqn in open_jaxpr(jaxpr).eqns:
        for position, atom in enumerate(eqn.invars):
            if not isinstance(atom, Literal):
                found.setdefault(atom, (eqn, position))
    return found


def _reader(var: Any, readers: dict[Any, tuple[Any, int]]) -> tuple[Any, str]:
    """The operation that reads a variable first, within calls and scans too, and its rule; None for a result."""
    rule = ""
    while var in readers:
        eqn, position = readers[var]
        if eqn.primitive.name in _HANDS_ON:
            var = next((out for out in eqn.outvars if out in readers), eqn.outvars[0])
            continue
        rule = rule_label(scope_path(eqn)) or rule  # That of a call is the rule of what is inside.
        if eqn.primitive.name not in CALLS and eqn.primitive.name != "scan":
            return eqn, rule
        (inner,) = inside(eqn)
        var, readers = open_jaxpr(inner).invars[position], _first_readers(inner)
    return None, rule


def entry_for(place: Place) -> str:
    """The entry of `with_rules` that names a place: its scope, or its source line where the model names no scopes."""
    return next(iter(entries_for(place)), "")


def entries_for(place: Place) -> list[str]:
    """The entries of `with_rules` that name a place, the first being the one to prefer."""
    scope = glob.escape(place.scope)
    found = [scope if "/" in scope else f"{scope}/*"] if scope else []
    return found if place.line == "?" else [*found, place.line]
