"""What several operations are together: softmax, the derivative of relu, sums of half data or of scaled terms."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jamp._compat import Literal, called_jaxpr, function_names, open_jaxpr
from jamp.transforms import _emit as emit
from jamp.transforms._demand import exponential_of_softmax
from jamp.transforms._flow import FLOAT32, Flow, Kind, is_half, num_elements
from jamp.transforms._rules import CALLS, FULL_REDUCTION, SUMS
from jamp.transforms._steps import Site, Step


def undoes_reduction(site: Site) -> bool:
    """`jnp.sum` of half data raises it, sums, and rounds the sum; the rounding is not the user's, and may overflow."""
    total = site.maker(site.eqn.invars[0])
    if site.mode == "O3" or total is None or total.eqn.primitive.name not in FULL_REDUCTION:
        return False
    raised = site.maker(total.eqn.invars[0])
    return (
        raised is not None
        and raised.eqn.primitive.name == "convert_element_type"
        and raised.eqn.invars[0].aval.dtype == site.eqn.outvars[0].aval.dtype
    )


def rectifies(eqn: Any) -> bool:
    """Whether an equation is `max(x, 0)`, alone or as all that a call of `relu` does."""
    if eqn.primitive.name == "max":
        return not isinstance(eqn.invars[0], Literal) and _is_zero(eqn.invars[1])
    if len(eqn.invars) != 1 or eqn.primitive.name not in CALLS | {"custom_jvp_call"}:
        return False
    inner = open_jaxpr(called_jaxpr(eqn.params))
    if len(inner.eqns) != 1 or isinstance(eqn.invars[0], Literal):
        return False
    (only,) = inner.eqns
    return [*only.outvars] == [*inner.outvars] and only.invars[0] is inner.invars[0] and rectifies(only)


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, Literal) and np.ndim(atom.val) == 0 and atom.val == 0


def rectified(site: Site) -> Step | None:
    """`x > 0`, the derivative of a relu, as `max(x, 0) > 0`: the next layer keeps that, so that `x` need not be."""
    if site.name != "gt" or not _is_zero(site.eqn.invars[1]):
        return None
    positive = site.rectified.get(site.eqn.invars[0])
    state = positive and site.made_by[positive].out[0]
    if state is None or site.ins[0] is None or state.dtype != site.ins[0].dtype:
        return None
    zero = site.ins[1]
    casts = (None, state.dtype if zero and zero.dtype != state.dtype else None)
    return Step(site.eqn, (state, zero), casts, (None,), "promote", atoms=(positive, site.eqn.invars[1]))


def softmax(site: Site) -> Step | None:
    """A softmax lies in [0, 1]: given back in half, and its derivative needs only that half result."""
    if site.name != "div" or site.mode != "O2" or any(site.wants):
        return None
    parts = exponential_of_softmax(site.eqn, lambda atom: (step := site.maker(atom)) and step.eqn)
    if parts is None:
        return None
    exponential, total = site.made_by[site.eqn.invars[0]], parts[1]
    state = exponential.out[0]
    if state is None or state.kind != Kind.ISLAND:
        return None
    (logits,) = exponential.ins
    dtype = FLOAT32 if logits is None or logits.dtype != FLOAT32 else None
    out = Flow(site.planner.half, Kind.HALF, num_elements(site.eqn.outvars[0].aval), site.here)
    return Step(
        site.eqn, (logits,), (dtype,), (out,), "softmax",
        emit=emit.softmax(total.params["axes"], site.planner.half), atoms=tuple(exponential.eqn.invars),
    )  # fmt: skip


_SCALINGS = frozenset({"div", "mul", "neg"})
# Scalings in a row that are done again for a sum. Of a longer row, a decay, each of many sums would do all of it again.
_MOST_SCALINGS = 4


