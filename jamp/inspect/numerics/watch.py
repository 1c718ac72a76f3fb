"""Runs a program as it was traced, and looks whether an infinity or a NaN shows up where it would be seen last.

What is not finite goes on into what is computed of it. So it is enough to look at results, and at what is asked
whether it is finite, since a train step with a loss scale drops it there. Only if something is seen does the program
run again, in a branch, operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jamp._compat import (
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
from jamp._primitives import PRODUCTS, Trait, has
from jamp.inspect._operations import Place
from jamp.inspect.numerics.found import (
    Axes,
    Found,
    counts_of,
    differing,
    either,
    is_bad,
    joined,
    magnitude,
    nothing,
    without,
)
from jamp.inspect.numerics.rebuilt import rebuilt
from jamp.inspect.numerics.search import Search
from jamp.inspect.numerics.sites import (
    Chosen,
    Site,
    communicates,
    entered,
    forgets,
    forgotten,
    is_floating,
    makes,
    sites,
)

# Is given the sites, what was found, the counts of the arguments, and what was watched.
OnFound = Callable[[Sequence[Site], Found, jax.Array, dict[str, jax.Array]], None]


class Watch(NamedTuple):
    """How to watch a program.

    Attributes:
        chosen: The places that count.
        on_found: Called in the branch in which something was seen that was not seen further inside.
        measures: Whether magnitudes are wanted.
        results: Whether to watch the results of jaxprs inside, because what they are in cannot run again.
        listed: The sites of the whole program; None inside of it.
        iteration: That of the outermost loop around it; None outside of loops.
    """

    chosen: Chosen
    on_found: OnFound | None = None
    measures: bool = False
    results: bool = False
    listed: tuple[Site, ...] | None = None
    iteration: jax.Array | None = None

    def top(
        self, jaxpr: Jaxpr | ClosedJaxpr, args: Sequence[jax.Array], listed: tuple[Site, ...]
    ) -> tuple[list[jax.Array], Found, jax.Array, jax.Array]:
        """Runs a whole program.

        Returns:
            Its results; what was found; how many of the watched values are not finite, int32[]; and, if anything was
            found, the infinities and NaN of each floating argument, int32[arguments, 2].
        """
        outs, found, reached = self._replace(results=True, listed=listed)._run(jaxpr, args, Place(), ())
        seen = (reached > 0) | jnp.any(found.counts > 0)
        given = lax.cond(seen, arguments_of, lambda args: jnp.zeros_like(arguments_of(args)), _floating(args))
        return outs, found, reached, given

    def in_loop(self, iteration: jax.Array) -> Watch:
        """The same for the body of a loop, in one iteration of it."""
        return self if self.iteration is not None else self._replace(iteration=iteration)

    def __call__(
        self, jaxpr: Jaxpr | ClosedJaxpr, args: Sequence[jax.Array], place: Place, axes: Axes
    ) -> tuple[list[jax.Array], Found]:
        """Runs a jaxpr inside of the program; its results are watched from outside."""
        outs, found, _ = self._replace(listed=None)._run(jaxpr, args, place, axes)
        return outs, found

    def _run(
        self, jaxpr: Jaxpr | ClosedJaxpr, args: Sequence[jax.Array], place: Place, axes: Axes
    ) -> tuple[list[jax.Array], Found, jax.Array]:
        inner = open_jaxpr(jaxpr)
        env = dict(zip([*inner.invars, *inner.constvars], [*args, *jaxpr_consts(jaxpr)], strict=True))
        parts: list[Found] = []
        watched: dict[str, jax.Array] = {}
        known: dict[Var, jax.Array] = {}
        readers = _scopes_of_readers(inner, place)
        for eqn in inner.eqns:
            here = place.enter(eqn)
            values = [atom.val if isinstance(atom, Literal) else env[atom] for atom in eqn.invars]
            bodies = entered(eqn)
            numbers = [sum(1 for _ in sites(body, self.chosen, here)) for body in bodies]
            once = has_side_effects(eqn) or (bool(axes) and communicates(eqn))
            with equation_context(eqn):
                if self._enters(eqn, bodies, sum(numbers), once):
                    outs, found = rebuilt(eqn, values, self._replace(results=once), here, axes, numbers)
                else:
                    outs = bind(eqn, values)
                    found = nothing(sum(numbers) if bodies else int(makes(eqn) and self.chosen(here)))
                    if found.first.size == 1 and self._measured(eqn, here, readers):
                        size = magnitude(lax.stop_gradient(outs[0]))
                        found = found._replace(largest=size[None])
            parts.append(found)
            env |= zip(eqn.outvars, outs, strict=True)
            watched |= {f"{len(watched)} {_name(here)}": values[i] for i in forgotten(eqn)}
            if once:
                known |= zip(eqn.outvars, outs, strict=True)
        outs = [atom.val if isinstance(atom, Literal) else env[atom] for atom in inner.outvars]
        if self.results:
            watched |= {f"result {i}": outs[i] for i, atom in enumerate(inner.outvars) if is_floating(atom)}
        found, reached = joined(parts), jnp.zeros((), jnp.int32)
        if watched and (self.results or found.first.size):
            again, reached = self._again(jaxpr, args, found.differing(axes), known, watched, place, axes)
            found = either(found.differing(axes), again)
        return outs, found, reached

    def _again(
        self, jaxpr: Jaxpr | ClosedJaxpr, args: Sequence[jax.Array], before: Found, known: dict[Var, jax.Array],
        watched: dict[str, jax.Array], place: Place, axes: Axes,
    ) -> tuple[Found, jax.Array]:  # fmt: skip
        """The second look, if the first one has seen something."""
        listed = tuple(sites(jaxpr, self.chosen, place)) if self.listed is None else self.listed
        args, before, known, watched = lax.stop_gradient((list(args), before, known, watched))

        def look(
            args: list[jax.Array], before: Found, known: list[jax.Array], watched: dict[str, jax.Array]
        ) -> tuple[Found, jax.Array]:
            _, found = Search(self.chosen)(jaxpr, args, place, axes, dict(zip(variables, known, strict=True)))
            if self.on_found is not None:
                # Inside of the program its arguments are not at hand: to keep them would cost memory in a loop.
                given = arguments_of(_floating(args if self.listed is not None else []))
                self.on_found(listed, self._at_iteration(without(found, before)), given, watched)
            total = sum((counts_of(x).sum(dtype=jnp.int32) for x in watched.values()), jnp.zeros((), jnp.int32))
            return found.differing(axes), differing(total, axes)

        def skip(*_: object) -> tuple[Found, jax.Array]:
            return nothing(len(listed)).differing(axes), differing(jnp.zeros((), jnp.int32), axes)

        variables = list(known)
        bad = jnp.stack([differing(is_bad(x), axes) for x in watched.values()]).any()
        return lax.cond(bad, look, skip, args, before, [known[v] for v in variables], watched)

    def _at_iteration(self, found: Found) -> Found:
        """What was found, with the iteration of the outermost loop around all of it."""
        if self.iteration is None:
            return found
        return found._replace(first=jnp.where(found.counts.sum(1) > 0, self.iteration, -1))

    def _enters(self, eqn: Eqn, bodies: Sequence[ClosedJaxpr], number: int, once: bool) -> bool:
        """Whether what is inside of an equation is watched by itself, because it would not be seen from outside."""
        if not number or eqn.primitive.name.startswith("custom_"):
            return False
        return self.measures or (not has(eqn, Trait.REMAT) and (once or any(map(forgets, bodies))))

    def _measured(self, eqn: Eqn, place: Place, readers: dict[Var, set[str]]) -> bool:
        """Whether the magnitude of a result is wanted: of products, and of what leaves its scope."""
        bodies = entered(eqn)
        if not self.measures or (bodies and not eqn.primitive.name.startswith("custom_")):
            return False
        # With a rule of its own, as one whose result is float32 has, a product is not looked into.
        product = has(eqn, PRODUCTS) or any(has(inner, PRODUCTS) for body in bodies for inner in open_jaxpr(body).eqns)
        return product or any(scope != place.scope for scope in readers.get(eqn.outvars[0], {""}))


def arguments_of(floating: Sequence[jax.Array]) -> jax.Array:
    """Infinities and NaN of each argument, int32[arguments, 2]."""
    return jnp.stack([counts_of(x) for x in floating]) if floating else jnp.zeros((0, 2), jnp.int32)


def _floating(args: Sequence[jax.Array]) -> list[jax.Array]:
    return [lax.stop_gradient(x) for x in args if jnp.issubdtype(x.dtype, jnp.inexact)]


def _scopes_of_readers(jaxpr: Jaxpr, place: Place) -> dict[Var, set[str]]:
    found: dict[Var, set[str]] = {}
    for eqn in jaxpr.eqns:
        scope = place.enter(eqn).scope
        for atom in eqn.invars:
            if not isinstance(atom, Literal):
                found.setdefault(atom, set()).add(scope)
    for atom in jaxpr.outvars:
        if not isinstance(atom, Literal):
            found.setdefault(atom, set()).add("result of the function")
    return found


def _name(place: Place) -> str:
    return " ".join(filter(None, [place.scope, place.line]))
