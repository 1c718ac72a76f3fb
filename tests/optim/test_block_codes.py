"""The 8-bit codes: neighbors, means, zeros, and numbers at the edges."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jamp.optim._block_codes import decode_blocks, encode_blocks, scales_shape

DTYPES = (np.dtype("int8"), np.dtype(jnp.float8_e4m3fn))
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=("int8", "float8"))


def through(x, key, dtype, block_size=256):
    return decode_blocks(*encode_blocks(x, key, dtype, scales_shape(x.shape, block_size)))


def every_code(dtype, nonnegative):
    bits = np.arange(256, dtype=np.uint8).view(dtype)
    if dtype == np.int8:
        # Where nothing is negative, the two lowest positive codes are never written.
        bits = bits[(bits != 1) & (bits != 2)] if nonnegative else bits[bits != -128]
    else:
        bits = bits[np.isfinite(bits.astype(np.float32))]
        bits = bits[~np.signbit(bits.astype(np.float32))] if nonnegative else bits
    return jnp.asarray(bits)[None]


@pytest.mark.in_turns(2)
@dtypes
@pytest.mark.parametrize("nonnegative", [False, True])
@pytest.mark.parametrize("scale", [1.0, 3.7, 1e-30, 1e30])
def test_every_code_comes_back(key, dtype, nonnegative, scale):
    codes = every_code(dtype, nonnegative)
    scales = jnp.full((1, 1), -scale if nonnegative else scale, jnp.float32)
    x = decode_blocks(codes, scales)
    if nonnegative and scale == 1e-30:
        x, codes = x[:, x[0] > 1e-37], codes[:, x[0] > 1e-37]  # CPUs flush what is denormal.
    for k in jax.random.split(key, 5):
        again, new_scales = encode_blocks(x, k, dtype, (1, 1))
        np.testing.assert_array_equal(scales, new_scales)
        np.testing.assert_array_equal(decode_blocks(again, new_scales), x)


@dtypes
@pytest.mark.parametrize("sign", ["mixed", "nonnegative"])
def test_rounding_is_unbiased_and_picks_a_neighbor(key, dtype, sign):
    codes = every_code(dtype, sign == "nonnegative")
    grid = np.unique(
        np.asarray(decode_blocks(codes, jnp.float32([[-1.0 if sign == "nonnegative" else 1.0]])), np.float64)
    )
    x = np.random.default_rng(0).uniform(0.003, 1, 63).astype(np.float32) ** 3
    x = np.r_[x if sign == "nonnegative" else x * (-1) ** np.arange(63), 1].astype(np.float32)
    draws = jax.vmap(lambda k: through(jnp.asarray(x), k, dtype))(jax.random.split(key, 20_000))
    draws = np.asarray(draws, np.float64)
    above = grid[np.searchsorted(grid, x.astype(np.float64)).clip(1, len(grid) - 1)]
    below = grid[np.searchsorted(grid, x.astype(np.float64)).clip(1, len(grid) - 1) - 1]
    near = np.minimum(np.abs(draws - above), np.abs(draws - below))
    assert (near <= 1e-6 * np.abs(x)).all()
    deviation = np.maximum(draws.std(0), 1e-4 * np.abs(x)) / np.sqrt(20_000)
    assert (np.abs(draws.mean(0) - x) < 5 * deviation).all()


@dtypes
def test_nothing_positive_becomes_zero_among_second_moments(key, dtype):
    x = jnp.array([1.0, 1e-6, 1e-12, 1e-20, 1e-30, 0.0])
    out = through(x, key, dtype)
    assert (out[:-1] > 0).all() and out[-1] == 0 and out[0] == 1
    assert (through(x.at[-1].set(-1e-3), key, dtype)[3:5] == 0).all()  # Not so where signs are mixed.


@dtypes
def test_a_root_is_no_less_than_what_a_first_moment_may_be_drawn_up_to(key, dtype):
    x = jnp.full((64, 256), 1e-12).at[:, 0].set(1)
    signed, root = through(x.at[:, 1].set(-1), key, dtype), jnp.sqrt(through(x, key, dtype))
    assert signed.sum() == 0  # Of both signs, that small, nothing is drawn up.
    signed = through(jnp.full_like(x, 1e-7).at[:, 0].set(-1), key, dtype)
    assert 0 < signed.max() <= root.min()


@dtypes
def test_an_outlier_is_exact_and_its_block_alone_pays(key, dtype):
    x = jax.random.normal(key, (2, 256)).at[0, 7].set(1e6)
    out = through(x, key, dtype)
    assert out[0, 7] == 1e6
    errors = jnp.linalg.norm(out - x, axis=1) / jnp.linalg.norm(x, axis=1)
    assert errors[1] < 0.05


@dtypes
def test_numbers_at_the_edges(key, dtype):
    largest, tiny = np.finfo(np.float32).max, np.finfo(np.float32).tiny
    rows = {
        "zeros": np.zeros(4), "minus zero": np.full(4, -0.0), "denormal": np.full(4, tiny / 4),
        "smallest": np.array([tiny, tiny, 0, 0]), "largest": np.array([largest, -largest, 1, 0]),
        "inf": np.array([np.inf, 1, 0, 2]), "nan": np.array([1, np.nan, 0, -2]), "one": np.array([0, 0, 5, 0]),
    }  # fmt: skip
    x = jnp.asarray(np.stack(list(rows.values())), jnp.float32)
    out = decode_blocks(*encode_blocks(x, key, dtype, (len(rows), 1)))
    out = dict(zip(rows, np.asarray(out), strict=True))
    for name in ("zeros", "minus zero", "denormal"):
        assert (out[name] == 0).all(), name
    for name in ("smallest", "one"):
        np.testing.assert_array_equal(out[name], rows[name].astype(np.float32))
    np.testing.assert_array_equal(out["largest"][:2], rows["largest"][:2].astype(np.float32))
    assert np.isnan(out["inf"]).all() and np.isnan(out["nan"]).all()


@pytest.mark.in_turns(3)
@dtypes
@pytest.mark.parametrize("shape", [(1,), (257,), (300, 7), (3, 1000), (5, 4, 3), (1, 1), (513, 2)])
def test_blocks_that_do_not_divide(key, dtype, shape):
    x = jax.random.normal(key, shape)
    scales = scales_shape(shape, 256)
    assert len(scales) == len(shape)
    out = through(x, key, dtype)
    assert out.shape == shape
    assert np.linalg.norm(out - x) < 0.05 * np.linalg.norm(x)


@pytest.mark.parametrize(
    "shape, expected",
    [((1024, 4096), (1024, 16)), ((768, 50257), (3, 50257)), ((3, 3, 64, 128), (3, 3, 64, 1)), ((1000, 10), (4, 10))],
)
def test_blocks_lie_where_they_need_the_fewest_scales(shape, expected):
    assert scales_shape(shape, 256) == expected


@pytest.mark.in_turns(3)
@dtypes
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("length", [4, 256])
@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_not_finite_makes_its_whole_block_nan(key, dtype, bad, length, sign):
    """Wherever it stands: the maximum of a block does not see a NaN on CPUs, and the rest would look healthy."""
    x = jax.random.uniform(key, (length, length)) * jnp.where(jnp.arange(length) % 2, 1, sign)
    x = jnp.where(jnp.eye(length, dtype=bool), bad, x).at[-1].set(1)
    for encode in (encode_blocks, jax.jit(encode_blocks, static_argnums=(2, 3))):
        codes, scales = encode(x, key, dtype, (length, 1))
        out = decode_blocks(codes, scales)
        assert np.isnan(scales[:-1]).all() and np.isnan(out[:-1]).all()
        np.testing.assert_array_equal(out[-1], 1)
