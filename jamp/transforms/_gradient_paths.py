"""Gradients followed back to what had float32 in its hands, through the operations that only move or add."""

from __future__ import annotations

from collections.abc import Container

from jamp._compat import Atom, Eqn, Jaxpr, Literal, called_jaxpr, open_jaxpr
from jamp._dtypes import FLOAT32, HALF_DTYPES
from jamp._primitives import Trait, has
from jamp.transforms.program.flow import num_elements

CALLS = Trait.CALLS | Trait.REMAT
_MOVES_OR_ADDS = Trait.ADDS | Trait.NEGATES | Trait.SELECTS | Trait.VIEW | Trait.SLICES | Trait.ASSEMBLES
# Sums, and what they are sums of.
_SUMS = Trait.MULTIPLIES | Trait.LINEAR


def is_half(x: object) -> bool:
    """Whether an array, or an abstract one, is of a half dtype."""
    return getattr(x, "dtype", None) in HALF_DTYPES


def is_real(x: object) -> bool:
    """Whether it is of one, or float32."""
    return is_half(x) or getattr(x, "dtype", None) == FLOAT32


def all_wanted(jaxpr: Jaxpr, wanted: set[Atom]) -> set[Atom]:
    """The variables that are wanted in float32, given those among the results.

    Gradients that arrive in float32 are of half ones too, unscaled: `jamp.value_and_grad` returns such.
    """
    wanted = set(wanted)
    for eqn in reversed(jaxpr.eqns):
        results = [v for v in eqn.outvars if v in wanted]
        if not results:
            continue
        if has(eqn, Trait.CONVERTS) or (not any(map(is_half, (v.aval for v in results))) and _unscales(eqn)):
            wanted |= {v for v in eqn.invars if not isinstance(v, Literal) and is_real(v.aval)}
        elif has(eqn, CALLS):
            wanted |= {v for v, is_wanted in zip(eqn.invars, wanted_of_call(eqn, wanted), strict=True) if is_wanted}
        elif is_polymorphic(eqn) or has(eqn, Trait.SCATTERS):
            wanted |= {v for v in eqn.invars if not isinstance(v, Literal) and is_half(v.aval)}
    return wanted


def wanted_of_call(eqn: Eqn, wanted: Container[Atom]) -> list[bool]:
    """Which operands of a call are wanted in float32, as what it moves or adds up to results that are."""
    inner = open_jaxpr(called_jaxpr(eqn.params))
    results = {v for v, out in zip(inner.outvars, eqn.outvars, strict=True) if out in wanted and is_real(out.aval)}
    inside = all_wanted(inner, {v for v in results if not isinstance(v, Literal)})
    pairs = zip(inner.invars, eqn.invars, strict=True)
    return [var in inside and not isinstance(atom, Literal) for var, atom in pairs]


def _moves_or_adds(eqn: Eqn) -> bool:
    return has(eqn, _MOVES_OR_ADDS) or (has(eqn, Trait.MOVES) and not has(eqn, Trait.TRAFFIC))


def is_polymorphic(eqn: Eqn) -> bool:
    """Whether an equation computes in the dtype of its operands, whichever."""
    return has(eqn, _SUMS) or _moves_or_adds(eqn)


def _unscales(eqn: Eqn) -> bool:
    """Whether an equation moves a gradient, adds it to others, or scales all of it by one number."""
    if has(eqn, Trait.MULTIPLIES | Trait.DIVIDES):
        return sum(num_elements(v.aval) > 1 for v in eqn.invars) <= 1
    if has(eqn, Trait.SUMS_AXES):  # Over axes of one element, as where a broadcast of `b[None, None]` is transposed.
        return num_elements(eqn.invars[0].aval) == num_elements(eqn.outvars[0].aval)
    return _moves_or_adds(eqn)
