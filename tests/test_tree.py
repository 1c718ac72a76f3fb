import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jamp
from jamp._tree import is_floating
from tests.helpers import assert_bitwise_equal, assert_same_spec

FLOATS = ("float16", "bfloat16", "float32")


@pytest.mark.parametrize("x", [jnp.ones(2), jnp.bfloat16(1), np.ones(2), np.float32(1), jax.ShapeDtypeStruct((), "f4")])
def test_arrays_of_floats_are_floating(x):
    assert is_floating(x)


@pytest.mark.parametrize(
    "x",
    [
        1.0, 1, True, 1j, None, "float32", jnp.ones, jnp.arange(2), np.bool_(True), jnp.complex64(1),
        jax.ShapeDtypeStruct((), "i4"), jnp.float32, np.dtype("float32"),
    ],
)  # fmt: skip
def test_everything_else_is_not_floating(x):
    assert not is_floating(x)


def test_keys_are_not_floating(key):
    assert not is_floating(key)


def test_tracers_are_floating():
    seen = []
    jax.eval_shape(lambda x, i: seen.extend([is_floating(x), is_floating(i)]), jnp.ones(2), jnp.arange(2))
    assert seen == [True, False]


@pytest.mark.parametrize("dtype", FLOATS)
def test_cast_tree_keeps_structure_and_everything_that_is_not_floating(dtype, key):
    rest = {"i": jnp.arange(2), "b": np.array([True]), "k": key, "s": "name", "f": jnp.tanh, "none": None, "p": 1.5}
    floating = {"jax": jnp.ones((2, 3)), "numpy": np.ones(2), "scalar": np.float64(1), "half": jnp.ones(1, "bfloat16")}
    out = jamp.cast_tree((rest, floating), dtype)
    assert all(out[0][name] is rest[name] for name in rest)
    assert {x.dtype for x in out[1].values()} == {jnp.dtype(dtype)}
    assert [type(out[1][name]) for name in ("numpy", "scalar")] == [np.ndarray, np.dtype(dtype).type]


def test_cast_tree_of_abstract_values():
    out = jamp.cast_tree([jax.ShapeDtypeStruct((2,), "float32"), jax.ShapeDtypeStruct((2,), "int32")], "f16")
    assert out == [jax.ShapeDtypeStruct((2,), "float16"), jax.ShapeDtypeStruct((2,), "int32")]


def test_cast_tree_makes_weak_types_strong():
    weak = jnp.asarray(1.0)
    assert weak.weak_type
    assert_same_spec(jamp.cast_tree(weak, "f32"), jnp.ones((), "float32"))


def test_cast_tree_rounds_once_and_differentiates():
    x = jnp.float32(1 + 2**-12)
    assert jamp.cast_tree(x, "f16") == 1
    grad = jax.grad(lambda x: jamp.cast_tree(x, "f16") * jnp.float16(3))(x)
    assert_bitwise_equal(grad, jnp.float32(3))


def test_cast_to_half_and_full():
    tree = [jnp.ones(2), jnp.arange(2)]
    half = jamp.cast_to_half(tree)
    assert half[0].dtype == jamp.half_dtype()
    assert_bitwise_equal(jamp.cast_to_full(half), tree)


@pytest.mark.parametrize("dtype", ["int32", None, 3, "nonsense"])
def test_cast_tree_refuses_what_is_no_floating_dtype(dtype):
    with pytest.raises((ValueError, TypeError), match="dtype"):
        jamp.cast_tree(jnp.ones(2), dtype)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("dtype", [*FLOATS, "complex64"])
def test_all_finite_finds_one_bad_value(bad, dtype):
    good = jnp.ones((3, 4), dtype)
    assert jamp.all_finite([good, good])
    assert not jamp.all_finite([good, good.at[1, 2].set(bad)])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shape", [(7,), (4097,), (64, 65)])
