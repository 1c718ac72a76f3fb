"""What the functions of this folder look at: a function, its arguments, and the policy that it runs at."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np
from jax.core import Tracer
from jax.tree_util import keystr, tree_leaves_with_path

from jamp._compat import ClosedJaxpr, inner_jaxprs, open_jaxpr, scope_path
from jamp._dtypes import FLOAT32, close_matches, half_dtype, is_half, short_repr
from jamp.inspect._as_traced import as_traced
from jamp.policy import Policy, get_policy
from jamp.transforms._cast_fn import CastFunction
from jamp.transforms._labels import labelling, policy_labels
from jamp.transforms._modules import call_with_state
from jamp.transforms._scopes import disable
from jamp.transforms._traced import Traced
from jamp.transforms.program.plan import Plan

# By what looks at functions: the names that tell its settings from the keyword arguments of these.
SETTINGS = {
    "compare": ("policy", "reference"),
    "error_sources": ("policy", "gradient", "directions"),
    "first_nonfinite": ("policy",),
    "report": ("policy", "compiled"),
    "tune": ("policy", "tolerance", "also_half", "progress"),
    "verify": ("policy", "tolerance", "draws"),
}

P = ParamSpec("P")
T = TypeVar("T")


class Target(NamedTuple):
    """A pure function with the arguments of one call and a policy.

    Attributes:
        fn: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        policy: The policy; None if the function runs as it is written.
        inner: Policies of the `cast_fn`s that it calls, which rule their parts whatever `policy` is.
        traced: The function as it is written, traced.
    """

    fn: Callable[..., Any]
    args: Any
    kwargs: Any
    policy: Policy | None
    inner: tuple[Policy, ...]
    traced: Traced

    def program(self) -> Traced:
        """The function as it runs."""
        if self.policy is None:
            return self.traced
        return _labelled(CastFunction(self.fn, self.policy), self.args, self.kwargs, self.policy)

    def plan(self, program: Traced) -> tuple[Plan, list[Any]]:
        """The plan by which the program runs, and the values that go in."""
        if self.policy is None or self.policy.level in (None, "O0"):  # Then there is nothing to decide inside.
            return as_traced(program.jaxpr), program.inputs
        return self.traced.plan(self.policy), self.traced.inputs

    def in_float32(self) -> ClosedJaxpr:
        """The function as it is written, where no `cast_fn` inside does anything."""
        if not self.inner:
            return self.traced.jaxpr
        return _labelled(without_cast_fn(self.fn), self.args, self.kwargs, self.policy).jaxpr

    def with_rules(self, full: tuple[str, ...]) -> Target:
        """The same with rules for float32, of the policy, or else of the `cast_fn`s inside.

        Raises:
            ValueError: If a rule contradicts one of the policy, or the policy has no rules.
        """
        if self.policy is None:
            return self._replace(traced=_labelled(self.fn, self.args, self.kwargs, None, full))
        return self._replace(policy=self.policy.with_rules(full=full))

    def cast_to_output(self, outs: Any) -> Any:
        """Results of the plan as the program gives them."""
        return outs if self.policy is None else self.policy.cast_to_output(outs)

    def run(self) -> Any:
        """The results of the function at the policy."""
        fn = self.fn if self.policy is None else CastFunction(self.fn, self.policy)
        return fn(*self.args, **self.kwargs)


def resolve(caller: str, fn: Any, args: Any, kwargs: Any, policy: Policy | str | None) -> Target:
    """Finds out what is to be looked at, and takes the state out of modules.

    A policy that is given counts, then that of what `cast_fn` made. A function that calls a `cast_fn` somewhere inside
    is complete as it is written. Only to any other function the default applies.
    """
    if not callable(fn):
        raise TypeError(
            f"`jamp.{caller}` takes a function first, got {short_repr(fn)}. Write `jamp.{caller}(fn, *args)`."
        )
    if isinstance(fn, CastFunction):
        policy, fn = (fn.policy if policy is None else policy), fn.__wrapped__
    chosen = None if policy is None else get_policy(policy)  # A wrong policy is an error before anything is traced.
    _check_settings(caller, fn, kwargs)
    fn, args, kwargs = _without_state(fn, args, kwargs)
    traced = _labelled(fn, args, kwargs, chosen)
    inner = tuple(map(get_policy, dict.fromkeys(_policies(traced.jaxpr))))
    if chosen is None and not inner:
        chosen = get_policy("O2")
    return Target(fn, args, kwargs, chosen, inner, traced)


def _check_settings(caller: str, fn: Callable[..., Any], kwargs: Any) -> None:
    """Refuses a keyword that the function does not take, and that looks like a setting of what looks at it."""
    parameters = _parameters(fn)
    if not parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in kwargs:
        if name not in parameters and (hint := close_matches(name, SETTINGS[caller], 0.7)):
            raise TypeError(f"`jamp.{caller}`: {short_repr(fn)} takes no argument {name!r}.{hint}")


def _parameters(fn: Any) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError):  # A function without a signature, such as some that are built in.
        return {}


def _free(fn: Any, args: Sequence[Any]) -> Collection[str]:
    """The arguments of a function that neither these give, nor a `functools.partial`."""
    bound = set(fn.keywords) if isinstance(fn, functools.partial) else set[str]()
    with contextlib.suppress(TypeError, ValueError):
        bound |= inspect.signature(fn).bind_partial(*args).arguments.keys()
    return _parameters(fn).keys() - bound


def tells_settings_apart(tool: Callable[P, T]) -> Callable[P, T]:
    """A tool that refuses a keyword which both it and the function that it looks at take."""
    caller = tool.__name__

    @functools.wraps(tool)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        fn = args[0] if args else kwargs.get("fn")
        given = [name for name in SETTINGS[caller] if name in kwargs]
        free = _free(fn, args[1:]) if given else ()
        for name in given:
            is_policy = name == "policy" and isinstance(kwargs[name], str | Policy | None)
            if name in free and not is_policy:
                raise TypeError(
                    f"`jamp.{caller}` has a setting {name!r}, and {short_repr(fn)} has an argument of that name: "
                    "it cannot be told which is meant. For the function's, write "
                    f"`jamp.{caller}(functools.partial(fn, {name}=...), *args)`; beside that, {name!r} is the setting."
                )
        return tool(*args, **kwargs)

    return called


def sees_nans(tool: Callable[P, T]) -> Callable[P, T]:
    """A tool that runs functions without the settings of JAX that stop at the first NaN: it tells of them itself."""

    @functools.wraps(tool)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.debug_nans(False), jax.debug_infs(False):
            return tool(*args, **kwargs)

    return called


def without_cast_fn(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function where no `cast_fn` inside does anything."""

    def plain(*args: Any, **kwargs: Any) -> Any:
        with disable():
            return fn(*args, **kwargs)

    return plain


