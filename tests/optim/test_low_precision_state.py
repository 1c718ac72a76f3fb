"""`jamp.low_precision_state`: optimizer states in 2 bytes or 1, whatever the optimizer is and whatever is around it."""

import pickle
import re
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jamp
from jamp.optim import LowPrecisionState
from jamp.optim._inner import as_transformation
from tests.helpers import assert_bitwise_equal, assert_same_spec

DTYPES = {"bfloat16": jnp.bfloat16, "float8": jnp.float8_e4m3fn, "int8": jnp.int8}
dtypes = pytest.mark.parametrize("dtype", DTYPES)
with_and_without_scales = pytest.mark.parametrize("dtype", ["bfloat16", "int8"])  # To these, float8 is as int8.


def start(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(1), 2)
    params = {"w": jax.random.normal(keys[0], (16, 96)), "v": jax.random.normal(keys[1], (8, 5, 3)), "b": jnp.ones(7)}
    return jax.tree.map(lambda p: p.astype(dtype), params)


def gradients(params, i):
    return jax.tree.map(lambda p: jnp.sin(3 * p.astype(jnp.float32) + i).astype(p.dtype), params)


def stored(tx, dtype="int8", **kwargs):
    return jamp.low_precision_state(tx, dtype, **{"block_size": 32, "min_size": 100, **kwargs})


def steps(tx, params, numbers, state=None, grads=gradients):
    def update(params, state, i):
        return tx.update(grads(params, i), state, params)

    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(update, n=1))
    state = jax.jit(tx.init)(params) if state is None else state
    for i in numbers:
        updates, state = step(params, state, jnp.float32(i))
        params = optax.apply_updates(params, updates)
    return params, state


def dtypes_of(tree):
    return {jax.tree_util.keystr(path): x.dtype.name for path, x in jax.tree_util.tree_leaves_with_path(tree)}


@dtypes
def test_moments_are_stored_and_nothing_else(dtype):
    params = start()
    state = stored(optax.adam(1e-3), dtype).init(params)
    name = jnp.dtype(DTYPES[dtype]).name
    assert dtypes_of(state.inner_state) == {
        "[0].count": "int32",
        "[0].mu['b']": "float32", "[0].mu['v']": name, "[0].mu['w']": name,
        "[0].nu['b']": "float32", "[0].nu['v']": name, "[0].nu['w']": name,
    }  # fmt: skip
    shapes = {k: s.shape for k, s in jax.tree_util.tree_leaves_with_path(state.scales)}
    # The first axis of v needs the fewest scales: eight values to each, and not three.
    assert sorted(shapes.values()) == ([] if dtype == "bfloat16" else [(1, 5, 3)] * 2 + [(16, 3)] * 2)


OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "adamw, mu in bfloat16": optax.adamw(1e-3, mu_dtype="bfloat16"),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "lion": optax.lion(1e-3),
    "muon": optax.contrib.muon(1e-3),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.adabelief(1e-3)),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1e-2, 1e-3, 5)),
    "partition": optax.partition({"a": optax.adam(1e-3), "s": optax.sgd(1e-2, 0.9)}, {"w": "a", "v": "s", "b": "a"}),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-3), 2),
    "apply_if_finite": optax.apply_if_finite(optax.adam(1e-3), 3),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-3),
}


def scan_steps(tx, params):
    """The sum of six updates at parameters that stay, whose own rounding so plays no part, and the last state.

    It is a scan, so that a state that changes its dtypes or its structure raises.
    """

    def step(carry, i):
        total, state = carry
        updates, state = tx.update(gradients(params, i), state, params)
        return (jax.tree.map(jnp.add, total, updates), state), None

    total = jax.tree.map(lambda p: jnp.zeros(p.shape), params)
    return lax.scan(step, (total, tx.init(params)), jnp.arange(6, dtype=jnp.float32))[0]


