"""A workload at a precision, compiled."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks.candidates import Candidate
from benchmarks.models import Model, objective
from benchmarks.steptime.workloads import Workload
from benchmarks.timing import clock, peak_bytes
from jamp.inspect import matmuls
from jamp.optim import LossScaledState


@dataclass
class Program:
    """A train step that is compiled and has its data.

    Attributes:
        step: The compiled step, from the state and the inputs to the state.
        state: Parameters and optimizer state; each run replaces it.
        inputs: The batch.
        flops: Matmul and convolution FLOPs of a step.
        peak_bytes: Arguments, results and temporaries, as the compiler plans them.
        trace_seconds: Time to trace and lower the step.
        compile_seconds: Time to compile it.
        seconds: Measured times of the steps.
    """

    step: Callable[..., Any]
    state: tuple[Any, Any]
    inputs: tuple[Any, ...]
    flops: int
    peak_bytes: int
    trace_seconds: float
    compile_seconds: float
    seconds: list[float] = field(default_factory=list)

    def run(self, steps: int = 1) -> None:
        """Does some steps and waits for the last."""
        for _ in range(steps):
            self.state = self.step(*self.state, *self.inputs)
        jax.block_until_ready(self.state)

    def skipped(self) -> int:
        """How many steps were skipped so far because of an overflow."""
        states = jax.tree.leaves(self.state[1], is_leaf=lambda x: isinstance(x, LossScaledState))
        return sum(int(x.skipped) for x in states if isinstance(x, LossScaledState))

    def healthy(self) -> bool:
        """Whether the parameters are finite."""
        return bool(jamp.all_finite(self.state[0]))


def program(workload: Workload, candidate: Candidate, batch: int | None = None) -> Program:
    """Builds and compiles one workload at one precision.

    Args:
        workload: The workload.
        candidate: The precision.
        batch: Examples in a step, in place of the workload's.

    Returns:
        The program, which has not been run.
    """
    train_step, params, opt_state, inputs = parts(workload, candidate, batch)
    with matmul_precision(candidate):
        start = clock()
        traced = jax.jit(train_step, donate_argnums=(0, 1)).trace(params, opt_state, *inputs)
        lowered = traced.lower()
        middle = clock()
        step = lowered.compile()
        end = clock()
    flops = sum(matmul.flops for matmul in matmuls(traced.jaxpr))
    # Copies, because a run donates them, and a leaf may stand in the parameters and in their optimizer's state.
    state = jax.tree.map(jnp.copy, (params, opt_state))
    return Program(step, state, inputs, flops, peak_bytes(step), middle - start, end - middle)


def parts(
    workload: Workload, candidate: Candidate, batch: int | None = None
) -> tuple[Callable[..., Any], Any, Any, Any]:
    """Returns the train step of a workload at a precision, and its parameters, optimizer state and inputs."""
    model = workload.build(candidate.dtype, batch or workload.batch)
    tx = workload.optimizer
    if wraps_optimizer(candidate):
        tx = jamp.mixed_precision(tx, candidate.policy)
    params = jamp.get_policy(candidate.policy).cast_to_param(model.params)
    return _train_step(model, candidate, tx), params, jax.jit(tx.init)(params), model.inputs


def _train_step(model: Model, candidate: Candidate, tx: optax.GradientTransformation) -> Callable[..., Any]:
    loss_fn = objective(model, candidate.wrap(model.apply))

    def train_step(params: Any, opt_state: Any, *inputs: Any) -> tuple[Any, Any]:
        if wraps_optimizer(candidate):
            _, grads = jamp.scaled_value_and_grad(loss_fn, opt_state)(params, *inputs)
        else:
            grads = jax.grad(loss_fn)(params, *inputs)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return train_step


def wraps_optimizer(candidate: Candidate) -> bool:
    """Whether training needs a loss scale or master weights; what is written by hand in bfloat16 has neither."""
    policy = jamp.get_policy(candidate.policy)
    return policy.compute_dtype == jnp.float16 or policy.param_dtype != jnp.float32


def matmul_precision(candidate: Candidate) -> Any:
    """The context that a candidate is traced in."""
    if candidate.matmul_precision is None:
        return contextlib.nullcontext()
    return jax.default_matmul_precision(candidate.matmul_precision)


def largest_batch(fits: Callable[[int], bool], start: int) -> int:
    """Returns the largest batch for which `fits` is true, to an eighth of it; 0 if a single example does not fit."""
    below, above = 0, start
    while fits(above):
        below, above = above, 2 * above
    while above - below > max(below // 8, 1):
        middle = (below + above) // 2
        below, above = (middle, above) if fits(middle) else (below, middle)
    return below
