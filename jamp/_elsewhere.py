"""What jamp's functions and classes are called in other libraries, each answered with its name here."""

from collections.abc import Iterable

from jamp._dtypes import close_matches

_NAMES = {
    "Its name here is jamp.DynamicLossScale; jamp.mixed_precision(optimizer, 'O2:float16') keeps one in its state.": (
        "GradScaler", "AmpScaler", "LossScaler", "DynamicLossScaler", "DynamicScale", "DynamicLossScaling",
        "LossScaleOptimizer", "DynamicLossScaleManager", "DynamicLossScaleUpdateCell",
    ),
    "Its name here is jamp.StaticLossScale.": ("StaticLossScaler", "FixedLossScaleManager", "StaticScale"),
    "Write jamp.cast_fn(model.apply, 'O2') for the model, jamp.mixed_precision(optimizer, 'O2') for the optimizer.": (
        "amp", "initialize", "init", "init_trainer", "decorate", "convert_model", "build_train_network",
        "auto_mixed_precision", "enable_mixed_precision_graph_rewrite", "Amp", "Autocast",
    ),
    "Write jamp.autocast(fn)(*args): here it makes a function.": ("auto_cast", "amp_auto_cast", "cast_function"),
    "Write jamp.scaled_value_and_grad(loss_fn, opt_state)(params, batch); with Equinox "
    "transform=eqx.filter_value_and_grad.": ("scale_loss", "filter_value_and_grad", "filter_grad"),
    "A policy is an argument, jamp.cast_fn(fn, policy), because JAX has no global mode.": (
        "set_policy", "set_global_policy", "set_global_dtype_policy", "global_policy",
    ),
    "Its name here is jamp.full_precision.": ("force_full_precision", "custom_fwd", "float32_function"),
    "Its name here is jamp.half_precision.": ("force_half_precision", "half_function"),
}  # fmt: skip
_ANSWERS = {name: answer for answer, names in _NAMES.items() for name in names}

_METHODS = {
    "An optimizer made by jamp.mixed_precision(optimizer, 'O2:float16') unscales, and skips what is not finite: write "
    "updates, opt_state = tx.update(scaled_grads, opt_state, params).": (
        "step", "minimize", "apply_gradients", "backward", "clip_master_grads", "update_master_grads",
    ),
    "Write scaler = scaler.adjust(jamp.all_finite(grads)), which returns the scaler of the next step.": (
        "update", "update_scale", "overflow",
    ),
    "Write grads = scaler.unscale(grads), which returns them.": ("unscale_", "unscale_grads", "get_unscaled_gradients"),
    "Write loss = scaler.scale(loss), which returns it.": ("scale_loss", "get_scaled_loss"),
    "The number is scaler.loss_scale.": ("get_scale", "scale_value", "value", "cur_scale"),
    "Write jamp.value_and_grad(loss_fn, scaler)(params, batch).": ("value_and_grad", "grad"),
    "Write scaler.to_state_dict('pytorch').": ("state_dict",),
    "Write jamp.DynamicLossScale.from_state_dict(saved).": ("load_state_dict", "set_state_dict"),
}  # fmt: skip
_OF_SCALERS = {name: answer for answer, names in _METHODS.items() for name in names}


def unknown_method(owner: str, name: str) -> AttributeError:
    """The error for a method that a scaler does not have.

    Args:
        owner: The name of its class.
        name: The name of the method.
    """
    return AttributeError(f"{owner!r} object has no attribute {name!r}. {_OF_SCALERS.get(name, '')}".strip(), name=name)


def unknown_attribute(name: str, known: Iterable[str]) -> AttributeError:
    """The error for a name that jamp does not have.

    Args:
        name: The name.
        known: The names that jamp has.
    """
    text = f"module 'jamp' has no attribute {name!r}."
    hint = _ANSWERS.get(name) or close_matches(name, [x for x in known if not x.startswith("_")])
    return AttributeError(f"{text} {hint.strip()}".strip(), name=name)
