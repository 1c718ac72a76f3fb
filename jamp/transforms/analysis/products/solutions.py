"""Products of solutions with what they solve: what is left of a system cancels.

A product of a solution with weights is a layer, and so is one of weights with what they are made of: an orthogonal
factor, a norm that they are divided by.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from jamp._primitives import PRODUCTS, Trait, has
from jamp.transforms.analysis.products.dividends import divided
from jamp.transforms.analysis.products.factors import Cancelled, Factors
from jamp.transforms.analysis.products.unfolded import Unfolded, behind
from jamp.transforms.analysis.reading.flat import Flat, Opened, Value
from jamp.transforms.analysis.reading.walks import back
from jamp.transforms.program.flow import num_elements

Gains = Mapping[int, frozenset[Value]]  # By the identity of a quotient that solves one equation, what it is made of.
# What is made of a solution by these, and other numbers, is solution or not as a whole.
_HANDS_ON = Trait.SPREADS | Trait.MOVES | Trait.VIEW | Trait.CONVERTS | Trait.LINEAR


def solved(opened: Opened, unfolded: Unfolded, gains: Gains) -> Iterator[Cancelled]:
    """Products of a solution with what it was solved from, or with itself.

    `y - a @ (pinv(a) @ y)` and `y - q @ (q.T @ y)` are residuals, as `y - a @ solve(a, y)` is. So are those of what is
    made of a solution, corrected by another one, moved, or put into its boundary: with a rounded residual each further
    step of an iterative refinement made the result worse (of 7e-8, two steps left 3e-3).
    """
    matrices: frozenset[Value] = frozenset()
    before: set[Value] = set()  # Products that make what is solved: as it was rounded it is solved.
    solutions: set[Value] = set()
    made: set[Value] = set()  # Of solutions for the most part, and these.
    for flat in opened.eqns:
        if has(flat.eqn, Trait.ADDS) and solutions:
            yield from _taken_off(opened, unfolded, flat, made)
        if has(flat.eqn, Trait.SOLVES):
            given = _addends(opened, flat.values)
            matrices |= unfolded.origins(given)
            before.update(
                out for value in given for product in unfolded.factors(value).products for out in product.outs
            )
            solutions.update(flat.outs)
            made.update(flat.outs)
        elif id(flat) in gains:
            matrices |= gains[id(flat)]
            solutions.update(flat.outs)
            made.update(flat.outs)
        elif solutions and has(flat.eqn, PRODUCTS):
            whole = unfolded.factors(flat.outs[0])
            of = unfolded.origins(whole.of)
            again = unfolded.origins(whole.forms)
            of_system = bool(of & matrices) and not made.isdisjoint(of | unfolded.origins(flat.values))
            if of_system or not solutions.isdisjoint(of & again):
                yield Cancelled(tuple(each for each in whole.products if before.isdisjoint(each.outs)))
            if not solutions.isdisjoint(unfolded.origins(flat.values)):  # By an inverse, say.
                made.update(flat.outs)
        elif not made.isdisjoint(most_of(flat)):
            made.update(flat.outs)


def _taken_off(opened: Opened, unfolded: Unfolded, total: Flat, made: Container[Value]) -> Iterator[Cancelled]:
    """Gram matrices that squares of solutions are taken off, as a prior variance: little of them is left near data."""
    for prior, taken in itertools.permutations(total.values, 2):
        if any(value in made for term in unfolded.terms(taken) for value in term.of):
            values = [value for value in behind(opened, [prior]) if has(opened.made[value].eqn, PRODUCTS)]
            yield from (Cancelled(found.products) for found in map(unfolded.factors, values) if found.forms)


def right_sides(opened: Opened, unfolded: Unfolded, systems: Sequence[Cancelled]) -> Iterator[Cancelled]:
    """Products on the other side of a system: by factors of its matrix, and in what these multiply, `y - h @ x`.

    Args:
        opened: A jaxpr.
        unfolded: Its values as sums of products.
        systems: The products of systems.
    """
    parts = _Parts(opened, unfolded)
    for flat in opened.eqns:
        yield from parts.add(flat)
    solvers = [flat for flat in opened.eqns if has(flat.eqn, Trait.SOLVES)]
    for flat in solvers:
        matrices, given = system(flat)
        yield from of_matrices(opened, unfolded, given, {value for value, _ in back(opened, matrices)} if given else ())
    sides = itertools.chain(*(flat.values for flat in solvers))
    for side in (*sides, *(value for system in systems for product in system.products for value in product.values)):
        rest = opened.maker(unfolded.unscaled(side))
        for seen, expected in itertools.permutations(rest.values, 2) if rest and has(rest.eqn, Trait.SUBTRACTS) else ():
            is_data = num_elements(unfolded.origin(seen).aval) >= num_elements(side.aval)  # And no mean.
            terms = unfolded.terms(expected) if is_data and not unfolded.terms(seen) else ()
            yield from (Cancelled(term.products) for term in terms)


def of_matrices(
    opened: Opened, unfolded: Unfolded, sides: Iterable[Value], matrices: Container[Value]
) -> Iterator[Cancelled]:
    """Products with matrices of a system that its sides are made of: `a.T @ y`, where `a.T @ a` is solved with.

    Where that is nearly singular, a side that is a sum of its rows has no part that it divides by next to nothing. With
    a rounded matrix in it, the result of conjugate gradients was off by 4 %, of eight times what rounded data leaves.
    """
    for value in behind(opened, sides):
        flat = opened.made[value]
        of = unfolded.origins(flat.values) if has(flat.eqn, PRODUCTS) and value not in matrices else ()
        if any(len(each.aval.shape) >= 2 and each in matrices for each in of):
            yield Cancelled((flat,))


def system(solver: Flat) -> tuple[list[Value], list[Value]]:
    """What makes the matrix of a system that an equation solves, and its sides, as many as results."""
    size = len(solver.outs) if len(solver.ins) > len(solver.outs) else 0
    sides = [each for each in solver.ins[len(solver.ins) - size :] if isinstance(each, Value)]
    return [each for each in solver.values if len(each.aval.shape) >= 2 and each not in sides], sides


class _Parts:
    """Products with parts of one decomposition, of which another solves with what they give: `solve(r, q.T @ y)`.

    Args:
        opened: A jaxpr.
        unfolded: Its values as sums of products.
    """

    def __init__(self, opened: Opened, unfolded: Unfolded) -> None:
        self._opened = opened
        self._unfolded = unfolded
        self._of: dict[Value, int] = {}  # By part, the decomposition.
        self._projected: dict[Value, tuple[int, Flat]] = {}  # By value, the product with a part that it is made of.

    def add(self, flat: Flat) -> Iterator[Cancelled]:
        """Takes one equation after another, and finds the products in front of it."""
        if has(flat.eqn, Trait.SOLVES):
            given = _addends(self._opened, flat.values)
            of = {self._of[value] for value in given if value in self._of}
            yield from self._found(of, given)
            self._of.update(dict.fromkeys(flat.outs, min(of, default=id(flat))))
        elif has(flat.eqn, PRODUCTS):
            of = {self._of[value] for value in self._unfolded.origins(flat.values) if value in self._of}
            found = [*self._found(of, self._unfolded.origins(flat.values))]
            yield from (Cancelled((*each.products, flat)) for each in found)
            self._projected.update((out, (number, flat)) for number in of for out in flat.outs)
        else:
            projected = [self._projected[value] for value in most_of(flat) if value in self._projected]
            self._projected.update((out, each) for each in projected for out in flat.outs)

    def _found(self, of: Container[int], given: Iterable[Value]) -> Iterator[Cancelled]:
        projected = (self._projected[value] for value in given if value in self._projected)
        yield from (Cancelled((product,)) for number, product in projected if number in of)


def descended(opened: Opened, unfolded: Unfolded) -> Iterator[Cancelled]:
    """Products with a matrix in whose quadratic form a descent is measured: the step of conjugate gradients.

    That is `r @ r / (p @ (a @ p))`, written one after another as well as in a loop, or a ratio to a norm, `q @ q` of
    `q = a @ p`, that scales `p`.
    """
    matrices: set[Value] = set()
    for flat in opened.eqns:
        if has(flat.eqn, Trait.DIVIDES) and len(flat.ins) == 2:
            for term in unfolded.terms(flat.ins[1]):
                of = unfolded.origins(term.of)
                is_norm = len({*term.sides}) < 2
                if (
                    term.is_sum
                    and term.products
                    and term.squared
                    and (not is_norm or _scales(opened, unfolded, flat, of))
                ):
                    matrices |= of
    yield from products_with(opened, unfolded, matrices)


def gains_of_one(opened: Opened, unfolded: Unfolded) -> Gains:
    """By quotient that solves one equation and corrects what it is made of, this: `p - outer(k, h @ p)`.

    Of `k = p @ h / (h @ p @ h + r)`, the gain of an observation. It may correct the mean alone, `m + k * (y - h @ m)`.
    A layer may divide by such a form too, and goes on with other weights.
    """
    gains: list[tuple[int, Counter[Value], frozenset[Value]]] = []
    found: dict[int, frozenset[Value]] = {}
    for flat in opened.eqns:
        if of := _system_of_one(opened, unfolded, flat):
            gains.append((id(flat), Counter(unfolded.factors(flat.outs[0]).of), of))
        elif gains and has(flat.eqn, PRODUCTS | Trait.MULTIPLIES):
            factors = Counter(unfolded.factors(flat.outs[0]).of)
            for number, gain, of in gains:
                others = factors - gain if gain <= factors else Counter()
                terms = (term for other in others for term in unfolded.terms(other))
                if not of.isdisjoint(unfolded.origins(itertools.chain(others, *(term.of for term in terms)))):
                    found[number] = of
    return found


def _system_of_one(opened: Opened, unfolded: Unfolded, flat: Flat) -> frozenset[Value]:
    """What a quotient is made of whose divisor is a form of that: `p @ h / (h @ p @ h + r)`."""
    for position, divisor in divided(opened, flat):
        forms = [term for term in unfolded.terms(divisor) if term.is_sum and term.products and term.squared]
        one = unfolded.factors(flat.ins[position]) if forms else Factors()
        of = Counter(map(unfolded.origin, one.of))
        if one.products and any(of < Counter(map(unfolded.origin, form.of)) for form in forms):
            return frozenset(of)
    return frozenset()


def _scales(opened: Opened, unfolded: Unfolded, ratio: Flat, values: Container[Value]) -> bool:
    """Whether a ratio multiplies one of some values."""
    ahead = [*ratio.outs]
    while ahead:
        readers = opened.readers.get(ahead.pop(), ())
        products = [flat for flat in readers if has(flat.eqn, Trait.MULTIPLIES)]
        if any(value in values for flat in products for value in unfolded.origins(flat.values)):
            return True
        ahead += [out for flat in readers if has(flat.eqn, Trait.VIEW | Trait.CONVERTS) for out in flat.outs]
    return False


def products_with(opened: Opened, unfolded: Unfolded, of: Iterable[Value]) -> Iterator[Cancelled]:
    """All products with the matrices among some values, moved or not: those of derivatives too."""
    matrices = {value for value in of if len(value.aval.shape) >= 2}
    for flat in opened.eqns if matrices else ():
        if has(flat.eqn, PRODUCTS) and not matrices.isdisjoint(unfolded.origins(flat.values)):
            yield Cancelled((flat,))


def _addends(opened: Opened, values: Iterable[Value]) -> set[Value]:
    """Values, and what they are sums of: `cholesky` is given `(a + a.T) / 2`."""
    return {value for value, _ in back(opened, values, lambda flat, _: most_of(flat))}


def most_of(flat: Flat) -> list[Value]:
    """What a sum, a scaled, moved or chosen value is made of for the most part: no norm, nor what it divides."""
    if not has(flat.eqn, _HANDS_ON):
        return []
    made = max(num_elements(out.aval) for out in flat.outs)
    return [value for value in flat.values if made / 2 <= num_elements(value.aval) <= 2 * made]


def is_vector(result: Value, flat: Flat) -> bool:
    """Whether what comes out is one vector for each matrix that is given: no weights of a layer are."""
    size = num_elements(result.aval)
    sides = [(num_elements(value.aval), side) for value in flat.values for side in value.aval.shape[-2:]]
    return any(all_elements == size * side for all_elements, side in sides if side != 1)
