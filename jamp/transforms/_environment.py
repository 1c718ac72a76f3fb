"""The values of a program while it is emitted: of each variable, its casts, and where derivatives of it are taken."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jamp._compat import Literal, checkpoint_name
from jamp.transforms._emit import KEEP, rounded
from jamp.transforms._flow import FLOAT32, is_half
from jamp.transforms._residuals import Kept
from jamp.transforms._segments import READERS
from jamp.transforms._states import is_smooth
from jamp.transforms._steps import Step


class Env:
    """Values of a jaxpr's variables, and the casts made of them: one a value and dtype."""

    def __init__(self, variables: Iterable[Any], values: Iterable[Any], keep: Kept) -> None:
        self.keep = keep
        self._values = dict(zip(variables, values, strict=True))
        self._arguments = set(self._values)
        self._readers: Counter[tuple[Any, np.dtype]] = Counter()
        self._casts: dict[tuple[Any, np.dtype], Any] = {}
        self._points: dict[Any, Callable[[], Any]] = {}

    def read(self, atom: Any, dtype: np.dtype | None = None, huge: bool = False) -> Any:
        """The value of a variable or literal, at `dtype` unless that is None."""
        if isinstance(atom, Literal):
            return atom.val if dtype is None else np.asarray(cast(np.asarray(atom.val), dtype, huge))
        if dtype is None:
            return self._values[atom]
        if (atom, dtype) in self._casts and atom in self._arguments and is_half(dtype):
            self._readers[atom, dtype] += 1
            if self._readers[atom, dtype] % READERS == 0:
                self._casts[atom, dtype] = rounded(self._values[atom], self._casts[atom, dtype])
        if (atom, dtype) not in self._casts:
            value = cast(self._values[atom], dtype, huge)
            keeps = (atom in self.keep.half_copies or atom in self._points) and is_half(dtype)
            self._casts[atom, dtype] = checkpoint_name(value, KEEP) if keeps else value
        return self._casts[atom, dtype]

    def enter(self, var: Any, dtype: np.dtype | None, value: Any) -> None:
        """Sets an argument, or what an argument is at `dtype`."""
        if dtype is None:
            self._values[var] = value
        else:
            self._casts[var, dtype] = value
        self._arguments.add(var)

    def enter_state(self, var: Any, half: np.dtype) -> None:
        """Says that derivatives are to be taken where an argument, which is there in half as well, is rounded to it."""
        self.set_point(var, functools.cache(lambda: cast(self._casts[var, half], FLOAT32)))

    def set_point(self, var: Any, point: Callable[[], Any]) -> None:
        """Says where to take derivatives of what reads a variable; it is computed when it is asked for."""
        self._points[var] = point

    def points(self, step: Step, operands: Sequence[Any]) -> list[Callable[[], Any]] | None:
        """Where to take the derivative of a step, for each of its operands; None for at the operands themselves."""
        if not self._points:
            return None
        found = [
            None if isinstance(atom, Literal) or (dtype is not None and is_half(dtype)) else self._points.get(atom)
            for atom, dtype in zip(step.operands, step.casts, strict=True)
        ]
        if not any(found) or not is_smooth(step):
            return None
        return [
            functools.partial(_at, point, operand, dtype)
            for point, operand, dtype in zip(found, operands, step.casts, strict=True)
        ]

    def write(self, var: Any, value: Any) -> None:
        """Sets the value of a variable."""
        self._values[var] = value

    def pin(self, var: Any, half: np.dtype) -> None:
        """Rounds a float32 value to as many digits as `half` has for all further readers, and has XLA compute it once.

        The exponents stay those of float32: nothing overflows.
        """
        shorter = lax.reduce_precision(self.read(var), jnp.finfo(jnp.float32).nexp, jnp.finfo(half).nmant)
        self.write(var, lax.optimization_barrier(shorter))

    def alias(self, var: Any, dtype: np.dtype, value: Any) -> None:
        """Records that `value` is `var` at `dtype`, so that a cast there and back again costs nothing."""
        self._casts[var, dtype] = value


def _at(point: Callable[[], Any] | None, operand: Any, dtype: np.dtype | None) -> Any:
    if point is None:
        return operand
    return point() if dtype is None else cast(point(), dtype)


def cast(value: Any, dtype: np.dtype, saturate: bool = False) -> Any:
    """Converts a value; with `saturate`, finite values beyond the range of float16 become its largest, not infinity."""
    constant = isinstance(value, np.ndarray)
    if saturate and dtype == np.float16:
        limit = np.asarray(np.finfo(np.float16).max, value.dtype)
        if constant:
            value = np.where(np.isinf(value), value, np.clip(value, -limit, limit))
        else:
            value = lax.select(lax.is_finite(value), lax.clamp(-limit, value, limit), value)
    return value.astype(dtype) if constant else lax.convert_element_type(value, dtype)
