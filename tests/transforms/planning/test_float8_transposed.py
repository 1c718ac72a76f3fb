"""Convolutions and grouped products in 8 bits: which they are, what they compute, and what they keep.

All numbers are small integers, and so are the sums of their products: nothing is rounded, expected numbers are exact.
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

FLOAT8 = jamp.get_policy("O2:bfloat16,matmul=float8")
EACH = FLOAT8.with_rules(float8=["conv_general_dilated", "ragged_dot_general"])
AXES = ("NHWC", "HWIO", "NHWC")
SIZES = np.array([16, 0, 40, 8], np.int32)


def signs(seed: int, *shape: int) -> np.ndarray:
    return np.float32(np.random.default_rng(seed).choice([-1.0, 0.0, 0.0, 1.0], shape))


def convolution(w, x, **settings):
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": AXES} | settings
    return lax.conv_general_dilated(x, w, **options)


def experts(w, x):
    return lax.ragged_dot(x, w, jnp.asarray(SIZES))


W, X = signs(0, 3, 3, 16, 32), signs(1, 2, 5, 5, 16)
OF_EXPERTS = signs(2, 4, 16, 32), signs(3, 64, 16)
FORMS = {
    "convolution": (convolution, W, X),
    "strides": (functools.partial(convolution, window_strides=(2, 3)), W, X),
    "dilated": (functools.partial(convolution, lhs_dilation=(2, 2), rhs_dilation=(1, 2), padding=((1, 1),) * 2), W, X),
    "padded away": (functools.partial(convolution, padding=((-1, 2), (0, 1))), W, X),
    "channels first": (
        functools.partial(convolution, dimension_numbers=("NCHW", "OIHW", "NCHW")),
        signs(4, 32, 16, 3, 3),
        signs(5, 2, 16, 5, 5),
    ),
    "one dimension": (
        lambda w, x: lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC")),
        signs(6, 3, 16, 32),
        signs(7, 2, 9, 16),
    ),
    "experts": (experts, *OF_EXPERTS),
}  # fmt: skip


def cotangent(fn, w, x):
    return signs(9, *jax.eval_shape(fn, w, x).shape)


def gradients(fn, w, x):
    c = cotangent(fn, w, x)
    return jax.jit(jax.grad(lambda w, x: (fn(w, x) * c).sum(), argnums=(0, 1)))(w, x)


def products(fn, *args, policy=FLOAT8):
    found = jamp.report(fn, *args, policy=policy).operations
    return [(op.rule, op.not_float8) for op in found if op.primitive in ("conv_general_dilated", "ragged_dot_general")]


@pytest.mark.in_turns(4)
@pytest.mark.parametrize(
    "policy", [EACH, "O2:float16,matmul=float8,grad_dtype=e5m2", "O1:bfloat16,matmul=float8,weight_grad=half"]
)
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_of_powers_of_two_are_exact(form, policy):
    fn, w, x = FORMS[form]
    policy = jamp.get_policy(policy).with_rules(float8=["conv_general_dilated", "ragged_dot_general"])
    cast = jamp.cast_fn(fn, policy)
    assert {rule for rule, _ in products(fn, w, x, policy=policy)} == {"float8"}
    np.testing.assert_array_equal(cast(w, x), fn(w, x))
    for found, expected in zip(gradients(cast, w, x), gradients(fn, w, x), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("form", ["convolution", "strides", "experts"])
def test_under_what_jax_wraps_around_it(form):
    fn, w, x = FORMS[form]
    cast = jamp.cast_fn(fn, EACH)
    expected = gradients(fn, w, x)
    looped = lambda w, x: lax.scan(lambda c, w: (c, cast(w, x)), 0.0, w[None])[1][0]  # noqa: E731
    for wrapped in (jax.checkpoint(cast), looped):
        for found, g in zip(gradients(wrapped, w, x), expected, strict=True):
            np.testing.assert_array_equal(found, g)
    moved = signs(11, *w.shape), signs(12, *x.shape)
    for found, value in zip(jax.jvp(cast, (w, x), moved), jax.jvp(fn, (w, x), moved), strict=True):
        np.testing.assert_array_equal(found, value)
    twice = lambda f: jax.jit(jax.grad(lambda x: jnp.vdot(gradients(f, w, x)[1], x)))  # noqa: E731
    np.testing.assert_array_equal(twice(cast)(x), twice(fn)(x))


@pytest.mark.parametrize("form", ["convolution", "experts"])
@pytest.mark.parametrize("large", [2.0**116, 2.0**-116])
def test_scales_far_apart_make_no_infinity(form, large):
    fn, w, x = FORMS[form]
    expected, found = fn(w, x), jamp.cast_fn(fn, EACH)
    np.testing.assert_array_equal(found(w / np.float32(large), x * np.float32(large)), expected)
    dw, dx = gradients(found, w / np.float32(large), x * np.float32(large))
    for got, exact in zip((dw / large, dx * large), gradients(fn, w, x), strict=True):
        np.testing.assert_array_equal(got, exact)


def test_many_rows_of_experts_are_no_weight():
    """Which either operand may be where both are given."""
    of_shape = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)  # noqa: E731
    w, x = of_shape(4, 256, 256), of_shape(4 * 4096, 256)
    assert products(lambda w, x: jnp.tanh(experts(w, x)), w, x) == [("float8", "")]


def test_taylor_series():
    for found, value in zip(
        *(jet(functools.partial(f, W), (X,), ([X],)) for f in (jamp.cast_fn(convolution, EACH), convolution)),
        strict=True,
    ):
        np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (0, 0)])
def test_gradients_under_vmap(mapped):
    w, x = (np.stack([y, 2 * y[..., ::-1]]) if d == 0 else y for y, d in zip((W, X), mapped, strict=True))
    found, expected = (
        jax.vmap(functools.partial(gradients, f), mapped)(w, x) for f in (jamp.cast_fn(convolution, EACH), convolution)
    )
    for y, g in zip(found, expected, strict=True):
        np.testing.assert_array_equal(y, g)


def test_second_derivatives_of_a_convolution():
    curved = lambda fn: lambda w, x: jnp.tanh(0.01 * fn(w, x))  # noqa: E731
    twice = lambda fn: jax.grad(lambda w, x: jnp.vdot(gradients(curved(fn), w, x)[0], w), argnums=(0, 1))  # noqa: E731
    for found, expected in zip(twice(jamp.cast_fn(convolution, EACH))(W, X), twice(convolution)(W, X), strict=True):
        assert np.linalg.norm(found - expected) < 0.06 * np.linalg.norm(expected)


def test_devices_agree_on_gradients():
    mesh = Mesh(np.array(jax.devices()[:1]), ("d",))
    cast = jamp.cast_fn(convolution, EACH)
    sharded = jax.shard_map(cast, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))
    for found, expected in zip(gradients(sharded, W, X), gradients(convolution, W, X), strict=True):
        np.testing.assert_array_equal(found, expected)


def of_shape(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    ("fn", "shapes", "reason"),
    [
        (convolution, [(3, 3, 64, 512), (8, 16, 16, 64)], ""),
        (convolution, [(3, 3, 64, 256), (8, 16, 16, 64)], "2304 factors of each number are few: less than 4096"),
        (convolution, [(7, 7, 3, 512), (8, 16, 16, 3)], "3 contracted elements are no multiple of 16"),
        (convolution, [(3, 3, 32, 512), (8, 16, 16, 32)], "32 contracted elements are few: less than 64"),
        (
            functools.partial(convolution, feature_group_count=64),
            [(3, 3, 1, 512), (8, 16, 16, 64)],
            "it is a convolution in groups of its own",
        ),
        (experts, [(4, 64, 128), (512, 64)], ""),
        (experts, [(4, 64, 128), (128, 64)], "32 rows are few: less than 64"),
        (experts, [(4, 64, 72), (512, 64)], "72 columns are no multiple of 16"),
    ],
)
def test_sizes_decide(fn, shapes, reason):
    args = [of_shape(*shape) for shape in shapes]
    assert products(lambda w, x: jax.nn.relu(fn(w, x)), *args) == [("half" if reason else "float8", reason)]


def test_other_scales_are_those_of_matrix_products():
    w, x = of_shape(3, 3, 64, 512), of_shape(8, 16, 16, 64)
    for setting in ("matmul=float8,float8_scales=row", "matmul=mxfp8"):
        found = products(convolution, w, x, policy=f"O2:bfloat16,{setting}")
        assert found == [("half", "an operand of a convolution has one scale")]


def test_experts_are_kept_as_bytes_and_data_of_a_convolution_in_half():
    def kept(fn, w, x):
        residuals = jamp.report(lambda w, x: jnp.tanh(fn(w, x)).sum(), w, x, policy=EACH).residuals
        return {r.dtype for r in residuals if r.shape == x.shape}

    assert kept(experts, *map(jnp.asarray, OF_EXPERTS)) == {"uint8"}
    # Read again from the argument.
    assert "uint8" not in kept(convolution, jnp.asarray(W), jnp.asarray(X))
