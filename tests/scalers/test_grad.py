"""`value_and_grad` and `grad` against those of JAX."""

import chex
import jax
import jax.numpy as jnp
import pytest

import jamp
from tests.helpers import assert_bitwise_equal

SCALERS = [jamp.NoOpLossScale(), jamp.StaticLossScale(2.0**10), jamp.DynamicLossScale(2.0**15)]
scalers = pytest.mark.parametrize("scaler", SCALERS, ids=lambda s: type(s).__name__)
PARAMS = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "b": jnp.array([0.5, -0.5])}
X = jnp.array([[1.0, -1.0], [0.25, 2.0]])


def loss(params, x, power=2):
    return ((x @ params["w"] + params["b"]) ** power).mean()


def loss_and_aux(params, x, power=2):
    return loss(params, x, power), {"x": x, "name": "aux"}


@scalers
@pytest.mark.parametrize("argnums", [0, 1, -1, -2, (0,), (0, 1), (1, 0), (-1, 0)])
@pytest.mark.parametrize("has_aux", [False, True])
def test_answers_as_jax_does(scaler, argnums, has_aux):
    fun = loss_and_aux if has_aux else loss
    expected = jax.value_and_grad(fun, argnums, has_aux)(PARAMS, X)
    actual = jamp.value_and_grad(fun, scaler, argnums, has_aux)(PARAMS, X)
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert_bitwise_equal(*[jax.tree.map(lambda x: "" if isinstance(x, str) else x, t)[1] for t in (actual, expected)])
    assert_bitwise_equal(actual[0][0] if has_aux else actual[0], expected[0][0] if has_aux else expected[0])
    gradients = jamp.grad(fun, scaler, argnums, has_aux)(PARAMS, X)
    assert_bitwise_equal(gradients[0] if has_aux else gradients, expected[1])
    if has_aux:
        assert gradients[1]["name"] == actual[0][1]["name"] == "aux"


@scalers
def test_keyword_arguments_pass(scaler):
    expected = jax.value_and_grad(loss)(PARAMS, x=X, power=3)
    assert_bitwise_equal(jamp.value_and_grad(loss, scaler)(PARAMS, x=X, power=3), expected)


def of_each_row(scaler, params, xs):
    return jax.vmap(jamp.value_and_grad(loss, scaler), (None, 0))(params, xs)


@scalers
def test_composes_with_jit_and_vmap(scaler):
    expected = jax.vmap(jax.value_and_grad(loss), (None, 0))(PARAMS, X[:, None])
    fun = jax.jit(chex.assert_max_traces(of_each_row, n=1))
    for _ in range(3):
        actual = fun(scaler, PARAMS, X[:, None])
    chex.assert_trees_all_close(actual[0], expected[0], rtol=1e-6)


@scalers
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_half_arguments_are_float32_and_the_loss_is_true(scaler, dtype):
    value, gradient = jamp.value_and_grad(lambda x: x.sum(), scaler)(jnp.ones(3, dtype))
    assert value == 3.0 and gradient.dtype == jnp.float32
    assert gradient.tolist() == [1.0] * 3


def test_float16_loss_is_scaled_in_float32():
    # flax's DynamicScale gives a NaN loss here, by its own docstring example; jmp and mpx give inf.
    value, gradient = jamp.value_and_grad(lambda x: x + 200, jamp.DynamicLossScale(2.0**15))(jnp.float16(100.0))
    assert value == 300.0 and gradient == 1.0


def test_keeps_gradients_that_float16_would_lose():
    def tiny(x):
        return (x.astype(jnp.float16) * jnp.float16(2.0**-14)).astype(jnp.float32) * 2.0**-14

    assert jax.grad(tiny)(1.0) == 0.0
    assert jamp.grad(tiny, jamp.StaticLossScale(2.0**14))(1.0) == 2.0**-28


def test_unscales_with_the_scale_it_scaled_with():
    # mpx and DeepSpeed#8588: on a step at which the scale grows, gradients came out halved.
    scaler = jamp.DynamicLossScale(8.0, period=3)

    @jax.jit
    def step(scaler, x):
        value, gradient = jamp.value_and_grad(lambda x: x**2, scaler)(x)
        return value, gradient, scaler.adjust(jamp.all_finite(gradient))

    for expected_scale in (8.0, 8.0, 16.0, 16.0, 16.0, 32.0):
        value, gradient, scaler = step(scaler, 3.0)
        assert (value, gradient, scaler.loss_scale) == (9.0, 6.0, expected_scale)


