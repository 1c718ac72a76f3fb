"""What stands around `tx.update` where it must not: other transformations, and `cast_fn`.

Nothing in optax tells a transformation what is around it. The call stack does, while the step is traced.
"""

import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jamp._dtypes import FLOAT32
from jamp._warnings import warn_user
from jamp.transforms._cast_fn import CastFunction
from jamp.transforms._labels import is_labelling
from jamp.transforms._scopes import is_disabled

_CHAIN = optax.chain(optax.identity()).update.__code__  # pyright: ignore[reportAttributeAccessIssue]

# Transformations without moments that depend on how large gradients are.
_NOT_LINEAR = {
    "add_decayed_weights", "add_noise", "adaptive_grad_clip", "apply_every", "clip", "clip_by_block_rms",
    "clip_by_global_norm", "normalize_by_update_norm", "per_example_global_norm_clip", "scale_by_sign", "sign_sgd",
    "scale_by_trust_ratio", "unitwise_clip", "zero_nans",
}  # fmt: skip

_IN_CAST_FN = (
    "An optimizer runs inside of a function that `cast_fn` made. jamp's own update stays in float32, but not what is "
    "around it: `optax.apply_updates`, moving averages, other links of an `optax.chain`. Cast the model and not the "
    "step:\n"
    "    apply_fn = jamp.cast_fn(model.apply, {policy!r})\n"
    "    @jax.jit\n"
    "    def train_step(params, opt_state, batch): ...  # calls apply_fn"
)


def check_surroundings(scales: bool) -> None:
    """Refuses transformations around the update of `loss_scaled` that see scaled gradients; warns of `cast_fn`.

    Args:
        scales: Whether gradients are multiplied by a scale; without one they may be clipped before.
    """
    for frame in _callers():
        if frame.f_code is optax.MultiSteps.update.__code__:
            raise ValueError(
                "optax.MultiSteps(loss_scaled(…), k) accumulates scaled gradients, and never recovers from an "
                "overflow. Accumulate inside: jamp.loss_scaled(scale, inner=optax.MultiSteps(tx, k))."
            )
        if scales and frame.f_code.co_qualname == "apply_if_finite.<locals>.update":
            raise ValueError(
                "optax.apply_if_finite(loss_scaled(…), n) keeps overflows from the loss scale, which then never backs "
                "off. jamp skips such steps itself: leave `apply_if_finite` away. To stop after n of them in a row, "
                "write jamp.loss_scaled(scale, inner, abort_after=n), or jamp.mixed_precision(…, abort_after=n)."
            )
        if frame.f_code is _CHAIN:
            _check_links_before(frame.f_locals, scales)
    _warn_inside_cast_fn()


def warn_inside_cast_fn() -> None:
    """Warns if the caller runs in a function that `cast_fn` casts to half precision, unless a `loss_scaled` does."""
    if not any(frame.f_code.co_qualname.startswith("loss_scaled_for.") for frame in _callers()):
        _warn_inside_cast_fn()


def _warn_inside_cast_fn() -> None:
    if is_disabled() or is_labelling():
        return
    for frame in _callers():
        if frame.f_code is CastFunction.__call__.__code__ and frame.f_locals["self"].policy.compute_dtype != FLOAT32:
            warn_user(_IN_CAST_FN.format(policy=str(frame.f_locals["self"].policy)))
            return


def _check_links_before(chain: dict[str, Any], scales: bool) -> None:
    done = len(chain["new_state"])
    before = zip(chain["update_fns"][:done], chain["state"][:done], strict=True)
    for position, (update_fn, state) in enumerate(before):
        name = _name(update_fn)
        if _has_moments(state) or (scales and name in _NOT_LINEAR):
            what = f"`optax.{name}`" if name in _NOT_LINEAR else f"link {position} ({type(state).__name__})"
            raise ValueError(
                f"In this optax.chain {what} comes before jamp's loss scaling, and so works on gradients that are "
                "scaled, and on those that are not finite. Put the scaling first or, better, around it: "
                "jamp.loss_scaled(scale, inner=optax.chain(…)), jamp.mixed_precision(optax.chain(…), policy)."
            )


def _name(update_fn: Any) -> str:
    """The function of optax that made a transformation, seen through `optax.with_extra_args_support`."""
    inner = inspect.getclosurevars(update_fn).nonlocals.get("tx") if inspect.isfunction(update_fn) else None
    if isinstance(inner, optax.GradientTransformation):
        return _name(inner.update)
    return getattr(update_fn, "__qualname__", "").partition(".")[0]


def _has_moments(state: Any) -> bool:
    """Whether a transformation has arrays of floats for a state: momenta, second moments, averages, accumulators."""
    state = getattr(state, "inner_state", state)  # Of `inject_hyperparams`, whose rates are floats too.
    return any(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in jax.tree.leaves(state))


def _callers() -> Iterator[FrameType]:
    frame = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back
