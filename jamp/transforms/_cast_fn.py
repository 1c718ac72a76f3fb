"""The public transform: `cast_fn` runs any function of arrays at a precision policy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from jamp._compat import open_jaxpr
from jamp._dtypes import short_repr
from jamp._tree import cast_tree
from jamp.policy import Policy, get_policy
from jamp.transforms import _modules as modules
from jamp.transforms._demand import Want
from jamp.transforms._execute import Run, execute
from jamp.transforms._flow import Kind, is_half, traced_flow
from jamp.transforms._plan import Planner
from jamp.transforms._scopes import cast_scope, is_disabled, is_labelling, label_steps, rule_scope
from jamp.transforms._steps import Plan
from jamp.transforms._unmatched import warn_of_unmatched
from jamp.transforms._usage import Decorator, NotAContext, refuse_settings

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")

_USAGE = "Write `jamp.{name}(fn, policy={policy!r})`, or `@jamp.{name}(policy={policy!r})` above a function."


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
        policy = self.policy
        call = functools.partial(_call_at_boundary if policy.level is None else _call, policy)
        result = modules.call_with_state(call, self.__wrapped__, args, kwargs)
        with rule_scope("result"):
            return policy.cast_to_output(result)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> CastFunction[P, R]: ...
    @overload
    def __get__(
        self: CastFunction[Concatenate[Any, Q], R], instance: object, owner: type | None = None
    ) -> CastFunction[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds to an instance, so that `cast_fn` decorates methods."""
        return self if instance is None else type(self)(self.__wrapped__.__get__(instance, owner), self._spec)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles what it was made of; the annotations of a function, `jax.Array` among them, need not be picklable."""
        return type(self), (self.__wrapped__, self._spec)

    def __repr__(self) -> str:
        return f"jamp.cast_fn({self.__wrapped__!r}, policy={str(self._spec)!r})"


@overload
def cast_fn(fn: Callable[P, R], policy: Policy | str = ...) -> CastFunction[P, R]: ...
@overload
def cast_fn(fn: None = ..., policy: Policy | str = ...) -> Decorator: ...
def cast_fn(fn: Callable[..., Any] | None = None, policy: Policy | str = "O2") -> Any:
    """Runs a function at a precision policy: mixed precision for a model that knows nothing of it.

    `fn` is traced with its arguments as they are, and evaluated again operation by operation, each in the precision
    that the policy gives it. It composes with `jit`, `grad`, `vmap`, `scan`, `checkpoint`, `shard_map` and itself, in
    any order. Nothing is cached: each call traces `fn`, so call it inside of `jax.jit`.

    Args:
        fn: Any function of arrays: `model.apply`, a method, a `functools.partial`, a loss. Arrays may be anywhere in
            its arguments; whatever else is there (booleans, strings, functions, None) is passed on as it is. Left
            out, the result is a decorator.
        policy: What `jamp.get_policy` takes: `"O0"`, `"OD"`, `"O1"`, `"O2"` or `"O3"`, optionally with `":float16"` or
            `":bfloat16"`, one of jmp's strings, or a `jamp.Policy`.

    Returns:
        A function with the signature, name and documentation of `fn`. Floating results come out in the policy's
        output dtype, float32 by default.

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


def _decorate(name: str, fn: Any, policy: Policy | str) -> Any:
    get_policy(policy)  # A wrong policy is an error here, not at the first call.
    if fn is None:
        return Decorator(functools.partial(_decorate, name, policy=policy), name, policy)
    if not callable(fn):
        hint = _USAGE.format(name=name, policy=str(fn) if isinstance(fn, str | Policy) else "O2")
        raise TypeError(f"`jamp.{name}` takes a function first, got {short_repr(fn)}. {hint}")
    return CastFunction(fn, policy)


