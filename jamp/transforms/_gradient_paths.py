"""Gradients followed back to what had float32 in its hands, through the operations that only move or add."""

from __future__ import annotations

from collections.abc import Container

from jamp._compat import Atom, Eqn, Jaxpr, Literal, Var, called_jaxpr, open_jaxpr
from jamp._dtypes import FLOAT32, HALF_DTYPES
from jamp._primitives import SCALES, Trait, has
from jamp.transforms.program.flow import num_elements

CALLS = Trait.CALLS | Trait.REMAT
_MOVES_OR_ADDS = (
    Trait.ADDS | Trait.NEGATES | Trait.SELECTS | Trait.VIEW | Trait.SLICES | Trait.ASSEMBLES | Trait.EXTREMUM
)  # fmt: skip


def is_half(x: object) -> bool:
    """Whether an array, or an abstract one, is of a half dtype."""
    return getattr(x, "dtype", None) in HALF_DTYPES


def is_real(x: object) -> bool:
    """Whether it is of one, or float32."""
    return is_half(x) or getattr(x, "dtype", None) == FLOAT32


def all_wanted(jaxpr: Jaxpr, wanted: set[Atom]) -> set[Atom]:
    """The variables that are wanted in float32, given those among the results.

    Gradients that arrive in float32 are of half ones too, unscaled: `jamp.value_and_grad` returns such. The ways end at
    products and sums, which are float32 of operands that are as they were: they may be what the forward pass has made.
    """
    wanted, spread = set(wanted), {var for eqn in jaxpr.eqns if _spreads(eqn) for var in eqn.outvars}
    for eqn in reversed(jaxpr.eqns):
        if wanted.isdisjoint(eqn.outvars):
            continue
        if has(eqn, CALLS):
            handed = [v for v, is_wanted in zip(eqn.invars, wanted_of_call(eqn, wanted), strict=True) if is_wanted]
        elif has(eqn, Trait.CONVERTS) or _moves_or_adds(eqn):
            handed = eqn.invars
        elif has(eqn, SCALES):
            handed = _scaled(eqn, spread)
        else:  # What is added to.
            handed = eqn.invars[:1] if has(eqn, Trait.SCATTERS) else ()
        wanted |= {v for v in handed if not isinstance(v, Literal) and is_real(v.aval)}
    return wanted


def wanted_of_call(eqn: Eqn, wanted: Container[Atom]) -> list[bool]:
    """Which operands of a call are wanted in float32, as what it moves or adds up to results that are."""
    inner = open_jaxpr(called_jaxpr(eqn.params))
    results = {v for v, out in zip(inner.outvars, eqn.outvars, strict=True) if out in wanted and is_real(out.aval)}
    inside = all_wanted(inner, {v for v in results if not isinstance(v, Literal)})
    pairs = zip(inner.invars, eqn.invars, strict=True)
    return [var in inside and not isinstance(atom, Literal) for var, atom in pairs]


def _spreads(eqn: Eqn) -> bool:
    return has(eqn, Trait.GROWS) and num_elements(eqn.invars[0].aval) < num_elements(eqn.outvars[0].aval)


def _scaled(eqn: Eqn, spread: Container[Atom]) -> list[Var]:
    """What is scaled by numbers, one for all of it or one for each row; nothing where two arrays are multiplied."""
    size = num_elements(eqn.outvars[0].aval)
    variables = [v for v in eqn.invars if not isinstance(v, Literal) and num_elements(v.aval) == size]
    whole = [v for v in variables if v not in spread]
    return whole[:1] if len(whole) == 1 or size == 1 else []  # JAX writes cotangents first.


def is_polymorphic(eqn: Eqn) -> bool:
    """Whether an equation computes in the dtype of its operands, whichever."""
    return has(eqn, SCALES | Trait.LINEAR) or _moves_or_adds(eqn)


def _moves_or_adds(eqn: Eqn) -> bool:
    """Whether an equation moves a gradient, or adds it to others."""
    if has(eqn, Trait.SUMS_AXES):  # Over axes of one element, as where a broadcast of `b[None, None]` is transposed.
        return num_elements(eqn.invars[0].aval) == num_elements(eqn.outvars[0].aval)
    if has(eqn, Trait.TRAFFIC):
        return has(eqn, Trait.LINEAR | Trait.VIEW)
    return has(eqn, _MOVES_OR_ADDS | Trait.MOVES)
