"""`Numerics`: what `check_numerics` found in a step, or in each of many."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jamp.inspect.numerics.found import Found
from jamp.inspect.numerics.sites import Site, to_blame

SHOWN = 10


class Argument(NamedTuple):
    """A floating argument: its name in words, and its dtype."""

    name: str
    dtype: str


@dataclasses.dataclass(frozen=True)
class Checked:
    """An operation, and what was found there.

    Attributes:
        operation: Name of the primitive; or `"argument"`, followed by its path, of infinities that came in.
        scope: Path of named scopes; empty where the model names none.
        line: `file:line` of the user's code.
        function: Name of the function there.
        dtype: Dtype of its results.
        infinities: Infinite results that it made of finite operands.
        nans: NaN that it made of other operands.
        iteration: The iteration of the outermost loop around it that made the first; None outside of loops.
        largest: Largest finite magnitude of its results; None where that was not measured.
        of_infinities: Whether what it made the first NaN of were infinities.
        nan_made_by: The operation that made NaN of infinities that came in; None for all else.
        step: Which of the steps, where many were checked (by `jax.lax.scan` or `jax.vmap` of the step); else None.
    """

    operation: str
    scope: str
    line: str
    function: str
    dtype: str
    infinities: int
    nans: int
    iteration: int | None
    largest: float | None
    of_infinities: bool = False
    nan_made_by: Checked | None = None
    step: int | tuple[int, ...] | None = None

    def __str__(self) -> str:
        counts = [f"{n} {kind}" for n, kind in ((self.infinities, "inf"), (self.nans, "nan")) if n]
        size = [] if not self.largest else [f"up to {self.largest:.3g} of {jnp.finfo(self.dtype).max:.3g}"]
        found = f"{self._where()}: {', '.join(counts + size)} in {self.dtype}"
        if self.nan_made_by is not None:
            return f"{found}; turned into NaN by {self.nan_made_by._where()}"
        return f"{found}, of infinities" if self.of_infinities else found

    def _where(self) -> str:
        where = [self.operation, self.scope, f"{self.line} ({self.function})" if self.line else ""]
        where += [] if self.iteration is None else [f"iteration {self.iteration}"]
        return ", ".join(filter(None, where))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["found", "reached", "given"],
    meta_fields=["sites", "arguments", "measures"],
)
@dataclasses.dataclass(frozen=True)
class Numerics:
    """What `check_numerics` found: arrays, so that asking for it is what waits for the device.

    `bool(numerics)` is `.ok`, and `str(numerics)` names the operations. `jax.lax.scan` over steps stacks the arrays:
    then `.operations` are those of the first bad step, and say which that is.

    Attributes:
        found: Counts and magnitudes by operation, as arrays.
        reached: How many of the values that are watched (results, and what is asked whether it is finite) are not
            finite, int32[].
        given: Infinities and NaN of each floating argument, int32[arguments, 2]; zeros where nothing was found.
        sites: The operations, in order.
        arguments: The floating arguments.
        measures: Whether magnitudes were measured.
    """

    found: Found
    reached: jax.Array
    given: jax.Array
    sites: tuple[Site, ...]
    arguments: tuple[Argument, ...]
    measures: bool

    @property
    def ok(self) -> bool:
        """Whether no operation made an infinity or a NaN that was seen."""
        return not np.any(np.asarray(self.found.counts))

    @property
    def operations(self) -> tuple[Checked, ...]:
        """What made infinities or NaN, in order: the first is to blame. Then magnitudes, by part of the range."""
        step, one = self._first_bad()
        bad = blamed(self.sites, one.found, np.asarray(one.given), self.arguments, self.measures)
        rows = [_checked(site, one.found, i, self.measures) for i, site in enumerate(self.sites)]
        sizes = [row for row in rows if row.largest and not (row.infinities or row.nans)]
        sizes = sorted(sizes, key=lambda row: -(row.largest or 0) / float(jnp.finfo(row.dtype).max))
        return (*(dataclasses.replace(row, step=step) for row in bad), *sizes)

    @property
    def first(self) -> Checked | None:
        """What is to blame: an operation, or an argument with infinities; None if no operation made any, or a NaN."""
        return None if self.ok else self.operations[0]

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        step, one = self._first_bad()
        reached, steps = int(one.reached), np.shape(self.reached)
        at = "" if step is None else f" in step {step} of {', '.join(map(str, steps))}, the first such"
        if not self.ok:
            lines = [f"not finite{at}:"]
        elif reached:
            came_in = [f"  {row}" for row in _came_in(np.asarray(one.given), self.arguments)]
            whence = "they came in:" if came_in else "they are written, or the operation is in no chosen scope"
            lines = [f"{reached} values are not finite{at}, and no chosen operation made them: {whence}", *came_in]
        else:
            lines = ["all is finite" + (f" in {' x '.join(map(str, steps))} steps" if steps else "")]
        found = self.operations
        lines += [f"  {row}" for row in found[:SHOWN]]
        lines += [f"  and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        return "\n".join(lines)

    def _first_bad(self) -> tuple[int | tuple[int, ...] | None, Numerics]:
        """The first bad step, with the magnitudes of all steps, and its index; None if there is one step alone."""
        host = jax.tree.map(np.asarray, jax.device_get(self))
        steps = np.shape(host.reached)
        if not steps or not host.reached.size:
            return None, host
        all_axes = tuple(range(len(steps)))
        made = host.found.counts.any((-1, -2)).ravel()
        index = np.unravel_index(int(np.argmax(made if made.any() else host.reached.ravel() > 0)), steps)
        one = jax.tree.map(lambda x: x[index], host)
        found = one.found._replace(largest=host.found.largest.max(all_axes))
        where = tuple(map(int, index))
        return where[0] if len(where) == 1 else where, dataclasses.replace(one, found=found)


def blamed(
    sites: Sequence[Site], found: Found, given: np.ndarray, arguments: Sequence[Argument], measures: bool = False
) -> list[Checked]:
    """What made infinities or NaN, in order. What makes NaN of infinities that came in is not to blame."""
    rows: list[Checked] = []
    for i in to_blame(sites, found):
        row = _checked(sites[i], found, i, measures)
        came_in = []
        if found.of_infinities[i] and not rows:  # Else they may be those that an operation before it made.
            reach = [number for number in range(len(arguments)) if sites[i].arguments >> number & 1]
            came_in = [_argument(arguments[n], given[n], row) for n in reach if given[n][0]]
        rows += came_in or [row]
    return rows


def _came_in(given: np.ndarray, arguments: Sequence[Argument]) -> list[Checked]:
    return [_argument(argument, counts) for argument, counts in zip(arguments, given, strict=True) if counts.any()]


def _argument(argument: Argument, counts: np.ndarray, nan_made_by: Checked | None = None) -> Checked:
    infinities, nans = map(int, counts)
    where = f"argument {argument.name}", "", "", ""
    return Checked(*where, argument.dtype, infinities, nans, None, None, nan_made_by=nan_made_by)


def _checked(site: Site, found: Found, index: int, measures: bool) -> Checked:
    infinities, nans = map(int, found.counts[index])
    first, largest = int(found.first[index]), float(found.largest[index])
    return Checked(
        site.operation, site.scope, site.line, site.function, site.dtype, infinities, nans,
        None if first < 0 else first, largest if measures else None, bool(found.of_infinities[index]),
    )  # fmt: skip
