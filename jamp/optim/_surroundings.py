"""What stands around `tx.update` where it must not: other transformations, and `cast_fn`.

Nothing in optax tells a transformation what is around it. The call stack does, while the step is traced.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jamp._dtypes import FLOAT32
from jamp._warnings import warn_user
from jamp.optim._degrees import is_known
from jamp.optim._provenance import provenance
from jamp.scalers import LossScale, NoOpLossScale
from jamp.transforms._cast_fn import CastFunction
from jamp.transforms._labels import is_labelling
from jamp.transforms._scopes import is_disabled


def _code(tx: Any) -> CodeType:
    return tx.update.__code__


_CHAIN = _code(optax.chain(optax.identity()))
_NAMED_CHAIN = _code(optax.named_chain(("identity", optax.identity())))
_MASKED_UPDATE = _code(optax.masked(optax.identity(), True))
_PARTITION = _code(optax.partition({}, True))

# Transformations without moments that depend on how large gradients are.
_NOT_LINEAR = {
    "add_decayed_weights", "add_noise", "adaptive_grad_clip", "apply_every", "clip", "clip_by_block_rms",
    "clip_by_global_norm", "normalize_by_update_norm", "per_example_global_norm_clip", "scale_by_sign", "sign_sgd",
    "scale_by_trust_ratio", "unitwise_clip", "zero_nans",
}  # fmt: skip

_LEFT_OUT = (
    "The gradients {paths} stay multiplied by the loss scale, because this optimizer is for others alone: their steps "
    "are too large by that factor (32,768 at first). Choose inside of the scaling, where all gradients are true:\n"
    "    tx = jamp.mixed_precision(optax.partition({{'a': one, 'b': other}}, labels), policy)\n"
    "    tx = jamp.mixed_precision(optax.masked(optimizer, mask), policy)"
)

# They return the updates of a step, or zeros or gradients in their place, which are arrays.
_CHOOSES = {
    "apply_if_finite.<locals>.update": "apply_if_finite",
    "conditionally_transform.<locals>.update_fn": "conditionally_transform",
    "conditionally_mask.<locals>.update_fn": "conditionally_mask",
}

_CHOOSES_AROUND = (
    "`optax.{name}` is around `jamp.{wrapper}` and chooses between the updates of a step and arrays in their place. "
    "Updates of half-precision parameters are `jamp.optim.ExactUpdate`s and no arrays, so that both branches differ. "
    "Choose inside, among float32 updates; the parameters and the state come out the same:\n"
    "    tx = jamp.{wrapper}(optax.{name}(optimizer, …), …)"
)

_IN_CAST_FN = (
    "An optimizer runs inside of a function that `cast_fn` made. jamp's own update stays in float32, but not what is "
    "around it: `optax.apply_updates`, moving averages, other links of an `optax.chain`. Cast the model and not the "
    "step:\n"
    "    apply_fn = jamp.cast_fn(model.apply, {policy!r})\n"
    "    @jax.jit\n"
    "    def train_step(params, opt_state, batch): ...  # calls apply_fn"
)


def check_surroundings(scaler: LossScale, is_loss_scaled: Callable[[Any], bool]) -> None:
    """Refuses transformations around the update of `loss_scaled` that see scaled gradients, or warns of them.

    Args:
        scaler: The loss scale in the state; where it scales nothing, gradients may be clipped before.
        is_loss_scaled: Whether an object is the state of a `loss_scaled`.
    """
    scales = not isinstance(scaler, NoOpLossScale)
    left_out: list[Any] = []
    zeroes = False
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
        before, after = _links(frame)
        _check_links_before(before, scales)
        zeroes = zeroes or any(sets_to_zero(update_fn) for update_fn, _ in before + after)
        if frame.f_code is _MASKED_UPDATE:
            left_out.append(_left_out_by_mask(frame.f_locals))
        elif frame.f_code is _PARTITION:
            left_out[-1:] = [_left_out_by_group(frame.f_locals, is_loss_scaled)]  # It masks for each group.
    if scales and not zeroes and (paths := _scaled(left_out, scaler)):
        warn_user(_LEFT_OUT.format(paths=", ".join(paths[:3])))
    _warn_inside_cast_fn()


def check_nothing_chooses(wrapper: str, exact: Iterable[bool]) -> None:
    """Refuses transformations of optax around a wrapper that take its updates for arrays.

    Args:
        wrapper: The name of the wrapper.
        exact: For each parameter, whether its update is no array.
    """
    if not any(exact):
        return
    for frame in _callers():
        name = _CHOOSES.get(frame.f_code.co_qualname)
        if name and frame.f_globals.get("__name__", "").startswith("optax."):
            raise ValueError(_CHOOSES_AROUND.format(name=name, wrapper=wrapper))


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


Link = tuple[Callable[..., Any], Any]  # The update function of a transformation, and its state.


def _links(frame: FrameType) -> tuple[list[Link], list[Link]]:
    """The transformations before and after the one that runs, if a frame is that of a chain."""
    if frame.f_code not in (_CHAIN, _NAMED_CHAIN):
        return [], []  # Without a look at its variables: Python keeps them alive for as long as the frame lives.
    chain = frame.f_locals
    if frame.f_code is _CHAIN:
        links = list(zip(chain["update_fns"], chain["state"], strict=True))
    else:
        links = [(tx.update, chain["state"][name]) for name, tx in chain["transforms"]]
    done = len(chain["new_state"])
    return links[:done], links[done + 1 :]


def _check_links_before(before: list[Link], scales: bool) -> None:
    for position, (update_fn, state) in enumerate(before):
        name = _name(update_fn)
        if _has_moments(state) or (scales and name in _NOT_LINEAR):
            what = f"`optax.{name}`" if name in _NOT_LINEAR else f"link {position} ({type(state).__name__})"
            raise ValueError(
                f"In this optax.chain {what} comes before jamp's loss scaling, and so works on gradients that are "
                "scaled, and on those that are not finite. Put the scaling first or, better, around it: "
                "jamp.loss_scaled(scale, inner=optax.chain(…)), jamp.mixed_precision(optax.chain(…), policy)."
            )


def _left_out_by_mask(masked: dict[str, Any]) -> Any:
    """The gradients that an `optax.masked` hands on as they are, and None for the others."""
    # A mask may be a prefix of the tree.
    return jax.tree.map(lambda chosen, part: None if chosen else part, masked["mask_tree"], masked["updates"])


def _left_out_by_group(partition: dict[str, Any], is_loss_scaled: Callable[[Any], bool]) -> Any:
    """The gradients of an `optax.partition` (`optax.multi_transform`) that other optimizers step by."""
    states = partition["state"].inner_states
    others = {
        group for group, tx in partition["transforms"].items()
        if group != partition["group"] and not sets_to_zero(tx.update)
        and not any(map(is_loss_scaled, jax.tree.leaves(states[group], is_leaf=is_loss_scaled)))
    }  # fmt: skip
    labels, updates = partition["labels"], partition["updates"]
    return jax.tree.map(lambda label, part: part if label in others else None, labels, updates)


def _scaled(left_out: list[Any], scaler: LossScale) -> list[str]:
    """The key paths of those gradients into which a loss scale went, as far as their trace tells."""
    degrees = [pair for tree in left_out for pair in provenance(tree, None, scaler.loss_scale).degrees]
    return [path for path, degree in degrees if is_known(degree) and (degree.powers or degree.fault)]


def sets_to_zero(update_fn: Any) -> bool:
    """Whether a transformation freezes parameters, all or some of them."""
    if _name(update_fn) == "set_to_zero":
        return True
    around = inspect.getclosurevars(update_fn).nonlocals if inspect.isfunction(update_fn) else {}
    steps = getattr(getattr(update_fn, "__self__", None), "inner_opt", None)  # Of `optax.MultiSteps`.
    inner = [steps, around.get("inner"), around.get("tx"), *dict(around.get("transforms") or {}).values()]
    updates = [tx.update for tx in inner if isinstance(tx, optax.GradientTransformation)]
    return any(map(sets_to_zero, [*updates, *(around.get("update_fns") or ())]))


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
