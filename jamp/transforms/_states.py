"""The float32 state of a loop over time: added up in float32, and given to the backward pass in half.

Whatever a loop carries, reverse mode keeps for each iteration. What a recurrent net adds up is float32, since a half
sum would lose what is small beside it; but the backward pass reads it as a factor of cotangents alone, and there half
is enough, as it is for all other factors. So what is computed of the state is computed of its float32 value, while
derivatives are taken where it is rounded to half, which is all that is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from jamp._compat import Literal, inner_jaxprs, open_jaxpr
from jamp.transforms._emit import replaced
from jamp.transforms._flow import BFLOAT16, FLOAT32, is_half, num_elements
from jamp.transforms._residuals import CHEAP_MOVES, COMPARISONS, LINEAR, kept
from jamp.transforms._rules import CALLS, FULL_ELEMENTWISE, PHASE_READERS, PROMOTE, SUMS
from jamp.transforms._steps import Plan, Step

# Elementwise functions whose derivative at a rounded number is a rounded derivative: not so `exp`, functions of a
# phase, and comparisons with anything but zero.
_EXTREMA = frozenset({"max", "min"})
_SMOOTH = (PROMOTE | CHEAP_MOVES | {"integer_pow", "square"}) - PHASE_READERS - _EXTREMA - {"clamp"}
_CALLS = CALLS | {"custom_jvp_call"}
_MOVES_OR_SIGNS = {"concatenate", "dynamic_update_slice", "neg", "pad", "select_n", "stack"}
_READ_BY_DERIVATIVE = (PROMOTE | FULL_ELEMENTWISE | _CALLS) - SUMS - _MOVES_OR_SIGNS


def half_states(plan: Plan, half: Any) -> frozenset[Any]:
    """The float32 carries of a loop's body that the backward pass can be given in half.

    Args:
        plan: The plan of the body.
        half: The half dtype. Only bfloat16 has the range of float32, which a state may need.

    Returns:
        Variables that the derivative of something reads, and only what may be linearized at a rounded number.
    """
    carries = slice(plan.constants, plan.constants + plan.carries)
    made_of: dict[Any, frozenset[Any]] = {
        var: frozenset({var})
        for var, flow in zip(open_jaxpr(plan.jaxpr).invars[carries], plan.ins[carries], strict=True)
        if flow is not None and flow.dtype == FLOAT32 and not flow.tangent and num_elements(var.aval) > 1
    }
    if half != BFLOAT16 or not made_of:
        return frozenset()
    keeps, read, spoiled = kept(plan, results_too=False).values, set[Any](), set[Any]()
    for step in plan.steps:
        found = frozenset[Any]().union(*(made_of.get(atom, ()) for atom in _read_as_they_are(step)))
        if not found:
            continue
        if reads_operands(step):
            read |= found
        if is_smooth(step):
            made_of.update((var, found) for var in step.eqn.outvars if not (var in keeps or reduces(step.eqn)))
        elif step.eqn.primitive.name not in LINEAR:
            spoiled |= found
    return frozenset(read - spoiled)


def _read_as_they_are(step: Step) -> list[Any]:
    return [
        atom
        for atom, dtype in zip(step.operands, step.casts, strict=True)
        if not isinstance(atom, Literal) and (dtype is None or not is_half(dtype))
    ]


def is_smooth(step: Step) -> bool:
    """Whether a step is elementwise, and may be linearized at a rounded number."""
    name = step.eqn.primitive.name
    rewritten = step.atoms is not None and name not in SUMS
    # The result of a comparison, a byte, is kept: where it is to be seen.
    return not (rewritten or step.pins or step.eqn.effects) and (name in COMPARISONS or _is_smooth(step.eqn))


def _is_smooth(eqn: Any) -> bool:
    name = eqn.primitive.name
    if name in _CALLS:
        return all(inner.primitive.name == "reduce_sum" or _is_smooth(inner) for inner in _equations_inside(eqn))
    if name in COMPARISONS | _EXTREMA:
        return any(isinstance(atom, Literal) and not np.any(atom.val) for atom in eqn.invars)
    return name in _SMOOTH


def reduces(eqn: Any) -> bool:
    """Whether a call sums, as a norm does: its result is kept, and read as it is."""
    return any(inner.primitive.name == "reduce_sum" or reduces(inner) for inner in _equations_inside(eqn))


def _equations_inside(eqn: Any) -> list[Any]:
    if eqn.primitive.name not in _CALLS:
        return []
    return [inner for jaxpr in inner_jaxprs(eqn) for inner in open_jaxpr(jaxpr).eqns]


def reads_operands(step: Step) -> bool:
    """Whether the derivative of an elementwise step reads what it is computed of: that of a sum does not."""
    name = step.eqn.primitive.name
    if step.atoms is not None:
        return True
    if name == "mul":
        return not any(isinstance(atom, Literal) for atom in step.operands)
    if name == "div":
        return not isinstance(step.operands[1], Literal)
    return name in _READ_BY_DERIVATIVE


def linearized_at(
    function: Callable[[Sequence[Any]], Sequence[Any]], operands: Sequence[Any], points: Sequence[Any]
) -> list[Any]:
    """Results of a function, with its derivative taken elsewhere.

    Args:
        function: A function of operands, to a sequence of results.
        operands: What to compute it of.
        points: Where to take its derivative, one for each operand.

    Returns:
        `function(operands)`.
    """

    @jax.custom_jvp
    def apart(operands: Sequence[Any], points: Sequence[Any]) -> list[Any]:
        del points
        return list(function(operands))

    def rule(primals: Any, tangents: Any) -> Any:
        operands, points = primals
        # An operand that nobody differentiates needs no factor, which would have to be kept.
        moving = [i for i, tangent in enumerate(tangents[0]) if not isinstance(tangent, SymbolicZero)]

        def of_moving(*moved: Any) -> list[Any]:
            return list(function(replaced(points, moving, moved)))

        _, dots = jax.jvp(of_moving, [points[i] for i in moving], [tangents[0][i] for i in moving])
        return apart(operands, points), dots

    apart.defjvp(rule, symbolic_zeros=True)
    return apart(list(operands), list(points))
