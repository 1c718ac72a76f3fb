"""A loss scale that stays what it is."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import jax
from jax.typing import ArrayLike

from jamp._calls import explains
from jamp.scalers._base import as_flag, as_scale, register_scaler, scale_tree, unscale_tree
from jamp.scalers._names import ELSEWHERE
from jamp.scalers._state_dict import write_static_dict

T = TypeVar("T")


@explains("jamp.StaticLossScale(1024.0)", ELSEWHERE)
@register_scaler
@dataclass(frozen=True)
class StaticLossScale:
    """Scales by one number, whatever the gradients do.

    Args:
        loss_scale: Positive number or scalar array of any dtype. It becomes a float32 array of shape (), the only
            leaf, so that another value does not compile again.

    Raises:
        ValueError: If the number is zero, negative, infinite or NaN.

    Example:
        >>> import jamp, jax.numpy as jnp
        >>> scaler = jamp.StaticLossScale(128)
        >>> scaler.scale(jnp.float16(1000.0))
        Array(128000., dtype=float32)
    """

    loss_scale: jax.Array

    if TYPE_CHECKING:  # The field's type is what one reads; the constructor takes more.

        def __init__(self, loss_scale: ArrayLike) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss_scale", as_scale(self.loss_scale))

    def scale(self, tree: T) -> T:
        """Multiplies the floating leaves, those narrower than float32 as float32; leaves the others as they are."""
        return scale_tree(tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Divides the floating leaves, those narrower than float32 as float32; leaves the others as they are."""
        return unscale_tree(tree, self.loss_scale)

    @explains("scaler.adjust(jamp.all_finite(grads))")
    def adjust(self, grads_finite: ArrayLike) -> Self:
        """Returns the scaler itself; a `ValueError` if `grads_finite` is no boolean scalar."""
        as_flag(grads_finite)
        return self

    def to_state_dict(self, format: str = "jamp") -> dict[str, Any]:
        """A dict of Python values, which `DynamicLossScale.from_state_dict` reads.

        Args:
            format: "jamp", or "paddle" or "megengine", whose scalers can be static.

        Raises:
            ValueError: If the format is unknown, or "pytorch", which has no word for it.
        """
        return write_static_dict(float(self.loss_scale), format)

    def set(self, loss_scale: Any) -> Self:
        """The scaler with another scale."""
        return type(self)(loss_scale)
