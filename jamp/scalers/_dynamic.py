"""A loss scale that grows while gradients are finite and backs off when they are not."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jamp._calls import explains, unknown_arguments
from jamp._compat import checkpoint_name
from jamp._dtypes import short_repr
from jamp.scalers import _base
from jamp.scalers._base import register_scaler, replace_leaves, scale_tree, static_field, unscale_tree
from jamp.scalers._constant import warn_if_constant
from jamp.scalers._names import ELSEWHERE
from jamp.scalers._noop import NoOpLossScale
from jamp.scalers._presets import preset_arguments
from jamp.scalers._state_dict import read_state_dict, write_state_dict
from jamp.scalers._static import StaticLossScale

T = TypeVar("T")

_REFILLS = ("growth", "finite", "backoff")


@explains("jamp.DynamicLossScale(2.0**15, period=2000)", ELSEWHERE)
@register_scaler
@dataclass(frozen=True)
class DynamicLossScale:
    """Looks for the largest loss scale at which gradients stay finite.

    After `period` finite steps in a row the scale is multiplied by `factor`. When gradients are not finite it is
    multiplied by `backoff_factor`, and the count of finite steps starts again. The rule is that of Micikevicius et
    al., "Mixed Precision Training" (2018), section 3.2; names and order of the arguments are those of jmp.

    Args:
        loss_scale: The first scale: positive number or scalar array of any dtype; 2**15 by default. A float32
            leaf.
        counter: Finite steps since the scale last changed, or since the last overflow. An int32 leaf.
        period: Finite steps before the scale grows; at least 1.
        factor: By how much it grows; more than 1.
        min_loss_scale: The scale does not back off below it; may be less than 1. None or 0 stands for no limit but
            that of float32, 2**-126: a scale of zero would never recover.
        backoff_factor: By how much it backs off; between 0 and 1. None is `1 / factor`.
        max_loss_scale: The scale does not grow above it. None stands for no limit but that of float32, 2**126: the
            reciprocal of a larger scale would be flushed to zero, and with it all gradients.
        hysteresis: The overflow that makes the scale back off: with 2 the first is forgiven. What has been used up
            stays so until the next refill.
        hysteresis_refill: What forgives again. "growth": growth of the scale (DeepSpeed, Megatron). "finite": any
            finite step, so that only overflows in a row count (DeepSpeed's `consecutive_hysteresis`). "backoff": any
            finite step, and backing off itself (Paddle's `decr_every_n_nan_or_inf`).
        delayed: Whether a new scale waits for one more step before it is used (MXNet).
        overflows: Overflows since the last refill. An int32 leaf, None where `hysteresis` is 1.
        next_loss_scale: The scale that waits. A float32 leaf, None unless `delayed`.

    Raises:
        ValueError: If a value is impossible: a scale that is not positive and finite or lies outside of the limits,
            a period under 1, a factor that does not grow, a backoff that does not shrink, limits that cross.
        TypeError: If a setting is a traced value or the scale is no number.

    Example:
        >>> import jamp, jax.numpy as jnp
        >>> scaler = jamp.DynamicLossScale(2.0**15, period=2)
        >>> scaler = scaler.adjust(jnp.array(True)).adjust(jnp.array(True))
        >>> scaler.loss_scale, scaler.adjust(jnp.array(False)).loss_scale
        (Array(65536., dtype=float32), Array(32768., dtype=float32))
    """

    loss_scale: jax.Array = 2.0**15  # type: ignore[assignment]  # `__post_init__` makes arrays of both.
    counter: jax.Array = 0  # type: ignore[assignment]
    period: int = static_field(default=2000)
    factor: float = static_field(default=2)
    min_loss_scale: float | None = static_field(default=1.0)
    backoff_factor: float | None = static_field(default=None, kw_only=True)
    max_loss_scale: float | None = static_field(default=2.0**24, kw_only=True)
    hysteresis: int = static_field(default=1, kw_only=True)
    hysteresis_refill: Literal["growth", "finite", "backoff"] = static_field(default="growth", kw_only=True)
    delayed: bool = static_field(default=False, kw_only=True)
    overflows: jax.Array | None = field(default=None, kw_only=True)
    next_loss_scale: jax.Array | None = field(default=None, kw_only=True)

    if TYPE_CHECKING:  # The fields' types are what one reads; the constructor takes more.

        def __init__(
            self,
            loss_scale: ArrayLike = 2.0**15,
            counter: ArrayLike = 0,
            period: float = 2000,
            factor: float = 2,
            min_loss_scale: float | None = 1.0,
            *,
            backoff_factor: float | None = None,
            max_loss_scale: float | None = 2.0**24,
            hysteresis: float = 1,
            hysteresis_refill: Literal["growth", "finite", "backoff"] = "growth",
            delayed: bool = False,
            overflows: ArrayLike | None = None,
            next_loss_scale: ArrayLike | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        # Not through `__setattr__`, which a frozen dataclass forbids.
        self.__dict__.update(_checked_settings(self))
        self.__dict__.update(_checked_leaves(self))

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> Self:
        """The loss-scaling schedule of another framework, step for step.

        Args:
            name: "pytorch", "paddle", "mindspore", "mxnet", "megengine", "apex", "keras", "deepspeed" or "megatron".
            **overrides: Arguments of `DynamicLossScale` that replace those of the preset.

        Returns:
            A scaler. Where the framework lets the scale fall to zero or grow to infinity, this one stops at 2**-126
            and 2**126.

        Raises:
            ValueError: If the name is unknown, or an override is.

        Example:
            >>> import jamp
            >>> jamp.DynamicLossScale.preset("deepspeed").hysteresis
            2
        """
        known = [f.name for f in fields(cls)]
        if set(overrides) - set(known):
            told = unknown_arguments(overrides, known, ELSEWHERE)
            raise ValueError(f"No arguments of DynamicLossScale: {told} Expected are {', '.join(known)}.")
        return cls(**preset_arguments(name) | overrides)

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, Any], format: str | None = None
    ) -> "DynamicLossScale | StaticLossScale | NoOpLossScale":
        """The scaler out of a dict that `to_state_dict` or the scaler of another framework saved.

        Args:
            state: What `state_dict()` of `torch.amp.GradScaler`, `paddle.amp.GradScaler` or
                `megengine.amp.GradScaler` returned. Numbers may be arrays or tensors of one element.
            format: "pytorch", "paddle", "megengine" or "jamp". None tells it from the keys.

        Returns:
            The scaler, with the limits of that framework, which has none. A dict that says that the scale does not
            adapt gives a `StaticLossScale`, and the empty dict of a disabled scaler a `NoOpLossScale`.

        Raises:
            ValueError: If the keys are not those of the format, or the format is unknown.
            TypeError: If `state` is no dict.

        Example:
            >>> import jamp
            >>> saved = {"scale": 1024.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000,
            ...          "_growth_tracker": 7}
            >>> jamp.DynamicLossScale.from_state_dict(saved, format="pytorch").counter
            Array(7, dtype=int32)
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"`state` is {short_repr(state)}: expected the dict that `state_dict()` returned.")
        if not state:
            return NoOpLossScale()
        arguments = read_state_dict(state, format)
        dynamic = arguments.pop("dynamic", True)
        if not dynamic or arguments["period"] == 0:
            return StaticLossScale(arguments["loss_scale"])
        return cls(**arguments)

    def to_state_dict(self, format: str = "jamp") -> dict[str, Any]:
        """A dict of Python values, fit for JSON, that another framework's scaler can load.

        Args:
            format: "pytorch", "paddle" or "megengine", whose scalers have no limits, so that these are not written;
                or "jamp", which holds everything.

        Returns:
            The dict.

        Raises:
            ValueError: If the format is unknown, or has no words for how this scaler adapts.

        Example:
            >>> import jamp
            >>> jamp.DynamicLossScale(1024.0).to_state_dict(format="megengine")["scale_factor"]
            1024.0
        """
        return write_state_dict({f.name: getattr(self, f.name) for f in fields(self)}, format)

    def scale(self, tree: T) -> T:
        """Multiplies the floating leaves, those narrower than float32 as float32; leaves the others as they are."""
        warn_if_constant(self.loss_scale)
        return scale_tree(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divides the floating leaves, those narrower than float32 as float32; leaves the others as they are."""
        return unscale_tree(tree, self.loss_scale)

    @explains("scaler.adjust(jamp.all_finite(grads))")
    def adjust(self, grads_finite: ArrayLike) -> Self:
        """The scaler of the next step.

        Args:
            grads_finite: Whether all gradients of this step were finite: boolean scalar, from `jamp.all_finite`.

        Returns:
            A scaler of the same structure and dtypes, without asking the device.

        Raises:
            ValueError: If `grads_finite` is no boolean scalar.
        """
        adjusted = lax.cond(_base.as_flag(grads_finite), _after_finite, _after_overflow, self)
        return replace_leaves(adjusted, loss_scale=checkpoint_name(adjusted.loss_scale, _base.ADJUSTED_NAME))

    def set(self, loss_scale: Any) -> Self:
        """The scaler with another scale, its counts as they are.

        Args:
            loss_scale: Positive number or scalar array within the limits; traced values are clipped to them.

        Raises:
            ValueError: If the scale is impossible or outside of the limits.
        """
        scale = _checked_scale(loss_scale, "loss_scale", self)
        return replace_leaves(self, loss_scale=scale, next_loss_scale=jnp.copy(scale) if self.delayed else None)


def _after_finite(s: DynamicLossScale) -> DynamicLossScale:
    scale, counter = _decided_scale(s), s.counter + 1
    grows = s.counter >= s.period - 1  # The sum may be more than int32 holds.
    grown = _within_limits(s, scale * s.factor)
    overflows = s.overflows
    if overflows is not None:
        refilled = jnp.zeros_like(overflows)
        overflows = jnp.where(grows, refilled, overflows) if s.hysteresis_refill == "growth" else refilled
    return _decide(s, jnp.where(grows, grown, scale), counter=jnp.where(grows, 0, counter), overflows=overflows)


def _after_overflow(s: DynamicLossScale) -> DynamicLossScale:
    scale, counter = _decided_scale(s), jnp.zeros_like(s.counter)
    shrunk = _within_limits(s, scale * (s.backoff_factor or 1 / s.factor))
    if s.overflows is None:
        return _decide(s, shrunk, counter=counter)
    overflows = jnp.minimum(s.overflows, s.hysteresis - 1) + 1
    backs_off = overflows >= s.hysteresis
    scale = jnp.where(backs_off, shrunk, scale)
    if s.hysteresis_refill == "backoff":
        overflows = jnp.where(backs_off, 0, overflows)
    return _decide(s, scale, counter=counter, overflows=overflows)


def _decided_scale(s: DynamicLossScale) -> jax.Array:
    """The scale that was decided last, which a delayed scaler does not use yet."""
    return s.loss_scale if s.next_loss_scale is None else s.next_loss_scale


def _decide(s: DynamicLossScale, scale: jax.Array, **counts: Any) -> DynamicLossScale:
    if s.delayed:
        return replace_leaves(s, loss_scale=s.next_loss_scale, next_loss_scale=scale, **counts)
    return replace_leaves(s, loss_scale=scale, **counts)


def _within_limits(s: DynamicLossScale, scale: jax.Array) -> jax.Array:
    return jnp.clip(scale, s.min_loss_scale, s.max_loss_scale)


def _checked_settings(s: DynamicLossScale) -> dict[str, Any]:
    """The static fields as Python numbers, without None for a limit."""
    number = _base.as_static
    low = _base.SMALLEST_SCALE if s.min_loss_scale is None else number(s.min_loss_scale, "min_loss_scale")
    high = _base.LARGEST_SCALE if s.max_loss_scale is None else number(s.max_loss_scale, "max_loss_scale")
    factor = number(s.factor, "factor")
    backoff = None if s.backoff_factor is None else number(s.backoff_factor, "backoff_factor")
    _require(1 < factor < math.inf, "factor", factor, "a finite number above 1, by which the scale grows")
    _require(backoff is None or 0 < backoff < 1, "backoff_factor", backoff, "a number between 0 and 1, such as 0.5")
    _require(0 <= low < math.inf, "min_loss_scale", low, "a number that is finite and not negative")
    _require(low <= high, "max_loss_scale", high, f"at least min_loss_scale, which is {low}")
    _require(isinstance(s.delayed, bool | np.bool_), "delayed", s.delayed, "True or False")
    _require(s.hysteresis_refill in _REFILLS, "hysteresis_refill", s.hysteresis_refill, f"one of {_REFILLS}")
    return {
        # Growth intervals beyond int32 are how users of other frameworks say "never".
        "period": min(_whole(number(s.period, "period"), "period"), _base.LARGEST_COUNT),
        "factor": factor,
        "backoff_factor": backoff,
        "min_loss_scale": max(low, _base.SMALLEST_SCALE),
        "max_loss_scale": min(high, _base.LARGEST_SCALE),
        "hysteresis": min(_whole(number(s.hysteresis, "hysteresis"), "hysteresis"), _base.LARGEST_COUNT),
        "delayed": bool(s.delayed),
    }


def _checked_leaves(s: DynamicLossScale) -> dict[str, Any]:
    """The leaves as strongly typed arrays; None for those that the settings do not need."""
    scale = _checked_scale(s.loss_scale, "loss_scale", s)
    overflows = 0 if s.overflows is None else s.overflows
    # A copy: a train step that donates the scaler could not donate one array twice.
    waiting = jnp.copy(scale) if s.next_loss_scale is None else _checked_scale(s.next_loss_scale, "next_loss_scale", s)
    return {
        "loss_scale": scale,
        "counter": _base.as_count(s.counter, "counter"),
        "overflows": _base.as_count(overflows, "overflows") if s.hysteresis > 1 else None,
        "next_loss_scale": waiting if s.delayed else None,
    }


def _checked_scale(value: Any, name: str, s: DynamicLossScale) -> jax.Array:
    scale = _base.as_scale(value, name)
    if _base.is_traced(scale):
        return _within_limits(s, scale)
    low, high = np.float32(s.min_loss_scale), np.float32(s.max_loss_scale)
    limits = f"within [min_loss_scale, max_loss_scale], which is [{low}, {high}]; None stands for no limit"
    _require(bool(low <= np.float32(scale) <= high), name, float(scale), limits)
    return scale


def _whole(value: float, name: str) -> int:
    _require(value >= 1 and value % 1 == 0, name, value, "a whole number of steps, 1 or more")
    return int(value)


def _require(condition: bool, name: str, value: Any, expected: str) -> None:
    if not condition:
        raise ValueError(f"`{name}` is {value!r}: expected {expected}.")
