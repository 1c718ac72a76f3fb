"""Masks that a program makes outside of its loops and checkpoints, made inside of them instead.

A packed model compares its ids once, and hands the mask to every layer. An attention in a loop's body is given an
array of queries and keys then, where kernels want ids. The equations that make such a mask of small arrays of
integers are few and cheap: done again in the body, they say what the mask is, and the backward pass is given the ids.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.core

from jamp._compat import (
    Atom,
    Aval,
    ClosedJaxpr,
    Eqn,
    Jaxpr,
    Literal,
    Var,
    called_jaxpr,
    called_jaxpr_name,
    inner_jaxprs,
    new_variable,
    nominal_size,
    open_jaxpr,
    scan_counts,
    while_parts,
    with_equations,
    with_jaxprs,
    with_loop_consts,
    with_operands,
)
from jamp._primitives import SCALES, Trait, acts, has
from jamp.transforms.analysis.attention.masks import Masks
from jamp.transforms.analysis.reading.axes import Axes, is_view
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source, Value, is_scan

# What makes each element of one of others, or of its place.
_CHEAP = (
    Trait.COMPARES | Trait.INVERTS | Trait.EITHER | Trait.BOTH | Trait.SELECTS | Trait.CONVERTS | Trait.EXTREMUM
    | Trait.ADDS | SCALES | Trait.NEGATES | Trait.MAGNITUDE | Trait.COUNTS
)  # fmt: skip
_MOST = 60  # Equations that are done again.
_LARGER = 4  # How many times as many elements a mask has as all that it is made of.
_PER_OPERAND = ("donated_invars", "in_layouts", "in_shardings", "linear")  # Parameters with an entry for each.
_BODIES = Trait.LOOPS | Trait.REMAT | Trait.BRANCHES


class _Made(NamedTuple):
    """How a value is made.

    Attributes:
        by: The results of equations, each with its equation, which comes behind those that it reads.
        of: What these read, as variables of the jaxpr itself.
    """

    by: Mapping[Value, Flat]
    of: Mapping[Value, Var]

    def beside(self, other: _Made) -> _Made:
        """Both."""
        return _Made({**self.by, **other.by}, {**self.of, **other.of})


_NOTHING = _Made({}, {})


def with_masks_inside(program: ClosedJaxpr) -> ClosedJaxpr:
    """The program, in which bodies of loops, checkpoints and branches make the masks that they were given."""
    return _Inside().of(program)


class _Inside:
    """Lives for one program. Jaxprs that were one object are one object afterwards."""

    def __init__(self) -> None:
        self._changed: dict[int, tuple[ClosedJaxpr, ClosedJaxpr]] = {}  # With the jaxpr: its `id` stays its own.
        self._bodies: dict[object, tuple[ClosedJaxpr, ClosedJaxpr]] = {}
        self._multiply: dict[int, tuple[Jaxpr, bool]] = {}

    def of(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        """A jaxpr, and those in it."""
        if id(closed) not in self._changed:
            self._changed[id(closed)] = closed, self._walk(closed)
        return self._changed[id(closed)][1]

    def _walk(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        jaxpr = open_jaxpr(closed)
        if not any(self._may_attend(eqn) for eqn in jaxpr.eqns):
            return closed
        opened = functools.cache(lambda: Opened(jaxpr))  # Of most jaxprs nobody asks.
        eqns = [self._equation(jaxpr, eqn, opened) if self._may_attend(eqn) else eqn for eqn in jaxpr.eqns]
        same = all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
        return closed if same else with_equations(closed, jaxpr.invars, eqns)

    def _equation(self, jaxpr: Jaxpr, eqn: Eqn, opened: Callable[[], Opened]) -> Eqn:
        first, last = self._handed(eqn)
        masks: dict[int, _Made] = {}
        for place, atom in enumerate(eqn.invars[first:last], first):
            if atom not in [eqn.invars[each] for each in masks] and _may_move(eqn, place):
                made = _made_of_little(jaxpr, opened(), atom)
                masks |= {} if made is None else {place: made}
        if masks:
            eqn = self._with_masks(eqn, masks, opened(), first, last)
        params = with_jaxprs(eqn.params, self.of)
        return eqn if params is eqn.params else with_operands(eqn, eqn.invars, params)

    def _multiplies(self, jaxpr: Jaxpr) -> bool:
        """Whether there is a product in a jaxpr, or in those inside of it."""
        if id(jaxpr) not in self._multiply:
            found = any(has(eqn, Trait.MATRIX) or self._may_attend(eqn) for eqn in jaxpr.eqns)
            self._multiply[id(jaxpr)] = jaxpr, found
        return self._multiply[id(jaxpr)][1]

    def _may_attend(self, eqn: Eqn) -> bool:
        return any(self._multiplies(open_jaxpr(inner)) for inner in inner_jaxprs(eqn))

    def _has_bodies(self, jaxpr: Jaxpr) -> bool:
        """Whether a call has such loops, checkpoints or branches in it. All others are looked through as they are."""
        return any(
            self._may_attend(eqn)
            and (
                has(eqn, _BODIES) or (has(eqn, Trait.CALLS) and self._has_bodies(open_jaxpr(called_jaxpr(eqn.params))))
            )
            for eqn in jaxpr.eqns
        )

    def _handed(self, eqn: Eqn) -> tuple[int, int]:
        """Which operands the jaxprs of an equation are given as they are, each time: the first, and behind the last."""
        if has(eqn, Trait.LOOPS):
            if is_scan(eqn):
                return 0, scan_counts(eqn.params)[0]
            parts = while_parts(eqn.params)
            return parts.cond_consts, parts.first_carry
        if has(eqn, Trait.BRANCHES):
            return 1, len(eqn.invars)
        calls = has(eqn, Trait.CALLS) and self._has_bodies(open_jaxpr(called_jaxpr(eqn.params)))
        return 0, len(eqn.invars) if calls or has(eqn, Trait.REMAT) else 0

    def _with_masks(self, eqn: Eqn, masks: Mapping[int, _Made], opened: Opened, first: int, last: int) -> Eqn:
        """An equation whose jaxprs make some of their inputs."""
        made = _NOTHING
        for each in masks.values():
            made = made.beside(each)
        kept = [place for place in range(first, last) if place not in masks]
        like = [*range(first), *kept, *[min(masks)] * len(made.of), *range(last, len(eqn.invars))]
        operands: list[Atom] = [eqn.invars[place] for place in like]
        operands[first + len(kept) : first + len(kept) + len(made.of)] = made.of.values()
        loops = has(eqn, Trait.LOOPS)
        params = with_loop_consts(eqn.params, len(kept) + len(made.of)) if loops else dict(eqn.params)
        params |= {name: tuple(params[name][place] for place in like) for name in _PER_OPERAND if name in params}
        values = {opened.source(eqn.invars[place]): place - first for place in masks}
        inputs = [place - first for place in kept]

        def body(closed: ClosedJaxpr) -> ClosedJaxpr:
            key = (id(closed), tuple((place, eqn.invars[place]) for place in masks))
            if key not in self._bodies:
                self._bodies[key] = closed, _with_equations_in_front(closed, made, values, inputs, last - first)
            return self._bodies[key][1]

        if has(eqn, Trait.BRANCHES):
            params["branches"] = tuple(map(body, params["branches"]))
        else:
            name = called_jaxpr_name(params) if is_scan(eqn) or not loops else "body_jaxpr"
            params[name] = body(params[name])
        return with_operands(eqn, operands, params)


def _with_equations_in_front(
    closed: ClosedJaxpr, made: _Made, masks: Mapping[Source | None, int], kept: Sequence[int], end: int
) -> ClosedJaxpr:
    """A jaxpr that makes some of its inputs.

    Args:
        closed: The jaxpr.
        made: How they are made.
        masks: By value, which input it is.
        kept: The other inputs among the first ones.
        end: How many first ones there are.
    """
    inner = open_jaxpr(closed)
    env: dict[Source, Atom] = {value: new_variable(value.aval) for value in made.of}
    given = list(env.values())
    eqns = []
    for value, flat in made.by.items():
        ins = [each if isinstance(each, Literal) else env[each] for each in flat.ins]
        env[value] = inner.invars[masks[value]] if value in masks else new_variable(value.aval)
        eqns.append(with_operands(flat.eqn, ins, flat.eqn.params, [env[value]]))
    invars = [*(inner.invars[place] for place in kept), *given, *inner.invars[end:]]
    return with_equations(closed, invars, [*eqns, *inner.eqns])


def _may_move(eqn: Eqn, place: int) -> bool:
    """Whether an operand may be another: nothing is said of the array itself."""
    shardings, donated = (eqn.params.get(name) for name in ("in_shardings", "donated_invars"))
    is_placed = shardings and isinstance(shardings[place], jax.sharding.Sharding)
    return not is_placed and not (donated and donated[place])


def _made_of_little(jaxpr: Jaxpr, opened: Opened, atom: Atom) -> _Made | None:
    """How a mask is made, if it is larger by far than the integers that it is made of."""
    value = opened.source(atom)
    if not isinstance(value, Value) or not isinstance(value.aval, jax.core.ShapedArray):
        return None
    if sum(nominal_size(size) > 1 for size in value.aval.shape) < 2:
        return None
    if not _kind(value.aval) or not _is_mask(opened, value):  # Keys of random numbers are of no kind.
        return None
    made = _made(opened, value, {}, _MOST)
    if made is None or not made.by or len(made.by) > _MOST:
        return None
    read = sum(_size(var.aval) for var in made.of.values() if var not in jaxpr.constvars)
    return made if _size(value.aval) >= _LARGER * read else None


def _is_mask(opened: Opened, value: Value) -> bool:
    """Whether a value is zeros and ones, or zeros and large numbers that are added to scores, or taken off."""
    axes = Axes()
    masks = Masks(opened, axes, lambda _: None, lambda _: None)
    layout = axes.fresh(value.aval.shape)
    return masks.is_boolean(value) or any(masks.of_numbers(value, layout, sign) is not None for sign in (1.0, -1.0))


def _made(opened: Opened, source: Source, found: dict[Value, _Made | None], most: int) -> _Made | None:
    """How a value is made of integers, in so many equations one behind another; None if it is made of anything else."""
    if isinstance(source, Literal):
        return _NOTHING
    if source not in found:
        found[source] = _made_by(opened, source, found, most)
        if found[source] is None and _kind(source.aval) in "iub" and (var := opened.outer(source)) is not None:
            found[source] = _Made({}, {source: var})
    return found[source]


def _made_by(opened: Opened, value: Value, found: dict[Value, _Made | None], most: int) -> _Made | None:
    flat = opened.maker(value)
    if not most or flat is None or flat.cases or len(flat.outs) != 1 or acts(flat.eqn) or inner_jaxprs(flat.eqn):
        return None
    if not (has(flat.eqn, _CHEAP) or is_view(flat.eqn)):
        return None
    all_made = _NOTHING
    for each in flat.ins:
        made = _made(opened, each, found, most - 1)
        if made is None:
            return None
        all_made = all_made.beside(made)
    return all_made.beside(_Made({value: flat}, {}))


def _kind(aval: Aval) -> str:
    return getattr(getattr(aval, "dtype", None), "kind", "")


def _size(aval: Aval) -> int:
    return math.prod(map(nominal_size, aval.shape))
