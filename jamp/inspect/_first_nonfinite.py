"""`first_nonfinite`: which operation an infinity or a NaN comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.tree_util import tree_leaves_with_path

from jamp.inspect._nonfinite import NonFinite, nonfinite, severity
from jamp.inspect._operations import Place
from jamp.inspect._origins import Origin, first_of, of_inputs, search, search_compiled
from jamp.inspect._target import Target, argument_name, check_values, resolve, sees_nans, tells_settings_apart
from jamp.inspect._without_checks import without_checks
from jamp.policy import Policy
from jamp.transforms._traced import is_array


@tells_settings_apart
@sees_nans
def first_nonfinite(
    fn: Callable[..., Any], *args: Any, policy: Policy | str | None = None, **kwargs: Any
) -> NonFinite | None:
    """Finds the operation that the infinities and NaNs in a function's results come from.

    The function is run operation by operation, without `jit`, and every non-finite value is followed from where it is
    made. Values that something later discards (the other side of a `where`) do not count, nor do infinities that the
    program writes itself (a mask of `-inf`); a NaN that it writes is a `"constant"`. Loops, branches, calls,
    `shard_map` and `pmap` are entered; kernels are not. Checks that would raise (`eqx.error_if`, `checkify.check`) are
    left out: it looks for what they complain about.

    Infinities in an argument may be meant, as in a mask that is handed in. They are named if they reach a result, or
    if an operation makes NaN of them; then the answer's `nan_made_by` is that operation.

    Args:
        fn: The function: a plain one, or what `jamp.cast_fn` made of it. To look into a training step, take its
            gradient function: a step that skips bad gradients has finite results.
        *args: Its arguments, arrays with values.
        policy: As for `jamp.cast_fn`. Left out, it is that of `fn` if `cast_fn` made it. A function that calls a
            `cast_fn` inside, such as a loss or a gradient, then runs as it is written; any other at `"O2"`.
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
    check_values("first_nonfinite", target)
    return nonfinite_in(target)


def nonfinite_in(target: Target) -> NonFinite | None:
    """What `first_nonfinite` gives."""
    leaves = tree_leaves_with_path((target.args, target.kwargs))
    program, raised = target.program(), []
    for traced in (target.traced, program):
        traced.jaxpr = without_checks(traced.jaxpr, lambda: raised.append(True))
    plan, inputs = target.plan(program)
    given = of_inputs([f"argument {argument_name(path)}" for path, leaf in leaves if is_array(leaf)], inputs)
    outs, origins = search(plan, inputs, given, Place(), ())
    # A mask of infinities that the function closes over is the program's own, unless something makes NaN of it.
    origin = first_of([o for o in origins if o and not (_is_constant(o) and not o.found.nans)])
    if found := origin.found if origin else _from_result_cast(outs, target):
        return found
    if severity(outs) > severity([jnp.inf]):  # A NaN that the program writes, such as `jnp.where(known, x, jnp.nan)`.
        return nonfinite("constant", [], [x for x in outs if severity([x]) > severity([jnp.inf])])
    # A solver that takes a NaN for a step to be made again has finite results. Its check has seen that it got nowhere.
    return search_compiled(program.jaxpr, program.inputs) if raised else None


def _is_constant(origin: Origin) -> bool:
    return origin.came_in and origin.found.operation == "constant"


def _from_result_cast(outs: list[Any], target: Target) -> NonFinite | None:
    after = target.cast_to_output(outs)
    return nonfinite("result", outs, after) if severity(after) > severity(outs) else None
