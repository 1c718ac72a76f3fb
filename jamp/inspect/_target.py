"""What the functions of this folder look at: a function, its arguments, and the policy that it runs at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jamp.policy import Policy, get_policy
from jamp.transforms._cast_fn import CastFunction, Traced
from jamp.transforms._modules import call_with_state


class Target(NamedTuple):
    """A pure function with the arguments of one call and a policy."""

    fn: Callable[..., Any]
    args: Any
    kwargs: Any
    policy: Policy

    @property
    def plain(self) -> bool:
        """Whether the policy leaves the inside of the function alone, so that there is nothing to plan."""
        return self.policy.level in (None, "O0")

    def trace(self) -> Traced:
        """The function as the user wrote it."""
        return Traced(self.fn, self.args, self.kwargs)

    def cast(self) -> Traced:
        """The function as it runs at the policy."""
        return Traced(CastFunction(self.fn, self.policy), self.args, self.kwargs)

    def run(self) -> Any:
        """The results of the function at the policy."""
        return CastFunction(self.fn, self.policy)(*self.args, **self.kwargs)


def resolve(caller: str, fn: Any, args: Any, kwargs: Any, policy: Policy | str | None) -> Target:
    """Unwraps what `cast_fn` made, whose policy counts unless another is given, and takes the state out of modules."""
    if not callable(fn):
        raise TypeError(f"`jamp.{caller}` takes a function first, got {fn!r}. Write `jamp.{caller}(fn, *args)`.")
    if isinstance(fn, CastFunction):
        policy, fn = (fn.policy if policy is None else policy), fn.__wrapped__
    policy = get_policy("O2" if policy is None else policy)
    return Target(*_without_state(fn, args, kwargs), policy)


def _without_state(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The pure function behind one that mutates modules; the modules stay as they are."""
    found = []

    def note(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        found.append((fn, args, kwargs))
        return None, args[0] if args else None  # A result, and the state as it came in.

    call_with_state(note, fn, args, kwargs)
    return found[0]
