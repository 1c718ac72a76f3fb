"""No loss scaling, in the shape of a loss scaler."""

from dataclasses import dataclass
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jamp._calls import explains
from jamp.scalers._base import as_flag, check_tree, register_scaler
from jamp.scalers._names import ELSEWHERE

T = TypeVar("T")


@explains("jamp.NoOpLossScale()", ELSEWHERE)
@register_scaler
@dataclass(frozen=True)
class NoOpLossScale:
    """Does not scale, so that code which takes a scaler has no second branch for training in bfloat16 or float32.

    `jamp.loss_scaled(jamp.NoOpLossScale(), inner)` still skips the steps whose gradients are not finite.

    Example:
        >>> import jamp
        >>> jamp.NoOpLossScale().scale(3.0)
        3.0
    """

    @property
    def loss_scale(self) -> jax.Array:
        """One: float32 array of shape ()."""
        return jnp.ones([], jnp.float32)

    def scale(self, tree: T) -> T:
        """Returns the tree itself."""
        check_tree(tree, "scale")
        return tree

    def unscale(self, tree: T) -> T:
        """Returns the tree itself."""
        check_tree(tree, "unscale")
        return tree

    def to_state_dict(self, format: str = "jamp") -> dict[str, Any]:
        """An empty dict, which is what disabled scalers save in every format."""
        del format
        return {}

    @explains("scaler.adjust(jamp.all_finite(grads))")
    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Returns the scaler itself; a `ValueError` if `grads_finite` is no boolean scalar."""
        as_flag(grads_finite)
        return self
