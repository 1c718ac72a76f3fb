"""Products in 8 bits: which they are, what they compute, forward and backward, and what they keep.

Of powers of two, of which few are added up, nothing is rounded in 8 bits: expected numbers are exact.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.jet import jet
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jamp
from benchmarks.models import objective
from benchmarks.zoo import load
from jamp._dtypes import E4M3, E5M2
from jamp.transforms.emission.quantized import dequantize, quantize
from jamp.transforms.program.setting import Scaling

FLOAT8 = "O2:bfloat16,matmul=float8"
POLICIES = (
    FLOAT8,
    "O1:bfloat16,matmul=float8",
    "O2:float16,matmul=float8,grad_dtype=e5m2",
    "O2:bfloat16,matmul=float8,float8_scales=row",
    "O2:bfloat16,matmul=float8,weight_grad=half",
    "O2:bfloat16,matmul=mxfp8",
)
SIZE = 64
EYE = np.eye(SIZE, dtype=np.float32)


def powers(seed: int, *shape: int) -> np.ndarray:
    """Powers of two of either sign."""
    draw = np.random.default_rng(seed)
    return np.float32(draw.choice([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0], shape))


def layer(w, x):
    """A product that is not the last."""
    return x @ w @ jnp.asarray(EYE)


def weighed(c, w, x):
    return (layer(w, x) * c).sum()


def rounded(x: np.ndarray, dtype=jnp.bfloat16) -> np.ndarray:
    return np.asarray(np.asarray(x, dtype), np.float32)


def products(fn, *args, policy=FLOAT8) -> list[str]:
    """The rules of the products of a function, alike ones as often as there are."""
    found = [op for op in jamp.report(fn, *args, policy=policy).operations if op.primitive == "dot_general"]
    return [op.rule for op in found for _ in range(op.count)]


def of_shape(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def assert_near(found: np.ndarray, expected: np.ndarray, tolerance: float = 0.06) -> None:
    assert np.linalg.norm(found - expected) < tolerance * np.linalg.norm(expected)


def cycled(w, x):
    """The same function of `w` and `x`, from inside of a loop."""
    return lax.scan(lambda carry, both: (carry, layer(*both)), 0.0, (w[None], x[None]))[1][0]


W, X, C = powers(0, SIZE, SIZE), powers(1, 128, SIZE), powers(2, 128, SIZE)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("policy", POLICIES)
def test_values_and_gradients_of_powers_of_two_are_exact(policy):
    half = jamp.get_policy(policy).compute_dtype
    y = jamp.cast_fn(layer, policy)(W, X)
    np.testing.assert_array_equal(y, rounded(X @ W, half))
    dw, dx = jax.jit(jax.grad(jamp.cast_fn(functools.partial(weighed, C), policy), argnums=(0, 1)))(W, X)
    np.testing.assert_array_equal(dw, rounded(X.T @ C, half))
    np.testing.assert_array_equal(dx, rounded(C @ W.T, half))


@pytest.mark.parametrize("large", [2.0**116, 2.0**-116])
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_scales_far_apart_make_no_infinity(scales, large):
    fn = jamp.cast_fn(layer, f"{FLOAT8},float8_scales={scales}")
    y, pull = jax.vjp(fn, W / np.float32(large), X * np.float32(large))
    np.testing.assert_array_equal(y, rounded(X @ W))
    dw, dx = pull(jnp.asarray(C, y.dtype))
    np.testing.assert_array_equal(dw / large, rounded(X.T @ C))
    np.testing.assert_array_equal(dx * large, rounded(C @ W.T))


@pytest.mark.parametrize(
    "wrapped",
    [jax.checkpoint(layer), jax.jit(layer), cycled, jax.custom_jvp(layer)],
    ids=["remat", "jit", "scan", "rule"],
)
def test_inside_of_what_jax_wraps_around_it(wrapped):
    def loss(w, x):
        return (wrapped(w, x) * C).sum()

    fn = jamp.cast_fn(loss, FLOAT8)
    if isinstance(wrapped, jax.custom_jvp):
        wrapped.defjvp(lambda primals, tangents: (wrapped(*primals), jax.jvp(layer, primals, tangents)[1]))
    else:
        assert "f8_e4m3fn" in str(jax.make_jaxpr(fn)(W, X))
    dw, dx = jax.grad(fn, argnums=(0, 1))(W, X)
    np.testing.assert_array_equal(dw, rounded(X.T @ C))
    np.testing.assert_array_equal(dx, rounded(C @ W.T))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("axes", [(None, 0), (0, None), (0, 0), (2, 1)])
@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_gradients_under_vmap(axes, scales):
    fn = jax.grad(jamp.cast_fn(functools.partial(weighed, C), f"{FLOAT8},float8_scales={scales}"), argnums=(0, 1))
    # Each member of the batch has scales of its own.
    ws, xs = np.stack([W, 64 * W, W[::-1]]), np.stack([X, X / 128, X[::-1]])
    found = jax.vmap(fn, in_axes=axes)(
        *(x[0] if axis is None else np.moveaxis(x, 0, axis) for x, axis in zip((ws, xs), axes, strict=True))
    )
    for i in range(3):
        w, x = ws[i if axes[0] is not None else 0], xs[i if axes[1] is not None else 0]
        np.testing.assert_array_equal(found[0][i], rounded(x.T @ C))
        np.testing.assert_array_equal(found[1][i], rounded(C @ w.T))


@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_a_vmap_of_the_cotangent_alone(scales):
    _, pull = jax.vjp(jamp.cast_fn(layer, f"{FLOAT8},float8_scales={scales}"), W, X)
    dws, dxs = jax.vmap(pull)(jnp.stack([C, 4 * C]))
    for i, factor in enumerate((1, 4)):
        np.testing.assert_array_equal(dws[i], rounded(factor * X.T @ C))
        np.testing.assert_array_equal(dxs[i], rounded(factor * C @ W.T))


def test_forward_mode():
    dw, dx = powers(3, *W.shape), powers(4, *X.shape)
    y, moved = jax.jvp(jamp.cast_fn(layer, FLOAT8), (W, X), (dw, dx))
    np.testing.assert_array_equal(y, rounded(X @ W))
    np.testing.assert_allclose(moved, X @ dw + dx @ W, atol=0.5)
    _, moved = jax.jvp(lambda w: jamp.cast_fn(layer, FLOAT8)(w, X), (W,), (dw,))
    np.testing.assert_array_equal(moved, rounded(X @ dw))


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("around", [lambda fn: fn, jax.checkpoint, jax.jit], ids=["plain", "remat", "jit"])
def test_second_derivatives(policy, around):
    x = np.float32(2 * EYE[::-1])
    v = powers(5, SIZE, SIZE)

    def quadratic(w, x):
        return (layer(w, x) ** 2).sum()

    gradient = jax.grad(around(jamp.cast_fn(quadratic, policy)), argnums=(0, 1))
    forward = jax.jvp(lambda w: gradient(w, x), (W,), (v,))[1]
    reverse = jax.grad(lambda w: sum((g * v).sum() for g in gradient(w, x)))(W)
    np.testing.assert_array_equal(forward[0], 8 * v)
    assert_near(forward[1], 2 * x @ (v @ W.T + W @ v.T))  # The gradient for x is 2 x w w^T.
    assert_near(reverse, 8 * v + 2 * (x.T @ v @ W + v.T @ x @ W))


def test_taylor_series():
    dx = powers(4, *X.shape)
    y, (moved, bent) = jet(functools.partial(jamp.cast_fn(layer, FLOAT8), W), (X,), ((dx, np.zeros_like(dx)),))
    np.testing.assert_array_equal(y, rounded(X @ W))
    np.testing.assert_array_equal(moved, rounded(dx @ W))
    np.testing.assert_array_equal(bent, 0)


@pytest.mark.parametrize("policy", [FLOAT8, "O2:bfloat16,matmul=mxfp8"])
def test_what_rounds_has_no_linear_transpose(policy):
    fn = functools.partial(jamp.cast_fn(layer, policy), W)
    with pytest.raises(NotImplementedError, match=r"not linear: .* `jax\.vjp\(fn, x\)\[1\]\(cotangent\)`"):
        jax.linear_transpose(fn, X)(jnp.asarray(C))


def test_the_first_infinity_is_found():
    found = jamp.first_nonfinite(lambda w, x: layer(w, jnp.log(x)), W, np.zeros_like(X), policy=FLOAT8)
    assert "log" in str(found)


def test_devices_agree_on_gradients():
    mesh = Mesh(np.array(jax.devices()[:4]), "data")
    loss = jamp.cast_fn(lambda w, x, c: weighed(c, w, x), FLOAT8)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    def gradient(w, x, c):
        return jax.grad(loss)(w, x, c)  # JAX adds up what the devices have.

    xs, cs = powers(6, 256, SIZE), powers(7, 256, SIZE)
    jitted = jax.jit(gradient)
    assert "f8_e4m3fn" in str(jax.make_jaxpr(jitted)(W, xs, cs))
    sharded_weights = jax.device_put(W, jax.NamedSharding(mesh, P("data")))  # As FSDP has them.
    found = jax.jit(jax.grad(loss))(sharded_weights, xs, cs)
    np.testing.assert_array_equal(found, rounded(xs.T @ cs))
    assert_near(jitted(W, xs, cs), xs.T @ cs, 0.01)


def attention(p, x):
    q, k, v = (jnp.reshape(x @ w, (2, 64, 4, 16)) for w in p["qkv"])
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(2, 64, 64) @ p["out"]


def test_weights_are_multiplied_in_8_bits_and_attention_and_logits_are_not():
    params = {"qkv": [of_shape(64, 64)] * 3, "out": of_shape(64, 64), "head": of_shape(64, 256)}

    def model(p, x):
        return jax.nn.log_softmax(attention(p, x) @ p["head"]).sum()

    expected = [*["float8"] * 3, "half", "half", "float8", "half, float32 out"]
    for level in ("O1:bfloat16", "O2:bfloat16", "O2:float16"):
        found = products(model, params, of_shape(2, 64, 64), policy=f"{level},matmul=float8")
        assert [rule if i != 3 else "half" for i, rule in enumerate(found)] == expected  # Float16 scores are float32.
    assert "float8" not in products(model, params, of_shape(2, 64, 64), policy="O2:bfloat16")


@pytest.mark.parametrize(
    ("shapes", "rule"),
    [
        (((128, 64), (64, 64)), "float8"),
        (((2, 64, 64), (64, 64)), "float8"),
        (((128, 72), (72, 64)), "half"),  # No multiple of 16.
        (((128, 64), (64, 72)), "half"),
        (((32, 64), (64, 64)), "half"),  # Too small to pay.
        (((128, 32), (32, 64)), "half"),
        (((128, 64), (64, 1008)), "float8"),
        (((128, 64), (64, 1024)), "half"),  # A weight that is large beside the data.
        (((1024, 64), (64, 8192)), "float8"),  # But rows enough.
    ],
)
def test_sizes_decide(shapes, rule):
    x, w = (of_shape(*shape) for shape in shapes)
    last = of_shape(w.shape[1], 64)
    assert products(lambda x, w, v: jax.nn.relu(jnp.tanh(x) @ w) @ v, x, w, last)[0] == rule


@pytest.mark.parametrize(
    ("x", "w", "rule"),
    [
        ((8192, 768), (768, 768), "float8"),
        ((768, 768), (768, 8192), "half"),  # 768 rows are few beside the weight.
        ((512, 4096), (4096, 4096), "half"),
    ],
)
@pytest.mark.parametrize(
    "layer", [jnp.matmul, jax.vmap(lambda x, w: w.T @ x, (0, None))], ids=["x @ w", "w @ x, mapped"]
)
def test_of_two_given_operands_the_weight_is_where_layers_have_it(layer, x, w, rule):
    x, w, last = of_shape(*x), of_shape(*w), of_shape(w[1], 64)
    assert products(lambda x, w, v: jax.nn.relu(layer(x, w)) @ v, x, w, last)[0] == rule


def test_what_the_program_says_decides():
    w, x = of_shape(64, 64), of_shape(128, 64)
    exact = lambda w, x: jnp.dot(x, w, precision="highest") @ w  # noqa: E731
    assert products(exact, w, x)[0] == "explicit precision"
    assert products(jamp.half_precision(layer), w, x)[0] == "half"
    assert products(jamp.full_precision(layer), w, x)[0] == "full"


def stacked(p, x):
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, jnp.stack([p["w"], p["v"]]))[0]


def side_by_side(p, x):
    return jnp.split(x @ jnp.concatenate([p["w"], p["v"], p["w"]], axis=1), 3, axis=1)[0]


def normalized(p, x):
    return x @ (p["g"] * p["w"] / jnp.linalg.norm(p["w"], axis=0))


def moved(p, x):
    return jnp.einsum("bi,hio->bho", x, p["w"].reshape(SIZE, 4, 16).transpose(1, 0, 2)).reshape(-1, SIZE)


def masked(p, x):
    return x @ jnp.where(p["v"] > 0, 0.5 * p["w"], 0)


def indexed(p, x):
    both = jnp.stack([p["w"], p["v"]])
    return x @ both[jnp.argmax(p["g"])].astype(jnp.bfloat16).astype(jnp.float32)


def updated(p, x):
    return x @ lax.dynamic_update_slice(p["w"], p["v"][:16], (0, 0))


@pytest.mark.parametrize("layer", [stacked, side_by_side, normalized, moved, masked, indexed, updated])
def test_a_weight_is_what_is_made_of_arguments_by_no_product(layer):
    def model(p, x):
        return layer(p, jnp.tanh(x @ p["w"])) @ p["w"]

    params = {"w": of_shape(64, 64), "v": of_shape(64, 64), "g": of_shape(64)}
    assert products(model, params, of_shape(128, 64)) == ["float8", "float8", "half, float32 out"]


def test_a_product_is_no_weight():
    def merged(p, x):  # A low-rank update, added to the weight.
        return jnp.tanh(x @ p["w"]) @ (p["w"] + p["a"] @ p["b"]) @ p["w"]

    params = {"w": of_shape(64, 64), "a": of_shape(64, 64), "b": of_shape(64, 64)}
    assert products(merged, params, of_shape(128, 64)).count("half") == 1


def test_weights_put_together_have_exact_gradients():
    def loss(p, x):
        return (stacked(p, x) * C).sum()

    def loss_of_one(ws, x):
        return (lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] * C).sum()

    found = jax.grad(jamp.cast_fn(loss, FLOAT8))({"w": W, "v": W[::-1]}, X)
    expected = jax.grad(jamp.cast_fn(loss_of_one, FLOAT8))(np.stack([W, W[::-1]]), X)
    np.testing.assert_array_equal(np.stack([found["w"], found["v"]]), expected)
    assert np.abs(expected).max() > 0


def reasons(fn, *args, policy=FLOAT8) -> list[str]:
    found = jamp.report(fn, *args, policy=policy).operations
    return [op.not_float8 for op in found if op.flops]


def test_a_report_tells_why_a_product_is_not_in_float8():
    w, x = of_shape(64, 64), of_shape(128, 64)

    def first(fn):
        return lambda *args: fn(*args) @ jnp.asarray(EYE)

    def why(fn, *args):
        return reasons(first(fn), *args)[0]

    logits = "float32 operations alone read it, as they read logits"
    assert reasons(layer, w, x) == ["", logits]
    assert why(lambda w, x: x @ w, of_shape(72, 64), of_shape(24, 72)) == (
        "24 rows and 72 contracted elements are no multiple of 16"
    )
    assert why(lambda w, x: x @ w, w, of_shape(32, 64)) == "32 rows are few: less than 64"
    assert why(lambda w, x: (jnp.tanh(x) @ w)[:, :64], of_shape(64, 1024), x) == (
        "128 rows are few beside a weight with a side of 1024"
    )
    assert why(lambda w, x: jnp.dot(x, w, precision="highest"), w, x) == "its `precision` asks for more than half"
    assert why(jamp.half_precision(lambda w, x: x @ w), w, x) == (
        "rules of the policy, or a mark in the program, leave it out"
    )
    assert reasons(first(lambda x: jnp.tanh(x @ x.T) @ jnp.tanh(x @ x.T)), of_shape(64, 64))[1:] == [
        "both operands are computed: none is a weight, or data", logits
    ]  # fmt: skip
    params = {"qkv": [w] * 3, "out": w}
    assert set(reasons(first(attention), params, of_shape(2, 64, 64))) == {
        "", "both operands are computed, as in attention", logits
    }  # fmt: skip
    recurrent = lambda w, xs: lax.scan(lambda h, x: (jnp.tanh(x + h @ w), h), xs[0], xs)[1]  # noqa: E731
    assert reasons(recurrent, w, of_shape(9, 128, 64)) == ["a loop would round its weight anew in each iteration"]


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda fn: lambda *args: fn(*args).sum()])
def test_a_cast_fn_inside_tells_the_same_reasons(wrap):
    def model(w, x):
        return jnp.tanh(jnp.tanh(jnp.tanh(x @ w)[:32] @ w) @ w) @ w

    args = of_shape(64, 64), of_shape(128, 64)
    inside = wrap(jamp.cast_fn(model, FLOAT8))
    few, logits = "32 rows are few: less than 64", "float32 operations alone read it, as they read logits"
    assert reasons(inside, *args, policy=None) == reasons(model, *args) == ["", few, logits]
    found = jamp.report(inside, *args)
    assert "products not in float8     2: " + few in str(found)
    assert {op.not_float8 for op in found.operations if not op.flops} == {""}
    gradient = jax.grad(lambda w, x: inside(w, x).sum())
    assert set(reasons(gradient, *args, policy=None)) == {"", few, logits}


def test_products_of_a_backward_rule_are_half_and_told():
    product = jax.custom_vjp(lambda w, x: x @ w)
    product.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, g: (kept[1].T @ g, g @ kept[0].T))
    loss = jamp.cast_fn(lambda w, x: jnp.tanh(product(w, x)).sum(), FLOAT8)
    forward, *backward = reasons(jax.grad(loss, argnums=(0, 1)), W, X, policy=None)
    assert forward == ""
    assert set(backward) == {"it is of a tangent or a cotangent, in a rule of `custom_jvp` or `custom_vjp`"}


def test_what_is_not_in_float8_stands_in_the_text_of_a_report():
    w, x = of_shape(64, 64), of_shape(128, 64)
    text = str(jamp.report(layer, w, x, policy=FLOAT8))
    assert "products not in float8     1: float32 operations alone read it, as they read logits" in text
    assert "products not in float8" not in str(jamp.report(layer, w, x, policy="O2:bfloat16"))


def test_weights_of_a_recurrence_are_not_rounded_anew_in_each_step():
    def recurrent(w, xs):
        return lax.scan(lambda h, x: (jnp.tanh(x + h @ w), h), xs[0], xs)[1]

    def layers(ws, x):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]

    assert set(products(recurrent, of_shape(64, 64), of_shape(9, 128, 64))) == {"half"}
    assert set(products(layers, of_shape(9, 64, 64), of_shape(128, 64))) == {"float8"}


@pytest.mark.parametrize("act", [jnp.asarray, jnp.tanh])
def test_nor_is_what_multiplies_the_data_of_each_step(act):
    def recurrent(w, v, xs):
        return lax.scan(lambda h, x: (jnp.tanh(act(x) @ v + h @ w), h), jnp.zeros((128, 64)), xs)[1]

    assert products(recurrent, of_shape(64, 64), of_shape(64, 64), of_shape(9, 128, 64)) == ["half", "half"]


@pytest.mark.parametrize(
    ("layer", "rule"),
    [
        (lambda ws, i: ws[i], "float8"),
        (lambda ws, i: lax.dynamic_index_in_dim(2 * ws, i, 0, keepdims=False), "float8"),
        (lambda ws, i: jnp.take(ws, i, axis=0), "float8"),
        (lambda ws, i: ws[0], "half"),  # The same in each iteration.
        (lambda ws, i: ws.sum(0), "half"),
        (lambda ws, i: lax.optimization_barrier((ws, i))[0][0], "half"),
    ],
)
def test_layers_that_a_loop_indexes_are_each_read_once(layer, rule):
    def scanned(ws, x):
        return jnp.tanh(lax.scan(lambda h, i: (jnp.tanh(h @ layer(ws, i)), None), x, jnp.arange(3))[0])

    def counted(ws, x):
        return jnp.tanh(lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ layer(ws, i)), x))

    args = of_shape(3, 64, 64), of_shape(128, 64)
    assert products(scanned, *args) == products(counted, *args) == [rule]


@pytest.mark.parametrize(("kind", "rule"), [("float8", "float8"), ("full", "full"), ("half", "half")])
def test_a_rule_by_scope_reaches_products_in_calls(kind, rule):
    def model(w, x):
        with jax.named_scope("wide"):
            y = jax.jit(jnp.dot)(x, w)
        return jnp.tanh(y) @ w

    policy = jamp.get_policy("O2:bfloat16").with_rules(**{kind: ["*wide*"]})
    assert products(model, of_shape(64, 64), of_shape(128, 64), policy=policy) == [rule, "half, float32 out"]
    jax.eval_shape(jamp.cast_fn(model, policy), W, X)  # Without a warning that the rule matches nothing.


def test_rules_choose_products():
    policy = jamp.get_policy("O2:bfloat16").with_rules(float8=["*wide*"])
    assert str(policy) == "O2:bfloat16,float8=['*wide*']"
    assert jamp.get_policy(str(policy)) == policy

    def model(w, x):
        with jax.named_scope("wide"):
            h = x @ w
        return h @ w @ w

    w, x = of_shape(64, 64), of_shape(32, 64)
    assert products(model, w, x, policy=policy) == ["float8", "half", "half, float32 out"]
    everywhere = policy.with_rules(float8=["dot_general"])
    assert products(model, w, x, policy=everywhere) == ["float8"] * 3
    but = jamp.get_policy(f"{FLOAT8},half=['*wide*']")
    assert products(model, w, of_shape(64, 64), policy=but)[:2] == ["half", "float8"]


def test_settings_are_read_and_written():
    text = "O2:bfloat16,matmul=float8,grad_dtype=e5m2,float8_scales=row,weight_grad=half"
    assert str(jamp.get_policy(text)) == text
    with pytest.raises(ValueError, match="'tensor', 'row'"):
        jamp.get_policy("O2:bfloat16,float8_scales=column")
    with pytest.raises(ValueError, match="O2,matmul=float8"):
        jamp.get_policy("O0,matmul=float8")
    with pytest.raises(ValueError, match="Contradictory"):
        jamp.get_policy(FLOAT8).with_rules(float8=["*head*"], half=["*head*"])


def test_the_backward_pass_is_given_bytes():
    def mlp(params, x):
        for w in params:
            x = jax.nn.gelu(x @ w)
        return x.sum()

    params, x = [of_shape(64, 256), of_shape(256, 64), of_shape(64, 64)], of_shape(1024, 64)
    half, eight = (jamp.report(mlp, params, x, policy=p).residual_bytes for p in ("O2:bfloat16", FLOAT8))
    # Of two products the operands and the scales; the last is half, as is its weight.
    assert eight["uint8"] == 1024 * (64 + 256) + 2 * 64 * 256 + 4
    # Of two products the result, which the derivative of a GELU reads, and what the last is given.
    assert eight["bfloat16"] == 2 * (1024 * (256 + 64 + 64) + 64 * 64)
    assert sum(eight.values()) < sum(half.values())


@pytest.mark.nightly
def test_a_model_of_the_zoo_has_a_gradient():
    entry = next((entry for entry in load()[0] if entry.name == "equinox/transformer"), None)
    if entry is None:
        pytest.skip("Equinox is not installed")
    model = entry.build(None)

    eight = objective(model, jamp.cast_fn(model.apply, FLOAT8))
    assert "f8_e4m3fn" in str(jax.make_jaxpr(eight)(model.params, *model.inputs))
    found, expected = (
        jax.jit(jax.grad(fn))(model.params, *model.inputs) for fn in (eight, objective(model, model.apply))
    )
    leaves = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)]) for tree in (found, expected)]
    assert np.linalg.norm(leaves[0] - leaves[1]) < 0.5 * np.linalg.norm(leaves[1])


def test_a_report_counts_products_in_8_bits():
    def model(w, x):
        return jax.nn.gelu(x @ w) @ w @ w[:, :16]

    found = jamp.report(model, of_shape(64, 64), of_shape(128, 64), policy=FLOAT8)
    once = 2 * 128 * 64 * 64
    assert (found.forward.float8, found.forward.half, found.forward.total) == (2 * once, 9 * once // 4, 9 * once // 4)
    assert (found.gradient.float8, found.gradient.share) == (6 * once, 1.0)
    assert found.float8_emulated and found.to_dict()["float8_emulated"]
    assert found.to_dict()["gradient"]["float8"] == 6 * once
    assert "of these in float8         2.1 MFLOP, with backward 6.29 MFLOP; emulated on this device" in str(found)
    assert "these in float8" not in str(jamp.report(model, of_shape(64, 64), of_shape(128, 64), policy="O2:bfloat16"))
    row = next(op for op in found.operations if op.rule == "float8")
    assert row.inputs == ("float8_e4m3fn", "float8_e4m3fn") and row.outputs == ("bfloat16",)
    assert sum(op.casts for op in found.operations) == found.casts


def test_what_is_not_finite_is_nan_and_touches_nothing_else():
    x = X.copy()
    x[3, 5], x[7, 0] = np.inf, np.nan
    y = np.asarray(jamp.cast_fn(layer, FLOAT8)(W, x))
    assert np.isnan(y[3]).any()
    assert np.isnan(y[7]).any()
    others = [i for i in range(len(x)) if i not in (3, 7)]
    np.testing.assert_array_equal(y[others], rounded(X @ W)[others])


@pytest.mark.parametrize("policy", [FLOAT8, "O2:bfloat16,matmul=mxfp8"])
def test_a_watch_for_nan_finds_none_in_finite_data(policy):
    fn, x = jamp.cast_fn(layer, policy), X.copy()
    x[0, 0] = np.nan
    with jax.debug_nans(True):
        np.testing.assert_array_equal(fn(W, X), rounded(X @ W))
        with pytest.raises(FloatingPointError):
            fn(W, x)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scaling", [Scaling(), Scaling(block=0)])
def test_the_largest_finite_numbers_stay_finite(dtype, scaling):
    largest = np.float32(jnp.finfo(np.float32).max)
    x = np.full(32, largest)
    x[1:3] = -largest, np.inf
    wide = np.asarray(dequantize(quantize(x, dtype, scaling), dtype, np.dtype(np.float32)))
    end = (2 - float(jnp.finfo(dtype).eps)) * 2.0**127
    np.testing.assert_array_equal(wide[:4], np.float32([end, -end, np.nan, end]))


@pytest.mark.parametrize("policy", POLICIES[:1] + POLICIES[3:])
def test_a_product_of_a_number_near_the_largest_is_finite(policy):
    x = np.zeros((128, SIZE), np.float32)
    x[0, 0] = 3.3e38
    y = jamp.cast_fn(layer, policy)(2.0**-10 * W, x)
    np.testing.assert_allclose(y[0], 3.3e38 * 2.0**-10 * W[0], rtol=0.07)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_infinities_are_rounded_to_nan_in_8_bits(dtype):
    x = np.float32([1, np.inf, -np.inf, np.nan])
    for round_to in (quantize, jax.jit(quantize, static_argnums=(1, 2))):
        q = round_to(x, dtype, Scaling())
        np.testing.assert_array_equal(dequantize(q, dtype, np.dtype(np.float32)), [1, np.nan, np.nan, np.nan])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scaling", [Scaling(), Scaling(axes=(1,)), Scaling(block=1)])
def test_rounding_to_8_bits(dtype, scaling):
    digits = {E4M3: 3, E5M2: 2}[dtype]
    for largest in (1.0, 1.75, 1.7500001, 2 - 2**-23, 3e38, 1e-30, 0.0):
        x = np.float32(np.random.default_rng(0).uniform(-1, 1, (4, 64)) * largest)
        x[0, 0] = largest
        q = quantize(jnp.asarray(x), dtype, scaling)
        assert q.bits.dtype == q.exponents.dtype == jnp.uint8
        error = np.abs(np.asarray(dequantize(q, dtype, np.dtype(np.float32))) - x)
        assert (error <= np.maximum(np.abs(x) * 2.0 ** -(digits + 1), largest * 2.0**-15)).all()


def test_a_weight_is_rounded_once_for_all_readers():
    def shared(w, x):
        return x @ w @ w @ w @ jnp.asarray(EYE)

    jaxpr = str(jax.make_jaxpr(jamp.cast_fn(shared, f"{FLOAT8},residuals=all"))(W, X))
    assert jaxpr.count("new_dtype=float8_e4m3fn\n") == 4  # The weight, and what each product is given.