@pytest.mark.nightly
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype, param_dtype", [("int8", "float32"), ("bfloat16", "bfloat16")])
def test_any_optimizer_near_float32(optimizer, dtype, param_dtype):
    inner, params = OPTIMIZERS[optimizer], start(param_dtype)
    tx, full_tx = stored(inner, dtype), as_transformation(inner, "")
    run = jax.jit(lambda p: (scan_steps(tx, p), scan_steps(full_tx, jax.tree.map(lambda x: x.astype(jnp.float32), p))))
    (found, state), (expected, _) = run(params)
    assert_same_spec(state, jax.eval_shape(tx.init, params))
    assert jamp.all_finite((found, state))
    error = optax.tree.norm(jax.tree.map(jnp.subtract, found, expected)) / optax.tree.norm(expected)
    # Lion takes the sign of its momentum: where that is near zero, the least error turns a whole step around.
    assert error < (0.3 if optimizer == "lion" else 0.08)


COPYING = {
    "schedule_free": optax.contrib.schedule_free_adamw(1e-3),
    "prodigy": optax.contrib.prodigy(1.0),
    "mechanize": optax.contrib.mechanize(optax.adam(1e-3)),
    "cocob": optax.contrib.cocob(),
}


@pytest.mark.in_turns(4)
@dtypes
@pytest.mark.parametrize("optimizer", COPYING)
def test_copies_of_parameters_stay_float32(optimizer, dtype):
    inner, params = COPYING[optimizer], start("float32")
    tx = stored(inner, dtype)
    for init in (tx.init, jax.jit(tx.init)):
        pairs = zip(jax.tree.leaves(init(params).inner_state), jax.tree.leaves(inner.init(params)), strict=True)
        copies = [leaf for leaf, full in pairs if np.array_equal(full, params["w"])]
        assert {leaf.dtype for leaf in copies} == {jnp.dtype("float32")}
    total, _ = scan_steps(tx, params)
    expected, _ = scan_steps(inner, params)
    error = optax.tree.norm(jax.tree.map(jnp.subtract, total, expected)) / optax.tree.norm(expected)
    assert error < 0.2


def test_what_begins_as_zeros_of_a_jitted_function_is_stored():
    adam = optax.adam(1e-3)
    inner = optax.GradientTransformation(jax.jit(adam.init), adam.update)
    assert stored(inner).init(start("float32")).inner_state[0].nu["w"].dtype == jnp.int8


def test_hyperparameters_are_float32_beside_bfloat16_parameters():
    """Adam's decay of 0.999 is 1 in bfloat16, in which optax would keep it, and all updates were NaN."""
    inner = OPTIMIZERS["hyperparameters"]
    tx, params = stored(inner), start(jnp.bfloat16)
    state = tx.init(params)
    assert state.inner_state.hyperparams["b2"] == jnp.float32(0.999)
    assert inner.init(params).hyperparams["b2"] == 1  # What this is about.


@dtypes
def test_no_dtype_is_promoted_implicitly(dtype):
    params, tx = start(), stored(optax.sgd(1e-3, momentum=0.9), dtype)
    with jax.numpy_dtype_promotion("strict"):
        _, state = tx.update(params, tx.init(params), params)
        jamp.to_optax(params, tx.update(params, state, params)[1])


@dtypes
def test_the_slow_average_moves(dtype):
    """A second moment with a decay of 0.999, at a constant gradient: its change is far below the spacing."""
    params = jnp.ones(4096)
    tx = jamp.low_precision_state(optax.scale_by_rms(decay=0.999), dtype)

    def step(state, i):
        # Half of the gradients are a tenth of the others.
        return tx.update(jnp.where(jnp.arange(4096) % 2 == 0, 1.0, 0.1), state)[1], None

    state = jax.jit(lambda s: lax.scan(step, s, jnp.arange(1000))[0])(tx.init(params))
    nu = np.asarray(jamp.to_optax(params, state)[1].nu, np.float64)
    expected = 1 - 0.999**1000
    np.testing.assert_allclose([nu[::2].mean(), nu[1::2].mean()], [expected, 0.01 * expected], rtol=0.02)


