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
from jamp.inspect._operations import Place
from jamp.inspect.numerics.found import Axes, Found, counts_of, joined, nothing
from jamp.inspect.numerics.rebuilt import rebuilt
from jamp.inspect.numerics.sites import Chosen, entered, is_floating, makes, sites


class Search(NamedTuple):
    """Runs jaxprs operation by operation, and counts what each of the chosen ones makes of other numbers."""

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
        inner, known = open_jaxpr(jaxpr), known or {}
        env = dict(zip([*inner.invars, *inner.constvars], [*args, *jaxpr_consts(jaxpr)], strict=True))
        counts: dict[Var, jax.Array] = {}

        def read(atom: Atom) -> jax.Array:
            return atom.val if isinstance(atom, Literal) else env[atom]

        def count(atom: Atom) -> jax.Array:
            """Infinities and NaN of a variable, counted once."""
            if isinstance(atom, Literal):
                return counts_of(atom.val)
            if atom not in counts:
                counts[atom] = counts_of(env[atom])
            return counts[atom]

        parts = []
        for eqn in inner.eqns:
            here, values = place.enter(eqn), [*map(read, eqn.invars)]
            bodies = entered(eqn)
            numbers = [sum(1 for _ in sites(body, self.chosen, here)) for body in bodies]
            given = has_side_effects(eqn) or (bool(known) and all(var in known for var in eqn.outvars))
            if bodies and sum(numbers) and not given:
                with equation_context(eqn):
                    outs, found = rebuilt(eqn, values, self, here, axes, numbers)
                parts.append(found)
                env |= zip(eqn.outvars, outs, strict=True)
                continue
            with equation_context(eqn):
                env |= zip(eqn.outvars, [known[v] for v in eqn.outvars] if given else bind(eqn, values), strict=True)
            if bodies:
                parts.append(nothing(sum(numbers)))
            elif has(eqn, Trait.VIEW) and isinstance(eqn.invars[0], Literal) and np.isfinite(eqn.invars[0].val):
                counts[eqn.outvars[0]] = jnp.zeros(2, jnp.int32)  # Or XLA counts them while it compiles, for seconds.
            elif has(eqn, Trait.VIEW) and not isinstance(eqn.invars[0], Literal) and eqn.invars[0] in counts:
                counts[eqn.outvars[0]] = counts[eqn.invars[0]]
            elif makes(eqn) and self.chosen(here):
                made = _made(*([count(a) for a in atoms if is_floating(a)] for atoms in (eqn.invars, eqn.outvars)))
                if not axes:  # A barrier would make its results differ along the same axes.
                    # What comes later waits for the counts, so that results do not all stay in memory until the end.
                    outs, made = lax.optimization_barrier(([env[var] for var in eqn.outvars], made))
                    env |= zip(eqn.outvars, outs, strict=True)
                parts.append(made)
        return [read(atom) for atom in inner.outvars], joined(parts)


def _made(before: list[jax.Array], after: list[jax.Array]) -> Found:
    """Of one site: its results if they are worse than its operands, NaN being worse than infinities."""

    def severity(counts: list[jax.Array]) -> jax.Array:
        total = sum(counts, jnp.zeros(2, jnp.int32))
        return jnp.where(total[1] > 0, 2, jnp.where(total[0] > 0, 1, 0))

    worse = severity(after) > severity(before)
    made = jnp.where(worse, sum(after, jnp.zeros(2, jnp.int32)), 0)
    of_infinities = (worse & (severity(before) == 1)).astype(jnp.int32)
    return nothing(1)._replace(counts=made[None], of_infinities=of_infinities[None])
