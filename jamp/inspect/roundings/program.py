"""The program whose roundings are looked at: a function at a policy, with its gradient, as one jaxpr."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.tree_util import keystr, tree_leaves_with_path

from jamp._compat import open_jaxpr
from jamp._dtypes import FLOAT16
from jamp.inspect._target import Target, argument_name, no_derivative
from jamp.transforms._traced import Traced, is_array

# Gradients in float16 need a loss scale, or most of what is measured is what the lack of one does. A dynamic one comes
# down until nothing overflows.
_SCALES = tuple(np.float32(2.0**power) for power in (15, 10, 5, 0))


class Program(NamedTuple):
    """A function, and the gradient of it with respect to all floating arguments, as a jaxpr.

    Attributes:
        jaxpr: From the inputs to the floating results, the gradients, and the results that are not floating.
        inputs: Values of the inputs; the loss scale is the last if there is one.
        outs: Names of the floating results.
        grads: Names of the arguments that there are gradients of; none where the function has no gradient.
        others: Names of the results that are not floating.
        no_gradient: Why there is no gradient; empty where there is one.
        scaled: Whether there is a loss scale.
    """

    jaxpr: Any
    inputs: list[Any]
    outs: tuple[str, ...]
    grads: tuple[str, ...]
    others: tuple[str, ...]
    no_gradient: str = ""
    scaled: bool = False

    def at_scales(self) -> Iterator[Program]:
        """The program at its loss scale, and at smaller ones."""
        yield self
        for scale in _SCALES[1:] if self.scaled else ():
            yield self._replace(inputs=[*self.inputs[:-1], scale])


def value_and_gradient(target: Target, program: Traced, gradient: bool = True) -> Program:
    """The program of a target. The gradient is that of its loss, or else of a random sum of all of its results.

    Args:
        target: What to look at.
        program: The same as it runs, or in float32.
        gradient: Whether the gradient is wanted.
    """
    avals = [v.aval.update(weak_type=False) for v in open_jaxpr(program.jaxpr).invars]
    names = [argument_name(p) for p, leaf in tree_leaves_with_path((target.args, target.kwargs)) if is_array(leaf)]
    moving = [i for i, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.floating)] if gradient else []
    results = [v.aval for v in open_jaxpr(program.jaxpr).outvars]
    floating = [i for i, aval in enumerate(results) if jnp.issubdtype(aval.dtype, jnp.inexact)]
    others = [i for i in range(len(results)) if i not in floating]
    policies = [target.policy] if target.policy else target.inner
    scaled = any(policy.compute_dtype == FLOAT16 for policy in policies)

    def run(moved: list[Any], inputs: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        merged = dict(enumerate(inputs)) | dict(zip(moving, moved, strict=True))
        outs = jaxpr_as_fun(program.jaxpr)(*merged.values())
        return [outs[i] for i in floating], [outs[i] for i in others]

    def loss(moved: list[Any], inputs: tuple[Any, ...], scale: Any) -> tuple[Any, Any]:
        outs, rest = run(moved, inputs)
        return _one_number(outs) * scale, (outs, rest)

    def both(*given: Any) -> list[Any]:
        inputs, scale = given[: len(avals)], given[-1] if scaled else 1.0
        grads, (outs, rest) = jax.grad(loss, has_aux=True)([inputs[i] for i in moving], inputs, scale)
        in_float32 = [grad.astype(jnp.float32) for grad in grads]
        return [*outs, *([grad / scale for grad in in_float32] if scaled else in_float32), *rest]

    def forward(*inputs: Any) -> list[Any]:
        outs, rest = run([inputs[i] for i in moving], inputs)
        return [*outs, *rest]

    out_names = result_names(program, results)
    labels = tuple(out_names[i] for i in floating), tuple(names[i] for i in moving), tuple(out_names[i] for i in others)
    problem = "" if moving else "no argument is floating" if gradient else "not asked for"
    if moving and floating:
        try:
            more = [_SCALES[0]] if scaled else []
            jaxpr = jax.make_jaxpr(both)(*avals, *more)
            return Program(jaxpr, [*program.inputs, *more], *labels, scaled=scaled)
        except Exception as error:  # A rule of the user's may raise anything.
            problem = no_derivative(error)
    return Program(jax.make_jaxpr(forward)(*avals), program.inputs, labels[0], (), labels[2], problem)


def check_has_results(caller: str, program: Program) -> None:
    """Refuses a program without floating results, for what looks at these."""
    if not program.outs:
        raise TypeError(f"`jamp.{caller}` looks at floating results, and the function has none.")


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


def compiled(program: Program, as_written: bool = True) -> Callable[[Sequence[Any]], list[Any]]:
    """What gives the results of a program for inputs, with every rounding that is written in it, or as it runs here.

    XLA may leave out a rounding that is followed by a cast back to float32, and which ones depends on the device and on
    what it fuses. What is good enough only without them is not elsewhere. Of its loss scales it is the largest at which
    the gradient is finite, or as much of it as at any.
    """
    options = {"xla_allow_excess_precision": False} if as_written else None
    run = jax.jit(jaxpr_as_fun(program.jaxpr), compiler_options=options)
    grads = slice(len(program.outs), len(program.outs) + len(program.grads))

    def at_best_scale(inputs: Sequence[Any]) -> list[Any]:
        fewest, best = float("inf"), []
        for at in program._replace(inputs=[*inputs]).at_scales():
            found = run(*at.inputs)
            lost = sum(int(jnp.sum(~jnp.isfinite(grad))) for grad in found[grads])
            if lost < fewest:
                fewest, best = lost, found
            if not lost:
                break
        return best

    return at_best_scale


def result_names(program: Traced, results: list[Any]) -> list[str]:
    """Where each traced result is in what the function returns."""
    leaves = tree_leaves_with_path(program.rebuild([jnp.zeros((), jnp.int32)] * len(results)))
    return [keystr(path) or "result" for path, leaf in leaves if is_array(leaf)]
