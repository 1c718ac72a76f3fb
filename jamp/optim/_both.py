"""One object for the model and the optimizer, so that a policy is written once."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

import jax
import numpy as np
import optax
from jax.typing import ArrayLike

from jamp._calls import called, explains
from jamp._tree import AxisName
from jamp.optim._abort import OnAbort
from jamp.optim._find_loss_scale import scaled_value_and_grad
from jamp.optim._inner import as_transformation
from jamp.optim._mixed_precision import SETTINGS_ELSEWHERE, mixed_precision
from jamp.policy import Policy, get_policy
from jamp.scalers import LossScale
from jamp.transforms import cast_fn
from jamp.transforms._cast_fn import CastFunction

P = ParamSpec("P")
T = TypeVar("T")

_ELSEWHERE = SETTINGS_ELSEWHERE | called(optimizer=("inner", "opt", "tx", "inner_optimizer"))


@explains("jamp.MixedPrecision('O2:float16', optax.adam(1e-3))", _ELSEWHERE)
class MixedPrecision:
    """A policy, and an optimizer that fits it: `jamp.cast_fn` and `jamp.mixed_precision` with one policy for both.

    It holds settings and no state: everything that changes is in `opt_state`. So it may be closed over by a jitted
    step, or be a static argument of it. Objects are equal that were made with equal policies and settings and the same
    optimizer object: optax makes another one at each call of `optax.adamw(1e-3)`, which is equal to no other.

    Args:
        policy: A policy, or its name. One that names no half dtype takes `jamp.half_dtype()` now.
        optimizer: Any optax transformation, or an `optax.MultiSteps`.
        loss_scale: As in `jamp.mixed_precision`, and so are the other arguments.
        storage: How master weights are stored.
        axis_name: Mapped axes over which devices agree to skip.
        abort_after: What number of skipped steps in a row calls `on_abort`.
        on_abort: "raise", "warn", or a function of a `NonFiniteGradientsError`.

    Attributes:
        policy: The policy, with its half dtype.
        tx: The optimizer, wrapped in what the policy needs: an optax transformation.

    Raises:
        TypeError: If `optimizer` is no optax transformation, or `loss_scale` no loss scale.
        ValueError: If `policy` is not a policy, or another argument impossible: see `jamp.mixed_precision`.

    Example:
        >>> import jamp, jax, jax.numpy as jnp, optax
        >>> amp = jamp.MixedPrecision("O2:float16", optax.adamw(1e-3))
        >>> apply_fn = amp.cast_fn(lambda params, x: x @ params["w"])
        >>> def loss_fn(params, x, y):
        ...     return ((apply_fn(params, x) - y) ** 2).mean()
        >>> @jax.jit
        ... def train_step(params, opt_state, x, y):
        ...     loss, grads = amp.value_and_grad(loss_fn, opt_state)(params, x, y)
        ...     updates, opt_state = amp.tx.update(grads, opt_state, params)
        ...     return optax.apply_updates(params, updates), opt_state, loss
        >>> params = amp.cast_to_param({"w": jnp.eye(2)})
        >>> params, opt_state, loss = train_step(params, amp.tx.init(params), jnp.ones((4, 2)), jnp.zeros((4, 2)))
        >>> loss, jamp.scale_value(opt_state)
        (Array(1., dtype=float32), Array(32768., dtype=float32))
    """

    policy: Policy
    tx: optax.GradientTransformationExtraArgs

    def __init__(
        self,
        policy: str | Policy,
        optimizer: optax.GradientTransformation | optax.MultiSteps,
        *,
        loss_scale: LossScale | ArrayLike | Literal["dynamic"] | None = None,
        storage: Literal["float32", "split"] = "float32",
        axis_name: AxisName | None = None,
        abort_after: int | None = None,
        on_abort: OnAbort = "raise",
    ) -> None:
        if isinstance(policy, optax.GradientTransformation | optax.MultiSteps):
            raise TypeError("The policy comes first: write jamp.MixedPrecision('O2:float16', optax.adamw(1e-3)).")
        as_transformation(optimizer, "jamp.MixedPrecision('O2:float16', optax.adam(1e-3))", "optimizer")
        policy = get_policy(policy)
        tx = mixed_precision(
            optimizer,
            policy,
            loss_scale=loss_scale,
            storage=storage,
            axis_name=axis_name,
            abort_after=abort_after,
            on_abort=on_abort,
        )
        made_of = (policy, optimizer, loss_scale, storage, axis_name, abort_after, on_abort)
        self.__dict__.update(policy=policy, tx=tx, _made_of=made_of)

    def cast_fn(self, fn: Callable[P, T]) -> CastFunction[P, T]:
        """The function at the policy: see `jamp.cast_fn`."""
        return cast_fn(fn, self.policy)

    @explains("amp.value_and_grad(loss_fn, opt_state)(params, batch)")
    def value_and_grad(
        self,
        loss_fn: Callable[P, T],
        opt_state: optax.OptState,
        argnums: int | Sequence[int] | Any = 0,
        has_aux: bool = False,
        *,
        transform: Callable[..., Any] = jax.value_and_grad,
    ) -> Callable[P, tuple[T, Any]]:
        """The true loss and the gradients that `tx.update` takes: see `jamp.scaled_value_and_grad`."""
        return scaled_value_and_grad(loss_fn, opt_state, argnums, has_aux, transform=transform)

    def cast_to_param(self, params: T) -> T:
        """Parameters in the dtype that the policy keeps them in; `jamp.half_params` leaves norms in float32."""
        return self.policy.cast_to_param(params)

    if not TYPE_CHECKING:  # Type checkers know of such an attribute without it.

        def __getattr__(self, name: str) -> Any:
            instead = f" The optimizer is `amp.tx`: write `amp.tx.{name}(…)`." if name in ("init", "update") else ""
            raise AttributeError(f"jamp.MixedPrecision has no attribute {name!r}.{instead}", name=name, obj=self)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"Cannot set {name!r}: make another jamp.MixedPrecision.")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MixedPrecision) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"jamp.MixedPrecision({str(self.policy)!r}, …)"

    def _key(self) -> tuple[Any, ...]:
        """What it was made of, with the numbers of a scaler in place of its arrays, which have no hash."""
        policy, optimizer, loss_scale, *settings = self.__dict__["_made_of"]
        numbers = tuple(leaf.item() for leaf in jax.tree.leaves(loss_scale) if isinstance(leaf, jax.Array | np.ndarray))
        kind = jax.tree.structure(loss_scale) if numbers else loss_scale
        same = optimizer if isinstance(optimizer, optax.GradientTransformation) else id(optimizer)
        return policy, same, kind, numbers, *map(repr, settings)
