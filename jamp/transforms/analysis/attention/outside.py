"""Masks that come into a jaxpr from outside: constants of the program, and what an outer jaxpr makes of indices.

A jaxpr inside, such as a loop's body, has a mask as an input. What that is stands where the jaxpr is called.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from jamp._compat import (
    Atom,
    ClosedJaxpr,
    Eqn,
    Jaxpr,
    Literal,
    Var,
    called_jaxpr,
    inner_jaxprs,
    jaxpr_consts,
    open_jaxpr,
    scan_counts,
)
from jamp._primitives import Trait, has
from jamp.transforms.analysis.attention.conditions import Known
from jamp.transforms.analysis.attention.masks import Masks
from jamp.transforms.analysis.attention.places import Affine, Ordered, Places
from jamp.transforms.analysis.reading.axes import Axes
from jamp.transforms.analysis.reading.flat import Opened
from jamp.transforms.program.attention import Layout

_CALLS = Trait.CALLS | Trait.REMAT | Trait.CUSTOM_JVP | Trait.CUSTOM_VJP
_LARGEST = 1 << 28  # Elements of a constant that is looked at.


class Outside:
    """What is known of variables in all jaxprs of a program, by where these are called.

    Args:
        program: The outermost jaxpr.
    """

    def __init__(self, program: ClosedJaxpr) -> None:
        self._values: dict[Var, Any] = {}
        self._given: dict[Var, list[tuple[Jaxpr, Atom]]] = defaultdict(list)
        self._seen: dict[int, Jaxpr] = {}
        self._opened: dict[int, Opened] = {}
        self._found: dict[Var, Known | Affine | None] = {}
        self._walk(program)

    def known(self, var: Var) -> Known | Affine | None:
        """What an input or a constant of a jaxpr is, if it is a mask of places or places, the same at all calls.

        Labels are its axes.
        """
        if var not in self._found:
            self._found[var] = None  # Of a jaxpr that calls itself nothing is known.
            if var in self._values:
                self._found[var] = _known_array(self._values[var]) or _places_of(self._values[var])
            elif var in self._given:
                first, *others = (self._of(jaxpr, atom) for jaxpr, atom in self._given[var])
                self._found[var] = first if all(other == first for other in others) else None
        return self._found[var]

    def _walk(self, closed: ClosedJaxpr) -> None:
        jaxpr = open_jaxpr(closed)
        self._values.update(zip(jaxpr.constvars, jaxpr_consts(closed), strict=True))
        if id(jaxpr) in self._seen:
            return
        self._seen[id(jaxpr)] = jaxpr
        for eqn in jaxpr.eqns:
            for var, atom in _handed(eqn):
                self._given[var].append((jaxpr, atom))
            for inner in inner_jaxprs(eqn):
                self._walk(inner)

    def _of(self, jaxpr: Jaxpr, atom: Atom) -> Known | Affine | None:
        if isinstance(atom, Literal):
            return _places_of(atom.val)
        if atom in self._values or atom in self._given:
            return self.known(atom)
        if id(jaxpr) not in self._opened:
            self._opened[id(jaxpr)] = Opened(jaxpr)
        opened, axes = self._opened[id(jaxpr)], Axes()
        layout = axes.fresh(atom.aval.shape)
        masks = Masks(opened, axes, lambda _: None, self.known)
        if (source := opened.source(atom)) is None:
            return None
        if (numbers := masks.two_numbers(source, layout)) is None:
            found = Places(opened, axes, self.known).affine(source, layout, [])
            return found and found.renamed(_axes_of(axes, layout))
        which, at, off, on = numbers
        for keeps, values in ((True, (off, on)), (False, (on, off))):
            conditions = masks.conditions(which, at, keeps)
            places = _axes_of(axes, layout)
            orders = [each.renamed(places) for each in conditions or () if isinstance(each, Ordered)]
            if conditions and len(orders) == len(conditions) and None not in orders:
                return Known(tuple(order for order in orders if order), *values)
        return None


def _handed(eqn: Eqn) -> Iterator[tuple[Var, Atom]]:
    """Inputs of jaxprs inside, and the operands that they are, whole and in every iteration."""
    if has(eqn, _CALLS):
        yield from zip(open_jaxpr(called_jaxpr(eqn.params)).invars, eqn.invars, strict=False)
    elif has(eqn, Trait.LOOPS) and "jaxpr" in eqn.params:  # A `scan`.
        count, _ = scan_counts(eqn.params)
        yield from zip(open_jaxpr(eqn.params["jaxpr"]).invars[:count], eqn.invars[:count], strict=True)
    elif has(eqn, Trait.BRANCHES):
        for branch in eqn.params["branches"]:
            yield from zip(open_jaxpr(branch).invars, eqn.invars[1:], strict=True)


def _axes_of(axes: Axes, layout: Layout) -> dict[int, int]:
    return {label: axis for axis, labels in enumerate(axes.layout(layout)) for label in labels}


def _places_of(value: Any) -> Affine | None:
    """What integers that the program closes over, or writes, are of their own indices."""
    if isinstance(value, jax.core.Tracer) or not getattr(value, "is_fully_addressable", True):
        return None
    if np.size(value) > _LARGEST or not jnp.issubdtype(getattr(value, "dtype", type(value)), np.integer):
        return None
    table = np.asarray(value, np.int64)
    first = table.item(0) if table.size else 0
    slopes = {axis: int(table.take(1, axis).item(0)) - first for axis, size in enumerate(table.shape) if size > 1}
    whole = first + sum(slope * _along(axis, table.shape) for axis, slope in slopes.items())
    return Affine({axis: slope for axis, slope in slopes.items() if slope}, first) if (table == whole).all() else None


def _along(axis: int, shape: tuple[int, ...]) -> np.ndarray:
    """The index along an axis."""
    return np.arange(shape[axis]).reshape([-1 if each == axis else 1 for each in range(len(shape))])


def _known_array(value: Any) -> Known | None:
    """A constant of two numbers, one of them where places differ by no less than a number, and by no more."""
    shape = np.shape(value)
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    if len(axes) != 2 or np.prod(shape) > _LARGEST or isinstance(value, jax.core.Tracer):
        return None
    if not getattr(value, "is_fully_addressable", True) or jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return None
    table = np.asarray(value).reshape([shape[axis] for axis in axes])
    first = table[0, 0]
    others = table[table != first]
    if not others.size or not (others == others[0]).all():
        return None
    for on, off in sorted(((others[0], first), (first, others[0])), key=lambda pair: float(pair[0]), reverse=True):
        bounds = _band(table == on)
        if bounds is not None:
            row, column = (Affine({axis: 1}, 0) for axis in axes)
            ends = (row.minus(column), column.minus(row))
            orders = [Ordered(end.plus(Affine({}, by))) for end, by in zip(ends, bounds, strict=True) if by is not None]
            return Known(tuple(orders), float(off), float(on))
    return None


def _band(table: np.ndarray) -> tuple[int | None, int | None] | None:
    """`(a, b)` where a table says `row - column + a >= 0` and `column - row + b >= 0`; None for no such end."""
    if not np.array_equal(table[1:, 1:], table[:-1, :-1]):
        return None
    diagonals = np.concatenate([table[0, ::-1], table[1:, 0]])
    (places,) = np.nonzero(diagonals)
    if places[-1] - places[0] + 1 != len(places):
        return None
    first, last = (int(place) - (table.shape[1] - 1) for place in (places[0], places[-1]))
    return None if places[0] == 0 else -first, None if places[-1] == len(diagonals) - 1 else last
