"""Loss scalers: immutable pytrees that keep float16 gradients away from zero."""

from jamp.scalers._base import LossScale as LossScale
from jamp.scalers._dynamic import DynamicLossScale as DynamicLossScale
from jamp.scalers._grad import grad as grad
from jamp.scalers._grad import value_and_grad as value_and_grad
from jamp.scalers._noop import NoOpLossScale as NoOpLossScale
from jamp.scalers._static import StaticLossScale as StaticLossScale
