"""The lattice of states.

`join` is the state of a value that is one of several; `meet` is the state of a loop carry, which must leave an
iteration as it came in. Both unite marks and take the larger size; `join` unites roots as well.
tests/transforms/program/test_lattice.py holds their laws.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jamp._dtypes import Pair
from jamp.transforms.program.flow import Flow, united
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import Mark
from jamp.transforms.program.scale import enclosing, largest


def scale_of_all(states: Iterable[Flow]) -> int:
    """The scale of what is one of several: that of data. A number beside it is a mask, or what a loop begins with."""
    numbers, data = [], []
    for state in states:
        (numbers if state.is_number else data).append(state.scale)
    return largest(data or numbers)


def common_scope(scopes: Iterable[str]) -> str:
    """The innermost scope that encloses all of some scopes."""
    paths = [scope.split("/") for scope in scopes]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return "/".join(shared)


def _marks(states: Sequence[Flow]) -> Mark:
    """The marks of what is one of several. Half is as good only if it is as good for each."""
    marks = united(states)
    return marks if all(state.has(Mark.RAISED) for state in states) else marks & ~Mark.RAISED


def join(states: list[Flow], pair: Pair) -> Flow:
    """State of a value that is one of several, such as the results of the branches of a `cond`.

    The least upper bound in the order weak, lazy, half, statistic, accumulator, in which an island lies beside the
    first two and below half: firm float32 wins over half, half wins over what only happens to be float32. Two half
    dtypes, and an island beside half, join to the half dtype of the policy.
    """
    kinds = {state.kind for state in states}
    kind = max(kinds)
    if kind == Kind.ISLAND and len(kinds) > 1:
        kind = Kind.HALF
    dtype = pair.wide
    if kind == Kind.HALF:
        halves = {state.dtype if state.kind == Kind.HALF else pair.narrow for state in states if state.kind >= kind}
        dtype = halves.pop() if len(halves) == 1 else pair.narrow
    size = max(state.size for state in states)
    roots = frozenset().union(*(state.roots for state in states))
    scope = common_scope(state.scope for state in states)
    number = None if kind == Kind.HALF else enclosing(state.number for state in states)
    return Flow(dtype, kind, size, scope, _marks(states), roots, scale_of_all(states), number)


def meet(before: Flow, after: Flow, kind: Kind, pair: Pair) -> Flow:
    """State of a loop carry, from the states that it went into an iteration with and came out of it with.

    A carry never falls, so that repeating this comes to an end. It keeps its roots: what else an iteration hands over,
    such as another carry in a swap, or a slice of what is scanned over, the carry continues for that iteration alone.

    Args:
        before: State in front of the iteration.
        after: State behind it.
        kind: How firm the loop wants it (see `planning.loops`): its own kind, if that is firmer, stays.
        pair: The precisions of the policy.
    """
    size, marks = max(before.size, after.size), _marks((before, after))
    scale = scale_of_all((before, after))
    number = before.number if before.number == after.number else None
    if kind > before.kind:
        before = before._replace(kind=kind, dtype=pair.narrow if kind == Kind.HALF else pair.wide)
    if before.kind == Kind.HALF:
        scale, number = 0, None
    return before._replace(size=size, marks=marks, scale=scale, number=number)
