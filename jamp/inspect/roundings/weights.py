"""Weights and data that a function closes over: the constants of its program that products read."""

from __future__ import annotations

from jamp._compat import ClosedJaxpr, Literal, inner_jaxprs, open_jaxpr
from jamp._primitives import MOVED, PRODUCTS, has
from jamp.inspect.roundings.steps import Steps, Value


def weights(steps: Steps) -> set[int]:
    """The constants that products read, moved or cast."""
    origin: dict[Value, int] = {i: i for i in steps.consts}
    found: set[int] = set()
    for step in steps.steps:
        read = {origin[i] for i in step.ins if not isinstance(i, Literal) and i in origin}
        if has(step.eqn, PRODUCTS) or any(map(_multiplies, inner_jaxprs(step.eqn))):
            found |= read
        elif has(step.eqn, MOVED) and read:
            origin |= dict.fromkeys(step.outs, min(read))
    return found


def _multiplies(jaxpr: ClosedJaxpr) -> bool:
    equations = open_jaxpr(jaxpr).eqns
    return any(has(eqn, PRODUCTS) or any(map(_multiplies, inner_jaxprs(eqn))) for eqn in equations)
