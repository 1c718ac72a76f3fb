"""Loops that end before their count: scans, and loops with a counter, whose body does nothing more once a flag is set.

`lax.while_loop` has no reverse-mode derivative, so that iterations to convergence are also written with a fixed number
of steps: as a `cond` whose other branch hands its operands on, as `where(done, old, new)`, or as `x + active * dx`.
What freezes floating carries for good is a *latch*: a flag that is carried and stays as it is, or a predicate of
nothing but frozen carries. A choice that later iterations may take back is none: the best parameters so far, a step
that was accepted. Nor is an end that the frozen state does not decide, as where a mask stops to count rewards, or one
that is drawn at random, or told by a network as a probability.
"""

from __future__ import annotations

import numpy as np

from jamp._compat import Jaxpr, inner_jaxprs, open_jaxpr
from jamp.transforms.analysis.loops.body import Body
from jamp.transforms.analysis.loops.deciders import Deciders, Inputs
from jamp.transforms.analysis.reading.flat import Source, Value
from jamp.transforms.analysis.reading.freezing import Freezing, Stop, Stops, is_a
from jamp.transforms.program.want import Want


def find_latches(body: Body) -> dict[int, Want]:
    """What is wanted of the carries that decide when a loop does nothing more, by their positions.

    Args:
        body: The loop's body.
    """
    if not _compares(body.jaxpr):
        return {}
    before, after, freezing = body.before, body.after, body.freezing
    held: dict[Stop, set[int]] = {}
    same: set[int] = set()
    for index, (old, new) in enumerate(zip(before, after, strict=True)):
        stops = freezing.under(new, old)
        same.update([index] if stops is None else [])
        for stop in stops or ():
            held.setdefault(stop, set()).add(index)
    scanned = [Value(0, var) for var in body.jaxpr.invars[body.first + body.carries :]]
    deciders = Deciders(body.opened, freezing, Inputs(before, scanned), after)
    found: dict[int, Want] = {}
    for stop, frozen in held.items():
        states = {i for i in frozen if is_a(np.floating, before[i]) and before[i] not in freezing.flags}
        if states:
            flags = {i for i in range(body.carries) if _stays(freezing, before[i], after[i], stop)}
            found |= _by_flags(deciders, flags, states) or _by_predicate(deciders, stop, states, frozen | same)
    return found


def _compares(jaxpr: Jaxpr) -> bool:
    """Whether anything in a jaxpr is true or false."""
    return any(
        any(is_a(np.bool_, var) for var in eqn.outvars) or any(_compares(open_jaxpr(i)) for i in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def _stays(freezing: Freezing, old: Value, new: Source | None, stop: Stop) -> bool:
    """Whether a carry is the flag that a loop stops at, and stays it: `done | ...`, or `active * ...`."""
    kept: Stops = freezing.under(new, stop.number)
    if old == stop.predicate:
        return kept is None or stop in kept
    return new == stop.predicate and old in freezing.flags and (kept is None or Stop(old, stop.number) in kept)


def _by_flags(deciders: Deciders, flags: set[int], states: set[int]) -> dict[int, Want]:
    """Of the flags that freeze states for good, those whose own states decide about them."""
    decided = {index: deciders.of(deciders.after[index]) for index in flags}
    converge = {index: found for index, found in decided.items() if found.converges(states)}
    again = {index for found in converge.values() for index in found.again}
    return dict.fromkeys(converge, Want.EXACT) | dict.fromkeys(again, Want.AGAIN)


def _by_predicate(deciders: Deciders, stop: Stop, states: set[int], frozen: set[int]) -> dict[int, Want]:
    """What a predicate reads that stays as it is, since all that it reads is frozen with it."""
    shape = stop.predicate.aval.shape
    gates = len([size for size in shape if size != 1]) > 1
    if gates and all(deciders.before[index].aval.shape == shape for index in states):
        return {}  # Elements that are frozen one by one, as by the derivative of a relu, read the others.
    decided = deciders.of(stop.predicate)
    stays = deciders.inputs(stop.predicate) <= frozen
    if not stays or not decided.converges(states):
        return {}
    return dict.fromkeys(decided.at_once, Want.EXACT) | dict.fromkeys(decided.again, Want.AGAIN)
