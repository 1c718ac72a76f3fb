"""Half values that are compared, or that exponentials are of: XLA must round them, as they are kept.

A product is computed in float32 and rounded. XLA leaves the rounding out where the result is raised again
(`xla_allow_excess_precision`, its default), but not where a sort or a maximum reads it in half: no element of `h` was
equal to `h.max()`, so the gradient of the maximum was zero, and none reached `jnp.percentile(h, 100)`. What is compared
is `exact`: all of its readers see it as it was rounded. It is told by walking back from comparisons, over what hands
elements on or chooses among them.

Of `exp(s) / sum(exp(s))` the backward pass has the sum, and computes the exponentials anew of the `s` that is kept.
Where the sum is of an `s` that was never rounded, these are no distribution: what all cotangents have in common does
not cancel, and gradients of attention at O1 and OD were off by three times as much as by hand. So the products that
such exponentials are made of are exact, by way of arithmetic too, and so is what arithmetic makes of them in half where
that is kept: of `z = 20 * h` that a product reads as well, the gradient of `softmax(z)` was off by up to 152 %.

The slope of `softplus(x)` is `exp(x - softplus(x))`, and the ratio of two policies such an exponential too. Where `x`
was rounded for one of the two that are subtracted, what was left out is all of the difference: of `x = 30` up to 6 %.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jamp._compat import Atom, Literal, Var, open_jaxpr
from jamp._primitives import Rule, Trait, has, rule_of, traits_of
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.plan import Plan, Step
from jamp.transforms.program.rewrites import Retyped

# Of what is no movement, the operations whose result is one of their operands, or has the digits of one.
_CHOOSES_AMONG = Trait.SELECTS | Trait.EXTREMUM | Trait.LIMITS | Trait.ASSEMBLES | Trait.NEGATES | Trait.CONVERTS


def with_exact_values(plan: Plan) -> Plan:
    """The plan, of which steps that make half values to be compared say so, and of which inputs that holds inside."""
    found = _compared(plan.steps, ())
    sums, differences = _exponents(plan.steps)
    if not found and not sums and not differences:
        return plan
    steps = tuple(_exact(step, found | differences, sums) for step in plan.steps)
    return dataclasses.replace(
        plan,
        steps=steps,
        compared=_positions(plan, found),
        exponents=_positions(plan, sums),
        differences=_positions(plan, differences),
    )


def _compared(steps: Sequence[Step], outs: Iterable[Atom]) -> set[Atom]:
    """The variables that are compared with others, or of which some that are compared are made without arithmetic."""
    found = set(outs)
    with_numbers = set[Atom]()
    for step in reversed(steps):
        eqn = step.eqn
        if has(eqn, Trait.COMPARES):
            operands = _variables(eqn.invars)
            # A number is equal to nothing else, but a difference is compared with one where its operands are.
            (found if len(operands) > 1 else with_numbers).update(operands)
        elif has(eqn, Trait.SUBTRACTS) and not with_numbers.isdisjoint(eqn.outvars):
            found.update(_variables(eqn.invars))
        elif step.plans:
            found.update(_inside(step, found))
        elif not found.isdisjoint(eqn.outvars) and hands_on(step):
            found.update(_variables(eqn.invars))
    return found


def _exponents(
    steps: Sequence[Step], sums: Iterable[Atom] = (), differences: Iterable[Atom] = ()
) -> tuple[set[Atom], set[Atom]]:
    """What exponentials that are added up are made of, element by element, and what those of differences are made of.

    Functions are looked into: the rule of one may compute the exponentials again of what it keeps.

    Args:
        steps: The steps of a plan.
        sums: Those of its results that such sums are of.
        differences: Those that such differences are of.
    """
    summed: set[Atom] = set()
    of_sums: set[Atom] = {*sums}
    of_differences: set[Atom] = {*differences}
    if not (of_sums or of_differences or any(step.plans or has(step.eqn, Trait.EXPONENTIAL) for step in steps)):
        return of_sums, of_differences
    makers = {var: step for step in steps for var in step.eqn.outvars}
    for step in reversed(steps):
        eqn = step.eqn
        traits, results = traits_of(eqn), eqn.outvars
        for plan in step.plans:
            outs = _outs(step, plan, of_sums), _outs(step, plan, of_differences)
            inside = _exponents(plan.steps, *outs) if any(outs) else (set[Atom](), set[Atom]())
            of_sums.update(_given(step, plan, plan.exponents | _positions(plan, inside[0])))
            of_differences.update(_given(step, plan, plan.differences | _positions(plan, inside[1])))
        if traits & Trait.SUMS_AXES:
            summed.update(_variables(step.operands))
        if traits & Trait.EXPONENTIAL:
            operands = _variables(step.operands)
            of_sums.update(operands if not summed.isdisjoint(results) else ())
            of_differences.update(_subtracted(makers, operands))
        elif rule_of(eqn) in (Rule.PROMOTE, Rule.FOLLOW):
            operands = _variables(step.operands)
            of_sums.update(operands if not of_sums.isdisjoint(results) else ())
            of_differences.update(operands if not of_differences.isdisjoint(results) else ())
    return of_sums, of_differences


def _subtracted(makers: Mapping[Var, Step], exponents: Iterable[Var]) -> list[Var]:
    """What an exponent is the difference of, unless that is from a maximum, which cancels as it is."""
    found: list[Var] = []
    for step in (makers[var] for var in exponents if var in makers):
        operands = _variables(step.operands)
        if has(step.eqn, Trait.SUBTRACTS) and len(operands) == 2 and not _is_extremum(makers, operands[1]):
            found += operands
    return found


def _is_extremum(makers: Mapping[Var, Step], var: Var) -> bool:
    step = makers.get(var)
    while step is not None and not has(step.eqn, Trait.TAKES_EXTREMUM) and hands_on(step):
        operands = _variables(step.eqn.invars)[-2:]  # Of a choice, without what decides it.
        step = makers.get(operands[0]) if operands else None
    return step is not None and has(step.eqn, Trait.TAKES_EXTREMUM)


def _inside(step: Step, found: set[Atom]) -> Iterable[Atom]:
    """Of a call or loop, the operands that are compared inside, and those that results which are compared are."""
    for plan in step.plans:
        outs = _outs(step, plan, found)
        places = _positions(plan, _compared(plan.steps, outs)) if outs else frozenset[int]()
        yield from _given(step, plan, plan.compared | places)


def _given(step: Step, plan: Plan, places: Iterable[int]) -> list[Var]:
    """Of a jaxpr inside of a step, what the step gives it at those places: the last of the step's operands."""
    before = len(step.eqn.invars) - len(plan.ins)
    return _variables(step.eqn.invars[before + i] for i in places) if before >= 0 else []


