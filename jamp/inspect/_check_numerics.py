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
from jax.tree_util import tree_leaves_with_path

from jamp._dtypes import close_matches, half_dtype, short_repr
from jamp.inspect._numerics import SHOWN, Argument, Checked, Numerics, blamed
from jamp.inspect._target import argument_name
from jamp.inspect.numerics.found import Found
from jamp.inspect.numerics.sites import Site, choosing, sites
from jamp.inspect.numerics.sources import sites_of_program
from jamp.inspect.numerics.watch import Watch
from jamp.transforms._modules import call_with_state
from jamp.transforms._traced import Traced, is_array

P = ParamSpec("P")
R = TypeVar("R")
Mode = Literal["count", "largest", "abort", "dump"]
_MODES = ("count", "largest", "abort", "dump")
Act = Callable[[list[Checked], dict[str, np.ndarray]], None]


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
    acts: dict[str, Act] = {"abort": _raise, "dump": functools.partial(_write, folder=Path(folder or "."))}
    on_found = functools.partial(_on_host, acts[mode]) if mode in acts else None
    chosen = choosing(patterns)

    @functools.wraps(fn)
    def checked(*args: P.args, **kwargs: P.kwargs) -> tuple[R, Numerics]:
        seen: list[Numerics] = []

        def call(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            traced = Traced(fn, args, kwargs, half_dtype())
            listed = sites_of_program(traced.jaxpr, chosen)
            if not listed and patterns != ("*",):
                raise ValueError(_no_sites(patterns, traced))
            arguments = _floating_arguments(args, kwargs)
            act = on_found and functools.partial(on_found, arguments=arguments)
            watch = Watch(chosen, act, mode == "largest")
            outs, found, reached, given = watch.top(traced.jaxpr, traced.inputs, listed)
            seen.append(Numerics(found, reached, given, listed, arguments, watch.measures))
            return traced.rebuild(outs)

        return call_with_state(call, fn, args, kwargs), seen[0]

    return checked


def _floating_arguments(args: Any, kwargs: Any) -> tuple[Argument, ...]:
    leaves = [(path, leaf) for path, leaf in tree_leaves_with_path((args, kwargs)) if is_array(leaf)]
    return tuple(
        Argument(argument_name(path), str(leaf.dtype))
        for path, leaf in leaves
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    )


def _no_sites(patterns: Sequence[str], traced: Traced) -> str:
    scopes = dict.fromkeys(site.scope for site in sites(traced.jaxpr, lambda place: True) if site.scope)
    shown = f"its scopes are {', '.join(list(scopes)[:12])}" if scopes else "it names no scopes; take source lines"
    return f"No operation of the function is in {', '.join(map(repr, patterns))}: {shown}."


def _on_host(
    act: Act, listed: Sequence[Site], found: Found, given: jax.Array, watched: dict[str, jax.Array],
    arguments: Sequence[Argument],
) -> None:  # fmt: skip
    """Calls `act` from a compiled program, if an operation made something."""

    def host(found: Found, given: jax.Array, watched: dict[str, jax.Array]) -> None:
        # As numpy arrays: a computation of jax would wait for the one that waits for this callback.
        arrays, counts = jax.tree.map(np.asarray, (found, given))
        if bad := blamed(listed, arrays, counts, arguments if len(counts) else ()):
            act(bad, {name: np.asarray(value) for name, value in watched.items()})

    jax.debug.callback(host, found, given, watched)


def _raise(bad: list[Checked], watched: dict[str, np.ndarray]) -> None:
    del watched
    raise FloatingPointError("\n".join(["not finite:", *(f"  {row}" for row in bad[:SHOWN])]))


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
