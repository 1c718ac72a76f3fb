"""The loss-scaling schedules of other frameworks, as arguments of `DynamicLossScale`.

Read in the sources current in 2026. `None` as a limit means that the framework has none.
"""

from typing import Any

from jamp._dtypes import close_matches

_UNLIMITED = {"min_loss_scale": None, "max_loss_scale": None}
_DOUBLE_AND_HALVE = {"period": 2000, "factor": 2.0, "backoff_factor": 0.5} | _UNLIMITED

PRESETS: dict[str, dict[str, Any]] = {
    # torch.amp.GradScaler. Growth to infinity is refused since pytorch#98876.
    "pytorch": _DOUBLE_AND_HALVE | {"loss_scale": 2.0**16},
    # paddle.amp.GradScaler. `hysteresis` is its decr_every_n_nan_or_inf, which counts anew after every decrease.
    "paddle": _DOUBLE_AND_HALVE | {"loss_scale": 2.0**16, "hysteresis": 1, "hysteresis_refill": "backoff"},
    # mindspore.amp.DynamicLossScaleManager.
    "mindspore": _DOUBLE_AND_HALVE | {"loss_scale": 2.0**24, "min_loss_scale": 1.0},
    # mxnet.amp. A step still runs at the scale before the one that was decided last (`_next_loss_scale`).
    "mxnet": _DOUBLE_AND_HALVE | {"loss_scale": 2.0**16, "max_loss_scale": 2.0**24, "delayed": True},
    # megengine.amp.GradScaler.
    "megengine": _DOUBLE_AND_HALVE | {"loss_scale": 2.0**4},
    # apex.amp.initialize(loss_scale="dynamic").
    "apex": _DOUBLE_AND_HALVE | {"loss_scale": 2.0**16, "max_loss_scale": 2.0**24},
    # keras.optimizers.LossScaleOptimizer of Keras 3.
    "keras": _DOUBLE_AND_HALVE | {"loss_scale": 2.0**15},
    # The defaults of DeepSpeed's "fp16" section. `hysteresis_refill="finite"` is its consecutive_hysteresis. Newer
    # versions wait one finite step longer before the first growth after an overflow.
    "deepspeed": _DOUBLE_AND_HALVE | {"loss_scale": 2.0**16, "period": 1000, "min_loss_scale": 1.0, "hysteresis": 2},
    # Megatron-LM's DynamicGradScaler with the defaults of its arguments.
    "megatron": _DOUBLE_AND_HALVE | {"loss_scale": 2.0**32, "period": 1000, "min_loss_scale": 1.0, "hysteresis": 2},
}


def preset_arguments(name: str) -> dict[str, Any]:
    """The arguments of a preset."""
    if name not in PRESETS:
        hint = close_matches(str(name), PRESETS)
        raise ValueError(f"Unknown preset {name!r}: expected one of {', '.join(PRESETS)}.{hint}")
    return PRESETS[name]
