"""What reverse mode keeps between the forward and the backward pass, found by tracing alone.

The residuals of `jax.vjp` are read off its jaxpr and every one is followed back, through nested calls, to where its
value comes from:

* reshapes and transpositions of a value, and conversions between floating dtypes, are that value: it counts once;
* a broadcast counts as what is broadcast, and nothing where that is a literal, since a compiler makes it anew for free;
* a kept form has the size of the narrowest dtype on its way, since the wider ones can be had from it. A value that is
  kept in float32 and in half besides counts for both;
* arguments are not counted, as they are in memory anyhow; a half-precision copy of a weight is counted, as it is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jamp._compat import Literal, open_jaxpr
from jamp.inspect._flops import code_line, scope_in, source, subjaxprs
from jamp.transforms.program.flow import num_elements

VIEWS = {
    "broadcast_in_dim",
    "copy",
    "copy_p",
    "expand_dims",
    "jamp_held_apart",
    "jamp_keep",
    "jamp_left_out",
    "jamp_shared_copy",  # Of its first operand, in half.
    "jamp_written",
    "name",
    "optimization_barrier",
    "reduce_precision",  # jax.checkpoint applies it, without effect, to what its policy keeps
    "reshape",
    "sharding_constraint",
    "squeeze",
    "transpose",
}
COPY = "copy of an argument"
CALLS = frozenset("jit pjit closed_call core_call remat2 checkpoint custom_jvp_call custom_vjp_call jamp_ruled".split())


@dataclass(frozen=True)
class Residual:
    """One array that is kept.

    Attributes:
        bytes: Size in the dtype that it is counted at.
        dtype: Narrowest dtype that the value is kept in.
        shape: Shape of the kept form; the name of a size that is not known.
        where: What computed it: primitive, source line and scope path; `COPY` for a narrower copy of an argument.
    """

    bytes: int
    dtype: str
    shape: tuple[int | str, ...]
    where: str


def residuals(fun: Callable[..., Any], params: Any, *inputs: Any) -> list[Residual]:
    """Arrays that `jax.vjp` of `fun` with respect to `params` keeps, the largest first.

    Args:
        fun: Function of `(params, *inputs)`; its outputs are differentiated.
        params: Pytree of arrays or of their shapes.
        *inputs: Pytrees that are not differentiated.

    Returns:
        One entry for each distinct value that is no argument.
    """

    def kept(params: Any, *inputs: Any) -> list[Any]:
        _, backward = jax.vjp(lambda params: fun(params, *inputs), params)
        return jax.tree.leaves(backward)

    jaxpr = jax.make_jaxpr(kept)(params, *inputs)
    return kept_values(jaxpr, open_jaxpr(jaxpr).outvars)


def kept_values(jaxpr: Any, variables: Sequence[Any]) -> list[Residual]:
    """Distinct values that `variables` of a jaxpr hold, without its arguments, the largest first."""
    top = _Frame(open_jaxpr(jaxpr))
    forms: dict[tuple[_Frame, Any], list[_Form]] = defaultdict(list)
    for variable in variables:
        if not isinstance(variable, Literal):
            root, form = _origin(top, variable)
            forms[root].append(form)
    found = [residual for root, kept_as in forms.items() for residual in _sized(root, kept_as)]
    return sorted(found, key=lambda residual: -residual.bytes)


def bytes_by_dtype(found: Iterable[Residual]) -> dict[str, int]:
    """Total size by dtype name."""
    totals: dict[str, int] = defaultdict(int)
    for residual in found:
        totals[residual.dtype] += residual.bytes
    return dict(totals)


@dataclass(eq=False)
class _Frame:
    """A jaxpr in one place of the call tree: the same jaxpr called twice makes two values of each variable."""

    jaxpr: Any
    caller: tuple[_Frame, Any] | None = None
    calls: dict[int, _Frame] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.producer = {var: (eqn, i) for eqn in self.jaxpr.eqns for i, var in enumerate(eqn.outvars)}
        self.position = {var: i for i, var in enumerate(self.jaxpr.invars)}

    def enter(self, eqn: Any) -> _Frame | None:
        """Frame of the one jaxpr inside `eqn`, where its outputs are the equation's; None for anything else."""
        if eqn.primitive.name not in CALLS | {"scan"}:
            return None
        if id(eqn) not in self.calls:
            self.calls[id(eqn)] = _Frame(open_jaxpr(next(subjaxprs(eqn))), (self, eqn))
        return self.calls[id(eqn)]


