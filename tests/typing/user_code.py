"""A program of a user, in all its types; `tools.docs_types` checks it in the strict modes of mypy and pyright."""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import optax

import jamp

Params = dict[str, jax.Array]


def model(params: Params, x: jax.Array) -> jax.Array:
    return x @ params["w"]


forward = jamp.cast_fn(model, "O2:float16")
assert_type(forward({"w": jnp.ones(2)}, jnp.ones(2)), jax.Array)


@jamp.cast_fn(policy="O1")
def decorated(params: Params, x: jax.Array) -> jax.Array:
    return model(params, x)


assert_type(decorated({"w": jnp.ones(2)}, jnp.ones(2)), jax.Array)


@jamp.autocast
def cast(x: jax.Array) -> jax.Array:
    return x


assert_type(cast(jnp.ones(2)), jax.Array)


class Model:
    @jamp.cast_fn(policy="O2")
    def __call__(self, x: jax.Array) -> jax.Array:
        return x

    @jamp.autocast
    def apply(self, x: jax.Array, scale: float = 1.0) -> jax.Array:
        return x * scale


assert_type(Model()(jnp.ones(2)), jax.Array)
assert_type(Model().apply(jnp.ones(2), scale=2.0), jax.Array)


def add(x: jax.Array, y: jax.Array) -> jax.Array:
    return x + y


def loss_fn(params: Params, x: jax.Array) -> jax.Array:
    return forward(params, x).mean()


def aux_fn(params: Params, x: jax.Array) -> tuple[jax.Array, int]:
    return loss_fn(params, x), 3


amp = jamp.MixedPrecision("O2:float16", optax.adamw(1e-3))
apply_fn = amp.cast_fn(model)
scaler = jamp.DynamicLossScale(2.0**15)
jamp.DynamicLossScale()
jamp.StaticLossScale(128)


def step(params: Params, opt_state: optax.OptState, x: jax.Array) -> tuple[Params, optax.OptState, jax.Array]:
    loss, grads = amp.value_and_grad(loss_fn, opt_state)(params, x)
    assert_type(loss, jax.Array)
    (loss, n), grads = jamp.scaled_value_and_grad(aux_fn, opt_state, has_aux=True)(params, x)
    assert_type(n, int)
    updates, opt_state = amp.tx.update(grads, opt_state, params)
    new_params: Params = jax.tree.map(add, params, updates)
    return new_params, opt_state, loss


loss, grads = jamp.value_and_grad(loss_fn, scaler)({"w": jnp.ones(2)}, jnp.ones(2))
state = amp.tx.init({"w": jnp.ones(2)})
saved: dict[str, Any] = jamp.loss_scale(state).to_state_dict("pytorch")
restored = jamp.DynamicLossScale.from_state_dict(saved)
state = jamp.set_loss_scale(state, restored)
number: jax.Array = jamp.scale_value(state)
found = jamp.report(model, {"w": jnp.ones(2)}, jnp.ones(2))
share: float = found.forward.share
tx = jamp.mixed_precision(optax.adamw(1e-3), "O2:float16", loss_scale="dynamic", axis_name="d")
tx = jamp.mixed_precision(optax.adamw(1e-3), "O2:float16", loss_scale=128.0)
tx = jamp.loss_scaled(jamp.DynamicLossScale(), inner=optax.sgd(0.1))
opt = optax.chain(jamp.loss_scaled(scaler), optax.sgd(1e-2))
scale: jamp.LossScale = jamp.loss_scale(state)
finite = jamp.all_finite(grads)
scaler = scaler.adjust(finite)
with jamp.disable():
    pass
full = jamp.full_precision(model)


@jamp.float32_gradients
def gradients(params: Params, x: jax.Array) -> tuple[jax.Array, Params]:
    return jamp.value_and_grad(loss_fn, jamp.NoOpLossScale())(params, x)


assert_type(gradients({"w": jnp.ones(2)}, jnp.ones(2)), tuple[jax.Array, Params])
in_parts = jamp.accumulate_gradients(gradients, microbatches=2)
assert_type(in_parts({"w": jnp.ones(2)}, jnp.ones(2)), tuple[jax.Array, Params])
params: Params = {"w": jnp.ones(2)}
assert_type(jamp.half_params(params, "bfloat16"), Params)
assert_type(jamp.master_params(state, params), Params)
assert_type(jamp.select_tree(finite, params, params), Params)
backward_share: float = found.gradient.share
problem = jamp.first_nonfinite(model, params, jnp.ones(2))
if problem is not None:
    name: str = problem.operation
told: dict[str, jax.Array] = jamp.metrics(state)

# A name that jamp has not is an error: the strict mode of mypy refuses a comment that hides none.
jamp.cast_fnn(model)  # type: ignore[attr-defined]
