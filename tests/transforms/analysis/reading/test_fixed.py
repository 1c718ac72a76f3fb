"""Of which fixed inputs it matters that they are: examples, and a law on programs with jaxprs of every kind inside."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from jamp.transforms.analysis.reading.fixed import FixedInputs, in_body
from jamp.transforms.analysis.regimes import REGIMES
from jamp.transforms.planning.planner import Planner
from jamp.transforms.program.want import Want
from tests.transforms.programs import COLUMNS, COMBINATORS, SHAPE

X = jnp.ones((4, 16))
W = jnp.ones((16, 16))
T = jnp.float32(0.5)


def matter(fn, *args, fixed=(0, 1, 2)):
    return sorted(FixedInputs().that_matter(jax.make_jaxpr(fn)(*args), frozenset(fixed)))


def test_what_products_read_matters():
    assert matter(lambda x, w, t: t * jnp.tanh(x @ w), X, W, T) == [0, 1]
    assert matter(lambda x, w, t: x @ (w - t), X, W, T) == [0, 1, 2]
    assert matter(lambda x, w, t: x @ (w - t), X, W, T, fixed=[1]) == []


def test_what_is_mixed_with_an_argument_does_not_matter():
    assert matter(lambda x, w, t: x @ (w - t), X, W, T, fixed=[0, 2]) == [0]
    assert matter(lambda x, w, t: (x + t) @ w, X, W, T, fixed=[1, 2]) == [1]


def test_without_products_nothing_matters():
    assert matter(lambda x, w, t: lax.cond(t > 0, lambda: x.sum(), lambda: (w - t).sum()), X, W, T) == []


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_functions_say_what_matters_inside(wrap):
    assert matter(lambda x, w, t: t * wrap(lambda w, x, t: (x + t) @ w)(w, x, t), X, W, T, fixed=[1, 2]) == [1]
    assert matter(lambda x, w, t: t * wrap(lambda w, x: x @ w)(w, x), X, W, T) == [0, 1]


def test_what_a_function_makes_of_constants_matters():
    assert matter(lambda x, w, t: x @ jax.jit(lambda w, t: w - t)(w, t), X, W, T, fixed=[1, 2]) == [1, 2]
    assert matter(lambda x, w, t: x @ jax.jit(lambda w, x: w - x[0])(w, x), X, W, T, fixed=[1, 2]) == []


def test_one_branch_is_enough():
    def program(x, w, t):
        return lax.switch(jnp.int32(t), [lambda x, w, t: x @ w, lambda x, w, t: x * t @ w, lambda x, w, t: x], x, w, t)

    assert matter(program, X, W, T) == [0, 1, 2]
    assert matter(program, X, W, T, fixed=[1, 2]) == [1]


def test_carries_of_loops_are_not_fixed():
    def scans(x, w, t):
        return lax.scan(lambda h, u: (h @ w + t, h), x, jnp.stack([w, w]))[0]

    assert matter(scans, X, W, T) == [1]
    assert matter(lambda x, w, t: lax.scan(lambda h, u: (h + x @ u, h), x, jnp.stack([w, w]))[0], X, W, T) == [0, 1]
    assert matter(lambda x, w, t: lax.while_loop(lambda h: h.sum() > t, lambda h: h @ w, x), X, W, T) == [1]


@pytest.mark.parametrize("loop", ["scan", "while"])
def test_the_body_of_a_loop_is_given_constants_and_what_is_scanned(loop):
    def program(x, w, t):
        if loop == "scan":
            return lax.scan(lambda h, u: (h @ w + u, h), x, jnp.stack([t, t]))[0]
        return lax.while_loop(lambda h: (h * t).sum() > 0, lambda h: h @ w, x)

    eqn = next(eqn for eqn in jax.make_jaxpr(program)(X, W, T).eqns if eqn.primitive.name == loop)
    assert in_body(eqn, [True] * len(eqn.invars)) == ({0, 2} if loop == "scan" else {0})
    assert in_body(eqn, [False] * len(eqn.invars)) == frozenset()


def test_jaxprs_that_differ_in_what_does_not_matter_are_looked_at_once():
    planner = Planner(jamp.get_policy("O2"))
    closed = jax.make_jaxpr(lambda x, w, t: t * (x @ w))(X, W, T)
    of = [planner.demand(closed, (Want.HALF,), REGIMES["O2"], "", frozenset(fixed)) for fixed in ([], [2], [1], [1, 2])]
    assert of[0] is of[1] is not of[2] is of[3]


def wants(closed, fixed, everything):
    """What is wanted of all variables of a jaxpr, and of those inside of its loops."""
    planner = Planner(jamp.get_policy("O2"))
    if everything:
        planner.demand._fixed.that_matter = lambda closed, fixed: fixed
    outs = (Want.HALF,) * len(closed.jaxpr.outvars)
    wanted = planner.demand(closed, outs, REGIMES["O2"], "", fixed)
    return wanted.wants, wanted.carried, planner.demand.facts.means, planner.demand.facts.cancelling


def weighed(m, v, w):
    """Products with few columns, which are as many weighted sums where the weights are fixed."""
    return m * jnp.tanh(m @ (w[:, :2] * v[:, None]))[:, :1] @ w


# In a region everything is float32 or half, a policy inside was applied already, and what decides when a loop ends is
# wanted as it is. A gradient reads the same weights in half, as those of a layer from behind.
NOTHING_MATTERS = ("cast_fn", "converge", "full_precision", "gradient", "half_precision")


@pytest.mark.parametrize("name", sorted(COMBINATORS))
def test_what_does_not_matter_changes_nothing_that_is_wanted(name):
    args = jnp.ones(SHAPE), jnp.ones(COLUMNS), jnp.ones((COLUMNS, COLUMNS))
    closed = jax.make_jaxpr(lambda m, v, w: COMBINATORS[name](weighed, jnp.tanh(m), v, w))(*args)
    told = FixedInputs()
    every = wants(closed, frozenset({0, 1, 2}), True)
    assert (every == wants(closed, frozenset(), True)) == (name in NOTHING_MATTERS)
    for fixed in map(frozenset, itertools.chain(*(itertools.combinations(range(3), n) for n in range(4)))):
        assert told.that_matter(closed, fixed) <= fixed
        assert wants(closed, fixed, False) == wants(closed, fixed, True)
