"""Plans of what is not planned: programs, and jaxprs inside of equations, that run as they were traced."""

from __future__ import annotations

from typing import Any

from jamp._compat import jaxpr_consts, open_jaxpr
from jamp._dtypes import FLOAT32_AND_HALF
from jamp.inspect._flops import subjaxprs
from jamp.transforms.program.flow import traced_flow
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.plan import Plan, Step
from jamp.transforms.program.setting import Setting


def inner_plans(step: Step) -> tuple[Plan, ...]:
    """Plans of the jaxprs inside a step; where the step was not planned from inside, its jaxprs as they were traced."""
    return step.plans or tuple(as_traced(jaxpr) for jaxpr in subjaxprs(step.eqn))


def as_traced(jaxpr: Any) -> Plan:
    """The plan that changes nothing, for programs that run without the interpreter."""
    inner = open_jaxpr(jaxpr)
    steps = []
    for eqn in inner.eqns:
        ins = tuple(traced_flow(atom.aval, Kind.LAZY, FLOAT32_AND_HALF) for atom in eqn.invars)
        out = tuple(traced_flow(var.aval, Kind.LAZY, FLOAT32_AND_HALF) for var in eqn.outvars)
        steps.append(Step(eqn, ins, (None,) * len(ins), out, "as traced"))
    ins, outs = (
        tuple(traced_flow(a.aval, Kind.LAZY, FLOAT32_AND_HALF) for a in atoms)
        for atoms in (inner.invars, inner.outvars)
    )
    return Plan(jaxpr, jaxpr_consts(jaxpr), tuple(steps), ins, outs, Setting(FLOAT32_AND_HALF))