def test_overflow_shows_in_gradients_and_not_in_the_loss():
    value, gradient = jamp.value_and_grad(lambda x: x.astype(jnp.float32) * 2, jamp.StaticLossScale(2.0**15))(
        jnp.float16(1.0)
    )
    assert value == 2.0 and not jamp.all_finite(gradient)


@scalers
def test_gradient_penalty(scaler):
    # The recipe of PyTorch's AMP examples: a norm of true gradients inside the loss.
    def penalized(grad_of):
        def fun(x, y):
            return loss_of(x, y) + (grad_of(loss_of)(x, y) ** 2).sum()

        return fun

    def loss_of(x, y):
        return (x**3 * y).sum()

    x, y = jnp.array([1.0, 2.0]), jnp.array([0.5, -1.0])
    expected = jax.value_and_grad(penalized(jax.grad))(x, y)
    actual = jamp.value_and_grad(penalized(lambda f: jamp.grad(f, scaler)), scaler)(x, y)
    assert_bitwise_equal(actual, expected)


@scalers
def test_derivatives_of_derivatives(scaler):
    inner = jamp.value_and_grad(lambda x: x**3, scaler)
    assert jax.grad(lambda x: inner(x)[0])(2.0) == 12.0
    assert jax.grad(lambda x: inner(x)[1])(2.0) == 12.0
    assert jamp.grad(jamp.grad(jamp.grad(lambda x: x**3, scaler), scaler), scaler)(2.0) == 6.0


def test_keeps_name_docs_and_signature():
    for wrap in (jamp.value_and_grad, jamp.grad):
        assert wrap(loss, SCALERS[0]).__name__ == "loss" and wrap(loss, SCALERS[0]).__wrapped__ is loss


def test_options_of_jax():
    scaler = SCALERS[1]
    gradient = jamp.grad(lambda n: 1.5 * n.sum(), scaler, allow_int=True)(jnp.arange(3))
    assert gradient.dtype == jax.dtypes.float0
    z = jnp.complex64(1 + 2j)
    assert jamp.grad(lambda z: z**2, scaler, holomorphic=True)(z) == jax.grad(lambda z: z**2, holomorphic=True)(z)


# ---------------------------------------------------------------- errors


def test_names_all_leaves_that_are_not_floating():
    params = {"w": jnp.ones(2), "step": jnp.arange(3), "rng": jax.random.key(0), "name": "mlp"}
    with pytest.raises(TypeError, match=r"argument 0\['name'\]: 'mlp'") as error:
        jamp.grad(lambda p: p["w"].sum(), SCALERS[1])(params)
    for text in ("['step']: int32[3]", "['rng']: key", "argnums", "allow_int"):
        assert text in str(error.value)
    assert "['w']" not in str(error.value)


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (lambda x: x, (jnp.ones(2),)),
        (lambda x: {"loss": x}, (1.0,)),
        (lambda x: jnp.int32(1), (1.0,)),
        (lambda x: x, ()),
    ],
)
def test_other_errors_are_those_of_jax(fun, args):
    with pytest.raises(Exception) as expected:
        jax.value_and_grad(fun)(*args)
    with pytest.raises(expected.type):
        jamp.value_and_grad(fun, SCALERS[2])(*args)


def test_aux_that_is_no_pair():
    with pytest.raises(TypeError, match="has to return a pair"):
        jamp.grad(lambda x: x, SCALERS[1], has_aux=True)(1.0)


@pytest.mark.parametrize("wrong", [1024.0, jamp.DynamicLossScale, None, "dynamic"])
def test_wants_a_loss_scale(wrong):
    with pytest.raises(TypeError, match=r"expected a loss scale.*StaticLossScale\(1024.0\)"):
        jamp.value_and_grad(loss, wrong)


def test_wants_a_function():
    with pytest.raises(TypeError, match="expected a function"):
        jamp.value_and_grad(3.0, SCALERS[1])
