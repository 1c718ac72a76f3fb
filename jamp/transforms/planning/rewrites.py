"""What becomes of patterns: one function each, from a site where `analysis.patterns` found one to a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

from jamp._compat import Atom
from jamp._primitives import SCALES, Trait, has
from jamp.transforms.analysis.patterns import FINDERS, Finder, Match, Pattern
from jamp.transforms.planning.attention import Declined, plan_attention
from jamp.transforms.planning.site import Site
from jamp.transforms.program.flow import TREE, Flow, num_elements
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import transmit
from jamp.transforms.program.plan import Step
from jamp.transforms.program.rewrites import Forward, Pinned, Rectified, Retyped, ScaledSum, Softmax

Answer = Callable[[Site, Match], Step | Declined | None]


def _softmax(site: Site, match: Match) -> Step | None:
    """A softmax lies in [0, 1]: given back in half, and its derivative needs only that half result.

    Not so where weights as large are taken off it: of those of two scores that are nearly the same little is left.
    """
    if not site.regime.islands or site.want_full or site.wanted_apart:
        return None
    exponential, total, *views = match.eqns
    maker = site.maker(exponential.outvars[0])
    state = maker and maker.out[0]
    if maker is None or state is None or state.kind != Kind.ISLAND:
        return None
    (logits,) = maker.ins
    marks = transmit(state.marks, site.traits, Kind.HALF)
    out = Flow(site.pair.narrow, Kind.HALF, num_elements(site.eqn.outvars[0].aval), site.here, marks)
    rewrite = Softmax(
        axes=total.params["axes"], half=site.pair.narrow, views=tuple(views), reads=tuple(exponential.invars)
    )
    return Step(site.eqn, (logits,), (site.cast(logits, site.wide),), (out,), "softmax", rewrite)


def _rectified(site: Site, match: Match) -> Step | None:
    """`x > 0`, the derivative of a relu, as `max(x, 0) > 0`: the next layer keeps that, so that `x` need not be."""
    if match.atom is None or (maker := site.maker(match.atom)) is None:
        return None
    state, zero = maker.out[0], site.ins[1]
    if state is None or site.ins[0] is None or state.dtype != site.ins[0].dtype:
        return None
    rewrite = Rectified(reads=(match.atom, site.eqn.invars[1]))
    return Step(site.eqn, (state, zero), (None, site.cast(zero, state.dtype)), (None,), "promote", rewrite)


def _undone_reduction(site: Site, match: Match) -> Step | None:
    """A sum of half data that `jnp.sum` rounds to half stays float32."""
    del match
    if not site.regime.delicate or site.ins[0] is None:
        return None
    return Step(site.eqn, site.ins, (None,), site.ins, "full", Forward())


def _compared_extremum(site: Site, match: Match) -> Step | None:
    """In `x == max(x)`, the derivative of a maximum, both sides have to see the same `x`.

    Left to fuse with each of them, float32 arithmetic that makes `x` differs in the last bit here and there (XLA:CPU,
    jaxlib 0.10 and 0.12), nothing is equal to the maximum, and the gradient is lost. So an island gets the precision
    of half, which hides that bit.
    """
    del match
    state = site.ins[0]
    if state is None or state.kind != Kind.ISLAND or site.regime.untouched:
        return None
    return Step(site.eqn, site.ins, (None,), (site.result(site.eqn.outvars[0].aval, state.dtype, state.kind),),
                "follow", Pinned(digits=site.pair.narrow))  # fmt: skip


def _tree(site: Site, match: Match) -> Step | None:
    """What is between the slices and the pads of an associative scan is float32, and yields to half data after.

    A recurrence adds up, here in a tree as in the carry of a loop: in bfloat16 a decay of 0.999 is 1.
    """
    del match
    if not site.regime.recurrences or site.ins[0] is None:
        return None
    step = site.step("full", site.wide, Kind.STAT).making(size=num_elements(site.eqn.outvars[0].aval))
    if not has(site.eqn, Trait.SLICES) or not site.strong:
        return step
    # The root stands for the carry that the recurrence would have in a loop.
    return step.making(kind=Kind.FULL, roots=frozenset({TREE}))


class Entry(NamedTuple):
    """A pattern: how it is found, and what becomes of it.

    Attributes:
        find: Yields the equations to be rewritten in a jaxpr, each with a `Match` of this pattern.
        answer: Makes the step of such an equation; or, where it is to be planned like any other, says why, or None.
    """

    find: Finder
    answer: Answer


Registry = Mapping[Hashable, Entry]
REGISTRY: Registry = {
    pattern: Entry(FINDERS[pattern], answer)
    for pattern, answer in (
        (Pattern.SOFTMAX, _softmax),
        (Pattern.RECTIFIED, _rectified),
        (Pattern.UNDONE_REDUCTION, _undone_reduction),
        (Pattern.COMPARED_EXTREMUM, _compared_extremum),
        (Pattern.TREE, _tree),
        (Pattern.ATTENTION, plan_attention),
    )
}


def with_exact_scales(site: Site, step: Step) -> Step:
    """A float32 sum with scaled half terms, as in `x + 0.005 * f(x)`, scales them in float32, in the same kernel.

    In bfloat16 the step size of an integrator would be off by up to 0.4 %, the same way in every step.

    Not so where others read the scaled `h` too, as in `h - logsumexp(h)` and `softmax(h + d) - softmax(h)`: these have
    it as it was rounded, so that elements would be above their maximum, weights would not add up to one, and what
    rounding left out would be all of the difference.
    """
    out = step.out[0] if step.out else None
    if not has(site.eqn, Trait.ADDS) or step.rewrite is not None or out is None or out.dtype != site.wide:
        return step
    atoms: list[Atom] = []
    states: list[Flow | None] = []
    terms = []
    for atom, state in zip(site.eqn.invars, site.ins, strict=True):
        scalings: list[tuple[Step, int]] = []
        while len(scalings) < site.heuristics.most_scalings and (maker := site.maker(atom)) is not None:
            index = _scaled_operand(site, maker)
            if index is None or atom in site.shared:
                break
            scalings.insert(0, (maker, index))
            atom, state = maker.eqn.invars[index], maker.ins[index]
        terms.append(tuple((maker.eqn, index) for maker, index in scalings))
        atoms.append(atom)
        states.append(state)
        for maker, index in scalings:
            atoms += [*maker.eqn.invars[:index], *maker.eqn.invars[index + 1 :]]
            states += [*maker.ins[:index], *maker.ins[index + 1 :]]
    if not any(terms):
        return step
    casts = tuple(site.cast(state, site.wide) for state in states)
    return dataclasses.replace(
        step, ins=tuple(states), casts=casts, rewrite=ScaledSum(terms=tuple(terms), reads=tuple(atoms))
    )


def _scaled_operand(site: Site, step: Step) -> int | None:
    """Which operand a step scales by a single number in half; None for other steps."""
    out = step.out[0] if step.out else None
    if not has(step.eqn, SCALES | Trait.NEGATES) or out is None:
        return None
    if not isinstance(step.rewrite, Retyped | None) or not site.pair.is_narrow(out.dtype):
        return None
    data = [i for i, state in enumerate(step.ins) if state is not None and state.size > 1]
    return data[0] if len(data) == 1 and not (has(step.eqn, Trait.DIVIDES) and data[0]) else None
