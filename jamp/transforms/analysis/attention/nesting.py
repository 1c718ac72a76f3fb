"""A limit to how deep masks are looked into, since Python's stack has an end: they are a few operations deep."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

_DEEPEST = 64


class Nests(Protocol):
    """What has methods that call each other.

    Attributes:
        depth: How many of them are running.
    """

    depth: int


S = TypeVar("S", bound=Nests)
P = ParamSpec("P")
R = TypeVar("R")


def limited(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R | None]:
    """A method that has no answer where it is called from too many others."""

    @functools.wraps(method)
    def called(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self.depth >= _DEEPEST:
            return None
        self.depth += 1
        try:
            return method(self, *args, **kwargs)
        finally:
            self.depth -= 1

    return called