@pytest.mark.parametrize("dtype", ["float8", "int8"])
def test_no_step_is_many_times_the_learning_rate(dtype):
    """Where a block holds gradients of very different size, whose small moments are drawn up at random."""
    w, adam = jnp.zeros((64, 256)), optax.adam(1.0)
    tx = jamp.low_precision_state(adam, dtype)

    @jax.jit
    def largest_step(small, density):
        def step(state, key):
            keys = jax.random.split(key)
            grads = jax.random.normal(keys[0], w.shape) * jnp.where(jnp.arange(256) % 8 == 0, 1, small)
            updates, state = tx.update(grads * (jax.random.uniform(keys[1], w.shape) < density), state)
            return state, jnp.abs(updates).max()

        return lax.scan(step, tx.init(w), jax.random.split(jax.random.key(0), 40))[1].max()

    for small in (1e-2, 1e-4, 1e-6):
        assert max(largest_step(small, 0.1), largest_step(small, 1.0)) < 4


@dtypes
def test_encoding_again_changes_nothing(key, dtype):
    """What goes through a step untouched stays bit for bit: an accumulating or skipped step is one."""
    params = start()

    def first_of(grads, state, params):
        return grads, jax.tree.map(lambda g, s: jnp.where((s == 0).all(), g, s), grads, state)

    params = {"m": params, "v": jax.tree.map(jnp.square, params)}
    tx = stored(optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), first_of), dtype)
    _, state = tx.update(params, tx.init(params))
    assert list(dtypes_of(state.inner_state).values()).count(jnp.dtype(DTYPES[dtype]).name) == 4
    for _ in range(20):
        _, new = tx.update(params, state)
        assert_bitwise_equal((new.inner_state, new.scales), (state.inner_state, state.scales))
        assert (new.key != state.key).any()
        state = new


WRAPPERS = {
    "masters": lambda dtype: jamp.master_weights(stored(optax.adam(1e-3), dtype)),
    "split": lambda dtype: jamp.mixed_precision(stored(optax.adam(1e-3), dtype), "O3:bfloat16", storage="split"),
    "loss scaled": lambda dtype: jamp.loss_scaled(jamp.DynamicLossScale(8.0), stored(optax.adam(1e-3), dtype)),
    "around masters": lambda dtype: stored(jamp.mixed_precision(optax.adam(1e-3), "O3:bfloat16"), dtype),
    "around split": lambda dtype: stored(jamp.mixed_precision(optax.adam(1e-3), "O3:bfloat16", storage="split"), dtype),
    "stochastic": lambda dtype: jamp.stochastic_rounding(stored(optax.adam(1e-3), dtype), jax.random.key(0)),
    "MultiSteps": lambda dtype: optax.MultiSteps(jamp.master_weights(stored(optax.adam(1e-3), dtype)), 2),
    "masked": lambda dtype: optax.masked(stored(optax.adam(1e-3), dtype), {"w": True, "v": False, "b": True}),
    "chain": lambda dtype: optax.chain(optax.clip(1.0), stored(optax.scale_by_adam(), dtype), optax.scale(-1e-3)),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "wrapper, dtype", [*((w, "int8") for w in WRAPPERS), ("split", "bfloat16"), ("around masters", "bfloat16")]
)
def test_inside_and_around_the_wrappers(wrapper, dtype):
    tx = WRAPPERS[wrapper](dtype)
    params = start(jnp.bfloat16)
    new_params, state = steps(tx, params, range(6))
    assert_same_spec(state, jax.eval_shape(tx.init, params))
    assert_same_spec(new_params, params)
    name = jnp.dtype(DTYPES[dtype]).name
    kept = {p for p, d in dtypes_of(state).items() if d == name and re.search(r"\.(mu|nu)\['[wv]'\]", p)}
    assert len(kept) == (2 if wrapper == "masked" else 4)
    masters = [d for p, d in dtypes_of(state).items() if ".masters" in p]
    assert set(masters) <= {"float32", "int16"}


@with_and_without_scales
def test_masters_are_those_of_float32_state_to_the_error_of_the_moments(dtype):
    """And a scan of steps compiles once, with everything around it."""
    params, tx = start(jnp.bfloat16), WRAPPERS["split"](dtype)
    plain = jamp.mixed_precision(optax.adam(1e-3), "O3:bfloat16", storage="split")
    found, expected = (steps(t, params, range(20)) for t in (tx, plain))
    before, found, expected = (
        jamp.master_params(s, p)["w"] for p, s in ((params, plain.init(params)), found, expected)
    )
    assert jnp.linalg.norm(found - expected) < 0.1 * jnp.linalg.norm(expected - before)


