"""Walks from values back to what they are made of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from jamp._primitives import MOVED, Trait, has
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source, Value, moved


def operands(flat: Flat, result: Value) -> list[Value]:
    """What a result of an equation is made of; of a `cond`, the same result of each branch."""
    sources = [flat.ins[0], *(case[flat.outs.index(result)] for case in flat.cases)] if flat.cases else flat.ins
    return [source for source in sources if isinstance(source, Value)]


def inside(flat: Flat) -> list[Value]:
    """The operands of an equation, and the results of branches, or of an iteration, in it."""
    return [source for source in (*flat.ins, *itertools.chain(*flat.cases)) if isinstance(source, Value)]


def back(
    opened: Opened,
    sources: Iterable[Source | None],
    onward: Callable[[Flat, Value], Iterable[Source | None]] = operands,
) -> Iterator[tuple[Value, Flat | None]]:
    """Values, and all that they are made of, each once; of what an iteration is given, what it is a part of.

    Args:
        opened: The program.
        sources: Where the walk begins. It ends at literals.
        onward: Where it goes on, from what makes a value: to all operands, unless told.

    Yields:
        A value, and what makes it: None for arguments.
    """
    seen: set[Value] = set()
    ahead = [*sources]
    while ahead:
        value = ahead.pop()
        if isinstance(value, Value) and value not in seen:
            seen.add(value)
            flat = opened.maker(value)
            yield value, flat
            ahead += [opened.scanned.get(value)] if flat is None else onward(flat, value)


def makers_behind(opened: Opened, sources: Iterable[Source], through: int) -> Iterator[Flat]:
    """The equations that make some values, behind those of some traits."""
    walked = back(opened, sources, lambda flat, _: flat.values if has(flat.eqn, through) else ())
    return (flat for _, flat in walked if flat is not None and not has(flat.eqn, through))


def parts_of(opened: Opened, source: Source | None) -> set[Value | None]:
    """What the elements of a value are, before they were moved, put together, and chosen among others.

    Returns:
        Values that are computed or given; None stands for numbers that the program writes.
    """
    parts: set[Value | None] = set()
    seen: set[Value] = set()
    pending = [source]
    while pending:
        value = pending.pop()
        if not isinstance(value, Value):
            parts.add(None)
        elif value not in seen:
            seen.add(value)
            flat = opened.maker(value)
            handed_on = None if flat is None else _handed_on(flat, value)
            parts.update((value,) if handed_on is None else ())
            pending += handed_on or ()
    return parts


def _handed_on(flat: Flat, result: Value) -> Sequence[Source] | None:
    """The operands that a result of an equation is elements of; None where it is computed."""
    index = flat.outs.index(result)
    if flat.cases:
        return [case[index] for case in flat.cases]
    if has(flat.eqn, MOVED):
        return [moved(flat, index)]
    if has(flat.eqn, Trait.SELECTS):
        return flat.ins[1:]
    if has(flat.eqn, Trait.REPLACES) and has(flat.eqn, Trait.ASSEMBLES):
        return flat.ins[0], flat.ins[2 if "dimension_numbers" in flat.eqn.params else 1]
    return flat.ins if has(flat.eqn, Trait.ASSEMBLES) else None
