"""What is most likely a mistake, and told with the code to write instead.

Rules of a policy that match nothing; optimizers in a function that is cast; and `cast_fn` and `autocast` taken for
contexts, which they are not.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from jamp._calls import NotAContext
from jamp._compat import ClosedJaxpr, Eqn, Jaxpr, functions_and_files, inner_jaxprs, open_jaxpr, scope_path
from jamp._dtypes import FLOAT16, parse_dtype, short_repr
from jamp._policy.spec import RULE_LISTS, SETTINGS
from jamp._primitives import PRODUCTS, Trait, has
from jamp._warnings import warn_user
from jamp.policy import Policy, get_policy
from jamp.transforms.analysis.regimes import REGIMES, Regime, Regimes, plain_scope
from jamp.transforms.planning.float8 import why_never_in_8_bits
from jamp.transforms.planning.planner import eight_bits
from jamp.transforms.program.flow import Kind
from jamp.transforms.program.heuristics import DEFAULT
from jamp.transforms.program.plan import Plan

if TYPE_CHECKING:
    from jamp.transforms._cast_fn import CastFunction

_NONE = REGIMES["O2"]._replace(label="none")


def warn_of_unmatched(policy: Policy, jaxpr: Jaxpr | ClosedJaxpr) -> None:
    """Warns of the rules of a policy that say nothing about a function."""
    if unmatched := unmatched_rules(policy, jaxpr):
        scopes = sorted({part for eqn in _equations(jaxpr) for part in plain_scope(scope_path(eqn)).split("/") if part})
        named = f" The scopes in it are {', '.join(scopes[:10])}{', …' if len(scopes) > 10 else ''}." if scopes else (
            " It names no scopes (Flax NNX and plain JAX do not; `jax.named_scope` does)."
        )  # fmt: skip
        named += " A float8 rule has to name products." if set(unmatched) & set(policy.float8) else ""
        warn_user(
            f"Rules of the policy match nothing in this function: {', '.join(map(repr, unmatched))}.{named} See all of "
            "them with print(jamp.report(fn, *args)). A policy for several functions has the rules that suit all; add "
            "those of one with `policy.with_rules(…)` where it is cast."
        )
    if refused := _refused_rules(policy, jaxpr):
        reasons = ", ".join(f"{entry!r} ({reason})" for entry, reason in refused.items())
        warn_user(
            f"Float8 rules of the policy name only products that cannot run in 8 bits: {reasons}. They stay half. "
            "Change that, or leave the rule out."
        )


def _refused_rules(policy: Policy, jaxpr: Jaxpr | ClosedJaxpr) -> dict[str, str]:
    """The `float8` rules that name products, but none that can run in 8 bits, and why the first of them cannot."""
    refused: dict[str, str] = {}
    for entry in policy.float8:
        named = _named_by(_ruling(policy, "float8", entry), _ruling(policy), jaxpr)
        reasons = [why_never_in_8_bits(eqn, eight_bits(policy), DEFAULT) for eqn in named if has(eqn, PRODUCTS)]
        if reasons and all(reasons):
            refused[entry] = reasons[0]
    return refused


def unmatched_rules(policy: Policy, jaxpr: Jaxpr | ClosedJaxpr) -> tuple[str, ...]:
    """Entries of a policy's rules for scopes, and for functions and primitives of one's own, that change nothing.

    The names of jax and optax are checked where the policy is made, and not all of a preset's occur in every model.

    Args:
        policy: The policy.
        jaxpr: The function that it is applied to, as it was traced.
    """
    return tuple(
        entry for name in RULE_LISTS for entry in getattr(policy, name) if _says_nothing(policy, name, entry, jaxpr)
    )


def _says_nothing(policy: Policy, name: str, entry: str, jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    is_float8, own = name == "float8", _names_your_own(entry)
    if not (is_float8 or own):
        return False  # Before the function is walked, since presets have many such entries.
    named = [*_named_by(_ruling(policy, name, entry), _ruling(policy), jaxpr)]
    # Of products alone, because all else in the scope of a float8 rule stays as it is.
    ruled = [eqn for eqn in named if has(eqn, PRODUCTS)] if is_float8 else named
    return not ruled and (own or bool(named))


def _ruling(policy: Policy, name: str = "", entry: str = "") -> Policy:
    """A policy with one of its rules, or none, and without settings, of which some need rules."""
    plain = dict.fromkeys(SETTINGS, None)
    return dataclasses.replace(policy, **(dict.fromkeys(RULE_LISTS, ()) | plain | ({name: (entry,)} if name else {})))


def _equations(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Eqn]:
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from _equations(inner)


def _names_your_own(entry: str) -> bool:
    return any(sign in entry for sign in "*/:")


def _named_by(policy: Policy, bare: Policy, jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[Eqn]:
    """The equations in which the one rule of `policy` has a say."""
    ruled, unruled = Regimes(policy), Regimes(bare)

    def walk(jaxpr: Jaxpr | ClosedJaxpr, scope: str, around: Regime) -> Iterator[Eqn]:
        for eqn in open_jaxpr(jaxpr).eqns:
            here = ruled.enter(eqn, around, scope)
            if here != unruled.enter(eqn, _NONE, scope):
                yield eqn
            for inner in inner_jaxprs(eqn):
                yield from walk(inner, f"{scope}/{scope_path(eqn)}".strip("/"), here.regime)

    # A regime of its own, so that whatever a rule says is a change.
    return walk(jaxpr, "", _NONE)


_JAMP = str(Path(__file__).parents[1] / "optim")
_UPDATES = ("update_fn", "apply_updates", "update")

_MESSAGE = (
    "An optimizer runs inside of a function that `cast_fn` made, and computes in half precision: {lost}. Cast the "
    "model and not the step:\n"
    "    apply_fn = jamp.cast_fn(model.apply, {policy!r})\n"
    "    @jax.jit\n"
    "    def train_step(params, opt_state, batch): ...  # calls apply_fn"
)


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
        warn_user(_MESSAGE.format(policy=str(policy), lost=lost))


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
        moves = has(step.eqn, Trait.VIEW | Trait.MOVES | Trait.CONVERTS)
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
