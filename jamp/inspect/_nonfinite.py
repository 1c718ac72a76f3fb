"""What `first_nonfinite` answers with: an infinity or a NaN, and where it comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jamp.inspect._operations import Place

_OUTSIDE = Place("", "", "")


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """Where an infinity or a NaN comes from.

    Attributes:
        operation: Name of the primitive; or `"argument"`, followed by its path, if it came in from outside; or
            `"constant"` if it came in with an array that the function closes over; or `"result"` if casting the
            results to the output dtype made it.
        cast: Number of the operand whose cast, in front of the operation, overflowed; None if the operation itself did.
        scope: Path of named scopes.
        line: `file:line` of the user's code.
        function: Name of the function there.
        iterations: Iterations of the loops around it, outermost first.
        dtype: Dtype of the values.
        infinities: How many of the values are infinite.
        nans: How many are not a number.
        size: Number of values.
        largest: Largest finite magnitude among the values that they were made from; None for what came in.
        nan_made_by: The operation that made NaN of infinities that came in; None for all else.
    """

    operation: str
    cast: int | None
    scope: str
    line: str
    function: str
    iterations: tuple[int, ...]
    dtype: str
    infinities: int
    nans: int
    size: int
    largest: float | None
    nan_made_by: NonFinite | None = None

    def __str__(self) -> str:
        kinds = [f"{count} {kind}" for count, kind in ((self.infinities, "inf"), (self.nans, "nan")) if count]
        found = f"{' and '.join(kinds)} in {self.size} {self.dtype} values"
        made_from = "" if self.largest is None else f"; made from values up to {self.largest:.3g}"
        turned = "" if self.nan_made_by is None else f"; turned into NaN by {self.nan_made_by._where()}"
        return f"{self._where()}: {found}{made_from}{turned}"

    def _where(self) -> str:
        what = (
            self.operation
            if self.cast is None
            else f"the cast to {self.dtype} of operand {self.cast} of {self.operation}"
        )
        where = [self.scope, f"{self.line} ({self.function})"] if self.line not in ("", "?") else [self.scope]
        where += [f"iteration {i}" for i in self.iterations]
        return ", ".join(filter(None, [what, *where]))


def nonfinite(
    operation: str,
    sources: Sequence[Any],
    values: Sequence[Any],
    place: Place = _OUTSIDE,
    iterations: tuple[int, ...] = (),
    cast: int | None = None,
) -> NonFinite:
    """Describes the first array among `values` that is not finite, made from `sources`."""
    bad = next(value for value in _floating(values) if severity([value]))
    largest = [float(jnp.max(jnp.abs(x), where=jnp.isfinite(x), initial=0)) for x in _floating(sources)]
    return NonFinite(
        operation, cast, place.scope, place.line, place.function, iterations, str(bad.dtype),
        int(jnp.isinf(bad).sum()), int(jnp.isnan(bad).sum()), bad.size, max(largest, default=None),
    )  # fmt: skip


def severity(values: Sequence[Any]) -> int:
    """0 where all values are finite, 1 where some are infinite, 2 where some are not a number."""
    floating = _floating(values)
    return max(
        int(any(jnp.any(~jnp.isfinite(x)) for x in floating)), 2 * int(any(jnp.any(jnp.isnan(x)) for x in floating))
    )


def _floating(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if jnp.issubdtype(jnp.result_type(value), jnp.inexact)]
