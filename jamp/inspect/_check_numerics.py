"""`check_numerics`: looks for infinities and NaN in a step that runs."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jamp._dtypes import close_matches, short_repr
from jamp.inspect.numerics.found import Found
from jamp.inspect.numerics.sites import Site, choosing, sites, to_blame
from jamp.inspect.numerics.watch import Watch
from jamp.transforms._modules import call_with_state
from jamp.transforms._traced import Traced

P = ParamSpec("P")
R = TypeVar("R")
Mode = Literal["count", "largest", "abort", "dump"]
_MODES = ("count", "largest", "abort", "dump")
_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Checked:
    """An operation, and what was found there.

    Attributes:
        operation: Name of the primitive.
        scope: Path of named scopes; empty where the model names none.
        line: `file:line` of the user's code.
        function: Name of the function there.
        dtype: Dtype of its results.
        infinities: Infinite results that it made of finite operands.
        nans: NaN that it made of other operands.
        iteration: The iteration of the outermost loop around it that made the first; None outside of loops.
        largest: Largest finite magnitude of its results; None where that was not measured.
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

    def __str__(self) -> str:
        where = [self.operation, self.scope, f"{self.line} ({self.function})"]
        where += [] if self.iteration is None else [f"iteration {self.iteration}"]
        counts = [f"{n} {kind}" for n, kind in ((self.infinities, "inf"), (self.nans, "nan")) if n]
        size = [] if not self.largest else [f"up to {self.largest:.3g} of {jnp.finfo(self.dtype).max:.3g}"]
        return f"{', '.join(filter(None, where))}: {', '.join(counts + size)} in {self.dtype}"


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["found", "reached"], meta_fields=["sites", "measures"]
)
@dataclasses.dataclass(frozen=True)
class Numerics:
    """What `check_numerics` found: arrays, so that asking for it is what waits for the device.

    `bool(numerics)` is `.ok`, and `str(numerics)` names the operations.

    Attributes:
        found: Counts and magnitudes by operation, as arrays.
        reached: How many of the values that are watched (results, and what is asked whether it is finite) are not
            finite, int32[].
        sites: The operations, in order.
        measures: Whether magnitudes were measured.
    """

    found: Found
    reached: jax.Array
    sites: tuple[Site, ...]
    measures: bool

    @property
    def ok(self) -> bool:
        """Whether no operation made an infinity or a NaN that was seen."""
        return not np.any(np.asarray(self.found.counts))

    @property
    def operations(self) -> tuple[Checked, ...]:
        """What made infinities or NaN, in order: the first is to blame. Then magnitudes, by part of the range."""
        found = jax.tree.map(np.asarray, jax.device_get(self.found))
        bad = [_checked(self.sites[i], found, i, self.measures) for i in to_blame(self.sites, found)]
        rows = [_checked(site, found, i, self.measures) for i, site in enumerate(self.sites)]
        sizes = [row for row in rows if row.largest and not (row.infinities or row.nans)]
        return (*bad, *sorted(sizes, key=lambda row: -(row.largest or 0) / float(jnp.finfo(row.dtype).max)))

    @property
    def first(self) -> Checked | None:
        """The first operation that made an infinity or a NaN; None if all is well."""
        return None if self.ok else self.operations[0]

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        reached = int(self.reached)
        if self.ok and reached:
            lines = [
                f"{reached} values are not finite, and no chosen operation made them: they came in, or are written"
            ]
        else:
            lines = ["all is finite" if self.ok else "not finite:"]
        found = self.operations
        lines += [f"  {row}" for row in found[:_SHOWN]]
        lines += [f"  and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        return "\n".join(lines)


def check_numerics(
    fn: Callable[P, R],
    scopes: str | Sequence[str] = "*",
    *,
    mode: Mode = "count",
    folder: str | Path | None = None,
) -> Callable[P, tuple[R, Numerics]]:
    """Watches a step for infinities and NaN while it trains, and names the operation that makes them.

    What is not finite goes on into what is computed of it. So only results are looked at, and what the step itself
    asks about (`jnp.isfinite`, and so the gradients that a loss scale checks). If something is seen there, the step
    runs again, in a branch of the compiled program, operation by operation. What a `where` discards does not count,
    nor do infinities that the program writes or is given.

    Args:
        fn: The function, mostly a whole train step. Put `jax.jit` around the result.
        scopes: Which operations are named: globs over scope paths (`"decoder/*"`), or source lines (`"model.py:41"`).
        mode: `"count"` counts what operations made. `"largest"` also measures magnitudes, of products and of what
            leaves its scope. `"abort"` raises on the host. `"dump"` writes to `folder` what was seen.
        folder: Where `"dump"` writes: for each event a JSON file with the operations and an `.npz` with the values.

    Returns:
        A function that returns what `fn` returns, and a `Numerics`.

    Raises:
        TypeError: If `fn` is not callable.
        ValueError: If the mode is not known, a folder is missing, or (at the call) no operation is in the scopes.

    Example:
        >>> import jax, jax.numpy as jnp, jamp
        >>> def step(w, x):
        ...     with jax.named_scope("head"):
        ...         return jnp.log(x @ w)
        >>> checked = jax.jit(jamp.check_numerics(step))
        >>> result, numerics = checked(jnp.ones(2), jnp.float32([1, -2]))
        >>> numerics.ok, numerics.first.operation, numerics.first.scope, numerics.first.nans
        (False, 'log', 'head', 1)
    """
    if not callable(fn):
        raise TypeError(f"`jamp.check_numerics` takes a function first, got {short_repr(fn)}.")
    if mode not in _MODES:
        raise ValueError(f"`mode` is {mode!r}: expected one of {', '.join(_MODES)}.{close_matches(str(mode), _MODES)}")
    if (mode == "dump") != (folder is not None):
        raise ValueError(
            '`mode="dump"` and `folder` go together: jamp.check_numerics(step, mode="dump", folder="bad").'
        )
    patterns = (scopes,) if isinstance(scopes, str) else tuple(scopes)
    on_found = {"abort": _abort, "dump": functools.partial(_dump, folder=Path(folder or "."))}.get(mode)
    watch = Watch(choosing(patterns), on_found, mode == "largest")

    @functools.wraps(fn)
    def checked(*args: P.args, **kwargs: P.kwargs) -> tuple[R, Numerics]:
        seen: list[Numerics] = []

        def call(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            traced = Traced(fn, args, kwargs)
            listed = tuple(sites(traced.jaxpr, watch.chosen))
            if not listed:
                raise ValueError(_no_sites(patterns, traced))
            outs, found, reached = watch.top(traced.jaxpr, traced.inputs)
            seen.append(Numerics(found, reached, listed, watch.measures))
            return traced.rebuild(outs)

        return call_with_state(call, fn, args, kwargs), seen[0]

    return checked


def _checked(site: Site, found: Found, index: int, measures: bool) -> Checked:
    infinities, nans = map(int, found.counts[index])
    first, largest = int(found.first[index]), float(found.largest[index])
    return Checked(
        site.operation, site.scope, site.line, site.function, site.dtype, infinities, nans,
        None if first < 0 else first, largest if measures else None,
    )  # fmt: skip


def _no_sites(patterns: Sequence[str], traced: Traced) -> str:
    scopes = dict.fromkeys(site.scope for site in sites(traced.jaxpr, lambda place: True) if site.scope)
    shown = f"its scopes are {', '.join(list(scopes)[:12])}" if scopes else "it names no scopes; take source lines"
    return f"No operation of the function is in {', '.join(map(repr, patterns))}: {shown}."


def _on_host(act: Callable[[list[Checked], dict[str, np.ndarray]], None]) -> Callable[..., None]:
    """Calls `act` from a compiled program, if an operation made something."""

    def on_found(listed: list[Site], found: Found, watched: dict[str, jax.Array]) -> None:
        def host(found: Found, watched: dict[str, jax.Array]) -> None:
            # As numpy arrays: a computation of jax would wait for the one that waits for this callback.
            arrays = jax.tree.map(np.asarray, found)
            if bad := [_checked(listed[i], arrays, i, False) for i in to_blame(listed, arrays)]:
                act(bad, {name: np.asarray(value) for name, value in watched.items()})

        jax.debug.callback(host, found, watched)

    return on_found


def _raise(bad: list[Checked], watched: dict[str, np.ndarray]) -> None:
    del watched
    raise FloatingPointError("\n".join(["not finite:", *(f"  {row}" for row in bad[:_SHOWN])]))


def _write(bad: list[Checked], watched: dict[str, np.ndarray], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    while True:
        try:
            with open(folder / f"{number:05d}.json", "x") as file:
                json.dump([dataclasses.asdict(row) for row in bad], file, indent=1)
            break
        except FileExistsError:
            number += 1
    # numpy writes floats that it does not know as bytes.
    known = (np.float16, np.float32, np.float64, np.complex64, np.complex128)
    plain = {name: x if x.dtype in known else x.astype(np.float32) for name, x in watched.items()}
    np.savez(folder / f"{number:05d}.npz", allow_pickle=False, **plain)


def _abort(listed: list[Site], found: Found, watched: dict[str, jax.Array]) -> None:
    _on_host(_raise)(listed, found, watched)


def _dump(listed: list[Site], found: Found, watched: dict[str, jax.Array], folder: Path) -> None:
    _on_host(functools.partial(_write, folder=folder))(listed, found, watched)
