"""Tells when the scale of a dynamic scaler becomes a constant of a compiled step, and so never adapts."""

import inspect
import sys
from typing import Any

import jax

from jamp._compat import enclosing_traces, is_from_jamp
from jamp._warnings import warn_user
from jamp.scalers._base import is_traced
from jamp.transforms._labels import is_labelling

_COMPILED = ("jit", "pmap", "shard_map")  # Scans, branches and checkpoints by themselves are traced at every call.
_EVAL_SHAPE = inspect.unwrap(jax.eval_shape).__code__

_MESSAGE = (
    "The loss scale is a constant of a compiled function: it was taken from a state, or a scaler, outside of this "
    "trace, so the steps that it is used in never see it adapt. After two overflows the gradients are 4 times as "
    "large as `tx.update` believes. Pass the state to the step, and differentiate inside:\n"
    "    @jax.jit\n"
    "    def train_step(params, opt_state, batch):\n"
    "        loss, grads = jamp.scaled_value_and_grad(loss_fn, opt_state)(params, batch)\n"
    "A scale that is not to adapt is a jamp.StaticLossScale."
)


def warn_if_constant(scale: Any) -> None:
    """Warns if `scale` has a value while a function is traced whose program is going to be kept."""
    if not isinstance(scale, jax.Array) and hasattr(scale, "__jax_array__"):
        scale = scale.__jax_array__()  # Of an `nnx.Variable`, in the state of an `nnx.Optimizer`.
    if not isinstance(scale, jax.Array) or is_traced(scale) or is_labelling():
        return
    # jamp traces parts of a step to look at them. So do JAX's functions for looking.
    if is_compiled_here() and not _is_only_looked_at():
        warn_user(_MESSAGE)


def is_compiled_here() -> bool:
    """Whether a function is traced around the caller whose program is going to be kept, and that is the user's."""
    kept = [function for purpose, function in enclosing_traces() if purpose in _COMPILED]
    return any(not is_from_jamp(function) for function in kept)


def _is_only_looked_at() -> bool:
    """Whether the trace is that of a user's `jax.make_jaxpr` or `jax.eval_shape`, whose programs do not run."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code is _EVAL_SHAPE or frame.f_code.co_qualname.startswith("make_jaxpr.<locals>"):
            while frame.f_back is not None and _package(frame) == "jax":
                frame = frame.f_back
            if _package(frame) != "jamp":
                return True
        frame = frame.f_back
    return False


def _package(frame: Any) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]