@pytest.mark.in_turns(2)
@with_and_without_scales
@pytest.mark.parametrize("around", [False, True])
def test_a_skipped_step_leaves_the_stored_state_bit_for_bit(dtype, around):
    scale, adam = jamp.DynamicLossScale(8.0), optax.adam(1e-3)
    tx = stored(jamp.loss_scaled(scale, adam), dtype) if around else jamp.loss_scaled(scale, stored(adam, dtype))
    params, state = steps(tx, start(), range(3))

    def moments(state):
        return [
            x for p, x in jax.tree_util.tree_leaves_with_path(state) if re.search(r"\.[mn]u", jax.tree_util.keystr(p))
        ]

    bad = jax.tree.map(lambda p: jnp.full_like(p, jnp.inf), params)
    updates, skipped = jax.jit(tx.update)(bad, state, params)
    assert not any(u.any() for u in jax.tree.leaves(updates))
    assert len(moments(state)) > 0 and jamp.metrics(skipped)["skipped"] == 1
    assert_bitwise_equal(moments(skipped), moments(state))
    if not around:
        assert_bitwise_equal(skipped.inner_state, state.inner_state)  # The key too.
    assert jamp.loss_scale(skipped).loss_scale == 4
    assert jamp.loss_scale(jamp.set_loss_scale(skipped, 2.0)).loss_scale == 2


def test_hyperparameters_can_be_set():
    tx = stored(optax.inject_hyperparams(optax.adam)(learning_rate=1.0))
    state = tx.init(start())
    state.inner_state.hyperparams["learning_rate"] = jnp.float32(0)
    updates, _ = tx.update(gradients(start(), 0), state)
    assert not any(u.any() for u in jax.tree.leaves(updates))


@pytest.mark.in_turns(2)
@with_and_without_scales
def test_same_key_same_run(dtype):
    a, b, c = (steps(stored(optax.adam(1e-3), dtype, key=k), start(), range(4))[0]
               for k in (jax.random.key(0), None, jax.random.key(1)))  # fmt: skip
    assert_bitwise_equal(a, b)
    assert (a["w"] != c["w"]).any()


def test_donated_states_delete_nothing_of_the_caller():
    key, params = jax.random.key(0), start()
    tx = stored(optax.adam(1e-3), key=key)
    for _ in range(2):
        jax.jit(tx.update, donate_argnums=1)(params, tx.init(params), params)
    assert not key.is_deleted()


@pytest.mark.in_turns(2)
@with_and_without_scales
def test_sharded_as_the_parameter_and_nothing_travels(dtype):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    for spec in (P("data"), P(None, "data")):
        sharding = NamedSharding(mesh, spec)
        params = jax.device_put(jax.random.normal(jax.random.key(0), (64, 512)), sharding)
        tx = stored(optax.adam(1e-3), dtype, block_size=64)
        state = jax.jit(tx.init)(params)
        whole = NamedSharding(mesh, P())
        shardings = jax.tree.map(lambda x: sharding if x.ndim == 2 else whole, state)  # noqa: B023
        step = jax.jit(tx.update, in_shardings=(sharding, shardings, sharding), out_shardings=(sharding, shardings))
        compiled = step.lower(params, state, params).compile()
        assert not re.findall(r"all-gather|all-to-all|collective-permute|all-reduce", compiled.as_text())
        state = jax.device_put(state, shardings)
        for _ in range(2):
            updates, state = step(params, state, params)
        alone = jax.device_put(params, jax.devices()[0])
        expected = tx.init(alone)
        for _ in range(2):
            expected_updates, expected = jax.jit(tx.update)(alone, expected, alone)
        np.testing.assert_allclose(updates, expected_updates, rtol=1e-5)
        assert state.inner_state[0].nu.sharding.is_equivalent_to(sharding, 2)


