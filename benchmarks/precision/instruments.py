"""Instruments for one model at one precision: static ones by tracing, the others by running it on this machine."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import jamp
from benchmarks.models import Model, is_floating, objective
from jamp.inspect import COPY, Matmul, Residual, bytes_by_dtype, casts, half_share, matmuls, residuals


@dataclass
class Measurement:
    """What was measured of a model at a precision; None where it was not.

    Attributes:
        half_forward: Share of the matmul and convolution FLOPs of the forward pass with half operands.
        half_backward: The same of the backward pass, recomputation included.
        full_matmuls: What is not half, as ``source line (scope): FLOPs``.
        residual_bytes: Bytes kept between the passes, by dtype, half copies of weights included.
        copied_bytes: The part of them that is half copies of weights and inputs. It does not grow with the batch.
        largest_residuals: The largest of them, as ``bytes dtype[shape] origin``.
        casts: Conversions between float32 and half in the forward pass.
        shared_casts: Conversions that are not there because one of the same value was there before.
        gradient_error: ``||g - g32|| / ||g32||``, root mean square over draws.
        temp_bytes: Peak temporary memory of the compiled gradient.
        step_seconds: Median time of the compiled gradient; see `benchmarks.timing.clock`.
        trace_seconds: Least time of ``jit(grad).trace``, in the CPU time of the thread, where no cache knows anything.
        later_trace_seconds: The same of later traces, where the caches of JAX and of the model's library are warm.
        error: Why a measure failed.
    """

    half_forward: float | None = None
    half_backward: float | None = None
    full_matmuls: list[str] = field(default_factory=list)
    residual_bytes: dict[str, int] | None = None
    copied_bytes: int | None = None
    largest_residuals: list[str] = field(default_factory=list)
    casts: int | None = None
    shared_casts: int | None = None
    gradient_error: float | None = None
    temp_bytes: int | None = None
    step_seconds: float | None = None
    trace_seconds: float | None = None
    later_trace_seconds: float | None = None
    error: str | None = None

    @property
    def residual_total(self) -> int | None:
        """Bytes kept in all dtypes."""
        return None if self.residual_bytes is None else sum(self.residual_bytes.values())

    @property
    def activation_total(self) -> int | None:
        """Bytes kept without the copies of weights and inputs."""
        return None if self.residual_bytes is None else sum(self.residual_bytes.values()) - (self.copied_bytes or 0)


def measure_static(result: Measurement, model: Model, apply: Callable[..., Any]) -> None:
    """Fills in what tracing alone can tell."""
    loss = objective(model, apply)
    forward_jaxpr = jax.make_jaxpr(loss)(model.params, *model.inputs)
    forward = list(matmuls(forward_jaxpr))
    everything = list(matmuls(jax.make_jaxpr(jax.grad(loss))(model.params, *model.inputs)))
    result.half_forward = half_share(forward)
    result.half_backward = _difference_share(everything, forward)
    result.full_matmuls = [f"{m.where}: {m.flops}" for m in everything if not m.half]
    result.casts = casts(forward_jaxpr)
    kept = residuals(loss, model.params, *model.inputs)
    result.residual_bytes = bytes_by_dtype(kept)
    result.copied_bytes = sum(residual.bytes for residual in kept if residual.where == COPY)
    result.largest_residuals = [_described(residual) for residual in kept[:30]]


def measure_shared_casts(result: Measurement, model: Model, policy: str) -> None:
    """Fills in how many casts jamp does without."""
    result.shared_casts = jamp.report(model.apply, model.params, *model.inputs, policy=policy).shared_casts


def _difference_share(everything: Sequence[Matmul], forward: Sequence[Matmul]) -> float:
    """Share of half FLOPs in what the gradient does beyond the forward pass."""
    total = sum(m.flops for m in everything) - sum(m.flops for m in forward)
    half = sum(m.flops for m in everything if m.half) - sum(m.flops for m in forward if m.half)
    return half / total if total else 1.0


def _described(residual: Residual) -> str:
    return f"{residual.bytes} {residual.dtype}{list(residual.shape)} {residual.where}"


def trace_seconds(
    makers: dict[str, Callable[[], Callable[..., Any]]],
    model: Model,
    rounds: int,
    *,
    later: bool = False,
    differentiated: bool = True,
) -> dict[str, float]:
    """Times ``jit(grad(loss)).trace``, the candidates in turn.

    Args:
        makers: By name, a function that makes a loss anew, so that no cache knows it.
        model: Whose parameters and inputs are traced with.
        rounds: Number of timed rounds.
        later: Whether the caches of JAX and of the model's library are warm, as where a function is traced for another
            shape, and in notebooks, tests and sweeps. Otherwise they are emptied before each round: what a user waits
            for at the first step. (With warm caches a library whose functions are jitted inside, such as diffrax, is
            not traced at all.)
        differentiated: Whether the gradient is traced; else the loss alone.

    Returns:
        Least seconds by name, of this thread's CPU time: other processes can but add to them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    derive = jax.grad if differentiated else lambda loss: loss
    if later:
        for make in makers.values():
            jax.jit(derive(make())).trace(model.params, *model.inputs)
    for _ in range(rounds):
        for name, make in makers.items():
            program = jax.jit(derive(make()))
            if not later:
                jax.clear_caches()
            gc.collect()
            gc.disable()
            try:
                start = time.thread_time()
                program.trace(model.params, *model.inputs)
                seconds[name].append(time.thread_time() - start)
            finally:
                gc.enable()
    return {name: min(times) for name, times in seconds.items()}


@dataclass(frozen=True)
class Compiled:
    """Compiled gradient of one candidate and what it returned on each draw."""

    program: Callable[..., Any]
    gradients: list[Any]
    temp_bytes: int


def run_gradient(loss: Callable[..., jax.Array], draws: Sequence[Any]) -> Compiled:
    """Compiles the gradient once and runs it on every draw of ``(params, *inputs)``."""
    compiled = jax.jit(jax.grad(loss)).lower(*draws[0]).compile()
    gradients = [jax.device_get(compiled(*draw)) for draw in draws]
    memory = compiled.memory_analysis()
    return Compiled(compiled, gradients, memory.temp_size_in_bytes if memory else 0)


def relative_error(tree: Any, reference: Any) -> float:
    """``||tree - reference|| / ||reference||`` over all leaves, in float64."""
    leaves = zip(jax.tree.leaves(tree), jax.tree.leaves(reference), strict=True)
    pairs = [(np.asarray(leaf, np.float64), np.asarray(other, np.float64)) for leaf, other in leaves]
    difference = sum(np.sum((leaf - other) ** 2) for leaf, other in pairs)
    return float(np.sqrt(difference / sum(np.sum(other**2) for _, other in pairs)))


def gradient_error(gradients: Sequence[Any], references: Sequence[Any]) -> float:
    """Root mean square of the relative error over draws."""
    errors = [relative_error(g, reference) for g, reference in zip(gradients, references, strict=True)]
    return float(np.sqrt(np.mean(np.square(errors))))


def perturbed(tree: Any, seed: int) -> Any:
    """Another draw: every floating leaf times ``1 + 0.1 n`` with normal ``n``, which keeps the scale of any model."""
    leaves, structure = jax.tree.flatten(tree)
    generator = np.random.default_rng(seed)
    return structure.unflatten(
        [
            leaf * (1 + 0.1 * generator.standard_normal(leaf.shape)).astype(leaf.dtype) if is_floating(leaf) else leaf
            for leaf in leaves
        ]
    )
