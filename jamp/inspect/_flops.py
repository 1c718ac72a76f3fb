"""Matrix multiplications and convolutions of a jaxpr: how many FLOPs, in which dtypes, from which line of code."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jamp._compat import code_location, code_locations, is_jaxpr, nominal_size, open_jaxpr, scope_path
from jamp._dtypes import E4M3, E5M2, FLOAT32_AND_HALF, HALF_DTYPES, Pair
from jamp._primitives import Trait, has, is_outer
from jamp.transforms._labels import without_labels
from jamp.transforms.analysis.reading.axes import is_reduction
from jamp.transforms.analysis.regimes import plain_scope


@dataclass(frozen=True)
class Matmul:
    """One matrix multiplication or convolution, with every time that it runs.

    Attributes:
        flops: Two for each multiply-accumulate, times the number of runs.
        dtypes: Dtypes of the two operands.
        where: Source line of the user's code, and the scope path.
        precision: What the call says of it; None if nothing.
    """

    flops: int
    dtypes: tuple[Any, Any]
    where: str
    precision: Any = None

    @property
    def half(self) -> bool:
        """Whether both operands are floats of 16 bits or 8."""
        return self.within((*HALF_DTYPES, E4M3, E5M2))

    def within(self, dtypes: Sequence[Any]) -> bool:
        """Whether both operands are of one of some dtypes."""
        return all(dtype in dtypes for dtype in self.dtypes)

    @property
    def float8(self) -> bool:
        """Whether both operands are float8 numbers."""
        return self.within((E4M3, E5M2))


def half_share(matmuls: Iterable[Matmul]) -> float:
    """Share of the FLOPs whose operands are both half; 1.0 where there is nothing to multiply."""
    matmuls = list(matmuls)
    total = sum(matmul.flops for matmul in matmuls)
    return sum(matmul.flops for matmul in matmuls if matmul.half) / total if total else 1.0


def matmuls(jaxpr: Any, times: int = 1, scope: str = "") -> Iterator[Matmul]:
    """Walks a jaxpr and everything nested in it.

    A scan counts `length` times, a conditional as its most expensive branch, and a while loop as one run, because
    its number of iterations is not known.

    Args:
        jaxpr: A jaxpr, closed or not.
        times: How often it runs.
        scope: The scopes around it.

    Yields:
        Every `dot_general`, `scaled_dot`, `ragged_dot_general` and `conv_general_dilated`, but those that contract
        nothing, which are elementwise, and those without a free axis, which are sums: no matrix unit does them.
    """
    for eqn in open_jaxpr(jaxpr).eqns:
        if is_outer(eqn) or is_reduction(eqn):
            continue
        if eqn.primitive.name in _FLOPS:
            dtypes = (eqn.invars[0].aval.dtype, eqn.invars[1].aval.dtype)
            where = source(eqn, scope_in(scope, eqn))
            yield Matmul(times * flops(eqn), dtypes, where, eqn.params.get("precision"))
        elif eqn.primitive.name == "cond":
            branches = [list(matmuls(branch, times, scope_in(scope, eqn))) for branch in eqn.params["branches"]]
            yield from max(branches, key=lambda found: sum(matmul.flops for matmul in found))
        else:
            for inner in subjaxprs(eqn):
                yield from matmuls(inner, times * runs(eqn), scope_in(scope, eqn))


def casts(jaxpr: Any, pair: Pair = FLOAT32_AND_HALF) -> int:
    """Counts conversions between the precisions of a pair, in nested jaxprs too."""
    total = 0
    for eqn in open_jaxpr(jaxpr).eqns:
        total += is_cast(eqn, pair) + sum(casts(inner, pair) for inner in subjaxprs(eqn))
    return total


def is_cast(eqn: Any, pair: Pair) -> bool:
    """Whether an equation converts between the precisions of a pair."""
    return has(eqn, Trait.CONVERTS) and pair.is_cast(eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype)


def flops(eqn: Any) -> int:
    """FLOPs of one run of an equation: zero unless it is a matrix multiplication or a convolution."""
    count = _FLOPS.get(eqn.primitive.name)
    return nominal_size(count(eqn)) if count else 0


def runs(eqn: Any) -> int:
    """How often the jaxprs inside an equation run, as far as that is known: the length of a scan, else once."""
    return nominal_size(eqn.params["length"]) if eqn.primitive.name == "scan" else 1


def subjaxprs(eqn: Any) -> Iterator[Any]:
    """Jaxprs among the parameters of an equation; those of scalar reducers and of kernels hold no matmul of ours."""
    if eqn.primitive.name == "pallas_call" or eqn.primitive.name.startswith(("scatter", "reduce")):
        return
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if is_jaxpr(item):
                yield item


def source(eqn: Any, scope: str) -> str:
    """`file:line (scope)` of an equation, with the function that wrote it where no scope is named."""
    line, function = code_line(eqn)
    if line == "?":
        return f"({scope or 'source unknown'})"
    return f"{line} ({scope or function})"


def scope_in(outer: str, eqn: Any) -> str:
    """Path of the scopes that the model names, without transformations and jamp's own labels, behind that around it."""
    return "/".join(filter(None, (outer, without_labels(plain_scope(scope_path(eqn))))))


def code_line(eqn: Any) -> tuple[str, str]:
    """`folder/file.py:line` and the function of the user's code that an equation comes from; `?` where not known."""
    location = code_location(eqn)
    if location is None:
        return "?", "?"
    path, line, function = location
    return f"{_short(path)}:{line}", function.replace(".<locals>", "")


def code_lines(eqn: Any) -> tuple[str, ...]:
    """That line, and those that call it, each once, innermost first; see `code_locations`."""
    return tuple(dict.fromkeys(f"{_short(path)}:{line}" for path, line, _ in code_locations(eqn)))


def _short(path: str) -> str:
    """A path from where Python found the file on, three names at most: so it is the same in another checkout."""
    path = os.path.abspath(path).replace("\\", "/")
    roots = [root for entry in sys.path if path.startswith(root := os.path.abspath(entry).replace("\\", "/") + "/")]
    return "/".join(path.removeprefix(max(roots, key=len, default="")).split("/")[-3:])


def _dot_flops(eqn: Any) -> int:
    (contracting, _), _ = eqn.params["dimension_numbers"]
    lhs = eqn.invars[0].aval.shape
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[axis] for axis in contracting)


def _ragged_flops(eqn: Any) -> int:
    # Every row belongs to one group, so that the group axis (in the operand or in the result) costs nothing.
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, rhs_contracting), (_, rhs_batch) = numbers.dot_dimension_numbers
    rhs = eqn.invars[1].aval.shape
    used = {*rhs_contracting, *rhs_batch, *numbers.rhs_group_dimensions}
    free = math.prod(size for axis, size in enumerate(rhs) if axis not in used)
    return 2 * math.prod(eqn.invars[0].aval.shape) * free


def _conv_flops(eqn: Any) -> int:
    kernel = eqn.invars[1].aval.shape
    # The kernel's input axis is that of one group already.
    outputs = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    # The zeros between the inputs of a transposed convolution, a strided one's gradient, are not multiplied.
    zeros = math.prod(eqn.params["lhs_dilation"])
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // outputs // zeros


_FLOPS = {
    "dot_general": _dot_flops,
    "scaled_dot": _dot_flops,
    "jamp_scaled_dot": _dot_flops,
    "ragged_dot_general": _ragged_flops,
    "conv_general_dilated": _conv_flops,
}
