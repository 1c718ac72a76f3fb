"""What several equations are together: each pattern is one function that finds it in a jaxpr, at one equation.

`planning.rewrites` says what becomes of each, and joins the two in its registry. The order of finders is that of the
registry: where two find something at one equation, the later decides.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jamp._compat import Atom, Eqn, Jaxpr, Literal, Var, called_jaxpr, function_names, open_jaxpr
from jamp._primitives import FUNCTIONS, SCALES, Trait, has, having
from jamp.transforms.analysis.attention.conditions import Knows
from jamp.transforms.analysis.attention.finder import Found as FoundAttention
from jamp.transforms.analysis.attention.finder import find_attention
from jamp.transforms.analysis.reading.chains import Makers, chain, is_zero, maker, makers


class Pattern(enum.Enum):
    """What was found."""

    SOFTMAX = "softmax"
    RECTIFIED = "rectified"
    UNDONE_REDUCTION = "undone reduction"
    COMPARED_EXTREMUM = "compared extremum"
    TREE = "tree"
    ATTENTION = "attention"


class Match(NamedTuple):
    """A pattern, found at an equation.

    Attributes:
        pattern: What was found: a `Pattern`, or the key of another entry of the registry.
        eqns: The other equations that belong to it, as its finder says.
        atom: The variable that it is about.
        attention: What an attention consists of, or why it has to stay as written.
    """

    pattern: Hashable
    eqns: tuple[Eqn, ...] = ()
    atom: Atom | None = None
    attention: FoundAttention | None = None


Found = Iterator[tuple[Eqn, Match]]
Finder = Callable[[Jaxpr, Makers], Found]
Matches = Mapping[int, Match]


def find_patterns(jaxpr: Jaxpr, finders: Sequence[Finder]) -> Matches:
    """By the `id` of the equation that is to be rewritten, the pattern that was found there."""
    made = makers(jaxpr)
    return {id(eqn): match for find in finders for eqn, match in find(jaxpr, made)}


def _softmax(jaxpr: Jaxpr, made: Makers) -> Found:
    """`exp(z) / sum(exp(z))`, at the division; or `exp(z) * (1 / sum(exp(z)))`, at the product.

    The other equations are the exponential, the sum, and the views through which the division sees the exponential.
    """
    exponentials = having(jaxpr.eqns, Trait.EXPONENTIAL)
    for eqn in having(jaxpr.eqns, SCALES) if exponentials else ():
        for top, bottom in _quotients(eqn, made):
            exponential = chain(made, top, to=Trait.EXPONENTIAL)
            total = chain(made, bottom, to=Trait.SUMS_AXES)
            if exponential is None or total is None or total.invars[0] is not exponential.outvars[0]:
                continue
            views = _path(made, top, exponential)
            axes = range(exponential.outvars[0].aval.ndim)
            summed = [axis for axis in axes if axis not in total.params["axes"]]
            if _stands_in_its_row(_places(views, [*axes]), _places(_path(made, bottom, total), [*summed])):
                yield eqn, Match(Pattern.SOFTMAX, (exponential, total, *views))
                break


def _quotients(eqn: Eqn, made: Makers) -> list[tuple[Atom, Atom]]:
    """What an equation may divide by what."""
    if has(eqn, Trait.DIVIDES) and len(eqn.invars) == 2:
        return [(eqn.invars[0], eqn.invars[1])]
    if not has(eqn, Trait.MULTIPLIES):
        return []
    found = []
    for top, other in (eqn.invars, eqn.invars[::-1]):
        reciprocal = chain(made, other, to=Trait.DIVIDES)
        if reciprocal is not None and len(reciprocal.invars) == 2 and not _path(made, other, reciprocal):
            one, divisor = reciprocal.invars
            if isinstance(one, Literal) and bool(one.val == 1):
                found.append((top, divisor))
    return found


def _path(made: Makers, atom: Atom, start: Eqn) -> tuple[Eqn, ...]:
    """The views between the result of an equation and an atom, in order."""
    found: list[Eqn] = []
    while (eqn := maker(made, atom)) is not None and eqn is not start:
        found.insert(0, eqn)
        atom = eqn.invars[0]
    return tuple(found)


Places = list[int | None] | None


def _places(views: tuple[Eqn, ...], places: Places) -> Places:
    """Where axes stand after views: an axis that is new is None; None for a view that is not understood."""
    for eqn in views:
        if places is None:
            return None
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        if "broadcast_dimensions" in eqn.params:
            dimensions = dict(zip(eqn.params["broadcast_dimensions"], places, strict=True))
            places = [dimensions.get(axis) for axis in range(len(after))]
        elif "permutation" in eqn.params:
            places = [places[axis] for axis in eqn.params["permutation"]]
        elif before == after and not has(eqn, Trait.CONVERTS):
            continue
        elif [size for size in before if size != 1] == [size for size in after if size != 1]:
            kept = iter([place for place, size in zip(places, before, strict=True) if size != 1])
            places = [next(kept) if size != 1 else None for size in after]
        else:
            return None
    return places


def _stands_in_its_row(term: Places, total: Places) -> bool:
    """Whether each term of a sum meets the sum over its own row."""
    if term is None or total is None:
        return False
    if not total:
        return True
    kept = {place for place in total if place is not None}
    return (
        len(term) == len(total)
        and all(b is None or a == b for a, b in zip(term, total, strict=True))
        and (kept <= set(term))
    )


def rectifies(eqn: Eqn) -> bool:
    """Whether an equation is `max(x, 0)`, alone or as all that a call of `relu` does."""
    if has(eqn, Trait.MAXIMUM):
        return not isinstance(eqn.invars[0], Literal) and is_zero(eqn.invars[1])
    if len(eqn.invars) != 1 or not has(eqn, FUNCTIONS):
        return False
    inner = open_jaxpr(called_jaxpr(eqn.params))
    if len(inner.eqns) != 1 or isinstance(eqn.invars[0], Literal):
        return False
    (only,) = inner.eqns
    if not only.invars:  # A logger that prints no value.
        return False
    return [*only.outvars] == [*inner.outvars] and only.invars[0] is inner.invars[0] and rectifies(only)


def _rectified(jaxpr: Jaxpr, made: Makers) -> Found:
    """`x > 0` after `max(x, 0)`, which is the variable."""
    del made
    positive: dict[Var, Var] = {}
    for eqn in having(jaxpr.eqns, Trait.GREATER | Trait.MAXIMUM | FUNCTIONS):
        if not eqn.invars or isinstance(eqn.invars[0], Literal):  # Of a number of the program nothing is to be found.
            continue
        if has(eqn, Trait.GREATER) and is_zero(eqn.invars[1]) and eqn.invars[0] in positive:
            yield eqn, Match(Pattern.RECTIFIED, atom=positive[eqn.invars[0]])
        if rectifies(eqn):
            positive[eqn.invars[0]] = eqn.outvars[0]


def _undone_reduction(jaxpr: Jaxpr, made: Makers) -> Found:
    """`jnp.sum` of half data raises it, sums, and rounds the sum; the rounding is not the user's, and may overflow."""
    for eqn in having(jaxpr.eqns, Trait.CONVERTS):
        total = maker(made, eqn.invars[0])
        if total is None or not has(total, Trait.REDUCES):
            continue
        raised = maker(made, total.invars[0])
        if raised is None or not has(raised, Trait.CONVERTS):
            continue
        if raised.invars[0].aval.dtype == eqn.outvars[0].aval.dtype:
            yield eqn, Match(Pattern.UNDONE_REDUCTION)


