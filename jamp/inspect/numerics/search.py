"""The second look at a program in which an infinity or a NaN was seen: which operations made them."""

from __future__ import annotations

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
    varying_axes,
)
from jamp._primitives import Trait, has
from jamp.inspect._operations import CALLS, Place
from jamp.inspect.numerics.found import Axes, Found, counts_of, differing, joined, nothing
from jamp.inspect.numerics.rebuilt import rebuilt
from jamp.inspect.numerics.sites import Chosen, entered, is_floating, makes, sites
from jamp.inspect.numerics.ways import find_ways


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
    ) -> tuple[list[jax.Array], Found, jax.Array | None]:
        """The results of a jaxpr, what was found in it, and of which inputs anything may reach these, bool[inputs].

        None if it discards nothing.
        """
        inner = open_jaxpr(jaxpr)
        values = _Values(dict(zip([*inner.invars, *inner.constvars], [*args, *jaxpr_consts(jaxpr)], strict=True)))
        parts: list[Found] = []
        inside: list[jax.Array | None] = []
        for eqn in inner.eqns:
            here, operands = place.enter(eqn), [*map(values.read, eqn.invars)]
            bodies = entered(eqn)
            numbers = [sum(1 for _ in sites(body, self.chosen, here)) for body in bodies]
            given = has_side_effects(eqn) or (bool(known) and all(var in known for var in eqn.outvars))
            found, handed_on = nothing(sum(numbers)), None
            with equation_context(eqn):
                if given:
                    outs = [known[var] for var in eqn.outvars]
                elif bodies and eqn.primitive.name in CALLS:
                    outs, found, handed_on = self._run(bodies[0], operands, here, axes, {})
                elif sum(numbers):
                    outs, found = rebuilt(eqn, operands, self, here, axes, numbers)
                else:
                    outs = bind(eqn, operands)
            if has(eqn, Trait.SELECTS) and is_floating(eqn.outvars[0]):
                outs, handed_on = _chosen(operands, outs, alone=bool(axes))
            counted = not bodies and makes(eqn) and self.chosen(here)
            values.add(eqn, outs, counted=counted, alone=bool(axes))
            parts.append(_made(eqn, values) if counted else found)
            inside.append(handed_on)
        ways = find_ways(inner, values.are_bad, inside)
        of_sites = np.repeat(ways.of_eqns, [len(part.first) for part in parts], axis=0)
        found = _where(ways.reached(of_sites, axes), joined(parts))
        of_inputs = ways.reached(ways.of_inputs, axes) if ways.discards else None
        return [values.read(atom) for atom in inner.outvars], found, of_inputs


class _Values:
    """The values of a jaxpr, and how many infinities and NaN each of them has.

    Args:
        known: Those of its inputs and constants.
    """

    def __init__(self, known: dict[Var, jax.Array]) -> None:
        self._known = known
        self._counts: dict[Var, jax.Array] = {}

    def add(self, eqn: Eqn, outs: Sequence[jax.Array], *, counted: bool, alone: bool) -> None:
        """Adds the results of an equation.

        Args:
            eqn: The equation.
            outs: Its results.
            counted: Whether it is one of those to be looked at. Of all others XLA would have to compile the counts.
            alone: Whether what comes later shall not wait for the counts.
        """
        self._known |= zip(eqn.outvars, outs, strict=True)
        floating = [var for var in eqn.outvars if is_floating(var)]
        if has(eqn, Trait.VIEW) and floating and self.are_counted(eqn.invars[0]):
            self._counts[floating[0]] = self.counts(eqn.invars[0])
        elif counted:
            counts = [counts_of(self._known[var]) for var in floating]
            if not alone:  # A barrier would make results differ along the same axes.
                # So results do not all stay in memory until the end.
                outs, counts = lax.optimization_barrier((list(outs), counts))
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

    def are_counted(self, atom: Atom) -> bool:
        """Whether these are known."""
        return bool(np.isfinite(atom.val).all()) if isinstance(atom, Literal) else atom in self._counts

    def are_bad(self, atom: Atom) -> jax.Array:
        """Whether any element of a value is not finite, bool[]."""
        return self.counts(atom).sum() > 0


def _chosen(
    operands: Sequence[jax.Array], outs: Sequence[jax.Array], *, alone: bool
) -> tuple[Sequence[jax.Array], jax.Array]:
    """The results of a choice, and of which operands it takes anything that is not finite, bool[operands]."""
    case = jnp.int32(1) << (1 + jnp.asarray(operands[0]).astype(jnp.int32))
    bits = jnp.where(jnp.isfinite(outs[0]), 0, case)
    zero = differing(jnp.int32(0), tuple(varying_axes(bits)))
    taken = lax.reduce(bits, zero, lax.bitwise_or, range(bits.ndim)) >> jnp.arange(len(operands)) & 1 == 1
    return (outs, taken) if alone else lax.optimization_barrier((list(outs), taken))  # Or cases would stay in memory.


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


def _where(condition: jax.Array, found: Found) -> Found:
    counts, of_infinities = jnp.where(condition[:, None], found.counts, 0), jnp.where(condition, found.of_infinities, 0)
    return found._replace(counts=counts, first=jnp.where(condition, found.first, -1), of_infinities=of_infinities)
