"""The optimizer that a wrapper was given."""

from typing import Any

import optax


def as_transformation(inner: Any, usage: str) -> optax.GradientTransformationExtraArgs:
    """What was passed as `inner`, as a transformation that takes extra arguments and hands them on."""
    if isinstance(inner, optax.MultiSteps):  # Its `gradient_transformation()` would lose them.
        return optax.GradientTransformationExtraArgs(inner.init, inner.update)  # pyright: ignore[reportArgumentType]
    if isinstance(inner, optax.GradientTransformation):
        return optax.with_extra_args_support(inner)
    raise TypeError(f"`inner` is {inner!r}: expected an optax transformation. Write {usage}.")
