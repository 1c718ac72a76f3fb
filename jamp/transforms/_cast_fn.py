"""The public transform: `cast_fn` runs any function of arrays at a precision policy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from jamp._calls import NotAContext, called, explains, no_context
from jamp._dtypes import FLOAT32
from jamp._policy.spec import names_half
from jamp._tree import cast_tree
from jamp.policy import Policy, get_policy
from jamp.transforms import _modules as modules
from jamp.transforms._keras import refuse_programs, refuse_updates
from jamp.transforms._labels import cast_scope, is_labelling, rule_scope, with_tried_rules
from jamp.transforms._misuse import (
    Decorator,
    check_is_function,
    refuse_settings,
    warn_of_float64,
    warn_of_optimizer,
)
from jamp.transforms._scopes import is_disabled
from jamp.transforms._traced import Traced, evaluate
from jamp.transforms._unmatched import warn_of_unmatched

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")


class _Made(NamedTuple):
    """What casts a function, by the policy as it was written.

    Attributes:
        of: The function.
        by_policy: What casts it.
    """

    of: object
    by_policy: dict[Policy | str, CastFunction[..., object]]


_MADE = "__jamp_cast__"
_ELSEWHERE = called(
    policy=("dtype", "half_dtype", "compute_dtype", "level", "opt_level", "precision"),
    fn=("f", "fun", "func", "function", "model"),
)


class CastFunction(NotAContext, Generic[P, R]):
    """A function that runs at a precision policy. Made by `jamp.cast_fn`; keeps name, signature and documentation."""

    def __init__(self, fn: Callable[P, R], policy: Policy | str) -> None:
        functools.update_wrapper(self, fn, updated=())
        self.__wrapped__ = fn
        self._spec = policy

    @property
    def policy(self) -> Policy:
        """The policy, with the half dtype of the devices at hand where it names none."""
        return get_policy(self._spec)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls the function at the policy."""
        if is_disabled():
            return self.__wrapped__(*args, **kwargs)
        policy = with_tried_rules(self.policy)
        call = functools.partial(_call_at_boundary if policy.level is None else _call, policy)
        with refuse_updates(self.__wrapped__):
            result = modules.call_with_state(call, self.__wrapped__, args, kwargs)
        with rule_scope("result"):
            return jax.tree.map(functools.partial(_to_output, policy), result)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> CastFunction[P, R]: ...
    @overload
    def __get__(
        self: CastFunction[Concatenate[Any, Q], R], instance: object, owner: type | None = None
    ) -> CastFunction[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds to an instance, so that `cast_fn` decorates methods."""
        return self if instance is None else type(self)(self.__wrapped__.__get__(instance, owner), self._spec)

    def __eq__(self, other: object) -> bool:
        """Whether another does the same to the same function, so that `jax.jit` compiles both once."""
        if not isinstance(other, CastFunction):
            return NotImplemented
        return self.__wrapped__ == other.__wrapped__ and self._spec == other._spec

    def __hash__(self) -> int:
        return hash((self.__wrapped__, self._spec))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles what it was made of; the annotations of a function, `jax.Array` among them, need not be picklable."""
        return type(self), (self.__wrapped__, self._spec)

    def __repr__(self) -> str:
        return f"jamp.cast_fn({self.__wrapped__!r}, policy={str(self._spec)!r})"


@overload
def cast_fn(fn: Callable[P, R], policy: Policy | str = ...) -> CastFunction[P, R]: ...
@overload
def cast_fn(fn: None = ..., policy: Policy | str = ...) -> Decorator: ...
@no_context()
@explains("jamp.cast_fn(model.apply, 'O2')", _ELSEWHERE)
def cast_fn(fn: Callable[..., Any] | None = None, policy: Policy | str = "O2") -> Any:
    """Runs a function at a precision policy: mixed precision for a model that knows nothing of it.

    `fn` is traced with its arguments as they are, and evaluated again operation by operation, each in the precision
    that the policy gives it. It composes with `jit`, `grad`, `vmap`, `scan`, `checkpoint`, `shard_map` and itself, in
    any order. Each call traces `fn` and plans anew, so call it inside of `jax.jit`. Outside, it runs operation by
    operation, and JAX compiles a loop, a branch or a jitted function inside of it once.

    Args:
        fn: Any function of arrays: `model.apply`, a method, a `functools.partial`, a loss. Arrays may be anywhere in
            its arguments; whatever else is there (booleans, strings, functions, None) is passed on as it is. Left
            out, the result is a decorator.
        policy: What `jamp.get_policy` takes: `"O0"`, `"OD"`, `"O1"`, `"O2"` or `"O3"`, optionally with `":float16"` or
            `":bfloat16"`, one of jmp's strings, or a `jamp.Policy`.

    Returns:
        A function with the signature, name and documentation of `fn`. Floating results come out in the policy's
        output dtype, float32 by default; those of a program in float64, which a policy in half leaves alone with a
        warning, in float64.

    Raises:
        TypeError: If `fn` is not callable.
        ValueError: If the policy is not known.

    Example:
        >>> import jax, jax.numpy as jnp, jamp
        >>> def model(params, x):
        ...     return jax.nn.relu(x @ params["w"] + params["b"])
        >>> params = {"w": jnp.ones((4, 2)), "b": jnp.zeros(2)}
        >>> apply = jamp.cast_fn(model, policy="O2:bfloat16")
        >>> apply(params, jnp.ones((3, 4))).dtype
        dtype('float32')
        >>> "bf16" in str(jax.make_jaxpr(apply)(params, jnp.ones((3, 4))))
        True
    """
    return _decorate("cast_fn", fn, policy)


@overload
def autocast(fn: Callable[P, R], policy: Policy | str = ...) -> CastFunction[P, R]: ...
@overload
def autocast(fn: None = ..., policy: Policy | str = ...) -> Decorator: ...
@no_context()
def autocast(fn: Callable[..., Any] | None = None, policy: Policy | str = "O1", **settings: Any) -> Any:
    """`jamp.cast_fn` under the name, and with the default level, that users of other frameworks look for.

    Args:
        fn: Any function of arrays; left out, the result is a decorator.
        policy: As for `jamp.cast_fn`; `"O1"` by default, the behaviour of `torch.autocast`.
        **settings: None. Those of `torch.autocast` (`device_type`, `dtype`, `enabled`) are answered by what to write.

    Returns:
        A function like `fn`, or a decorator.

    Raises:
        TypeError: If `fn` is not callable, or settings are given.
        ValueError: If the policy is not known.

    Example:
        >>> import jax.numpy as jnp, jamp
        >>> @jamp.autocast
        ... def model(w, x):
        ...     return x @ w
        >>> model(jnp.ones((4, 2)), jnp.ones((3, 4))).shape
        (3, 2)
    """
    refuse_settings("autocast", settings)
    return _decorate("autocast", fn, policy)


def _to_output(policy: Policy, leaf: Any) -> Any:
    """A result in the output dtype; what has it already stays weak where the function leaves it so.

    What is wider than the dtypes of a level is the user's word, and no result of the policy.
    """
    wide = FLOAT32 if policy.level == "O0" else policy.pair.wide
    asked = policy.level is None or policy.output_dtype != wide
    has_it = hasattr(leaf, "dtype") and leaf.dtype == policy.output_dtype
    return leaf if has_it or (not asked and _is_wider(leaf, wide)) else policy.cast_to_output(leaf)


def _is_wider(leaf: object, dtype: np.dtype) -> bool:
    own = getattr(leaf, "dtype", None)
    return own is not None and jnp.issubdtype(own, jnp.floating) and own.itemsize > dtype.itemsize


def _raised(leaf: object) -> object:
    """An argument in float32, or as it is where it is that or wider."""
    keeps = getattr(leaf, "dtype", None) == FLOAT32 or _is_wider(leaf, FLOAT32)
    return leaf if keeps else cast_tree(leaf, FLOAT32)


def _decorate(name: str, fn: Any, policy: Policy | str) -> Any:
    if fn is not None:
        check_is_function(name, fn)
        refuse_programs(name, fn)
    found = get_policy(policy)  # A wrong policy is an error here, not at the first call.
    if isinstance(policy, str) and names_half(policy):
        policy = found  # However it is spelled, so that the same policy makes the same function.
    if fn is None:
        return Decorator(functools.partial(_decorate, name, policy=policy), name, policy)
    return _cast_function(fn, policy)


def _cast_function(fn: Callable[..., object], policy: Policy | str) -> CastFunction[..., object]:
    """What casts a function: the same object for as long as the function lives.

    `jax.jit` remembers what it compiled for as long as its function lives, and one that is made in a loop, or in each
    call of a train step, would be compiled each time. So a function keeps its cast functions, as attributes of its own.
    """
    if not isinstance(fn, FunctionType | functools.partial):
        return CastFunction(fn, policy)
    made = vars(fn).get(_MADE)
    if made is None or made.of is not fn:  # `functools.wraps` hands the attributes of a function on to another.
        made = _Made(fn, {})
        vars(fn)[_MADE] = made
    if policy not in made.by_policy:
        made.by_policy[policy] = CastFunction(fn, policy)
    return made.by_policy[policy]


def _call_at_boundary(policy: Policy, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A three-dtype policy: arguments to the compute dtype, results to the output dtype, nothing in between."""
    with rule_scope("cast_fn"):
        args, kwargs = policy.cast_to_compute((args, kwargs))
    with cast_scope(policy), rule_scope("as traced"):
        return fn(*args, **kwargs)


def _call(policy: Policy, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if policy.level == "O0":
        with rule_scope("cast_fn"):
            args, kwargs = jax.tree.map(_raised, (args, kwargs))
        with cast_scope(policy), rule_scope("as traced"):
            return fn(*args, **kwargs)
    traced = Traced(fn, args, kwargs, policy.compute_dtype)
    plan = traced.plan(policy)
    if not is_labelling():  # A report lists them.
        warn_of_unmatched(policy, traced.jaxpr)
        warn_of_optimizer(policy, plan)
        warn_of_float64(policy, plan)
    with cast_scope(policy):
        with rule_scope("cast_fn"):
            outs = evaluate(plan, traced.inputs, policy)
        with rule_scope("result"):
            return traced.rebuild(outs)
