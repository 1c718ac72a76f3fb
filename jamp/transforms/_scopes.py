"""Named scopes that jamp writes: regions in another precision than the policy says, and labels; and two switches."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote

import jax

from jamp._compat import bind, scope_path
from jamp._dtypes import short_repr
from jamp.policy import Policy
from jamp.transforms._execute import execute
from jamp.transforms._modes import FULL_SCOPE, HALF_SCOPE, TRACED_SCOPE
from jamp.transforms._rules import CALLS
from jamp.transforms._steps import Plan, Step

F = TypeVar("F", bound=Callable[..., Any])

# Part of the key of jit's cache: a function compiled outside of `disable()` is traced anew inside.
_disabled = jax.make_user_context(False)

# Set while `jamp.inspect` traces. In jit's key too, so that no label gets into what the user compiles.
_labelling = jax.make_user_context(False)

_RULE = "jamp_rule"
_POLICY_LABEL, _RULE_LABEL = (re.compile(rf"{name}=([^/()]+)") for name in (TRACED_SCOPE, _RULE))


def full_precision(fn: F) -> F:
    """Marks a function whose operations run in float32, whatever the policy of the `cast_fn` around it.

    Args:
        fn: Any function of arrays. What it calls is covered too, inside `jit`, `scan`, `grad` and so on.

    Returns:
        The function with the mark. Outside of `cast_fn` the mark does nothing.

    Raises:
        TypeError: If `fn` is not callable.

    Example:
        >>> import jax, jax.numpy as jnp, jamp
        >>> @jamp.cast_fn(policy="O2:bfloat16")
        ... def model(w, x):
        ...     hidden = x @ w                                       # bfloat16
        ...     return jamp.full_precision(jnp.matmul)(hidden, w)    # float32
        >>> x = jnp.full((2, 2), 1 + 2**-7)
        >>> model(jnp.eye(2), x).dtype
        dtype('float32')
    """
    return _marked(fn, FULL_SCOPE, "full_precision")


def half_precision(fn: F) -> F:
    """Marks a function all of whose operations run in the policy's half dtype, norms and exponentials too.

    Args:
        fn: Any function of arrays.

    Returns:
        The function with the mark. Outside of `cast_fn` the mark does nothing.

    Raises:
        TypeError: If `fn` is not callable.

    Example:
        >>> import jax.numpy as jnp, jamp
        >>> fast_exp = jamp.half_precision(jnp.exp)
        >>> float(jamp.cast_fn(fast_exp, "O2:bfloat16")(jnp.float32(1.0)))
        2.71875
        >>> float(fast_exp(jnp.float32(0.0)))
        1.0
    """
    return _marked(fn, HALF_SCOPE, "half_precision")


def _marked(fn: F, scope: str, caller: str) -> F:
    if not callable(fn):
        raise TypeError(
            f"`jamp.{caller}` takes a function, got {short_repr(fn)}. Write `jamp.{caller}(fn)(x)`, not "
            f"`jamp.{caller}(fn(x))`."
        )

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(scope):
            return fn(*args, **kwargs)

    return wrapper  # type: ignore[return-value]


def disable() -> AbstractContextManager[None]:
    """A context in which `cast_fn` does nothing, to compare with float32 or to find a bug.

    The state of the switch is part of the key of `jax.jit`'s cache: a function that was compiled outside is traced
    again inside, and the compiled function from outside is used again after.

    Returns:
        A context manager.

    Example:
        >>> import jax, jax.numpy as jnp, jamp
        >>> double = jax.jit(jamp.cast_fn(lambda x: jnp.dot(x, x), "O3:bfloat16"))
        >>> x = jnp.float32([1 + 2**-10])
        >>> with jamp.disable():
        ...     float(double(x))
        1.001954078674316
        >>> float(double(x))
        1.0
    """
    return _disabled(True)


def is_disabled() -> bool:
    """Whether the caller is inside of `disable()`."""
    return _disabled.value


def labelling() -> AbstractContextManager[None]:
    """A context in which `cast_fn` labels what it emits with its policy and rules.

    The labels are named scopes, because those survive whatever is done to a `cast_fn` before it is looked at: `jit`
    and its cache, `grad`, `vmap`, `scan`.
    """
    return _labelling(True)


def is_labelling() -> bool:
    """Whether the caller is traced for `jamp.inspect`."""
    return _labelling.value


def cast_scope(policy: Policy) -> AbstractContextManager[Any]:
    """The scope of all that a `cast_fn` emits, by which one around it knows that the precision is settled."""
    return jax.named_scope(_label(TRACED_SCOPE, str(policy)) if _labelling.value else TRACED_SCOPE)


def rule_scope(rule: str) -> AbstractContextManager[Any]:
    """The scope that labels operations with the rule that decided about them; none unless labels are wanted."""
    return jax.named_scope(_label(_RULE, rule)) if _labelling.value else nullcontext()


def _label(name: str, value: str) -> str:
    return f"{name}={quote(value, safe='')}"  # Slashes and brackets have a meaning in scope paths.


def label_steps(plan: Plan) -> None:
    """Has the steps of a plan, and of the plans inside, label what they emit with their rules, if labels are wanted."""
    if not _labelling.value:
        return
    for step in plan.steps:
        # What an inner `cast_fn` emitted has its labels; a plan that several steps share is labelled once.
        if TRACED_SCOPE not in scope_path(step.eqn) and not isinstance(step.emit, _Labelled):
            for inner in step.plans:
                label_steps(inner)
            step.emit = _Labelled(_rule_of(step), step.emit)


def _rule_of(step: Step) -> str:
    if not step.plans:
        return step.rule
    return "cast_fn" if step.emit else "as traced"  # For what has no label of its own in the jaxprs inside.


class _Labelled(NamedTuple):
    """The `emit` of a step, under a label."""

    rule: str
    emit: Callable[..., list[Any]] | None

    def __call__(self, step: Step, operands: Sequence[Any], run: Any) -> list[Any]:
        with rule_scope(self.rule):
            if self.emit:
                return self.emit(step, operands, run)
            if step.eqn.primitive.name in CALLS:  # Bound as it was traced, it would have no labels inside.
                (plan,) = step.plans
                return jax.jit(lambda *args: execute(plan, args, run))(*operands)
            return bind(step.eqn, operands, step.params)


def policy_labels(path: str) -> list[str]:
    """Policies of the `cast_fn`s that a scope path is inside of, outermost first."""
    return [unquote(label) for label in _POLICY_LABEL.findall(path)]


def rule_label(path: str) -> str:
    """The rule that a scope path is labelled with; empty if it has none."""
    return unquote(([""] + _RULE_LABEL.findall(path))[-1])


def without_labels(path: str) -> str:
    """A scope path without what `cast_fn` wrote into it."""
    return "/".join(part for part in path.split("/") if not part.startswith((TRACED_SCOPE, f"{_RULE}=")))
