"""The commonest primitives in NumPy, so that thousands of random jaxprs are evaluated without compiling any of them.

Half-precision operands are computed with in float32 and the result rounded, which is what XLA does on a CPU.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import scipy.special

_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "add": np.add, "add_any": np.add, "and": np.bitwise_and, "ceil": np.ceil, "cos": np.cos,
    "clamp": lambda low, x, high: np.clip(x, low, high), "convert_element_type": lambda x: x, "copy": lambda x: x,
    "eq": np.equal, "erf": scipy.special.erf, "exp": np.exp, "expm1": np.expm1, "floor": np.floor, "gt": np.greater,
    "ge": np.greater_equal, "is_finite": np.isfinite, "le": np.less_equal, "log": np.log, "log1p": np.log1p,
    "logistic": scipy.special.expit, "lt": np.less, "max": np.maximum, "min": np.minimum, "mul": np.multiply,
    "name": lambda x: x, "ne": np.not_equal, "neg": np.negative, "not": np.bitwise_not, "or": np.bitwise_or,
    "pow": np.power, "rsqrt": lambda x: 1 / np.sqrt(x), "select_n": lambda which, *cases: np.choose(which, cases),
    "sign": np.sign, "sin": np.sin, "sqrt": np.sqrt, "square": np.square, "stop_gradient": lambda x: x,
    "sub": np.subtract, "tanh": np.tanh,
}  # fmt: skip


def _divide(a: Any, b: Any) -> Any:
    return np.divide(a, b) if np.issubdtype(a.dtype, np.inexact) else np.trunc(a / b)


def _broadcast(x: Any, *_: Any, shape: Any, broadcast_dimensions: Any, **__: Any) -> Any:
    dims = dict(zip(broadcast_dimensions, x.shape, strict=True))
    return np.broadcast_to(x.reshape([dims.get(i, 1) for i in range(len(shape))]), shape)


def _dot(a: Any, b: Any, dimension_numbers: Any, **_: Any) -> Any:
    (contract, batch) = dimension_numbers
    of_a, of_b, fresh = list(range(a.ndim)), list(range(a.ndim, a.ndim + b.ndim)), []
    for i, j in [*zip(*contract, strict=True), *zip(*batch, strict=True)]:
        of_b[j] = of_a[i]
    fresh = [of_a[i] for i in batch[0]]
    fresh += [k for i, k in enumerate(of_a) if i not in (*contract[0], *batch[0])]
    fresh += [k for j, k in enumerate(of_b) if j not in (*contract[1], *batch[1])]
    return np.einsum(a, of_a, b, of_b, fresh)


def _pad(x: Any, value: Any, padding_config: Any) -> Any:
    low, high, interior = zip(*padding_config, strict=True) if padding_config else ((), (), ())
    shape = [lo + max(n + (n - 1) * k, 0) + hi for n, lo, hi, k in zip(x.shape, low, high, interior, strict=True)]
    span = [n + max(-lo, 0) + max(-hi, 0) for n, lo, hi in zip(shape, low, high, strict=True)]
    out = np.full(span, value, x.dtype)
    begin = [max(lo, 0) for lo in low]
    out[tuple(slice(b, b + (n - 1) * (k + 1) + 1, k + 1) for b, n, k in zip(begin, x.shape, interior, strict=True))] = x
    return out[tuple(slice(max(-lo, 0), max(-lo, 0) + n) for lo, n in zip(low, shape, strict=True))]


def _starts(x_shape: Any, sizes: Any, indices: Any) -> list[int]:
    return [min(max(int(i), 0), n - size) for i, n, size in zip(indices, x_shape, sizes, strict=True)]


def _dynamic_slice(x: Any, *indices: Any, slice_sizes: Any) -> Any:
    starts = _starts(x.shape, slice_sizes, indices)
    return x[tuple(slice(i, i + n) for i, n in zip(starts, slice_sizes, strict=True))]


def _dynamic_update_slice(x: Any, update: Any, *indices: Any) -> Any:
    out = np.array(x)
    starts = _starts(x.shape, update.shape, indices)
    out[tuple(slice(i, i + n) for i, n in zip(starts, update.shape, strict=True))] = update
    return out


def _slice(x: Any, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    return x[tuple(map(slice, start_indices, limit_indices, strides or [None] * x.ndim))]


def _cumsum(x: Any, axis: int, reverse: bool) -> Any:
    return np.flip(np.cumsum(np.flip(x, axis), axis), axis) if reverse else np.cumsum(x, axis)


_WITH_PARAMETERS: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "cumsum": _cumsum,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "integer_pow": lambda x, y: np.power(x, float(y)),
    "pad": _pad,
    "reduce_and": lambda x, axes, **_: x.all(axes),
    "reduce_max": lambda x, axes, **_: x.max(axes),
    "reduce_min": lambda x, axes, **_: x.min(axes),
    "reduce_sum": lambda x, axes, **_: x.sum(axes),
    "reshape": lambda x, new_sizes, dimensions, **_: (x if dimensions is None else x.transpose(dimensions)).reshape(
        new_sizes
    ),
    "rev": lambda x, dimensions: np.flip(x, dimensions),
    "slice": _slice,
    "squeeze": lambda x, dimensions: np.squeeze(x, dimensions),
    "stack": lambda *xs, axis: np.stack(xs, axis),
    "tile": lambda x, reps: np.tile(x, reps),
    "transpose": lambda x, permutation: np.transpose(x, permutation),
}


def evaluate(eqn: Any, args: list[Any]) -> list[Any] | None:
    """Result of an equation, or None if it is none of these."""
    name = eqn.primitive.name
    function, params = _WITH_PARAMETERS.get(name), eqn.params
    if function is None:
        function, params = _divide if name == "div" else _ELEMENTWISE.get(name), {}
    if function is None or not all(isinstance(arg, np.ndarray | np.generic) for arg in args):
        return None
    with np.errstate(all="ignore"):
        out = np.asarray(function(*map(_widened, args), **params))
        dtype = eqn.outvars[0].aval.dtype
        out = out if np.issubdtype(dtype, np.complexfloating) else out.real
        return [out.astype(dtype, copy=False)]


def _widened(x: Any) -> Any:
    return x.astype(np.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x