def _call_at_boundary(policy: Policy, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A three-dtype policy: arguments to the compute dtype, results to the output dtype, nothing in between."""
    with rule_scope("cast_fn"):
        args, kwargs = policy.cast_to_compute((args, kwargs))
    with cast_scope(policy), rule_scope("as traced"):
        return fn(*args, **kwargs)


def _call(policy: Policy, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    if policy.level == "O0":
        with rule_scope("cast_fn"):
            args, kwargs = cast_tree((args, kwargs), jnp.float32)
        with cast_scope(policy), rule_scope("as traced"):
            return fn(*args, **kwargs)
    traced = Traced(fn, args, kwargs)
    if not is_labelling():  # A report lists them.
        warn_of_unmatched(policy, traced.jaxpr)
    plan = traced.plan(policy)
    label_steps(plan)
    with cast_scope(policy):
        with rule_scope("cast_fn"):
            outs = evaluate(plan, traced.inputs, policy)
        with rule_scope("result"):
            return traced.rebuild(outs)


class _Static(NamedTuple):
    """A result that is not an array, such as a string, kept outside of the trace."""

    value: Any


class Traced:
    """A function traced to a jaxpr at the arguments of one call: arrays are inputs, all else is constant."""

    def __init__(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> None:
        leaves, tree = jax.tree.flatten((args, kwargs))
        self._dynamic = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
        self.inputs = [leaves[i] for i in self._dynamic]
        self._static_outs: list[_Static | None] = []

        def flat(*arrays: Any) -> list[Any]:
            return self._flat(fn, leaves, tree, *arrays)

        # JAX names the traced function, and its line, in errors such as that of `float(x)`: the user's, and not this.
        vars(flat).update(__wrapped__=_written_by_user(fn), __signature__=inspect.signature(flat))
        self.jaxpr = jax.make_jaxpr(flat)(*self.inputs)

    def _flat(self, fn: Callable[..., Any], leaves: Sequence[Any], tree: Any, *inputs: Any) -> list[Any]:
        leaves = list(leaves)
        for index, value in zip(self._dynamic, inputs, strict=True):
            leaves[index] = value
        args, kwargs = jax.tree.unflatten(tree, leaves)
        outs, self._out_tree = jax.tree.flatten(fn(*args, **kwargs))
        self._static_outs = [None if is_array(out) else _Static(out) for out in outs]
        return [out for out in outs if is_array(out)]

    def plan(self, policy: Policy) -> Plan:
        """Decides the precision of every operation."""
        inner = open_jaxpr(self.jaxpr)
        ins = tuple(traced_flow(var.aval, Kind.LAZY) for var in inner.invars)
        planner = Planner(policy)
        wants = (Want.FULL if policy.output_dtype == np.float32 else Want.HALF,) * len(inner.outvars)
        return planner.plan(self.jaxpr, ins, wants, planner.modes.base)

    def rebuild(self, outs: Sequence[Any]) -> Any:
        """Results as `fn` returns them: half values in the dtype that they were traced with, float32 never narrowed."""
        traced = [var.aval.dtype for var in open_jaxpr(self.jaxpr).outvars]
        raised = iter(_raised(out, dtype) for out, dtype in zip(outs, traced, strict=True))
        leaves = [next(raised) if static is None else static.value for static in self._static_outs]
        return jax.tree.unflatten(self._out_tree, leaves)


def _written_by_user(fn: Any) -> Any:
    """The function with a name and a line behind a `functools.partial`, or behind an object that can be called."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn if inspect.isroutine(fn) or isinstance(fn, type) else type(fn).__call__


def _raised(value: Any, dtype: Any) -> Any:
    value = jnp.asarray(value)  # A constant of NumPy's, returned as it is, too.
    return value.astype(dtype) if is_half(value.dtype) and not is_half(dtype) else value


def evaluate(plan: Plan, inputs: Sequence[Any], policy: Policy) -> list[Any]:
    """Runs a plan on arrays."""
    return execute(plan, inputs, Run(keep_half=policy.residuals == "half"))


def is_array(leaf: Any) -> bool:
    """Whether an argument is traced: JAX arrays, and floating NumPy arrays.

    Python scalars stay weak, and NumPy's scalars, and arrays of integers or booleans, stay concrete, so that rates,
    shapes, flags and index tables keep working as they do without the transform.
    """
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return True
    return isinstance(leaf, np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.inexact)