def _outs(step: Step, plan: Plan, found: set[Atom]) -> list[Var]:
    """Of a jaxpr inside of a step, the results that are those of the step which were found."""
    inner = open_jaxpr(plan.jaxpr).outvars
    if len(inner) != len(step.eqn.outvars):
        return []
    return _variables(out for out, var in zip(inner, step.eqn.outvars, strict=True) if var in found)


def _positions(plan: Plan, found: set[Atom]) -> frozenset[int]:
    return frozenset(i for i, var in enumerate(open_jaxpr(plan.jaxpr).invars) if var in found)


def hands_on(step: Step) -> bool:
    """Whether the results of a step are elements of its operands, or differ from them in the sign alone."""
    if rule_of(step.eqn) is Rule.FOLLOW:
        return not has(step.eqn, Trait.LINEAR)  # Sums over devices.
    return has(step.eqn, _CHOOSES_AMONG) and not any(to is not None for to in step.out_casts)


def _exact(step: Step, found: set[Atom], sums: set[Atom]) -> Step:
    """The step, with its half results that are to be rounded: those found, and those that sums are of."""
    results = step.eqn.outvars
    if (found.isdisjoint(results) and sums.isdisjoint(results)) or (not step.plans and hands_on(step)):
        return step
    half = [
        (i, var)
        for i, (var, flow) in enumerate(zip(results, step.out, strict=True))
        if flow is not None and (flow.kind == Kind.HALF or _is_raised(step, i))
    ]
    always = rule_of(step.eqn) is Rule.HALF or step.plans  # What a call makes is kept inside of it.
    exact = tuple(i for i, var in half if var in found or (always and var in sums))
    if_kept = tuple(i for i, var in half if var in sums and i not in exact)
    return dataclasses.replace(step, exact=exact, exact_if_kept=if_kept) if exact or if_kept else step


def _is_raised(step: Step, index: int) -> bool:
    """Whether a step makes a half result that is float32 from there."""
    to = step.out_casts[index] if step.out_casts else None
    return isinstance(step.rewrite, Retyped) and to is not None


def _variables(atoms: Iterable[Atom]) -> list[Var]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]
