"""What loops that stop by themselves start from: a guess may be half, and what belongs to it is as it is written."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from tests.transforms.harness import mixed_levels, product_dtypes, trace

W = jax.random.normal(jax.random.key(0), (32, 32)) / 16
X = jax.random.normal(jax.random.key(1), (8, 32))
V = jax.random.normal(jax.random.key(2), (32, 32)) / 16


def until_it_rests(step, z, *more):
    """Iterates from a guess and from what `step` makes of it."""
    close = lambda c: (jnp.abs(c[0] - c[1]).max() > 1e-6) & (c[2] < 100)  # noqa: E731
    return lax.while_loop(close, lambda c: (step(c[0]), c[0], c[2] + 1, *c[3:]), (step(z), z, 0, *more))[0]


def from_an_encoder(w, v, x):
    """A network makes the guess, and what the iteration is given; both are half."""
    h = jnp.tanh(x @ v)
    return until_it_rests(lambda z: jnp.tanh(z @ w + h), h)


def from_zero(w, v, x):
    h = jnp.tanh(x @ v)
    return until_it_rests(lambda z: jnp.tanh(z @ w + h), jnp.zeros_like(h))


def from_what_the_encoder_reads(w, v, x):
    h = jnp.tanh(x @ v)
    return until_it_rests(lambda z: jnp.tanh(z @ w + h), x)


def all_in_the_carry(w, v, x):
    h = jnp.tanh(x @ v)
    close = lambda c: (jnp.abs(c[0] - c[1]).max() > 1e-6) & (c[2] < 100)  # noqa: E731
    step = lambda c: (jnp.tanh(c[0] @ c[3] + c[5]), c[0], c[2] + 1, *c[3:])  # noqa: E731
    return lax.while_loop(close, step, (jnp.tanh(h @ w + h), h, 0, w, x, h))[0]


def in_a_call(w, v, x):
    h = jnp.tanh(x @ v)
    return jax.jit(lambda h: until_it_rests(lambda z: jnp.tanh(z @ w + h), h))(h)


def begun_in_a_call(w, v, x):
    """The guess and its value come from one call, as of an iteration before the first."""
    h = jnp.tanh(x @ v)

    @jax.jit
    def begin(h):
        guess = 2 * h
        return jnp.tanh(guess @ w + h), guess

    close = lambda c: (jnp.abs(c[0] - c[1]).max() > 1e-6) & (c[2] < 100)  # noqa: E731
    step = lambda c: (jnp.tanh(c[0] @ w + h), c[0], c[2] + 1)  # noqa: E731
    return lax.while_loop(close, step, (*begin(h), 0))[0]


def frozen(w, v, x):
    h = jnp.tanh(x @ v)

    def step(carry, _):
        z, value, done = carry
        new = jnp.where(done, z, value)
        return (new, jnp.where(done, value, jnp.tanh(new @ w + h)), done | (jnp.abs(value - z).max() < 1e-6)), None

    return lax.scan(step, (h, jnp.tanh(h @ w + h), False), length=30)[0][0]


STARTED = [
    from_an_encoder, from_zero, from_what_the_encoder_reads, all_in_the_carry, in_a_call, begun_in_a_call, frozen
]  # fmt: skip


@pytest.mark.parametrize("fn", STARTED, ids=lambda fn: fn.__name__)
@mixed_levels
def test_what_a_loop_starts_from_is_a_guess_in_half_and_what_belongs_to_it(fn, level):
    found = product_dtypes(trace(jamp.cast_fn(fn, f"{level}:bfloat16"), W, V, X))
    assert sorted(found) == [["bfloat16"] * 2, ["float32"] * 2, ["float32"] * 2]


def energy(w, z):
    return 0.5 * jnp.sum((w @ z - 1) ** 2) + 0.1 * jnp.sum(jnp.cosh(z))


def halves(w, z, value, slope):
    """The test of a step is a closure."""
    lower = lambda s: energy(w, z - s[0] * slope) > value - 0.5 * s[0] * slope @ slope  # noqa: E731
    return lax.while_loop(lambda s: lower(s) & (s[1] < 40), lambda s: (0.5 * s[0], s[1] + 1), (2.0, 0))


def halves_and_evaluates(w, z, value, slope):
    """The body evaluates the next step."""
    after = lambda size: energy(w, z - size * slope)  # noqa: E731
    moves = lambda s: (s[2] > value - 0.5 * s[0] * slope @ slope) & (s[1] < 40)  # noqa: E731
    step = lambda s: (0.5 * s[0], s[1] + 1, after(0.5 * s[0]))  # noqa: E731
    return lax.while_loop(moves, step, (2.0, 0, after(2.0)))[:2]


def halves_until_flagged(w, z, value, slope):
    def step(carry):
        size, count, _ = carry
        done = energy(w, z - size * slope) <= value - 0.5 * size * slope @ slope
        return jnp.where(done, size, 0.5 * size), count + jnp.where(done, 0, 1), done

    return lax.while_loop(lambda s: ~s[2] & (s[1] < 40), step, (2.0, 0, False))[:2]


def halves_a_state(w, z, value, slope):
    """Nothing is closed over: what does not change is carried."""
    too_long = lambda s: energy(s[2], s[3] - s[0] * s[5]) > s[4] - 0.5 * s[0] * s[5] @ s[5]  # noqa: E731
    moves = lambda s: too_long(s) & (s[1] < 40)  # noqa: E731
    return lax.while_loop(moves, lambda s: (0.5 * s[0], s[1] + 1, *s[2:]), (2.0, 0, w, z, value, slope))[:2]


SEARCHES = [halves, halves_and_evaluates, halves_until_flagged, halves_a_state, jax.jit(halves)]


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("search", SEARCHES, ids=lambda fn: fn.__name__)
@mixed_levels
def test_a_line_search_compares_with_the_value_that_it_computes(search, level):
    w = jax.random.normal(jax.random.key(3), (8, 8)) / 3

    def descend(w, z):
        def step(z, _):
            size, count = search(w, z, *jax.value_and_grad(energy, 1)(w, z))
            return z - size * jax.grad(energy, 1)(w, z), count

        return lax.scan(step, z, length=12)

    z = jax.random.normal(jax.random.key(4), (8,))
    counts = [jax.jit(jamp.cast_fn(descend, f"{policy}:bfloat16"))(w, z)[1].sum() for policy in ("O0", level)]
    assert counts[1] <= 1.5 * counts[0]


WEIGHTS = jax.random.normal(jax.random.key(5), (1, 64)), jax.random.normal(jax.random.key(6), (64, 1))


def curve(w, t):
    return (jnp.tanh(jnp.reshape(t, (1, 1)) @ w[0] + 1) @ w[1])[0, 0]


def walk(w, x):
    """Steps along a curve that are taken back where it bends, from a number, or from a point that nobody shares."""

    def step(carry):
        a, value, size, count = carry
        b = jnp.minimum(a + size, 2.0)
        new = curve(w, b)
        ok = jnp.abs(value + new - 2 * curve(w, (a + b) / 2)) < 1e-4
        return jnp.where(ok, b, a), jnp.where(ok, new, value), jnp.where(ok, 1.3 * size, size / 2), count + 1

    return lax.while_loop(lambda c: (c[0] < 2) & (c[3] < 999), step, (x(), curve(w, x()), 0.5, 0))[3]


def from_a_number(w):
    return walk(w, lambda: 0.3)


def from_a_constant(w):
    return walk(w, lambda: jnp.full((), 0.3))


def bisected(w):
    """One end keeps its value, and the other has none."""
    f = lambda t: curve(w, t) - curve(w, 0.1)  # noqa: E731

    def step(carry):
        a, b, value, count = carry
        new = f((a + b) / 2)
        left = value * new <= 0
        middle = (a + b) / 2
        return jnp.where(left, a, middle), jnp.where(left, middle, b), jnp.where(left, value, new), count + 1

    return lax.while_loop(lambda c: (c[1] - c[0] > 1e-5) & (c[3] < 99), step, (-1.0, 1.0, f(-1.0), 0))[3]


def secants(w):
    """The value at the point before is what the other was."""
    f = lambda t: curve(w, t) - curve(w, 0.25)  # noqa: E731

    def step(carry):
        a, b, at_a, at_b, count = carry
        c = b - at_b * (b - a) / (at_b - at_a)
        return b, c, at_b, f(c), count + 1

    return lax.while_loop(lambda c: (jnp.abs(c[3]) > 1e-5) & (c[4] < 99), step, (0.2, 0.4, f(0.2), f(0.4), 0))[4]


def quadrature(w, push, pop, start):
    """Intervals on a stack, each with its ends and the values at both and in between, until all are flat."""
    f = lambda t: curve(w, t)  # noqa: E731

    def step(carry):
        stack, top, count = carry
        a, b, at_a, at_m, at_b = pop(stack, top - 1)
        m = (a + b) / 2
        left, right = f((a + m) / 2), f((m + b) / 2)
        flat = jnp.abs((b - a) * (at_a - 4 * left + 6 * at_m - 4 * right + at_b)) < 1e-4
        halved = push(push(stack, top - 1, (a, m, at_a, left, at_m)), top, (m, b, at_m, right, at_b))
        stack = jax.tree.map(lambda old, new: jnp.where(flat, old, new), stack, halved)
        return stack, jnp.where(flat, top - 1, jnp.minimum(top + 1, 60)), count + 1

    stack = push(start, 0, (-1.0, 2.0, f(-1.0), f(0.5), f(2.0)))
    return lax.while_loop(lambda c: (c[1] > 0) & (c[2] < 999), step, (stack, 1, 0))[2]


def on_a_stack_of_rows(w):
    push = lambda stack, i, row: stack.at[i].set(jnp.array(row))  # noqa: E731
    return quadrature(w, push, lambda stack, i: stack[i], jnp.zeros((64, 5)))


def on_a_stack_of_columns(w):
    push = lambda stack, i, row: [c.at[i].set(v) for c, v in zip(stack, row, strict=True)]  # noqa: E731
    return quadrature(w, push, lambda stack, i: [c[i] for c in stack], [jnp.zeros(64)] * 5)


BY_NUMBER = [from_a_number, from_a_constant, bisected, secants, on_a_stack_of_rows, on_a_stack_of_columns]


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("fn", BY_NUMBER, ids=lambda fn: fn.__name__)
@mixed_levels
def test_the_value_at_a_number_belongs_to_it(fn, level):
    cast = jamp.cast_fn(fn, f"{level}:bfloat16")
    assert int(jax.jit(cast)(WEIGHTS)) == int(jax.jit(fn)(WEIGHTS))
    assert all(dtypes == ["float32"] * 2 for dtypes in product_dtypes(trace(cast, WEIGHTS)))


def from_a_guess_of_the_point(w, v, x):
    """A network makes the point, and another what the loop is given; the value there belongs to the point."""
    h = jnp.tanh(x @ v)
    f = lambda z: jnp.tanh(z @ w + h)  # noqa: E731

    def step(carry):
        z, value, count = carry
        new = 0.5 * (z + value)
        return new, f(new), count + 1

    z = jnp.zeros_like(h) + h
    return lax.while_loop(lambda c: (jnp.abs(c[0] - c[1]).max() > 1e-6) & (c[2] < 99), step, (z, f(z), 0))[0]


def from_zero_and_a_guess(w, v, x):
    """What was before is a number, and the guess belongs to nothing."""
    h = jnp.tanh(x @ v)
    close = lambda c: (jnp.abs(c[0] - c[1]).max() > 1e-6) & (c[2] < 99)  # noqa: E731
    step = lambda c: (c[1], jnp.tanh(c[1] @ w + h), c[2] + 1)  # noqa: E731
    return lax.while_loop(close, step, (jnp.full_like(h, 9), jnp.tanh(h @ v), 0))[1]


@mixed_levels
def test_a_value_is_no_reason_to_compute_what_comes_before_its_point(level):
    found = product_dtypes(trace(jamp.cast_fn(from_a_guess_of_the_point, f"{level}:bfloat16"), W, V, X))
    assert sorted(found) == [["bfloat16"] * 2, ["float32"] * 2, ["float32"] * 2]
    found = product_dtypes(trace(jamp.cast_fn(from_zero_and_a_guess, f"{level}:bfloat16"), W, V, X))
    assert sorted(found) == [["bfloat16"] * 2, ["bfloat16"] * 2, ["float32"] * 2]
