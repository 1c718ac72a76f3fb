"""Loops that end before their count: scans, and loops with a counter, whose body does nothing more once a flag is set.

`lax.while_loop` has no reverse-mode derivative, so that iterations to convergence are also written with a fixed number
of steps: as a `cond` whose other branch hands its operands on, or as `where(done, old, new)`. What freezes floating
carries for good is a *latch*: a flag that is carried and stays as it is, or a predicate of nothing but frozen carries.
A choice that later iterations may take back is none: the best parameters so far, a step that was accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax.core
import jax.numpy as jnp
import numpy as np

from jamp._compat import ClosedJaxpr, Jaxpr, Literal, Var, open_jaxpr
from jamp._primitives import Trait, has
from jamp.transforms.analysis.flat import Flat, Opened, Source, Value

_HOLDS = Trait.SELECTS | Trait.BRANCHES | Trait.CALLS


class Stop(NamedTuple):
    """What freezes carries: a value, and what it is then."""

    predicate: Value
    when: bool


class Latches(NamedTuple):
    """Latches of a loop.

    Attributes:
        flags: Positions of the carries that are one.
        predicates: Variables of the body, each with the carries that it freezes: a latch if it depends on no others.
    """

    flags: frozenset[int] = frozenset()
    predicates: tuple[tuple[Var, frozenset[int]], ...] = ()


def find_latches(body: Jaxpr, first: int, carries: int) -> Latches:
    """Latches of a loop whose body has its carries, so many of them, behind its first inputs."""
    made = {var: eqn for eqn in body.eqns for var in eqn.outvars}
    ends = [made.get(atom) for atom in body.outvars[:carries] if not isinstance(atom, Literal)]
    if not any(eqn is not None and has(eqn, _HOLDS) for eqn in ends):
        return Latches()
    opened = Opened(body)
    before = [Value(0, var) for var in body.invars[first : first + carries]]
    after = [opened.source(atom) for atom in body.outvars[:carries]]
    held: dict[Stop, set[int]] = {}
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        for stop in _stops(opened, old, new):
            held.setdefault(stop, set()).add(index)
    same = {index for index in range(carries) if before[index] == after[index]}
    flags, predicates = set(), []
    for stop, frozen in held.items():
        if not any(_is(np.floating, before[index]) for index in frozen):
            continue
        carried = {i for i in frozen if before[i] == stop.predicate}
        set_anew = {
            i for i in range(carries) if after[i] == stop.predicate and _stays(opened, before[i], after[i], stop)
        }
        flags |= carried | set_anew
        var = opened.outer(stop.predicate)
        if not carried | set_anew and var is not None:
            predicates.append((var, frozenset(frozen | same)))
    return Latches(frozenset(flags), tuple(predicates))


def _stops(opened: Opened, old: Value, new: Source | None) -> Iterator[Stop]:
    """What keeps a carry as it is."""
    if not isinstance(new, Value) or (flat := opened.maker(new)) is None:
        return
    if has(flat.eqn, Trait.SELECTS) and len(flat.ins) == 3:
        stops = [_stop(opened, flat.ins[0], index) for index, case in enumerate(flat.ins[1:]) if case == old]
        yield from (stop for stop in stops if stop is not None)
    elif has(flat.eqn, Trait.BRANCHES) and len(flat.eqn.params["branches"]) == 2:
        for index, branch in enumerate(flat.eqn.params["branches"]):
            stop = _stop(opened, flat.ins[0], index)
            if stop is not None and _handed_on(flat, branch, new, old, stop):
                yield stop
    else:
        yield from (stop for kept in (True, False) if _stays(opened, old, new, stop := Stop(old, kept)))


def _stop(opened: Opened, predicate: Source, index: int) -> Stop | None:
    """The stop at one of two cases of a predicate, which is seen through conversions, views and negations.

    None for one that the program writes, as that of `jnp.where(True, ...)`.
    """
    when = bool(index)
    while (flat := opened.maker(predicate)) is not None:
        inverts = has(flat.eqn, Trait.INVERTS)
        if not inverts and not has(flat.eqn, Trait.CONVERTS | Trait.VIEW):
            break
        predicate, when = flat.ins[0], when != inverts
    return Stop(predicate, when) if isinstance(predicate, Value) else None


def _handed_on(flat: Flat, branch: ClosedJaxpr, new: Value, old: Value, stop: Stop) -> bool:
    """Whether a branch returns a carry as it is: its operand, or the value that a flag has there."""
    inner = open_jaxpr(branch)
    atom = inner.outvars[[*flat.outs].index(new)]
    if isinstance(atom, Literal):
        return stop.predicate == old and _is(np.bool_, old) and bool(atom.val) == stop.when
    return atom in inner.invars and flat.ins[1 + [*inner.invars].index(atom)] == old


def _stays(opened: Opened, old: Value, new: Source | None, stop: Stop) -> bool:
    """Whether a flag that has the value at which the loop stops keeps it: `done | ...`, or `going & ...`."""
    if new == old:
        return True
    flat = None if new is None else opened.maker(new)
    if flat is None or not _is(np.bool_, old) or not has(flat.eqn, Trait.EITHER if stop.when else Trait.BOTH):
        return False
    return any(_stays(opened, old, operand, stop) for operand in flat.ins)


def _is(kind: type[np.generic], value: Value) -> bool:
    """Whether a value is an array of a kind of numbers."""
    return isinstance(value.aval, jax.core.ShapedArray) and jnp.issubdtype(value.aval.dtype, kind)
