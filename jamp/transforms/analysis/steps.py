"""Small steps: carries that a loop adds to a little at a time, as a learning rate does.

What a layer adds to the stream is of the size of the stream. What is added a thousandth at a time is a state: in half,
whose numbers are 0.4 % apart, it would stay where it is.
"""

from __future__ import annotations

import math

import numpy as np

from jamp._compat import Atom, Jaxpr, Literal
from jamp._primitives import Trait, has
from jamp.transforms.analysis.axes import num_contracted
from jamp.transforms.analysis.chains import Makers, maker, makers
from jamp.transforms.program.flow import num_elements

_THROUGH = Trait.VIEW | Trait.CONVERTS | Trait.NEGATES
_DEEPEST = 8  # Sums in a row: those of what is added, one after another.
_FACTORS = 5  # Products in a row.


def small_steps(body: Jaxpr, carries: int, most: float) -> frozenset[int]:
    """Positions of the carries of a loop to which something is added that a small number scales.

    Args:
        body: The body of the loop.
        carries: How many there are. They are its first results.
        most: The largest number that counts as small.
    """
    made = makers(body)
    return frozenset(index for index, atom in enumerate(body.outvars[:carries]) if _takes_small_steps(made, atom, most))


def _takes_small_steps(made: Makers, atom: Atom, most: float) -> bool:
    todo = [(atom, _DEEPEST)]
    while todo:
        at, depth = todo.pop()
        eqn = maker(made, at)
        if eqn is None or depth == 0:
            continue
        if has(eqn, _THROUGH):
            todo.append((eqn.invars[0], depth))
        elif has(eqn, Trait.ADDS) and len(eqn.invars) == 2:
            terms = [operand for operand in eqn.invars if not isinstance(operand, Literal)]
            if any(0 < _scale(made, term) <= most for term in terms):
                return True
            todo += [(operand, depth - 1) for operand in eqn.invars]
    return False


def _scale(made: Makers, atom: Atom, depth: int = _FACTORS) -> float:
    """By which numbers of the program a value is scaled, together; a sum is as large as what it is of, times how many.

    So a mean is not small, nor are scores that are divided by the root of what they add up.
    """
    if (number := _number(atom)) is not None:
        return number
    eqn = maker(made, atom)
    if eqn is None or depth == 0:
        return 1.0
    if has(eqn, _THROUGH):
        return _scale(made, eqn.invars[0], depth)
    if has(eqn, Trait.MULTIPLIES | Trait.MATRIX):
        terms = num_contracted(eqn) if has(eqn, Trait.MATRIX) else 1
        return terms * math.prod(_scale(made, operand, depth - 1) for operand in eqn.invars)
    if has(eqn, Trait.SUMS_AXES):
        terms = num_elements(eqn.invars[0].aval) / max(num_elements(eqn.outvars[0].aval), 1)
        return terms * _scale(made, eqn.invars[0], depth - 1)
    if has(eqn, Trait.DIVIDES) and len(eqn.invars) == 2:
        divisor = _number(eqn.invars[1])
        return _scale(made, eqn.invars[0], depth) / (divisor or 1.0)
    return 1.0


def _number(atom: Atom) -> float | None:
    if not isinstance(atom, Literal) or np.ndim(atom.val) or np.iscomplexobj(atom.val):
        return None
    return abs(float(atom.val))