@with_and_without_scales
def test_explicit_shardings(dtype):
    mesh = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        params = jax.device_put(jnp.ones((64, 512)), P("data"))
        tx = jamp.loss_scaled(jamp.DynamicLossScale(8.0), stored(optax.adam(1e-3), dtype, block_size=64))
        state = tx.init(params)
        for _ in range(2):
            updates, state = jax.jit(tx.update)(params, state, params)
        assert jax.typeof(updates).sharding.spec == jax.typeof(params).sharding.spec


@pytest.mark.parametrize(
    "made, used, says",
    [
        ({"dtype": "int8"}, {"dtype": "bfloat16"}, "stored in int8, and goes on so, not in bfloat16"),
        ({"dtype": "bfloat16"}, {"dtype": "float8"}, "stored in bfloat16, and goes on so, not in float8_e4m3fn"),
        ({"dtype": "int8"}, {"dtype": "int8", "block_size": 64}, "not in blocks of 64"),
    ],
)
def test_a_state_that_was_stored_otherwise_says_how_to_store_it_anew(made, used, says):
    params = {"w": jax.random.normal(jax.random.key(1), (64, 256)), "b": jnp.ones(4)}
    before, after = (jamp.low_precision_state(optax.adam(1e-3), **settings) for settings in (made, used))
    state = before.update(params, before.init(params), params)[1]
    with pytest.warns(jamp.PrecisionWarning, match=says):
        assert jax.tree.map(jax.typeof, after.update(params, state, params)[1]) == jax.tree.map(jax.typeof, state)
    params, state = jamp.from_optax(after, params, *jamp.to_optax(params, state))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        after.update(params, state, params)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, after.init(params))


@with_and_without_scales
@pytest.mark.parametrize("shape", [(64, 384), (64, 520), (64, 1024), (16, 1000)], ids=str)
def test_devices_with_parts_of_blocks_on_explicit_meshes(dtype, shape):
    """Shares of 48, 65, 128 and 125 values, in blocks of 64."""
    tx = stored(optax.adam(1e-3), dtype, block_size=64)
    params = jax.random.normal(jax.random.key(1), shape)
    _, expected = tx.update(params, tx.init(params), params)
    mesh = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(mesh):
        divided = jax.device_put(params, P(None, "data"))
        _, state = jax.jit(tx.update)(divided, tx.init(divided), divided)
        assert jax.typeof(state.inner_state[0].nu).sharding.spec == P(None, "data")
        again = jax.jit(tx.update)(divided, state, divided)[1]
        assert jax.tree.map(jax.typeof, again) == jax.tree.map(jax.typeof, state)
    assert_bitwise_equal(jax.device_get(state), jax.device_get(expected))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype, typed", [("bfloat16", True), ("float8", False), ("int8", False)])
def test_checkpoints(tmp_path, dtype, typed):
    tx = stored(optax.adam(1e-3), dtype, key=jax.random.key(3) if typed else None)
    params, state = steps(tx, start(), range(3))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(lambda: state))
    assert_bitwise_equal(restored, state)
    if not typed:
        assert_bitwise_equal(pickle.loads(pickle.dumps(state)), state)
    assert_bitwise_equal(steps(tx, params, range(3, 6), restored), steps(tx, params, range(3, 6), state))


@with_and_without_scales
def test_from_and_to_plain_optax(dtype):
    adam, params = optax.adam(1e-3), start()
    params, plain = steps(adam, params, range(3))
    tx = jamp.mixed_precision(stored(adam, dtype), "O3:bfloat16")
    half, state = jamp.from_optax(tx, jamp.half_params(params), params, plain)
    assert_same_spec(state, tx.init(half))
    back_params, back = jamp.to_optax(half, state)
    assert_bitwise_equal(back_params, params)
    assert_same_spec(back, plain)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(plain), strict=True):
        assert np.linalg.norm(a - b) <= 0.05 * np.linalg.norm(b)


def test_tree_map_params_over_the_inner_state():
    adam, params = optax.adam(1e-3), start()
    tx = stored(adam)
    state = tx.init(params)
    specs = {"w": "of w", "v": "of v", "b": "of b"}
    found = optax.tree_map_params(adam, lambda x, s: (x.dtype.name, s), state.inner_state, specs)
    assert found[0].nu == {"w": ("int8", "of w"), "v": ("int8", "of v"), "b": ("float32", "of b")}
    with pytest.raises(ValueError):
        optax.tree_map_params(tx, lambda x: x, state)