def check_values(caller: str, target: Target) -> None:
    """Refuses arguments without values, for what runs the function: shapes alone, and the tracers of a `jit`."""
    leaves = tree_leaves_with_path((target.args, target.kwargs))
    bad = [
        f"  {argument_name(path)}: {leaf!r}" for path, leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct | Tracer)
    ]
    if bad:
        raise TypeError(
            f"`jamp.{caller}` runs the function, and these arguments have no values:\n" + "\n".join(bad)
            + "\nCall it outside of `jax.jit`, with arrays."
        )  # fmt: skip


def check_is_half(caller: str, target: Target) -> None:
    """Refuses what has no half precision, for what compares half with float32.

    A program may have half of its own, by `astype`. Then there is something to compare at O0 too.
    """
    policies = [policy for policy in (target.policy, *target.inner) if policy is not None]
    levels = [policy for policy in policies if policy.level not in (None, "O0")]
    if wide := [str(policy) for policy in levels if policy.pair.wide != FLOAT32]:
        raise ValueError(
            f"`jamp.{caller}` compares half precision with float32, and {wide[0]!r} multiplies in float32. "
            "`jamp.compare(fn, *args, policy=policy)` compares that with float64."
        )
    if not levels and not any(map(_has_half, policies)) and not _rounds_itself(target.traced.jaxpr):
        raise ValueError(
            f"`jamp.{caller}` compares half precision with float32, and got {str(policies[0])!r}, at which all of this "
            f"function is float32: expected a policy of half precision. Write jamp.{caller}(fn, *args, policy='O2')."
        )


def _has_half(policy: Policy) -> bool:
    """Whether a policy of three dtypes has a narrow one; those of O0 are all float32."""
    return any(dtype.itemsize < 4 for dtype in (policy.param_dtype, policy.compute_dtype, policy.output_dtype))


def _rounds_itself(jaxpr: Any) -> bool:
    """Whether a program as it is written has half dtypes, or rounds in float32 as they do."""
    return any(
        eqn.primitive.name == "reduce_precision"
        or any(is_half(getattr(atom.aval, "dtype", None)) for atom in (*eqn.invars, *eqn.outvars))
        or any(map(_rounds_itself, inner_jaxprs(eqn)))
        for eqn in open_jaxpr(jaxpr).eqns
    )


def check_tolerance(tolerance: Any) -> None:
    """Refuses what is no relative error."""
    is_number = isinstance(tolerance, float | int | np.floating) and not isinstance(tolerance, bool)
    if not is_number or not 0 < tolerance < float("inf"):
        raise ValueError(f"`tolerance` is {tolerance!r}: expected a relative error, such as 0.01.")


def no_derivative(error: Exception) -> str:
    """Why there is no derivative, in one line: what JAX, or a rule of the user's, raised while it was traced."""
    first, *_ = [*str(error).strip().splitlines(), type(error).__name__]
    return f"the derivative could not be traced: {first}"


def argument_name(path: Any) -> str:
    """A leaf of `(args, kwargs)` in words."""
    return f"{('args', 'kwargs')[path[0].idx]}{keystr(path[1:])}"


def as_dict(found: Any, **more: Any) -> dict[str, Any]:
    """What a tool found, with its policies as strings, for JSON."""
    policies = {"policy": found.policy and str(found.policy), "inner": [str(policy) for policy in found.inner]}
    return {**dataclasses.asdict(found), **policies, **more}


def heading(policy: Policy | None, inner: tuple[Policy, ...]) -> str:
    """The policies that a function runs at, in words."""
    own = "as written" if policy is None else str(policy)
    return f"{own}, with cast_fn at {' and '.join(map(str, inner))} inside" if inner else own


def _labelled(
    fn: Callable[..., Any], args: Any, kwargs: Any, policy: Policy | None, full: tuple[str, ...] = ()
) -> Traced:
    with labelling(full):
        return Traced(fn, args, kwargs, half_dtype() if policy is None else policy.compute_dtype)


def _policies(jaxpr: Any) -> Iterator[str]:
    for eqn in open_jaxpr(jaxpr).eqns:
        yield from policy_labels(scope_path(eqn))
        for inner in inner_jaxprs(eqn):
            yield from _policies(inner)


def _without_state(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The pure function behind one that mutates modules; the modules stay as they are."""
    found = []

    def note(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        found.append((fn, args, kwargs))
        return None, args[0] if args else None  # A result, and the state as it came in.

    call_with_state(note, fn, args, kwargs)
    return found[0]
