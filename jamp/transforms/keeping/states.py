"""The float32 state of a loop over time: added up in float32, and given to the backward pass in half.

Whatever a loop carries, reverse mode keeps for each iteration. What a recurrent net adds up is float32, since a half
sum would lose what is small beside it; but the backward pass reads it as a factor of cotangents alone, and there half
is enough, as it is for all other factors. (Where all others are float32, as in a physical system without a product, it
is not: a product of many Jacobians was 8 % off.) So what is computed of the state is computed of its float32 value, and
derivatives are taken where it is rounded to half, which is all that is kept. Not so of a state that data is compared
with, such as a running mean: of a difference that cancels, nothing would be left. Nor of states that have a factor in
common, as a sum and what it is divided by decay alike in a softmax in one pass: whatever the factor is, the quotient is
the same, so that its gradient is a sum over both states that cancels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from jamp._compat import Atom, Eqn, Literal, Var, open_jaxpr
from jamp._dtypes import BFLOAT16
from jamp._primitives import Rule, Trait, has, rule_of, traits_as_computed
from jamp.transforms.keeping.derivatives import is_smooth, reads_operands, reduces
from jamp.transforms.keeping.kept import Keeping
from jamp.transforms.program.flow import num_elements
from jamp.transforms.program.marks import Mark
from jamp.transforms.program.plan import Plan, Step


def half_states(plan: Plan, keeping: Keeping) -> frozenset[Var]:
    """The float32 carries of a loop's body that the backward pass can be given in half.

    Only bfloat16 has the range of float32, which a state may need.

    Args:
        plan: The plan of the body.
        keeping: What is kept of plans.

    Returns:
        Variables that the derivative of something reads, and only what may be linearized at a rounded number.
    """
    pair = plan.pair
    carries = slice(plan.constants, plan.constants + plan.carries)
    made_of: dict[Atom, frozenset[Var]] = {
        var: frozenset({var})
        for var, flow in zip(open_jaxpr(plan.jaxpr).invars[carries], plan.ins[carries], strict=True)
        if flow is not None and flow.dtype == pair.wide and not flow.has(Mark.TANGENT) and num_elements(var.aval) > 1
    }
    keeps = keeping.of(plan, results_too=False).values
    size = sum(num_elements(var.aval) for var in keeps) // plan.setting.heuristics.state
    made_of = {var: found for var, found in made_of.items() if num_elements(var.aval) > size}
    if pair.narrow != BFLOAT16 or not made_of or not _has_half(plan):
        return frozenset()
    differences: dict[Atom, frozenset[Var]] = {}
    factors = _Factors()
    read, spoiled = set[Var](), set[Var]()
    for step in plan.steps:
        factors.scale(step, made_of)
        found = frozenset[Var]().union(*(made_of.get(atom, ()) for atom in _read_as_they_are(step, plan)))
        if not found:
            continue
        if reads_operands(step):
            read |= found
            # Of a difference that cancels, as of data and its running mean, a rounded state leaves nothing.
            spoiled.update(*(differences.get(atom, ()) for atom in step.operands if not isinstance(atom, Literal)))
        if is_smooth(step):
            made_of.update((var, found) for var in step.eqn.outvars if not (var in keeps or reduces(step.eqn)))
            if _is_difference(step):
                differences.update((var, found) for var in step.eqn.outvars)
        elif not has(step.eqn, Trait.LINEAR):
            spoiled |= found
    return frozenset(read - spoiled - factors.shared())


def _has_half(plan: Plan) -> bool:
    """Whether anything in an iteration is half."""
    narrow = plan.pair.is_narrow
    return any(
        any(flow is not None and narrow(flow.dtype) for flow in (*step.ins, *step.out))
        or any(to is not None and narrow(to.dtype) for to in step.casts)
        or any(map(_has_half, step.plans))
        for step in plan.steps
    )


class _Factors:
    """What multiplies states, however its shape is changed, and however often the same is computed."""

    def __init__(self) -> None:
        self._same: dict[Atom, object] = {}
        self._known: dict[object, Atom] = {}  # By what computes a value, the first that it computes.
        self._scaled: defaultdict[object, set[Var]] = defaultdict(set)

    def scale(self, step: Step, made_of: Mapping[Atom, frozenset[Var]]) -> None:
        """Takes the next step, and what of the values so far is made of which states."""
        eqn, atoms = step.eqn, step.operands
        if len(eqn.outvars) == 1:
            self._name(eqn, [atom if isinstance(atom, Literal) else self._same.get(atom, atom) for atom in atoms])
        if not traits_as_computed(eqn) & Trait.MULTIPLIES or len(atoms) != 2:
            return
        for state, factor, flow in zip(atoms, atoms[::-1], step.ins[::-1], strict=True):
            if not (isinstance(state, Literal) or isinstance(factor, Literal)) and flow and flow.has(Mark.TRAINED):
                self._scaled[self._same.get(factor, factor)].update(made_of.get(state, ()))

    def _name(self, eqn: Eqn, operands: list[object]) -> None:
        if has(eqn, Trait.VIEW | Trait.CONVERTS):
            self._same[eqn.outvars[0]] = operands[0]
        elif rule_of(eqn) in (Rule.PROMOTE, Rule.FULL) and not has(eqn, Trait.REDUCES):
            named = (eqn.primitive, *(str(atom) if isinstance(atom, Literal) else id(atom) for atom in operands))
            self._same[eqn.outvars[0]] = self._known.setdefault(named, eqn.outvars[0])

    def shared(self) -> set[Var]:
        """The states that have a factor in common with another state."""
        return set().union(*(states for states in self._scaled.values() if len(states) > 1))


def _read_as_they_are(step: Step, plan: Plan) -> list[Atom]:
    return [
        atom
        for atom, cast in zip(step.operands, step.casts, strict=True)
        if not isinstance(atom, Literal) and (cast is None or not plan.pair.is_narrow(cast.dtype))
    ]


def _is_difference(step: Step) -> bool:
    return has(step.eqn, Trait.SUBTRACTS) and not any(isinstance(atom, Literal) for atom in step.operands)
