"""What `cast_fn` and `autocast` are not: contexts. Code that takes them for one is told what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from jamp._dtypes import short_repr
from jamp.policy import Policy, get_policy

if TYPE_CHECKING:
    from jamp.transforms._cast_fn import CastFunction

P = ParamSpec("P")
R = TypeVar("R")


_NO_CONTEXT = "They are no contexts for `with`, because JAX has no global mode in which operations could be cast."


class NotAContext:
    """Answers `with` by an error in words."""

    def __enter__(self) -> NoReturn:
        raise TypeError(
            f"`jamp.autocast` and `jamp.cast_fn` make functions. {_NO_CONTEXT} Write `forward = "
            "jamp.autocast(model.apply, policy='O2')`, then `forward(params, x)`. A part in float32 is "
            "`jamp.full_precision(fn)(x)`, and everything `jamp.disable()`."
        )

    def __exit__(self, *exc: object) -> None: ...


class Decorator(NotAContext):
    """`cast_fn` with a policy, which waits for its function."""

    def __init__(self, decorate: Callable[[Any], Any], name: str, policy: Policy | str) -> None:
        self._decorate, self._name, self._policy = decorate, name, policy

    def __call__(self, fn: Callable[P, R]) -> CastFunction[P, R]:
        """The function at the policy."""
        return self._decorate(fn)

    def __repr__(self) -> str:
        return f"jamp.{self._name}(policy={str(self._policy)!r})"


def check_is_function(name: str, fn: Any) -> None:
    """Refuses what is no function: a policy or a device, as in `with autocast("cuda")`, or the result of a call."""
    if callable(fn):
        return
    policy, hint = "O2", ""
    if isinstance(fn, str | Policy):
        policy, hint = (str(fn) if _is_policy(fn) else policy), f" {_NO_CONTEXT}"
    raise TypeError(
        f"`jamp.{name}` takes a function first, got {short_repr(fn)}. Write `jamp.{name}(fn, policy={policy!r})`, or "
        f"`@jamp.{name}(policy={policy!r})` above a function.{hint}"
    )


def _is_policy(spec: Policy | str) -> bool:
    try:
        return bool(get_policy(spec))
    except ValueError:
        return False


def refuse_settings(name: str, settings: dict[str, Any]) -> None:
    """Names what takes the place of the arguments of `torch.autocast`."""
    if settings:
        raise TypeError(
            f"`jamp.{name}` has no argument {', '.join(map(repr, settings))}: it takes a function and a policy, which "
            f"holds the dtype. Write `jamp.{name}(fn, policy='O1:float16')`; to switch it off, policy='O0' or "
            "`jamp.disable()`."
        )
