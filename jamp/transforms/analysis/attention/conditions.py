"""What may be known of a mask: that places are in some order, what an operand says, that two integers are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jamp._compat import Var
from jamp.transforms.analysis.attention.places import Affine, Ordered
from jamp.transforms.analysis.reading.flat import Source
from jamp.transforms.program.attention import Layout

# What is added to a score, or put in its place, and is less than this leaves nothing of it: exp(-1e4) is zero.
NEVER = -1e4


class Leaf(NamedTuple):
    """What an operand says.

    Attributes:
        source: The operand.
        layout: Its layout.
        keeps: Whether scores count where it is not zero, or where it is.
        added: Whether the others are made small by adding to them: a query that sees no key sees all of them so.
    """

    source: Source
    layout: Layout
    keeps: bool
    added: bool = False


class Same(NamedTuple):
    """That two integers are equal, as the documents of a query and of a key in a packed sequence.

    Attributes:
        first: One of them.
        at: Its layout.
        second: The other, which has axes that the first lacks, as that has axes that it lacks.
        beside: The layout of the second.
        added: Whether other scores are made small by adding to them; see `Leaf`.
    """

    first: Source
    at: Layout
    second: Source
    beside: Layout
    added: bool = False


Condition = Leaf | Ordered | Same


def plain(condition: Condition) -> Condition:
    """A condition on scores that are nothing but a number where it does not hold."""
    return condition._replace(added=False)


class Known(NamedTuple):
    """A value of two numbers that depends on places alone.

    Attributes:
        orders: Conditions; their labels are axes of the value.
        off: The number where one of them does not hold.
        on: The number where all of them hold.
    """

    orders: tuple[Ordered, ...]
    off: float
    on: float


# Tells what an input or a constant of a jaxpr is, if it is a mask of places, or places: see `outside`.
Knows = Callable[[Var], Known | Affine | None]
