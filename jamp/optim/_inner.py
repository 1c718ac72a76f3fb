"""The optimizer, and the state, that a wrapper was given."""

from typing import Any

import optax


def as_transformation(inner: Any, usage: str) -> optax.GradientTransformationExtraArgs:
    """What was passed as `inner`, as a transformation that takes extra arguments and hands them on."""
    if isinstance(inner, optax.MultiSteps):  # Its `gradient_transformation()` would lose them.
        return optax.GradientTransformationExtraArgs(inner.init, inner.update)  # pyright: ignore[reportArgumentType]
    if isinstance(inner, optax.GradientTransformation):
        return optax.with_extra_args_support(inner)
    raise TypeError(f"`inner` is {inner!r}: expected an optax transformation. Write {usage}.")


def check_state(state: Any, kind: type, wrapper: str) -> None:
    """Refuses the state of another optimizer."""
    if not isinstance(state, kind):
        raise TypeError(
            f"The state of `{wrapper}` is a {kind.__name__}, got {type(state).__name__}. Make it with "
            "`tx.init(params)`; to go on from the state of plain optax, write jamp.from_optax(tx, params, …)."
        )
