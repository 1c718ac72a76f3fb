"""What arrays are called in JAX's errors about a function that jamp traces: by the names that its author gave them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence

import jax
from jax.tree_util import keystr, tree_flatten_with_path

_TRACED = (
    "jamp traces the function, as `jax.jit` does: while Python runs, arrays have shapes and dtypes, and no values. "
    "Write jnp.where(condition, a, b) or jax.lax.cond(condition, f, g, *args) for `if`, x.astype(float) for float(x), "
    "and jnp for np. What decides by its value is handed over as a Python number, bool or string."
)
_NO_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)


class NamedArrays(inspect.Signature):
    """The signature of a function of arrays alone, by which JAX calls them what they are called outside.

    A name such as `params['w']` is none of a parameter, so they are given where arguments are bound to their names.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__([inspect.Parameter("arrays", inspect.Parameter.VAR_POSITIONAL)])
        self._names = names

    def bind(self, /, *args: object, **kwargs: object) -> inspect.BoundArguments:
        """The arrays by their names."""
        del kwargs
        return inspect.BoundArguments(self, dict(zip(self._names, args, strict=True)))  # pyright: ignore[reportArgumentType]


def leaf_names(fn: Callable[..., object], args: object, kwargs: object) -> list[str]:
    """The leaves of `(args, kwargs)` as the author of a function calls them: `params['w']`, `x`, `more[1]`."""
    try:
        parameters = [*inspect.signature(fn).parameters.values()]
    except (ValueError, TypeError):  # A builtin, or an object that hides what it is.
        parameters = []
    by_place = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    others = next((p.name for p in parameters if p.kind == p.VAR_POSITIONAL), "args")

    def name(place: int) -> str:
        return by_place[place] if place < len(by_place) else f"{others}[{place - len(by_place)}]"

    positional = [(name(key.idx), rest) for (key, *rest), _ in tree_flatten_with_path(args)[0]]
    by_keyword = [(key.key, rest) for (key, *rest), _ in tree_flatten_with_path(kwargs)[0]]
    return [f"{first}{keystr(tuple(rest))}" for first, rest in (*positional, *by_keyword)]


def explain(error: Exception) -> None:
    """Adds to JAX's error about a value that is not known yet why it is not, and what to write."""
    if isinstance(error, _NO_VALUES) and _TRACED not in getattr(error, "__notes__", ()):
        error.add_note(_TRACED)
