"""A training program, and how far it is from float32 under a policy and as hand-written mixed precision.

A program is written once, as a function of arrays with a keyword `dtype`: what its networks compute in. Left at float32
it is plain JAX without a conversion, and `jamp.cast_fn` gets that. With a half dtype it is what a careful engineer
writes: the networks in half, and in float32 what is delicate, which is the rest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jamp

F32 = jnp.float32
POLICIES = ("O1:bfloat16", "O2:bfloat16", "O1:float16", "O2:float16")
SEEDS = tuple(range(6))
# Where the error of six draws is too large, what counts is that of many.
MANY_SEEDS = tuple(range(36))
# Times that the error may be what careful code's is, or what rounding the inputs alone makes.
FACTOR = 1.5
# Steps that a loop may take, in times what it takes in float32.
MORE_STEPS = 1.5
# Errors below this share of the half dtype's spacing count as float32's own.
NEGLIGIBLE = 1 / 32


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss at random inputs.

    Attributes:
        fn: From the inputs to losses, a vector of them where there are several, so that a single lucky rounding does
            not decide; or to a pair of losses and a number of steps. Takes `dtype=`.
        inputs: From a NumPy generator to the inputs. The loss is differentiated by the first.
        rounded: Positions of the inputs that careful code computes with in half: weights, and what networks read.
        finding: The rule that the program stands for, as a word.
        loss_scale: What the loss is multiplied by under differentiation, in float16.
    """

    fn: Callable[..., Any]
    inputs: Callable[[np.random.Generator], tuple]
    rounded: tuple[int, ...] = (0,)
    finding: str = ""
    loss_scale: float = 256.0

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.fn.__name__

    def careful(self, half: Any) -> Callable[..., Any]:
        """The program in mixed precision by hand."""
        return functools.partial(self.fn, dtype=half)

    def arguments(self, seed: int) -> tuple:
        """Inputs, the same for the same seed."""
        return jax.tree.map(_as_jax, self.inputs(np.random.default_rng(seed)))


@dataclasses.dataclass(frozen=True)
class Errors:
    """Relative l2 errors against float32, root mean square over the seeds.

    Attributes:
        value: Of the losses.
        gradient: Of the gradient as one vector.
        leaf: Of the leaf of the gradient that is worst off.
        steps: Steps of the program's loop in times float32's, 1 for a program without.
    """

    value: float
    gradient: float
    leaf: float
    steps: float = 1.0

    def beyond(self, allowed: Errors, factor: float) -> list[str]:
        """Names of what is larger than a factor times what is allowed."""
        pairs = zip(dataclasses.asdict(self).items(), dataclasses.astuple(allowed), strict=True)
        return [name for (name, error), limit in pairs if not error <= factor * limit]


def _as_jax(x: Any) -> jax.Array:
    x = np.asarray(x)
    return jnp.asarray(x.astype(np.float32) if np.issubdtype(x.dtype, np.floating) else x)


def _differentiated(fn: Callable[..., Any], scale: float) -> Callable[..., Any]:
    """Losses, gradient and steps of a program, compiled; XLA does every rounding that the program asks for."""

    def loss(*args: Any) -> Any:
        total, (losses, steps) = fn(*args)
        return total * scale, (losses, steps)

    def call(*args: Any) -> Any:
        gradient, (losses, steps) = jax.grad(loss, has_aux=True)(*args)
        return losses, jax.tree.map(lambda g: g.astype(F32) / scale, gradient), steps

    return jax.jit(call, compiler_options={"xla_allow_excess_precision": False})


def _with_mean(fn: Callable[..., Any]) -> Callable[..., Any]:
    """From losses, and steps where there are some, to their mean and all of them."""

    def call(*args: Any) -> Any:
        out = fn(*args)
        losses, steps = out if isinstance(out, tuple) else (out, jnp.int32(1))
        return jnp.mean(losses), (losses, steps)

    return call


