"""`first_nonfinite`: which operation an infinity or a NaN comes from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from jamp._compat import Literal, open_jaxpr, scan_counts
from jamp.inspect._operations import Place, as_traced, inner_plans
from jamp.inspect._target import Target, resolve
from jamp.policy import Policy
from jamp.transforms._cast_fn import is_array
from jamp.transforms._execute import Run, execute
from jamp.transforms._steps import Plan, Step

_CALLS = {"checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat2"}


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """Where an infinity or a NaN comes from.

    Attributes:
        operation: Name of the primitive; or `"argument"`, followed by its path, if it came in from outside; or
            `"result"` if casting the results to the output dtype made it.
        cast: Number of the operand whose cast, in front of the operation, overflowed; None if the operation itself did.
        scope: Path of named scopes.
        line: `file:line` of the user's code.
        function: Name of the function there.
        iterations: Iterations of the loops around it, outermost first.
        dtype: Dtype of the values.
        infinities: How many of the values are infinite.
        nans: How many are not a number.
        size: Number of values.
        largest: Largest finite magnitude among the values that they were made from; None for an argument.
    """

    operation: str
    cast: int | None
    scope: str
    line: str
    function: str
    iterations: tuple[int, ...]
    dtype: str
    infinities: int
    nans: int
    size: int
    largest: float | None

    def __str__(self) -> str:
        what = (
            self.operation
            if self.cast is None
            else f"the cast to {self.dtype} of operand {self.cast} of {self.operation}"
        )
        where = [self.scope, f"{self.line} ({self.function})"] if self.line not in ("", "?") else [self.scope]
        where += [f"iteration {i}" for i in self.iterations]
        kinds = [f"{count} {kind}" for count, kind in ((self.infinities, "inf"), (self.nans, "nan")) if count]
        found = f"{' and '.join(kinds)} in {self.size} {self.dtype} values"
        made_from = "" if self.largest is None else f"; made from values up to {self.largest:.3g}"
        return f"{', '.join(filter(None, [what, *where]))}: {found}{made_from}"


def first_nonfinite(
    fn: Callable[..., Any], *args: Any, policy: Policy | str | None = None, **kwargs: Any
) -> NonFinite | None:
    """Finds the operation that the infinities and NaNs in a function's results come from.

    The function is run operation by operation, without `jit`, and every non-finite value is followed from where it is
    made. Values that something later discards (the other side of a `where`) do not count, nor do infinities that the
    program writes itself (a mask of `-inf`). Loops, branches and calls are entered; `shard_map` and kernels are not.

    To look into a whole training step or a gradient that has `cast_fn` inside, pass `policy="O0"`, which adds nothing.

    Args:
        fn: The function: a plain one, or what `jamp.cast_fn` made of it.
        *args: Its arguments, arrays with values.
        policy: As for `jamp.cast_fn`. Left out, it is that of `fn` if `cast_fn` made it, else `"O2"`.
        **kwargs: Its keyword arguments.

    Returns:
        Where they come from, the first if there are several; None if all results are finite.

    Raises:
        TypeError: If `fn` is not callable, or an argument has no values.
        ValueError: If the policy is not known.

    Example:
        >>> import jax, jax.numpy as jnp, jamp
        >>> def norm(x):
        ...     return jnp.sqrt(x @ x)
        >>> found = jamp.first_nonfinite(norm, jnp.full(4, 200.0), policy="O3:float16")
        >>> found.operation, found.infinities, found.dtype
        ('dot_general', 1, 'float16')
        >>> jamp.first_nonfinite(norm, jnp.full(4, 200.0), policy="O2:float16") is None
        True
    """
    target = resolve("first_nonfinite", fn, args, kwargs, policy)
    _check_values(target)
    program = target.cast() if target.plain else target.trace()
    planned = as_traced(program.jaxpr) if target.plain else program.plan(target.policy)
    outs, found = _search(planned, program.inputs, Place(), ())
    if found is not None or not _severity(target.policy.cast_to_output(outs)):
        return found
    return _from_arguments(target) or _from_result_cast(outs, target.policy)


def _check_values(target: Target) -> None:
    paths, _ = tree_flatten_with_path((target.args, target.kwargs))
    bad = [f"  {_argument(path)}: {leaf!r}" for path, leaf in paths if isinstance(leaf, jax.ShapeDtypeStruct)]
    if bad:
        raise TypeError(
            "`jamp.first_nonfinite` runs the function, and these arguments have no values:\n" + "\n".join(bad)
        )


def _search(plan: Plan, args: Sequence[Any], place: Place, iterations: tuple[int, ...], dtypes: Any = None) -> Any:
    """Runs a plan; gives its results, and where non-finite ones among them come from if they were made inside."""
    origins: dict[Any, tuple[int, NonFinite]] = {}  # By variable: when and where its non-finite values were made.

    def probe(step: Step, carried: list[Any], operands: list[Any], results: list[Any]) -> None:
        if not _severity(results):
            return
        made_before = [origins[atom] for atom in step.operands if not isinstance(atom, Literal) and atom in origins]
        if made_before:
            origin = min(made_before, key=lambda item: item[0])
        else:
            found = _made_here(step, carried, operands, results, place.enter(step.eqn), iterations)
            if found is None:
                return
            origin = (len(origins), found)
        for var, result in zip(step.eqn.outvars, results, strict=True):
            if _severity([result]):
                origins[var] = origin

    outs = execute(plan, args, Run(probe=probe), dtypes)
    reaching = [
        origins[atom] for atom in open_jaxpr(plan.jaxpr).outvars if not isinstance(atom, Literal) and atom in origins
    ]
    return outs, min(reaching, key=lambda item: item[0])[1] if reaching else None


def _made_here(
    step: Step, carried: list[Any], operands: list[Any], results: list[Any], place: Place, iterations: tuple[int, ...]
) -> NonFinite | None:
    """Where inside a step non-finite results were made; None if they came in with the operands."""
    name = step.eqn.primitive.name
    for index, (before, after) in enumerate(zip(carried, operands, strict=True)):
        if _severity([after]) > _severity([before]):
            return _describe(name, [before], [after], place, iterations, cast=index)
    found = _descend(step, operands, place, iterations)
    if found is None and _severity(results) > _severity(operands):
        return _describe(name, operands, results, place, iterations)
    return found


def _descend(step: Step, operands: list[Any], place: Place, iterations: tuple[int, ...]) -> NonFinite | None:
    """Looks for the origin in the jaxprs inside of a step."""
    name, plans = step.eqn.primitive.name, inner_plans(step)
    if name in _CALLS and len(plans) == 1:
        return _search(plans[0], operands, place, iterations)[1]
    if name == "cond":
        return _search(plans[int(operands[0])], operands[1:], place, iterations)[1]
    if name == "scan":
        return _search_scan(step, plans[0], operands, place, iterations)
    return _search_while(step, operands, place, iterations) if name == "while" else None


def _search_scan(
    step: Step, plan: Plan, operands: list[Any], place: Place, iterations: tuple[int, ...]
) -> NonFinite | None:
    consts, carries = scan_counts(step.eqn.params)
    fixed, carry, xs = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]
    length = step.eqn.params["length"]
    for i in reversed(range(length)) if step.eqn.params["reverse"] else range(length):
        outs, found = _search(plan, [*fixed, *carry, *(x[i] for x in xs)], place, (*iterations, i), _dtypes(step))
        if found is not None:
            return found
        carry = outs[:carries]
    return None


def _search_while(step: Step, operands: list[Any], place: Place, iterations: tuple[int, ...]) -> NonFinite | None:
    params = step.eqn.params
    for_cond, first = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    cond, body = step.plans or (as_traced(params["cond_jaxpr"]), as_traced(params["body_jaxpr"]))
    carry, i = operands[first:], 0
    while bool(execute(cond, [*operands[:for_cond], *carry], Run())[0]):
        carry, found = _search(body, [*operands[for_cond:first], *carry], place, (*iterations, i), _dtypes(step))
        if found is not None:
            return found
        i += 1
    return None


def _dtypes(step: Step) -> list[np.dtype | None]:
    """Dtypes that a loop body hands its results over in."""
    return [flow and flow.dtype for flow in step.out]


def _from_arguments(target: Target) -> NonFinite | None:
    paths, _ = tree_flatten_with_path((target.args, target.kwargs))
    for path, leaf in paths:
        if is_array(leaf) and _severity([leaf]):
            return _describe(f"argument {_argument(path)}", [], [leaf], Place("", "", ""), ())
    return None


def _from_result_cast(outs: list[Any], policy: Policy) -> NonFinite | None:
    after = policy.cast_to_output(outs)
    if _severity(after) <= _severity(outs):
        return None  # An infinity that the program wrote itself.
    return _describe("result", outs, after, Place("", "", ""), ())


def _argument(path: Any) -> str:
    return f"{('args', 'kwargs')[path[0].idx]}{keystr(path[1:])}"


def _severity(values: Sequence[Any]) -> int:
    """0 where all values are finite, 1 where some are infinite, 2 where some are not a number."""
    floating = _floating(values)
    return max(
        int(any(jnp.any(~jnp.isfinite(x)) for x in floating)), 2 * int(any(jnp.any(jnp.isnan(x)) for x in floating))
    )


def _floating(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if jnp.issubdtype(jnp.result_type(value), jnp.inexact)]


def _describe(
    operation: str,
    sources: Sequence[Any],
    values: Sequence[Any],
    place: Place,
    iterations: tuple[int, ...],
    cast: int | None = None,
) -> NonFinite:
    bad = next(value for value in _floating(values) if _severity([value]))
    largest = [float(jnp.max(jnp.abs(x), where=jnp.isfinite(x), initial=0)) for x in _floating(sources)]
    return NonFinite(
        operation, cast, place.scope, place.line, place.function, iterations, str(bad.dtype),
        int(jnp.isinf(bad).sum()), int(jnp.isnan(bad).sum()), bad.size, max(largest, default=None),
    )  # fmt: skip
