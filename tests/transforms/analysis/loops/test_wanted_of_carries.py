"""Demand of the carries of loops, of what these start from, and of what a loop wants by itself."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jamp.transforms.analysis.regimes import REGIMES
from jamp.transforms.program.want import Want
from tests.transforms.analysis.test_demand import inner_wants, planner_of, wants_of

X, W, B = jnp.ones((4, 16)), jnp.ones((16, 16)), jnp.ones(16)
FULL, HALF, HALF_APART, DIVISOR = Want.FULL, Want.HALF, Want.HALF_APART, Want.DIVISOR
GATE, START, LIMIT, EXACT, AGAIN = Want.GATE, Want.START, Want.LIMIT, Want.EXACT, Want.AGAIN


def fixed_point(z):
    step = lambda state: (jnp.tanh(state[0]), state[0])  # noqa: E731
    return lax.while_loop(lambda state: jnp.abs(state[0] - state[1]).max() > 1e-5, step, (z, z + 1))[0]


def with_a_sum(z, total):
    step = lambda state: (jnp.tanh(state[0]), state[0], state[2] + state[0])  # noqa: E731
    return lax.while_loop(lambda state: jnp.abs(state[0] - state[1]).max() > 1e-5, step, (z, z + 1, total))[2]


def ranking(w, x):
    step = lambda state: (jnp.argmax(state[0] * x @ w, -1, keepdims=True), state[0])  # noqa: E731
    choices = jnp.zeros((4, 1), int), jnp.ones((4, 1), int)
    return lax.while_loop(lambda state: (state[0] != state[1]).any(), step, choices)[0]


def linear(a, x):
    return lax.fori_loop(0, 9, lambda i, x: x + 0.1 * (B - a @ x), x)


def grows(x, limit):
    return lax.while_loop(lambda h: h.sum() < limit, lambda h: 2 * h, x)


def until_small(x):
    return lax.while_loop(lambda state: state[1], lambda state: (0.5 * state[0], state[0].sum() > 1), (x, True))[0]


def fits(w, x, target):
    step = lambda state: (state[0] - 0.1 * (jnp.tanh(state[0] @ w) - target), state[0])  # noqa: E731
    return lax.while_loop(lambda state: jnp.abs(state[0] - state[1]).max() > 1e-5, step, (x, x + 1))[0]


def fits_with_a_sum(w, x, target, total):
    def step(state):
        x, _, total = state
        return x - 0.1 * (jnp.tanh(x @ w) - target), x, total + x

    return lax.while_loop(lambda state: jnp.abs(state[0] - state[1]).max() > 1e-5, step, (x, x + 1, total))[2]


def with_a_value(w, z, value):
    def step(state):
        z = 0.5 * (state[0] + state[1])
        return z, jnp.tanh(z @ w)

    return lax.while_loop(lambda state: jnp.abs(state[0] - state[1]).max() > 1e-6, step, (z, value))[0]


def loop_of(fn, *args):
    return next(e for e in jax.make_jaxpr(fn)(*args).jaxpr.eqns if e.primitive.name in ("while", "scan"))


def alone(fn, *args):
    """What a loop wants of its carries, whoever reads them."""
    return planner_of("O2").demand.carries.alone(loop_of(fn, *args), REGIMES["O2"])


@pytest.mark.parametrize(("level", "wanted"), [("O2", DIVISOR), ("O3", HALF)])
def test_a_linear_iteration_is_carried_in_float32(level, wanted):
    carried, _ = inner_wants(linear, W, B, level=level)
    assert carried[1] == wanted
    taken_apart = inner_wants(linear, W, B, level=level, want=HALF_APART)[0]
    assert taken_apart[1].full == (wanted is DIVISOR)


@pytest.mark.parametrize(("level", "wanted"), [("O2", AGAIN), ("O3", HALF)])
def test_choices_end_a_loop_when_they_come_again(level, wanted):
    assert inner_wants(ranking, W, X, level=level)[0] == (wanted, wanted)


def test_only_what_decides_comes_from_outside_so():
    carried, outside = inner_wants(with_a_sum, X, X)
    assert carried == (EXACT, EXACT, HALF)
    assert outside == (START, HALF)
    assert inner_wants(grows, X, jnp.float32(9))[1] == (START, LIMIT)


def test_a_loop_in_a_loop_starts_anew_each_time():
    assert inner_wants(lambda z, ts: lax.scan(lambda z, t: (fixed_point(z), t), z, ts)[0], X, B)[0] == (DIVISOR,)


def test_what_is_taken_off_what_a_loop_computes_is_a_limit():
    assert inner_wants(fits, W, X, X)[1] == (DIVISOR, START, LIMIT)
    assert inner_wants(fits_with_a_sum, W, X, X, X)[1] == (DIVISOR, START, LIMIT, HALF)


def test_the_value_at_the_start_of_a_loop_belongs_to_it():
    assert inner_wants(with_a_value, W, X, X)[1] == (DIVISOR, START, Want.VALUE)


def test_nothing_is_a_limit_at_levels_that_listen_to_nobody():
    assert inner_wants(grows, X, jnp.float32(9), level="O3") == ((HALF,), (HALF, HALF))
    assert inner_wants(until_small, X)[0] == (EXACT, EXACT)
    assert inner_wants(until_small, X, level="O3")[0] == (HALF, FULL)


def decayed(h, w, gates, xs):
    return lax.scan(lambda h, each: (each[0] * h + jnp.tanh(each[1] @ w), None), h, (gates, xs))[0]


def decayed_while(h, w, gate, x):
    step = lambda state: (state[0] + 1, gate * state[1] + jnp.tanh(x @ w))  # noqa: E731
    return lax.while_loop(lambda state: state[0] < 3, step, (0, h))[1]


def test_what_scales_the_carry_of_a_loop_is_a_gate():
    stacked = jnp.ones((3, 4, 16))
    assert wants_of(decayed, X, W, stacked, stacked) == (HALF, HALF, GATE, HALF)
    assert wants_of(decayed_while, X, W, X, X) == (HALF, HALF, GATE, HALF)


def test_what_a_loop_wants_by_itself():
    assert alone(fixed_point, X) == (EXACT, EXACT)
    assert alone(with_a_sum, X, X) == (EXACT, EXACT, FULL)
    assert alone(lambda x: lax.scan(lambda h, t: (jnp.tanh(h) + t, h), x, B)[0], 0.0) == (FULL, Want.NONE)
    assert alone(lambda w, x: lax.fori_loop(0, 3, lambda _, h: h @ w, x), W, X) == (FULL, DIVISOR)  # The counter too.
    # What it closes over may be weights.
    factors = W[:, :2]
    assert alone(lambda w, x: lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ w @ w.T), x), factors, X) == (FULL, HALF)
