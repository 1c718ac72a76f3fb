"""Automatic mixed precision for JAX: pure functions, any model library, none of the model's code touched."""

import typing as _typing
from importlib import metadata as _metadata

from jamp import inspect as inspect
from jamp import optim as optim
from jamp import policy as policy
from jamp import scalers as scalers
from jamp import transforms as transforms
from jamp._dtypes import half_dtype as half_dtype
from jamp._elsewhere import unknown_attribute as _unknown_attribute
from jamp._primitives import register_primitive as register_primitive
from jamp._tree import all_finite as all_finite
from jamp._tree import cast_to_full as cast_to_full
from jamp._tree import cast_to_half as cast_to_half
from jamp._tree import cast_tree as cast_tree
from jamp._tree import select_tree as select_tree
from jamp._warnings import PrecisionWarning as PrecisionWarning
from jamp.inspect import Comparison as Comparison
from jamp.inspect import ErrorSource as ErrorSource
from jamp.inspect import ErrorSources as ErrorSources
from jamp.inspect import GradientHistogram as GradientHistogram
from jamp.inspect import NonFinite as NonFinite
from jamp.inspect import Numerics as Numerics
from jamp.inspect import Report as Report
from jamp.inspect import Verification as Verification
from jamp.inspect import check_numerics as check_numerics
from jamp.inspect import compare as compare
from jamp.inspect import error_sources as error_sources
from jamp.inspect import first_nonfinite as first_nonfinite
from jamp.inspect import gradient_histogram as gradient_histogram
from jamp.inspect import report as report
from jamp.inspect import tune as tune
from jamp.inspect import verify as verify
from jamp.optim import MixedPrecision as MixedPrecision
from jamp.optim import NonFiniteGradientsError as NonFiniteGradientsError
from jamp.optim import accumulate_gradients as accumulate_gradients
from jamp.optim import average_gradients as average_gradients
from jamp.optim import clip_by_global_norm as clip_by_global_norm
from jamp.optim import from_optax as from_optax
from jamp.optim import global_norm as global_norm
from jamp.optim import half_params as half_params
from jamp.optim import loss_scale as loss_scale
from jamp.optim import loss_scaled as loss_scaled
from jamp.optim import low_precision_state as low_precision_state
from jamp.optim import master_params as master_params
from jamp.optim import master_weights as master_weights
from jamp.optim import metrics as metrics
from jamp.optim import mixed_precision as mixed_precision
from jamp.optim import scale_value as scale_value
from jamp.optim import scaled_value_and_grad as scaled_value_and_grad
from jamp.optim import set_loss_scale as set_loss_scale
from jamp.optim import stochastic_rounding as stochastic_rounding
from jamp.optim import to_optax as to_optax
from jamp.policy import Policy as Policy
from jamp.policy import get_policy as get_policy
from jamp.scalers import DynamicLossScale as DynamicLossScale
from jamp.scalers import LossScale as LossScale
from jamp.scalers import NoOpLossScale as NoOpLossScale
from jamp.scalers import StaticLossScale as StaticLossScale
from jamp.scalers import grad as grad
from jamp.scalers import value_and_grad as value_and_grad
from jamp.transforms import autocast as autocast
from jamp.transforms import cast_fn as cast_fn
from jamp.transforms import disable as disable
from jamp.transforms import float32_gradients as float32_gradients
from jamp.transforms import full_precision as full_precision
from jamp.transforms import half_precision as half_precision

try:
    __version__ = _metadata.version("jamp-jax")
except _metadata.PackageNotFoundError:  # Imported from a checkout that is not installed.
    __version__ = "0.0.0+not.installed"

if not _typing.TYPE_CHECKING:  # To which every name would be one of jamp's. They know it by no other name.

    def __getattr__(name):
        raise _unknown_attribute(name, globals())
