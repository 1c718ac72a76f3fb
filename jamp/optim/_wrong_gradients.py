"""Gradients that were not made for the optimizer that gets them: what their trace tells, and what to write instead."""

from collections.abc import Hashable
from fractions import Fraction
from typing import Any

import jax

from jamp._compat import jit_tracer, mapped_axes, varying_axes
from jamp._tree import AxisName
from jamp._warnings import warn_user
from jamp.optim._degree_rules import Origin
from jamp.optim._degrees import Fault, is_known
from jamp.optim._inputs import STEP
from jamp.optim._provenance import Provenance, cast_dtypes, provenance
from jamp.policy import Policy
from jamp.scalers import DynamicLossScale, LossScale, NoOpLossScale
from jamp.scalers._base import is_traced
from jamp.scalers._constant import is_compiled_here

_DIFFERENTIATE = STEP + "\n"

_NOT_SCALED = (
    "`tx.update` divides these gradients by the loss scale in `opt_state`, and they were never multiplied by it: steps "
    "are too small by that factor ({factor}), or wrong by what the scale has changed since. Differentiate "
    "inside of the step, with the state that goes to `tx.update`:\n" + _DIFFERENTIATE
    + "For Flax NNX add transform=nnx.value_and_grad, for Equinox transform=eqx.filter_value_and_grad."
)  # fmt: skip

_SCALED_BEFORE = (
    "These gradients are multiplied by the loss scale of before this loop, and `tx.update` divides them by the one "
    "that the loop carries: after two overflows steps are 4 times too large. Differentiate in the body of the loop, "
    "with the state that goes to `tx.update`:\n" + STEP
)

_SCALED_BY_ANOTHER = (
    "These gradients are multiplied by another loss scale than the one in this `opt_state`: that of an earlier step, "
    "or of another optimizer. As soon as the two differ, steps are wrong by their ratio. Differentiate with the state "
    "that goes to `tx.update`:\n" + _DIFFERENTIATE
    + "Optimizers that share gradients stay in step by the flags of all of them: tx.update(…, grads_finite=flag)."
)  # fmt: skip

_OTHER_POWER = (
    "These gradients are proportional to the power {power} of the loss scale, and `tx.update` divides them by the "
    "scale itself: the loss was scaled more than once, or they went through a square, a root or a product. Write\n"
    + _DIFFERENTIATE
    + "and let `loss_fn` return the loss as it is."
)

_SCALED_IN_PART = (
    "Only a part of these gradients is multiplied by the loss scale{where}, and `tx.update` divides all of them by it: "
    "the rest, such as a penalty, a second loss or a weight decay, counts too little by that factor ({factor}). "
    "Put everything into the loss that jamp.scaled_value_and_grad differentiates, or multiply the rest, too: "
    "jamp.loss_scale(opt_state).scale(rest). Weight decay belongs into the optimizer: optax.adamw(…)."
)

_CLIPPED = (
    "These gradients were clipped, or compared with a number, while they were multiplied by the loss scale: the number "
    "is too small for them by that factor ({factor}). Clip in the optimizer, which sees true gradients:\n"
    "    tx = jamp.mixed_precision(optax.chain(optax.clip_by_global_norm(1.0), optimizer), policy)\n"
    "or by hand with the state that they were made with:\n"
    "    grads = jamp.clip_by_global_norm(grads, 1.0, opt_state)\n"
    "Compare other numbers with jamp.global_norm(grads, opt_state), or multiply them by jamp.scale_value(opt_state)."
)

_NOT_LINEAR = (
    "These gradients went through a function that is not linear, such as tanh, while they were multiplied by the loss "
    "scale: it acts on numbers that are too large by that factor ({factor}). Unscale before, and scale again:\n"
    "    scaler = jamp.loss_scale(opt_state)\n"
    "    grads = scaler.scale(jax.tree.map(jnp.tanh, scaler.unscale(grads)))"
)

_HIDDEN = (
    "Infinities and NaNs in these gradients were replaced by numbers (jnp.nan_to_num, or jnp.where with jnp.isfinite). "
    "They are how `tx.update` knows that the loss scale is too large: it skips such a step, and takes a smaller scale "
    "for the next one. Here it would make steps of garbage, and keep the scale. Leave them in the gradients."
)