def test_all_finite_of_many_large_values(dtype, shape):
    # Large enough for the kernels that XLA keeps for large sums, and for a sum that is not of zeros to overflow.
    largest = jnp.full(shape, float(jnp.finfo(dtype).max)).astype(dtype)
    check = jax.jit(jamp.all_finite)
    assert check(largest) and check(-largest)
    assert not check(largest.at[-1].set(jnp.nan)) and not check(largest.at[0].set(jnp.nan))
    if dtype != "float8_e4m3fn":  # It has no infinities.
        assert not check(largest.at[-1].set(jnp.inf)) and not check((-largest).at[3].set(-jnp.inf))


@pytest.mark.parametrize("tree", [None, {}, [], "name", jnp.tanh, 3, 1.5, [jnp.arange(3), True, np.array(["a"])]])
def test_all_finite_without_arrays_of_floats(tree):
    assert_bitwise_equal(jamp.all_finite(tree), jnp.array(True))


def test_all_finite_of_other_leaves(key):
    assert jamp.all_finite([key, jnp.zeros((0,)), np.zeros((), jax.dtypes.float0)])
    assert not jamp.all_finite([key, float("inf")])
    assert not jamp.all_finite(np.float32("nan"))
    assert not jamp.all_finite(complex("nanj"))


def test_all_finite_does_not_overflow():
    assert jamp.all_finite(jnp.full((1000,), 65504, "float16"))


def test_all_finite_is_one_boolean_scalar_and_jits():
    finite = jax.jit(chex.assert_max_traces(jamp.all_finite, n=1))
    for value in (1.0, np.inf):
        out = finite({"a": jnp.full(3, value), "b": jnp.float16(1)})
        assert_same_spec(out, jnp.array(True))
        assert bool(out) == np.isfinite(value)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("bad_device", [None, 0, 5])
@pytest.mark.parametrize("check_vma", [True, False])
def test_all_finite_agrees_under_shard_map(bad_device, check_vma):
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jnp.ones(8) if bad_device is None else jnp.ones(8).at[bad_device].set(jnp.nan)

    def flags(x, replicated):
        return jamp.all_finite([x, replicated], axis_name="i")[None]

    run = jax.shard_map(flags, mesh=mesh, in_specs=(P("i"), P()), out_specs=P("i"), check_vma=check_vma)
    np.testing.assert_array_equal(run(x, jnp.ones(())), np.full(8, bad_device is None))


def test_all_finite_agrees_over_several_axes():
    mesh = jax.make_mesh((4, 2), ("i", "j"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = jnp.ones((4, 2)).at[3, 1].set(jnp.inf)

    def flags(x):
        return jamp.all_finite(x, axis_name=("i", "j"))[None, None]

    run = jax.shard_map(flags, mesh=mesh, in_specs=P("i", "j"), out_specs=P("i", "j"))
    assert not run(x).any()
    assert run(jnp.ones((4, 2))).all()


def test_all_finite_under_vmap_with_and_without_axis_name():
    x = jnp.array([[1.0, 2.0], [jnp.inf, 1.0]])
    np.testing.assert_array_equal(jax.vmap(jamp.all_finite)(x), [True, False])
    agreed = jax.vmap(lambda x: jamp.all_finite(x, axis_name="i"), axis_name="i")(x)
    np.testing.assert_array_equal(agreed, [False, False])


def test_all_finite_is_global_under_jit_with_sharded_arrays():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones(8).at[6].set(jnp.nan), jax.NamedSharding(mesh, P("i")))
    assert not jax.jit(jamp.all_finite)(x)
    assert not jamp.all_finite(x)


@pytest.mark.parametrize("pred", [True, np.bool_(True), np.array(True), jnp.array(True)])
def test_select_tree_takes_any_boolean_scalar(pred):
    a, b = {"x": jnp.ones(2), "y": [jnp.zeros((), "bfloat16")]}, {"x": jnp.zeros(2), "y": [jnp.ones((), "bfloat16")]}
    assert_bitwise_equal(jamp.select_tree(pred, a, b), a)
    assert_bitwise_equal(jamp.select_tree(np.logical_not(pred), a, b), b)


def test_select_tree_compiles_once_and_keeps_specs():
    select = jax.jit(chex.assert_max_traces(jamp.select_tree, n=1))
    a = {"f": jnp.ones(2, "float16"), "i": jnp.int32(3), "b": jnp.array([True]), "c": jnp.complex64(1j)}
    b = jax.tree.map(jnp.zeros_like, a)
    assert_bitwise_equal(select(jnp.array(True), a, b), a)
    assert_bitwise_equal(select(jnp.array(False), a, b), b)
    assert_same_spec(select(jnp.array(False), a, b), a)


def test_select_tree_of_keys():
    a, b = jax.random.split(jax.random.key(0))
    for pred, wanted in [(True, a), (False, b)]:
        got = jax.jit(jamp.select_tree)(pred, a, b)
        np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(wanted))


