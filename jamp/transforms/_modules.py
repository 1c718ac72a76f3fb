"""Stateful objects: what a module mutates while it runs comes back to it, as with `nnx.jit`, `nn.jit` and `hk.remat`.

Without this, BatchNorm's statistics, the counters of random streams, the moments of an `nnx.Optimizer`, what metrics
add up and what a part of a Linen or Haiku module initializes would be updated inside of the trace and lost. "Module"
stands for all of these below.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable
from types import CellType, ModuleType
from typing import Any, TypeAlias

import jax

_EMPTY = CellType()
Function: TypeAlias = Callable[..., Any]
Arguments: TypeAlias = tuple[object, ...]
Settings: TypeAlias = dict[str, object]


def call_with_state(call: Function, fn: Function, args: Arguments, kwargs: Settings) -> Any:
    """`call(fn, args, kwargs)`, with the state of modules passed in and out of it explicitly.

    Args:
        call: Runs a pure function: `call(fn, args, kwargs)`.
        fn: The user's function; may itself be a module, or a method of one.
        args: Positional arguments, with modules anywhere in them.
        kwargs: Keyword arguments, likewise.

    Returns:
        What `fn` returns. The modules are updated in place, as `fn` would have done.
    """
    # Looked up, not imported: a program that has not imported Flax has no module of it among its arguments.
    if (stateful := sys.modules.get("haiku._src.stateful")) is not None and stateful.base.inside_transform():
        return _call_in_transform(stateful, call, fn)(*args, **kwargs)
    if (linen := sys.modules.get("flax.linen")) is not None and (bound := _part(linen, fn, args)) is not None:
        return _call_part(linen, call, *bound, kwargs)
    if linen is not None:
        _check_closure(linen, fn)
    if (nnx := sys.modules.get("flax.nnx")) is not None:
        return _call_nnx(nnx, call, fn, args, kwargs)
    return call(fn, args, kwargs)


def _call_in_transform(stateful: ModuleType, call: Function, fn: Function) -> Function:
    """The call as one of Haiku's transforms, which hand parameters, states and random keys in and out."""

    def cast_fn(fn: Function) -> Function:
        return functools.wraps(fn)(lambda *args, **kwargs: call(fn, args, kwargs))

    return stateful.thread_hk_state_in_kwargs(cast_fn)(fn)


def _part(linen: ModuleType, fn: Any, args: Any) -> tuple[Function, Arguments] | None:
    """The function and arguments, the first of them a part of a Linen module that runs; None where there is none.

    Parameters are apart from Linen modules but inside of each other, where they share variables and random streams.
    """
    if isinstance(fn, linen.Module):
        fn, args = type(fn).__call__, (fn, *args)
    elif isinstance(getattr(fn, "__self__", None), linen.Module):
        fn, args = fn.__func__, (fn.__self__, *args)
    if not args or not isinstance(args[0], linen.Module):
        return None
    runs = args[0].scope is not None or isinstance(args[0].parent, linen.Module)
    return (fn, args) if runs else None


def _call_part(linen: ModuleType, call: Function, fn: Function, args: Arguments, kwargs: Settings) -> object:
    """The call as one of Linen's lifted transforms, which hand variables and random streams in and out."""
    lift = sys.modules["flax.core.lift"]

    def transform(fn: Function, scope: object, *args: object, **kwargs: object) -> object:
        def lifted(scope_of: Function, variables_of: Function, variables: object, rngs: object) -> object:
            def pure(variables: object, rngs: object, args: Arguments, kwargs: Settings) -> object:
                scope = scope_of(variables, rngs)
                return fn(scope, *args, **kwargs), variables_of(scope)

            return call(pure, (variables, rngs, args, kwargs), {})

        return lift.pack(lifted, (True,), (True,), (True,), name="cast_fn")(scope)

    return linen.transforms.lift_direct_transform(transform, (fn,), *args, **kwargs)