def test_a_state_of_float64_parameters_stays_as_it_is():
    with jax.enable_x64(True), pytest.warns(jamp.PrecisionWarning, match=r"their state stays float64: w\. .*float32"):
        state = stored(optax.adam(1e-3)).init({"w": jnp.ones((16, 96), jnp.float64), "b": jnp.ones(7, jnp.float64)})
    assert state.inner_state[0].nu["w"].dtype == np.float64


def test_patterns_that_name_nothing_are_told():
    with pytest.warns(jamp.PrecisionWarning, match=r"names nothing in the state: 'nuu'.*0/count, 0/mu/b"):
        stored(optax.adam(1e-3), keep_float32=["nuu", "mu"]).init(start())


def test_what_is_named_stays_float32():
    state = stored(optax.adam(1e-3), keep_float32=["NU", "0/mu/w"]).init(start())
    assert {k for k, d in dtypes_of(state.inner_state).items() if d == "int8"} == {"[0].mu['v']"}


def test_leaves_that_are_not_moments():
    params = {
        "scalar": jnp.ones(()), "empty": jnp.ones((0, 4)), "complex": jnp.ones(200, jnp.complex64),
        "int": jnp.ones(200, jnp.int32), "none": None, "w": jnp.ones((10, 20)),
    }  # fmt: skip
    shapes = optax.GradientTransformation(
        lambda p: (jax.tree.map(jnp.zeros_like, p), "a name", 3), lambda g, s, p: (jax.tree.map(jnp.add, g, s[0]), s)
    )
    tx = stored(shapes, min_size=1)
    state = tx.init(params)
    assert {k for k, d in ((k, getattr(x, "dtype", None)) for k, x in jax.tree_util.tree_leaves_with_path(state))
            if d == jnp.int8} == {(jax.tree_util.GetAttrKey("inner_state"), jax.tree_util.SequenceKey(0),
                                   jax.tree_util.DictKey("w"))}  # fmt: skip
    _, new = tx.update(params, state)
    assert jax.tree.structure(new) == jax.tree.structure(state)


