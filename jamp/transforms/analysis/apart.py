"""What is taken apart again: a large part plus something small, of which a reader takes the large part off.

A network that corrects a temperature of 300 gives one of 301.3, and the next looks at what it is beyond 300, at the
difference of neighbours or of a measurement. In half 301.3 is 302. So where a difference is read, what it is of is
computed in float32, sums and functions alike, though half would do for its other readers: see `planning.elementwise`.

Where each of some values is taken from each of others, or compared with each, as in `z[:, None] - knots`, they are
coordinates: of a basis of hats or splines (of hats behind a sigmoid the values were off by 6 to 7 % and the gradients
by 20 to 40), of bins, ranks or distances. They are as much smaller than what is made of them as there are others.

What lies near a number: of a probability near 1, or a gate, what matters may be what is left of the number.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from jamp._compat import Atom, Eqn, Jaxpr, Literal, Var, called_jaxpr, open_jaxpr
from jamp._primitives import MOVED, SCALES, Rule, Trait, has, rule_of, traits_of
from jamp.transforms.analysis.reading.chains import Constants, Makers, maker, makers
from jamp.transforms.program.flow import num_elements
from jamp.transforms.program.want import APART, Want, combine

# By want, the same where no reader takes anything off the value.
_WHOLE = tuple({apart: want for want, apart in APART.items()}.get(want, want) for want in Want)
# A sum over an axis, and a power, are large where their terms are. What other functions make of two values that are
# nearly the same is so too; of what only comes near a number, as a sigmoid does, the operand may be half.
_HANDS_ON = Trait.SPREADS | Trait.LINEAR | Trait.POWER
_FUNCTIONS = (Rule.PROMOTE, Rule.FULL)
_OF_ITSELF = (
    Trait.VIEW | Trait.CONVERTS | SCALES | Trait.POWER | Trait.SUMS_AXES
    | Trait.TAKES_EXTREMUM
)  # fmt: skip
# What is as near to a number as its operands are; the same of what is chosen among many, put together or added up; and
# what is as near where one value alone goes into it, beside numbers.
_NEAR = MOVED | Trait.NEGATES | Trait.LIMITS | Trait.SELECTS
_NEAR_ALL = _NEAR | Trait.ASSEMBLES | Trait.EXTREMUM | Trait.SUMS_AXES
_OF_ONE = Trait.ADDS | SCALES | Trait.POWER
_FEW = 3  # As of an ensemble, or of two views of one image, stacked: more are as a rule the features of a layer.


class Apart:
    """Tells which equations of a jaxpr take differences, and how far back these are looked at.

    Args:
        jaxpr: The jaxpr.
        part: Numbers from which on they are no thresholds and no epsilons.
        small: Positions of its inputs that are smaller numbers.
    """

    def __init__(self, jaxpr: Jaxpr, part: float, small: frozenset[int] = frozenset()) -> None:
        self._jaxpr = jaxpr
        self._part = part
        self._small = {jaxpr.invars[index] for index in small}

    def passed_on(self, eqn: Eqn, votes: Mapping[Var, Want], wants: Sequence[Want]) -> Sequence[Want]:
        """What an equation wants of its operands, from what it would without differences.

        Args:
            eqn: The equation.
            votes: What is wanted of its results.
            wants: What it wants, but for that.
        """
        traits, rule = traits_of(eqn), rule_of(eqn)
        if rule is Rule.RECURSE:  # What is inside of it has said so.
            return wants
        if traits & (Trait.SUBTRACTS | Trait.COMPARES) and self._is_outer(eqn):
            return [combine(want, Want.PHASE) for want in wants]
        takes_off = traits & Trait.ADDS and self._takes_off(eqn)
        read = [votes[var] for var in eqn.outvars if var in votes]
        bends = rule in _FUNCTIONS and not traits & (Trait.REDUCES | Trait.COMPARES)
        hands_on = traits & _HANDS_ON
        if takes_off or any((hands_on and want.apart) or (bends and _WHOLE[want] is not want) for want in read):
            return [APART.get(want, want) for want in wants]
        return [_WHOLE[want] for want in wants]

    def _takes_off(self, eqn: Eqn) -> bool:
        """Whether an equation gives a difference. Data less its own mean, or squares less that of a mean, are none."""
        if not has(eqn, Trait.SUBTRACTS):
            return any(isinstance(atom, Literal) and number_of(atom) <= -self._part for atom in eqn.invars)
        if any(map(self.is_small, eqn.invars)):
            return False
        one, other = (_origin(self._makers, atom) for atom in eqn.invars)
        return one is None or one is not other

    def is_small(self, atom: Atom) -> bool:
        """Whether an atom is a number that is no part of anything, as zero in `logaddexp(x, 0)`, which softplus is."""
        return abs(number_of(atom)) < self._part if isinstance(atom, Literal) else atom in self._small

    def _is_outer(self, eqn: Eqn) -> bool:
        """Whether an equation takes each of some values from each of others, or compares it with each."""
        atoms = [atom for atom in eqn.invars if not isinstance(atom, Literal)]
        return len(atoms) == 2 and all(self._is_spread(atom, eqn.outvars[0]) for atom in atoms)

    def _is_spread(self, atom: Atom, over: Var) -> bool:
        """Whether an operand is of fewer elements than the result, and was broadcast."""
        elements = num_elements(over.aval)
        while not isinstance(atom, Literal):
            if 1 < num_elements(atom.aval) < elements:
                return True
            made = maker(self._makers, atom)
            if made is None or not has(made, Trait.VIEW | Trait.CONVERTS):
                return False
            atom = made.invars[0]
        return False

    @functools.cached_property
    def _makers(self) -> Makers:
        return makers(self._jaxpr)


def number_of(literal: Literal) -> float:
    """The real number that a literal is, or 0."""
    value = literal.val
    return float(value) if np.ndim(value) == 0 and not np.iscomplexobj(value) else 0.0


def _origin(made: Makers, atom: Atom) -> Atom | None:
    """What a value is the square, the mean, the maximum or a multiple of; None for numbers."""
    while (eqn := maker(made, atom)) is not None:
        operands = [operand for operand in eqn.invars if not isinstance(operand, Literal)]
        if has(eqn, Trait.CALLS):
            inner = open_jaxpr(called_jaxpr(eqn.params))
            inside = _origin(makers(inner), inner.outvars[[*eqn.outvars].index(atom)])
            given = dict(zip(inner.invars, eqn.invars, strict=True))
            if inside not in given:
                break
            atom = given[inside]
        elif has(eqn, _OF_ITSELF) and operands and _is_multiple(eqn, operands) and not _is_of_few(eqn):
            atom = operands[0]
        else:
            break
    return None if isinstance(atom, Literal) else atom


def _is_of_few(eqn: Eqn) -> bool:
    """Whether an equation adds up a few values, or takes one of them: what each is beyond that is their difference."""
    reduces = has(eqn, Trait.SUMS_AXES | Trait.TAKES_EXTREMUM)
    return reduces and num_elements(eqn.invars[0].aval) <= _FEW * num_elements(eqn.outvars[0].aval)


def _is_multiple(eqn: Eqn, operands: Sequence[Atom]) -> bool:
    """Whether what an equation makes of its first operand is a multiple of it, or a power: not a product with data."""
    if not has(eqn, SCALES):
        return True
    size = num_elements(eqn.outvars[0].aval)
    return all(other is operands[0] or num_elements(other.aval) < size for other in operands[1:])


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
    if want is Want.BOUND and (rule_of(eqn) is Rule.FOLLOW or has(eqn, _NEAR_ALL)):
        return True
    given = {atom for atom in eqn.invars if _literal(atom, constants) is None}
    return has(eqn, _NEAR) or (has(eqn, _OF_ONE) and len(given) == 1)


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