@functools.cache
def _in_float32(program: Program) -> Callable[..., Any]:
    """The program in float32, compiled."""
    return _differentiated(_with_mean(program.fn), 1.0)


@functools.cache
def _under_policy(program: Program, policy: str) -> Callable[..., Any]:
    """The program under a policy, compiled."""
    scale = _loss_scale(program, jamp.get_policy(policy).compute_dtype)
    return _differentiated(jamp.cast_fn(_with_mean(program.fn), policy), scale)


@functools.cache
def _by_hand(program: Program, dtype: Any) -> Callable[..., Any]:
    """The program in mixed precision by hand, compiled."""
    return _differentiated(_with_mean(program.careful(dtype)), _loss_scale(program, dtype))


@functools.cache
def _expected(program: Program, seed: int) -> Any:
    """What the program gives in float32."""
    return _in_float32(program)(*program.arguments(seed))


def _errors(
    program: Program, fn: Callable[..., Any], arguments: Callable[[int], tuple], seeds: tuple[int, ...]
) -> Errors:
    """Errors of a function of the program's inputs."""
    rows = [_errors_of_one(fn(*arguments(seed)), _expected(program, seed)) for seed in seeds]
    return Errors(*np.sqrt(np.mean(np.square(rows), 0)))


def _errors_of_one(actual: Any, expected: Any) -> tuple[float, ...]:
    (losses, gradient, steps), (right_losses, right_gradient, right_steps) = jax.tree.map(
        np.float64, (actual, expected)
    )
    leaves, right_leaves = jax.tree.leaves(gradient), jax.tree.leaves(right_gradient)
    whole, right_whole = (np.concatenate([np.ravel(x) for x in xs]) for xs in (leaves, right_leaves))
    # What is no measure: a leaf of next to no gradient, such as a bias of keys; one of a few numbers, which is luck.
    least = 5e-2 * np.linalg.norm(right_whole)
    pairs = zip(leaves, right_leaves, strict=True)
    leaf = max((_distance(a, e) for a, e in pairs if e.size >= 8 and np.linalg.norm(e) > least), default=0.0)
    return _distance(losses, right_losses), _distance(whole, right_whole), leaf, np.sum(steps) / np.sum(right_steps)


def _distance(actual: Any, expected: Any) -> float:
    error = float(np.linalg.norm(np.ravel(actual - expected)) / max(np.linalg.norm(np.ravel(expected)), 1e-30))
    return error if np.isfinite(error) else np.inf


def errors_at(program: Program, policy: str, seeds: tuple[int, ...] = SEEDS) -> Errors:
    """Errors of the program under a policy."""
    return _errors(program, _under_policy(program, policy), program.arguments, seeds)


def _loss_scale(program: Program, half: Any) -> float:
    return program.loss_scale if half == jnp.float16 else 1.0


@functools.cache
def allowed_errors(program: Program, half: str, seeds: tuple[int, ...] = SEEDS) -> Errors:
    """What careful code's error is, or one rounding of the inputs makes, whichever is larger, times the factor."""
    dtype = jnp.dtype(half)
    careful = _errors(program, _by_hand(program, dtype), program.arguments, seeds)
    rounded = _errors(program, _in_float32(program), lambda seed: _rounded(program, seed, dtype), seeds)
    floor = NEGLIGIBLE * float(jnp.finfo(dtype).eps)
    worst = [max(c, r, floor) for c, r in zip(dataclasses.astuple(careful), dataclasses.astuple(rounded), strict=True)]
    return Errors(*(FACTOR * error for error in worst[:3]), MORE_STEPS)


def _rounded(program: Program, seed: int, dtype: Any) -> tuple:
    def once(x: jax.Array) -> jax.Array:
        return x.astype(dtype).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    arguments = program.arguments(seed)
    return tuple(jax.tree.map(once, x) if i in program.rounded else x for i, x in enumerate(arguments))
