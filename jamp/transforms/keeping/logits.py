"""Logits: what the last products of a program make, where it is larger than what they are made of.

In the backward pass JAX hands all that a checkpoint reads through an optimization barrier, cotangents too. XLA has to
write them to memory in front of it. Those of logits are as large as the logits, and without a barrier XLA computes them
inside of the products that read them.
"""

from __future__ import annotations

from collections.abc import Sequence

from jamp._compat import Atom, Literal, Var
from jamp._primitives import Rule, Trait, has, rule_of
from jamp.transforms.program.flow import num_elements
from jamp.transforms.program.plan import Float8Product, Step

_LINEAR = Trait.ADDS | Trait.NEGATES | Trait.MOVES | Trait.CONVERTS


def with_logits_apart(steps: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """Splits the last steps of a program into the steps that make logits and, in front of them, all others.

    Behind the product nothing but linear operations may follow, such as a bias, and before it, what moves a weight.
    Then nothing is recomputed there but half copies of weights, and no barrier is needed.

    Args:
        steps: The last steps of a program.

    Returns:
        The other steps, and the steps that make logits, which nothing else reads.
    """
    logits, moved = _made_of_products(steps), _moved_from_outside(steps)
    apart: list[Step] = []
    read_apart, read_before = set[Atom](), set[Atom]()
    before: list[Step] = []
    for step in reversed(steps):
        made = step.eqn.outvars
        feeds = any(var in moved for var in made) and any(var in read_apart for var in made)
        is_apart = (feeds or any(var in logits for var in made)) and not any(var in read_before for var in made)
        (apart if is_apart else before).append(step)
        (read_apart if is_apart else read_before).update(a for a in step.operands if not isinstance(a, Literal))
    if not any(map(_makes_logits, apart)):
        return list(steps), []
    return before[::-1], apart[::-1]


def _made_of_products(steps: Sequence[Step]) -> set[Atom]:
    """Results of products that make logits, and what linear operations make of them."""
    found: set[Atom] = set()
    for step in steps:
        if _makes_logits(step) or (_is_linear(step) and any(_in(atom, found) for atom in step.operands)):
            found.update(step.eqn.outvars)
    return found


def _moved_from_outside(steps: Sequence[Step]) -> set[Var]:
    """Values that are moved, and not computed, of what no step makes: a weight transposed."""
    made = {var for step in steps for var in step.eqn.outvars}
    found: set[Var] = set()
    for step in steps:
        outside = all(isinstance(atom, Literal) or atom not in made or atom in found for atom in step.operands)
        if outside and has(step.eqn, Trait.MOVES | Trait.CONVERTS) and not has(step.eqn, Trait.EXPENSIVE | Trait.GROWS):
            found.update(step.eqn.outvars)
    return found


def _makes_logits(step: Step) -> bool:
    """Whether a step is a product in half whose result is larger than each of its operands, or a call of one."""
    if has(step.eqn, Trait.CALLS):
        inner = [step for plan in step.plans for step in plan.steps]
        return any(map(_makes_logits, inner)) and all(_makes_logits(step) or _is_linear(step) for step in inner)
    if rule_of(step.eqn) is not Rule.HALF or not has(step.eqn, Trait.MATRIX):
        return False
    sizes = (num_elements(atom.aval) for atom in step.eqn.invars)
    return not isinstance(step.rewrite, Float8Product) and num_elements(step.eqn.outvars[0].aval) > max(sizes)


def _is_linear(step: Step) -> bool:
    """Whether the derivative of a step reads nothing, and moves nothing between devices."""
    if has(step.eqn, Trait.CALLS):
        return bool(step.plans) and all(_is_linear(inner) for plan in step.plans for inner in plan.steps)
    scales = has(step.eqn, Trait.MULTIPLIES | Trait.DIVIDES) and isinstance(step.operands[-1], Literal)
    return scales or (has(step.eqn, _LINEAR) and not has(step.eqn, Trait.EXPENSIVE))


def _in(atom: Atom, found: set[Atom]) -> bool:
    return not isinstance(atom, Literal) and atom in found
