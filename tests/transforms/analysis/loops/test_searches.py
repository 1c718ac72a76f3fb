"""Searches: what a layer gives is compared with knots, and the place among them is an index.

Around 300 neighbours in bfloat16 are two apart, in float16 a quarter: beside a knot the search ends in another
interval.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import find, product_dtypes, run, trace

KNOTS = jnp.arange(200.0, 456.0)
TABLE = 0.5 * (KNOTS % 7)  # Half holds it.
LAST = len(KNOTS) - 1


def by(method):
    return lambda z: TABLE[jnp.searchsorted(KNOTS, z, method=method)]


def by_halving(z):
    def halve(_, bounds):
        low, high = bounds
        middle = (low + high) // 2
        above = KNOTS[middle] < z
        return jnp.where(above, middle, low), jnp.where(above, high, middle)

    low, high = jnp.zeros(z.shape, int), jnp.full(z.shape, LAST)
    return TABLE[lax.fori_loop(0, 8, halve, (low, high))[1]]


def by_counting(z):
    return TABLE[jnp.sum(z[..., None] > KNOTS, -1)]


def by_the_first_above(z):
    return TABLE[jnp.argmax(z[..., None] <= KNOTS, -1)]


def by_a_cumulated_mask(z):
    return TABLE[jnp.cumsum(z[..., None] > KNOTS, -1)[..., -1]]


def by_arithmetic(z):
    return TABLE[(z > 256.125).astype(int) + 2 * ~(z < 300.125) + jnp.logical_and(z > 270.125, z <= 310.125)]


def by_digitize(z):
    return jnp.take(TABLE, jnp.digitize(z, KNOTS))


def in_a_histogram(z):
    return jnp.histogram(z, KNOTS)[0].astype(jnp.float32)


def in_sums_of_bins(z):
    return jnp.zeros(len(KNOTS)).at[jnp.searchsorted(KNOTS, z)].add(1.0)


def put_in_its_place(z):
    return jnp.zeros(len(KNOTS)).at[jnp.searchsorted(KNOTS, z)].set(1.0)


def the_largest_in_its_bin(z):
    return jnp.zeros(len(KNOTS)).at[jnp.searchsorted(KNOTS, z)].max(1.0)


def in_windows(z):
    return lax.map(lambda one: lax.dynamic_slice(TABLE, (jnp.searchsorted(KNOTS, one),), (4,)), z.ravel())


def put_in_windows(z):
    put = lambda one: lax.dynamic_update_slice(TABLE, jnp.zeros(4), (jnp.searchsorted(KNOTS, one),))  # noqa: E731
    return lax.map(put, z.ravel())


def by_pieces(z):
    pieces = [lambda one, factor=factor: one * 0 + factor for factor in (1.0, 2.0, 3.0, 4.0)]
    limits = jnp.array([256.125, 270.125, 300.125])
    return lax.map(lambda one: lax.switch(jnp.searchsorted(limits, one), pieces, one), z.ravel())


def through_a_checkpoint(z):
    return jax.checkpoint(by("scan"))(z)


def interpolated(z):
    return jnp.interp(z, KNOTS, TABLE)


def the_ones_above(z):
    return TABLE[jnp.nonzero(z.ravel() > 280.125, size=8)[0]]


SEARCHES = {
    **{f"searchsorted by {method}": by(method) for method in ("scan", "scan_unrolled", "compare_all", "sort")},
    **{
        search.__name__: search
        for search in (
            by_halving,
            by_counting,
            by_the_first_above,
            by_a_cumulated_mask,
            by_arithmetic,
            by_digitize,
            in_a_histogram,
            in_sums_of_bins,
            put_in_its_place,
            the_largest_in_its_bin,
            in_windows,
            put_in_windows,
            by_pieces,
            through_a_checkpoint,
            interpolated,
            the_ones_above,
        )
    },
}
SEARCHED = pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)


def layers(seed):
    """Weights and data of a layer whose result is exact in float32, of eighths between 200 and 456."""
    keys = jax.random.split(jax.random.key(seed), 2)
    x = jax.random.randint(keys[0], (24, 16), 0, 16) / 8.0
    w = jax.random.randint(keys[1], (16, 4), 5, 20) * 1.0
    return x.at[:, 0].set(8.0), w.at[0].set(20.0), jnp.ones((4, 3))


def searched_and_read(search):
    """What a layer gives, looked up, and read in half by another layer."""

    def fn(x, w, v):
        z = x @ w
        return search(z), z @ v

    return fn


@SEARCHED
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
def test_places_are_those_of_float32(search, level, half):
    fn = searched_and_read(search)
    args = layers(seed=1)
    z = args[0] @ args[1]
    assert 200 < z.min() < 256 < 300 < z.max() < 456
    np.testing.assert_array_equal(run(jamp.cast_fn(fn, f"{level}:{half}"), *args)[0], run(fn, *args)[0])


@SEARCHED
def test_the_layers_around_are_half(search):
    jaxpr = trace(jamp.cast_fn(searched_and_read(search), "O2:bfloat16"), *layers(seed=2))
    assert product_dtypes(jaxpr) == [["bfloat16"] * 2] * 2


@SEARCHED
def test_at_o3_what_is_searched_for_is_half(search):
    fn, args = searched_and_read(search), layers(seed=3)
    assert run(jamp.cast_fn(fn, "O3:bfloat16"), *args)[0].dtype == jnp.float32


def test_the_gradient_of_an_interpolation_is_that_of_the_interval():
    """Each piece has another slope: in half the argument was in another piece, and this 10 to 16 % off."""

    def loss(x, w, v):
        z = x @ w
        return jnp.sum(jnp.interp(z, KNOTS, TABLE)) + jnp.sum(z @ v)

    args = layers(seed=4)
    found = run(jax.grad(jamp.cast_fn(loss, "O2:bfloat16"), 1), *args)
    np.testing.assert_allclose(found, run(jax.grad(loss, 1), *args), rtol=2**-8)


@pytest.mark.parametrize("chosen", [jnp.argmax, lambda z, axis: lax.top_k(z, 1)[1][..., 0]])
def test_what_is_best_of_many_is_no_place(chosen):
    """A router and a vocabulary choose as they did: half where others read what they choose among in half."""

    def fn(x, w, v):
        z = x @ w
        return TABLE[chosen(z, axis=-1)], z @ v

    jaxpr = trace(jamp.cast_fn(fn, "O2:bfloat16"), *layers(seed=5))
    assert product_dtypes(jaxpr) == [["bfloat16"] * 2] * 2


# `astype(float32)` of what is float32 stands in a jaxpr, and what its readers want is wanted of its operand.
BEHIND_A_CONVERSION = {
    "a divisor": lambda z: 1 / z.astype(jnp.float32),
    "a root": lambda z: jnp.sqrt(z.astype(jnp.float32)),
    "an angle": lambda z: jnp.cos(z.astype(jnp.float32)),
    "a place": lambda z: jnp.searchsorted(KNOTS, z.astype(jnp.float32)),
    "an index": lambda z: z.astype(jnp.float32).astype(int),
}
# Of the angles of waves and rotations the absolute error counts, however they are made and read.
ANGLES = {
    "of a complex exponential": lambda z: jnp.exp(1j * z).imag,
    "of an exponential of complex parts": lambda z: jnp.exp(lax.complex(jnp.zeros_like(z), z)).real,
    "of cumulated frequencies": lambda z: jnp.sin(jnp.cumsum(z, 0)),
    "of a sum from the end": lambda z: jnp.sin(lax.cumsum(z, reverse=True)),
    "of a phase in a loop": lambda z: lax.scan(lambda c, f: (c + f, jnp.sin(c + f)), jnp.zeros(4), z)[1],
    "of the real part": lambda z: jnp.sin((z * (1 + 2j)).real),
}
READERS = BEHIND_A_CONVERSION | ANGLES


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
def test_readers_get_what_float32_gives(level, half, read):
    fn, args = searched_and_read(read), layers(seed=6)
    np.testing.assert_array_equal(run(jamp.cast_fn(fn, f"{level}:{half}"), *args)[0], run(fn, *args)[0])


class TestDistancesFromKnots:
    """Bases of hats and splines, distances: what each of some values is taken from is read in half by a layer."""

    READERS = {  # noqa: RUF012
        "hats": lambda z, knots: jax.nn.relu(1 - jnp.abs(z[..., None] - knots)),
        "hats from the other side": lambda z, knots: jax.nn.relu(1 - jnp.abs(knots - z[..., None])),
        "hats of two slopes": lambda z, knots: jnp.clip(
            jnp.minimum(z[..., None] - knots + 1, knots + 1 - z[..., None]), 0
        ),
        "hats in vmap": lambda z, knots: jax.vmap(jax.vmap(lambda one: jax.nn.relu(1 - jnp.abs(one - knots))))(z),
        "an outer difference": lambda z, knots: jax.nn.relu(1 - jnp.abs(jnp.subtract.outer(z, knots))),
        "in a jitted function": lambda z, knots: jax.jit(lambda a: jax.nn.relu(1 - jnp.abs(a[..., None] - knots)))(z),
        "a spline of degree 0": lambda z, knots: (
            (z[..., None] - knots[:-1] >= 0) & (z[..., None] - knots[1:] < 0)
        ).astype(jnp.float32),
        "of pairs": lambda z, knots: jax.nn.relu(4 - jnp.abs(z[..., None] - z[:, None, ::-1])),
    }

    @pytest.mark.parametrize("are_given", [False, True], ids=["written", "given"])
    @pytest.mark.parametrize("read", READERS.values(), ids=READERS)
    @pytest.mark.parametrize("half", ["bfloat16", "float16"])
    @pytest.mark.parametrize("level", ["OD", "O1", "O2"])
    def test_they_are_those_of_float32(self, level, half, read, are_given):
        x, w, v = layers(seed=8)
        basis = jax.eval_shape(read, jnp.ones((24, 4)), KNOTS)
        u = jax.random.randint(jax.random.key(9), (basis.shape[1] * basis.shape[2], 3), 0, 3) * 1.0

        def fn(x, w, v, u, knots):
            z = x @ w
            return read(z, knots if are_given else KNOTS).reshape(len(z), -1) @ u, z @ v

        args = x, w, v, u, KNOTS
        cast = jamp.cast_fn(fn, f"{level}:{half}")
        np.testing.assert_array_equal(run(cast, *args)[0], run(fn, *args)[0])
        assert product_dtypes(trace(cast, *args)) == [[half] * 2] * 3

    def test_what_is_less_its_own_mean_is_half(self):
        """Only one of the two is spread: a norm, as of a residual stream."""

        def fn(x, w, v):
            z = x @ w
            return (z - z.mean(-1, keepdims=True)) @ v, z @ v

        jaxpr = trace(jamp.cast_fn(fn, "O2:bfloat16"), *layers(seed=10))
        assert find(jaxpr, "dot_general")[0].outvars[0].aval.dtype == jnp.bfloat16


@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
def test_integers_that_an_unknown_operation_makes_are_places(level):
    def count(z):
        return np.floor(z).astype(np.int32)

    def fn(x, w, v):
        z = x @ w
        return jax.pure_callback(count, jax.ShapeDtypeStruct(z.shape, jnp.int32), z), z @ v

    args = layers(seed=11)
    cast = jamp.cast_fn(fn, f"{level}:bfloat16")
    np.testing.assert_array_equal(run(cast, *args)[0], run(fn, *args)[0])
