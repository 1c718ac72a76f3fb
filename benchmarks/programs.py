"""A workload at a precision, compiled: the candidates of the step-time benchmark."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks.candidates import Apply
from benchmarks.measure import clock, objective
from benchmarks.workloads import Workload
from benchmarks.zoo import Model
from jamp.inspect import matmuls
from jamp.optim import LossScaledState


@dataclass(frozen=True)
class Candidate:
    """One precision.

    Attributes:
        name: Key in the results.
        policy: What jamp is given; `"O0"` where jamp has no part in it.
        wrap: Makes the apply function of that precision.
        dtype: The `dtype=` of hand-written mixed precision.
        matmul_precision: As in `jax.default_matmul_precision`; None for that of the library.
    """

    name: str
    policy: str = "O0"
    wrap: Callable[[Apply], Apply] = lambda apply: apply
    dtype: Any = None
    matmul_precision: str | None = None

    @property
    def wraps_optimizer(self) -> bool:
        """Whether training needs a loss scale or master weights; what is written by hand in bfloat16 has neither."""
        policy = jamp.get_policy(self.policy)
        return policy.compute_dtype == jnp.float16 or policy.param_dtype != jnp.float32


def candidates() -> tuple[list[Candidate], dict[str, str]]:
    """Returns the candidates whose libraries are installed, and by name why one is missing."""
    found = [Candidate("float32", matmul_precision="highest")]
    if jax.default_backend() == "gpu":
        found.append(Candidate("float32, TF32", matmul_precision="tensorfloat32"))
    found.append(Candidate("hand-written bfloat16", dtype=jnp.bfloat16))
    for dtype in ("bfloat16", "float16"):
        for level in ("O1", "O2", "O3"):
            policy = f"{level}:{dtype}"
            found.append(Candidate(f"jamp {level} {dtype}", policy, lambda apply, p=policy: jamp.cast_fn(apply, p)))
    missing = {}
    for name, make in (("jmp", _jmp), ("mpx", _mpx)):
        try:
            found.append(Candidate(f"{name} bfloat16", wrap=make()))
        except ImportError as error:
            missing[name] = str(error)
    return found, missing


def _jmp() -> Callable[[Apply], Apply]:
    import jmp

    policy = jmp.get_policy("p=f32,c=bf16,o=f32")
    return lambda apply: lambda *args: policy.cast_to_output(apply(*policy.cast_to_compute(args)))


def _mpx() -> Callable[[Apply], Apply]:
    import mpx

    return lambda apply: mpx.cast_function(apply, jnp.bfloat16, jnp.float32)


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
    if candidate.wraps_optimizer:
        tx = jamp.mixed_precision(tx, candidate.policy)
    params = jamp.get_policy(candidate.policy).cast_to_param(model.params)
    return _train_step(model, candidate, tx), params, jax.jit(tx.init)(params), model.inputs


def _train_step(model: Model, candidate: Candidate, tx: optax.GradientTransformation) -> Callable[..., Any]:
    loss_fn = objective(model, candidate.wrap(model.apply))

    def train_step(params: Any, opt_state: Any, *inputs: Any) -> tuple[Any, Any]:
        if candidate.wraps_optimizer:
            _, grads = jamp.scaled_value_and_grad(loss_fn, opt_state)(params, *inputs)
        else:
            grads = jax.grad(loss_fn)(params, *inputs)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return train_step


def matmul_precision(candidate: Candidate) -> Any:
    """The context that a candidate is traced in."""
    if candidate.matmul_precision is None:
        return contextlib.nullcontext()
    return jax.default_matmul_precision(candidate.matmul_precision)


def peak_bytes(step: Any) -> int:
    """Bytes that a compiled step needs, as the compiler plans them: arguments, results and temporaries."""
    memory = step.memory_analysis()
    used = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    return used - memory.alias_size_in_bytes


# The candidates of which the largest batch is looked for.
LARGEST = ("float32", "hand-written bfloat16", "jamp O2 bfloat16", "jamp O2 float16")


def largest_batch(fits: Callable[[int], bool], start: int) -> int:
    """Returns the largest batch for which `fits` is true, to an eighth of it; 0 if a single example does not fit."""
    below, above = 0, start
    while fits(above):
        below, above = above, 2 * above
    while above - below > max(below // 8, 1):
        middle = (below + above) // 2
        below, above = (middle, above) if fits(middle) else (below, middle)
    return below
