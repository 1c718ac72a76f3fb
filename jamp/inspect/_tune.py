"""`tune`: the policy with the fewest rules that keeps a tolerance."""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from jamp.inspect._error_sources import error_sources
from jamp.inspect._operations import Place, operations
from jamp.inspect._target import Target, check_values, resolve
from jamp.inspect._verify import relative
from jamp.inspect.roundings.program import value_and_gradient
from jamp.inspect.roundings.remedies import takes_rule
from jamp.inspect.roundings.sites import entry_for
from jamp.policy import Policy, get_policy
from jamp.transforms.analysis.regimes import scope_matches

_ROUNDS = 4
_HALVES = 12
_TRIALS = 4  # Rules that are looked for one by one.


def tune(
    fn: Callable[..., Any],
    *args: Any,
    policy: Policy | str | None = None,
    tolerance: float,
    also_half: bool = False,
    progress: Callable[[str], None] | bool = False,
    **kwargs: Any,
) -> Policy:
    """The policy with the fewest rules for float32 that brings value and gradient within a tolerance.

    `jamp.error_sources` says which scopes and lines the error comes from; the shortest list of them that is enough is
    found by bisection, each trial being measured; then whatever of it is not needed goes, the most FLOPs first.

    Args:
        fn: The function: a plain one, or what `jamp.cast_fn` made of it.
        *args: Its arguments, arrays with values: a small batch.
        policy: The policy to start from; that of `fn` if `cast_fn` made it, or else `"O2"`.
        tolerance: Largest relative l2 error, against float32, of the results and of the gradient.
        also_half: Whether to go the other way too: to put in half what the policy has in float32, as far as the
            tolerance allows, the most bytes first.
        progress: Called with a line of text after each trial, such as `print`. True draws a bar on the standard error
            stream: how far the error has come from the first to the tolerance, in orders of magnitude.
        **kwargs: Its keyword arguments.

    Returns:
        The policy with rules added; `str` of it is for a config.

    Raises:
        TypeError: If `fn` is not callable, or an argument has no values.
        ValueError: If the policy has no level, `fn` calls a `cast_fn` inside, or no rules reach the tolerance.

    Example:
        >>> import jax, jax.numpy as jnp, jamp
        >>> def model(x):
        ...     with jax.named_scope("variance"):
        ...         spread = (x * x).mean() - x.mean() ** 2
        ...     return jnp.tanh(x).sum() + spread
        >>> x = 10 + jnp.sin(jnp.arange(64.0))
        >>> print(jamp.tune(model, x, policy="O3:bfloat16", tolerance=1e-2))
        O3:bfloat16,full=['variance/*']
    """
    target = resolve("tune", fn, args, kwargs, policy)
    check_values("tune", target)
    start = target.policy
    if start is None or target.inner or start.level in (None, "O0"):
        raise ValueError(
            f"`jamp.tune` adds rules to a level, and got {start or 'a function with a `cast_fn` inside'}. Give it the "
            "float32 function and policy='O2', and hand the result to `jamp.cast_fn`."
        )
    if not tolerance > 0:
        raise ValueError(f"`tolerance` is {tolerance!r}: expected a relative error, such as 0.01.")
    exact = _results(target, get_policy("O0"))
    errors: dict[Policy, float] = {}

    def error_at(policy: Policy) -> float:
        if policy not in errors:
            values = _results(target, policy)
            errors[policy] = max(relative(*pair) for pair in zip(values, exact, strict=True) if pair[0])
            rules = len(policy.full) + len(policy.half) - len(start.full) - len(start.half)
            line = f"{rules} rules: relative error {errors[policy]:.2e}, tolerance {tolerance:.2e}"
            if progress is True:
                print(_bar([*errors.values()], tolerance), line, file=sys.stderr)
            elif progress:
                progress(line)
        return errors[policy]

    def error(entries: Sequence[str]) -> float:
        return error_at(start.with_rules(full=tuple(entries)))

    def within(entries: Sequence[str]) -> bool:
        return error(entries) <= tolerance

    ranked: dict[tuple[str, ...], list[str]] = {}

    def dearest(entries: list[str]) -> list[str]:
        key = tuple(entries)
        if key not in ranked:
            ranked[key] = _dearest(target, start.with_rules(full=entries), entries)
        return ranked[key]

    entries: list[str] = []
    for _ in range(_ROUNDS + 1):
        if within(entries):
            if len(entries) > 1 and within(others := _one_by_one(len(entries), dearest, within)):
                entries = min(entries, others, key=lambda rules: _float32_flops(target, start, rules))
            found = start.with_rules(full=_pruned(entries, target, within))
            return _with_half(found, target, lambda policy: error_at(policy) <= tolerance) if also_half else found
        entries = _shortest(entries, dearest(entries), within)
    raise ValueError(
        f"No rules bring {start} within {tolerance:.2e}: with {len(entries)} of them the relative error is "
        f"{error(entries):.2e}. A larger tolerance, or 'O0' (float32) for this part, is what is left."
    )


