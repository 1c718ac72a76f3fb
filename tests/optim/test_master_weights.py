"""`jamp.master_weights`: half parameters that train exactly as float32 ones, rounded."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jamp

STORAGES = ("float32", "split")


def bits(x):
    return np.asarray(x).view({2: np.uint16, 4: np.uint32}[np.asarray(x).dtype.itemsize])


def assert_same_bits(actual, expected):
    np.testing.assert_array_equal(bits(actual), bits(expected))


def rounded(master, dtype, storage):
    """What a parameter has to be: numpy's integers for split storage, JAX's own rounding otherwise."""
    if storage == "float32":
        return master.astype(dtype)
    upper = ((bits(master).astype(np.uint64) + 0x8000) >> 16).astype(np.uint16)
    return upper.view(jnp.bfloat16)


def wild_gradients(key, steps, size, dtype):
    """Gradients of all magnitudes and both signs, some zero: weights cross zero, overflow, shrink to nothing."""
    k1, k2, k3 = jax.random.split(key, 3)
    exponent = jax.random.randint(k1, (steps, size), -20, 15).astype(jnp.float32)
    values = jax.random.normal(k2, (steps, size)) * jnp.exp2(exponent)
    values = jnp.clip(values, -6e4, 6e4)
    return jnp.where(jax.random.bernoulli(k3, 0.1, values.shape), 0, values).astype(dtype)


CASES = [("float32", "bfloat16"), ("split", "bfloat16"), ("float32", "float16")]


@pytest.mark.nightly
@pytest.mark.parametrize("storage, dtype", CASES)
def test_ten_thousand_steps_equal_float32_training_bit_for_bit(key, storage, dtype):
    params = jnp.tile(jnp.array([1.0, -1.0, 0.0, -0.0, 2.0**-24, 1e-3, -3e4, 6e4], dtype), 4)
    plain = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(2.0))  # Each step goes near -2 * gradient.
    tx = jamp.master_weights(plain, storage)

    def step(carry, grads):
        params, opt_state, full, plain_state = carry
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        updates, plain_state = plain.update(grads.astype(jnp.float32), plain_state, full)
        full = optax.apply_updates(full, updates)
        return (params, opt_state, full, plain_state), (params, jamp.master_params(opt_state, params), full)

    full = params.astype(jnp.float32)
    grads = wild_gradients(key, 10_000, params.size, dtype)
    carry = (params, tx.init(params), full, plain.init(full))
    _, (trail, masters, full_trail) = jax.jit(lambda c, g: lax.scan(step, c, g))(carry, grads)

    assert_same_bits(masters, full_trail)
    assert_same_bits(trail, rounded(full_trail, dtype, storage))
    old, new = (np.asarray(x, np.float32) for x in (trail[:-1], trail[1:]))
    assert (np.sign(old) * np.sign(new) < 0).sum() > 1000
    with np.errstate(invalid="ignore"):  # inf - inf
        assert (old + (new - old) != new).sum() > 10  # Steps that no float32 number added to the parameter can make.
    assert dtype == "bfloat16" or np.isfinite(new[np.isinf(old)]).sum() > 100


@pytest.mark.parametrize("storage, dtype", CASES)
def test_any_bit_pattern_is_reached_from_any_other(key, storage, dtype):
    """Infinities, denormals and zeros of both signs included: the master is set, as a schedule of weights would."""
    every = jnp.arange(2**16, dtype=jnp.uint16)
    params = lax.bitcast_convert_type(every, jnp.dtype(dtype))
    params = params[jnp.isfinite(params) | jnp.isinf(params)]
    target = jax.random.permutation(key, params)

    update = jamp.optim.ExactUpdate.between(params, target)
    assert_same_bits(jax.jit(optax.apply_updates)(params, update), target)
    assert_same_bits(optax.apply_updates(np.asarray(params), update), target)


def test_a_float16_weight_overflows_and_comes_back():
    params = jnp.array([65504.0], jnp.float16)
    tx = jamp.master_weights(optax.sgd(1.0))
    opt_state = tx.init(params)
    trail = []
    for g in (-16.0, -100.0, 116.0, 65504.0):
        updates, opt_state = tx.update(jnp.array([g], jnp.float32), opt_state, params)
        params = optax.apply_updates(params, updates)
        trail.append(float(params[0]))
    assert trail == [np.inf, np.inf, 65504.0, 0.0]


@pytest.mark.parametrize("storage", STORAGES)
def test_infinite_and_nan_masters_show_in_the_parameters(storage):
    params = jnp.array([1.0, 1.0, 1.0, 1.0], jnp.bfloat16)
    tx = jamp.master_weights(optax.sgd(1.0), storage)
    odd_nan = lax.bitcast_convert_type(jnp.uint32(0xFFFFFFFF), jnp.float32)  # Plain bit arithmetic rounds it to 0.0.
    updates, opt_state = tx.update(jnp.array([jnp.inf, -jnp.inf, jnp.nan, odd_nan]), tx.init(params), params)
    params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(np.asarray(params, np.float32), [-np.inf, np.inf, np.nan, np.nan])
    np.testing.assert_array_equal(jamp.master_params(opt_state, params), [-np.inf, np.inf, np.nan, np.nan])


@pytest.mark.parametrize("storage, bytes_per_weight", [("float32", 4), ("split", 2)])
def test_state_has_the_bytes_it_needs(storage, bytes_per_weight):
    params = {"w": jnp.zeros(1000, jnp.bfloat16), "norm": jnp.zeros(10), "step": jnp.int32(0)}
    state = jamp.master_weights(optax.identity(), storage).init(params)
    assert sum(x.nbytes for x in jax.tree.leaves(state)) == 1000 * bytes_per_weight


@pytest.mark.parametrize("storage", STORAGES)
def test_other_leaves_pass_through(storage):
    params = {"w": jnp.ones(2, jnp.bfloat16), "norm": jnp.ones(2), "none": None}
    tx = jamp.master_weights(optax.sgd(2.0**-10), storage)
    updates, _ = tx.update({"w": jnp.ones(2), "norm": jnp.ones(2, jnp.bfloat16), "none": None}, tx.init(params), params)
    new = optax.apply_updates(params, updates)
    assert (new["norm"] == 1 - 2.0**-10).all() and new["norm"].dtype == jnp.float32
    assert (new["w"] == 1).all() and new["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("storage", STORAGES)
def test_parameters_changed_by_others_count(storage):
    params = jnp.array([1.0, 1.0], jnp.bfloat16)
    tx = jamp.master_weights(optax.sgd(1.0), storage)
    updates, opt_state = tx.update(jnp.full(2, 2.0**-10), tx.init(params), params)
    params = optax.apply_updates(params, updates).at[0].set(0.5)  # The low bits of split storage stay; 2^-10 is there.
    masters = jamp.master_params(opt_state, params)
    assert masters[1] == 1 - 2.0**-10
    assert masters[0] == (0.5 if storage == "float32" else 0.5 - 2.0**-11)


@pytest.mark.parametrize("storage", STORAGES)
def test_skipping_by_zeroing_every_array_leaves_parameters_alone(storage):
    params = jnp.array([1.0, -0.0, jnp.inf, 1e-39], jnp.bfloat16)
    tx = jamp.master_weights(optax.sgd(1.0), storage)
    updates, _ = tx.update(jnp.ones(4), tx.init(params), params)
    assert_same_bits(optax.apply_updates(params, jax.tree.map(jnp.zeros_like, updates)), params)


@pytest.mark.parametrize("nest", [lambda tx: optax.MultiSteps(jamp.master_weights(tx), 2),
                                  lambda tx: jamp.master_weights(optax.MultiSteps(tx, 2))])  # fmt: skip
def test_multi_steps_works_on_either_side(nest):
    params = jnp.array([1.0], jnp.bfloat16)
    tx = nest(optax.sgd(1.0))
    opt_state, trail = tx.init(params), []
    for _ in range(4):
        updates, opt_state = tx.update(jnp.array([0.5], jnp.bfloat16), opt_state, params)
        params = optax.apply_updates(params, updates)
        trail.append(float(params[0]))
    assert trail == [1.0, 0.5, 0.5, 0.0]


def test_extra_arguments_reach_the_inner_transformation():
    def update(updates, state, params=None, *, factor):
        return jax.tree.map(lambda g: g * factor, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = jamp.master_weights(inner)
    params = jnp.ones(1, jnp.bfloat16)
    updates, _ = tx.update(jnp.ones(1), tx.init(params), params, factor=2.0)
    assert optax.apply_updates(params, updates) == 3


class LinearNNX(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones(2, jnp.bfloat16))


def test_flax_nnx_optimizer_applies_the_updates():
    model = LinearNNX()
    optimizer = nnx.Optimizer(model, jamp.master_weights(optax.sgd(2.0**-4)), wrt=nnx.Param)
    for _ in range(8):
        optimizer.update(model, nnx.grad(lambda m: m.w[...].astype(jnp.float32).sum())(model))
    assert model.w[...].dtype == jnp.bfloat16 and (model.w[...] == 0.5).all()


def test_equinox_models_are_partitioned():
    model = eqx.nn.Linear(2, 1, use_bias=False, key=jax.random.key(0))
    params, static = eqx.partition(jax.tree.map(jnp.ones_like, model), eqx.is_inexact_array)
    params = jamp.half_params(params)
    tx = jamp.master_weights(optax.sgd(2.0**-4))
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
    model = eqx.combine(optax.apply_updates(params, updates), static)
    assert model.weight.dtype == jnp.bfloat16 and (model.weight == 1 - 2.0**-4).all()


def test_save_dtype_is_a_view():
    params = {"w": jnp.ones(1, jnp.bfloat16), "step": jnp.int32(3)}
    tx = jamp.master_weights(optax.sgd(1.0))
    grads = {"w": jnp.full(1, 2.0**-10), "step": jnp.int32(0)}
    _, opt_state = tx.update(grads, tx.init(params), params)
    params = {"w": jnp.ones(1, jnp.bfloat16), "step": jnp.int32(3)}
    assert jamp.master_params(opt_state, params)["w"] == 1 - 2.0**-10
    assert jamp.master_params(opt_state, params)["step"].dtype == jnp.int32
    assert jamp.master_params(opt_state, params, "float16")["w"].dtype == jnp.float16


def test_errors_say_what_to_do():
    params = {"a": jnp.ones(1, jnp.float16), "b": [jnp.ones(1, jnp.float16)], "c": jnp.ones(1, jnp.bfloat16)}
    with pytest.raises(ValueError, match="'Float32': expected one of 'float32', 'split'"):
        jamp.master_weights(optax.sgd(1.0), "Float32")
    with pytest.raises(ValueError, match=r"\['a'\], \['b'\]\[0\]. A float16 has"):
        jamp.master_weights(optax.sgd(1.0), "split").init(params)
    tx = jamp.master_weights(optax.sgd(1.0))
    opt_state = tx.init(params)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params, opt_state)
    with pytest.raises(ValueError, match=r"\['a'\] is float32, and was not"):
        tx.update(params, opt_state, jamp.cast_to_full(params))
    with pytest.raises(ValueError, match="Found 0 states of master_weights"):
        jamp.master_params(optax.sgd(1.0).init(params), params)
    with pytest.raises(ValueError, match="Found 2 states of master_weights"):
        jamp.master_params((opt_state, opt_state), params)
    updates, _ = tx.update(params, opt_state, params)
    with pytest.raises(TypeError, match="Put transformations that change updates inside"):
        optax.apply_updates(params, jax.tree.map(lambda u: u * 0.5, updates))
    with pytest.raises(ValueError, match="'int8'"):
        jamp.half_params(params, "int8")
    with pytest.raises(ValueError, match="expected 'bfloat16' or 'float16'"):
        jamp.half_params(params, "float32")


@pytest.mark.parametrize("path", [
    ("params", "LayerNorm_0", "bias"), ("params", "BatchNorm_3", "scale"), ("resnet/~/batch_norm", "offset"),
    ("block", "bn1", "bias"), ("h", "ln_f", "bias"), ("h", "ln1", "bias"), ("h", "LN", "bias"),
    ("layer", "gamma"), ("x", "RMSNorm", "w"), ("block", "attn_norm"),
])  # fmt: skip
def test_norms_stay_float32(path):
    tree = functools.reduce(lambda tree, name: {name: tree}, reversed(path), jnp.ones(1))
    assert jax.tree.leaves(jamp.half_params(tree))[0].dtype == jnp.float32
    assert jax.tree.leaves(jamp.half_params(tree, keep_float32=()))[0].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "names", [("mean", "var"), ("moving_mean", "moving_variance"), ("running_mean", "running_var")]
)
def test_running_statistics_stay_float32_whatever_their_layer_is_called(names):
    stats = dict.fromkeys(names, jnp.ones(2))
    cast = jamp.half_params({"batch_stats": {"n": stats}, "params": {"n": {"kernel": jnp.ones((2, 2))}}})
    assert {leaf.dtype for leaf in jax.tree.leaves(cast["batch_stats"])} == {jnp.dtype("float32")}
    assert cast["params"]["n"]["kernel"].dtype == jnp.bfloat16


def test_everything_else_is_cast():
    params = {"Dense_0": {"kernel": jnp.ones(1), "bias": jnp.ones(1)}, "head": [jnp.ones(1)], "step": jnp.int32(1)}
    cast = jamp.half_params(params, "f16")
    assert [x.dtype.name for x in jax.tree.leaves(cast)] == ["float16", "float16", "float16", "int32"]
    assert jamp.half_params({"embed": jnp.ones(1)}, keep_float32=["EMB*"])["embed"].dtype == jnp.float32
    cast = jamp.half_params(
        {"a": jnp.ones(1), "dec": {"b": jnp.ones(1), "x": {"c": jnp.ones(1)}}}, keep_float32=["DEC/x/*"]
    )
    assert [x.dtype.name for x in jax.tree.leaves(cast)] == ["bfloat16", "bfloat16", "float32"]
    with pytest.raises(TypeError, match=r"Write \['\*norm\*'\]"):
        jamp.half_params(params, keep_float32="*norm*")


@pytest.mark.parametrize("path", [
    ("norm_free_resnet/~/conv", "w"), ("PreNorm_0", "Attention_0", "kernel"), ("ln_block", "mlp", "dense", "bias"),
])  # fmt: skip
def test_layers_inside_of_something_named_like_a_norm_are_cast(path):
    tree = functools.reduce(lambda tree, name: {name: tree}, reversed(path), jnp.ones(1))
    assert jax.tree.leaves(jamp.half_params(tree))[0].dtype == jnp.bfloat16


def test_norms_of_nnx_stay_float32():
    rngs = nnx.Rngs(0)
    state = nnx.state({"norm1": nnx.BatchNorm(2, rngs=rngs), "linear": nnx.Linear(2, 2, rngs=rngs)}, nnx.Param)
    state = jamp.half_params(state)
    assert {x.dtype.name for x in jax.tree.leaves(state["norm1"])} == {"float32"}
    assert {x.dtype.name for x in jax.tree.leaves(state["linear"])} == {"bfloat16"}
