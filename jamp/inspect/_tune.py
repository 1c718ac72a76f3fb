"""`tune`: the policy with the fewest rules that keeps a tolerance."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from jamp.inspect._error_sources import sources_of
from jamp.inspect._operations import Place, operations
from jamp.inspect._sources_text import instead
from jamp.inspect._target import (
    Target,
    check_is_half,
    check_tolerance,
    check_values,
    resolve,
    sees_nans,
    tells_settings_apart,
)
from jamp.inspect._trials import Trials
from jamp.inspect.roundings.sites import entry_for
from jamp.policy import Policy
from jamp.transforms.analysis.regimes import lines_match, scope_matches

_ROUNDS = 4
_HALVES = 12
_TRIALS = 4  # Rules that are looked for one by one.
_DEPTH = 5  # How much narrower than a scope: a line, the line that calls it, two more, and a primitive there.
_WORTH = 0.75  # Of the FLOPs. For less, the name of a scope is better than the number of a line, which edits change.


@tells_settings_apart
@sees_nans
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
    found by bisection, each trial being measured; then whatever of it is not needed goes, the most FLOPs first. What
    holds many more products than have to be float32 is narrowed: a scope to lines in it, a line in a helper to what
    calls it from one line (`"layers.py:8 from model.py:41"`), and a line to primitives (`"add at model.py:41"`).

    Args:
        fn: The function: a plain one, or what `jamp.cast_fn` made of it.
        *args: Its arguments, arrays with values: a small batch.
        policy: The policy to start from; that of `fn` if `cast_fn` made it, or else `"O2"`.
        tolerance: Largest relative l2 error, against float32, of the results and of the gradient, if there is one.
        also_half: Whether to go the other way too: to put in half what the policy has in float32, as far as the
            tolerance allows, the most bytes first.
        progress: Called with a line of text after each trial, such as `print`. True draws a bar on the standard error
            stream: how far the error has come from the first to the tolerance, in orders of magnitude.
        **kwargs: Its keyword arguments.

    Returns:
        The policy with rules added; `str` of it is for a config.

    Raises:
        TypeError: If `fn` is not callable, or an argument has no values.
        ValueError: If the policy has no level, `fn` calls a `cast_fn` inside, `fn` is NaN or infinite in float32, or no
            rules reach the tolerance.

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
    check_tolerance(tolerance)
    target = resolve("tune", fn, args, kwargs, policy)
    check_values("tune", target)
    check_is_half("tune", target)
    start = target.policy
    if start is None or target.inner or start.level in (None, "O0"):
        raise ValueError(
            f"`jamp.tune` adds rules to a level, and got {start or 'a function with a `cast_fn` inside'}. Give it the "
            "float32 function and policy='O2', and hand the result to `jamp.cast_fn`."
        )
    trials = Trials(target, start, tolerance, _told(progress, tolerance))
    entries: list[str] = []
    for _ in range(_ROUNDS + 1):
        if trials.enough(entries):
            found = start.with_rules(full=_fewest(entries, trials))
            return _with_half(found, target, trials) if also_half else found
        entries = trials.shortest(entries, trials.dearest(entries))
    message = (
        f"No rules bring {start} within {tolerance:.2e}: with {len(entries)} of them the relative error is "
        f"{trials.error(entries):.2e}. A larger tolerance, or 'O0' (float32) for this part, is what is left."
    )
    left, _ = sources_of(target._replace(policy=start.with_rules(full=entries)))
    changes = instead(left.operations[:3])
    raise ValueError("\n  ".join([f"{message} Or write", *changes]) if changes else message)


def _fewest(entries: list[str], trials: Trials) -> list[str]:
    """Of entries that are enough, or narrower ones, those that leave the most FLOPs in half."""
    if len(entries) > 1 and trials.enough(others := _one_by_one(len(entries), trials)):
        entries = min(entries, others, key=trials.flops)
    return _narrowed(trials.pruned(entries), trials) if entries else entries


def _narrowed(entries: list[str], trials: Trials) -> list[str]:
    """Entries that are enough, some of them replaced by narrower ones where that leaves many more FLOPs in half."""
    for entry in sorted(entries, key=lambda entry: -trials.flops([entry])):
        others, tried = [e for e in entries if e != entry], [[entry]]
        for depth in range(1, _DEPTH + 1):
            more = [e for e in trials.finer(entry, depth) if e not in others]
            if more in tried or trials.flops(entries) == trials.flops(others):
                break
            tried.append(more)
            found = trials.shortest(others, more)
            if trials.enough(found) and trials.flops(found := trials.pruned(found)) <= _WORTH * trials.flops(entries):
                entries, others = found, [e for e in found if e not in more]
    return entries


def _one_by_one(most: int, trials: Trials) -> list[str]:
    """Rules found each with those before it in force: where one moves an error elsewhere, that is the next dearest."""
    entries: list[str] = []
    while len(entries) < min(most, _TRIALS) and not trials.enough(entries) and (more := trials.dearest(entries)):
        entries = [*entries, more[0]]
    return entries


def _told(progress: Callable[[str], None] | bool, tolerance: float) -> Callable[[str, list[float]], None]:
    """What to do with a line of text, and all errors so far."""
    if progress is True:
        return lambda line, errors: print(_bar(errors, tolerance), line, file=sys.stderr)
    return lambda line, errors: progress(line) if progress else None


def _with_half(found: Policy, target: Target, trials: Trials) -> Policy:
    """The policy with what it has in float32 in half, as far as that is good enough: the most bytes first."""
    sizes: Counter[str] = Counter()
    for op in operations(target._replace(policy=found).plan(target.program())[0], None):
        ruled = any(scope_matches(e, op.scope) or lines_match(e, [op.line], op.primitive) for e in found.full)
        if op.rule in ("full", "promote") and "float32" in op.outputs and not ruled:
            sizes[entry_for(Place(op.scope, op.line))] += op.bytes
    for entry, _ in sizes.most_common(_HALVES):
        if entry and entry not in found.half and trials.suffices(more := found.with_rules(half=[entry])):
            found = more
    return found


def _bar(errors: list[float], tolerance: float) -> str:
    first, last = (min(max(error, tolerance), 1e9) for error in (errors[0], errors[-1]))
    come = 1.0 if first <= tolerance else math.log(first / last) / math.log(first / tolerance)
    filled = round(20 * min(max(come, 0.0), 1.0))
    return f"jamp.tune [{'#' * filled}{'.' * (20 - filled)}]"
