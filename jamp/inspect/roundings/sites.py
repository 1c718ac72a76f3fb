"""The roundings of a program: where each of them is, and what a caller may write to take it out."""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Iterator, Mapping
from typing import Any

from jamp._compat import Literal, open_jaxpr, scope_path
from jamp._dtypes import is_half
from jamp.inspect._operations import CALLS, Place
from jamp.inspect.roundings.raised import Key, decides, inside, rounds
from jamp.transforms._labels import FULL_SCOPE, HALF_SCOPE, rule_label

_READ_AS = {"O3": "half", "cast_fn": "result"}


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
    """

    key: Key
    place: Place
    operation: str
    dtype: str
    depth: float
    backward: bool
    length: int | None


def roundings(jaxpr: Any, trips: Mapping[Key, int]) -> list[Rounding]:
    """All roundings of a program, in order. The loops in `trips` are entered; other `while`s are not."""
    found = list(_walk(jaxpr, (), Place(), False, None, trips))
    return [dataclasses.replace(r, depth=i / max(len(found) - 1, 1)) for i, r in enumerate(found)]


def _walk(
    jaxpr: Any, key: Key, outer: Place, backward: bool, length: int | None, trips: Mapping[Key, int]
) -> Iterator[Rounding]:
    readers = _first_readers(jaxpr)
    for number, eqn in enumerate(open_jaxpr(jaxpr).eqns):
        here, place, name = (*key, number), outer.enter(eqn), eqn.primitive.name
        transposed = backward or "transpose(" in scope_path(eqn)
        if rounds(eqn) or decides(eqn):
            operation = name
            if name == "convert_element_type" and (reader := _reader(eqn.outvars[0], readers)) is not None:
                operation = reader.primitive.name
                place = dataclasses.replace(place, label=rule_label(scope_path(reader)) or place.label)
            rule = _READ_AS.get(place.label, place.label) if rounds(eqn) else "decided otherwise"
            place = dataclasses.replace(place, label=rule, scope=_named(place.scope))
            dtype = next((str(v.aval.dtype) for v in eqn.outvars if is_half(v.aval.dtype)), "float32")
            yield Rounding(here, place, operation, dtype, 0.0, transposed, length)
        around = length
        if name in ("scan", "while") and length is None:
            around = eqn.params["length"] if name == "scan" else trips.get(here)
        if name != "while" or here in trips:
            for i, inner in enumerate(inside(eqn)):
                if name != "while" or i == 1:
                    yield from _walk(inner, (*here, i), place, transposed, around, trips)


def _named(scope: str) -> str:
    """A scope path without the parts that `jax.checkpoint` and jamp write."""
    return "/".join(
        p for p in scope.split("/") if p not in ("checkpoint", "rematted_computation", FULL_SCOPE, HALF_SCOPE)
    )


def _first_readers(jaxpr: Any) -> dict[Any, tuple[Any, int]]:
    found: dict[Any, tuple[Any, int]] = {}
    for eqn in open_jaxpr(jaxpr).eqns:
        for position, atom in enumerate(eqn.invars):
            if not isinstance(atom, Literal):
                found.setdefault(atom, (eqn, position))
    return found


def _reader(var: Any, readers: dict[Any, tuple[Any, int]]) -> Any:
    """The operation that reads a variable first, within calls and scans too; None for a result."""
    while var in readers:
        eqn, position = readers[var]
        if eqn.primitive.name not in CALLS and eqn.primitive.name != "scan":
            return eqn
        (inner,) = inside(eqn)
        var, readers = open_jaxpr(inner).invars[position], _first_readers(inner)
    return None


def entry_for(place: Place) -> str:
    """The entry of `with_rules` that names a place: its scope, or its source line where the model names no scopes."""
    if place.scope:
        scope = glob.escape(place.scope)
        return scope if "/" in scope else f"{scope}/*"
    return "" if place.line == "?" else place.line
