"""Parts of large results that are kept in their place: one token of all, the value of the action that was taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from jax.core import ShapedArray

from jamp._compat import Atom, Literal, Var
from jamp._dtypes import is_inexact
from jamp._primitives import Rule, Trait, has, rule_of
from jamp.transforms.keeping.derivatives import reads_operands
from jamp.transforms.program.flow import num_elements
from jamp.transforms.program.plan import Step

_ELEMENTWISE = (Rule.PROMOTE, Rule.FOLLOW)
_SMALLER = 2  # All parts together are at most half of the whole.


def parts_alone(steps: Sequence[Step], results: Iterable[Var], is_recomputed: Callable[[Step], bool]) -> frozenset[Var]:
    """The parts of what is not computed again that the backward pass reads, where it does not read the whole.

    To compute them again, the whole would have to be kept.

    Args:
        steps: The steps of a plan.
        results: Its results, which are read as wholes.
        is_recomputed: Whether the results of a step are computed again.
    """
    reading = _Reading(is_recomputed)
    reading.go_through(steps)
    reading.read(results)
    return reading.kept()


class _Reading:
    def __init__(self, is_recomputed: Callable[[Step], bool]) -> None:
        self._is_recomputed = is_recomputed
        self._made_of: dict[Atom, frozenset[Var]] = {}  # The wholes, and parts, that values are computed of.
        self._parts: dict[Var, frozenset[Var]] = {}  # By part, what it is a part of.
        self._read = set[Var]()  # Wholes, and parts, of which the backward pass reads all elements.

    def go_through(self, steps: Sequence[Step]) -> None:
        for step in steps:
            of = self._of(step.operands)
            if _hands_on(step):
                size = max((num_elements(atom.aval) for atom in step.operands if self._of([atom])), default=0)
                for var in step.eqn.outvars:
                    is_part = 0 < _SMALLER * num_elements(var.aval) <= size
                    if is_part:
                        self._parts[var] = of
                    self._made_of[var] = frozenset({var}) if is_part else of
            elif self._is_recomputed(step):
                self._read |= of
                self._made_of.update((var, of) for var in step.eqn.outvars)
            else:
                self._read |= frozenset() if has(step.eqn, Trait.LINEAR) else of
                self._made_of.update((var, frozenset({var})) for var in step.eqn.outvars if _is_float(var))

    def read(self, atoms: Iterable[Atom]) -> None:
        self._read |= self._of(atoms)

    def kept(self) -> frozenset[Var]:
        origins: dict[Var, frozenset[Var]] = {}
        kept: dict[Var, frozenset[Var]] = {}
        for part, of in self._parts.items():
            # What no derivative reads as a whole is passed through.
            origins[part] = frozenset[Var]().union(
                *(origins.get(var, {var}) if var not in self._read else {var} for var in of)
            )
            if part in self._read and self._read.isdisjoint(origins[part]):
                kept[part] = origins[part]
        total = Counter[Var]()
        for part, of in kept.items():
            total.update(dict.fromkeys(of, num_elements(part.aval)))
        large = {var for var, elements in total.items() if _SMALLER * elements > num_elements(var.aval)}
        return frozenset(part for part, of in kept.items() if large.isdisjoint(of))

    def _of(self, atoms: Iterable[Atom]) -> frozenset[Var]:
        return frozenset[Var]().union(*(self._made_of.get(atom, ()) for atom in atoms if not isinstance(atom, Literal)))


def _hands_on(step: Step) -> bool:
    """Whether a step moves elements, chooses among them or adds to them: its derivative reads none of them."""
    if has(step.eqn, Trait.CALLS) and step.plans:
        return all(_hands_on(inner) for plan in step.plans for inner in plan.steps)
    if not any(map(_is_float, step.operands)):
        return True
    return has(step.eqn, Trait.MOVES) or (rule_of(step.eqn) in _ELEMENTWISE and not reads_operands(step))


def _is_float(atom: Atom) -> bool:
    """Whether a value is an array of numbers that flow: values of a type of one's own have no dtype."""
    return isinstance(atom.aval, ShapedArray) and is_inexact(atom.aval.dtype)
