"""What the arguments of loss scalers are called elsewhere.

In PyTorch, Flax, Keras, TensorFlow, Apex, DeepSpeed, Megatron-LM, MindSpore, MXNet, Paddle, MegEngine and mpx.
"""

from jamp._calls import called

_KINDS = "A scale that does not adapt is jamp.StaticLossScale(1024.0), and none at all jamp.NoOpLossScale()."
_CALLED = called(
    loss_scale=(
        "init_scale", "initial_scale", "initial_loss_scale", "init_loss_scale", "init_loss_scaling", "loss_scaling",
        "scale", "scale_value",
    ),
    factor=("growth_factor", "scale_factor", "incr_ratio", "multiplier", "scaling_factor"),
    backoff_factor=("decr_ratio", "backoff"),
    period=(
        "growth_interval", "scale_window", "loss_scale_window", "dynamic_growth_steps", "increment_period",
        "incr_every_n_steps",
    ),
    counter=("fin_steps", "growth_tracker", "_growth_tracker"),
    min_loss_scale=("min_scale", "minimum_scale", "min_loss_scaling"),
    max_loss_scale=("max_scale", "maximum_scale", "max_loss_scaling"),
    hysteresis=("decr_every_n_nan_or_inf", "delayed_shift"),
)  # fmt: skip

ELSEWHERE = _CALLED | {
    **dict.fromkeys(("enabled", "enable", "dynamic", "use_dynamic_loss_scaling", "dynamic_loss_scale"), _KINDS),
    "initial_scale_power": "The first scale is written as a number, such as loss_scale=2.0**16.",
    "consecutive_hysteresis": "Its word here is hysteresis_refill='finite'.",
    "device": "A scaler needs no device.",
}
