"""Function transforms: they know a policy, and nothing of loss scales or optimizers."""

from jamp.transforms._cast_fn import autocast as autocast
from jamp.transforms._cast_fn import cast_fn as cast_fn
from jamp.transforms._float32_gradients import float32_gradients as float32_gradients
from jamp.transforms._scopes import disable as disable
from jamp.transforms._scopes import full_precision as full_precision
from jamp.transforms._scopes import half_precision as half_precision
