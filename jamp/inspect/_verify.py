"""`verify`: a verdict on a policy, by value and gradient beside those of float32."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jamp._calls import check_count
from jamp._compat import open_jaxpr
from jamp._dtypes import is_half
from jamp._primitives import Trait, has
from jamp.inspect._compiled import may_skip_roundings
from jamp.inspect._error_sources import sources_of
from jamp.inspect._first_nonfinite import nonfinite_in
from jamp.inspect._flops import code_line
from jamp.inspect._target import (
    Target,
    check_is_half,
    check_tolerance,
    check_values,
    resolve,
    sees_nans,
    tells_settings_apart,
)
from jamp.inspect._verdict import FLOAT32_ERROR, Decision, LeafError, Verification
from jamp.inspect.roundings.derivatives import both
from jamp.inspect.roundings.pair import Pair
from jamp.inspect.roundings.program import Program, check_has_results, compiled, value_and_gradient
from jamp.inspect.roundings.raised import Evaluation
from jamp.inspect.roundings.single import rounded
from jamp.inspect.roundings.steps import Steps, in_line
from jamp.inspect.roundings.weights import weights
from jamp.policy import Policy

Results = Sequence[Sequence[Any]]  # Of each draw.
# How many times the error of rounding the inputs alone half precision may cost. Layers round too, and their errors add
# up like those of a random walk.
_LIMIT = 4.0
# The error of a few numbers, such as a loss, is one accident, and so is that of rounding the inputs: neither says how
# large the other may be. What half itself does to a number is allowed there.
_FEW = 16


@tells_settings_apart
@sees_nans
def verify(
    fn: Callable[..., Any],
    *args: Any,
    policy: Policy | str | None = None,
    tolerance: float | None = None,
    draws: int = 3,
    **kwargs: Any,
) -> Verification:
    """Says whether a function keeps its value and gradient at a policy: one line in a test, or before training.

    All roundings of the program are made, those too that XLA may leave out on this device and not on another
    (`xla_allow_excess_precision`). If it is good so, it is looked at once more as it is compiled here.

    Args:
        fn: The function: a plain one, or what `jamp.cast_fn` made of it. If its first result is one number, that is the
            loss whose gradient is looked at; else it is the sum of all results in random signs.
        *args: Its arguments, arrays with values.
        policy: As for `jamp.cast_fn`. Left out, it is that of `fn` if `cast_fn` made it. A function that calls a
            `cast_fn` inside, such as a loss, then runs as it is written; any other at `"O2"`.
        tolerance: Largest relative l2 error of results and gradient. Left out, it is four times what rounding the
            inputs and weights to half does in float32 arithmetic, which no policy avoids; of less than 16 numbers, such
            as a loss, at least half a unit in the last place of the half dtype.
        draws: How many times to run it where an argument is a random key (`jax.random.key`): with other numbers each
            time, and the errors of all of them together.
        **kwargs: Its keyword arguments.

    Returns:
        A `Verification`; print it, or assert it.

    Raises:
        TypeError: If `fn` is not callable, an argument has no values, or no result is floating.
        ValueError: If the policy is not known, neither it nor the function has half precision, `tolerance` is no
            positive number, or `draws` is none.

    Example:
        >>> import jax.numpy as jnp, jamp
        >>> def model(x):
        ...     return jamp.half_precision(lambda x: (x * x).mean() - x.mean() ** 2)(x)
        >>> x = 10 + jnp.sin(jnp.arange(64.0))
        >>> bool(jamp.verify(model, x, policy="O2:bfloat16"))
        False
        >>> bool(jamp.verify(jnp.var, x, policy="O2:bfloat16", tolerance=0.02))
        True
    """
    if tolerance is not None:
        check_tolerance(tolerance)
    check_count("draws", draws, "how many times to run the function", 3)
    target = resolve("verify", fn, args, kwargs, policy)
    check_values("verify", target)
    check_is_half("verify", target)
    program = value_and_gradient(target, target.program())
    check_has_results("verify", program)
    total = len(program.outs) + len(program.grads)
    places: dict[Any, tuple[str, str, int]] = {}

    def watch(eqn: Any, args: list[Pair], outs: list[Pair]) -> Any:
        branches = eqn.primitive.name == "cond"
        if not branches and not has(eqn, Trait.COMPARES | Trait.CHOOSES):
            return None
        index = args[0] if branches else outs[-1]
        places[id(eqn)] = eqn.primitive.name, code_line(eqn)[0], jnp.size(index.wide)
        return {id(eqn): jnp.sum(index.wide != index.half)} if index.wide is not index.half else None

    evaluate = Evaluation(watch=watch)
    run = _evaluated(evaluate, program)
    run_rounded = run  # So that it is compiled once, where nothing that the function closes over is rounded.
    if weights(in_line(program.jaxpr)):
        run_rounded = _evaluated(Evaluation(constants=functools.partial(_rounded_weights, target=target)), program)
    dtypes = _dtypes(program)
    drawn = _drawn(program, draws)
    exact, moved, records = [], [], []
    for inputs in drawn:
        wide = [pair.wide for pair in both(program._replace(inputs=inputs))]
        outs, found = run(wide)
        exact.append([out.wide for out in outs[:total]])
        outs, _ = run_rounded([_rounded_input(x, target) for x in wide])
        # What is returned in half is rounded by itself.
        given = zip(outs[:total], dtypes, strict=True)
        moved.append([rounded(out.wide, dtype) if is_half(dtype) else out.wide for out, dtype in given])
        records.append(found)

    def judged(as_written: bool) -> Errors:
        at_policy = compiled(program, as_written)
        actual = [at_policy(inputs)[:total] for inputs in drawn]
        return _judged(program, actual, moved, exact, tolerance, float(jnp.finfo(_half(target)).eps) / 2)

    errors = judged(as_written=True)
    here = judged(as_written=False) if errors.ok and may_skip_roundings() else errors
    skips = errors.ok and not here.ok
    value, gradient, leaves, ok, comparable = here if skips else errors
    bad = any(leaf.nonfinite for leaf in leaves)
    found = None if ok or not comparable else sources_of(target, directions=1)[0]
    return Verification(
        target.policy, target.inner, tolerance, value, gradient, leaves, _decisions(records, places, program),
        nonfinite_in(target) if bad and comparable else None,
        () if found is None else found.operations[:3], ok, len(drawn), program.no_gradient, skips,
        comparable,
    )  # fmt: skip


class Errors(NamedTuple):
    """Errors of results and gradient, of each leaf, whether they are allowed, whether any can be judged."""

    value: tuple[float, float]
    gradient: tuple[float, float] | None
    leaves: tuple[LeafError, ...]
    ok: bool
    comparable: bool


def _judged(
    program: Program, actual: Results, moved: Results, exact: Results, tolerance: float | None, rounding: float
) -> Errors:
    """The verdict on what a program returns, draw by draw.

    Args:
        program: The program.
        actual: Its results and gradient at the policy.
        moved: The same in float32, with inputs rounded to half.
        exact: The same in float32.
        tolerance: Largest relative error; None for what half precision has to cost.
        rounding: Largest relative error of rounding one number to half.
    """
    count, total = len(program.outs), len(program.outs) + len(program.grads)
    names = [(name, False) for name in program.outs] + [(name, True) for name in program.grads]
    parts = [slice(count), slice(count, total)]
    sizes = [_norm([x for draw in exact for x in draw[part]]) for part in parts]

    def leaf(i: int, path: str, is_gradient: bool) -> LeafError:
        errors = _errors(actual, moved, exact, slice(i, i + 1))
        nonfinite = sum(_nonfinite(a[i], e[i]) for a, e in zip(actual, exact, strict=True))
        whole = sizes[is_gradient]
        share = _norm([draw[i] for draw in exact]) / whole if whole else 1.0
        return LeafError(path, is_gradient, *errors, nonfinite, share)

    leaves = tuple(leaf(i, *name) for i, name in enumerate(names))
    value = _errors(actual, moved, exact, parts[0])
    gradient = _errors(actual, moved, exact, parts[1]) if program.grads else None
    few = [sum(np.size(x) for x in exact[0][part]) < _FEW for part in parts]
    allowed = all(
        _allowed(*pair, tolerance, rounding if is_few else 0.0)
        for pair, is_few in zip((value, gradient), few, strict=True)
        if pair is not None
    )
    comparable = all(are_comparable(draw[:count], draw[count:]) for draw in exact)
    ok = allowed and comparable and not any(leaf.nonfinite for leaf in leaves)
    return Errors(value, gradient, leaves, ok, comparable)


def _drawn(program: Program, draws: int) -> list[list[Any]]:
    """The inputs of each draw: those that were given, and where there are random keys, others."""
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in program.inputs]

    def draw(number: int) -> list[Any]:
        fold = jnp.vectorize(lambda key: jax.random.fold_in(key, number))
        return [fold(x) if is_key else x for x, is_key in zip(program.inputs, keys, strict=True)]

    return [program.inputs, *map(draw, range(1, draws if any(keys) else 1))]


def _errors(actual: Results, moved: Results, exact: Results, part: slice) -> tuple[float, float]:
    """Relative errors of a part of all draws: at the policy, and with inputs rounded alone. NaN where float32 is."""
    wide, ours, inputs = ([x for draw in draws for x in draw[part]] for draws in (exact, actual, moved))
    sized = [x for x in wide if np.size(x)]
    if sized and not any(map(has_finite, sized)):
        return float("nan"), float("nan")  # Of what is not finite in float32 nothing can be said, and zero says a lot.
    return relative(ours, wide), relative(inputs, wide)


def _allowed(error: float, unavoidable: float, tolerance: float | None, least: float) -> bool:
    return error <= (max(_LIMIT * unavoidable, FLOAT32_ERROR, least) if tolerance is None else tolerance)


def _half(target: Target) -> Any:
    """The dtype of the products; bfloat16 where the function says nothing of it."""
    return (target.policy or target.inner[0]).compute_dtype if target.policy or target.inner else jnp.bfloat16


def _evaluated(evaluation: Evaluation, program: Program) -> Callable[[list[Any]], Any]:
    return jax.jit(lambda inputs: evaluation.run(program.jaxpr, [Pair(x, x) for x in inputs]))


def _dtypes(program: Program) -> list[Any]:
    """The dtypes of the results, and of the gradients, which are those of what they are with respect to."""
    inner = open_jaxpr(program.jaxpr)
    inputs = [var.aval.dtype for var in inner.invars if jnp.issubdtype(var.aval.dtype, jnp.floating)]
    return [var.aval.dtype for var in inner.outvars[: len(program.outs)]] + inputs[: len(program.grads)]


def _rounded_weights(steps: Steps, target: Target) -> dict[int, Any]:
    """The constants of a program, with weights and data that it closes over as half holds them."""
    found = weights(steps)
    return {i: _rounded_input(jnp.asarray(x), target) if i in found else x for i, x in steps.consts.items()}


def _rounded_input(x: Any, target: Target) -> Any:
    """An input as half holds it; what a half dtype turns into zero or infinity is left."""
    if x.dtype != jnp.float32:
        return x
    dtype = _half(target)
    half = rounded(x, dtype) if dtype.itemsize == 2 else x
    return jnp.where(jnp.isfinite(half), half, x)


def relative(values: Sequence[Any], exact: Sequence[Any]) -> float:
    """Relative l2 error of several arrays together; infinite where one is not finite and float32 is."""
    pairs = [(np.asarray(v, np.complex128), np.asarray(e, np.complex128)) for v, e in zip(values, exact, strict=True)]
    if any(np.any(np.isfinite(e) & ~np.isfinite(v)) for v, e in pairs):
        return float("inf")
    error = _norm([np.where(np.isfinite(e), v, 0) - np.where(np.isfinite(e), e, 0) for v, e in pairs])
    size = _norm([e for _, e in pairs])
    return error / size if size else error


def has_finite(array: Any) -> bool:
    """Whether an array, if it has numbers at all, has one that is finite."""
    return not np.size(array) or bool(np.any(np.isfinite(array)))


def are_comparable(outs: Sequence[Any], grads: Sequence[Any]) -> bool:
    """Whether results and gradients in float32 are those of a function that works: infinities of a mask are results."""
    of_results = all(has_finite(out) and not np.any(np.isnan(out)) for out in outs)
    return of_results and all(bool(np.all(np.isfinite(grad))) for grad in grads)


def _norm(arrays: Sequence[Any]) -> float:
    """The l2 norm of several arrays together, of what is finite in them."""
    values = [np.asarray(x, np.complex128) for x in arrays]
    return float(np.sqrt(sum(np.sum(np.abs(np.where(np.isfinite(x), x, 0)) ** 2) for x in values)))


def _nonfinite(value: Any, exact: Any) -> int:
    """How many numbers are not finite, or NaN where the mask in float32 is infinite."""
    return int(jnp.sum(~jnp.isfinite(value) & jnp.isfinite(exact)) + jnp.sum(jnp.isnan(value) & jnp.isinf(exact)))


def _decisions(records: Sequence[dict[Any, Any]], places: dict[Any, Any], program: Program) -> tuple[Decision, ...]:
    """What differs, of one operation and line together, the most first."""
    found: dict[tuple[str, str], list[int]] = {}
    for record in (record for draw in records for record in draw.values()):
        if isinstance(record, Pair):
            wide, half = (int(np.max(count, initial=0)) for count in record)
            entry = found.setdefault(("while", "?"), [0, 0])
            entry[0], entry[1] = entry[0] + abs(half - wide), entry[1] + wide
        else:
            ((eqn, differing),) = record.items()
            name, line, size = places[eqn]
            entry = found.setdefault((name, line), [0, 0])
            entry[0], entry[1] = entry[0] + int(np.sum(differing)), entry[1] + size * int(np.size(differing))
    differing = [Decision(*where, *numbers) for where, numbers in found.items() if numbers[0]]
    return tuple(sorted(differing, key=lambda d: -d.differing))
