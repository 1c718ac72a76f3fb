"""The operations of a program that can make an infinity or a NaN, in order, and how they are chosen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jamp._compat import (
    ClosedJaxpr,
    Eqn,
    Jaxpr,
    Literal,
    called_jaxpr,
    has_side_effects,
    inner_jaxprs,
    open_jaxpr,
    while_parts,
)
from jamp._primitives import Trait, has
from jamp.inspect._operations import CALLS, Place, operation_name
from jamp.inspect.numerics.found import Found
from jamp.transforms.analysis.regimes import scope_matches

# They hand on what they are given.
_PASSES = Trait.VIEW | Trait.MOVES | Trait.SLICES | Trait.SELECTS | Trait.NEGATES | Trait.EXTREMUM | Trait.ASSEMBLES
_PASSES |= Trait.TAKES_EXTREMUM | Trait.SORTS | Trait.PADS | Trait.REPLACES
_BOUNDED = frozenset({"abs", "cos", "erf", "logistic", "pcast", "pvary", "sign", "sin", "tanh"})
_FORGETS = Trait.CHOOSES | Trait.SORTS

AnyJaxpr = Jaxpr | ClosedJaxpr
Chosen = Callable[[Place], bool]


class Loop(NamedTuple):
    """The outermost loop around an operation.

    Attributes:
        path: Its equation, by positions in the jaxprs that it is in.
        backwards: Whether its last iteration comes first.
    """

    path: tuple[int, ...]
    backwards: bool


@dataclasses.dataclass(frozen=True)
class Site:
    """An operation that can make an infinity or a NaN of finite numbers.

    Attributes:
        operation: Name of the primitive.
        scope: Path of named scopes.
        line: `file:line` of the user's code.
        function: Name of the function there.
        dtype: Dtype of the first floating result.
        size: Number of its elements, on all devices.
        communicates: Whether it takes values of other devices, which may be to blame.
        arguments: The floating arguments that it depends on, a bit for each.
        loop: The outermost loop around it; None outside of loops.
    """

    operation: str
    scope: str
    line: str
    function: str
    dtype: str
    size: int
    communicates: bool
    arguments: int = 0
    loop: Loop | None = None


def sites(jaxpr: AnyJaxpr, chosen: Chosen, outer: Place = Place()) -> Iterator[Site]:  # noqa: B008 (frozen)
    """The sites of a jaxpr and of those inside of it, in order; those of a loop's body once."""
    for position, eqn in enumerate(open_jaxpr(jaxpr).eqns):
        place = outer.enter(eqn)
        if inner := entered(eqn):
            devices = math.prod(eqn.params["mesh"].shape[name] for name in mapped_names(eqn))
            this = Loop((position,), eqn.params.get("reverse", False)) if has(eqn, Trait.LOOPS) else None
            for body in inner:
                for site in sites(body, chosen, place):
                    loop = this or (site.loop and site.loop._replace(path=(position, *site.loop.path)))
                    yield dataclasses.replace(site, size=devices * site.size, loop=loop)
        elif makes(eqn) and chosen(place):
            aval = next(var.aval for var in eqn.outvars if is_floating(var))
            what = str(aval.dtype), math.prod(aval.shape), has(eqn, Trait.TRAFFIC)
            yield Site(operation_name(eqn), place.scope, place.line, place.function, *what)


def choosing(patterns: Sequence[str]) -> Chosen:
    """Whether a place is in one of the scopes, or on one of the source lines, that patterns name."""

    def chosen(place: Place) -> bool:
        return any(
            pattern == "*"
            or f"/{place.line}".endswith(f"/{pattern}")
            or scope_matches(pattern, place.scope)
            or f"{place.scope}/".startswith(f"{pattern}/")
            for pattern in patterns
        )

    return chosen


def entered(eqn: Eqn) -> list[ClosedJaxpr]:
    """The jaxprs inside of an equation that are looked into; of a `while` its body."""
    name = eqn.primitive.name
    if name in CALLS or name == "shard_map":
        return [called_jaxpr(eqn.params)]
    if name == "scan":
        return [eqn.params["jaxpr"]]
    if name == "while":
        return [while_parts(eqn.params).body]
    return list(eqn.params["branches"]) if name == "cond" and not eqn.params.get("branches_platforms") else []


def mapped_names(eqn: Eqn) -> tuple[str, ...]:
    """The mesh axes that a `shard_map` maps over; none for all else."""
    return tuple(eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes", ())))


def makes(eqn: Eqn) -> bool:
    """Whether an operation can make an infinity or a NaN of finite numbers."""
    if not any(map(is_floating, eqn.outvars)) or has(eqn, _PASSES) or eqn.primitive.name in _BOUNDED:
        return False
    widens = eqn.primitive.name == "convert_element_type" and is_floating(eqn.invars[0])
    return not (widens and eqn.outvars[0].aval.dtype.itemsize > eqn.invars[0].aval.dtype.itemsize)


def forgotten(eqn: Eqn) -> list[int]:
    """Operands of which a NaN would not be seen in the results: what asks for it, and what makes an index."""
    name, atoms = eqn.primitive.name, list(eqn.invars)
    same = len(atoms) == 2 and atoms[0] is atoms[1] and not isinstance(atoms[0], Literal)
    if name == "is_finite" or has(eqn, _FORGETS) or (name in ("ne", "eq", "sub") and same):
        return [i for i, atom in enumerate(atoms) if not isinstance(atom, Literal) and is_floating(atom)][:1]
    return []


def forgets(jaxpr: AnyJaxpr) -> bool:
    """Whether something in a jaxpr may keep a NaN from its results."""
    return any(forgotten(eqn) or any(map(forgets, inner_jaxprs(eqn))) for eqn in open_jaxpr(jaxpr).eqns)


def communicates(eqn: Eqn) -> bool:
    """Whether an equation, or one inside, talks to other devices or to the host, so that it is not done twice."""
    if has_side_effects(eqn) or has(eqn, Trait.TRAFFIC) or "callback" in eqn.primitive.name:
        return True
    return any(communicates(inner) for jaxpr in inner_jaxprs(eqn) for inner in open_jaxpr(jaxpr).eqns)


def is_floating(atom: object) -> bool:
    """Whether a variable holds numbers that may be infinite."""
    dtype = getattr(getattr(atom, "aval", None), "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def to_blame(listed: Sequence[Site], found: Found) -> list[int]:
    """The sites that made infinities or NaN, in order. What adds up over devices, only if nothing else did.

    What a loop makes of a NaN in the next iteration may stand before what made that.
    """
    counts, first = np.asarray(found.counts), np.asarray(found.first)
    begins: dict[Loop, int] = {}

    def when(index: int) -> tuple[int, int]:
        loop = listed[index].loop
        if loop is None:
            return index, 0
        return begins.setdefault(loop, index), -first[index] if loop.backwards else first[index]

    bad = sorted((i for i in range(len(listed)) if counts[i].any()), key=when)
    return [i for i in bad if not listed[i].communicates] or bad
