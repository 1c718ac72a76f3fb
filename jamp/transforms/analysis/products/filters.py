"""States that a loop corrects by what it solves: the mean and the covariance of a filter, conjugate directions.

`p = f @ p @ f.T + q` is what `h @ p @ h.T + r` is solved with, and what is left of it the next `p`. A product that is
rounded makes it less symmetric, which no step forgets: the gradient of a Kalman filter over 200 steps was ten times too
large in bfloat16, and NaN in float16, where its products with `f` alone were half.

A gain that is divided by a sum over states, `p @ x / (1 + x @ p @ x)`, solves too, and so does the step of a descent
that is a ratio of two such sums, `r @ r / (p @ (a @ p))`. Conjugate directions become smaller until float16 has no
number for `a @ p`: of 40 systems, 15 were off by up to 1e8 times their solution.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from jamp._primitives import MOVED, PRODUCTS, SCALES, Trait, has
from jamp.transforms.analysis.products.factors import Cancelled
from jamp.transforms.analysis.products.networks import Widths, is_layer
from jamp.transforms.analysis.products.solutions import is_vector, of_matrices
from jamp.transforms.analysis.products.unfolded import Unfolded, computes
from jamp.transforms.analysis.reading.flat import Flat, Opened, Value
from jamp.transforms.program.flow import num_elements

_CASES = Trait.BRANCHES | Trait.LOOPS
_HANDED_ON = MOVED | Trait.NEGATES | Trait.SELECTS | _CASES
_PUT_TOGETHER = Trait.ASSEMBLES | Trait.SUMS_AXES


def filters(opened: Opened, unfolded: Unfolded, widths: Widths) -> Iterator[Cancelled]:
    """Products of states of a loop that are corrected, and of what is linear in them, with what is not made of states.

    Args:
        opened: A jaxpr, with its loops opened.
        unfolded: Its values as sums of products.
        widths: Those of its networks.
    """
    loops = [flat for flat in opened.eqns if opened.carries(flat)]
    entries = {carry: entry for loop in loops for carry, entry in _entries(opened, loop)}
    for loop in loops:
        carries = opened.carries(loop)
        summed = _summed(opened, carries)
        results = ((carry, opened.entered[carry][1]) for carry in carries)
        of_sums = {carry for carry, result in results if isinstance(result, Value) and result in summed}
        states = _States(carries, of_sums, entries)
        for flat in opened.eqns:
            if flat is not loop:  # What is made of its results is not fed back.
                states.add(flat)
        found = [(flat, of & states.corrected) for flat, of in states.products]
        sizes = [(flat, max(num_elements(value.aval) for value in of)) for flat, of in found if of]
        products = tuple(flat for flat, size in sizes if not is_layer(flat, widths, size))
        yield Cancelled(products)
        starts = (start for state in states.corrected if isinstance(start := opened.entered[state][0], Value))
        yield from of_matrices(
            opened, unfolded, starts, unfolded.origins(each for flat in products for each in flat.values)
        )


def _entries(opened: Opened, loop: Flat) -> Iterator[tuple[Value, Flat]]:
    """How what the iterations of a loop get of each carry comes in: a loop in another one goes on with its states."""
    for carry in opened.carries(loop):
        yield carry, loop._replace(ins=opened.entered[carry][:1], outs=(carry,), cases=())


def _summed(opened: Opened, carries: Sequence[Value]) -> set[Value]:
    """What is computed of sums over the states of a loop. The time of a solver is not, whatever it is scaled by."""
    made, summed = set(carries), set[Value]()
    for flat in opened.eqns:
        operands = flat.values[1:] if has(flat.eqn, Trait.SELECTS) else flat.values
        if made.isdisjoint(operands) or not (computes(flat.eqn) or has(flat.eqn, _HANDED_ON & ~Trait.LOOPS)):
            continue
        made.update(flat.outs)
        if _is_sum(flat, [value for value in operands if value in made]) or not summed.isdisjoint(operands):
            summed.update(flat.outs)
    return summed


def _is_sum(flat: Flat, operands: Sequence[Value]) -> bool:
    size = num_elements(flat.outs[0].aval)
    return has(flat.eqn, PRODUCTS | Trait.SUMS_AXES) and all(size < num_elements(value.aval) for value in operands)


class _States:
    """What an iteration makes of the states of a loop.

    Args:
        carries: The states.
        summed: Those that are computed of sums over others.
        entries: How the states of all loops come in.

    Attributes:
        products: Those of what is linear in states, and in which.
        corrected: The states that are corrected by something that is solved with them.
    """

    def __init__(self, carries: Sequence[Value], summed: Collection[Value], entries: Mapping[Value, Flat]) -> None:
        largest = max((num_elements(value.aval) for value in carries), default=0)
        self.products: list[tuple[Flat, frozenset[Value]]] = []
        self.corrected: set[Value] = set()
        self._entries = entries
        self._made = {carry: frozenset((carry,)) for carry in carries}  # Of which states, somehow.
        self._linear = dict(self._made)  # In which a value is linear, beside what else is added to it.
        self._wholly = dict(self._made)  # In which all that is added up is.
        self._sums = {value for value in summed if num_elements(value.aval) < largest}
        self._ratios: set[Value] = set()
        self._inverses: set[Value] = set()  # Numbers, divided by a sum.
        self._gains: set[Value] = set()  # Something linear, divided by a sum.
        self._solved: set[Value] = set()  # What is made of solutions.
        self._vectors: set[Value] = set()  # Solutions that are vectors, and steps by a ratio or a gain.

    def add(self, flat: Flat) -> None:
        """Notes an equation, in order; of branches and loops, what each result may be."""
        for value in flat.values:
            if value not in self._made and value in self._entries:
                self.add(self._entries[value])
        if has(flat.eqn, _CASES) and flat.cases:
            for out, *sources in zip(flat.outs, *flat.cases, strict=True):
                self.add(flat._replace(ins=tuple(sources), outs=(out,), cases=()))
            return
        operands = [value for value in flat.values if value in self._made]
        if not operands:
            return
        made = _of(self._made, operands)
        self._made.update(dict.fromkeys(flat.outs, made))
        if has(flat.eqn, Trait.SOLVES):
            self.corrected |= _of(self._wholly, operands)
            self._linear.update(dict.fromkeys(flat.outs, made))
            self._solved.update(flat.outs)
            self._vectors.update(out for out in flat.outs if is_vector(out, flat))
        elif computes(flat.eqn) or has(flat.eqn, _CASES):
            self._correct(flat, operands)
            self._add_sum(flat, operands)
            self._add_linear(flat, operands)
            self._add_solved(flat, operands)

    def _correct(self, flat: Flat, operands: Sequence[Value]) -> None:
        """Notes what is multiplied with a ratio, a gain or a solution, and what a vector that was solved is added to.

        What is not linear in its state is no filter, but a step of training, unless it is a vector.
        """
        if has(flat.eqn, PRODUCTS | Trait.MULTIPLIES) and len(operands) >= 2:
            is_step = has(flat.eqn, Trait.MULTIPLIES) and not self._ratios.isdisjoint(operands)
            if is_step or not self._gains.isdisjoint(operands):
                self.corrected |= _of(self._linear, operands)
                self._vectors.update(flat.outs)
            if not self._solved.isdisjoint(operands):
                self.corrected |= _of(self._wholly, operands)
        elif has(flat.eqn, Trait.ADDS) and not self._vectors.isdisjoint(operands):
            self.corrected |= _of(self._linear, operands)

    def _add_solved(self, flat: Flat, operands: Sequence[Value]) -> None:
        if self._solved.isdisjoint(operands) and self._vectors.isdisjoint(operands):
            return
        if has(flat.eqn, PRODUCTS):
            self._vectors.update(out for out in flat.outs if is_vector(out, flat))
        elif has(flat.eqn, _HANDED_ON | SCALES) and not self._vectors.isdisjoint(operands):
            self._vectors.update(flat.outs)
        taken_off = has(flat.eqn, Trait.ADDS) and self._solved.issuperset(operands)  # As in `1 - gain @ h`.
        if taken_off or (has(flat.eqn, PRODUCTS | _HANDED_ON | SCALES) and not self._solved.isdisjoint(operands)):
            self._solved.update(flat.outs)

    def _add_linear(self, flat: Flat, operands: Sequence[Value]) -> None:
        linear, wholly = _of(self._linear, operands), _of(self._wholly, operands)
        is_sum = has(flat.eqn, Trait.ADDS)
        if has(flat.eqn, PRODUCTS | SCALES | _HANDED_ON | _PUT_TOGETHER) or (
            is_sum and all(value in self._wholly for value in operands)
        ):
            self._wholly.update(dict.fromkeys(flat.outs, wholly) if wholly else ())
        if has(flat.eqn, PRODUCTS | SCALES):
            linear = frozenset().union(*(self._linear_by(operands, index) for index in range(len(operands))))
            if has(flat.eqn, PRODUCTS) and linear:
                self.products.append((flat, linear))
        if linear and (is_sum or has(flat.eqn, PRODUCTS | SCALES | _HANDED_ON | _PUT_TOGETHER)):
            self._linear.update(dict.fromkeys(flat.outs, linear))

    def _linear_by(self, operands: Sequence[Value], index: int) -> frozenset[Value]:
        """In what a product is linear by one of its operands: no other is made of that, but for what solves."""
        others = [*operands[:index], *operands[index + 1 :]]
        made = _of(self._made, (each for each in others if each not in self._gains and each not in self._solved))
        return self._linear.get(operands[index], frozenset()) - made

    def _add_sum(self, flat: Flat, operands: Sequence[Value]) -> None:
        if has(flat.eqn, PRODUCTS | Trait.SUMS_AXES):
            self._sums.update(flat.outs if _is_sum(flat, operands) else ())
            self._gains.update(flat.outs if self._gains.issuperset(operands) else ())
            return
        inverts = has(flat.eqn, MOVED) and self._inverses.issuperset(operands)
        if inverts or (_divides(flat, operands) and len(operands) == 1 and operands[0] in self._sums):
            self._inverses.update(flat.outs)
        elif divided := self._divided(flat, operands):
            is_linear = not divided.isdisjoint(self._linear)
            self._gains.update(flat.outs if is_linear else ())
            self._ratios.update(() if is_linear or divided.isdisjoint(self._sums) else flat.outs)
        elif has(flat.eqn, _HANDED_ON | SCALES | Trait.ADDS) and self._gains.issuperset(operands):
            self._gains.update(flat.outs)
        elif has(flat.eqn, _HANDED_ON | Trait.MULTIPLIES) and self._ratios.issuperset(operands):
            self._ratios.update(flat.outs)
        elif self._sums.issuperset(operands):
            self._sums.update(flat.outs)

    def _divided(self, flat: Flat, operands: Sequence[Value]) -> set[Value]:
        """What is divided by a sum, or multiplied with the inverse of one."""
        if has(flat.eqn, Trait.MULTIPLIES) and not self._inverses.isdisjoint(operands):
            return set(operands) - self._inverses
        return set(operands[:1]) if _divides(flat, operands[1:]) and operands[1] in self._sums else set()


def _divides(flat: Flat, operands: Sequence[Value]) -> bool:
    """Whether the last of some operands is a divisor. The root of a sum is none: that is a norm, in a layer."""
    return has(flat.eqn, Trait.DIVIDES) and not has(flat.eqn, Trait.POWER) and operands[-1:] == list(flat.ins[-1:])


def _of(states: Mapping[Value, frozenset[Value]], values: Iterable[Value]) -> frozenset[Value]:
    return frozenset().union(*(states.get(value, ()) for value in values))
