"""What is known of values that several equations make together, by passes that look for one form each."""

from __future__ import annotations

from collections.abc import Sequence

from jamp._compat import Atom, ClosedJaxpr, Jaxpr, Var, inner_jaxprs, jaxpr_consts, open_jaxpr
from jamp._dtypes import Pair
from jamp.transforms.analysis.products.cancelling import cancelling, centred_in
from jamp.transforms.analysis.products.dividends import dividends, divisors
from jamp.transforms.analysis.products.exponentials import kernels
from jamp.transforms.analysis.products.matrices import diagonals, differences
from jamp.transforms.analysis.products.means import means
from jamp.transforms.analysis.products.spectra import of_spectra
from jamp.transforms.analysis.products.terms import terms
from jamp.transforms.analysis.reading.chains import Constants, find_constants
from jamp.transforms.program.heuristics import Heuristics


class Facts:
    """What was found in all jaxprs that were looked at.

    Args:
        pair: The wide and the narrow dtype.
        heuristics: The thresholds.
    """

    def __init__(self, pair: Pair, heuristics: Heuristics) -> None:
        self._pair = pair
        self._coordinates = heuristics.coordinates
        self._seen: dict[int, ClosedJaxpr] = {}
        self._asked: dict[tuple[int, ...], Jaxpr] = {}
        # Jaxprs that one was opened with, and what is inside of it: for products that cancel, and for means.
        self._opened: set[int] = set()
        self._averaged: set[int] = set()
        self._squares: set[int] = set()  # Jaxprs that may have a product of a matrix with itself.
        self.differences: set[Atom] = set()  # Constants that take differences.
        self._matrices: set[Atom] = set()  # The matrices among them.
        self.diagonals: set[Var] = set()  # Diagonal matrices.
        self.means: set[Var] = set()  # Weighted means.
        self.points: set[Var] = set()  # Those of points in space.
        self.cancelling: set[Atom] = set()  # Results of products that cancel with others.
        self.divisors: set[Var] = set()  # Products with a vector that are divided by.
        self.kernels: set[Var] = set()  # Products with exponentials, or power spectra, that float16 has no range for.
        self.terms: set[Var] = set()  # Multiples of one value, and their sums.
        self.solved: set[Atom] = set()  # Results of products of solutions with what was solved.
        # Operands wanted in float32 where half would do: Gram matrices to be centred, products to be divided.
        self.wide: set[tuple[int, int]] = set()

    def look_at(self, closed: ClosedJaxpr, constants: Constants) -> None:
        """Adds what is found in a jaxpr, of which some values depend on no argument of the program."""
        jaxpr = open_jaxpr(closed)
        self._add(differences(jaxpr, jaxpr_consts(closed), constants, self._pair))
        self._look_inside(jaxpr)
        if self._is_new(jaxpr):
            self._look_once(jaxpr, jaxpr_consts(closed))
        if self._matrices and id(jaxpr) in self._squares and self._is_new(jaxpr, len(self._matrices)):
            products = centred_in(jaxpr, self._matrices)
            self.cancelling |= products.products
            self.wide |= products.grams

    def _look_once(self, jaxpr: Jaxpr, consts: Sequence[object]) -> None:
        """Adds what depends on the jaxpr alone, and not on what it is given."""
        self.diagonals |= diagonals(jaxpr, consts)
        self.terms |= terms(jaxpr)
        self.divisors |= divisors(jaxpr)
        if self._pair.lacks_range:
            self.wide |= dividends(jaxpr)
            self.kernels |= kernels(jaxpr, consts) | of_spectra(jaxpr)
        if id(jaxpr) not in self._opened:
            products = cancelling(jaxpr, self.diagonals)
            self.cancelling |= products.cancelling
            self.solved |= products.solved
            self._opened |= products.inside
            self._squares |= {id(jaxpr), *products.inside} if products.squares else set()
        if id(jaxpr) not in self._averaged:
            averages = means(jaxpr, self._coordinates)
            self.means |= averages.of_vectors | averages.of_points
            self.points |= averages.of_points
            self._averaged |= averages.inside

    def _add(self, found: frozenset[Atom]) -> None:
        self._matrices |= {atom for atom in found - self.differences if len(atom.aval.shape) > 1}
        self.differences |= found

    def _is_new(self, jaxpr: Jaxpr, *given: int) -> bool:
        """Whether a jaxpr was not asked for before, with what it is given."""
        key = (id(jaxpr), *given)
        is_new = key not in self._asked
        self._asked[key] = jaxpr
        return is_new

    def _look_inside(self, jaxpr: Jaxpr) -> None:
        """Adds what the functions that a jaxpr calls close over: what they are given is known before."""
        for inner in (inner for eqn in jaxpr.eqns for inner in inner_jaxprs(eqn) if id(inner) not in self._seen):
            self._seen[id(inner)] = inner
            opened, consts = open_jaxpr(inner), jaxpr_consts(inner)
            if consts:
                self._add(differences(opened, consts, find_constants(opened), self._pair))
                self.diagonals |= diagonals(opened, consts)
            self._look_inside(opened)
