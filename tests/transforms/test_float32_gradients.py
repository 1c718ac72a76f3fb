"""`jamp.float32_gradients`: the gradient of a half parameter, not rounded to half, and no second copy of the weights.

A gradient that is a sum of 257 ones tells: bfloat16 has no 257, and rounds it to 256.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp

HALF = jnp.bfloat16
ROWS = jnp.ones((257, 4), HALF)
WEIGHT = jnp.ones((4, 4), HALF)


def total(x):
    return x.astype(jnp.float32).sum()


def o2(w):
    return jamp.cast_fn(lambda w, x: x @ w, "O2:bfloat16")(w, ROWS)


def o3(w):
    return jamp.cast_fn(lambda w, x: jnp.tanh(0 * (x @ w)) @ w + x @ w, "O3:bfloat16")(w, ROWS)


def loop(w):
    return lax.scan(lambda h, _: (h @ w, None), ROWS, None, length=3)[0]


def convolution(w):
    return lax.conv(jnp.ones((1, 1, 1, 257), HALF), w, (1, 1), "VALID")


def layers(ws):
    return lax.scan(lambda h, w: (h @ w, None), ROWS, ws)[0]


MODELS = {
    "product": (lambda w: ROWS @ w, WEIGHT, 257),
    "weight on the left": (lambda w: w @ ROWS.T, WEIGHT, 257),
    "transposed": (lambda w: jax.jit(lambda w: ROWS @ w.T)(w), WEIGHT, 257),
    "einsum": (lambda w: jnp.einsum("nd,dhk->nhk", ROWS, w), jnp.ones((4, 2, 2), HALF), 257),
    "bias": (lambda b: ROWS + b, jnp.ones(4, HALF), 257),
    "embedding": (lambda w: w[jnp.zeros(257, jnp.int32)], WEIGHT[:1], 257),
    "used twice": (lambda w: jnp.concatenate([ROWS @ w, ROWS[:2] @ w]), WEIGHT, 259),
    "convolution": (convolution, jnp.ones((1, 1, 1, 1), HALF), 257),
    "cast_fn, O2": (o2, WEIGHT, 257),
    "cast_fn, O3": (o3, WEIGHT, 257),
    "checkpoint": (jax.checkpoint(lambda w: ROWS @ w), WEIGHT, 257),
    "scanned layers": (layers, jnp.full((3, 4, 4), 0.25, HALF), 257),
    "loop over time": (loop, WEIGHT / 4, 3 * 257),
    "cond": (lambda w: lax.cond(w[0, 0] > 0, lambda w: ROWS @ w, lambda w: ROWS, w), WEIGHT, 257),
    "vmap": (lambda w: jax.vmap(lambda x: x @ w)(ROWS), WEIGHT, 257),
}  # fmt: skip


BIAS = jnp.zeros(4, HALF)
# What is done to a bias in float32 before it meets half data, whose cotangents add up to 257 for each element.
IN_FLOAT32 = {
    "broadcast": lambda b: b[None, None],
    "sliced": lambda b: jnp.concatenate([b, b])[2:6],
    "negated": lambda b: -b,
    "padded": lambda b: jnp.pad(b, 1)[1:-1],
    "chosen": lambda b: jnp.where(jnp.arange(4) < 9, b, 0.0),
    "stacked": lambda b: jnp.stack([b, b])[1],
    "reversed": lambda b: b[::-1],
}


@pytest.mark.parametrize("level", ["O2:bfloat16", "O3:bfloat16", None])
@pytest.mark.parametrize("change", IN_FLOAT32)
def test_nor_behind_what_moves_them_in_float32(change, level):
    def add(b, x):
        return x + IN_FLOAT32[change](b.astype(jnp.float32)).astype(HALF)

    fun = add if level is None else jamp.cast_fn(add, level)
    x = jnp.zeros((1, 257, 4), HALF)
    _, found = jamp.float32_gradients(jax.value_and_grad(lambda b: total(fun(b, x).astype(HALF))))(BIAS)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(jnp.abs(found), jnp.full(4, 257.0))


@pytest.mark.parametrize("model", MODELS)
def test_not_rounded(model):
    fun, w, expected = MODELS[model]
    grad_fn = jax.value_and_grad(lambda w: total(fun(w)))
    value, rounded = jax.jit(grad_fn)(w)
    found_value, found = jax.jit(jamp.float32_gradients(grad_fn))(w)
    assert rounded.dtype == HALF and (rounded.astype(jnp.float32) != expected).all()  # The numbers tell the difference.
    assert found.dtype == jnp.float32 and found.shape == w.shape
    np.testing.assert_array_equal(found, jnp.float32(expected))
    assert found_value == value


SCALES = [jamp.NoOpLossScale(), jamp.StaticLossScale(8.0), jamp.DynamicLossScale(2.0**4)]


@pytest.mark.parametrize("scale", SCALES, ids=lambda scale: type(scale).__name__)
@pytest.mark.parametrize("model", MODELS)
def test_nor_where_they_are_unscaled_in_float32(model, scale):
    fun, w, expected = MODELS[model]
    grad_fn = jamp.value_and_grad(lambda w: total(fun(w)), scale)
    assert (grad_fn(w)[1] != expected).all()
    _, found = jamp.float32_gradients(grad_fn)(w)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, jnp.float32(expected))


def test_nor_those_of_float32_weights_that_are_cast():
    grad_fn = jax.value_and_grad(lambda w: total(jamp.cast_fn(lambda w: ROWS @ w, "O3:bfloat16")(w)))
    w = WEIGHT.astype(jnp.float32)
    assert (grad_fn(w)[1] == 256).all() and (jamp.float32_gradients(grad_fn)(w)[1] == 257).all()


def test_activations_are_not_float32_for_it():
    """What a float32 gain multiplies was rounded, and is read as it was: of its gradient only the sum is float32."""

    def loss_fn(gain, x):
        return total((x @ WEIGHT).astype(jnp.float32) * gain)

    grad_fn = jax.value_and_grad(loss_fn)
    assert str(jax.make_jaxpr(jamp.float32_gradients(grad_fn))(jnp.ones(4), ROWS)) == str(
        jax.make_jaxpr(grad_fn)(jnp.ones(4), ROWS)
    )


@pytest.mark.parametrize("level", ["O3:bfloat16", None])
@pytest.mark.parametrize("activation", [jnp.tanh, jax.nn.gelu, jax.nn.relu, lambda h: h])
def test_the_forward_pass_is_as_it_was(activation, level, key):
    """Of a gain that multiplies activations the gradient is the sum of their products with cotangents, as they were."""

    def net(p, x):
        return activation(x @ p["w"] + p["b"]) * p["gain"]

    fun = net if level is None else jamp.cast_fn(net, level)
    keys = jax.random.split(key, 4)
    params = {name: jax.random.normal(k, (32,), HALF) for name, k in zip(("b", "gain"), keys, strict=False)}
    params["w"], x = jax.random.normal(keys[2], (32, 32), HALF) / 6, jax.random.normal(keys[3], (64, 32), HALF)
    grad_fn = jax.value_and_grad(lambda p: total(fun(p, x).astype(HALF)))
    raised_fn = jamp.float32_gradients(grad_fn)
    assert jax.jit(grad_fn)(params)[0] == jax.jit(raised_fn)(params)[0]

    def activations(fn):  # In float32, and given to nothing that adds them up.
        return str(jax.make_jaxpr(fn)(params)).count("f32[64,32]")

    assert activations(raised_fn) <= activations(grad_fn) + 3  # Of two gradients the products that are added up.


@pytest.mark.parametrize("scale", [lambda g: g / 4, lambda g: g * 0.25, lambda g: g / jnp.float32(4)])
def test_nor_where_a_number_divides_them(scale):
    def grad_fn(w):
        value, grads = jax.value_and_grad(lambda w: total(ROWS @ w))(w)
        return value, scale(grads)

    np.testing.assert_array_equal(jamp.float32_gradients(grad_fn)(WEIGHT)[1], jnp.float32(257 / 4))


def test_rounded_again_it_is_what_jax_returns(key):
    """On numbers that are not exact: the same products, with the same operands."""
    keys = jax.random.split(key, 3)
    params = {"w": jax.random.normal(keys[0], (32, 48), HALF), "v": jax.random.normal(keys[1], (48, 8), HALF)}
    x = jax.random.normal(keys[2], (64, 32), HALF)
    grad_fn = jax.value_and_grad(lambda p: total(jnp.tanh(x @ p["w"]) @ p["v"]))
    rounded, found = grad_fn(params)[1], jamp.float32_gradients(grad_fn)(params)[1]  # Op by op: XLA rounds less.
    for name in params:
        assert (found[name] != rounded[name].astype(jnp.float32)).mean() > 0.5
        np.testing.assert_allclose(
            found[name].astype(HALF).astype(jnp.float32), rounded[name].astype(jnp.float32), rtol=2**-8
        )


def test_with_loss_scaling_aux_and_microbatches():
    tx = jamp.loss_scaled(jamp.StaticLossScale(8.0), optax.sgd(1.0))
    params = {"w": WEIGHT, "norm": jnp.ones(4)}
    opt_state = tx.init(params)

    def loss_fn(params, x, *, extra):
        return total((x @ params["w"]) * params["norm"].astype(HALF)), (x, extra)

    grad_fn = jamp.float32_gradients(jamp.scaled_value_and_grad(loss_fn, opt_state, has_aux=True))
    (value, (x, extra)), grads = grad_fn(params, ROWS, extra="a name")
    assert (value, x.dtype, extra) == (4112, HALF, "a name")
    np.testing.assert_array_equal(grads["w"], 8 * 257)
    assert grads["norm"].dtype == jnp.float32

    two = jnp.concatenate([ROWS, ROWS])
    plain = jamp.scaled_value_and_grad(lambda p, x: total((x @ p["w"]) * p["norm"].astype(HALF)), opt_state)
    _, grads = jamp.accumulate_gradients(jamp.float32_gradients(plain), 2)(params, two)
    np.testing.assert_array_equal(grads["w"], 8 * 257)


def test_float32_parameters_are_left_alone():
    w, x = jnp.ones((4, 4)), jnp.ones((3, 4))
    grad_fn = jax.value_and_grad(lambda w: jnp.sin(x @ w).sum())
    assert str(jax.make_jaxpr(jamp.float32_gradients(grad_fn))(w)) == str(jax.make_jaxpr(grad_fn)(w))


def test_one_trace():
    def step(w):
        return jamp.float32_gradients(jax.value_and_grad(lambda w: total(ROWS @ w)))(w)

    once = jax.jit(chex.assert_max_traces(step, n=1))
    once(WEIGHT), once(WEIGHT)


def test_no_second_copy_of_the_weights():
    """Twelve layers, and gradients that are used up in an update: float32 weights would be 3 MB more."""
    layers = [jnp.ones((256, 256), HALF) for _ in range(12)]
    x = jnp.ones((8, 256), HALF)

    def loss_fn(layers):
        h = x
        for w in layers:
            h = jnp.tanh(h @ w)
        return total(h)

    def peak(grad_fn):
        step = jax.jit(
            lambda p: jax.tree.map(lambda p, g: p - (1e-3 * g).astype(HALF), p, grad_fn(p)[1]), donate_argnums=0
        )
        memory = step.lower(layers).compile().memory_analysis()
        return memory.temp_size_in_bytes

    through_float32 = lambda p: jax.value_and_grad(loss_fn)(p)  # noqa: E731
    float32_weights = sum(4 * w.size for w in layers)
    extra = peak(jamp.float32_gradients(jax.value_and_grad(loss_fn))) - peak(through_float32)
    assert extra < 0.5 * float32_weights


def test_what_cannot_be():
    with pytest.raises(TypeError, match=r"Write jax.value_and_grad\(loss_fn\)"):
        jamp.float32_gradients(3)
    with pytest.raises(TypeError, match=r"jax\.grad does not"):
        jamp.float32_gradients(jax.grad(lambda w: total(ROWS @ w)))(WEIGHT)
