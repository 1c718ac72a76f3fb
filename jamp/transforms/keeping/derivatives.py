"""What the derivative of a step reads, and whether it may be taken at a rounded number."""

from __future__ import annotations

import numpy as np

from jamp._compat import Eqn, Literal, inner_jaxprs, open_jaxpr
from jamp._primitives import FUNCTIONS, Rule, Trait, has, holds, rule_of, traits_as_computed
from jamp.transforms.program.plan import Step

_MOVES_OR_SIGNS = Trait.ASSEMBLES | Trait.NEGATES | Trait.SELECTS


def is_smooth(step: Step) -> bool:
    """Whether a step is elementwise, and may be linearized at a rounded number.

    The derivative at a rounded number has to be a rounded derivative: not so of `exp`, of functions of a phase, and of
    comparisons with anything but zero, whose result, a byte, is kept where it is to be seen.
    """
    rewrite = step.rewrite
    changed = rewrite is not None and rewrite.reads is not None and not has(step.eqn, Trait.ADDS)
    if changed or step.eqn.effects or has(step.eqn, Trait.TAKES_EXTREMUM):
        return False
    return has(step.eqn, Trait.COMPARES) or _is_smooth(step.eqn)


def _is_smooth(eqn: Eqn) -> bool:
    if has(eqn, FUNCTIONS):
        return all(has(inner, Trait.SUMS_AXES) or _is_smooth(inner) for inner in _equations_inside(eqn))
    if has(eqn, Trait.COMPARES | Trait.EXTREMUM):
        return any(isinstance(atom, Literal) and not np.any(np.asarray(atom.val)) for atom in eqn.invars)
    return bool(traits_as_computed(eqn) & Trait.SMOOTH) or (has(eqn, Trait.MOVES) and not has(eqn, Trait.EXPENSIVE))


def reduces(eqn: Eqn) -> bool:
    """Whether a call sums, as a norm does: its result is kept, and read as it is."""
    return holds(_equations_inside(eqn), Trait.SUMS_AXES, FUNCTIONS)


def _equations_inside(eqn: Eqn) -> list[Eqn]:
    if not has(eqn, FUNCTIONS):
        return []
    return [inner for jaxpr in inner_jaxprs(eqn) for inner in open_jaxpr(jaxpr).eqns]


def reads_operands(step: Step) -> bool:
    """Whether the derivative of an elementwise step reads what it is computed of: that of a sum does not."""
    eqn = step.eqn
    if step.rewrite is not None and step.rewrite.reads is not None:
        return True
    if traits_as_computed(eqn) & Trait.MULTIPLIES:
        return not any(isinstance(atom, Literal) for atom in step.operands)
    if has(eqn, Trait.DIVIDES):
        return not isinstance(step.operands[-1], Literal)
    if has(eqn, Trait.ADDS | _MOVES_OR_SIGNS):
        return False
    elementwise = rule_of(eqn) is Rule.PROMOTE or (rule_of(eqn) is Rule.FULL and not has(eqn, Trait.REDUCES))
    return elementwise or has(eqn, FUNCTIONS)
