"""optax wrappers: loss scaling with exact skip, master weights, stochastic rounding. Nothing else imports optax."""

from jamp.optim._exact_update import ExactUpdate as ExactUpdate
from jamp.optim._master_weights import MasterWeightsState as MasterWeightsState
from jamp.optim._master_weights import half_params as half_params
from jamp.optim._master_weights import master_params as master_params
from jamp.optim._master_weights import master_weights as master_weights
from jamp.optim._split import join_float32 as join_float32
from jamp.optim._split import split_float32 as split_float32
from jamp.optim._stochastic_rounding import StochasticRoundingState as StochasticRoundingState
from jamp.optim._stochastic_rounding import stochastic_rounding as stochastic_rounding