def _check_closure(linen: ModuleType, fn: object) -> None:
    """Refuses a function around a part that initializes: its parameters would be values of a trace that is over."""
    cells = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or () if cell != _EMPTY]
    if any(isinstance(x, linen.Module) and x.scope is not None and x.is_initializing() for x in cells):
        raise ValueError(
            "The function that `jamp.cast_fn` casts holds a Flax module that is being initialized, whose parameters "
            "would stay inside. Hand the module over, as with `flax.linen.jit`: jamp.cast_fn(self.part, policy)(x), "
            "or jamp.cast_fn(lambda module, x: module.part(x), policy)(self, x)."
        )


def _call_nnx(nnx: ModuleType, call: Function, fn: Function, args: Arguments, kwargs: Settings) -> object:
    # Modules, optimizers, metrics and random streams are all of one class, which older versions call `Object`.
    kinds = (nnx.Module, nnx.Variable, getattr(nnx, "Pytree", getattr(nnx, "Object", nnx.Rngs)))

    def is_module(node: object) -> bool:
        return isinstance(node, kinds)

    def is_leaf(node: object) -> bool:  # An `nnx.State` holds variables, but is a value like any other tree of arrays.
        return is_module(node) or isinstance(node, nnx.State)

    owner = fn if is_module(fn) else getattr(fn, "__self__", None)
    leaves, tree = jax.tree.flatten((owner if is_module(owner) else None, args, kwargs), is_leaf=is_leaf)
    modules = [leaf for leaf in leaves if is_module(leaf)]
    if not modules:
        return call(fn, args, kwargs)
    graph, state = nnx.split(modules)

    def pure(state: Any, others: list[Any]) -> object:
        merged = nnx.merge(graph, state)
        remaining = iter(merged)
        inner = [next(remaining) if is_module(leaf) else other for leaf, other in zip(leaves, others, strict=True)]
        owner, args, kwargs = jax.tree.unflatten(tree, inner)
        function = _rebound(fn, owner)
        before = _values(nnx, nnx.state(merged))
        out = function(*args, **kwargs)
        # A module that stays as it is may belong to a trace around this one, in which nothing may change it.
        return out, _filter(nnx, nnx.state(merged), lambda path, variable: not _is_same(variable, before.get(path)))

    # The function that errors are about, which has other arguments.
    vars(pure).update(__signature__=inspect.signature(pure), __wrapped__=fn)
    others = [None if is_module(leaf) else leaf for leaf in leaves]
    out, changed = call(pure, (state, others), {})
    old = dict(jax.tree_util.tree_leaves_with_path(state))
    nnx.update(modules, jax.tree_util.tree_map_with_path(lambda path, new: _like(new, old.get(path)), changed))
    return out


def _filter(nnx: ModuleType, state: object, keep: Callable[[object, object], object]) -> object:
    """The variables of an `nnx.State` that `keep(path, variable)` says."""
    if hasattr(nnx, "filter_state"):
        return nnx.filter_state(state, keep)
    return operator.methodcaller("filter", keep)(state)  # Of older versions.


def _values(nnx: ModuleType, state: object) -> dict[object, list[object]]:
    """By path, the arrays of each variable of an `nnx.State`."""
    found: dict[object, list[object]] = {}
    _filter(nnx, state, lambda path, variable: found.update({path: jax.tree.leaves(variable)}))
    return found


def _is_same(variable: object, before: list[object] | None) -> bool:
    after = jax.tree.leaves(variable)
    return before is not None and len(after) == len(before) and all(map(operator.is_, after, before))


def _like(new: Any, old: Any) -> object:
    return new if old is None or new.dtype == old.dtype else new.astype(old.dtype)


def _rebound(fn: Any, owner: Any) -> Function:
    """The function with another module in the place of the one that it is, or is a method of."""
    if owner is None:
        return fn
    return fn.__func__.__get__(owner) if hasattr(fn, "__func__") else owner
