"""The second look at a program in which an infinity or a NaN was seen: which operations made them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jamp._compat import (
    Atom,
    ClosedJaxpr,
    Eqn,
    Jaxpr,
    Literal,
    Var,
    bind,
    equation_context,
    has_side_effects,
    jaxpr_consts,
    open_jaxpr,
)
from jamp._primitives import Trait, has
from jamp.inspect._operations import CALLS, Place
from jamp.inspect.numerics.found import Axes, Found, counts_of, joined, nothing
from jamp.inspect.numerics.rebuilt import rebuilt
from jamp.inspect.numerics.sites import Chosen, entered, forgets, forgotten, is_floating, makes, sites


class Search(NamedTuple):
    """Runs jaxprs operation by operation, and counts what each of the chosen ones makes of other numbers.

    What does not reach a result of its jaxpr, nor what asks about it, does not count: the other side of a `where`.
    """

    chosen: Chosen

    def in_loop(self, iteration: jax.Array) -> Search:
        """The same: what was found in which iteration, the loop around it notes."""
        del iteration
        return self

    def __call__(
        self,
        jaxpr: Jaxpr | ClosedJaxpr,
        args: Sequence[jax.Array],
        place: Place = Place(),  # noqa: B008 (frozen)
        axes: Axes = (),
        known: Mapping[Var, jax.Array] | None = None,
    ) -> tuple[list[jax.Array], Found]:
        """Runs a jaxpr. Variables in `known` are not computed again."""
        outs, found, _ = self._run(jaxpr, args, place, axes, known or {})
        return outs, found

    def _run(
        self,
        jaxpr: Jaxpr | ClosedJaxpr,
        args: Sequence[jax.Array],
        place: Place,
        axes: Axes,
        known: Mapping[Var, jax.Array],
    ) -> tuple[list[jax.Array], Found, list[jax.Array]]:
        """The results of a jaxpr, what was found in it, and which of its inputs hand on what is not finite, bool[]."""
        inner = open_jaxpr(jaxpr)
        values = _Values(dict(zip([*inner.invars, *inner.constvars], [*args, *jaxpr_consts(jaxpr)], strict=True)))
        parts: list[Found] = []
        inside: list[Sequence[jax.Array]] = []
        for eqn in inner.eqns:
            here, operands = place.enter(eqn), [*map(values.read, eqn.invars)]
            bodies = entered(eqn)
            numbers = [sum(1 for _ in sites(body, self.chosen, here)) for body in bodies]
            given = has_side_effects(eqn) or (bool(known) and all(var in known for var in eqn.outvars))
            found, handed_on = nothing(sum(numbers)), ()
            with equation_context(eqn):
                if given:
                    outs = [known[var] for var in eqn.outvars]
                elif bodies and eqn.primitive.name in CALLS:
                    outs, found, handed_on = self._run(bodies[0], operands, here, axes, {})
                elif sum(numbers):
                    outs, found = rebuilt(eqn, operands, self, here, axes, numbers)
                else:
                    outs = bind(eqn, operands)
            values.add(eqn, outs, alone=bool(axes))
            parts.append(_made(eqn, values) if not bodies and makes(eqn) and self.chosen(here) else found)
            inside.append(handed_on)
        reach, of_inputs = _reaching(inner, values, inside)
        found = [_if(seen, part) for seen, part in zip(reach, parts, strict=True)]
        return [values.read(atom) for atom in inner.outvars], joined(found), of_inputs


class _Values:
    """The values of a jaxpr, and how many infinities and NaN each of them has.

    Args:
        known: Those of its inputs and constants.
    """

    def __init__(self, known: dict[Var, jax.Array]) -> None:
        self._known = known
        self._counts: dict[Var, jax.Array] = {}

    def add(self, eqn: Eqn, outs: Sequence[jax.Array], *, alone: bool) -> None:
        """Adds the results of an equation; `alone` leaves out what makes all that comes later wait for their counts."""
        self._known |= zip(eqn.outvars, outs, strict=True)
        floating = [var for var in eqn.outvars if is_floating(var)]
        if has(eqn, Trait.VIEW) and floating:  # Of a literal XLA would count them while it compiles, for seconds.
            self._counts[floating[0]] = self.counts(eqn.invars[0])
            return
        counts = [counts_of(self._known[var]) for var in floating]
        if not alone and floating:  # A barrier would make results differ along the same axes.
            # So results do not all stay in memory until the end.
            outs, counts = lax.optimization_barrier(([self._known[var] for var in eqn.outvars], counts))
            self._known |= zip(eqn.outvars, outs, strict=True)
        self._counts |= zip(floating, counts, strict=True)

    def read(self, atom: Atom) -> jax.Array:
        """A value."""
        return atom.val if isinstance(atom, Literal) else self._known[atom]

    def counts(self, atom: Atom) -> jax.Array:
        """Infinities and NaN of a value, int32[2]."""
        if isinstance(atom, Literal):
            return jnp.zeros(2, jnp.int32) if np.isfinite(atom.val).all() else counts_of(atom.val)
        if atom not in self._counts:
            self._counts[atom] = counts_of(self._known[atom])
        return self._counts[atom]

    def are_bad(self, atom: Atom) -> jax.Array:
        """Whether any element of a value is not finite, bool[]."""
        return self.counts(atom).sum() > 0


def _made(eqn: Eqn, values: _Values) -> Found:
    """Of one site: its results if they are worse than its operands, NaN being worse than infinities."""
    before, after = ([values.counts(a) for a in atoms if is_floating(a)] for atoms in (eqn.invars, eqn.outvars))

    def severity(counts: list[jax.Array]) -> jax.Array:
        total = sum(counts, jnp.zeros(2, jnp.int32))
        return jnp.where(total[1] > 0, 2, jnp.where(total[0] > 0, 1, 0))

    worse = severity(after) > severity(before)
    made = jnp.where(worse, sum(after, jnp.zeros(2, jnp.int32)), 0)
    of_infinities = (worse & (severity(before) == 1)).astype(jnp.int32)
    return nothing(1)._replace(counts=made[None], of_infinities=of_infinities[None])


def _reaching(
    jaxpr: Jaxpr, values: _Values, inside: Sequence[Sequence[jax.Array]]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """What is in a result of a jaxpr, or was asked about.

    Args:
        jaxpr: The jaxpr.
        values: Its values.
        inside: By equation, which of its operands hand on what is not finite; nothing where that is not known.

    Returns:
        By equation, whether what it makes is, and by input, whether anything that is not finite is, each bool[].
    """
    seen: dict[Atom, jax.Array] = {}

    def see(atom: Atom, where: jax.Array) -> None:
        seen[atom] = seen[atom] | where if atom in seen else where

    for atom in filter(_is_variable, jaxpr.outvars):
        see(atom, values.are_bad(atom))
    nowhere: jax.Array = jnp.bool_(False)
    reach: list[jax.Array] = []
    for eqn, handed_on in zip(reversed(jaxpr.eqns), reversed(inside), strict=True):
        for index in forgotten(eqn):
            see(eqn.invars[index], values.are_bad(eqn.invars[index]))
        here = functools.reduce(jnp.logical_or, (seen[var] for var in eqn.outvars if var in seen), nowhere)
        # What was asked about inside of an equation counts, whatever its results are.
        asked = any(map(forgets, entered(eqn)))
        for index, atom in enumerate(eqn.invars):
            if _is_variable(atom):
                goes_on = handed_on[index] if handed_on else _is_chosen(eqn, index, values)
                see(atom, goes_on if asked else here & goes_on)
        reach.append(jnp.bool_(True) if asked else here)
    return reach[::-1], [seen.get(var, nowhere) for var in jaxpr.invars]


def _is_chosen(eqn: Eqn, index: int, values: _Values) -> jax.Array:
    """Whether anything of an operand is not finite, bool[]: of a choice, where it is chosen."""
    if not has(eqn, Trait.SELECTS):
        return values.are_bad(eqn.invars[index])
    which = jnp.asarray(values.read(eqn.invars[0])).astype(jnp.int32)
    return jnp.any((which == index - 1) & ~jnp.isfinite(values.read(eqn.invars[index])))


def _is_variable(atom: Atom) -> bool:
    return not isinstance(atom, Literal) and is_floating(atom)


def _if(condition: jax.Array, found: Found) -> Found:
    counts, of_infinities = (jnp.where(condition, x, 0) for x in (found.counts, found.of_infinities))
    return found._replace(counts=counts, first=jnp.where(condition, found.first, -1), of_infinities=of_infinities)
