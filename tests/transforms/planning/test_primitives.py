"""Families of primitives that are neither products nor elementwise: right values, right dtypes, never a crash."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import (
    LEVELS,
    assert_close,
    check,
    find,
    half_of,
    operand_dtypes,
    product_dtypes,
    run,
    total,
    trace,
)

W = jax.random.normal(jax.random.key(0), (4, 4)) / 2
X = jax.random.normal(jax.random.key(1), (2, 4))
GROUPS = jax.random.normal(jax.random.key(2), (2, 4, 4)) / 2
IMAGE = jax.random.normal(jax.random.key(3), (1, 4, 4, 2))
KERNEL = jax.random.normal(jax.random.key(4), (2, 2, 2, 3)) / 2


def ragged_product(w, x):
    return lax.ragged_dot(x, w, jnp.array([1, 1]))


def convolution(w, x):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def transposed_convolution(w, x):
    return lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def grouped_convolution(w, x):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w[:, :, :1, :2], (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=2
    )


def batched_product(w, x):
    return jnp.einsum("gij,bj->gbi", w, x)


@pytest.mark.parametrize(
    ("fn", "w", "x"),
    [
        (ragged_product, GROUPS, X),
        (batched_product, GROUPS, X),
        (convolution, KERNEL, IMAGE),
        (transposed_convolution, KERNEL, IMAGE),
        (grouped_convolution, KERNEL, IMAGE),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_products_of_every_form_run_in_half_forward_and_backward(fn, w, x):
    assert product_dtypes(check(fn, w, x))


def max_pool(w, x):
    return lax.reduce_window(x @ w, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID")


def average_pool(w, x):
    return lax.reduce_window(x @ w, 0.0, lax.add, (1, 2), (1, 2), "VALID") / 2


def scatters(w, x):
    h = x @ w
    index = jnp.array([0, 0])
    return jax.ops.segment_sum(h, index, 2), h.at[0].set(1.0), h.at[0].max(0.0), h.at[1].mul(2.0), h.at[0].add(x[0])


def gathers(w, x):
    return (x @ w)[jnp.array([1, 0, 1])], jnp.take_along_axis(x @ w, jnp.array([[0], [3]]), 1), w[jnp.array([1, 1])]


def slices(w, x):
    h = x @ w
    return lax.dynamic_slice(h, (0, 1), (2, 2)), lax.dynamic_update_slice(h, x[:, :1], (0, 1)), h[::-1], h[:, 1:3]


def joins(w, x):
    h = x @ w
    return jnp.concatenate([h, x]), jnp.stack([h, x]), jnp.pad(h, 1), jnp.split(h, 2, axis=1), jnp.tile(h, (1, 2))


def cumulative(w, x):
    h = x @ w
    return jnp.cumsum(h, 1), jnp.cumprod(h, 1), lax.cummax(h, 1), lax.cumlogsumexp(h, 1), jnp.cumsum(h, 0)[::-1]


def elementary(w, x):
    h = jnp.abs(x @ w) + 0.5
    return (
        jnp.log(h),
        jnp.exp(-h),
        h**3,
        h**0.3,
        jnp.sqrt(h),
        lax.rsqrt(h),
        1 / h,
        jnp.sin(h),
        jnp.arctan2(h, x),
        jnp.expm1(-h),
    )


def special(w, x):
    h = jnp.abs(x @ w) + 0.5
    functions = jax.scipy.special
    return functions.gammaln(h), functions.digamma(h), lax.erf(h), functions.erfinv(jnp.tanh(h)), functions.i0e(h)


def roundings(w, x):
    h = 8 * (x @ w)
    return jnp.clip(h, -1, 1), jnp.maximum(h, 0), jnp.sign(h), jnp.where(h > 0, h, 0.1 * h), -h, jnp.abs(h)


def statistics(w, x):
    h = x @ w
    return h.mean(), h.var(), h.std(0), h.max(1), h.min(), jnp.prod(h, 1), jnp.linalg.norm(h)


FAMILIES = [
    max_pool, average_pool, scatters, gathers, slices, joins, cumulative, elementary, special, roundings, statistics,
]  # fmt: skip


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("fn", FAMILIES, ids=lambda fn: fn.__name__)
def test_a_family_of_primitives_runs_and_differentiates(fn):
    check(fn, W, X, tolerance=0.06)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "fn", [scatters, joins, elementary, roundings, statistics, average_pool], ids=lambda fn: fn.__name__
)
def test_a_family_of_primitives_runs_at_every_level_in_float16(fn, level):
    check(fn, W, X, policy=f"{level}:float16", grad=False, tolerance=0.02)


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("policy", ["O1:bfloat16", "O2:bfloat16", "O2:float16", "O3:bfloat16"])
@pytest.mark.parametrize("fn", FAMILIES, ids=lambda fn: fn.__name__)
def test_a_family_of_primitives_takes_half_arguments(fn, policy):
    """Parameters of some primitives depend on the dtype that they were traced with."""
    half, full = ([arg.astype(dtype) for arg in (W, X)] for dtype in (half_of(policy), jnp.float32))
    assert_close(run(jamp.cast_fn(fn, policy), *half), run(fn, *full), tolerance=0.06)
    gradient = run(jax.grad(total(jamp.cast_fn(fn, policy)), (0, 1)), *half)
    assert [g.dtype for g in gradient] == [half_of(policy)] * 2
    expected = run(jax.grad(total(fn), (0, 1)), *full)
    assert_close([g.astype(np.float32) for g in gradient], list(expected), tolerance=0.12)


def test_sorting_and_ranking_agree_with_float32_on_values_that_half_holds():
    x = jnp.array([[3.0, 1.0, 2.0, 0.5]])

    def fn(x):
        h = x @ jnp.eye(4)
        return jnp.sort(h), jnp.argsort(h), lax.top_k(h, 2), jnp.argmax(h)

    for level in ("O2", "O3"):
        assert_close(run(jamp.cast_fn(fn, f"{level}:bfloat16"), x), run(fn, x), tolerance=0)


def linear_algebra(w, x):
    matrix = w @ w.T + 4 * jnp.eye(4)
    _, upper = jnp.linalg.qr(matrix)
    return (
        jnp.linalg.solve(matrix, x.T), jnp.abs(upper), jnp.linalg.cholesky(matrix), jnp.linalg.eigvalsh(matrix),
        jnp.linalg.det(matrix), jnp.linalg.svd(matrix, compute_uv=False), jnp.linalg.inv(matrix),
    )  # fmt: skip


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_linear_algebra_runs_in_float32_at_every_level(level):
    cast = jamp.cast_fn(linear_algebra, f"{level}:float16")
    jaxpr = trace(cast, W, X)
    for eqn in find(jaxpr, "lu", "qr", "geqrf", "cholesky", "eigh", "svd", "triangular_solve", "householder_product"):
        assert set(operand_dtypes(eqn)) == {"float32"}, eqn
    for a, b in zip(jax.jit(cast)(W, X), jax.jit(linear_algebra)(W, X), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=0.02 * float(jnp.abs(b).max()))


def fourier(w, x):
    h = x @ w
    return jnp.fft.rfft(h).real, jnp.abs(jnp.fft.fft(h)), jnp.fft.irfft(jnp.fft.rfft(h) * 2)


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_fourier_transforms_run_in_float32(level):
    jaxpr = check(fourier, W, X, policy=f"{level}:float16")
    assert all(var.aval.dtype in (jnp.float32, jnp.complex64) for eqn in find(jaxpr, "fft") for var in eqn.invars)


def test_complex_products_stay_complex():
    def fn(w, x):
        z = lax.complex(x, 2 * x) @ lax.complex(w, -w)
        return jnp.abs(z), z, jnp.real(z) @ w

    cast = jamp.cast_fn(fn, "O2:bfloat16")
    assert [eqn.outvars[0].aval.dtype.name for eqn in find(trace(cast, W, X), "dot_general")] == [
        "complex64",
        "float32",
    ]
    assert_close(run(cast, W, X), run(fn, W, X))


@pytest.mark.parametrize("level", LEVELS)
def test_integers_booleans_and_keys_pass_untouched(level):
    def fn(key, i, b):
        k1, k2 = jax.random.split(key)
        return i @ i.T, ~b, (i > 2) & b, k1, jax.random.key_data(k2), i.sum(), i << 1, i.astype(jnp.uint8)

    args = (jax.random.key(3), jnp.arange(6).reshape(2, 3), jnp.ones((2, 3), bool))
    assert_close(jamp.cast_fn(fn, f"{level}:float16")(*args), fn(*args), tolerance=0)


@pytest.mark.parametrize("level", LEVELS)
def test_random_numbers_are_those_of_float32(level):
    def fn(key):
        return (
            jax.random.bernoulli(key, 0.3, (16,)), jax.random.randint(key, (4,), 0, 9), jax.random.uniform(key, (8,)),
            jax.random.permutation(key, 5), jax.random.categorical(key, jnp.zeros(4), shape=(4,)),
        )  # fmt: skip

    cast = jax.jit(jamp.cast_fn(fn, f"{level}:bfloat16"))
    assert_close(cast(jax.random.key(3)), jax.jit(fn)(jax.random.key(3)), tolerance=0 if level != "O3" else 2**-7)


def test_random_normals_are_near_those_of_float32():
    def fn(key, w):
        return jax.random.normal(key, (2, 4)) @ w, jax.random.gumbel(key, (4,))

    cast = jamp.cast_fn(fn, "O2:bfloat16")
    for a, b in zip(jax.jit(cast)(jax.random.key(3), W), jax.jit(fn)(jax.random.key(3), W), strict=True):
        np.testing.assert_allclose(a, b, atol=0.03)


def test_dropout_masks_are_those_of_float32():
    def fn(key, x):
        h = x @ jnp.eye(4)
        return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h / 0.5, 0.0)

    x = jnp.ones((2, 4))
    assert_close(run(jamp.cast_fn(fn, "O2:float16"), jax.random.key(1), x), run(fn, jax.random.key(1), x), tolerance=0)


def test_a_composite_keeps_its_name_and_runs():
    def fn(w, x):
        return lax.composite(lambda w, x: jnp.sin(x @ w), name="test.sine")(w, x)

    cast = jamp.cast_fn(fn, "O2:bfloat16")
    (composite,) = find(trace(cast, W, X), "composite")
    assert composite.params["name"] == "test.sine"
    np.testing.assert_allclose(jax.jit(cast)(W, X), jax.jit(fn)(W, X), atol=0.03)


def test_a_pallas_kernel_gets_the_dtypes_that_it_was_written_for():
    from jax.experimental import pallas as pl

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    def fn(w, x):
        double = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((2, 4), jnp.float32), interpret=True)
        return double(jnp.tanh(x @ w)) @ w

    cast = jamp.cast_fn(fn, "O2:bfloat16")
    jaxpr = trace(cast, W, X)
    (call,) = find(jaxpr, "pallas_call")
    assert operand_dtypes(call) == ["float32"]
    assert product_dtypes(jaxpr) == [["bfloat16"] * 2] * 2
    np.testing.assert_allclose(jax.jit(cast)(W, X), fn(W, X), atol=0.05)


def test_custom_partitioning_gets_the_dtypes_that_it_was_written_for():
    from jax.experimental.custom_partitioning import custom_partitioning

    @custom_partitioning
    def sine(x):
        return jnp.sin(x)

    sine.def_partition(
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        partition=lambda mesh, args, result: (mesh, jnp.sin, result.sharding, (args[0].sharding,)),
        sharding_rule="i j -> i j",
    )
    jaxpr = trace(jamp.cast_fn(lambda w, x: sine(jnp.tanh(x @ w)) @ w, "O2:bfloat16"), W, X)
    (call,) = find(jaxpr, "custom_partitioning")
    assert operand_dtypes(call) == ["float32"]


def test_a_primitive_that_nobody_knows_runs_as_traced():
    from jax.extend.core import Primitive

    unknown = Primitive("test_unknown")
    unknown.def_abstract_eval(lambda x: x)
    jaxpr = trace(jamp.cast_fn(lambda w, x: unknown.bind(jnp.tanh(x @ w)) @ w, "O2:float16"), W, X)
    (eqn,) = find(jaxpr, "test_unknown")
    assert operand_dtypes(eqn) == ["float32"]
    assert product_dtypes(jaxpr) == [["float16"] * 2] * 2


def test_reduce_with_a_computation_of_the_user():
    def fn(w, x):
        return lax.reduce(x @ w, 1.0, lambda a, b: a * b, (1,)), lax.reduce(x @ w, 0.0, lambda a, b: a + b / 2, (0,))

    check(fn, W, X, grad=False)


def test_reduce_precision_is_respected():
    def fn(x):
        return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=2)

    x = jnp.array([1.2, 3.3, 5.7])
    assert_close(run(jamp.cast_fn(fn, "O2:bfloat16"), x), fn(x), tolerance=0)


@pytest.mark.parametrize("level", LEVELS)
def test_float64_is_the_users_word(level):
    with jax.enable_x64(True):
        w, x = W.astype(jnp.float64), X.astype(jnp.float64)

        def fn(w, x):
            return jnp.tanh(x @ w), (x.astype(jnp.float32) @ w.astype(jnp.float32)).sum(), jnp.float64(1) / 3

        cast = jamp.cast_fn(fn, f"{level}:bfloat16")
        jaxpr = trace(cast, w, x)
        assert product_dtypes(jaxpr) == [["float64"] * 2, [half_of(f"{level}:bfloat16").name] * 2]


@pytest.mark.parametrize("level", ["O1", "OD", "O2"])
def test_a_product_that_gives_float64_is_as_it_is_written(level):
    product = lambda x, w: jax.lax.dot(x, w, preferred_element_type=jnp.float64)  # noqa: E731
    x, w = jnp.full((2, 3), 1 + 2.0**-20), jnp.full((3, 2), 1 - 2.0**-20)
    with jax.enable_x64(True):
        out = jax.jit(jamp.cast_fn(product, f"{level}:bfloat16"))(x, w)
        assert (out.astype(jnp.float32) == product(x, w).astype(jnp.float32)).all()


@pytest.mark.parametrize("level", ["O0", *LEVELS])
def test_what_is_float64_is_not_rounded_on_its_way_in_or_out(level):
    with jax.enable_x64(True):
        x = jnp.full((2, 3), 1 + 2.0**-40, jnp.float64)
        out = jamp.cast_fn(lambda x: (x, x.sum(), x.astype(jnp.float32)), level)(x)
        assert [leaf.dtype.name for leaf in out] == ["float64", "float64", "float32"]
        np.testing.assert_array_equal(out[1], 6 + 6 * 2.0**-40)
        asked = jamp.get_policy("O2:bfloat16").with_output_dtype("bfloat16")
        assert jamp.cast_fn(lambda x: x, asked)(x).dtype == jnp.bfloat16
