"""Where what is not finite goes: into a result, to what asks about it, or nowhere, because a choice discards it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jamp._compat import Atom, Jaxpr, Literal
from jamp.inspect.numerics.found import Axes, differing
from jamp.inspect.numerics.sites import entered, forgets, forgotten, is_floating

_FEW = 6  # Gates.


class Ways(NamedTuple):
    """How what is not finite gets to what is seen: by gates, which let it through or not.

    There are few gates, one for each case of a choice. All between them is known before the program runs.

    Attributes:
        flags: Whether a gate lets anything through, or what stands at an end is not finite, bool[gates].
        behind: The gates or ends that lie behind a gate, bool[gates, gates]; none behind an end.
        of_eqns: Those behind each equation, bool[eqns, gates].
        of_inputs: Those behind each input, bool[inputs, gates].
    """

    flags: Sequence[jax.Array]
    behind: np.ndarray
    of_eqns: np.ndarray
    of_inputs: np.ndarray

    @property
    def discards(self) -> bool:
        """Whether anything may be discarded on the way."""
        return bool(self.behind.any())

    def reached(self, of: np.ndarray, axes: Axes) -> jax.Array:
        """Whether one of some gates is open and something is seen behind it, for each row of bool[rows, gates]."""
        if not self.flags:
            return jnp.zeros(len(of), bool)
        if len(self.flags) <= _FEW:  # As those of one `jnp.where`, which is a call with a choice in it.
            return (jnp.asarray(of) & self._written_out()).any(1)
        flags, behind = jnp.stack(self.flags), jnp.asarray(self.behind)
        is_end = jnp.asarray(~self.behind.any(1))

        def step(gate: jax.Array, seen: jax.Array) -> jax.Array:
            return seen.at[gate].set(flags[gate] & (is_end[gate] | (behind[gate] & seen).any()))

        # XLA compiles one step. Written out, many would take it minutes.
        seen = lax.fori_loop(0, len(flags), step, differing(flags, axes)) if self.discards else flags
        return (jnp.asarray(of) & seen).any(1)

    def _written_out(self) -> jax.Array:
        seen: list[jax.Array] = []
        for flag, behind in zip(self.flags, self.behind, strict=True):
            opened = [seen[gate] for gate in np.flatnonzero(behind)]
            seen.append(flag & functools.reduce(jnp.logical_or, opened) if opened else flag)
        return jnp.stack(seen)


def find_ways(jaxpr: Jaxpr, are_bad: Callable[[Atom], jax.Array], inside: Sequence[jax.Array | None]) -> Ways:
    """The ways to the results of a jaxpr, and to what asks about its values.

    Args:
        jaxpr: The jaxpr.
        are_bad: Tells whether any element of a value is not finite, bool[].
        inside: By equation, of which operands anything may reach its results, bool[operands]; None where of all.
    """
    gates: list[tuple[jax.Array, int]] = []  # And those behind each, as bits.
    seen: dict[Atom, int] = {}

    def gate(atom: Atom, flag: jax.Array, behind: int = 0) -> None:
        seen[atom] = seen.get(atom, 0) | 1 << len(gates)
        gates.append((flag, behind))

    for atom in dict.fromkeys(filter(_is_variable, jaxpr.outvars)):
        gate(atom, are_bad(atom))
    of_eqns: list[int] = []
    for eqn, handed_on in zip(reversed(jaxpr.eqns), reversed(inside), strict=True):
        for index in forgotten(eqn):
            gate(eqn.invars[index], are_bad(eqn.invars[index]))
        here = 0
        for var in eqn.outvars:
            here |= seen.get(var, 0)
        if any(map(forgets, entered(eqn))):  # What is asked about inside counts, whatever the results are.
            here |= 1 << len(gates)
            gates.append((jnp.bool_(True), 0))
        of_eqns.append(here)
        for index, atom in enumerate(eqn.invars):
            if not _is_variable(atom) or not here:
                continue
            if handed_on is None:
                seen[atom] = seen.get(atom, 0) | here
            else:
                gate(atom, handed_on[index], here)

    def rows(sets: Sequence[int]) -> np.ndarray:
        bits = [each >> number & 1 for each in sets for number in range(len(gates))]
        return np.array(bits, bool).reshape(len(sets), len(gates))

    of_inputs = [seen.get(var, 0) for var in jaxpr.invars]
    flags = [flag for flag, _ in gates]
    return Ways(flags, rows([behind for _, behind in gates]), rows(of_eqns[::-1]), rows(of_inputs))


def _is_variable(atom: Atom) -> bool:
    return not isinstance(atom, Literal) and is_floating(atom)
