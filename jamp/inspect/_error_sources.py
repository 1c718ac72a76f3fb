"""`error_sources`: which operations the error of half precision comes from."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from jamp._calls import check_count
from jamp.inspect._sources_picture import plot
from jamp.inspect._sources_text import table
from jamp.inspect._target import Target, as_dict, check_is_half, check_values, resolve, sees_nans, tells_settings_apart
from jamp.inspect.roundings.derivatives import Measured, measure
from jamp.inspect.roundings.program import check_has_results, value_and_gradient
from jamp.inspect.roundings.remedies import Remedy, remedies
from jamp.inspect.roundings.sites import Rounding, Row
from jamp.policy import Policy


@dataclasses.dataclass(frozen=True)
class ErrorSource:
    """Roundings that are alike: of one operation, at one place. All errors are relative to the l2 norm of the target.

    Attributes:
        scope: Path of named scopes; empty where the model names none.
        line: `file:line` of the user's code.
        function: Name of the function there.
        operation: Name of the primitive whose result is rounded, or whose operands are.
        rule: What put it in half, as in `jamp.report`.
        dtype: What it is rounded to.
        entry: The entry of `Policy.with_rules(full=[…])` that takes it out, of the policy, or else of that of the
            `cast_fn`s inside. Empty where no rule does.
        instead: What to write where no rule takes it out; else empty.
        share: Its part of the error of the results or of the gradient, whichever is larger.
        value: What it moves the results by, along the error that was measured, in reverse if it is negative.
        value_spread: The length of what it moves the results by, if the errors of its elements are independent.
        gradient: As `value`, for the gradient; None where there is none.
        gradient_spread: As `value_spread`, for the gradient.
        backward: Part of the gradient's that is of roundings in the backward pass.
        depth: How much of the program comes before it, from 0 to 1.
        iterations: `gradient` (or else `value`) by iteration of the outermost loop around it; empty outside of loops.
        count: Number of equations.
    """

    scope: str
    line: str
    function: str
    operation: str
    rule: str
    dtype: str
    entry: str
    instead: str
    share: float
    value: float
    value_spread: float
    gradient: float | None
    gradient_spread: float | None
    backward: float | None
    depth: float
    iterations: tuple[float, ...]
    count: int


@dataclasses.dataclass(frozen=True)
class ErrorSources:
    """Where the error of half precision comes from. `str(sources)` is a table, `sources.to_dict()` is ready for JSON.

    Attributes:
        policy: The policy; None if the function ran as it is written.
        inner: Policies of the `cast_fn`s inside.
        operations: What rounds, dearest first.
        value_error: Relative l2 error of the floating results, as it was measured: infinite where float32 is finite and
            half is not, NaN where an array has no finite number in float32 either.
        value_predicted: The prediction of it: the sum of what all operations do.
        gradient_error: The same of the gradient; None where there is none.
        gradient_predicted: The same of the gradient.
        no_gradient: Why there is no gradient; empty where there is one.
    """

    policy: Policy | None
    inner: tuple[Policy, ...]
    operations: tuple[ErrorSource, ...]
    value_error: float
    value_predicted: float
    gradient_error: float | Any  # `Any` for None, as in `Report.gradient`.
    gradient_predicted: float | Any
    no_gradient: str

    def to_dict(self) -> dict[str, Any]:
        """The same in dictionaries, lists, strings and numbers, for JSON."""
        return as_dict(self)

    def plot(self, path: str) -> None:
        """Writes a picture: parts of the error by scope, along the program and by iteration of loops.

        They are those of the column `gradient`, or `value` where there is none: they add up to what is predicted. It
        takes matplotlib.

        Args:
            path: Where to write it; the ending tells the format.

        Raises:
            ImportError: If matplotlib is not installed (`pip install 'jamp-jax[examples]'`).
        """
        plot(self, path)

    def __str__(self) -> str:
        return table(self)


@tells_settings_apart
@sees_nans
def error_sources(
    fn: Callable[..., Any],
    *args: Any,
    policy: Policy | str | None = None,
    gradient: bool = True,
    directions: int = 2,
    **kwargs: Any,
) -> ErrorSources:
    """Tells which operations the error of half precision comes from, dearest first.

    To first order an operation moves a result by its rounding error times the derivative of the result with respect to
    what it gives. Reverse mode has all of these derivatives at once (Menon et al., "ADAPT", SC 2018). So the program,
    in which `cast_fn` has written out all casts, is evaluated in float32; where it rounds, the error is noted and not
    made; and one backward pass gives its effect. Its derivatives are those halfway between the operands of float32 and
    of half, where what is predicted of a product is exact also if all of it cancels. The gradient with respect to all
    floating arguments is a part of the program like any other: its own roundings count.

    Args:
        fn: The function: a plain one, or what `jamp.cast_fn` made of it. If its first result is one number, that is the
            loss whose gradient is looked at; else it is the sum of all results in random signs.
        *args: Its arguments, arrays with values.
        policy: As for `jamp.cast_fn`. Left out, it is that of `fn` if `cast_fn` made it. A function that calls a
            `cast_fn` inside, such as a loss, is then looked at as it is written; any other at `"O2"`.
        gradient: Whether to look at the gradient too.
        directions: Random directions, each a backward pass, that `…_spread` is a mean over.
        **kwargs: Its keyword arguments.

    Returns:
        An `ErrorSources`; print it. Loops are entered (a `while` as far as its float32 iterations), and so is
        `shard_map`, unless there are branches or `while`s in it. Kernels are not.

    Raises:
        TypeError: If `fn` is not callable, an argument has no values, or no result is floating.
        ValueError: If the policy is not known, neither it nor the function has half precision, or `directions` is none.

    Example:
        >>> import jax, jax.numpy as jnp, jamp
        >>> def model(w, x):
        ...     with jax.named_scope("head"):
        ...         return jnp.tanh(x @ w).sum()
        >>> w, x = jnp.sin(jnp.arange(64.0)).reshape(8, 8), jnp.cos(jnp.arange(32.0)).reshape(4, 8)
        >>> found = jamp.error_sources(model, w, x, policy="O2:bfloat16")
        >>> found.operations[0].operation, found.operations[0].entry
        ('dot_general', 'head/*')
    """
    check_count("directions", directions, "how many random directions to look in", 2)
    target = resolve("error_sources", fn, args, kwargs, policy)
    check_values("error_sources", target)
    check_is_half("error_sources", target)
    return sources_of(target, gradient, directions)[0]


@np.errstate(invalid="ignore", over="ignore", divide="ignore")  # Overflows have no sum, empty arrays no mean.
def sources_of(target: Target, gradient: bool = True, directions: int = 2) -> tuple[ErrorSources, Measured]:
    """What `error_sources` gives, and the single roundings that it is made of."""
    program = value_and_gradient(target, target.program(), gradient)
    check_has_results("error_sources", program)
    found = measure(program, directions)
    has_gradient = bool(program.grads)
    sources = ErrorSources(
        target.policy, target.inner, _grouped(found, target, gradient), found.errors[0], float(found.signed[0].sum()),
        found.errors[1] if has_gradient else None, float(found.signed[1].sum()) if has_gradient else None,
        program.no_gradient,
    )  # fmt: skip
    return sources, found


def row_of(source: ErrorSource) -> Row:
    """What a source has in common with the roundings that it is made of."""
    return source.scope, source.line, source.operation, source.dtype


def _grouped(found: Measured, target: Target, gradient: bool) -> tuple[ErrorSource, ...]:
    groups: dict[Row, list[int]] = defaultdict(list)
    for i, site in enumerate(found.sites):
        groups[site.row].append(i)
    weights = [[_weight(found, which, ids) for ids in groups.values()] for which in range(len(found.signed))]
    shares = zip(*[[_part(w, sum(ws)) for w in ws] for ws in weights], strict=True)
    share_of = {row: max(share) for row, share in zip(groups, shares, strict=True)}
    dearest = sorted(groups, key=lambda row: -share_of[row])
    remedy_of = remedies(
        target, gradient, {row: [found.sites[i] for i in groups[row]] for row in dearest if share_of[row]}
    )
    return tuple(_source(found, groups[row], share_of[row], remedy_of.get(row, Remedy(""))) for row in dearest)


def _weight(found: Measured, target: int, ids: list[int]) -> float:
    """The error of a group, along the measured one or in length, whichever is larger."""
    weight = max(abs(found.signed[target][ids].sum()), np.sqrt((found.spread[target][ids] ** 2).sum()))
    return float("inf") if np.isnan(weight) else float(weight)


def _part(weight: float, total: float) -> float:
    return 1.0 if np.isinf(weight) else weight / total if total else 0.0


def _source(found: Measured, ids: list[int], share: float, remedy: Remedy) -> ErrorSource:
    sites: list[Rounding] = [found.sites[i] for i in ids]
    place = sites[0].place
    backward = [i for i in ids if found.sites[i].backward]
    signed = [float(values[ids].sum()) for values in found.signed]
    spread = [float(np.sqrt((values[ids] ** 2).sum())) for values in found.spread]
    last = found.iterations[-1]
    in_loop = [last[site.key] for site in sites if site.key in last]
    length = max((len(values) for values in in_loop), default=0)
    by_iteration = sum((np.pad(v, (0, length - len(v))) for v in in_loop), np.zeros(length))
    return ErrorSource(
        place.scope, place.line, place.function, sites[0].operation, place.label or "as traced", sites[0].dtype,
        *remedy, share, signed[0], spread[0],
        signed[1] if len(signed) > 1 else None, spread[1] if len(signed) > 1 else None,
        float(found.signed[1][backward].sum()) if len(signed) > 1 else None,
        min(site.depth for site in sites), tuple(map(float, by_iteration)), len(sites),
    )  # fmt: skip
