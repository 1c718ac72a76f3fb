"""Parameters in half precision, norms excepted."""

import contextlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import numpy as np
from jax.tree_util import keystr, tree_map_with_path
from jax.typing import DTypeLike

from jamp._calls import explains
from jamp._dtypes import HALF_DTYPES, parse_dtype, short_repr
from jamp._tree import cast_tree, check_holds_numbers, is_floating
from jamp.policy import Policy, get_policy

T = TypeVar("T")

# Norm layers as Flax, Haiku, Equinox, Keras and plain code name them, and their parameters where the layer has no name.
# These look at the names of a layer and its parameter alone: PreNorm/Attention/kernel is no norm. Running statistics
# have names of their own, in layers of any name. A moving average in half stops to move.
NORMS = (
    "*norm*", "bn*", "*_bn", "ln", "ln_*", "ln[0-9]*", "rms", "scale", "gamma", "beta",
    "mean", "var", "*_mean", "*_var", "*_variance", "mean_ema", "var_ema",
)  # fmt: skip


@explains('jamp.half_params(params, "bfloat16")')
def half_params(params: T, dtype: DTypeLike = "bfloat16", keep_float32: Sequence[str] = NORMS) -> T:
    """Casts parameters to half precision, all but those that are to stay as they are.

    Args:
        params: Tree of parameters. Leaves that are not floating are returned as they are.
        dtype: `"bfloat16"` or `"float16"`, in any spelling.
        keep_float32: Glob patterns, matched without case against each of the names in a leaf's path, or, with a `/`,
            against the whole path: `"decoder"`, `"decoder/*/bias"`. By default norm layers, whose few parameters gain
            nothing from being small, and running statistics, which drift when they are. Pass `()` to cast everything.

    Returns:
        A tree of the same structure.

    Raises:
        TypeError: If `keep_float32` is a string.
        ValueError: If `dtype` is not a half-precision dtype.

    Example:
        >>> import jamp, jax, jax.numpy as jnp
        >>> params = {"dense": {"kernel": jnp.ones((2, 2))}, "BatchNorm_0": {"bias": jnp.zeros(2)}}
        >>> jax.tree.map(lambda p: p.dtype.name, jamp.half_params(params))
        {'BatchNorm_0': {'bias': 'float32'}, 'dense': {'kernel': 'bfloat16'}}
    """
    target = _half_dtype(dtype)
    if isinstance(keep_float32, str):
        raise TypeError(f"`keep_float32` is {keep_float32!r}: expected several patterns. Write [{keep_float32!r}].")
    check_holds_numbers(
        params, "`jamp.half_params` takes parameters, a tree of arrays", "Write `jamp.half_params(params)`."
    )

    def cast(path: tuple, p: Any) -> Any:
        return p if any(matches_path(path, pattern) for pattern in keep_float32) else cast_tree(p, target)

    return tree_map_with_path(cast, params)


def _half_dtype(spec: Any) -> np.dtype:
    """The half dtype that `spec` spells; a policy, which is none, is answered by the one that it has."""
    dtype = None
    with contextlib.suppress(TypeError, ValueError):
        dtype = parse_dtype(spec)
    if dtype is not None and dtype in HALF_DTYPES:
        return dtype
    policy = None
    with contextlib.suppress(ValueError):
        policy = get_policy(spec)
    told = "expected 'bfloat16' or 'float16'." if dtype is not None or policy is None else _instead_of(policy)
    raise ValueError(f"`dtype` is {short_repr(spec)}: {told}")


def _instead_of(policy: Policy) -> str:
    """What to write in place of a policy."""
    if policy.param_dtype in HALF_DTYPES:
        return f"this is a policy. Write jamp.half_params(params, '{policy.param_dtype}')."
    told = f"this policy keeps parameters in {policy.param_dtype}: leave them as they are."
    half = policy.compute_dtype
    if half not in HALF_DTYPES:
        return told
    return f"{told} For half parameters write jamp.half_params(params, '{half}'), with the policy 'O3:{half}'."


def _names(path: tuple) -> list[str]:
    """The names in a path, without case; Haiku writes several into one key, and NNX ends with the attribute `value`."""
    names = keystr(path, simple=True, separator="/").lower().split("/")
    return names[:-1] if len(names) > 1 and names[-1] == "value" else names


def matches_path(path: tuple, pattern: str) -> bool:
    """Whether a glob pattern matches one of the names in a path, or, with a `/` in it, the whole."""
    names = _names(path)
    if "/" in pattern:
        return fnmatchcase("/".join(names), pattern.lower())
    return any(fnmatchcase(name, pattern.lower()) for name in (names[-2:] if pattern in NORMS else names))


def is_half(x: Any) -> bool:
    """Whether `x` is an array of a half-precision dtype."""
    return is_floating(x) and x.dtype in HALF_DTYPES
