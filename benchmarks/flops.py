"""Matrix multiplications and convolutions of a jaxpr: how many FLOPs, in which dtypes, from which line of code."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Matmul:
    """One matrix multiplication or convolution, with every time that it runs.

    Attributes:
        flops: Two for each multiply-accumulate, times the number of runs.
        dtypes: Dtypes of the two operands.
        where: Source line of the user's code, and the scope path.
    """

    flops: int
    dtypes: tuple[Any, Any]
    where: str

    @property
    def half(self) -> bool:
        """Whether both operands are 16-bit floats."""
        return all(jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize == 2 for dtype in self.dtypes)


def half_share(matmuls: Iterable[Matmul]) -> float:
    """Share of the FLOPs whose operands are both half; 1.0 where there is nothing to multiply."""
    matmuls = list(matmuls)
    total = sum(matmul.flops for matmul in matmuls)
    return sum(matmul.flops for matmul in matmuls if matmul.half) / total if total else 1.0


def matmuls(jaxpr: Any, times: int = 1) -> Iterator[Matmul]:
    """Walks a jaxpr and everything nested in it.

    A scan counts ``length`` times, a conditional as its most expensive branch, and a while loop as one run, because
    its number of iterations is not known.

    Args:
        jaxpr: A jaxpr, closed or not.
        times: How often it runs.

    Yields:
        Every ``dot_general``, ``ragged_dot_general`` and ``conv_general_dilated``.
    """
    for eqn in unclosed(jaxpr).eqns:
        count = _FLOPS.get(eqn.primitive.name)
        if count is not None:
            dtypes = (eqn.invars[0].aval.dtype, eqn.invars[1].aval.dtype)
            yield Matmul(times * count(eqn), dtypes, source(eqn))
        elif eqn.primitive.name == "cond":
            branches = [list(matmuls(branch, times)) for branch in eqn.params["branches"]]
            yield from max(branches, key=lambda found: sum(matmul.flops for matmul in found))
        else:
            inner_times = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
            for inner in subjaxprs(eqn):
                yield from matmuls(inner, inner_times)


def unclosed(jaxpr: Any) -> Any:
    """The open jaxpr; newer versions of jax make no difference between the two."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def subjaxprs(eqn: Any) -> Iterator[Any]:
    """Jaxprs among the parameters of an equation; those of scalar reducers and of kernels hold no matmul of ours."""
    if eqn.primitive.name == "pallas_call" or eqn.primitive.name.startswith(("scatter", "reduce")):
        return
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(unclosed(item), "eqns"):
                yield item


def source(eqn: Any) -> str:
    """``file:line (scope)`` of the innermost frame that is not jax's own or a model library's plumbing."""
    frames = eqn.source_info.traceback.frames if eqn.source_info.traceback else []
    user = [frame for frame in frames if not any(part in frame.file_name for part in _PLUMBING)]
    line = f"{user[0].file_name.split('site-packages/')[-1]}:{user[0].line_num}" if user else "?"
    return f"{line} ({eqn.source_info.name_stack})"


_PLUMBING = ("/jax/", "/jamp/", "<frozen")


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
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // outputs


_FLOPS = {
    "dot_general": _dot_flops,
    "ragged_dot_general": _ragged_flops,
    "conv_general_dilated": _conv_flops,
}