def _with_half(found: Policy, target: Target, enough: Callable[[Policy], bool]) -> Policy:
    """The policy with what it has in float32 in half, as far as that is good enough: the most bytes first."""
    sizes: Counter[str] = Counter()
    for op in operations(target._replace(policy=found).plan(target.program())[0], None):
        ruled = any(scope_matches(entry, op.scope) or op.line.endswith(entry) for entry in found.full)
        if op.rule in ("full", "promote") and "float32" in op.outputs and not ruled:
            sizes[entry_for(Place(op.scope, op.line))] += op.bytes
    for entry, _ in sizes.most_common(_HALVES):
        if entry and entry not in found.half and enough(more := found.with_rules(half=[entry])):
            found = more
    return found


def _bar(errors: list[float], tolerance: float) -> str:
    first, last = (min(max(error, tolerance), 1e9) for error in (errors[0], errors[-1]))
    come = 1.0 if first <= tolerance else math.log(first / last) / math.log(first / tolerance)
    filled = round(20 * min(max(come, 0.0), 1.0))
    return f"jamp.tune [{'#' * filled}{'.' * (20 - filled)}]"


def _results(target: Any, policy: Policy) -> tuple[list[Any], list[Any]]:
    """Floating results and gradients at a policy."""
    at = target._replace(policy=policy)
    program = value_and_gradient(at, at.program())
    values = jax.jit(jaxpr_as_fun(program.jaxpr))(*program.inputs)
    count = len(program.outs)
    return jax.device_get(values[:count]), jax.device_get(values[count : count + len(program.grads)])


def _dearest(target: Target, policy: Policy, known: Sequence[str]) -> list[str]:
    """Rules that may help, the dearest first. Last comes what moves nothing by itself: it may decide about a mask."""
    found = error_sources(target.fn, *target.args, policy=policy, **target.kwargs).operations
    shares: defaultdict[str, float] = defaultdict(float)
    for op in found:
        decides = not op.share or op.rule == "decided otherwise"
        entry = entry_for(Place(op.scope, op.line)) if decides else op.entry
        if entry and entry not in known and takes_rule(policy, entry):
            shares[entry] += op.share
    return sorted(shares, key=lambda entry: -shares[entry])


def _shortest(known: list[str], more: list[str], enough: Callable[[list[str]], bool]) -> list[str]:
    """What is known, and the shortest beginning of what may be added that is enough; all of it if nothing is."""
    low, high = 0, 1
    while high < len(more) and not enough(known + more[:high]):
        low, high = high, 2 * high
    high = min(high, len(more))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(known + more[:middle]) else (middle, high)
    return known + more[:high]


def _one_by_one(most: int, dearest: Callable[[list[str]], list[str]], enough: Callable[[list[str]], bool]) -> list[str]:
    """Rules found each with those before it in force: where one moves an error elsewhere, that is the next dearest."""
    entries: list[str] = []
    while len(entries) < min(most, _TRIALS) and not enough(entries) and (more := dearest(entries)):
        entries = [*entries, more[0]]
    return entries


def _float32_flops(target: Target, start: Policy, entries: Sequence[str]) -> int:
    """FLOPs of the products that are float32 with rules added."""
    ruled = target._replace(policy=start.with_rules(full=tuple(entries)))
    return sum(op.flops for op in operations(ruled.plan(target.program())[0], None) if op.inputs[:1] == ("float32",))


def _pruned(entries: list[str], target: Any, enough: Callable[[list[str]], bool]) -> list[str]:
    """The entries without those that are not needed, the most FLOPs first."""
    flops: Counter[str] = Counter()
    for op in operations(target.plan(target.program())[0], None):
        flops[entry_for(Place(op.scope, op.line))] += op.flops
    for entry in sorted(entries, key=lambda entry: -flops[entry]):
        fewer = [e for e in entries if e != entry]
        if fewer != entries and enough(fewer):
            entries = fewer
    return entries