class _Form(NamedTuple):
    """One form in which a value is kept: the narrowest dtype and the fewest elements on the way to its origin."""

    dtype: Any
    elements: int
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.elements * _itemsize(self.dtype)


def _origin(frame: _Frame, variable: Any) -> tuple[tuple[_Frame, Any], _Form]:
    """Follows a kept value back through views, casts, broadcasts and calls to the variable that it comes from."""
    shape, dtype, elements = variable.aval.shape, variable.aval.dtype, num_elements(variable.aval)
    while (step := _step_back(frame, variable)) is not None:
        if step[0] is frame:  # across the border of a scan the size differs by the number of iterations
            elements = elements * num_elements(step[1].aval) // max(num_elements(variable.aval), 1)
        frame, variable = step
        dtype = min(dtype, variable.aval.dtype, key=_itemsize)
    return (frame, variable), _Form(dtype, elements, shape)


def _step_back(frame: _Frame, variable: Any) -> tuple[_Frame, Any] | None:
    """The variable, perhaps in another frame, that holds the same value; None at its origin."""
    if variable in frame.position:
        return _argument(frame, frame.position[variable])
    if variable not in frame.producer:  # a constant of the jaxpr
        return None
    eqn, i = frame.producer[variable]
    inner = frame.enter(eqn)
    if inner is not None:
        out = inner.jaxpr.outvars[i]
        # The last carry of a scan is a value of its own; stacked outputs have an axis more outside.
        last_carry = eqn.primitive.name == "scan" and out.aval.ndim == variable.aval.ndim
        return None if last_carry or isinstance(out, Literal) else (inner, out)
    is_cast = eqn.primitive.name == "convert_element_type" and jnp.issubdtype(variable.aval.dtype, jnp.inexact)
    if is_cast or eqn.primitive.name in VIEWS:
        source = eqn.invars[i % len(eqn.invars)]  # `jamp_keep` gives one value twice.
        return None if isinstance(source, Literal) else (frame, source)
    return None


def _argument(frame: _Frame, position: int) -> tuple[_Frame, Any] | None:
    """The caller's variable for an argument; None for the arguments of the whole function.

    In a scan only the scanned operands have one: their slices, stacked again, are the operand. A carry is a new value
    in each iteration, and a constant that is stacked takes the memory of as many copies.
    """
    if frame.caller is None:
        return None
    outer, eqn = frame.caller
    operand = eqn.invars[position]
    if eqn.primitive.name == "scan" and operand.aval.ndim == frame.jaxpr.invars[position].aval.ndim:
        return None
    return None if isinstance(operand, Literal) else (outer, operand)


def _sized(root: tuple[_Frame, Any], forms: list[_Form]) -> Iterator[Residual]:
    """Sizes the forms of one value, unless it is a literal or empty; of an argument, the narrower copies."""
    frame, variable = root
    where = _where(frame, variable)
    if where is not None and where.startswith("broadcast_in_dim"):  # Only that of a literal is an origin.
        return
    for dtype in dict.fromkeys(form.dtype for form in forms):
        if where is None and _itemsize(dtype) >= _itemsize(variable.aval.dtype):
            continue
        form = min((form for form in forms if form.dtype == dtype), key=lambda form: form.bytes)
        if form.bytes:
            shape = tuple(size if isinstance(size, int) else str(size) for size in form.shape)
            yield Residual(form.bytes, str(dtype), shape, where or COPY)


def _where(frame: _Frame, variable: Any) -> str | None:
    """Primitive and source line that made a value; None for an argument of the whole function."""
    if variable in frame.producer:
        eqn, _ = frame.producer[variable]
    elif frame.caller is not None:
        _, eqn = frame.caller
    else:
        return None
    name = eqn.primitive.name
    while code_line(eqn)[0] == "?" and frame.caller is not None:  # Inside of one of JAX's own functions.
        frame, eqn = frame.caller
    return f"{name} {source(eqn, _scope(frame, eqn))}"


def _scope(frame: _Frame, eqn: Any) -> str:
    """The scopes of an equation, those of the calls around it included."""
    return scope_in(_scope(*frame.caller) if frame.caller is not None else "", eqn)


def _itemsize(dtype: Any) -> int:
    return 0 if dtype == jax.dtypes.float0 else dtype.itemsize
