"""What lies near a number: of a probability near 1, or a gate, what matters may be what is left of the number."""

from __future__ import annotations

from jamp._compat import Atom, Eqn, Literal
from jamp._primitives import Rule, Trait, has, rule_of
from jamp.transforms.analysis.apart import number_of
from jamp.transforms.analysis.chains import Constants
from jamp.transforms.program.want import Want

# What is as near to a number as its operands are; the same of what is chosen among many, put together or added up; and
# what is as near where one value alone goes into it, beside numbers.
_HANDS_ON = Trait.MOVES | Trait.CONVERTS | Trait.NEGATES | Trait.LIMITS | Trait.SELECTS
_HANDS_BOUND_ON = _HANDS_ON | Trait.ASSEMBLES | Trait.EXTREMUM | Trait.SUMS_AXES
_OF_ONE = Trait.ADDS | Trait.MULTIPLIES | Trait.DIVIDES | Trait.POWER


def wanted_near(eqn: Eqn, want: Want, constants: Constants, part: float) -> Want | None:
    """What is wanted of operands of which all that matters may be how far they are from a number; None of others.

    The result of a sigmoid is 1 in half where float32 has 0.999, and `log(1 - p)`, `1 / (1 - p)`, `sqrt(1 - h * h)` and
    `arctanh(h)` are infinite. The sigmoid is float32 then, though a product reads it in half: its operand may be half.
    Where half is read of what is left of the number, as in `1 - z` of a gate, no more than the sigmoid has to be: of
    one of 0.995, which bfloat16 takes for 0.996, nearly a quarter of what is left would be lost.

    A product of many loses as much as all of them do together: of 16 probabilities near 1 the logarithm was 3 % off.
    """
    if has(eqn, Trait.BOUNDED | Trait.MULTIPLIES_AXES):
        return Want.BOUND
    if want in (Want.BOUND, Want.LEFT) and _is_of_one(eqn, want, constants):
        return want
    if want >= Want.BOUND or not takes_from_number(eqn, constants, part):
        return None
    return Want.BOUND if want.full else Want.LEFT


def _is_of_one(eqn: Eqn, want: Want, constants: Constants) -> bool:
    """Whether a value is moved, or computed with numbers alone, such as scaled.

    Of what has to be exact, sums and the best of many are too; what is left for half readers is added up in float32.
    """
    if want is Want.BOUND and (rule_of(eqn) is Rule.FOLLOW or has(eqn, _HANDS_BOUND_ON)):
        return True
    given = {atom for atom in eqn.invars if _literal(atom, constants) is None}
    return has(eqn, _HANDS_ON) or (has(eqn, _OF_ONE) and len(given) == 1)


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
