"""Integers and flags that are data: made of what a program is given, or drawn, and of no position.

They have no state that would tell, and a float32 value that is made of them looks as one that the program writes: bits
of a board, pixels in 32 bits, signs that are drawn. A dense layer of these was float32, where it centres them first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jamp._compat import (
    Atom,
    ClosedJaxpr,
    Eqn,
    Literal,
    Var,
    called_jaxpr,
    jaxpr_consts,
    open_jaxpr,
    while_parts,
)
from jamp._primitives import Rule, Trait, rule_of, traits_of
from jamp.transforms.analysis.loops.continued import union
from jamp.transforms.analysis.reading.flat import is_while, loop_body, loop_counts

# What a value is made of: bits of a number, and none for numbers that the program writes.
_GIVEN = 1  # Of arguments.
_DRAWN = 2  # Of random bits.
_PLACES = 4  # Of indices, or of an array that the program closes over.
_Origins = tuple[int, ...]


class Samples:
    """What is known of integers and flags in all jaxprs of a program.

    Args:
        program: The outermost jaxpr.
    """

    def __init__(self, program: ClosedJaxpr) -> None:
        self._program = program
        self._found: dict[Var, int] = {}
        self._walked: dict[tuple[int, _Origins, bool], _Origins] = {}
        self._tries = False  # Whether a loop is walked for what its iterations hand on, which is not known yet.

    def __contains__(self, atom: Atom) -> bool:
        """Whether an integer or a flag is data, wherever its jaxpr is called."""
        if not self._walked:  # Most programs ask nothing.
            self._walk(self._program, (_GIVEN,) * len(open_jaxpr(self._program).invars))
        return not isinstance(atom, Literal) and self._found.get(atom, 0) & (_GIVEN | _DRAWN) != 0

    def _walk(self, closed: ClosedJaxpr, ins: _Origins) -> _Origins:
        jaxpr = open_jaxpr(closed)
        key = (id(jaxpr), ins, self._tries)
        if key in self._walked:
            return self._walked[key]
        env: dict[Var, int] = dict(zip(jaxpr.invars, ins, strict=True))
        env.update(zip(jaxpr.constvars, map(_of_constant, jaxpr_consts(closed)), strict=True))
        for eqn in jaxpr.eqns:
            operands = tuple([0 if isinstance(atom, Literal) else env[atom] for atom in eqn.invars])
            env.update(zip(eqn.outvars, self._of_equation(eqn, operands), strict=True))
        for var, origin in env.items() if not self._tries else ():
            self._found[var] = self._found.get(var, origin) & origin
        outs = tuple([0 if isinstance(atom, Literal) else env[atom] for atom in jaxpr.outvars])
        self._walked[key] = outs
        return outs

    def _of_equation(self, eqn: Eqn, ins: _Origins) -> Sequence[int]:
        traits = traits_of(eqn)
        if traits & Trait.LOOPS:
            return self._of_loop(eqn, ins)
        if traits & Trait.BRANCHES:
            return _either([self._walk(branch, ins[1:]) for branch in eqn.params["branches"]])
        if rule_of(eqn) is Rule.RECURSE:
            return self._walk(called_jaxpr(eqn.params), ins)
        made_of = union(ins)
        if traits & Trait.DRAWS:
            made_of = _DRAWN
        elif not eqn.invars and any(getattr(var.aval, "shape", ()) for var in eqn.outvars):
            made_of = _PLACES
        elif traits & Trait.BOTH and made_of & _GIVEN:
            made_of &= ~_PLACES  # Bits of what is given, such as `x & (1 << arange(8))`.
        elif traits & Trait.COMPARES and not made_of & _DRAWN and (made_of & _PLACES or 0 not in ins):
            made_of = 0  # Which rows belong together, or lie within a length: a mask, which the program makes.
        return (made_of,) * len(eqn.outvars)

    def _of_loop(self, eqn: Eqn, ins: _Origins) -> Sequence[int]:
        """Of a loop, whose carries are made of what any iteration makes them of."""
        body, given = loop_body(eqn, ins)
        consts, count = loop_counts(eqn)
        carries = slice(consts, consts + count)
        known, self._tries = self._tries, True
        before: Sequence[int] = ()
        while given != before:
            before, outs = given, self._walk(body, tuple(given))
            carried = _either([given[carries], outs[:count]])
            given = (*given[:consts], *carried, *given[carries.stop :])
        self._tries = known
        outs = self._walk(body, tuple(given))
        if is_while(eqn):
            parts = while_parts(eqn.params)
            self._walk(parts.cond, (*ins[: parts.cond_consts], *given[consts:]))
        return (*given[carries], *outs[carries.stop - consts :])


def _either(cases: Sequence[Sequence[int]]) -> _Origins:
    """What values are made of that are those of one of several cases."""
    return tuple(map(union, zip(*cases, strict=True)))


def _of_constant(value: Any) -> int:
    """What is closed over: arrays of floating numbers may be weights, and so may those of 8 bits."""
    if value is None or isinstance(value, Tracer):
        return _GIVEN
    if np.size(value) <= 1:
        return 0
    dtype = jax.dtypes.result_type(value)
    in_8_bits = jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize == 1
    return _GIVEN if in_8_bits or jnp.issubdtype(dtype, jnp.inexact) else _PLACES
