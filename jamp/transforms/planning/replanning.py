"""Plans what is known only when a program is emitted: rules of differentiation, which JAX asks for then."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import NamedTuple

from jamp._compat import ClosedJaxpr, Var, open_jaxpr
from jamp._primitives import Trait, holds
from jamp.policy import Policy
from jamp.transforms.analysis.loops.replays import replays
from jamp.transforms.analysis.regimes import Regime
from jamp.transforms.planning.context import Context, Planning
from jamp.transforms.planning.rewrites import Entry
from jamp.transforms.planning.site import rounded
from jamp.transforms.program.flow import Flow, Flows, num_elements
from jamp.transforms.program.heuristics import Heuristics
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import NO_MARKS, Mark
from jamp.transforms.program.plan import Plan
from jamp.transforms.program.want import Want, Wants


class Options(NamedTuple):
    """What makes a planner, but for the program."""

    policy: Policy
    base: Regime | None
    heuristics: Heuristics
    registry: tuple[tuple[Hashable, Entry], ...]
    captured: frozenset[Var]
    precision: Hashable


@dataclasses.dataclass(frozen=True)
class Replanning:
    """Plans what is known only when the program is emitted, in a context, without the program or what is known of it.

    JAX may keep it for as long as what is emitted, and ask for another rule of that.

    Attributes:
        options: What its planner is made with.
        context: The context.
        made: Makes a planner.
    """

    options: Options
    context: Context
    made: Callable[[Options], Planning]

    @functools.cached_property
    def _planner(self) -> Planning:
        return self.made(self.options)

    @property
    def stacks_matter(self) -> bool:
        """Whether rules of the policy name functions or source lines."""
        return self._planner.demand.regimes.stacks_matter

    def plan(self, jaxpr: ClosedJaxpr, ins: Flows, wants: Wants) -> Plan:
        """Plans a jaxpr, which is that of a rule where it is given tangents."""
        in_rule = self.context.in_rule or any(flow and flow.has(Mark.TANGENT) for flow in ins)
        return self._planner.plan(jaxpr, ins, wants, self.context._replace(in_rule=in_rule))

    def residual(self, states: Flows) -> Flows:
        """A residual is stored: an island in half, unless derivatives at two nearly equal values are subtracted."""
        if not self.context.regime.islands or self.context.apart:
            return states
        pair = self.options.policy.pair
        return tuple(
            rounded(flow, pair) if flow and flow.kind == Kind.ISLAND and not flow.scale else flow for flow in states
        )

    def of_forward_part(self, jaxpr: ClosedJaxpr, residuals: int) -> Wants:
        """What is wanted of what the forward part of a rule returns: half, but of statistics that it keeps.

        A backward part that computes `exp(x @ w - kept)` has weights that add up to one only where `kept` is of the
        same product: in float32, since exponentials want that.
        """
        avals = [var.aval for var in open_jaxpr(jaxpr).outvars]
        most = max((num_elements(var.aval) for var in open_jaxpr(jaxpr).invars), default=0)
        of_data = most // self.options.heuristics.statistic
        if self.context.apart:
            return (Want.FULL_APART,) * len(avals)
        return tuple(
            Want.FULL if index < residuals and num_elements(aval) <= of_data else Want.HALF
            for index, aval in enumerate(avals)
        )

    def of_derivative(
        self, jaxpr: ClosedJaxpr, values: Flows, tangents: Flows, of_solution: bool, linear: bool
    ) -> tuple[Flows, Flows]:
        """The states in which a rule is given values, and tangents or cotangents: as they are, if nothing is solved.

        The derivative of a solution solves an equation with the same matrix, whose right side is the tangent. What
        makes that equation is delicate as that of the solution is; and it is no layer.
        """
        if not (self.context.regime.delicate and (of_solution or holds(open_jaxpr(jaxpr).eqns, Trait.SOLVES))):
            return values, tangents
        wide = self.options.policy.pair.wide

        def of_system(flow: Flow | None) -> Flow | None:
            if flow is None or flow.kind == Kind.HALF or flow.has(Mark.STORED):
                return flow
            return flow._replace(marks=flow.marks | Mark.SOLUTION)

        ends = NO_MARKS if linear else Mark.TANGENT
        right_sides = (flow and flow._replace(kind=Kind.LAZY, dtype=wide).without(ends) for flow in tangents)
        return tuple(map(of_system, values)), tuple(map(of_system, right_sides))

    def cotangents(self, jaxpr: ClosedJaxpr, converges: bool) -> Wants:
        """Half, but where a rule goes through the steps of a loop again: accepted in float32, they would be refused.

        Those of two calls with nearly equal values are nearly opposite, and their sum is what is left.
        """
        exact = converges and replays(jaxpr)
        want = Want.EXACT if exact else Want.FULL_APART if self.context.apart else Want.HALF
        return (want,) * len(open_jaxpr(jaxpr).outvars)