def test_select_tree_of_integer_tangents():
    tangent = np.zeros(2, jax.dtypes.float0)
    assert jamp.select_tree(jnp.array(True), tangent, np.zeros(2, jax.dtypes.float0)).dtype == jax.dtypes.float0


def test_select_tree_of_none_and_of_empty_trees():
    assert jamp.select_tree(jnp.array(True), None, None) is None
    assert jamp.select_tree(jnp.array(True), {}, {}) == {}


def test_select_tree_keeps_leaves_that_are_not_arrays_when_they_are_equal():
    a, b = [jnp.tanh, "name", 1.5, True, jnp.ones(2)], [jnp.tanh, "name", 1.5, True, jnp.zeros(2)]
    out = jamp.select_tree(jnp.array(False), a, b)
    assert out[:4] == [jnp.tanh, "name", 1.5, True]
    assert type(out[2]) is float and type(out[3]) is bool
    assert_bitwise_equal(out[4], b[4])


def test_select_tree_of_equinox_modules(key):
    a, b = (eqx.nn.MLP(2, 2, 4, 1, activation=jax.nn.relu, key=k) for k in jax.random.split(key))
    selected = jamp.select_tree(jnp.array(False), a, b)
    assert_bitwise_equal(eqx.filter(selected, eqx.is_array), eqx.filter(b, eqx.is_array))
    assert selected.activation is b.activation


def test_select_tree_selects_between_python_numbers():
    assert_bitwise_equal(jamp.select_tree(jnp.array(False), 1, 2), jnp.where(False, 1, 2))


@pytest.mark.parametrize("pred", [jnp.ones([1]), jnp.array([True]), jnp.ones(()), 1, None, "yes", np.int32(1)])
def test_select_tree_refuses_what_is_no_boolean_scalar(pred):
    with pytest.raises(ValueError, match="expected boolean scalar"):
        jamp.select_tree(pred, None, None)


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ({"x": 1, "y": 1}, {"x": 1, "z": 1}, ["only in the first: ['y']", "only in the second: ['z']"]),
        ([1, 2], (1, 2), ["first: PyTreeDef([*, *])", "second: PyTreeDef((*, *))"]),
        ({"x": jnp.ones(2), "y": jnp.ones(2)}, {"x": jnp.ones(3), "y": jnp.ones(2, "float16")},
         ["['x']: float32[2] and float32[3]", "['y']: float32[2] and float16[2]"]),
        ({"f": jnp.tanh, "n": "a"}, {"f": jnp.tanh, "n": "b"}, ["['n']: 'a' and 'b' are not both arrays"]),
        ({"n": jnp.ones(2)}, {"n": "b"}, ["['n']: float32[2] and 'b'"]),
        ({"n": 1.0}, {"n": jnp.ones(())}, ["['n']: 1.0 and float32[]"]),
        (jnp.ones(2), jnp.ones(3), ["the tree: float32[2] and float32[3]"]),
    ],
)  # fmt: skip
def test_select_tree_names_every_leaf_that_differs(a, b, says):
    with pytest.raises(ValueError) as error:
        jamp.select_tree(jnp.array(True), a, b)
    assert all(line in str(error.value) for line in says), error.value
    assert "['f']" not in str(error.value)
