"""`reduce=float32`: gradients of weights are float32 from the product that makes them to the sum over devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jamp

HALF, WIDE = "O2:bfloat16", "O2:bfloat16,reduce=float32"
DEVICES, ROWS, WIDTH = 4, 257, 4  # A device adds up 257 ones, of which bfloat16 makes 256.
EYE = jnp.eye(WIDTH)
X = jnp.ones((DEVICES * ROWS, WIDTH))


def product(w, x):
    return x @ w


def call(w, x):
    return jax.jit(product)(w, x)


def mapped(w, x):
    return jax.vmap(lambda x: x @ w)(x)


def rematerialized(w, x):
    return jax.checkpoint(product)(w, x)


def scanned(w, x):
    """Over layers."""
    return lax.scan(lambda h, w: (h @ w, None), x, w[None])[0]


def transposed(w, x):
    return jnp.einsum("bi,oi->bo", x, w)


def convolution(w, x):
    return lax.conv(x[:, :, None], w[:, :, None], (1,), "VALID")


FORMS = (product, call, mapped, rematerialized, scanned, transposed, convolution)


def over_devices():
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def gradient(form, policy):
    return jax.grad(lambda w, x: jamp.cast_fn(form, policy)(w, x).sum())


def sharded(form, policy):
    everywhere, rows = (NamedSharding(over_devices(), spec) for spec in (P(), P("data")))
    return jax.jit(gradient(form, policy), in_shardings=(everywhere, rows), out_shardings=everywhere)


def all_reduces(function, policy):
    """By dtype, the number of all-reduces of gradients. XLA:CPU promotes those in half, and says so in their name."""
    text = function.lower(EYE, X).compile().as_text()
    found = re.findall(r"= f32\S* all-reduce\(.*to_apply=%(\S+?)[,\s]", text)
    wide = sum("promoted" not in name for name in found)
    return {"half": len(found) - wide, "float32": wide}


@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_whole_over_sharded_arrays(form):
    expected = np.full_like(EYE, DEVICES * ROWS)
    got = sharded(form, WIDE)(EYE, X)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, expected)
    assert not np.array_equal(sharded(form, HALF)(EYE, X), expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_are_whole_in_shard_map(check_vma):
    def of_one(w, x):
        local = lax.pcast(w, "data", to="varying") if check_vma else w
        return lax.psum(gradient(product, WIDE)(local, x), "data")

    run = jax.shard_map(
        of_one, mesh=over_devices(), in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
    )  # fmt: skip
    np.testing.assert_array_equal(jax.jit(run)(EYE, X), np.full_like(EYE, DEVICES * ROWS))


def test_gradients_that_shard_map_adds_up_itself_are_whole():
    """A replicated weight meets a sharded batch: the derivative of that is a sum over devices."""
    run = jax.shard_map(gradient(product, WIDE), mesh=over_devices(), in_specs=(P(), P("data")), out_specs=P())
    np.testing.assert_array_equal(jax.jit(run)(EYE, X), np.full_like(EYE, DEVICES * ROWS))


@pytest.mark.parametrize(("policy", "expected"), [(HALF, {"half": 1, "float32": 0}), (WIDE, {"half": 0, "float32": 1})])
def test_the_dtype_of_compiled_all_reduces(policy, expected):
    assert all_reduces(sharded(mapped, policy), policy) == expected


@pytest.mark.parametrize("policy", [HALF, WIDE])
def test_gradients_of_biases_are_whole_at_any_setting(policy):
    """A bias has no product whose accumulator is half: its gradient is a sum over rows, and over devices."""
    everywhere, rows = (NamedSharding(over_devices(), spec) for spec in (P(), P("data")))
    of_bias = jax.grad(lambda b, x: jamp.cast_fn(lambda b, x: (x @ EYE + b) * x, policy)(b, x).sum())
    function = jax.jit(of_bias, in_shardings=(everywhere, rows), out_shardings=everywhere)
    np.testing.assert_array_equal(function(jnp.zeros(len(EYE)), X), np.full(len(EYE), DEVICES * ROWS))
    text = function.lower(jnp.zeros(len(EYE)), X).compile().as_text()
    reduced = re.findall(r"= f32\S* all-reduce\(.*to_apply=%(\S+?)[,\s]", text)
    assert reduced and not any("promoted" in name for name in reduced)


def test_products_stay_half():
    jaxpr = str(jax.make_jaxpr(gradient(product, WIDE))(EYE, X))
    operands = re.findall(r"dot_general\[.*?\] (\w+) (\w+)", jaxpr, re.DOTALL)
    dtypes = dict(re.findall(r"(\w+):(\w+)\[", jaxpr))
    assert operands
    assert {dtypes[name] for pair in operands for name in pair} == {"bf16"}


def test_no_more_is_kept():
    def layers(w, x):
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    kept = [jamp.report(layers, EYE, X, policy=policy).residual_bytes for policy in (HALF, WIDE)]
    assert kept[0] == kept[1]


def test_derivatives_of_other_operands_and_forward_mode_are_the_same():
    w, x = jax.random.normal(jax.random.key(0), (2, 8, 8))

    def derivatives(policy):
        run = jamp.cast_fn(lambda w, x: jnp.sin(jnp.sin(x) @ w).sum(), policy)
        second = jax.grad(lambda w: jnp.vdot(jax.grad(run)(w, x), w))(w)
        return jax.grad(run, 1)(w, x), jax.jvp(run, (w, x), (x, w))[1], second

    run = jax.jit(derivatives, static_argnums=0)
    for wide, half in zip(run(WIDE), run(HALF), strict=True):
        np.testing.assert_allclose(wide, half, rtol=0, atol=0.03 * np.abs(half).max())


def test_what_has_no_float32_gradients_is_an_error():
    with pytest.raises(ValueError, match="p=float32"):
        jamp.get_policy("O3:bfloat16,reduce=float32")
    assert jamp.get_policy("O3:bfloat16,p=float32,reduce=float32").reduce == "float32"


EIGHT_BITS = ["matmul=float8", "matmul=float8,weight_grad=half", "matmul=float8,float8_scales=row", "matmul=mxfp8"]
MANY = 4112  # Rows, of which bfloat16 makes 4096.


def halved(w, x):
    return jax.vmap(lambda x: x @ w)(x.reshape(2, -1, len(w)))


def experts(w, x):
    return lax.ragged_dot(x, w[None], jnp.array([len(x)]))


def of_weight(form, setting, reduce):
    """The gradient of a weight of 32 x 32, over many rows of ones."""
    policy = jamp.get_policy(f"O2:bfloat16,{setting},reduce={reduce}").with_rules(float8=["*"])
    return jax.grad(lambda w: jamp.cast_fn(form, policy)(w, jnp.ones((MANY, 32))).sum())(jnp.eye(32))


CASES = [(form, setting) for setting in EIGHT_BITS for form in (product, scanned, rematerialized, halved)]
CASES += [(form, setting) for setting in EIGHT_BITS[:2] for form in (convolution, experts)]


@pytest.mark.parametrize(("form", "setting"), CASES)
def test_gradients_of_products_in_8_bits_never_were_half(form, setting):
    np.testing.assert_array_equal(of_weight(form, setting, "float32"), np.full((32, 32), MANY, np.float32))


@pytest.mark.parametrize("setting", EIGHT_BITS)
@pytest.mark.parametrize("rows", [4096 + 16, 4096 + 32])
def test_gradients_of_an_ensemble_in_8_bits_never_were_half(setting, rows):
    policy = jamp.get_policy(f"O2:bfloat16,{setting},reduce=float32").with_rules(float8=["*"])
    cast = jamp.cast_fn(lambda w, x: jax.vmap(lambda w: x @ w)(w), policy)
    got = jax.jit(jax.grad(lambda w: cast(w, jnp.ones((rows, 32))).sum()))(jnp.stack([jnp.eye(32)] * 2))
    np.testing.assert_array_equal(got, np.full((2, 32, 32), rows, np.float32))


@pytest.mark.parametrize("setting", EIGHT_BITS)
def test_gradients_of_products_in_8_bits_are_half_where_nothing_is_said(setting):
    np.testing.assert_array_equal(of_weight(product, setting, "half"), np.full((32, 32), 4096, np.float32))


@pytest.mark.parametrize("setting", EIGHT_BITS)
def test_gradients_of_products_in_8_bits_are_whole_over_devices(setting):
    w, x = jnp.eye(32), jnp.ones((DEVICES * 1040, 32))
    policy = jamp.get_policy(f"O2:bfloat16,{setting},reduce=float32").with_rules(float8=["*"])
    np.testing.assert_array_equal(sharded(product, policy)(w, x), np.full_like(w, len(x)))


def over_rows(form, policy, mapped):
    """The gradient of a weight that all devices have, of rows that each has some of."""
    if not mapped:
        return sharded(form, policy)
    return jax.jit(jax.shard_map(gradient(form, policy), mesh=over_devices(), in_specs=(P(), P("data")), out_specs=P()))


@pytest.mark.parametrize("mapped", [False, True], ids=["sharded arrays", "shard_map"])
@pytest.mark.parametrize("reduce", ["half", "float32"])
@pytest.mark.parametrize("setting", EIGHT_BITS)
def test_gradients_of_products_in_8_bits_are_added_up_over_devices_as_asked(setting, reduce, mapped):
    """Scales are powers of two, so that a product may be bfloat16 before it is scaled: sums send half of the bytes."""
    policy = jamp.get_policy(f"O2:bfloat16,{setting},reduce={reduce}").with_rules(float8=["*"])
    w, x = jnp.eye(32), jnp.ones((DEVICES * 64, 32))
    text = over_rows(product, policy, mapped).lower(w, x).compile().as_text()
    found = re.findall(r"= f32\[(?:1,)?32,32\]\S* all-reduce\(.*to_apply=%(\S+?)[,\s]", text)
    assert ["promoted" in name for name in found] == [reduce == "half"]


@pytest.mark.parametrize(("reduce", "dtype"), [("half", "bf16"), ("float32", "f32")])
@pytest.mark.parametrize("setting", EIGHT_BITS)
def test_weights_of_products_in_8_bits_are_gathered_as_asked(setting, reduce, dtype):
    policy = jamp.get_policy(f"O2:bfloat16,{setting},reduce={reduce}").with_rules(float8=["*"])

    def loss(w, x):
        return lax.pmean((x @ lax.all_gather(w, "data", tiled=True)).sum(), "data")

    run = jax.shard_map(loss, mesh=over_devices(), in_specs=(P("data"), P("data")), out_specs=P())
    w, x = jax.random.normal(jax.random.key(0), (32, 32)), jax.random.normal(jax.random.key(1), (DEVICES * 64, 32))
    differentiated = jax.grad(jamp.cast_fn(run, policy))
    jaxpr = str(jax.make_jaxpr(differentiated)(w, x))
    assert re.findall(r":(\w+)\[[^\n]*= (?:all_gather|reduce_scatter)", jaxpr) == [dtype] * 2
    expected = jax.grad(run)(w, x)
    assert jnp.linalg.norm(differentiated(w, x) - expected) <= 0.05 * jnp.linalg.norm(expected)
