"""Many devices: all skip together, and none drifts from the others by a single bit."""

import functools
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jamp

AXIS = "devices"
BAD_STEP, BAD_DEVICE, STEPS = 2, 5, 5


def batches(key, bad_step=BAD_STEP):
    """For each step, two examples for each of eight devices; one of them overflows float16 on one device."""
    x = jax.random.normal(key, (STEPS, 8, 2, 4)).astype(jnp.float16)
    return x if bad_step is None else x.at[bad_step, BAD_DEVICE, 1, 0].set(60000)


def loss_fn(params, x):
    return ((x @ params["w"].astype(x.dtype) + params["b"].astype(x.dtype)) ** 2).astype(jnp.float32).mean()


def start(dtype=jnp.float32):
    return {"w": jnp.linspace(0.5, 1, 12).reshape(4, 3).astype(dtype), "b": jnp.ones(3)}


def make_step(tx, average):
    def step(params, opt_state, x):
        grads = jamp.scaled_value_and_grad(loss_fn, opt_state)(params, x)[1]
        updates, opt_state = tx.update(average(grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


def map_with_pmap(step):
    def on_host(params, opt_state, x):
        stacked = jax.tree.map(lambda a: jnp.broadcast_to(a, (8, *a.shape)), (params, opt_state))
        mapped = jax.pmap(step, axis_name=AXIS)
        return [stacked := mapped(*stacked, x[i]) for i in range(STEPS)]

    return on_host


def map_with_shard_map(step):
    """Each device's copy is kept apart (stacked), so that copies could drift."""

    def on_mesh(params, opt_state, x):
        take, stack = (partial(jax.tree.map, f) for f in (lambda a: a[0], lambda a: a[None]))
        mesh = jax.make_mesh((8,), (AXIS,), axis_types=(AxisType.Auto,))
        mapped = jax.jit(jax.shard_map(
            lambda p, s, x: stack(step(take(p), take(s), x[0])),
            mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS),
        ))  # fmt: skip
        stacked = jax.tree.map(lambda a: jnp.broadcast_to(a, (8, *a.shape)), (params, opt_state))
        stacked = jax.device_put(stacked, NamedSharding(mesh, P(AXIS)))
        return [stacked := mapped(*stacked, x[i]) for i in range(STEPS)]

    return on_mesh


MAPS = {"pmap": map_with_pmap, "shard_map": map_with_shard_map}


def same_on_all(tree):
    return all((np.asarray(x) == np.asarray(x)[:1]).all() for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("mapping, dtype", [("pmap", None), ("shard_map", "float16"), ("shard_map", "bfloat16")])
def test_one_bad_device_makes_all_skip(key, mapping, dtype):
    tx = jamp.loss_scaled(jamp.DynamicLossScale(1024.0), optax.adamw(0.1), axis_name=AXIS)
    step = make_step(tx, partial(jamp.average_gradients, axis_name=AXIS, dtype=dtype))
    trail = MAPS[mapping](step)(start(), tx.init(start()), batches(key))
    assert same_on_all(trail)
    for i in range(1, STEPS):
        (old, _), (new, state) = trail[i - 1], trail[i]
        assert (old["w"] == new["w"]).all() == (i == BAD_STEP)
        assert (state.skipped == (i >= BAD_STEP)).all()
        assert (state.loss_scale.loss_scale == (512 if i >= BAD_STEP else 1024)).all()


@pytest.mark.parametrize("mapping", MAPS)
def test_gradients_need_not_be_averaged(key, mapping):
    """Each device goes its own way, as in local SGD; an overflow on one is still a skip on all."""
    tx = jamp.loss_scaled(jamp.DynamicLossScale(1024.0), optax.sgd(0.1), axis_name=AXIS)
    trail = MAPS[mapping](make_step(tx, lambda grads: grads))(start(), tx.init(start()), batches(key))
    assert [state.skipped.tolist() for _, state in trail] == [[int(i >= BAD_STEP)] * 8 for i in range(STEPS)]
    w = np.asarray(trail[-1][0]["w"])
    assert len(np.unique(w, axis=0)) == 8
    assert (trail[BAD_STEP - 1][0]["w"] == trail[BAD_STEP][0]["w"]).all()


@pytest.mark.parametrize("mapping, wrap", [
    ("pmap", jamp.master_weights),
    ("shard_map", partial(jamp.master_weights, storage="split")),
    ("shard_map", partial(jamp.stochastic_rounding, key=jax.random.key(0))),
], ids=["masters", "split", "stochastic"])  # fmt: skip
def test_half_parameters_stay_the_same_on_all(key, mapping, wrap):
    tx = jamp.loss_scaled(jamp.DynamicLossScale(1024.0), wrap(optax.adamw(0.1)), axis_name=AXIS)
    step = make_step(tx, partial(jamp.average_gradients, axis_name=AXIS))
    params = start(jnp.bfloat16)
    trail = MAPS[mapping](step)(params, tx.init(params), batches(key))
    assert same_on_all([(p, jamp.metrics(s)) for p, s in trail])
    assert (trail[-1][1].skipped == 1).all()
    assert (trail[-1][0]["w"] != trail[0][0]["w"]).any()


def test_replicated_parameters_are_differentiated_on_each_device(key):
    """What the documentation of `average_gradients` tells users of `shard_map` to write."""
    tx = jamp.loss_scaled(jamp.DynamicLossScale(1024.0), optax.sgd(0.5), axis_name=AXIS)
    mesh = jax.make_mesh((8,), (AXIS,), axis_types=(AxisType.Auto,))
    params, x = start(), batches(key, None)[0].astype(jnp.float32)

    def step(params, opt_state, x):
        local = lax.pcast(params, AXIS, to="varying")
        grads = jamp.scaled_value_and_grad(loss_fn, opt_state)(local, x[0])[1]
        updates, opt_state = tx.update(jamp.average_gradients(grads, AXIS), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P(AXIS)), out_specs=P())
    new, state = jax.jit(mapped)(params, tx.init(params), jax.device_put(x, NamedSharding(mesh, P(AXIS))))
    grads = jax.grad(loss_fn)(params, x.reshape(16, 4))
    chex.assert_trees_all_close(new, jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), rtol=1e-5)
    assert int(state.skipped) == 0


