"""Demand of differences: which equations take something as large off a value, and how far back that is wanted."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jamp.transforms.program.want import Want
from tests.transforms.analysis.test_demand import wants_of

X = Y = Z = jnp.ones((4, 16))
NONE, FULL, HALF, DIVISOR = Want.NONE, Want.FULL, Want.HALF, Want.DIVISOR
FULL_APART, HALF_APART, DIVISOR_APART = Want.FULL_APART, Want.HALF_APART, Want.DIVISOR_APART


def mean(x):
    return x.mean(-1, keepdims=True)


def beyond(reduce, x):
    return x - reduce(x, 0)


def sum_of_parts(one, other):
    return (one - 3.0) + jnp.tanh(other)


DIFFERENCES = {
    "of two": lambda x: x - Y,
    "of a number": lambda x: x - 3.0,
    "from a number": lambda x: 1.0 - x,
    "by adding a negative number": lambda x: x + -3.0,
    "of the least number": lambda x: x - 0.5,
    "by adding the least number": lambda x: x + -0.5,
    "of neighbours": lambda x: x[1:] - x[:-1],
    "scaled": lambda x: 2.0 * x / 3.0 - Y,
    "moved": lambda x: x.T[:3] - 1.0,
    "chosen": lambda x: jnp.where(Y > 0, x, 0.0) - Y,
    "bounded": lambda x: jnp.maximum(x, 0.0) - Y,
    "moved before": lambda x: (x + 3.0) - Y,
    "bent before": lambda x: jnp.tanh(x) - Y,
    "bent in a rule": lambda x: jax.nn.relu(x) - Y,
    "bent in a checkpoint": lambda x: jax.checkpoint(jnp.tanh)(x) - Y,
    "of another's mean": lambda x: x - mean(Y),
    "of the mean of three": lambda x: beyond(jnp.mean, x[:3]),
    "of the least of three": lambda x: beyond(jnp.min, x[:3]),
    "of itself times data": lambda x: x - x * Z,
    "of one part": lambda x: sum_of_parts(*jnp.split(x, 2)),
    "in a call": lambda x: jax.jit(lambda x: x - Y)(x),
    "behind a call": lambda x: jax.jit(lambda x: 2.0 * x)(x) - Y,
    "in a branch": lambda x: lax.cond(Y[0, 0] > 0, lambda x: x - Y, lambda x: x, x),
    "of a carry": lambda x: lax.scan(lambda c, _: (c - Y, None), x, length=3)[0],
    "of what is scanned": lambda x: lax.map(lambda row: row - 1.0, x),
}


@pytest.mark.parametrize(("name", "fn"), DIFFERENCES.items(), ids=DIFFERENCES)
def test_differences_are_wanted_apart(name, fn):
    from_number = name == "from a number"
    assert wants_of(fn, X) == (Want.LEFT if from_number else HALF_APART,)
    expected = [Want.BOUND] if from_number else [FULL_APART, HALF_APART]
    assert wants_of(fn, X, want=FULL)[0] in expected


WHOLE = {
    "a sum": lambda x: x + Y,
    "a sum with a number": lambda x: x + 3.0,
    "its own mean": lambda x: x - mean(x),
    "its own mean, in a call": lambda x: x - jax.jit(mean)(x),
    "its own mean, scaled": lambda x: x - 0.5 * mean(x),
    "its own mean, rounded": lambda x: x - mean(x.astype(jnp.bfloat16)).astype(jnp.float32),
    "its own mean, of four": lambda x: beyond(jnp.mean, x),
    "its own maximum, of four": lambda x: beyond(jnp.max, x),
    "its own maximum": lambda x: x - x.max(-1, keepdims=True),
    "a threshold": lambda x: jnp.abs(x) - 1e-3,
    "a threshold that is added": lambda x: x + -1e-3,
    "a multiple of itself": lambda x: x - 0.1 * x,
    "a multiple of itself by another": lambda x: x - x * mean(Y),
    "a multiple by a negative number": lambda x: x * -3.0,
    "multiplied before": lambda x: x @ jnp.ones((16, 16)) - Y[:, :16],
}


@pytest.mark.parametrize("fn", WHOLE.values(), ids=WHOLE)
def test_other_equations_are_not(fn):
    assert not wants_of(fn, X)[0].apart


SUMMED = {
    "prefix sums": lambda x: jnp.cumsum(x, -1) - Y,
    "sums": lambda x: x.sum(-1) - Y.sum(-1),
    "squares": lambda x: x**2 - Y**2,
    "energies": lambda x: jnp.sum(x * x, -1) - jnp.sum(Y * Y, -1),
    "norms": lambda x: jnp.linalg.norm(x, axis=-1) - jnp.linalg.norm(Y, axis=-1),
}


@pytest.mark.parametrize("fn", SUMMED.values(), ids=SUMMED)
def test_differences_of_sums_and_powers_are_those_of_what_they_are_made_of(fn):
    assert wants_of(fn, X)[0] in (FULL_APART, HALF_APART)


def test_differences_of_functions_are_those_of_what_they_are_functions_of():
    assert wants_of(lambda x: (jnp.exp(x) - Y, x), X) == (HALF_APART,)
    assert wants_of(lambda x: (jax.nn.softplus(x) - Y, x), X) == (HALF_APART,)
    assert wants_of(lambda x: (jax.nn.softmax(x) - Y, x), X) == (HALF_APART,)


def test_sums_of_exponentials_are_no_sums():
    assert wants_of(lambda x: lax.cumlogsumexp(x, 1) - Y, X) == (FULL,)


def test_the_variance_of_a_norm_is_no_difference():
    assert wants_of(lambda x: mean(x**2) - mean(x) ** 2, X) == (FULL,)


def test_divisors_are_wanted_apart_too():
    assert wants_of(lambda x: (1 / x, x - 3.0), X) == (DIVISOR_APART,)
    assert wants_of(lambda x: jnp.sqrt(x) - Y, X) == (DIVISOR_APART,)
    assert wants_of(lambda x: Z / x - Y, X) == (DIVISOR_APART,)


def test_products_with_data_are_differences():
    assert wants_of(lambda x: x * Z - Y * x, X)[0].apart


def test_what_only_comes_near_a_number_may_be_a_function_of_half():
    assert wants_of(lambda x: jnp.log1p(-jnp.exp(x)), X) == (FULL,)
    assert wants_of(lambda x: jax.nn.softplus(x), X, want=HALF) == (HALF,)


def test_complex_numbers_are_none():
    assert wants_of(lambda x: x.astype(jnp.complex64) - 3.0j, X) == (FULL,)


def test_what_nobody_reads_is_not_taken_apart():
    assert wants_of(lambda x: x - Y, X, want=NONE) == (NONE,)


@pytest.mark.parametrize("level", ["O1", "O2", "OD"])
def test_careful_levels_look_at_differences(level):
    assert wants_of(lambda x: x - Y, X, level=level)[0].apart


def test_others_do_not():
    assert not wants_of(lambda x: x - Y, X, level="O3")[0].apart


OUTER = {
    "differences": lambda z, knots: z[:, None] - knots,
    "differences from two": lambda z, knots: z[:, None] - knots[:2],
    "comparisons": lambda z, knots: z[:, None] > knots,
    "of what is spread": lambda z, knots: lax.broadcast_in_dim(z, (16, 8), (0,)) - lax.broadcast(knots, (16,)),
    "in a larger array": lambda z, knots: z.reshape(2, 8, 1) - knots,
}
NOT_OUTER = {
    "products": lambda z, knots: z[:, None] * knots,
    "sums": lambda z, knots: z[:, None] + knots,
    "of data and a row": lambda z, knots: lax.broadcast(z, (8,)) * 2.0 - knots[:, None],
    "of data and one number": lambda z, knots: z[:, None] - knots[:1],
    "from a number": lambda z, knots: 2.0 - z[:, None],
    "from as much everywhere": lambda z, knots: lax.broadcast_in_dim(z, (16, 8), (0,)) - jnp.full((16, 8), 2.0),
    "of functions of what is spread": lambda z, knots: jnp.tanh(lax.broadcast_in_dim(z, (16, 8), (0,))) - knots,
}


@pytest.mark.parametrize("fn", OUTER.values(), ids=OUTER)
def test_what_each_is_taken_from_each_of_are_coordinates(fn):
    assert wants_of(fn, X[0], X[0, :8]) == (Want.PHASE,) * 2


def test_what_is_spread_may_be_converted():
    spread, halves = (lambda z: lax.broadcast_in_dim(z, (16, 8), (0,))), X[0].astype(jnp.bfloat16)
    assert wants_of(lambda z, knots: spread(z).astype(knots.dtype) - knots, halves, X[0, :8]) == (Want.PHASE,) * 2


@pytest.mark.parametrize("fn", NOT_OUTER.values(), ids=NOT_OUTER)
def test_what_is_taken_from_one_is_none(fn):
    assert Want.PHASE not in wants_of(fn, X[0], X[0, :8])


def test_a_comparison_takes_nothing_off():
    """In float32 by a rule, too, where it says which elements of something are taken apart."""
    rules = {"full": ["prim:gt"]}
    assert wants_of(lambda x, y: lax.select(x > y, Z, Z) - 3.0, X, Y, rules=rules) == (FULL, FULL)