def with_exact_scales(site: Site, step: Step) -> Step:
    """A float32 sum with scaled half terms, as in `x + 0.005 * f(x)`, scales them in float32, in the same kernel.

    In bfloat16 the step size of an integrator would be off by up to 0.4 %, the same way in every step.
    """
    if site.name not in SUMS or step.out[0] is None or step.out[0].dtype != FLOAT32:
        return step
    atoms: list[Any] = []
    states: list[Flow | None] = []
    terms = []
    for atom, state in zip(site.eqn.invars, site.ins, strict=True):
        scalings: list[tuple[Step, int]] = []
        while len(scalings) < _MOST_SCALINGS and (maker := site.maker(atom)) is not None:
            if (index := _scaled_operand(maker)) is None:
                break
            scalings.insert(0, (maker, index))
            atom, state = maker.eqn.invars[index], maker.ins[index]
        terms.append([(maker.eqn, index) for maker, index in scalings])
        atoms.append(atom)
        states.append(state)
        for maker, index in scalings:
            atoms += [*maker.eqn.invars[:index], *maker.eqn.invars[index + 1 :]]
            states += [*maker.ins[:index], *maker.ins[index + 1 :]]
    if not any(terms):
        return step
    casts = tuple(FLOAT32 if state is not None and state.dtype != FLOAT32 else None for state in states)
    return dataclasses.replace(step, ins=tuple(states), casts=casts, atoms=tuple(atoms), emit=emit.scaled_sum(terms))


def _scaled_operand(step: Step) -> int | None:
    """Which operand a step scales by a single number in half; None for other steps."""
    name, out = step.eqn.primitive.name, step.out[0]
    if name not in _SCALINGS or step.emit or out is None or not is_half(out.dtype):
        return None
    data = [i for i, state in enumerate(step.ins) if state is not None and state.size > 1]
    return data[0] if len(data) == 1 and not (name == "div" and data[0]) else None


def pin_extremum(site: Site) -> None:
    """In `x == max(x)`, the derivative of a maximum, both sides have to see the same `x`.

    Left to fuse with each of them, float32 arithmetic that makes `x` differs in the last bit here and there (XLA:CPU,
    jaxlib 0.10 and 0.12), nothing is equal to the maximum, and the gradient is lost. So an island gets the precision
    of half, which hides that bit.
    """
    if site.name != "eq":
        return
    for value, other in (site.eqn.invars, site.eqn.invars[::-1]):
        extremum = site.maker(other)
        while extremum is not None and extremum.eqn.primitive.name in ("broadcast_in_dim", "reshape"):
            extremum = site.maker(extremum.eqn.invars[0])
        if extremum is None or extremum.eqn.primitive.name not in ("reduce_max", "reduce_min"):
            continue
        state = extremum.ins[0]
        if extremum.eqn.invars[0] is value and state is not None and state.kind == Kind.ISLAND:
            extremum.pins = site.planner.half


def associative_scan(site: Site) -> Step | None:
    """The slices that `jax.lax.associative_scan` takes apart what it combines with, and the pads that put it together.

    A recurrence adds up, here in a tree as in the carry of a loop: in bfloat16 a decay of 0.999 is 1. So what is
    between the slices and the pads is float32, and yields to half data after.
    """
    if site.mode not in ("O1", "O2") or site.ins[0] is None or not _splits_or_interleaves(site.eqn):
        return None
    step = site.step("full", FLOAT32, Kind.STAT).making(size=num_elements(site.eqn.outvars[0].aval))
    if site.name == "slice" and site.strong:  # The root stands for the carry that the recurrence would have in a loop.
        step.out = tuple(flow and flow._replace(kind=Kind.FULL, roots=frozenset({("tree", 0)})) for flow in step.out)
    return step


def _splits_or_interleaves(eqn: Any) -> bool:
    every_other = eqn.primitive.name == "slice" and any(stride == 2 for stride in eqn.params["strides"] or ())
    spread = eqn.primitive.name == "pad" and any(inside == 1 for _, _, inside in eqn.params["padding_config"])
    return (every_other or spread) and "associative_scan" in function_names(eqn)
