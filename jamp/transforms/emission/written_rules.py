"""Rules of differentiation as they are written: traced at the dtypes of the program, and planned.

The forward part of a reverse-mode rule also tells which results a rule keeps for its backward part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, ParamSpec

import jax
from jax import Array

from jamp._compat import (
    Aval,
    ClosedJaxpr,
    Eqn,
    Literal,
    Var,
    equation_context,
    forward_rule,
    open_jaxpr,
    traced_apart,
)  # fmt: skip
from jamp._primitives import Trait, has
from jamp.transforms.program.flow import Flows
from jamp.transforms.program.plan import Plan, Replan, Step, asks_what_moves
from jamp.transforms.program.rewrites import CustomRule
from jamp.transforms.program.want import Want

P = ParamSpec("P")


def rule_of_step(step: Step) -> CustomRule:
    """What is planned of a function with a rule of its own."""
    if not isinstance(step.rewrite, CustomRule):
        raise TypeError(f"Expected the step of a custom rule, got {step.rewrite!r}.")
    return step.rewrite


def half_wants(jaxpr: ClosedJaxpr) -> tuple[Want, ...]:
    """Half of each result."""
    return (Want.HALF,) * len(open_jaxpr(jaxpr).outvars)


def as_written(replan: Replan, trace: Callable[P, ClosedJaxpr], *args: P.args, **kwargs: P.kwargs) -> ClosedJaxpr:
    """Traces a rule: as for `Traced`, products say what their call sites wrote.

    Args:
        replan: What will plan it.
        trace: What traces it.
        *args: Arguments of `trace`.
        **kwargs: Likewise.
    """
    with jax.default_matmul_precision(None):  # pyright: ignore[reportArgumentType]
        return (
            traced_apart(functools.partial(trace, *args, **kwargs)) if replan.stacks_matter else trace(*args, **kwargs)
        )


def at_traced_dtypes(eqn: Eqn, plan: Plan, operands: Sequence[Array]) -> list[Array]:
    """Operands of an equation at the dtypes that it was traced with."""
    return [at_traced_dtype(value, var.aval, plan) for value, var in zip(operands, eqn.invars, strict=True)]


def at_traced_dtype(value: Array, traced: Aval, plan: Plan) -> Any:
    """The type of a value at the dtype that it was traced with."""
    aval = jax.typeof(value)
    return aval.update(dtype=traced.dtype, weak_type=traced.weak_type) if plan.pair.flows(traced) else aval


class ForwardPart(NamedTuple):
    """The forward part of a reverse-mode rule.

    Attributes:
        jaxpr: As it was traced: its results are the residuals that are no operands, then those of the function.
        plan: As it is planned.
        forwarded: For each residual, the operand of the equation that it is; None for what the jaxpr gives.
        kept: The states in which residuals of the jaxpr are kept.
    """

    jaxpr: ClosedJaxpr
    plan: Plan
    forwarded: Sequence[int | None]
    kept: Flows


def forward_part(step: Step, avals: Sequence[Aval | Array], perturbed: Sequence[bool]) -> ForwardPart:
    """Traces and plans the forward part of a reverse-mode rule.

    Args:
        step: The function with the rule.
        avals: What its operands are, at the dtypes that they were traced with.
        perturbed: For each operand behind the constants, whether it is differentiated.
    """
    eqn, rewrite, (plan,) = step.eqn, rule_of_step(step), step.plans
    replan = rewrite.replan
    first, forwarded = eqn.params["num_consts"], list[int | None]()

    def trace() -> ClosedJaxpr:
        rule = forward_rule(eqn, perturbed, anew=replan.stacks_matter)
        forwarded[:] = rule.forwarded
        return jax.make_jaxpr(rule.run)(*avals[first:])

    jaxpr = as_written(replan, trace)
    kept = len(open_jaxpr(jaxpr).outvars) - len(plan.outs)
    ruled = replan.plan(jaxpr, plan.ins[first:], replan.of_forward_part(jaxpr, kept))
    return ForwardPart(jaxpr, ruled, forwarded, rewrite.residual(ruled.outs[:kept]))


def kept_by_rules(plan: Plan) -> frozenset[Var]:
    """Results that reverse-mode rules keep in float32, and other steps read in half: these copies can be made again."""
    ruled = [s for s in plan.steps if isinstance(s.rewrite, CustomRule) and has(s.eqn, Trait.CUSTOM_VJP)]
    if not ruled:
        return frozenset()
    narrow = plan.pair.is_narrow
    both = (pair for step in plan.steps for pair in zip(step.operands, step.casts, strict=True))
    in_half = {atom for atom, to in both if to is not None and narrow(to.dtype) and not isinstance(atom, Literal)}
    return frozenset(
        var for step in ruled if not in_half.isdisjoint(step.eqn.outvars) for var in _kept_in_float32(step, plan)
    )


def _kept_in_float32(step: Step, plan: Plan) -> Iterator[Var]:
    if asks_what_moves(step.eqn):  # What it keeps depends on what is differentiated, which is not known yet.
        return
    eqn = step.eqn
    unmoved = [False] * (len(eqn.invars) - eqn.params["num_consts"])
    try:
        with equation_context(eqn):
            part = forward_part(step, [atom.aval for atom in eqn.invars], unmoved)
    except Exception:  # A rule that cannot be traced says so where it is differentiated, and only there.
        return
    atoms = open_jaxpr(part.jaxpr).outvars
    wide = [atom for atom, flow in zip(atoms, part.kept, strict=False) if flow and flow.dtype == plan.pair.wide]
    for var, result in zip(eqn.outvars, atoms[len(part.kept) :], strict=True):
        if any(atom is result for atom in wide):
            yield var
