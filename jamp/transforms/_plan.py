"""The planner: decides, before anything runs, in which dtype every equation of a jaxpr takes and gives its values.

Planning is abstract (no arrays, no tracers), so that loop carries can be iterated to a fixpoint, sub-jaxprs that
repeat are planned once, and a report costs nothing. `_execute.py` then emits what the plan says.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jamp._compat import Literal, jaxpr_consts, open_jaxpr, scope_path
from jamp.policy import Policy
from jamp.transforms import _control_flow as control_flow
from jamp.transforms import _custom_rules as custom_rules
from jamp.transforms import _loops as loops
from jamp.transforms import _operations as operations
from jamp.transforms import _products as products
from jamp.transforms._demand import Demand, Wants
from jamp.transforms._flow import Flow, Kind, flows, is_other_inexact, num_elements, traced_flow
from jamp.transforms._modes import Modes
from jamp.transforms._patterns import rectifies
from jamp.transforms._rules import op_class
from jamp.transforms._steps import Flows, Plan, Site, Step
from jamp.transforms._unrolled import UnrolledLoops

_BY_CLASS = {
    "half": products.plan_half,
    "full": operations.plan_full,
    "no_half": operations.plan_no_half,
    "promote": operations.plan_promote,
    "follow": operations.plan_follow,
    "traced": operations.plan_known_traced,
    "opaque": operations.plan_opaque,
}
_BY_NAME = {**control_flow.PLANNERS, **loops.PLANNERS, **custom_rules.PLANNERS}

_VANISHES = float(np.finfo(np.float16).smallest_subnormal) / 2  # Numbers up to this are zero in float16.


class Planner:
    """Plans jaxprs under one policy. Lives for one call of a transformed function; so does what it remembers."""

    def __init__(self, policy: Policy) -> None:
        self.half = np.dtype(policy.compute_dtype)
        self.modes = Modes(policy)
        self.demand = Demand(self.modes)
        self.layer_scans: set[Any] = set()  # Scanned inputs that turned out to be the weights of stacked layers.
        self._unrolled = UnrolledLoops()
        self._in_rule = False  # Whether what is being planned is, or is called by, a rule that is given tangents.
        self._plans: dict[Any, Plan] = {}

    def plan(self, jaxpr: Any, ins: Flows, wants: Wants, mode: str, scope: str = "") -> Plan:
        """Plans a jaxpr whose inputs arrive as `ins` and whose readers want full precision where `wants` says so."""
        outside, self._in_rule = self._in_rule, self._in_rule or any(flow and flow.tangent for flow in ins)
        key = (id(jaxpr), ins, wants, mode, scope if self.modes.scope_matters else "", self._in_rule)
        if key not in self._plans:
            self._plans[key] = self._plan(jaxpr, ins, wants, mode, scope)
        self._in_rule = outside
        return self._plans[key]

    def _plan(self, jaxpr: Any, ins: Flows, wants: Wants, mode: str, scope: str) -> Plan:
        inner, consts = open_jaxpr(jaxpr), jaxpr_consts(jaxpr)
        env: dict[Any, Flow | None] = dict(zip(inner.invars, ins, strict=True))
        for var in inner.constvars:
            env[var] = traced_flow(var.aval, Kind.LAZY if num_elements(var.aval) > 1 else Kind.WEAK)
        demand = self.demand(jaxpr, wants, mode, scope)
        made_by: dict[Any, Step] = {}
        rectified: dict[Any, Any] = {}
        sums = self._unrolled.sums(inner) if mode in ("O1", "O2") else {}
        steps = []
        for eqn in inner.eqns:
            if not demand.is_live(eqn):
                continue
            operands = tuple(self._read(atom, env) for atom in eqn.invars)
            wanted = demand.of_results(eqn)
            step = self._plan_equation(eqn, operands, wanted, mode, scope, made_by, rectified, sums)
            _inherit(step, self._in_rule)
            steps.append(step)
            for var, flow in zip(eqn.outvars, step.out, strict=True):
                env[var] = flow
                made_by[var] = step
            if rectifies(eqn):
                rectified[eqn.invars[0]] = eqn.outvars[0]
        outs = tuple(self._read(atom, env) for atom in inner.outvars)
        return Plan(jaxpr, consts, _pruned(steps, inner.outvars), ins, outs)

    def _read(self, atom: Any, env: dict[Any, Flow | None]) -> Flow | None:
        if not isinstance(atom, Literal):
            return env[atom]
        flow = traced_flow(atom.aval, Kind.WEAK)
        if flow is None or self.half != np.float16:
            return flow
        magnitudes = np.abs(np.asarray(atom.val, np.float64))
        if np.any((magnitudes > 0) & (magnitudes <= _VANISHES)):
            return flow._replace(kind=Kind.STAT, tiny=True)
        magnitude = np.max(magnitudes)
        return flow._replace(huge=bool(np.isfinite(magnitude) and magnitude > np.finfo(np.float16).max))

    def _plan_equation(
        self,
        eqn: Any,
        ins: Flows,
        wants: Wants,
        mode: str,
        scope: str,
        made_by: dict[Any, Step],
        rectified: dict[Any, Any],
        sums: dict[Any, int | None],
    ) -> Step:
        here = scope_path(eqn)
        mode, override = self.modes.enter(eqn, mode, scope)
        site = Site(self, eqn, ins, wants, mode, here, scope, made_by, rectified, sums)
        if mode == "traced":  # Inside a nested `cast_fn`: its own policy has been applied while tracing.
            return operations.plan_known_traced(site)
        group = override or op_class(eqn.primitive.name)
        if group != "recurse" and not any(flows(var.aval) for var in (*eqn.invars, *eqn.outvars)):
            return operations.plan_untouched(site)
        if group == "recurse":
            return _BY_NAME[site.name](site)
        return _BY_CLASS[group](site)


def _inherit(step: Step, in_rule: bool) -> None:
    """Hands what any operand of a step bequeaths to its results.

    Whatever depends on a tangent is cast plainly, because JAX cannot transpose a cast that saturates. In a rule,
    complex values and float64, which have no state to tell, may depend on one.
    """
    if step.plans:  # Inner plans see to it themselves.
        return
    operands = [flow for flow in step.ins if flow is not None]
    stateless = any(is_other_inexact(var.aval) for var in step.eqn.invars)
    tangent = any(flow.tangent for flow in operands) or (stateless and in_rule)
    given = any(flow.given for flow in operands) or stateless
    if tangent:
        step.ins = tuple(flow and flow._replace(huge=flow.huge and not flow.tangent) for flow in step.ins)
        step.out = tuple(flow and flow._replace(huge=False, tangent=True) for flow in step.out)
    if any(flow is not None and flow.given != given for flow in step.out):
        step.out = tuple(flow and flow._replace(given=given) for flow in step.out)


def _pruned(steps: list[Step], outvars: list[Any]) -> list[Step]:
    """The steps without those that only fed an operation which is emitted as something else, such as softmax."""
    live = {atom for atom in outvars if not isinstance(atom, Literal)}
    kept = []
    for step in reversed(steps):
        if step.eqn.effects or any(var in live for var in step.eqn.outvars):
            kept.append(step)
            live.update(atom for atom in step.operands if not isinstance(atom, Literal))
    return kept[::-1]
