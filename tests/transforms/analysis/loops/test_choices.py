"""Discrete choices: they end a loop in half, but for those that have to come again."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from tests.transforms.harness import mixed_levels, product_dtypes, trace

KEY = jax.random.key(0)
P = jax.nn.softmax(3 * jax.random.normal(KEY, (4, 24, 24)), -1)
R = jax.random.normal(jax.random.key(1), (4, 24))


def evaluate(p, r, policy, v):
    p, r = p[policy, jnp.arange(24)], r[policy, jnp.arange(24)]
    return lax.fori_loop(0, 40, lambda _, v: r + 0.9 * p @ v, v)


def improve(p, r, policy, v):
    v = evaluate(p, r, policy, v)
    return jnp.argmax(r + 0.9 * jnp.einsum("ast,t->as", p, v), 0), v


START = jnp.zeros(24, int), jnp.zeros(24)


def until_it_stays(p, r):
    def step(carry):
        policy, _, v, count = carry
        new, v = improve(p, r, policy, v)
        return new, policy, v, count + 1

    going = lambda c: (c[0] != c[1]).any() & (c[3] < 99)  # noqa: E731
    return lax.while_loop(going, step, (START[0], START[0] + 1, START[1], 0))


def until_flagged(p, r):
    def step(carry):
        policy, _, v, count = carry
        new, v = improve(p, r, policy, v)
        return new, jnp.array_equal(new, policy), v, count + 1

    return lax.while_loop(lambda c: ~c[1] & (c[3] < 99), step, (START[0], False, START[1], 0))


def until_none_changes(p, r):
    def step(carry):
        policy, _, v, count = carry
        new, v = improve(p, r, policy, v)
        return new, jnp.abs(new - policy).sum(), v, count + 1

    return lax.while_loop(lambda c: (c[1] > 0) & (c[3] < 99), step, (START[0], 1, START[1], 0))


def frozen_once_it_stays(p, r):
    def step(carry, _):
        policy, done, v, count = carry
        new, value = improve(p, r, policy, v)
        count = count + jnp.where(done, 0, 1)
        return (jnp.where(done, policy, new), done | (new == policy).all(), jnp.where(done, v, value), count), None

    return lax.scan(step, (START[0], False, START[1], 0), length=20)[0]


def ranked(p, r):
    """Scores by products, until their order stays."""

    def step(carry):
        order, _, scores, count = carry
        scores = p[0] @ scores
        return jnp.argsort(scores), order, scores / jnp.abs(scores).max(), count + 1

    going = lambda c: (c[0] != c[1]).any() & (c[3] < 99)  # noqa: E731
    return lax.while_loop(going, step, (START[0], START[0] + 1, r[0], 0))


@pytest.mark.in_turns(3)
@pytest.mark.parametrize(
    "fn", [until_it_stays, until_flagged, until_none_changes, frozen_once_it_stays, ranked], ids=lambda fn: fn.__name__
)
@mixed_levels
def test_a_choice_that_has_to_come_again_is_made_of_what_is_written(fn, level):
    cast = jamp.cast_fn(fn, f"{level}:bfloat16")
    assert all(dtypes == ["float32"] * 2 for dtypes in product_dtypes(trace(cast, P, R)))
    assert int(jax.jit(cast)(P, R)[3]) == int(jax.jit(fn)(P, R)[3])


W = jax.random.normal(KEY, (32, 32)) / 6
X = jax.random.normal(jax.random.key(2), (32,))
softmax = jax.nn.softmax


def generate(pick, w, x):
    """Tokens until a certain one; `pick` chooses one."""

    def step(carry):
        h, _, key, count = carry
        key, now = jax.random.split(key)
        h = jnp.tanh(h @ w)
        return h, pick(h @ w.T, now), key, count + 1

    return lax.while_loop(lambda c: (c[1] != 3) & (c[3] < 9), step, (x, 0, KEY, 0))[0]


def best_or_drawn(by):
    def pick(logits, key):
        return jnp.where(by(logits), jnp.argmax(logits), jax.random.categorical(key, logits))

    return pick


PICKS = {
    "by cumulated weights": lambda logits, key: jax.random.choice(key, 32, p=softmax(logits)),
    "by search": lambda logits, key: jnp.searchsorted(jnp.cumsum(softmax(logits)), jax.random.uniform(key)),
    "by all comparisons": lambda logits, key: (jnp.cumsum(softmax(logits)) < jax.random.uniform(key)).sum(),
    "of the best": lambda logits, key: lax.top_k(logits, 4)[1][jax.random.categorical(key, lax.top_k(logits, 4)[0])],
    "the best, if it is likely": best_or_drawn(lambda logits: softmax(logits).max() > 0.5),
    "the best, if it is large": best_or_drawn(lambda logits: logits.max() > 9),
    "by branch": lambda logits, key: lax.cond(
        logits.max() > 9, lambda: jnp.argmax(logits), lambda: jax.random.categorical(key, logits)
    ),
}


def leave(confident, w, x):
    """Layers until a network is sure."""

    def step(carry):
        h, _, count = carry
        h = jnp.tanh(h @ w)
        return h, confident(h @ w.T), count + 1

    return lax.while_loop(lambda c: ~c[1] & (c[2] < 9), step, (x, False, 0))[0]


def until_one_comes_twice(w, x):
    """A token that was chosen before ends the text."""

    def step(carry):
        h, token, _, count = carry
        h = jnp.tanh(h @ w)
        new = jnp.argmax(h @ w.T)
        return h, new, new == token, count + 1

    return lax.while_loop(lambda c: ~c[2] & (c[3] < 9), step, (x, 0, False, 0))[0]


EXITS = {
    "softmax": lambda logits: softmax(logits).max() > 0.9,
    "of one class": lambda logits: softmax(logits)[3] > 0.9,
    "log softmax": lambda logits: jax.nn.log_softmax(logits).max() > -0.1,
    "entropy": lambda logits: -(softmax(logits) * jax.nn.log_softmax(logits)).sum() < 1,
    "entropy of shares": lambda logits: -(softmax(logits) * jnp.log(softmax(logits) + 1e-9)).sum() < 1,
}


GENERATION = {
    **{name: functools.partial(generate, pick) for name, pick in PICKS.items()},
    **{name: functools.partial(leave, confident) for name, confident in EXITS.items()},
    "a token that comes again": until_one_comes_twice,
}


@pytest.mark.parametrize("fn", GENERATION.values(), ids=GENERATION)
@mixed_levels
def test_generation_and_early_exits_are_half(fn, level):
    found = product_dtypes(trace(jamp.cast_fn(fn, f"{level}:bfloat16"), W, X))
    assert found
    assert all(dtypes == ["bfloat16"] * 2 for dtypes in found)


def noisy(w, x):
    """A fixed point of which each step is scaled by a random number."""

    def step(carry):
        z, _, key, count = carry
        key, now = jax.random.split(key)
        rate = jax.random.uniform(now, minval=0.5)
        return z + rate * (jnp.tanh(z @ w + x) - z), z, key, count + 1

    going = lambda c: (jnp.abs(c[0] - c[1]).max() > 1e-5) & (c[3] < 99)  # noqa: E731
    return lax.while_loop(going, step, (x, x + 1, KEY, 0))[0]


def as_likely_as_before(w, x):
    """Probabilities of this iteration and of the one before are compared."""

    def step(carry):
        h, _, count = carry
        return jnp.tanh(h @ w + x), softmax(h @ w.T), count + 1

    going = lambda c: (jnp.abs(c[1] - softmax(c[0] @ w.T)).max() > 1e-5) & (c[2] < 99)  # noqa: E731
    return lax.while_loop(going, step, (x, x, 0))[0]


def best_or_near(w, x):
    """The predicate chooses between a token and a number of steps that floating values decide."""

    def step(carry):
        h, _, count = carry
        new = jnp.tanh(h @ w + x)
        return new, jnp.where(jnp.abs(new - h).max() < 1e-5, 3, jnp.argmax(new)), count + 1

    return lax.while_loop(lambda c: (c[1] != 3) & (c[2] < 99), step, (x, 0, 0))[0]


@pytest.mark.parametrize("fn", [noisy, as_likely_as_before, best_or_near], ids=lambda fn: fn.__name__)
@mixed_levels
def test_what_looks_like_a_choice_and_is_none_is_as_written(fn, level):
    found = product_dtypes(trace(jamp.cast_fn(fn, f"{level}:bfloat16"), W, X))
    assert all(dtypes == ["float32"] * 2 for dtypes in found)
