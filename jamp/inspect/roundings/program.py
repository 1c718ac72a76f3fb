"""The program whose roundings are looked at: a function at a policy, with its gradient, as one jaxpr."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.tree_util import keystr, tree_leaves_with_path

from jamp._compat import open_jaxpr
from jamp._dtypes import FLOAT16
from jamp.inspect._target import Target, argument_name
from jamp.transforms._traced import Traced, is_array

# Gradients in float16 need a loss scale, or most of what is measured is what the lack of one does.
_SCALE = 2.0**15


class Program(NamedTuple):
    """A function, and the gradient of it with respect to all floating arguments, as a jaxpr.

    Attributes:
        jaxpr: From the inputs to the floating results, the gradients, and the results that are not floating.
        inputs: Values of the inputs.
        outs: Names of the floating results.
        grads: Names of the arguments that there are gradients of; none where the function has no gradient.
        others: Names of the results that are not floating.
        no_gradient: Why there is no gradient; empty where there is one.
    """

    jaxpr: Any
    inputs: list[Any]
    outs: tuple[str, ...]
    grads: tuple[str, ...]
    others: tuple[str, ...]
    no_gradient: str = ""


def value_and_gradient(target: Target, program: Traced, gradient: bool = True) -> Program:
    """The program of a target. The gradient is that of its loss, or else of a random sum of all of its results.

    Args:
        target: What to look at.
        program: The same as it runs, or in float32.
        gradient: Whether the gradient is wanted.
    """
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in open_jaxpr(program.jaxpr).invars]
    names = [argument_name(p) for p, leaf in tree_leaves_with_path((target.args, target.kwargs)) if is_array(leaf)]
    moving = [i for i, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.floating)] if gradient else []
    results = [v.aval for v in open_jaxpr(program.jaxpr).outvars]
    floating = [i for i, aval in enumerate(results) if jnp.issubdtype(aval.dtype, jnp.inexact)]
    others = [i for i in range(len(results)) if i not in floating]
    scale = _loss_scale(target)

    def run(moved: list[Any], inputs: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        merged = dict(enumerate(inputs)) | dict(zip(moving, moved, strict=True))
        outs = jaxpr_as_fun(program.jaxpr)(*merged.values())
        return [outs[i] for i in floating], [outs[i] for i in others]

    def loss(moved: list[Any], inputs: tuple[Any, ...]) -> tuple[Any, Any]:
        outs, rest = run(moved, inputs)
        return _one_number(outs) * scale, (outs, rest)

    def both(*inputs: Any) -> list[Any]:
        grads, (outs, rest) = jax.grad(loss, has_aux=True)([inputs[i] for i in moving], inputs)
        in_float32 = [grad.astype(jnp.float32) for grad in grads]
        return [*outs, *(in_float32 if scale == 1 else [grad / scale for grad in in_float32]), *rest]

    def forward(*inputs: Any) -> list[Any]:
        outs, rest = run([inputs[i] for i in moving], inputs)
        return [*outs, *rest]

    out_names = result_names(program, results)
    labels = tuple(out_names[i] for i in floating), tuple(names[i] for i in moving), tuple(out_names[i] for i in others)
    problem = "" if moving else "no argument is floating" if gradient else "not asked for"
    if moving and floating:
        try:
            return Program(jax.make_jaxpr(both)(*avals), program.inputs, *labels)
        except (NotImplementedError, TypeError, ValueError) as error:  # What JAX raises where it has no derivative.
            problem = str(error).split("\n")[0]
    return Program(jax.make_jaxpr(forward)(*avals), program.inputs, labels[0], (), labels[2], problem)


def _loss_scale(target: Target) -> float:
    policies = [target.policy] if target.policy else target.inner
    return _SCALE if any(policy.compute_dtype == FLOAT16 for policy in policies) else 1.0


def _one_number(outs: list[Any]) -> Any:
    """The loss: the first result, if that is one number; else all results in random signs, of unit variance each."""
    if outs[0].size == 1 and jnp.issubdtype(outs[0].dtype, jnp.floating):
        return outs[0].astype(jnp.float32).reshape(())
    total = jnp.float32(0)
    for i, out in enumerate(outs):
        if jnp.issubdtype(out.dtype, jnp.floating):
            signs = jax.random.rademacher(jax.random.key(i), out.shape, jnp.float32)
            total += (signs * out.astype(jnp.float32)).sum() / max(out.size, 1) ** 0.5
    return total


def compiled(program: Program) -> Callable[..., list[Any]]:
    """The program compiled, with every rounding that is written in it.

    XLA may leave out a rounding that is followed by a cast back to float32, and which ones depends on the device and on
    what it fuses. What is good enough only without them is not elsewhere.
    """
    return jax.jit(jaxpr_as_fun(program.jaxpr), compiler_options={"xla_allow_excess_precision": False})


def result_names(program: Traced, results: list[Any]) -> list[str]:
    """Where each traced result is in what the function returns."""
    leaves = tree_leaves_with_path(program.rebuild([jnp.zeros((), jnp.int32)] * len(results)))
    return [keystr(path) or "result" for path, leaf in leaves if is_array(leaf)]
