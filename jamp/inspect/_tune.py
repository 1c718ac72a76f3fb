"""`tune`: the policy with the fewest rules that keeps a tolerance."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from jamp.inspect._error_sources import error_sources
from jamp.inspect._operations import Place, operations
from jamp.inspect._target import check_values, resolve
from jamp.inspect._verify import relative
from jamp.inspect.roundings.program import value_and_gradient
from jamp.inspect.roundings.sites import entry_for
from jamp.policy import Policy, get_policy

_ROUNDS = 4


def tune(
    fn: Callable[..., Any],
    *args: Any,
    policy: Policy | str | None = None,
    tolerance: float,
    progress: Callable[[str], None] | None = None,
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
        progress: Called with a line of text after each trial, such as `print`.
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
    errors: dict[tuple[str, ...], float] = {}

    def error(entries: Sequence[str]) -> float:
        key = tuple(entries)
        if key not in errors:
            values = _results(target, start.with_rules(full=key))
            errors[key] = max(relative(*pair) for pair in zip(values, exact, strict=True) if pair[0])
            if progress is not None:
                progress(f"{len(key)} rules: relative error {errors[key]:.2e}, tolerance {tolerance:.2e}")
        return errors[key]

    def within(entries: Sequence[str]) -> bool:
        return error(entries) <= tolerance

    entries: list[str] = []
    for _ in range(_ROUNDS + 1):
        if within(entries):
            return start.with_rules(full=_pruned(entries, target, within))
        entries = _shortest(entries, _dearest(target, start.with_rules(full=entries), entries), within)
    raise ValueError(
        f"No rules bring {start} within {tolerance:.2e}: with {len(entries)} of them the relative error is "
        f"{error(entries):.2e}. A larger tolerance, or 'O0' (float32) for this part, is what is left."
    )


def _results(target: Any, policy: Policy) -> tuple[list[Any], list[Any]]:
    """Floating results and gradients at a policy."""
    at = target._replace(policy=policy)
    program = value_and_gradient(at, at.program())
    values = jax.jit(jaxpr_as_fun(program.jaxpr))(*program.inputs)
    count = len(program.outs)
    return jax.device_get(values[:count]), jax.device_get(values[count : count + len(program.grads)])


def _dearest(target: Any, policy: Policy, known: Sequence[str]) -> list[str]:
    found = error_sources(target.fn, *target.args, policy=policy, **target.kwargs).operations
    shares: defaultdict[str, float] = defaultdict(float)
    for op in found:
        if op.entry and op.entry not in known:
            shares[op.entry] += op.share
    return sorted((entry for entry in shares if shares[entry] > 0), key=lambda entry: -shares[entry])


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
