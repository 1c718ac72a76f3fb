"""The values of a program while it is emitted: of each variable, its casts, and where derivatives of it are taken."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax import Array, lax

from jamp._compat import Atom, Literal, Var
from jamp._dtypes import E4M3
from jamp.transforms.emission.casts import cast, rounded, shortened
from jamp.transforms.emission.for_platforms import written
from jamp.transforms.emission.quantized import Quantized, quantize
from jamp.transforms.emission.shared import raised_copy
from jamp.transforms.emission.taylor import is_taylor_mode, kept, with_rule
from jamp.transforms.keeping.derivatives import is_smooth
from jamp.transforms.keeping.kept import Kept, bytes_are_kept
from jamp.transforms.program.plan import Cast, Step
from jamp.transforms.program.rewrites import Float8Product
from jamp.transforms.program.setting import Scaling, Setting

Point = Callable[[], Array]


class Env:
    """Values of a jaxpr's variables, and the casts made of them: one a value and dtype."""

    def __init__(self, variables: Iterable[Var], values: Iterable[Array], keep: Kept, setting: Setting) -> None:
        self.keep = keep
        self.setting = setting
        self._values = dict(zip(variables, values, strict=True))
        self._arguments = set(self._values)
        self._readers: Counter[tuple[Var, np.dtype]] = Counter()
        self._casts: dict[tuple[Var, np.dtype], Any] = {}
        self._points: dict[Atom, Point] = {}
        self.raised: dict[Var, tuple[Array, Array]] = {}  # Float32 arguments, with what they were made of.
        self._in_8_bits: dict[tuple[Var, Scaling, Atom | None], Quantized] = {}

    def has(self, var: Var) -> bool:
        """Whether a variable has its value."""
        return var in self._values

    def read(self, atom: Atom, to: Cast | None = None) -> Any:
        """The value of a variable or literal, as it is or converted."""
        if isinstance(atom, Literal):
            return atom.val if to is None else np.asarray(cast(np.asarray(atom.val), to))
        if to is None:
            return self._values[atom]
        key = atom, to.dtype
        if key in self._casts and atom in self._arguments and self.setting.pair.is_narrow(to.dtype):
            self._readers[key] += 1
            if self._readers[key] % self.setting.heuristics.readers == 0:
                self._casts[key] = with_rule(rounded)(self._values[atom], self._casts[key])
        if key not in self._casts:
            value, narrow = cast(self._values[atom], to), self.setting.pair.is_narrow(to.dtype)
            keeps = narrow and (atom in self.keep.half_copies or atom in self._points)
            self._casts[key] = self.kept(atom, value) if keeps else value
        return self._casts[key]

    def kept(self, var: Var, value: Array, saved: object = None) -> Any:
        """The value of a variable, or a cast of it, that the backward pass is given; `saved` is as `keep` has it."""
        return kept(written(value) if var in self.keep.written else value, saved)

    def read_in_8_bits(self, step: Step, rewrite: Float8Product) -> list[Array]:
        """The bits and exponents of both operands of a product in 8 bits: of each value once for all of its readers."""
        found: list[Array] = []
        both = zip(step.operands[:2], step.casts[:2], rewrite.scalings, bytes_are_kept(rewrite), strict=True)
        for atom, to, scaling, keeps in both:
            assert not isinstance(atom, Literal)  # Which has no more than one element.
            groups = None if scaling.ragged is None else step.operands[2]
            key = atom, scaling, groups
            if key not in self._in_8_bits:
                sizes = None if groups is None else self.read(groups, step.casts[2])
                self._in_8_bits[key] = quantize(self.read(atom, to), E4M3, scaling, sizes)
            found += map(kept, self._in_8_bits[key]) if keeps else self._in_8_bits[key]
        return found

    def enter(self, var: Var, to: Cast | None, value: Array) -> None:
        """Sets an argument, or what an argument is converted."""
        if to is None:
            self._values[var] = value
        else:
            self._casts[var, to.dtype] = value
        self._arguments.add(var)

    def enter_raised(self, var: Var, half: Array) -> None:
        """Says which half value a float32 argument was made of: that is enough for the backward pass."""
        if not is_taylor_mode():
            self.raised[var] = self._values[var], half
            self.enter(var, None, raised_copy(self._values[var], half))
            self.alias(var, half.dtype, half)

    def enter_state(self, var: Var, half: np.dtype) -> None:
        """Says that derivatives are to be taken where an argument, which is there in half as well, is rounded to it."""
        raised = Cast(self.setting.pair.wide)
        self.set_point(var, functools.cache(lambda: cast(self._casts[var, half], raised)))

    def set_point(self, var: Var, point: Point) -> None:
        """Says where to take derivatives of what reads a variable; it is computed when it is asked for."""
        self._points[var] = point

    def points(self, step: Step, operands: Sequence[Array]) -> list[Point] | None:
        """Where to take the derivative of a step, for each of its operands; None for at the operands themselves."""
        if not self._points:
            return None
        narrow = self.setting.pair.is_narrow
        found = [
            None if isinstance(atom, Literal) or (to is not None and narrow(to.dtype)) else self._points.get(atom)
            for atom, to in zip(step.operands, step.casts, strict=True)
        ]
        if not any(found) or not is_smooth(step):
            return None
        return [
            functools.partial(_at, point, operand, to)
            for point, operand, to in zip(found, operands, step.casts, strict=True)
        ]

    def write(self, var: Var, value: Array) -> None:
        """Sets the value of a variable."""
        self._values[var] = value

    def pin(self, var: Atom, half: np.dtype) -> None:
        """Rounds a float32 value to the digits of `half` for all further readers, and has XLA compute it once."""
        if is_taylor_mode():
            return
        shorter = shortened(self.read(var), self.setting.pair.wide, half)
        if not isinstance(var, Literal):
            self.write(var, lax.optimization_barrier(shorter))

    def alias(self, var: Var, dtype: np.dtype, value: Array) -> None:
        """Records that `value` is `var` at `dtype`, so that a cast there and back again costs nothing."""
        self._casts[var, dtype] = value


def _at(point: Point | None, operand: Array, to: Cast | None) -> Any:
    if point is None:
        return operand
    return point() if to is None else cast(point(), to)
