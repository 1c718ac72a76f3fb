"""Steps of iterations: products whose sides have a factor in common, a matrix or the state that is iterated on."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from jamp._primitives import PRODUCTS, has
from jamp.transforms.analysis.products.sides import Sides
from jamp.transforms.analysis.reading.flat import Flat, Opened, Value


@dataclass(frozen=True, eq=False)
class Step:
    """A product whose sides have a factor in common.

    Attributes:
        common: That factor: a matrix, or a state.
        matrices: What else they are products of that no step before made.
        of: All that they are products of.
        products: The product, and those in its sides.
        of_sum: Whether a side is a sum.
        sign: Of the terms that the factor is in, -1 or 1.
    """

    common: Value
    matrices: frozenset[Value]
    of: Set[Value]
    products: tuple[Flat, ...]
    of_sum: bool
    sign: int


class Steps:
    """The steps of a jaxpr, one equation after another.

    Args:
        opened: A jaxpr, with its loops opened.
        sides: Those of its products.

    Attributes:
        carried: What its loops carry on changed.
    """

    def __init__(self, opened: Opened, sides: Sides) -> None:
        self.carried = frozenset(carry for carry, (_, result) in opened.entered.items() if carry != result)
        self._sides = sides
        self._parts = sides.unscaled(opened.scanned)  # What each iteration is given of its own.
        self._changing = set(self.carried)  # What depends on carries or steps.

    def of(self, flat: Flat) -> list[Step]:
        """The steps that an equation is: one for each factor that the sides of a product have in common."""
        self._changing.update(flat.outs if not self._changing.isdisjoint(flat.values) else ())
        if not has(flat.eqn, PRODUCTS) or len(flat.values) != 2:
            return []
        one, other, of_sum = self._sides.factors(*flat.values)
        leaves = {value for side in (one, other) for value, factor in side.items() if factor.products or len(side) == 1}
        steps: list[Step] = []
        # What each iteration is given are its layers, or its data.
        for common in one.keys() & other.keys() if self._parts.isdisjoint(leaves) else ():
            if not all(map(self.is_fixed, (*one[common].weights, *other[common].weights))):
                continue  # A gate, which bends what it multiplies.
            inside = {id(each): each for each in (*one[common].products, *other[common].products, flat)}
            of = leaves.union(*(self._sides.unscaled(each.values) for each in inside.values()))
            of = of.union(*map(self._sides.summed, of))
            matrices = frozenset(leaf for leaf in leaves if leaf != common and self.is_fixed(leaf))
            sign = one[common].sign * other[common].sign
            steps.append(Step(common, matrices, of, tuple(inside.values()), of_sum, sign))
        self._changing.update(flat.outs if steps else ())
        return steps

    def matrices(self, step: Step) -> Iterable[Value]:
        """What a step multiplies its state with."""
        return [step.common] if self.is_fixed(step.common) else step.matrices

    def is_fixed(self, value: Value) -> bool:
        """Whether a value depends on no step before."""
        return value not in self._changing
