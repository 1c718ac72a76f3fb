"""Demand of what lies near a number: which operands have to be as exact as what is left of the number."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jamp.transforms.analysis.apart import wanted_near
from jamp.transforms.analysis.reading.chains import find_constants
from jamp.transforms.program.want import Want
from tests.transforms.analysis.test_demand import wants_of

X = Y = jnp.ones((4, 16))
NONE, FULL, HALF, LEFT, BOUND = Want.NONE, Want.FULL, Want.HALF, Want.LEFT, Want.BOUND

NEAR = {
    "less than a number": lambda p: 1 - p,
    "a square": lambda p: 1 - p * p,
    "a power": lambda p: 1 - p**3,
    "broadcast": lambda p: jnp.ones_like(p) - p,
    "clipped": lambda p: 1 - jnp.clip(p, 0.1, 0.9),
    "moved": lambda p: 1 - p.T[:3],
    "chosen": lambda p: 1 - jnp.where(p > 0.1, p, 0.5),
    "scaled": lambda p: lax.erf_inv(2 * p - 1),
    "an inverse": lax.atanh,
    "a logarithm": lambda p: jnp.log1p(-p),
    "a logarithm of what is near nothing": lambda p: jnp.log(p + 1e-6),
}


@pytest.mark.parametrize("fn", NEAR.values(), ids=NEAR)
def test_what_is_near_a_number_is_wanted_so(fn):
    assert wants_of(fn, X, want=FULL) == (BOUND,)


OTHERS = {
    "less than nothing": lambda x: 0 - x,
    "less than an epsilon": lambda x: 1e-3 - x,
    "a sigmoid": lambda x: 1 - jax.nn.sigmoid(x),
    "a sum of two": lambda x: 1 - (x + Y),
}


@pytest.mark.parametrize("fn", OTHERS.values(), ids=OTHERS)
def test_others_are_not(fn):
    assert wants_of(fn, X, want=FULL)[0] != BOUND


def test_half_readers_of_the_difference_want_a_sigmoid_alone_in_float32():
    assert wants_of(lambda p: 1 - p, X) == (LEFT,)
    assert wants_of(lambda p: 1 - 2 * p.T, X) == (LEFT,)
    assert wants_of(lambda p: 1 - p * Y, X) != (LEFT,)
    assert wants_of(lambda x: 1 - jax.nn.sigmoid(x), X)[0] in (HALF, Want.HALF_APART)


def near(fn, want, *args):
    """What the last equation of a program wants of its operands."""
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return wanted_near(jaxpr.eqns[-1], want, find_constants(jaxpr), part=0.5)


# What is as near to a number as all of its operands, for readers that half will do for, too.
PASSED_ON = {
    "reshaped": lambda x: x.reshape(64),
    "a part": lambda x: lax.slice(x, (0, 0), (2, 16)),
    "converted": lambda x: x.astype(jnp.bfloat16),
    "negated": lax.neg,
    "clipped": lambda x: lax.clamp(0.0, x, 1.0),
    "a magnitude": lax.abs,
    "the larger of two": lambda x: lax.max(x, Y),
    "chosen": lambda x: lax.select(Y > 0, x, Y),
    "moved": lambda x: x + 0.25,
    "moved by as much everywhere": lambda x: x + jnp.full_like(x, 0.25),
    "scaled": lambda x: 2.0 * x,
    "divided": lambda x: x / 2.0,
    "a power": lambda x: x**3,
    "a root": lax.sqrt,
    "a product with itself": lambda x: x * x,
}
PASSED_ON_WHERE_EXACT = {
    "put together": lambda x: lax.concatenate([x, Y], 0),
    "padded": lambda x: lax.pad(x, 0.0, [(1, 0, 0), (0, 0, 0)]),
    "the best of many": lambda x: lax.reduce_max(x, (1,)),
    "a sum": lambda x: lax.reduce_sum(x, (1,)),
}
# Of two values, and functions that are near a number where their operands are not.
NOT_PASSED_ON = {
    "a sum of two": lambda x: x + Y,
    "a difference of two": lambda x: x - Y,
    "a product of two": lambda x: x * Y,
    "a quotient of two": lambda x: x / Y,
    "a power of another": lambda x: lax.pow(x, Y),
    "moved by a number that is computed": lambda x: x + lax.neg(jnp.full_like(x, 0.25)),
    "moved by places": lambda x: x + lax.broadcasted_iota(jnp.float32, X.shape, 1),
    "a function": lax.tanh,
    "an exponential": lax.exp,
    "prefix sums": lambda x: lax.cumsum(x, 1),
    "a product of matrices": lambda x: x @ Y.T,
}
OPERATIONS = {**PASSED_ON, **PASSED_ON_WHERE_EXACT, **NOT_PASSED_ON}


@pytest.mark.parametrize("name", OPERATIONS)
def test_which_operations_pass_on_what_is_near_a_number(name):
    exact, left = near(OPERATIONS[name], BOUND, X), near(OPERATIONS[name], LEFT, X)
    assert exact == (None if name in NOT_PASSED_ON else BOUND)
    assert left == (LEFT if name in PASSED_ON else None)


@pytest.mark.parametrize("want", [want for want in Want if want not in (LEFT, BOUND)])
def test_other_wants_are_not_passed_on(want):
    assert near(lambda x: 2.0 * x, want, X) is None
    assert near(lambda x: x - 1.0, want, X) is None
    assert near(lambda x: x.reshape(64), want, X) is None


def test_what_is_infinite_at_an_end_wants_what_is_near_it_whoever_reads_it():
    for want in (NONE, HALF, LEFT, FULL, BOUND):
        for fn in (lax.log, lax.log1p, lax.atanh, lambda x: lax.reduce_prod(x, (1,))):
            assert near(fn, want, X) == BOUND


@pytest.mark.parametrize("number", [1.0, 0.5, -1.0])
def test_what_is_taken_from_a_number_is_as_exact_as_its_readers_want(number):
    lefts = [want for want in Want if near(lambda x: number - x, want, X) == LEFT]
    bounds = [want for want in Want if near(lambda x: number - x, want, X) == BOUND]
    assert lefts == [NONE, HALF, Want.HALF_APART, LEFT]
    assert bounds == [Want.SCORE, FULL, Want.FULL_APART, Want.DIVISOR, Want.DIVISOR_APART, BOUND]


def test_a_power_of_another_that_is_taken_from_a_number_is_a_difference_of_both():
    assert wants_of(lambda x, y: 1 - lax.pow(x, y), X, Y) == (Want.FULL_APART,) * 2
