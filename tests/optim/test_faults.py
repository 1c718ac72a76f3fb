"""Training that goes wrong at random ends, to the last bit, where training without the faulty steps ends."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jamp
from tests.faults import random_faults
from tests.helpers import assert_bitwise_equal

STEPS, MICROBATCHES, AXIS = 2000, 4, "devices"
SCALE = jamp.DynamicLossScale(2.0**15, period=7)  # Grows and backs off all the time, by powers of two.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.01, STEPS)))
WRAPPERS = {
    "float32": lambda tx: tx,
    "masters": jamp.master_weights,
    "split": lambda tx: jamp.master_weights(tx, "split"),
    "stochastic": lambda tx: jamp.stochastic_rounding(tx, jax.random.key(1)),
}


def start(dtype=jnp.bfloat16):
    return {"w": jnp.linspace(-1, 1, 32).reshape(4, 8).astype(dtype), "v": jnp.linspace(1, -1, 8), "b": jnp.zeros(8)}


def batch(step):
    x = jax.random.normal(jax.random.fold_in(jax.random.key(2), step), (16, 5))
    return x[:, :4], x[:, 4]


def make_step(tx, in_batch, average):
    """One train step; `in_batch` spoils the inputs, `average` is what devices do with their gradients."""

    def step(carry, inputs):
        (params, opt_state), (i, fault) = carry, inputs
        x, y = batch(i)

        def loss_fn(params, x, y):
            out = jnp.tanh(x @ params["w"].astype(x.dtype) + params["b"]) @ params["v"]
            return fault.in_loss(((out - y) ** 2).mean())

        grad_fn = jamp.accumulate_gradients(jamp.scaled_value_and_grad(loss_fn, opt_state), MICROBATCHES)
        grads = average(grad_fn(params, in_batch(fault, x), y)[1])
        updates, opt_state = tx.update(fault.in_leaf(fault.in_gradients(grads)), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    return step


def train(tx, params, steps, faults, on_devices=False):
    if on_devices:
        step = make_step(
            tx, lambda fault, x: fault.in_device(x, AXIS), lambda g: jamp.average_gradients(g, AXIS)
        )  # fmt: skip
    else:
        step = make_step(tx, lambda fault, x: fault.in_microbatch(x, MICROBATCHES), lambda g: g)

    def run(params, opt_state, steps, faults):
        return lax.scan(step, (params, opt_state), (steps, faults))[0]

    if on_devices:
        mesh = jax.make_mesh((4,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
        run = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(run)(params, tx.init(params), steps, faults)


def check(tx, params, faults, on_devices=False):
    wrong = faults.kind > 0
    broken, broken_state = train(tx, params, jnp.arange(STEPS), faults, on_devices)
    left = jnp.flatnonzero(~wrong)
    none = jax.tree.map(lambda x: x[left], faults)
    clean, clean_state = train(tx, params, left, none, on_devices)

    assert int(jamp.metrics(broken_state)["skipped"]) == int(wrong.sum()) > STEPS // 10
    assert int(jamp.metrics(clean_state)["skipped"]) == 0
    assert_bitwise_equal(broken, clean)
    assert_bitwise_equal(broken_state.inner_state, clean_state.inner_state)
    assert (clean["w"] != params["w"]).any()


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_faulty_steps_leave_no_trace(key, wrapper):
    tx = jamp.loss_scaled(SCALE, WRAPPERS[wrapper](OPTIMIZER))
    params = start(jnp.float32 if wrapper == "float32" else jnp.bfloat16)
    check(tx, params, random_faults(key, STEPS, ("loss", "gradients", "leaf", "microbatch")))


def test_faults_of_one_device_leave_no_trace_on_any(key):
    tx = jamp.loss_scaled(SCALE, jamp.master_weights(OPTIMIZER), axis_name=AXIS)
    check(tx, start(), random_faults(key, STEPS, ("device",)), on_devices=True)


def test_the_harness_can_break_training(key):
    """Without the skip each kind of fault spoils the parameters; otherwise the tests above would prove nothing."""
    kinds = ("loss", "gradients", "leaf", "microbatch")
    faults = [random_faults(key, 40, (kind,)) for kind in kinds]
    tx = jamp.loss_scaled(jamp.NoOpLossScale(), OPTIMIZER)
    unprotected = optax.GradientTransformation(tx.init, lambda g, s, p: (OPTIMIZER.update(g, s.inner_state, p)[0], s))

    def spoils(faults):
        return ~jamp.all_finite(train(unprotected, start(jnp.float32), jnp.arange(40), faults)[0])

    assert jax.vmap(spoils)(jax.tree.map(lambda *x: jnp.stack(x), *faults)).tolist() == [True] * 4
