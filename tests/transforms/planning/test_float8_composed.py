"""Products in 8 bits under several of JAX's transformations at once, and on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jamp
from tests.transforms.planning.test_float8 import FLOAT8, POLICIES, SIZE, C, W, X, assert_near, layer, powers, rounded

WS, XS, CS = np.stack([W, W[::-1]]), np.stack([X, X[::-1]]), np.stack([C, -C])
DOTS = "O2:bfloat16,float8=['dot_general']"


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("policy", [f"{policy},float8=['dot_general']" for policy in POLICIES])
@pytest.mark.parametrize("form", ["vmap", "einsum", "scan"])
def test_gradients_of_products_with_a_batch(form, policy):
    def stacked(ws, xs):
        if form == "vmap":
            return jax.vmap(layer)(ws, xs)
        if form == "einsum":
            return jnp.einsum("bij,bjk->bik", xs, ws) @ jnp.eye(SIZE)
        return lax.scan(lambda carry, w: (carry, jax.vmap(layer)(w, xs)), 0.0, ws[None])[1][0]

    half = jamp.get_policy(policy).compute_dtype
    loss = jamp.cast_fn(lambda ws, xs: (stacked(ws, xs) * CS).sum(), policy)
    assert "f8_e4m3fn" in str(jax.make_jaxpr(loss)(WS, XS))
    dws, dxs = jax.jit(jax.grad(loss, argnums=(0, 1)))(WS, XS)
    np.testing.assert_array_equal(dws, rounded(np.einsum("bij,bik->bjk", XS, CS), half))
    np.testing.assert_array_equal(dxs, rounded(np.einsum("bik,bjk->bij", CS, WS), half))


def test_the_gradient_of_an_attention_that_a_rule_puts_into_8_bits():
    def attend(w, x):
        q, k, v = (jnp.tanh(x @ w[i]).reshape(2, 64, 4, 16).swapaxes(1, 2) for i in range(3))
        weights = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k) / 4)
        return (jnp.einsum("bhqk,bhkd->bhqd", weights, v) ** 2).mean()

    w = np.float32(np.random.default_rng(0).normal(size=(3, SIZE, SIZE)) / 8)
    x = np.float32(np.random.default_rng(1).normal(size=(2, 64, SIZE)))
    found, expected = (jax.jit(jax.grad(fn))(w, x) for fn in (jamp.cast_fn(attend, DOTS), attend))
    assert_near(found, expected, 0.2)


def scanned(ws, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]


def mapped(ws, x):
    return lax.map(lambda x: jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]), x[None])[0]


def looped(ws, x):
    return lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ ws[i]), x)


@pytest.mark.in_turns(8)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "model",
    [scanned, mapped, looped, jax.checkpoint(scanned), lambda ws, x: scanned(ws, x.reshape(2, SIZE, SIZE))],
    ids=["scan", "map", "fori", "remat", "more axes"],
)
def test_second_derivatives_in_loops(model, policy):
    draw = np.random.default_rng(0)
    x = jnp.asarray(draw.normal(size=(128, SIZE)), jnp.float32)
    ws, v = (jnp.asarray(draw.normal(size=(2, SIZE, SIZE)) / 8, jnp.float32) for _ in range(2))

    def loss(ws):
        return (model(ws, x) ** 2).mean()

    def forward(fn):
        return jax.jit(lambda ws: jax.jvp(jax.grad(fn), (ws,), (v,))[1])(ws)

    def reverse(fn):
        return jax.jit(jax.grad(lambda ws: (jax.grad(fn)(ws) * v).sum()))(ws)

    for of in (forward, reverse):
        assert_near(of(jamp.cast_fn(loss, policy)), of(loss), 0.15)  # Without a term it is off by 0.3 at the least.


def meshed(kind, mesh):
    """The product of data that is sharded, over devices that see their part, or know of the whole."""
    if kind == "explicit":
        return layer
    return jax.shard_map(layer, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["explicit", "shard_map"])
def test_gradients_on_a_mesh(kind, policy):
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    half = jamp.get_policy(policy).compute_dtype
    rows = 128 if kind == "explicit" else 4 * 128  # Those of the whole, or of a device.
    xs, cs = powers(6, rows, SIZE), powers(7, rows, SIZE)
    with jax.set_mesh(mesh):
        fn = meshed(kind, mesh)
        loss = jamp.cast_fn(lambda w, x, c: (fn(w, x) * c).sum(), policy)
        args = jax.device_put(W, P()), jax.device_put(xs, P("data")), jax.device_put(cs, P("data"))
        # JAX's product of blocks does not know of such a mesh, and is written out.
        in_half = kind == "explicit" and "mxfp8" in policy
        assert (jamp.report(loss.__wrapped__, *args, policy=policy).forward.float8 == 0) == in_half
        dw, dx = jax.jit(jax.grad(loss, argnums=(0, 1)))(*args)
        np.testing.assert_array_equal(dx, rounded(cs @ W.T, half))
        if kind == "explicit":
            np.testing.assert_array_equal(dw, rounded(xs.T @ cs, half))
        else:  # Each device rounds its part.
            assert_near(dw, xs.T @ cs, 0.01)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [64, 256])
@pytest.mark.parametrize("stacked", [False, True])
def test_the_contracted_axis_may_be_sharded(stacked, size, policy):
    """Also where devices have parts of blocks: 16 rows each."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    w, x = powers(1, size, size), powers(2, 512, size)

    def loss(w, x):
        if not stacked:
            return jnp.square(jnp.tanh(x @ w)).sum()
        return jnp.square(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]).sum()

    w, spec = (jnp.stack([w, w]) / size**0.5, P(None, "data")) if stacked else (w, P("data"))
    policy = f"{policy},float8=['dot_general']"
    alone = jax.jit(jax.grad(jamp.cast_fn(loss, policy)))(w, x)
    with jax.set_mesh(mesh):
        args = jax.device_put(w, spec), jax.device_put(x, P())
        dw = jax.jit(jax.grad(jamp.cast_fn(loss, policy)))(*args)
        assert jax.typeof(dw).sharding.spec == jax.typeof(args[0]).sharding.spec
    # Sums over devices are added up in another order.
    assert_near(dw, alone, 0.02)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_product_may_say_how_its_result_is_sharded(policy):
    """As of a layer that is parallel over its rows, and has a sum over devices."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    w, v, x = powers(1, SIZE, 2 * SIZE), powers(2, 2 * SIZE, SIZE), powers(3, 128, SIZE)

    def loss(w, v, x, inner=None, outer=None):
        h = jnp.dot(x, w, out_sharding=inner)
        return jnp.square(jnp.dot(jnp.tanh(h / 64), v, out_sharding=outer) @ jnp.ones((SIZE, 8)) / 64).sum()

    alone = jax.jit(jax.grad(jamp.cast_fn(loss, policy), (0, 1)))(w, v, x)
    with jax.set_mesh(mesh):
        specs = P(None, "model"), P("model"), P("data")
        args = [jax.device_put(value, spec) for value, spec in zip((w, v, x), specs, strict=True)]
        told = functools.partial(loss, inner=P("data", "model"), outer=P("data", None))
        rows = jamp.report(told, *args, policy=policy).operations
        rules = [row.rule for row in rows if row.primitive == "dot_general"]
        assert rules[:2] == ["float8"] * 2
        found = jax.jit(jax.grad(jamp.cast_fn(told, policy), (0, 1)))(*args)
    for one, other, value in zip(found, alone, args, strict=False):
        assert jax.typeof(one).sharding.spec == jax.typeof(value).sharding.spec
        assert_near(one, other, 0.02)


def test_the_result_of_a_product_is_sharded_as_its_call_says():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x, w = jax.device_put(X.T, P(None, "data")), jax.device_put(X, P("data"))
        fn = jamp.cast_fn(lambda x, w: jnp.dot(x, w, out_sharding=P("data")) @ jnp.eye(SIZE), FLOAT8)
        y = jax.jit(fn)(x, w)
        assert jax.typeof(y).sharding.spec[0] == "data"
        # A sum over devices is added up in another order, and may be rounded to the next number.
        np.testing.assert_allclose(np.asarray(y, np.float32), np.asarray(rounded(X.T @ X), np.float32), rtol=2**-7)


@pytest.mark.parametrize("policy", [FLOAT8, f"{FLOAT8},weight_grad=half", "O2:bfloat16,matmul=mxfp8"])
def test_float32_gradients_of_half_weights(policy):
    x = np.zeros((320, SIZE), np.float32)
    x[:257] = 1  # 257 is no bfloat16.
    loss = jamp.cast_fn(lambda w, x: layer(w, x).sum(), policy)
    w = jnp.asarray(W, jnp.bfloat16)
    _, half = jax.value_and_grad(loss)(w, x)
    _, wide = jax.jit(jamp.float32_gradients(jax.value_and_grad(loss)))(w, x)
    assert half.dtype == jnp.bfloat16
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(half, 256)
    np.testing.assert_array_equal(wide, 257)
