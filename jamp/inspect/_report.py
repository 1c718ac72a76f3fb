"""`report`: what a function runs in which precision, found by tracing alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from jamp._compat import open_jaxpr
from jamp._dtypes import FLOAT32_AND_HALF, default_device, has_float8
from jamp.inspect._attentions import FoundAttention, attentions
from jamp.inspect._compiled import Compiled, Multiplied, may_skip_roundings, multiplied_otherwise
from jamp.inspect._compiled import compiled as compile_for_memory
from jamp.inspect._flops import Matmul, casts, matmuls
from jamp.inspect._operations import Operation, opaque_names, operations
from jamp.inspect._report_pictures import as_html, plot
from jamp.inspect._residuals import Residual, bytes_by_dtype, kept_values
from jamp.inspect._table import table
from jamp.inspect._target import Target, as_dict, no_derivative, resolve, tells_settings_apart
from jamp.policy import Policy
from jamp.transforms._unmatched import unmatched_rules


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of matrix products and convolutions, two for each multiply-accumulate.

    A scan counts its length, a conditional its most expensive branch, a while loop one run.

    Attributes:
        total: All of them.
        half: Those of products with two operands in half, or in float8.
        float8: Those of products with two operands in float8.
    """

    total: int
    half: int
    float8: int = 0

    @property
    def share(self) -> float:
        """Share in half or float8; 1.0 where there are none."""
        return self.half / self.total if self.total else 1.0


@dataclasses.dataclass(frozen=True)
class Report:
    """What a function runs in which precision. `str(report)` is a table, `report.to_dict()` is ready for JSON.

    Attributes:
        policy: The policy; None if the function was looked at as it is written, because it calls a `cast_fn` inside
            and none was given.
        inner: Policies of the `cast_fn`s inside, which rule their parts whatever `policy` is.
        unmatched: Rules of the policy that match nothing: for scopes, for functions and primitives of one's own, for
            functions that JAX inlines, for parameters that a primitive has not, and in half for what stays as traced.
        operations: The operations of the forward pass, alike ones as one.
        casts: Conversions between float32 and half in the forward pass, those of the results and the program's own
            included.
        opaque: Primitives that ran as traced because jamp does not know them.
        forward: FLOPs of the forward pass.
        gradient: FLOPs of the forward and backward pass with respect to all floating arguments; None where the
            function has no gradient.
        residuals: What reverse mode keeps between the two, the largest first: each value once for each
            dtype that it is kept in, without the arguments themselves. Empty where the function has no gradient.
        no_gradient: Why there is no gradient; empty where there is one.
        float8_emulated: Whether there are products in float8 and the default device has none of them, so that XLA
            converts their operands: the results are the same, and nothing is faster.
        attentions: The attentions that were found, at `attention=fused`: fused for which platforms, and why not for
            the others.
        fusible: The attentions that stay as written, and that `attention=fused` would have a kernel for.
        residuals_in_float32: Bytes that reverse mode keeps if the same function runs in float32.
        multiplied: Products of float32 that the default device multiplies in TF32 or bfloat16; None if there are none.
        compiled: Memory and traffic of the compiled step; None unless asked for.
        compiled_in_float32: The same of the function in float32.
        skips_roundings: Whether XLA is allowed to leave out roundings to half (`xla_allow_excess_precision`).
    """

    policy: Policy | None
    inner: tuple[Policy, ...]
    unmatched: tuple[str, ...]
    operations: tuple[Operation, ...]
    casts: int
    opaque: tuple[str, ...]
    forward: Flops
    gradient: Flops | Any  # `Any` for None: most functions have a gradient, and need no check for it.
    residuals: tuple[Residual, ...]
    no_gradient: str
    float8_emulated: bool = False
    attentions: tuple[FoundAttention, ...] = ()
    fusible: tuple[FoundAttention, ...] = ()
    residuals_in_float32: int = 0
    multiplied: Multiplied | None = None
    compiled: Compiled | Any = None  # `Any` for None, as in `gradient`.
    compiled_in_float32: Compiled | Any = None
    skips_roundings: bool = True

    @property
    def residual_bytes(self) -> dict[str, int]:
        """Bytes that reverse mode keeps, by dtype name, the most first."""
        totals = bytes_by_dtype(self.residuals)
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    @property
    def shared_casts(self) -> int:
        """Conversions that are not there because one of the same value to the same dtype was there before."""
        return sum(operation.shared for operation in self.operations)

    def to_dict(self) -> dict[str, Any]:
        """The report in dictionaries, lists, strings and numbers, for JSON."""
        return as_dict(self, residual_bytes=self.residual_bytes, shared_casts=self.shared_casts)

    def plot(self, path: str) -> None:
        """Writes a picture: FLOPs, and bytes kept for the backward pass, by scope and precision. It takes matplotlib.

        Args:
            path: Where to write it; the ending tells the format.

        Raises:
            ImportError: If matplotlib is not installed (`pip install 'jamp-jax[examples]'`).
        """
        plot(self, path)

    def __str__(self) -> str:
        return table(self)

    def _repr_html_(self) -> str:
        return as_html(self)