def _compared_extremum(jaxpr: Jaxpr, made: Makers) -> Found:
    """A maximum of `x`, at itself, that is compared with `x`: the derivative of a maximum."""
    for eqn in having(jaxpr.eqns, Trait.EQUALS):
        for value, other in (eqn.invars, eqn.invars[::-1]):
            extremum = chain(made, other, to=Trait.TAKES_EXTREMUM)
            if extremum is not None and extremum.invars[0] is value:
                yield extremum, Match(Pattern.COMPARED_EXTREMUM)


def _takes_apart(eqn: Eqn) -> bool:
    """Whether a slice is of every other element, or of the first one."""
    if not has(eqn, Trait.SLICES) or "strides" not in eqn.params:
        return False
    if 2 in (eqn.params["strides"] or ()):
        return True
    bounds = zip(eqn.params["start_indices"], eqn.params["limit_indices"], eqn.invars[0].aval.shape, strict=True)
    return [(start, limit) for start, limit, size in bounds if (start, limit) != (0, size)] == [(0, 1)]


def _tree(jaxpr: Jaxpr, made: Makers) -> Found:
    """The slices that `jax.lax.associative_scan` takes apart what it combines, and the pads that put it together."""
    del made
    for eqn in having(jaxpr.eqns, Trait.SLICES | Trait.PADS):
        spread = has(eqn, Trait.PADS) and any(inside == 1 for _, _, inside in eqn.params["padding_config"])
        if (_takes_apart(eqn) or spread) and "associative_scan" in function_names(eqn):
            yield eqn, Match(Pattern.TREE)


def attention_finder(known: Knows = lambda _: None) -> Finder:
    """A finder of `softmax(scale * q @ k.T + bias, mask) @ v`, at the last product.

    Args:
        known: What is known of inputs and constants of jaxprs.
    """

    def find(jaxpr: Jaxpr, made: Makers) -> Found:
        del made
        for found in find_attention(jaxpr, known):
            yield found.eqn, Match(Pattern.ATTENTION, attention=found)

    return find


FINDERS: Mapping[Pattern, Finder] = {
    Pattern.SOFTMAX: _softmax,
    Pattern.RECTIFIED: _rectified,
    Pattern.UNDONE_REDUCTION: _undone_reduction,
    Pattern.COMPARED_EXTREMUM: _compared_extremum,
    Pattern.TREE: _tree,
    Pattern.ATTENTION: attention_finder(),
}
