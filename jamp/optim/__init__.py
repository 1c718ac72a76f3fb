"""optax wrappers: loss scaling with exact skip, master weights, stochastic rounding. Nothing else imports optax."""

from jamp.optim._abort import NonFiniteGradientsError as NonFiniteGradientsError
from jamp.optim._accumulate import accumulate_gradients as accumulate_gradients
from jamp.optim._average import average_gradients as average_gradients
from jamp.optim._both import MixedPrecision as MixedPrecision
from jamp.optim._exact_update import ExactUpdate as ExactUpdate
from jamp.optim._find_loss_scale import loss_scale as loss_scale
from jamp.optim._find_loss_scale import metrics as metrics
from jamp.optim._find_loss_scale import scale_value as scale_value
from jamp.optim._find_loss_scale import scaled_value_and_grad as scaled_value_and_grad
from jamp.optim._find_loss_scale import set_loss_scale as set_loss_scale
from jamp.optim._half_params import half_params as half_params
from jamp.optim._loss_scaled import LossScaledState as LossScaledState
from jamp.optim._loss_scaled import loss_scaled as loss_scaled
from jamp.optim._low_precision_state import LowPrecisionState as LowPrecisionState
from jamp.optim._low_precision_state import low_precision_state as low_precision_state
from jamp.optim._master_weights import MasterWeightsState as MasterWeightsState
from jamp.optim._master_weights import master_params as master_params
from jamp.optim._master_weights import master_weights as master_weights
from jamp.optim._mixed_precision import mixed_precision as mixed_precision
from jamp.optim._plain import from_optax as from_optax
from jamp.optim._plain import to_optax as to_optax
from jamp.optim._split import join_float32 as join_float32
from jamp.optim._split import split_float32 as split_float32
from jamp.optim._stochastic_rounding import StochasticRoundingState as StochasticRoundingState
from jamp.optim._stochastic_rounding import stochastic_rounding as stochastic_rounding