@tells_settings_apart
def report(
    fn: Callable[..., Any], *args: Any, policy: Policy | str | None = None, compiled: bool = False, **kwargs: Any
) -> Report:
    """Tells what a function runs in which precision, and why, without running it.

    Args:
        fn: The function: a plain one, or what `jamp.cast_fn` made of it.
        *args: Its arguments: arrays of any dtype and shape, or `jax.ShapeDtypeStruct`s in their place. A size
            that is not known (`jax.export.symbolic_shape`) counts as 64 in FLOPs and bytes.
        policy: As for `jamp.cast_fn`. Left out, it is that of `fn` if `cast_fn` made it. A function that calls a
            `cast_fn` inside, such as a loss or a jitted step, is then looked at as it is written; any other at `"O2"`.
        compiled: Whether to compile the forward and backward pass, at the policy and in float32, for memory and
            traffic. What reverse mode keeps is not always what the peak is made of.
        **kwargs: Its keyword arguments.

    Returns:
        A `Report`; print it, or `plot` it.

    Raises:
        TypeError: If `fn` is not callable.
        ValueError: If the policy is not known.

    Example:
        >>> import jax, jax.numpy as jnp, jamp
        >>> def model(w, x):
        ...     return jax.nn.relu(x @ w).sum()
        >>> w, x = jax.ShapeDtypeStruct((4, 2), jnp.float32), jax.ShapeDtypeStruct((3, 4), jnp.float32)
        >>> found = jamp.report(model, w, x, policy="O2:bfloat16")
        >>> found.forward.total, found.forward.share, found.casts
        (48, 1.0, 2)
        >>> [(op.primitive, op.inputs, op.rule) for op in found.operations][0]
        ('dot_general', ('bfloat16', 'bfloat16'), 'half, float32 out')
    """
    target = resolve("report", fn, args, kwargs, policy)
    program, policy = target.program(), target.policy
    plan = target.plan(program)[0]
    found = operations(plan, policy and policy.output_dtype)
    narrow = () if policy is None or policy.level in (None, "O0") else (policy.pair.narrow,)
    gradient, residuals, problem, step = _gradient(program.jaxpr, narrow)
    plain = target.in_float32()
    _, kept, _, float32_step = _gradient(plain)
    forward = _flops(matmuls(program.jaxpr), narrow)
    return Report(
        policy=policy,
        inner=target.inner,
        unmatched=unmatched_rules(policy, target.traced.jaxpr) if policy else (),
        operations=found,
        casts=casts(program.jaxpr, policy.pair if policy else FLOAT32_AND_HALF),
        opaque=opaque_names(found),
        forward=forward,
        gradient=gradient,
        residuals=residuals,
        no_gradient=problem,
        float8_emulated=forward.float8 > 0 and not has_float8(default_device()),
        attentions=attentions(plan),
        fusible=_fusible(target),
        residuals_in_float32=sum(residual.bytes for residual in kept),
        multiplied=multiplied_otherwise(matmuls(program.jaxpr), default_device),
        compiled=compile_for_memory(step()) if compiled else None,
        compiled_in_float32=compile_for_memory(float32_step()) if compiled else None,
        skips_roundings=may_skip_roundings(),
    )


def _fusible(target: Target) -> tuple[FoundAttention, ...]:
    """What another plan, at `attention=fused`, has kernels for."""
    policy = target.policy
    if policy is None or policy.level in (None, "O0") or policy.attention == "fused":
        return ()
    plan = target.traced.plan(dataclasses.replace(policy, attention="fused"))
    return tuple(found for found in attentions(plan) if found.fused)


def _gradient(
    program: Any, narrow: Sequence[Any] = ()
) -> tuple[Flops | None, tuple[Residual, ...], str, Callable[[], Any]]:
    """FLOPs of forward and backward pass, residuals in between, why there are none; and a function for the jaxpr."""
    avals = [var.aval.update(weak_type=False) for var in open_jaxpr(program).invars]
    moving = [i for i, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]
    if not moving:
        return None, (), "no argument is floating", lambda: program
    if not any(jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in open_jaxpr(program).outvars):
        return None, (), "no result is floating", lambda: program
    try:
        jaxpr, kept = _trace_gradient(program, avals, moving)
    except Exception as error:  # A rule of the user's may raise anything.
        return None, (), no_derivative(error), lambda: program
    residuals = kept_values(jaxpr, open_jaxpr(jaxpr).outvars[:kept])

    def step(*inputs: Any) -> list[Any]:
        return jaxpr_as_fun(jaxpr)(*inputs)[kept:]

    return _flops(matmuls(jaxpr), narrow), tuple(residuals), "", lambda: jax.make_jaxpr(step)(*avals)


def _trace_gradient(program: Any, avals: Sequence[Any], moving: Sequence[int]) -> tuple[Any, int]:
    """The jaxpr of forward and backward pass of a program, whose first outputs are the residuals; and their number."""
    kept = 0

    def both_passes(*inputs: Any) -> Any:
        nonlocal kept

        def of_moving(*moved: Any) -> list[Any]:
            merged = dict(enumerate(inputs)) | dict(zip(moving, moved, strict=True))
            outs = jaxpr_as_fun(program)(*merged.values())
            return [out for out in outs if jnp.issubdtype(out.dtype, jnp.inexact)]

        outs, pull = jax.vjp(of_moving, *(inputs[i] for i in moving))
        residuals = jax.tree.leaves(pull)
        kept = len(residuals)
        return residuals, pull([jnp.ones_like(out) for out in outs])

    return jax.make_jaxpr(both_passes)(*avals), kept


def _flops(found: Iterable[Matmul], narrow: Sequence[Any] = ()) -> Flops:
    """FLOPs of products; those of operands of other dtypes that a policy has for half are half too."""
    found = list(found)
    half = sum(m.flops for m in found if m.half or m.within(narrow))
    return Flops(sum(m.flops for m in found), half, sum(m.flops for m in found if m.float8))