_NEVER_UNSCALED = (
    "These gradients are multiplied by a loss scale, and this optimizer has none, so that nothing divides by it: steps "
    "are too large by that factor. jamp.value_and_grad unscales by itself; or give the optimizer a scale:\n"
    "    tx = jamp.mixed_precision(optimizer, policy, loss_scale='dynamic')"
)

_UNSCALED_TWICE = (
    "These gradients hold the loss scale no more, and `tx.update` divides them by it once more: they are unscaled "
    "already, or divided by a norm of their own, and steps are too small by that factor ({factor}). Here write\n"
    + _DIFFERENTIATE
    + "and leave it to `tx.update` to unscale. jamp.value_and_grad is for training without jamp's optimizers. "
    "Gradients of a size of your own need the scale: jamp.loss_scale(opt_state).scale(grads)."
)

_NOT_AVERAGED = (
    "On the mapped axis {axis!r} each device has gradients, and so overflows, of its own: their loss scales will "
    "drift apart, and some will skip steps that others do. Average the gradients before `tx.update`:\n"
    "    grads = jamp.average_gradients(grads, {axis!r})\n"
    "or let the devices agree: jamp.mixed_precision(inner, policy, axis_name={axis!r}). Devices that train models of "
    "their own need no name for the axis."
)

_OTHER_POLICY = (
    "These gradients went through float16 in a `cast_fn`, and the optimizer was made for {policy!r}, which has no loss "
    "scale: small gradients become zero. Write the policy once:\n"
    "    amp = jamp.MixedPrecision('O2:float16', optimizer)\n"
    "    apply_fn, tx = amp.cast_fn(model.apply), amp.tx\n"
    "Without a scale on purpose, say so: jamp.mixed_precision(…, loss_scale=jamp.NoOpLossScale())."
)

_OTHER_SCALER = (
    "The optimizer was made with a {made}, and its state has none: it comes from a run without loss scaling, "
    "and small float16 gradients become zero. Give it one:\n"
    "    opt_state = jamp.set_loss_scale(opt_state, jamp.DynamicLossScale())"
)


def warn_of_gradients(
    grads: Any,
    params: Any,
    scaler: LossScale,
    made_with: LossScale,
    axis_name: AxisName | None,
    policy: Policy | None,
    in_step: bool,
) -> None:
    """Warns of gradients that were not made for this optimizer, as far as their trace tells.

    Args:
        grads: What `tx.update` got.
        params: The parameters, or None.
        scaler: The loss scale in the state.
        made_with: The loss scale that the optimizer was made with.
        axis_name: The axes over which devices agree.
        policy: The policy that chose `made_with`; None where the caller chose it.
        in_step: Whether the caller gave `grads_finite`, by which several optimizers skip together.
    """
    scales = not isinstance(scaler, NoOpLossScale)
    if not scales and not isinstance(made_with, NoOpLossScale):
        warn_user(_OTHER_SCALER.format(made=type(made_with).__name__))
        return
    if not any(_is_traced_here(x) for x in jax.tree.leaves(grads)):
        return
    found = provenance(grads, params, scaler.loss_scale)
    message = _of_degrees(found, scaler, made_with, in_step) if scales else _of_no_scale(found)
    if message:
        warn_user(message.replace("{factor}", _factor(made_with)))
    if _is_dynamic(scaler) and (axis := _disagreeing_axis(grads, params, found, axis_name)):
        warn_user(_NOT_AVERAGED.format(axis=axis))
    if policy and not scales and "float16" in cast_dtypes(grads):
        warn_user(_OTHER_POLICY.format(policy=str(policy)))


