"""Angles, coordinates and random numbers: where half precision would not be inaccurate but wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.transforms.harness import W, X, find, operand_dtypes, product_dtypes, run, trace

LENGTH, WIDTH = 3001, 32
IDS = jnp.arange(LENGTH)[::-1]
FREQUENCIES = 1.0 / 10_000 ** (jnp.arange(WIDTH) / WIDTH)
ANGLES = np.outer(IDS, FREQUENCIES)
BELOW_O3 = ["OD", "O1", "O2"]


def counted(product):
    return lambda ids, frequencies: jnp.cos(product(jnp.arange(LENGTH, dtype=jnp.float32)[::-1], frequencies))


def given(product):
    return lambda ids, frequencies: jnp.cos(product(ids.astype(jnp.float32), frequencies))


def by_einsum(ids, frequencies):
    return jnp.einsum("i,j->ij", ids, frequencies)


def by_matmul(ids, frequencies):
    return ids[:, None] @ frequencies[None, :]


def in_a_batch(ids, frequencies):
    return (frequencies[None, :, None] @ ids[None, None, :])[0].T


PRODUCTS = pytest.mark.parametrize("product", [by_einsum, by_matmul, in_a_batch, jnp.outer])


class TestRotaryAngles:
    """Position 3001 is 3008 in bfloat16, and an angle of 7 radians more turns everything around."""

    @PRODUCTS
    @pytest.mark.parametrize("positions", [counted, given])
    @pytest.mark.parametrize("half", ["float16", "bfloat16"])
    @pytest.mark.parametrize("level", BELOW_O3)
    def test_angles_are_those_of_float32(self, product, positions, level, half):
        fn = positions(product)
        cosines = run(jamp.cast_fn(fn, f"{level}:{half}"), IDS, FREQUENCIES)
        np.testing.assert_array_equal(cosines, run(fn, IDS, FREQUENCIES))
        np.testing.assert_allclose(cosines, np.cos(ANGLES), atol=2e-3)  # What the frequencies' own rounding makes.

    @PRODUCTS
    def test_angles_of_counters_alone_are_exact_at_o3(self, product):
        fn = counted(lambda ids, _: product(ids, 1.0 / 10_000 ** (jnp.arange(WIDTH) / WIDTH)))
        rotated = jamp.cast_fn(lambda x: x * fn(None, None), "O3:bfloat16")
        np.testing.assert_allclose(run(rotated, jnp.ones((LENGTH, WIDTH))), np.cos(ANGLES), atol=2e-3 + 2**-9)

    def test_the_product_asks_for_all_bits_of_float32(self):
        (product,) = find(trace(jamp.cast_fn(given(by_einsum)), IDS, FREQUENCIES), "dot_general")
        assert product.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2

    def test_the_report_names_the_rule(self):
        assert "phase" in str(jamp.report(given(by_einsum), IDS, FREQUENCIES))

    def test_positions_pass_through_calls_loops_and_branches(self):
        def fn(ids, frequencies):
            angles = jax.jit(by_einsum)(ids.astype(jnp.float32), frequencies)
            angles = jax.lax.cond(ids[0] > 0, lambda a: a, lambda a: -a, angles)
            return jax.lax.scan(lambda c, a: (c, jax.jit(jnp.sin)(a * 2)), 0.0, angles)[1]

        cast = jamp.cast_fn(fn, "O2:bfloat16")
        np.testing.assert_array_equal(run(cast, IDS, FREQUENCIES), run(fn, IDS, FREQUENCIES))

    @pytest.mark.parametrize("level", BELOW_O3)
    def test_an_index_may_be_read_off_a_one_hot_matrix(self, level):
        read = lambda ids: (jax.nn.one_hot(ids, LENGTH) @ jnp.arange(LENGTH)).astype(int)  # noqa: E731
        np.testing.assert_array_equal(run(jamp.cast_fn(read, f"{level}:bfloat16"), IDS), IDS)

    def test_rotated_data_is_half(self):
        def fn(w, x, ids, frequencies):
            angles = by_einsum(ids.astype(jnp.float32), frequencies)
            return ((x @ w) * jnp.cos(angles)) @ w

        jaxpr = trace(jamp.cast_fn(fn, "O2:bfloat16"), W, X, jnp.arange(len(X)), FREQUENCIES[:16])
        assert sorted(map(str, product_dtypes(jaxpr))) == sorted(map(str, [["float32"] * 2, *[["bfloat16"] * 2] * 2]))
        assert {eqn.outvars[0].aval.dtype.name for eqn in find(jaxpr, "mul")} == {"bfloat16"}


class TestSamplingCoordinates:
    """A spatial transformer: coordinates are a product of predicted angles with a grid, rounded down to pixels."""

    SIZE = 224

    def pixels(self, theta):
        axis = jnp.linspace(-1, 1, self.SIZE)
        grid = jnp.stack([*jnp.meshgrid(axis, axis, indexing="ij"), jnp.ones((self.SIZE, self.SIZE))]).reshape(3, -1)
        place = (jnp.einsum("bij,jn->bin", theta, grid) + 1) * (self.SIZE - 1) / 2
        low = jnp.floor(place)
        return low.astype(int), place - low

    @pytest.mark.parametrize("level", BELOW_O3)
    def test_pixels_are_those_of_float32(self, level):
        theta = jax.random.normal(jax.random.key(0), (2, 2, 3))
        (pixels, weights), expected = (
            run(jamp.cast_fn(self.pixels, f"{level}:bfloat16"), theta),
            run(self.pixels, theta),
        )
        np.testing.assert_array_equal(pixels, expected[0])
        np.testing.assert_array_equal(weights, expected[1])

    def test_the_layer_that_predicts_them_gives_its_float32_accumulator(self):
        def fn(w, x):
            theta = (x @ w[:, :6]).reshape(-1, 2, 3)
            return self.pixels(theta)

        first, second = find(trace(jamp.cast_fn(fn, "O2:bfloat16"), W, X), "dot_general")
        assert (operand_dtypes(first), first.outvars[0].aval.dtype) == (["bfloat16"] * 2, jnp.float32)
        assert operand_dtypes(second) == ["float32"] * 2

    def test_an_offset_from_a_layer_is_added_to_the_grid_in_float32(self):
        def fn(w, x):
            place = jnp.arange(4.0)[:, None] * 50 + jnp.tanh(x @ w)
            return jnp.floor(place), place - jnp.floor(place)

        jaxpr = trace(jamp.cast_fn(fn, "O2:bfloat16"), W, X)
        assert {eqn.outvars[0].aval.dtype.name for eqn in find(jaxpr, "add")} == {"float32"}


@pytest.mark.parametrize("reader", [jnp.sin, jnp.floor, lambda y: y.astype(int)])
@pytest.mark.parametrize("rows", [4, 16])
def test_a_layer_is_half_whatever_reads_it(reader, rows):
    """But for up to three inputs, which may be coordinates; a matrix unit would do no faster work with them in half."""
    jaxpr = trace(jamp.cast_fn(lambda w, x: reader(x @ w), "O2:bfloat16"), W[:rows], X[:, :rows])
    assert product_dtypes(jaxpr) == [["bfloat16"] * 2]


@pytest.mark.parametrize("reader", [jnp.sin, jnp.floor, lambda y: y.astype(int)])
def test_an_inner_layer_is_half_whatever_reads_it(reader):
    """What comes out of a layer is rounded to half already."""
    jaxpr = trace(jamp.cast_fn(lambda w, x: reader((x @ w)[:, :3] @ w[:3]), "O2:bfloat16"), W, X)
    assert product_dtypes(jaxpr) == [["bfloat16"] * 2] * 2


@pytest.mark.parametrize("reader", [jnp.exp, jnp.tanh, lambda y: y > 0])
def test_a_short_product_is_half_where_no_phase_is_made_of_it(reader):
    fn = lambda f: reader(jnp.arange(64.0).reshape(8, 8) @ f.reshape(8, -1))  # noqa: E731
    assert product_dtypes(trace(jamp.cast_fn(fn, "O2:bfloat16"), FREQUENCIES)) == [["bfloat16"] * 2]


@pytest.mark.parametrize("reader", [jnp.exp, jnp.tanh, lambda y: y > 0])
def test_an_outer_product_is_as_exact_as_an_elementwise_one(reader):
    """It contracts nothing, so that no matrix unit would be faster."""
    jaxpr = trace(jamp.cast_fn(lambda f: reader(by_einsum(jnp.arange(8.0), f)), "O2:bfloat16"), FREQUENCIES)
    assert product_dtypes(jaxpr) == [["float32"] * 2]


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "draw", [jax.random.uniform, jax.random.normal, jax.random.gumbel, jax.random.exponential, jax.random.laplace]
)
def test_random_numbers_are_drawn_in_float32_at_o3(draw, half):
    """In bfloat16, a normal number would be one of 129 values, some of them infinite."""
    key = jax.random.key(3)
    drawn = run(jamp.cast_fn(lambda x: x + draw(key, (10_000,)), f"O3:{half}"), jnp.zeros(10_000))
    np.testing.assert_allclose(drawn, draw(key, (10_000,)), rtol=jnp.finfo(half).eps, atol=2e-5)


class TestPositionsAmongTheArguments:
    """Times and coordinates that are given: products of a few of them are angles, and have to be exact."""

    TIMES = jnp.linspace(0.0, 1.0, 7)
    FREQUENCIES = 1e4 ** (-jnp.arange(8) / 8)

    @pytest.mark.parametrize("level", ["O1", "O2"])
    @pytest.mark.parametrize(
        "angles",
        [
            lambda t, f: (1000 * t)[:, None] @ f[None],
            lambda t, f: jnp.einsum("i,j->ij", 1000 * t, f),
            lambda t, f: jnp.stack([512 * t, 300 * t], 1) @ jnp.stack([f, f[::-1]]),
        ],
    )
    def test_sines_of_times_frequencies(self, angles, level):
        def fn(t, f):
            return jnp.sin(2 * angles(t, f))

        assert jnp.array_equal(
            jamp.cast_fn(fn, f"{level}:bfloat16")(self.TIMES, self.FREQUENCIES), fn(self.TIMES, self.FREQUENCIES)
        )

    def test_products_of_data_are_half(self):
        """The sine of a layer, as in a network of sines, is no angle of positions."""
        x, w = jnp.ones((4, 16)), jnp.ones((16, 16))
        fn = jamp.cast_fn(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w), "O2:bfloat16")
        assert product_dtypes(trace(fn, x, w)) == [["bfloat16"] * 2] * 2
