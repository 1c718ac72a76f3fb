"""`compare`: how far a function's results move under a policy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from jamp.inspect._target import (
    as_dict,
    check_values,
    heading,
    resolve,
    sees_nans,
    tells_settings_apart,
    without_cast_fn,
)
from jamp.policy import Policy, get_policy
from jamp.transforms._cast_fn import CastFunction
from jamp.transforms._traced import is_array


@dataclasses.dataclass(frozen=True)
class Difference:
    """How one array of the results moved.

    Attributes:
        path: Where it is in the results.
        dtype: Its dtype at the policy.
        shape: Its shape.
        absolute: Largest magnitude of the difference, among elements that are finite in both; NaN if none is.
        relative: The same, as a fraction of the largest finite magnitude in the reference.
        nonfinite: Number of elements that are not finite at the policy.
        nonfinite_reference: The same in the reference.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    absolute: float
    relative: float
    nonfinite: int
    nonfinite_reference: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Results of a function at two policies, beside each other. `str(comparison)` is a table of those that differ.

    Attributes:
        policy: The policy; None if the function ran as it is written, because it calls a `cast_fn` inside and none was
            given.
        inner: Policies of the `cast_fn`s inside, which ruled their parts. Beside the reference they did nothing.
        reference: The policy that it is compared with.
        differences: One for each array of the results.
    """

    policy: Policy | None
    inner: tuple[Policy, ...]
    reference: Policy
    differences: tuple[Difference, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same in dictionaries, lists, strings and numbers, for JSON."""
        return as_dict(self, reference=str(self.reference))

    def __str__(self) -> str:
        policies = f"{heading(self.policy, self.inner)}{',' if self.inner else ''} beside {self.reference}"
        moved = [d for d in self.differences if d.absolute != 0 or d.nonfinite != d.nonfinite_reference]
        same = len(self.differences) - len(moved)
        lines = [policies, "", *([_ROW.format(*_HEADINGS)] if moved else [])]
        for d in moved:
            where = f"{d.path or 'result'} {d.dtype}{list(d.shape)}"
            errors = f"{d.absolute:.3g}", f"{d.relative:.3g}"
            lines.append(_ROW.format(where, *errors, f"{d.nonfinite}", f"{d.nonfinite_reference}"))
        if same:
            lines.append(f"{'and ' if moved else ''}{same} {'array' if same == 1 else 'arrays'} without a difference")
        return "\n".join(lines)


_ROW = "{:<50} {:>11} {:>11} {:>10} {:>14}"
_HEADINGS = ("result", "error", "relative", "nonfinite", "in reference")


@tells_settings_apart
@sees_nans
def compare(
    fn: Callable[..., Any],
    *args: Any,
    policy: Policy | str | None = None,
    reference: Policy | str = "O0",
    **kwargs: Any,
) -> Comparison:
    """Runs a function at two policies, and tells how far its results are apart.

    The reference rules all of the function: whatever `cast_fn` it calls inside does nothing there.

    Args:
        fn: The function: a plain one, or what `jamp.cast_fn` made of it.
        *args: Its arguments, arrays with values.
        policy: As for `jamp.cast_fn`. Left out, it is that of `fn` if `cast_fn` made it. A function that calls a
            `cast_fn` inside, such as a loss or a gradient, then runs as it is written; any other at `"O2"`.
        reference: The policy to compare with, float32 by default.
        **kwargs: Its keyword arguments.

    Returns:
        A `Comparison`; print it.

    Raises:
        TypeError: If `fn` is not callable, or an argument has no values.
        ValueError: If a policy is not known.

    Example:
        >>> import jax.numpy as jnp, jamp
        >>> found = jamp.compare(lambda x: {"y": x @ x}, jnp.float32([1 + 2**-8, 1]), policy="O3:bfloat16")
        >>> [(d.path, d.absolute) for d in found.differences]
        [("['y']", 0.0078277587890625)]
    """
    target = resolve("compare", fn, args, kwargs, policy)
    check_values("compare", target)
    other = get_policy(reference)
    beside = CastFunction(without_cast_fn(target.fn), other)
    ours, theirs = map(tree_leaves_with_path, (target.run(), beside(*target.args, **target.kwargs)))
    pairs = [(path, a, b) for (path, a), (_, b) in zip(ours, theirs, strict=True) if is_array(a)]
    differences = tuple(_difference(keystr(path), a, b) for path, a, b in pairs)
    return Comparison(target.policy, target.inner, other, differences)


def _difference(path: str, ours: Any, theirs: Any) -> Difference:
    a, b = _values(ours), _values(theirs)
    finite = np.isfinite(a) & np.isfinite(b)
    absolute = float(np.max(np.abs(a[finite] - b[finite]), initial=0.0)) if finite.any() or not a.size else math.nan
    largest = float(np.max(np.abs(b), where=np.isfinite(b), initial=0.0))
    return Difference(
        path, str(ours.dtype), ours.shape, absolute, absolute / largest if largest else absolute,
        int(np.sum(~np.isfinite(a))), int(np.sum(~np.isfinite(b))),
    )  # fmt: skip


def _values(array: Any) -> np.ndarray:
    """The values of an array in double precision; random keys by their bits."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    values = np.asarray(array)
    return values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)
