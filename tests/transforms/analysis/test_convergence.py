"""Loops that stop by themselves: what decides when they end is computed as it is written, and the rest in half."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from tests.transforms.harness import mixed_levels, product_dtypes, trace

KEY = jax.random.key(0)
W = jax.random.normal(KEY, (32, 32)) / 16
X = jax.random.normal(jax.random.key(1), (8, 32))


def fixed_point(w, x):
    """A deep equilibrium: the state, and how many iterations it took."""

    def moves(carry):
        new, old, count = carry
        return (jnp.max(jnp.abs(new - old)) > 1e-6) & (count < 300)

    def step(carry):
        z, _, count = carry
        return jnp.tanh(z @ w + x), z, count + 1

    z, _, count = lax.while_loop(moves, step, (jnp.tanh(x), x, 0))
    return z, count


def flagged(w, x):
    """The same by a flag that the body sets."""

    def step(carry):
        z, _, count = carry
        new = jnp.tanh(z @ w + x)
        return new, (jnp.abs(new - z) <= 1e-6).all(), count + 1

    z, _, count = lax.while_loop(lambda c: ~c[1] & (c[2] < 300), step, (jnp.tanh(x), False, 0))
    return z, count


def newton(w, x):
    """The square root of a matrix, until its residual is small."""
    a = w @ w.T + jnp.eye(32)

    def step(carry):
        y, z, count = carry
        t = 0.5 * (3 * jnp.eye(32) - z @ y)
        return y @ t, t @ z, count + 1

    norm = jnp.linalg.norm(a)
    loop = lambda c: (jnp.linalg.norm(c[1] @ c[0] - jnp.eye(32)) > 1e-4) & (c[2] < 100)  # noqa: E731
    y, _, count = lax.while_loop(loop, step, (a / norm, jnp.eye(32), 0))
    return y, count


def line_search(w, x):
    """Gradient descent whose steps a loop inside finds, from a value and a slope that are computed before it."""
    a = w @ w.T + 0.1 * jnp.eye(32)

    def loss(z):
        return 0.5 * z @ a @ z - x[0] @ z

    def descend(carry):
        z, _, count = carry
        value, slope = jax.value_and_grad(loss)(z)
        decrease = 0.5 * slope @ slope
        too_long = lambda s: (loss(z - s[0] * slope) > value - s[0] * decrease) & (s[1] < 30)  # noqa: E731
        size, halvings = lax.while_loop(too_long, lambda s: (0.5 * s[0], s[1] + 1), (8.0, 0))
        return z - size * slope, jnp.linalg.norm(slope), count + 1 + halvings

    z, _, count = lax.while_loop(lambda c: (c[1] > 3e-2) & (c[2] < 900), descend, (jnp.zeros(32), 1.0, 0))
    return z, count


def sweeps(w, x):
    """Sweeps over rows until nothing moves; each begins with a product."""

    def sweep(carry):
        z, _, count = carry
        new = lax.scan(lambda h, row: (jnp.tanh(0.3 * (h @ w) + 0.2 * row), None), jnp.tanh(z @ w), x)[0]
        return new, z, count + 1

    start = jnp.ones(32), jnp.zeros(32), 0
    z, _, count = lax.while_loop(lambda c: (jnp.abs(c[0] - c[1]).max() > 1e-6) & (c[2] < 100), sweep, start)
    return z, count


@pytest.mark.parametrize("fn", [line_search, sweeps], ids=lambda fn: fn.__name__)
def test_all_of_a_loop_that_is_inside_of_another_decides(fn):
    found = product_dtypes(trace(jamp.cast_fn(fn, "O2:bfloat16"), W, X))
    in_half = [dtypes for dtypes in found if dtypes == ["bfloat16"] * 2]
    assert len(found) - len(in_half) > len(in_half) == int(fn is line_search)  # The matrix, which is made before.
    for policy in ("OD:bfloat16", "O2:float16"):
        assert int(jax.jit(jamp.cast_fn(fn, policy))(W, X)[1]) <= 1.1 * int(fn(W, X)[1]) + 1


@pytest.mark.parametrize("policy", ["OD:bfloat16", "O1:bfloat16", "O2:bfloat16", "O1:float16", "O2:float16"])
@pytest.mark.parametrize("fn", [fixed_point, flagged, newton], ids=lambda fn: fn.__name__)
def test_a_loop_takes_as_many_steps_as_in_float32(fn, policy):
    expected = int(jax.jit(fn)(W, X)[1])
    assert int(jax.jit(jamp.cast_fn(fn, policy))(W, X)[1]) <= 1.1 * expected + 1


@mixed_levels
def test_a_batch_of_loops(level):
    batched = jax.vmap(fixed_point, (None, 0))
    xs = jnp.stack([X, 2 * X])
    counts = jax.jit(jamp.cast_fn(batched, f"{level}:bfloat16"))(W, xs)[1]
    assert (counts <= 1.1 * batched(W, xs)[1] + 1).all()


def moved(w, x, z):
    new = jnp.tanh(z @ w + x)
    return new, jnp.max(jnp.abs(new - z)) > 1e-6


def counted(step, start):
    """A loop with a fixed number of steps, which JAX makes a scan."""
    return lax.fori_loop(0, 60, lambda _, carry: step(carry), start)


def counted_by_an_argument(step, start):
    """The same where the number is not known, which JAX makes a while."""
    return lax.while_loop(lambda c: c[0] < 60 + 0 * start[-1], lambda c: (c[0] + 1, step(c[1])), (0, start))[1]


def by_flag(loop, w, x):
    def step(carry):
        z, done, count = carry
        new, moves = moved(w, x, z)
        return jnp.where(done, z, new), done | ~moves, count + jnp.where(done, 0, 1)

    return loop(step, (x, False, 0))[::2]


def by_new_flag(loop, w, x):
    def step(carry):
        z, going, count = carry
        new, moves = moved(w, x, z)
        going = going & moves & (count < 50)
        return jnp.where(going, new, z), going, count + going

    return loop(step, (x, True, 0))[::2]


def by_branch(loop, w, x):
    """As jaxopt writes a loop that can be differentiated."""

    def step(carry):
        (z, count), _ = carry
        new, moves = moved(w, x, z)
        return (new, count + 1), moves

    def body(carry):
        return lax.cond(carry[1], step, lambda c: (c[0], False), carry[:2]) + carry[2:]

    return loop(body, ((x, 0), True, 0))[0]


def by_predicate(loop, w, x):
    """The condition is computed anew, from carries that do not change any more."""

    def step(carry):
        z, _, count = carry
        return jnp.tanh(z @ w + x), z, count + 1

    def going(carry):
        return jnp.max(jnp.abs(carry[0] - carry[1])) > 1e-6

    z, _, count = loop(lambda c: lax.cond(going(c), step, lambda c: c, c), (jnp.tanh(x), x, 0))
    return z, count


LATCHED = [by_flag, by_new_flag, by_branch, by_predicate]


@pytest.mark.parametrize("fn", LATCHED, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("loop", [counted, counted_by_an_argument], ids=lambda loop: loop.__name__)
def test_a_loop_that_freezes(loop, fn):
    program = functools.partial(fn, loop)
    steps = int(jax.jit(program)(W, X)[1])
    assert 5 < steps < 40
    for policy in ("OD:bfloat16", "O2:float16"):
        assert int(jax.jit(jamp.cast_fn(program, policy))(W, X)[1]) <= 1.1 * steps + 1
    assert product_dtypes(trace(jamp.cast_fn(program, "O2:bfloat16"), W, X)) == [["float32"] * 2]


def test_a_report_names_a_loop_that_freezes():
    assert "loops to convergence       1" in str(jamp.report(functools.partial(by_flag, counted), W, X, policy="O2"))


def best_so_far(w, x):
    """What was best is kept, and what is tried next does not depend on it."""

    def step(carry, noise):
        h, best, least = carry
        h = jnp.tanh(h @ w + noise)
        loss = jnp.sum(h**2)
        return (h, jnp.where(loss < least, h, best), jnp.minimum(loss, least)), None

    return lax.scan(step, (x, x, jnp.inf), jnp.stack([x] * 4))[0][1]


def accepted(w, x):
    """A step that makes things worse is not taken, but the next may be."""

    def step(h, noise):
        new = jnp.tanh(h @ w + noise)
        return jnp.where(jnp.sum(new**2) < jnp.sum(h**2), new, h), None

    return lax.scan(step, x, jnp.stack([x] * 4))[0]


def tokens_until_the_last(w, x):
    """Generation with a fixed length, frozen at a token that `argmax` chose."""

    def step(carry, _):
        h, done = carry
        new = jnp.tanh(h @ w)
        return (jnp.where(done, h, new), done | (jnp.argmax(new[0] @ w) == 3)), None

    return lax.scan(step, (x, False), length=5)[0][0]


def watched(w, x):
    """A flag that freezes nothing."""

    def step(carry, _):
        h, exploded = carry
        h = jnp.tanh(h @ w)
        return (h, exploded | (jnp.sum(h) > 1e3)), None

    return lax.scan(step, (x, False), length=5)[0]


def with_lengths(w, x):
    """A recurrent net over rows of different lengths."""

    def step(h, t):
        return jnp.where(t < jnp.arange(8)[:, None], jnp.tanh(h @ w + x), h), None

    return lax.scan(step, x, jnp.arange(5))[0]


def always(w, x):
    """A choice that the program makes when it is written."""

    def step(carry, _):
        h, flag = carry
        h = jnp.where(True, jnp.tanh(h @ w), h)
        return (h, flag & True), None

    return lax.scan(step, (x, True), length=5)[0][0]


CHOICES = [best_so_far, accepted, tokens_until_the_last, watched, with_lengths, always]


@pytest.mark.parametrize("fn", CHOICES, ids=lambda fn: fn.__name__)
@mixed_levels
def test_choices_that_are_no_end_are_half(fn, level):
    found = product_dtypes(trace(jamp.cast_fn(fn, f"{level}:bfloat16"), W, X))
    assert found
    assert all(dtypes == ["bfloat16"] * 2 for dtypes in found)


def by_token(w, x):
    """Generation: each token is the best by a product, and the loop ends at a certain one."""

    def step(carry):
        h, _, count = carry
        h = jnp.tanh(h @ w)
        return h, jnp.argmax(h[0] @ w), count + 1

    return lax.while_loop(lambda c: (c[1] != 3) & (c[2] < 9), step, (x, 0, 0))[0]


def by_beam(w, x):
    """Beam search: it ends when the best live score is below the worst finished one; `top_k` chose both."""

    def step(carry):
        h, live, done, count = carry
        h = jnp.tanh(h @ w)
        scores = lax.top_k((h @ w).sum(0), 4)[0]
        return h, scores, jnp.maximum(done, live), count + 1

    first = jnp.zeros(4), jnp.full(4, -1e9)
    return lax.while_loop(lambda c: (c[1].max() > c[2].min()) & (c[3] < 9), step, (x, *first, 0))[0]


def by_count(w, x):
    return lax.fori_loop(0, 5, lambda i, h: jnp.tanh(h @ w), x)


@pytest.mark.parametrize("fn", [by_token, by_beam, by_count], ids=lambda fn: fn.__name__)
@mixed_levels
def test_loops_that_count_or_choose_are_half(fn, level):
    found = product_dtypes(trace(jamp.cast_fn(fn, f"{level}:bfloat16"), W, X))
    assert found
    assert all(dtypes == ["bfloat16"] * 2 for dtypes in found)


def test_half_precision_puts_a_loop_back():
    def fn(w, x):
        def step(carry):
            z, _, count = carry
            return jamp.half_precision(lambda z: jnp.tanh(z @ w + x))(z), z, count + 1

        return lax.while_loop(lambda c: (jnp.abs(c[0] - c[1]).max() > 1e-1) & (c[2] < 9), step, (x, 2 * x, 0))[0]

    assert product_dtypes(trace(jamp.cast_fn(fn, "O2:bfloat16"), W, X)) == [["bfloat16"] * 2]


def test_a_rule_for_its_scope_puts_a_loop_back():
    def fn(w, x):
        with jax.named_scope("solver"):
            return fixed_point(w, x)[0]

    policy = jamp.get_policy("O2:bfloat16").with_rules(half=["*solver*"])
    assert product_dtypes(trace(jamp.cast_fn(fn, policy), W, X)) == [["bfloat16"] * 2]


def test_the_report_says_so():
    text = str(jamp.report(fixed_point, W, X, policy="O2:bfloat16"))
    assert "loops to convergence" in text
    assert "half_precision" in text
    assert "loops to convergence" not in str(jamp.report(by_count, W, X, policy="O2:bfloat16"))
