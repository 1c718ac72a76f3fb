"""Stateful objects: what a Flax NNX module mutates while it runs comes back to it, as with `nnx.jit`.

Without this, BatchNorm's statistics, the counters of random streams, the moments of an `nnx.Optimizer` and what
metrics add up would be updated inside of the trace and lost. "Module" stands for all of these below.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax


def call_with_state(call: Callable[..., Any], fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`call(fn, args, kwargs)`, with the state of NNX modules passed in and out of it explicitly.

    Args:
        call: Runs a pure function: `call(fn, args, kwargs)`.
        fn: The user's function; may itself be a module, or a method of one.
        args: Positional arguments, with modules anywhere in them.
        kwargs: Keyword arguments, likewise.

    Returns:
        What `fn` returns. The modules are updated in place, as `fn` would have done.
    """
    # Looked up, not imported: a program that has not imported NNX has no NNX module among its arguments.
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return call(fn, args, kwargs)

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

    def pure(state: Any, others: list[Any]) -> Any:
        merged = nnx.merge(graph, state)
        remaining = iter(merged)
        inner = [next(remaining) if is_module(leaf) else other for leaf, other in zip(leaves, others, strict=True)]
        owner, args, kwargs = jax.tree.unflatten(tree, inner)
        function = _rebound(fn, owner)
        return function(*args, **kwargs), nnx.state(merged)

    others = [None if is_module(leaf) else leaf for leaf in leaves]
    out, new_state = call(pure, (state, others), {})
    if jax.tree.structure(new_state) == jax.tree.structure(state):
        new_state = jax.tree.map(_like, new_state, state)
    nnx.update(modules, new_state)
    return out


def _like(new: Any, old: Any) -> Any:
    return new if new.dtype == old.dtype else new.astype(old.dtype)


def _rebound(fn: Any, owner: Any) -> Callable[..., Any]:
    """The function with another module in the place of the one that it is, or is a method of."""
    if owner is None:
        return fn
    return fn.__func__.__get__(owner) if hasattr(fn, "__func__") else owner
