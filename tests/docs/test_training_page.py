"""What the pages on training warn of is so. That their code runs is in test_pages.py."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp

SCALE = 2.0**15
PARAMS, GRADS = jnp.zeros(4), jnp.full(4, 0.25)


def update_of(tx, grads=GRADS * SCALE) -> np.ndarray:
    return np.asarray(tx.update(grads, tx.init(PARAMS), PARAMS)[0])


def test_gradients_that_were_never_scaled_are_divided_by_the_scale():
    tx = jamp.mixed_precision(optax.sgd(1.0), "O2:float16")
    np.testing.assert_array_equal(update_of(tx, GRADS) * SCALE, update_of(tx))


def test_a_clip_outside_is_refused():
    inside = jamp.mixed_precision(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0)), "O2:float16")
    np.testing.assert_array_equal(update_of(inside), -GRADS)
    for outside in (optax.clip_by_global_norm(1.0), optax.apply_every(2)):
        with pytest.raises(ValueError, match="comes before jamp's loss scaling"):
            update_of(optax.chain(outside, jamp.mixed_precision(optax.sgd(1.0), "O2:float16")))


@pytest.mark.parametrize(
    "inner",
    [
        optax.novograd(1e-3),
        optax.apply_if_finite(optax.adam(1e-3), 3),
        optax.conditionally_transform(optax.adam(1e-3), lambda step, **_: step < 2),
    ],
    ids=["novograd", "apply_if_finite", "conditionally_transform"],
)
def test_transforms_that_need_master_weights(inner):
    half = PARAMS.astype(jnp.float16)
    tx = jamp.loss_scaled(jamp.DynamicLossScale(SCALE), inner)
    with pytest.raises(TypeError, match="cond branches must have equal output types"):
        tx.update(half, tx.init(half), half)
    tx = jamp.mixed_precision(inner, "O3:float16")
    updates, _ = tx.update(half, tx.init(half), half)
    assert optax.apply_updates(half, updates).dtype == jnp.float16


def test_a_mean_of_sums_over_devices_is_too_large():
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))

    def grads(params, x, vary, average):
        params = jax.lax.pcast(params, "data", to="varying") if vary else params
        return average(jax.grad(lambda p: (p * x).mean())(params), "data")

    def mapped(vary, average):
        specs = dict(in_specs=(spec(), spec("data")), out_specs=spec())
        return jax.shard_map(lambda p, x: grads(p, x, vary, average), mesh=mesh, **specs)(jnp.float32(1), x)

    x = jnp.arange(8.0)
    assert mapped(True, jax.lax.pmean) == mapped(True, jamp.average_gradients) == x.mean()
    assert mapped(False, jax.lax.pmean) == 4 * x.mean()
    with pytest.raises(ValueError, match="already summed"):
        mapped(False, jamp.average_gradients)
