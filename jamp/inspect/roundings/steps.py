"""A jaxpr as one list of equations: what it calls is written in line, as deep as calls go."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jamp._compat import ClosedJaxpr, Eqn, Literal, called_jaxpr, jaxpr_consts, open_jaxpr
from jamp.inspect._operations import CALLS

# The place of an equation: its number in a jaxpr, then which of the jaxprs inside of it, and the number in that.
Key: TypeAlias = tuple[int, ...]
# A variable by number, each made once: what is called twice has other variables each time.
Value: TypeAlias = "int | Literal"


class Step(NamedTuple):
    """An equation that is no call.

    Attributes:
        key: Where it is.
        eqn: The equation, for all but its variables.
        ins: Its operands.
        outs: Its results.
    """

    key: Key
    eqn: Eqn
    ins: Sequence[Value]
    outs: Sequence[int]


class Steps(NamedTuple):
    """A jaxpr in line.

    Attributes:
        steps: Its equations, in order.
        ins: Its inputs.
        consts: Its constants.
        outs: Its results.
    """

    steps: Sequence[Step]
    ins: Sequence[int]
    consts: Mapping[int, Any]
    outs: Sequence[Value]


def in_line(jaxpr: ClosedJaxpr, key: Key = ()) -> Steps:
    """A jaxpr with what it calls in line.

    Args:
        jaxpr: The jaxpr.
        key: That of the equation it belongs to, and which of its jaxprs it is.
    """
    numbers = itertools.count()
    steps: list[Step] = []
    consts: dict[int, Any] = {}

    def enter(jaxpr: ClosedJaxpr, given: Sequence[Value], key: Key) -> list[Value]:
        inner, held = open_jaxpr(jaxpr), {next(numbers): value for value in jaxpr_consts(jaxpr)}
        consts.update(held)
        values: dict[Any, Value] = dict(zip([*inner.invars, *inner.constvars], [*given, *held], strict=True))

        def read(atom: Any) -> Value:
            return atom if isinstance(atom, Literal) else values[atom]

        for number, eqn in enumerate(inner.eqns):
            here, ins = (*key, number), [*map(read, eqn.invars)]
            if eqn.primitive.name in CALLS:
                outs = enter(called_jaxpr(eqn.params), ins, (*here, 0))
            else:
                outs = [next(numbers) for _ in eqn.outvars]
                steps.append(Step(here, eqn, ins, outs))
            values |= zip(eqn.outvars, outs, strict=True)
        return [*map(read, inner.outvars)]

    given = [next(numbers) for _ in open_jaxpr(jaxpr).invars]
    outs = enter(jaxpr, given, key)
    return Steps(steps, given, consts, outs)
