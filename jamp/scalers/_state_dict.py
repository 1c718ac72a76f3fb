"""The dicts that the loss scalers of other frameworks save, read and written.

A format is a table from the keys of the dict to the arguments of `DynamicLossScale`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

FORMATS: dict[str, dict[str, str]] = {
    "jamp": {name: name for name in (
        "loss_scale", "counter", "period", "factor", "min_loss_scale", "backoff_factor", "max_loss_scale",
        "hysteresis", "hysteresis_refill", "delayed", "overflows", "next_loss_scale")},
    "pytorch": {"scale": "loss_scale", "growth_factor": "factor", "backoff_factor": "backoff_factor",
                "growth_interval": "period", "_growth_tracker": "counter"},
    "megengine": {"scale_factor": "loss_scale", "growth_factor": "factor", "backoff_factor": "backoff_factor",
                  "growth_interval": "period", "_growth_tracker": "counter"},
    "paddle": {"scale": "loss_scale", "incr_ratio": "factor", "decr_ratio": "backoff_factor",
               "incr_every_n_steps": "period", "decr_every_n_nan_or_inf": "hysteresis", "incr_count": "counter",
               "decr_count": "overflows", "use_dynamic_loss_scaling": "dynamic"},
}  # fmt: skip


# What those scalers have without saying so.
_IMPLIED: dict[str, dict[str, Any]] = {
    "jamp": {},
    "pytorch": {"min_loss_scale": None, "max_loss_scale": None},
    "megengine": {"min_loss_scale": None, "max_loss_scale": None},
    "paddle": {"min_loss_scale": None, "max_loss_scale": None, "hysteresis_refill": "backoff"},
}


def read_state_dict(state: Mapping[str, Any], format: str | None) -> dict[str, Any]:
    """The arguments of a scaler, as Python values, out of the dict that a scaler saved."""
    format = _detect(state) if format is None else _check_format(format)
    if format == "jamp" and set(state) == {"loss_scale"}:
        return {"loss_scale": _plain(state["loss_scale"]), "period": 0}
    if set(state) != set(FORMATS[format]):
        raise ValueError(
            f"Not the dict that a loss scaler saves in the {format!r} format: expected the keys "
            f"{sorted(FORMATS[format])}, got {sorted(map(str, state))}."
        )
    return _IMPLIED[format] | {FORMATS[format][key]: _plain(value) for key, value in state.items()}


def write_state_dict(arguments: Mapping[str, Any], format: str) -> dict[str, Any]:
    """The dict of Python values in a format, out of the arguments of a scaler."""
    keys = FORMATS[_check_format(format)]
    if format != "jamp":
        arguments = _translate(arguments, format)
    return {key: _plain(arguments[name]) for key, name in keys.items()}


def write_static_dict(scale: float, format: str) -> dict[str, Any]:
    """The dict of a scale that does not adapt."""
    if _check_format(format) == "jamp":
        return {"loss_scale": scale}
    if format == "pytorch":
        raise ValueError("The 'pytorch' format cannot hold a scale that does not adapt. Write to_state_dict('jamp').")
    period = 0 if format == "megengine" else 2000  # An interval of 0 is MegEngine's word for static.
    defaults = {"factor": 2.0, "backoff_factor": 0.5, "counter": 0, "hysteresis": 1, "overflows": 0, "dynamic": False}
    arguments = {"loss_scale": scale, "period": period} | defaults
    return {key: arguments[name] for key, name in FORMATS[format].items()}


def _translate(arguments: Mapping[str, Any], format: str) -> dict[str, Any]:
    """Arguments in the terms of another framework; refuses those it has no terms for."""
    hysteresis, refill = arguments["hysteresis"], arguments["hysteresis_refill"]
    countable = hysteresis == 1 or (format == "paddle" and refill == "backoff")
    if not countable or arguments["delayed"]:
        raise ValueError(
            f"The {format!r} format cannot hold hysteresis={hysteresis}, hysteresis_refill={refill!r}, "
            f"delayed={arguments['delayed']}. Write to_state_dict('jamp')."
        )
    backoff = arguments["backoff_factor"] or 1 / arguments["factor"]
    return {**arguments, "backoff_factor": backoff, "overflows": arguments["overflows"] or 0, "dynamic": True}


def _check_format(format: str) -> str:
    if format not in FORMATS:
        raise ValueError(f"Unknown format {format!r}: expected one of {', '.join(FORMATS)}.")
    return format


def _detect(state: Mapping[str, Any]) -> str:
    if set(state) == {"loss_scale"}:
        return "jamp"
    for format, keys in FORMATS.items():
        if set(state) == set(keys):
            return format
    raise ValueError(
        f"No loss scaler saves a dict with the keys {sorted(map(str, state))}. Known are:\n"
        + "\n".join(f"  {format}: {sorted(keys)}" for format, keys in FORMATS.items())
    )


def _plain(value: Any) -> Any:
    """A Python value; arrays and tensors of one element, which is how Paddle saves its scale, become numbers."""
    return value if value is None or isinstance(value, (bool, str, int, float)) else np.asarray(value).item()
