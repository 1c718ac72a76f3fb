"""What the rules of custom functions close over: values of the program that are no operands of any equation.

JAX runs a rule when the function is differentiated, transposed or mapped, which is when the program is emitted. What
the rule then reads of the program is a tracer of a trace that is over, and stands for a variable whose value emission
knows.
"""

from __future__ import annotations

from collections.abc import Iterator

from jamp._compat import ClosedJaxpr, Eqn, Var, closed_over, inner_jaxprs, open_jaxpr
from jamp._primitives import Trait, has

HAS_RULES = Trait.CUSTOM_JVP | Trait.CUSTOM_VJP | Trait.CUSTOM_BATCHING | Trait.CUSTOM_TRANSPOSE


def captured(jaxpr: ClosedJaxpr) -> tuple[Var, ...]:
    """Variables of a jaxpr, its own and not those of jaxprs inside, whose values some rule closes over."""
    inner = open_jaxpr(jaxpr)
    own = {*inner.invars, *inner.constvars, *(var for eqn in inner.eqns for var in eqn.outvars)}
    return tuple(dict.fromkeys(var for var in closed_over([*_with_rules(jaxpr)]) if var in own))


def _with_rules(jaxpr: ClosedJaxpr) -> Iterator[Eqn]:
    for eqn in open_jaxpr(jaxpr).eqns:
        if has(eqn, HAS_RULES):
            yield eqn
        for inside in inner_jaxprs(eqn):
            yield from _with_rules(inside)
