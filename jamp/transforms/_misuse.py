"""What is most likely a mistake, and told with the code to write instead.

Optimizers in a function that is cast; and `cast_fn` and `autocast` taken for contexts, which they are not.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import jax

from jamp._calls import NotAContext
from jamp._compat import ClosedJaxpr, Eqn, Jaxpr, functions_and_files, inner_jaxprs, open_jaxpr
from jamp._dtypes import FLOAT16, FLOAT32, FLOAT64, is_differentiable, parse_dtype, short_repr
from jamp._primitives import MOVED, has
from jamp._warnings import warn_user
from jamp.policy import Policy, get_policy
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.plan import Plan

if TYPE_CHECKING:
    from jamp.transforms._cast_fn import CastFunction

_JAMP = str(Path(__file__).parents[1] / "optim")
_UPDATES = ("update_fn", "apply_updates", "update")

_OPTIMIZER = (
    "An optimizer runs inside of a function that `cast_fn` made, and computes in half precision: {lost}. Cast the "
    "model and not the step:\n"
    "    apply_fn = jamp.cast_fn(model.apply, {policy!r})\n"
    "    @jax.jit\n"
    "    def train_step(params, opt_state, batch): ...  # calls apply_fn"
)
_LEFT_ALONE = (
    "All that the function is given is float64, which {policy!r} leaves as it is. Give it float32, or write "
    "'O2:float32,p=float64,o=float64', which computes its products in float32."
)


def refuse_without_x64(policy: Policy) -> None:
    """Raises where a policy is for float64 programs, which JAX has none of: its float64 would be float32."""
    if policy.pair.wide == FLOAT64 and jax.dtypes.canonicalize_dtype(FLOAT64) != FLOAT64:
        raise ValueError(
            f"Policy {str(policy)!r} is for programs in float64, and JAX is not in x64 mode. Write "
            "jax.config.update('jax_enable_x64', True), or a policy in half for a program in float32: 'O2'."
        )


def warn_of_float64(policy: Policy, plan: Plan) -> None:
    """Warns where a policy in half is given a program in float64, of which it changes nothing."""
    if not (policy.output_dtype == policy.pair.wide == FLOAT32 and plan.unchanged):
        return
    inner = open_jaxpr(plan.jaxpr)
    atoms = (*inner.invars, *inner.constvars, *(var for eqn in inner.eqns for var in eqn.outvars))
    if {atom.aval.dtype for atom in atoms if is_differentiable(atom.aval)} == {FLOAT64}:
        warn_user(_LEFT_ALONE.format(policy=str(policy)))


def warn_of_optimizer(policy: Policy, plan: Plan) -> None:
    """Warns of results that optax computed, where some of its arithmetic runs in half precision.

    The wrappers of jamp warn by themselves, and compute in float32 whatever is around them.
    """
    if policy.level not in ("O2", "O3"):
        return
    stacks = [functions_and_files(eqn) for eqn in _makers_of_results(plan.jaxpr)]
    if any(file.startswith(_JAMP) for stack in stacks for _, file in stack):
        return
    if any(map(_is_update, stacks)) and any(map(_is_of_optax, _made_in_half(plan))):
        lost = "small updates are lost"
        if policy.compute_dtype == FLOAT16:
            lost = f"the second moments of Adam become zero in float16, and {lost}"
        warn_user(_OPTIMIZER.format(policy=str(policy), lost=lost))


def _is_update(stack: list[tuple[str, str]]) -> bool:
    return any(name in _UPDATES and "optax" in Path(file).parts for name, file in stack)


def _is_of_optax(eqn: Eqn) -> bool:
    """Whether the code of an update stands in optax: line searches call the user's functions too."""
    stack = functions_and_files(eqn)
    innermost = next((file for _, file in stack if "jax" not in Path(file).parts), "")
    return _is_update(stack) and "optax" in Path(innermost).parts


def _made_in_half(plan: Plan) -> Iterator[Eqn]:
    """The equations that compute half data, also of jaxprs inside."""
    for step in plan.steps:
        for inner in step.plans:
            yield from _made_in_half(inner)
        moves = has(step.eqn, MOVED)
        if not step.plans and not moves and any(flow is not None and flow.kind == Kind.HALF for flow in step.out):
            yield step.eqn


def _makers_of_results(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Eqn]:
    """The equations that results come from, and within calls and loops those that the results of these come from."""
    results = {id(var) for var in open_jaxpr(jaxpr).outvars}
    for eqn in open_jaxpr(jaxpr).eqns:
        if any(id(var) in results for var in eqn.outvars):
            yield eqn
            for inner in inner_jaxprs(eqn):
                yield from _makers_of_results(inner)


P = ParamSpec("P")
R = TypeVar("R")


_NO_CONTEXT = "They are no contexts for `with`, because JAX has no global mode in which operations could be cast."


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
    if _holds_apply(fn):
        raise TypeError(
            f"`jamp.{name}` takes a function, got a {type(fn).__name__}, whose parameters are apart from it. Write\n"
            f"    apply_fn = jamp.{name}(model.apply, policy)\n    y = apply_fn(variables, x)"
        )
    if isinstance(fn, type) and not _is_dtype(fn):
        raise TypeError(
            f"`jamp.{name}` takes a function, got the class {fn.__name__}. Cast an object of it, "
            f"`jamp.{name}({fn.__name__}(…), policy)`, or write `@jamp.{name}(policy=…)` above its method `__call__`."
        )
    if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn) or inspect.isgeneratorfunction(fn):
        kind = "yields" if inspect.isgeneratorfunction(fn) else "is async"
        raise TypeError(
            f"`jamp.{name}` traces a function from its arguments to its results, and {short_repr(fn)} {kind}. Cast the "
            f"function of arrays that it calls: `jamp.{name}(model.apply, policy)`."
        )
    if isinstance(fn, classmethod):
        raise TypeError(
            f"`jamp.{name}` takes a function, got a classmethod. Write `@classmethod` above `@jamp.{name}(policy=…)`."
        )
    if callable(fn) and not isinstance(fn, type):
        return
    policy, hint = "O2", ""
    if isinstance(fn, str | Policy) or _is_dtype(fn):
        policy, hint = (str(fn) if not isinstance(fn, type) and _is_policy(fn) else policy), f" {_NO_CONTEXT}"
    raise TypeError(
        f"`jamp.{name}` takes a function first, got {short_repr(fn)}. Write `jamp.{name}(fn, policy={policy!r})`, or "
        f"`@jamp.{name}(policy={policy!r})` above a function.{hint}"
    )


def _holds_apply(fn: object) -> bool:
    """Whether a model is described here whose parameters are apart: a module of Flax Linen, a transform of Haiku."""
    # Looked up, not imported: a program that has not imported Flax has no module of it.
    module = getattr(sys.modules.get("flax.linen"), "Module", None)
    if module is not None and isinstance(fn, module):
        return getattr(fn, "parent", None) is None and getattr(fn, "scope", None) is None  # Not bound, nor a part.
    return not callable(fn) and callable(getattr(fn, "apply", None))


def _is_dtype(fn: Any) -> bool:
    try:
        return bool(parse_dtype(fn))
    except (TypeError, ValueError):
        return False


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
