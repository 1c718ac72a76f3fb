"""What lies near a number: of a probability near 1, or a gate, what matters may be what is left of the number."""

from __future__ import annotations

from jamp._compat import Atom, Eqn, Literal
from jamp._primitives import Trait, has
from jamp.transforms.analysis.apart import number_of
from jamp.transforms.analysis.chains import Constants
from jamp.transforms.program.want import Want

# What is as near to a number as its operands are, and what is where one number alone goes into it.
_HANDS_BOUND_ON = Trait.MOVES | Trait.CONVERTS | Trait.NEGATES | Trait.LIMITS | Trait.SELECTS
_OF_ONE = Trait.ADDS | Trait.MULTIPLIES | Trait.POWER


def near_bound(eqn: Eqn, want: Want, constants: Constants, part: float) -> bool:
    """Whether all that matters of the operands may be how far they are from a number, whatever else reads them.

    The result of a sigmoid is 1 in half where float32 has 0.999, and `log(1 - p)`, `1 / (1 - p)`, `sqrt(1 - h * h)` and
    `arctanh(h)` are infinite. The sigmoid is float32 then, though a product reads it in half: its operand may be half.
    """
    if has(eqn, Trait.BOUNDED):
        return True
    if want is Want.BOUND:
        return _is_of_one(eqn, constants)
    return want.full and want < Want.BOUND and takes_from_number(eqn, constants, part)


def is_left(eqn: Eqn, want: Want, constants: Constants, part: float) -> bool:
    """Whether half is read of what is taken from a number, as in `1 - z` of a gate.

    Of a sigmoid of 0.995, which bfloat16 takes for 0.996, nearly a quarter of what is left would be lost.
    """
    if want is Want.LEFT and _is_of_one(eqn, constants):
        return True
    return not want.full and takes_from_number(eqn, constants, part)


def _is_of_one(eqn: Eqn, constants: Constants) -> bool:
    """Whether a value is moved, or computed with numbers alone, such as scaled."""
    given = {atom for atom in eqn.invars if _literal(atom, constants) is None}
    return has(eqn, _HANDS_BOUND_ON) or (has(eqn, _OF_ONE) and len(given) == 1)


def takes_from_number(eqn: Eqn, constants: Constants, part: float) -> bool:
    """Whether an equation takes a value from a number that is no epsilon."""
    number = _literal(eqn.invars[0], constants) if has(eqn, Trait.SUBTRACTS) else None
    return number is not None and abs(number_of(number)) >= part


def _literal(atom: Atom, constants: Constants) -> Literal | None:
    """The literal that an operand is, perhaps broadcast."""
    if isinstance(atom, Literal):
        return atom
    made = constants.get(atom)
    if made is None or not has(made, Trait.GROWS) or not isinstance(made.invars[0], Literal):
        return None
    return made.invars[0]