def _of_degrees(found: Provenance, scaler: LossScale, made_with: LossScale, in_step: bool) -> str | None:
    """What is wrong with gradients that are to be proportional to the scale of the state."""
    known = [(path, degree) for path, degree in found.degrees if is_known(degree)]
    faults = {degree.fault for _, degree in known}
    powers = {degree.powers for _, degree in known}
    if not all(_is_clear(scale) for degree in powers for scale, _ in degree) or not _is_clear(found.scale):
        return None
    for fault, message in _OF_FAULTS.items():
        if fault in faults:
            return message.replace("{where}", " (in one branch alone)" if fault is Fault.BRANCH else "")
    if len(powers) > 1:
        bare = [path for path, degree in known if not degree.powers]
        return _SCALED_IN_PART.replace("{where}", f" (not {', '.join(bare[:3])})" if bare else "")
    if not powers or (of := dict(powers.pop())) == {found.scale: 1}:
        return None
    if of:
        return _of_other_scale(of, found, scaler, in_step)
    if found.scales:
        return _UNSCALED_TWICE
    number = None if isinstance(scaler, DynamicLossScale) else _number(made_with)
    by_hand = number is not None and not found.numbers.isdisjoint({number, 1 / number})
    return _NOT_SCALED if found.differentiated and not by_hand else None


_OF_FAULTS = {
    Fault.SUM: _SCALED_IN_PART,
    Fault.CHOICE: _CLIPPED,
    Fault.BRANCH: _SCALED_IN_PART,
    Fault.FUNCTION: _NOT_LINEAR,
    Fault.HIDDEN: _HIDDEN,
}


def _is_clear(scale: Hashable) -> bool:
    """Whether it is known what a scale is: not one that was computed, which may be equal to another."""
    return isinstance(scale, float) or (isinstance(scale, Origin) and scale.kind != "computed")


def _of_other_scale(of: dict[Hashable, Fraction], found: Provenance, scaler: LossScale, in_step: bool) -> str | None:
    """What is wrong with gradients that are proportional to something else than the scale of the state."""
    (scale, power), *others = of.items()
    if others or power != 1:
        return _OTHER_POWER.replace("{power}", str(sum(of.values())))
    if isinstance(scale, float):  # A number that was known when the step was traced.
        told = not isinstance(scaler, DynamicLossScale) or is_compiled_here()
        return None if told else _SCALED_BEFORE
    if in_step:
        return None
    before = found.scale_is_carried and isinstance(scale, Origin) and scale.kind in ("argument", "operand")
    return _SCALED_BEFORE if before else _SCALED_BY_ANOTHER


def _of_no_scale(found: Provenance) -> str | None:
    """What is wrong with gradients that nothing is going to be divided out of."""
    scaled = [degree for _, degree in found.degrees if is_known(degree) and degree.powers]
    return _NEVER_UNSCALED if scaled else None


def _factor(made_with: LossScale) -> str:
    number = _number(made_with)
    if number is None:
        return "32,768, if it has not changed"
    return f"{number:,.0f}" + (" at first" if isinstance(made_with, DynamicLossScale) else "")


def _number(scaler: LossScale) -> float | None:
    return None if is_traced(scaler.loss_scale) else float(scaler.loss_scale)


def _is_dynamic(scaler: LossScale) -> bool:
    """Whether the scale of this step is known to the state alone: a scaler in whose state the scale is traced."""
    return isinstance(scaler, DynamicLossScale) and _is_traced_here(scaler.loss_scale)


def _is_traced_here(x: Any) -> bool:
    return is_traced(jit_tracer(x))


def _disagreeing_axis(grads: Any, params: Any, found: Provenance, axis_name: AxisName | None) -> str | None:
    """The mapped axis over which gradients of this trace were differentiated, and nobody averaged them."""
    axes = mapped_axes()
    if axis_name is not None or not axes or not found.differentiated or found.averaged:
        return None
    if any(map(_is_batched, jax.tree.leaves(grads))):  # By `vmap`: devices if they share parameters, else an ensemble.
        shared = params is not None and not any(map(_is_batched, jax.tree.leaves(params)))
        return axes[0] if shared else None
    varying = [varying_axes(p) for p in jax.tree.leaves(params)]
    return None if any(axes[0] in names for names in varying) else axes[0]  # Parameters of each device's own.


def _is_batched(x: Any) -> bool:
    return jit_tracer(x) is not x