@pytest.mark.parametrize(
    "make, error, says",
    [
        (lambda: jamp.low_precision_state(optax.adam, "int8"), TypeError, r"low_precision_state\(optax.adam\(1e-3\)"),
        (lambda: stored(optax.adam(1e-3), "int4"), ValueError, "expected one of 'bfloat16', 'float8', 'int8'"),
        (lambda: stored(optax.adam(1e-3), "float16"), ValueError, "cannot hold second moments"),
        (lambda: stored(optax.adam(1e-3), jnp.float16), ValueError, "cannot hold second moments"),
        (lambda: stored(optax.adam(1e-3), None), ValueError, "`dtype` is None"),
        (lambda: stored(optax.adam(1e-3), block_size=0), ValueError, "`block_size` is 0"),
        (lambda: stored(optax.adam(1e-3), block_size=True), ValueError, "`block_size` is True"),
        (lambda: stored(optax.adam(1e-3), min_size=-1), ValueError, "`min_size` is -1"),
        (lambda: stored(optax.adam(1e-3), block_size=3.5), ValueError, "`block_size` is 3.5.*Write block_size=256"),
        (lambda: stored(optax.adam(1e-3), keep_float32=None), TypeError, r"`keep_float32` is None.*\['nu'\]"),
        (lambda: stored(optax.adam(1e-3), keep_float32=[3]), TypeError, r"`keep_float32` is \[3\]"),
        (lambda: stored(optax.adam(1e-3), keep_float32={"nu": 1}), TypeError, "expected several glob patterns"),
        (lambda: stored(optax.adam(1e-3), key=0), TypeError, r"jax.random.key\(0\)"),
        (lambda: stored(optax.adam(1e-3), keep_float32="nu"), TypeError, r"Write \['nu'\]"),
        (lambda: stored(optax.adam(1e-3)).update(start(), optax.adam(1e-3).init(start())), TypeError, "from_optax"),
    ],
)
def test_impossible_arguments(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_dtypes_in_other_spellings():
    for spelling, dtype in ((jnp.bfloat16, jnp.bfloat16), (np.dtype("int8"), jnp.int8), (jnp.int8, jnp.int8)):
        assert stored(optax.adam(1e-3), spelling).init(start()).inner_state[0].mu["w"].dtype == dtype


def test_the_bytes():
    """The state of Adam in 8 bits: one byte a number, and four to 256 of them."""
    params = {"w": jnp.ones((256, 512))}
    state = jamp.low_precision_state(optax.adam(1e-3), "int8").init(params)
    assert sum(x.nbytes for x in jax.tree.leaves(state)) <= 2 * params["w"].size * (1 + 4 / 256) + 100
    assert isinstance(state, LowPrecisionState)


@pytest.mark.in_turns(2)
@dtypes
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nan_stays_a_nan(dtype, bad):
    """In the state, and in the updates that later gradients make, as in float32: it must not heal in silence."""
    params = {"w": jnp.ones((16, 96))}
    healthy = jax.tree.map(jnp.ones_like, params)
    tx, full = stored(optax.adam(1e-3), dtype), optax.adam(1e-3)
    broken = {"w": healthy["w"].at[3, 7].set(bad)}
    _, state = jax.jit(tx.update)(broken, tx.init(params), params)
    _, full_state = full.update(broken, full.init(params), params)
    for name in ("mu", "nu"):
        moments = [np.isfinite(getattr(s[0], name)["w"]) for s in (jamp.to_optax(params, state)[1], full_state)]
        assert not (moments[0] & ~moments[1]).any() and moments[0][4:].all()
    for _ in range(3):
        found, state = jax.jit(tx.update)(healthy, state, params)
        expected, full_state = full.update(healthy, full_state, params)
        assert np.isnan(expected["w"][3, 7]) and np.isnan(found["w"][3, 7])
        assert np.isfinite(found["w"][4:]).all()


CHOOSING = {
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 5),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2, should_skip_update_fn=optax.skip_not_finite),
    "conditionally_transform": lambda tx: optax.conditionally_transform(tx, lambda step: step % 2 == 0),
    "conditionally_mask": lambda tx: optax.conditionally_mask(tx, lambda step: step % 2 == 0),
}


@pytest.mark.in_turns(3)
@with_and_without_scales
@pytest.mark.parametrize("wrapper", CHOOSING)
@pytest.mark.parametrize(
    "param_dtype, grad_dtype", [("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float32")]
)
def test_what_chooses_between_two_updates_finds_them_alike(wrapper, dtype, param_dtype, grad_dtype):
    """Around the stored state and inside of it: an update, or zeros or a gradient in its place."""
    params = start(param_dtype)
    grads = jax.tree.map(lambda p: p.astype(grad_dtype), gradients(params, 0))
    for tx in (CHOOSING[wrapper](stored(optax.adam(1e-3), dtype)), stored(CHOOSING[wrapper](optax.adam(1e-3)), dtype)):
        update, state = jax.jit(as_transformation(tx, "").update), tx.init(params)
        for i in range(3):
            bad = i == 1 and wrapper in ("apply_if_finite", "MultiSteps")
            given = jax.tree.map(lambda g: g * jnp.nan, grads) if bad else grads
            updates, new = update(given, state, params)
            assert_same_spec(new, state)
            assert jamp.all_finite((updates, optax.apply_updates(params, updates)))
            state = new
        np.testing.assert_allclose(np.abs(updates["w"].astype(jnp.float32)).mean(), 1e-3, rtol=0.05)


def test_updates_are_in_the_dtype_of_gradients_and_parameters():
    for param_dtype, grad_dtype, expected in (
        ("bfloat16", "bfloat16", "bfloat16"), ("bfloat16", "float32", "float32"), ("float32", "bfloat16", "float32")
    ):  # fmt: skip
        params, tx = start(param_dtype), stored(optax.adam(1e-3))
        grads = jax.tree.map(lambda p, d=grad_dtype: p.astype(d), params)
        updates, _ = tx.update(grads, tx.init(params), params)
        assert set(dtypes_of(updates).values()) == {expected}