def test_half_all_reduce_sends_half_the_bytes():
    mesh = jax.make_mesh((8,), (AXIS,), axis_types=(AxisType.Auto,))

    def lowered(dtype):
        average = partial(jamp.average_gradients, axis_name=AXIS, dtype=dtype)
        mapped = jax.shard_map(average, mesh=mesh, in_specs=P(AXIS), out_specs=P())
        return jax.jit(mapped).lower(jnp.ones((8, 4), jnp.float16)).as_text()

    for dtype, wire in ((None, "f32"), ("float16", "f16"), ("bfloat16", "bf16")):
        result = lowered(dtype).split("stablehlo.all_reduce")[1].split("->")[1].split("\n")[0]
        assert f"x{wire}>" in result


def test_half_average_overflows_only_where_the_mean_does():
    def average(x, dtype="float16"):
        return jax.vmap(partial(jamp.average_gradients, axis_name=AXIS, dtype=dtype), axis_name=AXIS)(x)

    assert (average(jnp.full(8, 2.0**15)) == 2**15).all()  # Their sum, 2^18, is beyond float16.
    assert np.isinf(average(jnp.full(8, 70000.0))).all()
    assert (average(jnp.full(8, 70000.0), None) == 70000).all()


SPECS = {
    "data": ({"w": P(), "b": P()}, P(("data", "model"))),
    "tensor": ({"w": P(None, "model"), "b": P("model")}, P("data")),
    "fsdp": ({"w": P(("data", "model")), "b": P()}, P(("data", "model"))),
}


@functools.cache
def sharded_run(layout, policy):
    """Losses, parameters and metrics after a few steps on a mesh of 2 by 4."""
    policy = jamp.get_policy(policy)
    axis_types = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=axis_types) if layout != "one device" else None
    k1, k2 = jax.random.split(jax.random.key(1))
    params = {"w": jax.random.normal(k1, (16, 8)), "b": jnp.ones(8)}
    x = jax.random.normal(k2, (STEPS, 16, 16)).at[BAD_STEP, 11, 3].set(jnp.inf)
    params = policy.cast_to_param(params)
    tx = jamp.mixed_precision(optax.adamw(0.1), policy)
    if mesh is not None:
        param_specs, batch_spec = SPECS[layout]
        params = jax.tree.map(lambda p, spec: jax.device_put(p, NamedSharding(mesh, spec)), params, param_specs)
        x = jax.device_put(x, NamedSharding(mesh, P(None, *batch_spec)))
    model = jamp.cast_fn(lambda params, x: jnp.tanh(x @ params["w"] + params["b"]), policy)

    @jax.jit
    def step(params, opt_state, x):
        loss, grads = jamp.scaled_value_and_grad(lambda p, x: (model(p, x) ** 2).mean(), opt_state)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, trail = tx.init(params), []
    for i in range(STEPS):
        params, opt_state, _ = step(params, opt_state, x[i])
        trail.append((params, jamp.metrics(opt_state)))
    return trail


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("layout, policy", [*((name, "O2:float16") for name in SPECS), ("fsdp", "O3:bfloat16")])
def test_sharded_jit_skips_as_one(layout, policy):
    trail = sharded_run(layout, policy)
    assert [int(m["skipped"]) for _, m in trail] == [0, 0, 1, 1, 1]
    for old, new in zip(jax.tree.leaves(trail[BAD_STEP - 1][0]), jax.tree.leaves(trail[BAD_STEP][0]), strict=True):
        assert (old == new).all() and old.sharding.is_equivalent_to(new.sharding, old.ndim)
    for leaf in jax.tree.leaves(trail):
        copies = {}
        for shard in leaf.addressable_shards:
            copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        assert all((copy == same[0]).all() for same in copies.values() for copy in same)


@pytest.mark.parametrize("storage", ["float32", "split"])
def test_explicit_sharding_is_kept(storage):
    """On the meshes that `jax.make_mesh` makes by default, the sharding is part of an array's type."""
    mesh = jax.make_mesh((8,), ("data",))
    tx = jamp.mixed_precision(optax.adam(0.1), "O3:bfloat16", storage=storage)
    params = jax.device_put(jnp.ones((8, 4), jnp.bfloat16), NamedSharding(mesh, P("data")))
    step, opt_state = jax.jit(tx.update), tx.init(params)
    for grad in (params, params * jnp.nan):
        updates, opt_state = step(grad, opt_state, params)
        moments = opt_state.inner_state.inner_state[0].mu
        assert {str(jax.typeof(x)) for x in (updates.bits, moments)} == {"int16[8@data,4]", "float32[8@data,4]"}
    assert int(opt_state.skipped) == 1 and (updates.bits == 0).all()


@pytest.mark.parametrize("layout", SPECS)
def test_sharded_jit_trains_as_one_device_does(layout):
    """Up to the order of sums; with an optimizer step of 0.1, a wrong gradient would be off by that much."""
    sharded, alone = (sharded_run(name, "O2:float16")[-1][0] for name in (layout, "one device"))
    for a, b in zip(jax.tree.leaves(sharded), jax.tree.leaves(alone), strict=True):
        assert np.mean(np.abs(np.asarray(a) - np.asarray(b))) < 0.003
