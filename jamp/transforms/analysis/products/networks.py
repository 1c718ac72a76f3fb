"""Networks beside systems: a policy acts on a body, whose acceleration a mass matrix is solved for.

In the next step the policy reads what was solved, as the residual of Newton's method does. But what is wrong in its
layers is wrong by as much in its answer, and no step multiplies it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping

from jamp._primitives import MOVED, PRODUCTS, SHOWN, Trait, has
from jamp.transforms.analysis.products.solutions import Gains, system
from jamp.transforms.analysis.products.unfolded import Unfolded, behind
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source, Value
from jamp.transforms.analysis.reading.walks import back, inside
from jamp.transforms.program.flow import num_elements

_LINEAR = Trait.ADDS | MOVED | SHOWN | Trait.SUMS_AXES | PRODUCTS | Trait.SOLVES

Widths = Mapping[int, int]  # By the identity of an equation that is a layer, the elements between it and the next one.


def networks(opened: Opened, unfolded: Unfolded, gains: Gains) -> Widths:
    """Products with weights, one after another, and how wide it is between them.

    What stands between them is not linear, and no system is made of their weights. The Jacobian that Newton's method
    solves with is made of all matrices in its residual; a residual that is assembled, `g.T @ stress(g @ x)`, has one
    matrix on both ways.

    Args:
        opened: A jaxpr, with its loops opened.
        unfolded: Its values as sums of products.
        gains: Its quotients that solve one equation.
    """
    systems = _systems(opened, gains)
    states = _states(opened) if systems else set[Value]()
    widths: dict[int, int] = {}
    for layer in opened.eqns if systems else ():
        for weights, given in _layer(unfolded, layer, states):
            makers = (opened.made[value] for value in behind(opened, [given]))
            bent = (value for flat in makers if _bends(unfolded, flat) for value in flat.values)
            before = behind(opened, bent)
            for value in before if weights not in systems else ():
                first = opened.made[value]
                if any(other != weights and other not in systems for other, _ in _layer(unfolded, first, states)):
                    width = num_elements(value.aval)
                    widths.update((id(each), max(width, widths.get(id(each), 0))) for each in (first, layer))
    return widths


def is_layer(flat: Flat, widths: Widths, size: int) -> bool:
    """Whether an equation is a layer of a network that is much wider than a state: what is fitted to a grid is not."""
    return widths.get(id(flat), 0) > 2 * size


def _systems(opened: Opened, gains: Gains) -> set[Value]:
    """What the matrices of systems are made of, back to vectors: of a state that a matrix depends on, no further."""
    matrices = {value for flat in opened.eqns if has(flat.eqn, Trait.SOLVES) for value in system(flat)[0]}
    matrices.update(value for flat in opened.eqns if id(flat) in gains for value in flat.values)
    found: set[Value] = set()
    for matrix in matrices:
        vector = num_elements(matrix.aval) // max(matrix.aval.shape[-1:], default=1)

        def onward(flat: Flat, value: Value, vector: int = vector) -> Iterable[Source]:
            if has(flat.eqn, Trait.SOLVES) or num_elements(value.aval) <= vector:
                return ()
            return [case[flat.outs.index(value)] for case in flat.cases] or flat.values

        found.update(value for value, _ in back(opened, [matrix], onward))
    return found


def _states(opened: Opened) -> set[Value]:
    """What is computed from the states of loops, and from solutions."""
    states = set(opened.entered)
    for flat in opened.eqns:
        if has(flat.eqn, Trait.SOLVES) or not states.isdisjoint(inside(flat)):
            states.update(flat.outs)
    return states - opened.entered.keys()


def _layer(unfolded: Unfolded, flat: Flat, states: Container[Value]) -> Iterator[tuple[Value, Value]]:
    """The weights of a product, which no state changes, and what they are multiplied with."""
    values = flat.values if has(flat.eqn, PRODUCTS) else ()
    if len(values) == 2:
        for weights, given in (values, values[::-1]):
            if len(weights.aval.shape) >= 2 and (origin := unfolded.origin(weights)) not in states:
                yield origin, given


def _bends(unfolded: Unfolded, flat: Flat) -> bool:
    return not (has(flat.eqn, _LINEAR) or unfolded.scaled(flat))
