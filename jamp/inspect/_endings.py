"""Loops that end when computed floating values say so: which are kept as they are written for that, and which are half.

What decides when a loop ends is asked of the pass that the planner asks (`analysis.demand`), of the program as if no
level, rule or mark put any of it in half. What became of that is read off the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from jamp._compat import open_jaxpr, scope_path, while_parts
from jamp._dtypes import Pair
from jamp._primitives import PRODUCTS, Rule, Trait, has, rule_of
from jamp.inspect._as_traced import inner_plans
from jamp.policy import get_policy
from jamp.transforms._labels import rule_label
from jamp.transforms.analysis.demand import Demand
from jamp.transforms.analysis.reading.flat import is_while
from jamp.transforms.analysis.regimes import CONVERGES, Regime, Regimes, Ruled
from jamp.transforms.program.flow import Flow
from jamp.transforms.program.heuristics import DEFAULT
from jamp.transforms.program.plan import Plan, Step
from jamp.transforms.program.want import Want, Wants

# The rules of loops that end when floating values say so: with products that are as written for that, and in half.
KEPT = "iterates to convergence"
IN_HALF = "decided in half"


class _Unruled(Regimes):
    """A level that is careful about what decides, and that nothing overrules."""

    def __init__(self) -> None:
        super().__init__(get_policy("O2:bfloat16"))

    def enter(self, eqn: Any, regime: Regime, scope: str) -> Ruled:
        """The regime of an equation."""
        return Ruled(self.base, "")


class Endings:
    """Tells of loops whether, and in which precision, floating values decide when they end.

    Args:
        pair: The precisions of the plan.
    """

    def __init__(self, pair: Pair) -> None:
        regimes = _Unruled()
        self._regime = regimes.base
        self._demand = Demand(regimes, pair, DEFAULT, ())
        self._pair = pair

    def rule(self, step: Step) -> str:
        """The rule that a loop goes by in reports; empty for what is no loop, and for loops that count or choose."""
        if not has(step.eqn, Trait.LOOPS) or not self._is_ended_by_floats(step):
            return ""
        deciding = list(self._inside(step, self._demand.carries.alone(step.eqn, self._regime)))
        # A scan that freezes comes to its end in half too.
        if is_while(step.eqn) and any(made is None or self._computes_in_half(made) for made in deciding):
            return IN_HALF
        return KEPT if any(made is not None and _is_kept(made) for made in deciding) else ""

    def _is_ended_by_floats(self, step: Step) -> bool:
        if not is_while(step.eqn):
            return bool(self._demand.carries.latches(step.eqn))
        carries = step.eqn.outvars
        decided = self._demand.carries.ended_by(step.eqn)
        return any(jnp.issubdtype(carries[index].aval.dtype, jnp.floating) for index in decided.carries)

    def _inside(self, step: Step, wants: Wants) -> Iterator[Step | None]:
        """What decides about a loop inside of an equation; None stands for a half carry."""
        for plan in inner_plans(step):
            is_condition = is_while(step.eqn) and plan.jaxpr is while_parts(step.eqn.params).cond
            asked = (Want.EXACT,) if is_condition else wants
            if len(asked) == len(plan.outs):  # Else it is a rule of its own, which computes other results.
                yield from self._of_plan(plan, asked, is_while(step.eqn) and not is_condition)

    def _of_plan(self, plan: Plan, asked: Wants, is_body: bool) -> Iterator[Step | None]:
        wanted = self._demand(plan.jaxpr, asked, self._regime, "")
        if is_body:
            first = len(plan.ins) - len(asked)
            carries = zip(asked, open_jaxpr(plan.jaxpr).invars[first:], plan.ins[first:], strict=True)
            yield from (None for want, var, flow in carries if want.decides and self._is_half(var, flow))
        for step in plan.steps:
            if any(wanted.of(var).decides for var in step.eqn.outvars):
                yield step
                yield from self._inside(step, wanted.of_results(step.eqn))

    def _is_half(self, atom: Any, flow: Flow | None) -> bool:
        return self._pair.is_narrow(flow.dtype if flow is not None else getattr(atom.aval, "dtype", None))

    def _computes_in_half(self, step: Step) -> bool:
        """Whether a step gives half results; what moves data may move what a loop was given, the same every time."""
        return rule_of(step.eqn) is not Rule.FOLLOW and any(map(self._is_half, step.eqn.outvars, step.out))


def _is_kept(step: Step) -> bool:
    """Whether a step is a product that is as the program writes it for the sake of the end."""
    label = rule_label(scope_path(step.eqn)) or step.rule  # What a `cast_fn` inside emitted is labelled.
    return has(step.eqn, PRODUCTS) and label == CONVERGES.label
