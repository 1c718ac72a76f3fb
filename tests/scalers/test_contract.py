"""What holds for every loss scaler: one table of scalers, the same tests for all of them."""

import copy
import json
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jamp
from tests.helpers import assert_bitwise_equal, assert_same_spec, spec

SCALERS = {
    "noop": jamp.NoOpLossScale,
    "static": lambda: jamp.StaticLossScale(8),
    "dynamic": lambda: jamp.DynamicLossScale(8, period=2),
    "low": lambda: jamp.DynamicLossScale(2.0**-5, period=2, min_loss_scale=2.0**-10),
    "hysteresis": lambda: jamp.DynamicLossScale(8, period=2, hysteresis=2),
    "consecutive": lambda: jamp.DynamicLossScale(8, period=2, hysteresis=3, hysteresis_refill="finite"),
    "delayed": lambda: jamp.DynamicLossScale(8, period=2, delayed=True),
}
FLAGS = jnp.array([True, True, False, False, True, True, False, True, True, True])

scalers = pytest.mark.parametrize("scaler", [make() for make in SCALERS.values()], ids=list(SCALERS))
# Those whose state changes, and is worth saving.
adaptive = pytest.mark.parametrize(
    "scaler", [make() for name, make in SCALERS.items() if name not in ("noop", "static")]
)


def run(scaler, flags):
    for flag in flags:
        scaler = scaler.adjust(flag)
    return scaler


@scalers
def test_satisfies_the_protocol(scaler):
    assert isinstance(scaler, jamp.LossScale)


@scalers
def test_leaves_are_strong_float32_and_int32(scaler):
    for leaf in jax.tree.leaves(scaler):
        assert spec(leaf) in {((), np.dtype("float32"), False), ((), np.dtype("int32"), False)}


@scalers
def test_tree_round_trips(scaler):
    leaves, treedef = jax.tree.flatten(scaler)
    assert jax.tree.unflatten(treedef, leaves) == scaler
    assert jax.tree.map(lambda x: x, scaler) == scaler
    assert jax.jit(lambda s: s)(scaler) == scaler
    hash(treedef)


@scalers
def test_unflattens_with_anything_for_leaves(scaler):
    treedef = jax.tree.structure(scaler)
    rebuilt = jax.tree.unflatten(treedef, [object()] * treedef.num_leaves)
    assert jax.tree.structure(rebuilt) == treedef


@scalers
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies(scaler, duplicate):
    assert duplicate(scaler) == scaler
    assert_bitwise_equal(duplicate(scaler), scaler)


@scalers
def test_names_its_leaves_in_key_paths(scaler):
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(scaler)]
    assert all(hasattr(scaler, path.removeprefix(".")) for path in paths)


@scalers
def test_adjust_keeps_structure_and_dtypes_in_jit_scan_and_cond(scaler):
    assert_same_spec(scaler.adjust(FLAGS[0]), scaler)
    scanned, _ = lax.scan(lambda s, flag: (s.adjust(flag), None), scaler, FLAGS)
    assert_bitwise_equal(scanned, run(scaler, FLAGS))
    assert_same_spec(lax.cond(True, lambda s: s.adjust(True), lambda s: s, scaler), scaler)


@scalers
def test_one_trace_over_growth_overflow_and_recovery(scaler):
    step = jax.jit(chex.assert_max_traces(lambda s, flag: s.adjust(flag), n=1))
    expected = scaler
    for flag in FLAGS:
        scaler, expected = step(scaler, flag), expected.adjust(flag)
        assert_bitwise_equal(scaler, expected)


@scalers
def test_vmap_adapts_every_copy_by_its_own_flag(scaler):
    copies = jax.tree.map(lambda x: jnp.stack([x, x]), scaler)
    flags = jnp.array([True, False])
    both = jax.vmap(lambda s, flag: s.adjust(flag), axis_size=2)(copies, flags)
    for i, flag in enumerate(flags):
        assert_bitwise_equal(jax.tree.map(lambda x, i=i: x[i], both), scaler.adjust(flag))


@scalers
def test_gradient_passes_through_scale_and_unscale(scaler):
    slope = jax.grad(lambda x: scaler.unscale(scaler.scale(x * 3.0)))(2.0)
    assert slope == 3.0


@scalers
def test_replicated_over_a_mesh(scaler):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))

    def step(s, grads):
        finite = jamp.all_finite(s.unscale(grads), axis_name="data")
        return s.adjust(finite), finite[None]

    grads = jnp.array([1.0, jnp.inf])
    sharded = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P("data")))
    adjusted, flags = jax.jit(sharded)(scaler, grads)
    assert_bitwise_equal(adjusted, scaler.adjust(False))
    assert flags.tolist() == [False, False]


@scalers
def test_scale_and_unscale_touch_floating_leaves_only(scaler, key):
    tree = {"int": jnp.arange(3), "bool": jnp.array(True), "key": key, "none": None, "text": "adam", "count": 7}
    for change in (scaler.scale, scaler.unscale):
        changed = change(tree)
        assert changed["text"] == "adam" and changed["count"] == 7 and changed["none"] is None
        assert all(changed[name] is tree[name] for name in ("int", "bool", "key"))


@scalers
def test_unscale_inverts_scale_exactly(scaler):
    tree = {"w": jnp.array([1.0, 0.1, -3e-20]), "b": jnp.array(3e20)}
    assert_bitwise_equal(scaler.unscale(scaler.scale(tree)), tree)


@scalers
def test_empty_trees(scaler):
    for tree in ({}, None, (), []):
        assert scaler.scale(tree) == tree and scaler.unscale(tree) == tree


@adaptive
def test_state_dict_is_json(scaler):
    moved = run(scaler, FLAGS[:4])
    restored = jamp.DynamicLossScale.from_state_dict(json.loads(json.dumps(moved.to_state_dict())))
    assert restored == moved
    assert_same_spec(restored, moved)


@adaptive
def test_survives_orbax(scaler, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    moved = run(scaler, FLAGS[:4])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "scaler", moved)
        checkpointer.wait_until_finished()
        assert_bitwise_equal(checkpointer.restore(tmp_path / "scaler", scaler), moved)
