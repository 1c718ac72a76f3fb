"""`import jamp as jmp` is a way to migrate: what jmp does, jamp does, side by side with jmp where it is installed.

Declared differences: `half_dtype()` is bfloat16 on CPU, wrong input is a ValueError, there is no `dtype_to_names`, and
`str` of a policy spells dtypes in full.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp

jmp = pytest.importorskip("jmp")

FLOAT_NAMES = ("f16", "float16", "bf16", "bfloat16", "f32", "float32", "full", "f64", "float64")


@pytest.mark.parametrize(
    "spec",
    [
        *FLOAT_NAMES,
        *(f"c={name}" for name in FLOAT_NAMES),
        *(f"p={name}" for name in FLOAT_NAMES),
        "o=f16", "p=f32,c=bf16,o=f32", "o=f32,c=f16,p=f64", "params=f16,output=full", "compute=bf16",
    ],
)  # fmt: skip
def test_policy_strings_mean_the_same(spec):
    ours, theirs = jamp.get_policy(spec), jmp.get_policy(spec)
    for name in ("param_dtype", "compute_dtype", "output_dtype"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert jamp.get_policy(str(theirs)) == ours
    assert jmp.get_policy(str(ours)) == theirs


def test_half_is_the_half_dtype():
    assert jamp.get_policy("half") == jamp.Policy(*(jamp.half_dtype(),) * 3)
    assert jamp.get_policy("c=half,o=full").compute_dtype == jamp.half_dtype()


@pytest.mark.parametrize("spec", ["compute_float16", "f8", "x=f32", "c=nonsense", "p=f32,c"])
def test_both_refuse(spec):
    for get_policy in (jamp.get_policy, jmp.get_policy):
        with pytest.raises(ValueError):
            get_policy(spec)
    with pytest.raises(ValueError, match="Unknown dtype"):
        jamp.get_policy("compute_float16")


@pytest.mark.parametrize("dtype", [np.float16, jnp.float16, jnp.bfloat16, np.float32, jnp.float32])
@pytest.mark.parametrize("ones", [np.ones, jnp.ones])
def test_policies_cast_the_same(dtype, ones):
    tree = {"f": ones([]), "i": ones([], np.int16), "o": object()}
    ours, theirs = jamp.Policy(dtype, dtype, dtype), jmp.Policy(dtype, dtype, dtype)
    assert ours.param_dtype == ours.compute_dtype == ours.output_dtype == dtype
    for name in ("cast_to_param", "cast_to_compute", "cast_to_output"):
        assert_same(getattr(ours, name)(tree), getattr(theirs, name)(tree))
    assert ours.with_output_dtype(np.float32).output_dtype == np.float32


def test_tree_casts_are_the_same():
    tree = {"h": jnp.ones([], jnp.float16), "f": jnp.ones([]), "i": jnp.ones([], jnp.int16), "o": object()}
    assert_same(jamp.cast_to_full(tree), jmp.cast_to_full(tree))
    half = jamp.cast_to_half(tree)
    assert half["f"].dtype == half["h"].dtype == jamp.half_dtype()
    assert half["i"] is tree["i"] and half["o"] is tree["o"]


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x is y or (x == y and x.dtype == y.dtype and type(x) is type(y))


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
def test_all_finite_is_the_same(bad):
    one, bad = jnp.ones([]), jnp.array(bad)
    for tree in (None, {}, {"a": one, "b": one}, {"a": bad}, {"a": one, "b": bad}, {"a": bad, "b": one}):
        assert bool(jamp.all_finite(tree)) == bool(jmp.all_finite(tree))


@pytest.mark.parametrize("pred", [True, False])
def test_select_tree_is_the_same(pred):
    a, b = {"a": jnp.ones([]), "b": jnp.zeros([])}, {"a": jnp.zeros([]), "b": jnp.ones([])}
    pred = jnp.bool_(pred)
    assert_same(jamp.select_tree(pred, a, b), jmp.select_tree(pred, a, b))
    assert jamp.select_tree(pred, None, None) is None


@pytest.mark.parametrize("name", ["StaticLossScale", "DynamicLossScale"])
@pytest.mark.parametrize("scale", [2.0, 3.0, 4.0])
def test_scales_multiply_and_divide_the_same(name, scale):
    tree = {"a": jnp.array(1.0)}
    ours, theirs = getattr(jamp, name)(jnp.float32(scale)), getattr(jmp, name)(jnp.float32(scale))
    assert_same(ours.scale(tree), theirs.scale(tree))
    assert_same(ours.unscale(ours.scale(tree)), tree)


def test_no_op_loss_scale_returns_the_very_tree():
    tree = {"a": jnp.ones([])}
    assert jamp.NoOpLossScale().scale(tree) is tree
    assert jamp.NoOpLossScale().unscale(tree) is tree
    assert jax.tree.leaves(jamp.NoOpLossScale()) == []


def test_dynamic_loss_scale_has_two_leaves():
    scale = jamp.DynamicLossScale(jnp.ones([]), jnp.zeros([], jnp.int32), 2000, 2)
    assert jax.tree.leaves(scale) == [1, 0]
    assert jax.tree.map(lambda x: x, scale) == scale


@pytest.mark.parametrize(("period", "factor", "minimum"), [(20, 2, 1.0), (3, 3, 0.37), (5, 2, 0.3125)])
def test_dynamic_loss_scale_walks_the_same_way(period, factor, minimum):
    """Growth at the period's last step, back-off to the floor, recovery: the same numbers at every step."""
    arguments = (jnp.float32(10), jnp.int32(0), period, factor, jnp.float32(minimum))
    ours, theirs = jamp.DynamicLossScale(*arguments), jmp.DynamicLossScale(*arguments)
    for finite in [True] * (2 * period + 1) + [False] * 12 + [True] * (period + 1):
        # jmp is not jitted here: that would lose its floor.
        ours, theirs = ours.adjust(jnp.bool_(finite)), theirs.adjust(jnp.bool_(finite))
        # jmp divides by the factor, jamp multiplies with its inverse: a last bit apart where that is no power of two.
        np.testing.assert_allclose(ours.loss_scale, theirs.loss_scale, rtol=0 if factor == 2 else 1e-6)
        assert ours.counter == theirs.counter
        assert (ours.period, ours.factor) == (period, factor)
