"""Loops that stop by themselves: what decides when they end is computed as it is written, and the rest in half."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from tests.transforms.harness import find, mixed_levels, operand_dtypes, product_dtypes, trace

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
    assert len(found) > 0
    assert not in_half
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


def step_by_flag(carry, w, x, freeze):
    z, done, count = carry
    new, moves = moved(w, x, z)
    return freeze(done, z, new), done | ~moves, count + jnp.where(done, 0, 1)


def frozen_by(freeze, wrap=lambda step: step):
    """A loop whose flag freezes its state in a certain way, its step wrapped."""

    def fn(loop, w, x):
        return loop(wrap(lambda carry: step_by_flag(carry, w, x, freeze)), (x, False, 0))[::2]

    return fn


@jax.custom_jvp
def where_with_a_rule(done, old, new):
    return jnp.where(done, old, new)


where_with_a_rule.defjvp(lambda primals, tangents: (where_with_a_rule(*primals), jnp.where(primals[0], *tangents[1:])))


def with_backward_rule(step):
    wrapped = jax.custom_vjp(step)
    wrapped.defvjp(lambda carry: (step(carry), carry), lambda carry, cotangents: (cotangents,))
    return wrapped


def by_number(loop, w, x):
    """A flag that is a number, and multiplies."""

    def step(carry):
        z, active, count = carry
        new, moves = moved(w, x, z)
        return z + active * (new - z), active * moves, count + active

    return loop(step, (x, 1.0, 0.0))[::2]


def by_rate(loop, w, x):
    """A step of no length."""

    def step(carry):
        z, status, count = carry
        new, moves = moved(w, x, z)
        rate = jnp.where(status > 0, 0.0, 1.0)
        return z - rate * (z - new), jnp.maximum(status, jnp.where(moves, 0, 1)), count + jnp.where(status == 1, 0, 1)

    return loop(step, (x, 0, 0))[::2]


def row_by_row(loop, w, x):
    """Each row ends for itself, and all do when the last has."""

    def step(carry):
        z, done, count = carry

        def further():
            new = jnp.tanh(z @ w + x)
            near = jnp.max(jnp.abs(new - z), -1) < 1e-6
            return z + (1 - done)[:, None] * (new - z), jnp.where(near, 1.0, done), count + 1

        return lax.cond(jnp.all(done == 1), lambda: (z, done, count), further)

    return loop(step, (x, jnp.zeros(len(x)), 0))[::2]


def predicate_inside(loop, w, x):
    """A step that returns no flag, and that a checkpoint hides."""

    @jax.checkpoint
    def step(carry):
        z, old, count = carry
        new, moves = moved(w, x, z)
        going = moves & (jnp.max(jnp.abs(z - old)) > 1e-7)
        return z + jnp.where(going, new - z, 0.0), jnp.where(going, z, old), count + going

    return loop(step, (jnp.tanh(x), x, 0))[::2]


LATCHED = {
    "flag": by_flag,
    "new flag": by_new_flag,
    "branch": by_branch,
    "predicate": by_predicate,
    "checkpoint": frozen_by(jnp.where, jax.checkpoint),
    "jit": frozen_by(jnp.where, jax.jit),
    "rule": frozen_by(where_with_a_rule, jax.jit),
    "backward rule": frozen_by(jnp.where, with_backward_rule),
    "select": frozen_by(lambda done, old, new: lax.select(jnp.full(old.shape, done), old, new), jax.checkpoint),
    "cond": frozen_by(lambda done, old, new: lax.cond(done, lambda: old, lambda: new), jax.checkpoint),
    "blend": frozen_by(lambda done, old, new: old * done + new * (1 - done)),
    "difference": frozen_by(lambda done, old, new: old + (1.0 - done) * (new - old)),
    "negated": frozen_by(lambda done, old, new: old + ~done * (new - old), jax.jit),
    "number": by_number,
    "rate": by_rate,
    "rows": row_by_row,
    "inside": predicate_inside,
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", LATCHED)
def test_a_loop_that_freezes(name):
    program = functools.partial(LATCHED[name], counted)
    steps = int(jax.jit(program)(W, X)[1])
    assert 5 < steps < 40
    assert int(jax.jit(jamp.cast_fn(program, "O2:bfloat16"))(W, X)[1]) <= 1.1 * steps + 1


@pytest.mark.parametrize(("loop", "level"), [(counted, "OD"), (counted, "O2"), (counted_by_an_argument, "O1")])
@pytest.mark.parametrize("name", LATCHED)
def test_the_products_of_a_loop_that_freezes(name, loop, level):
    cast = jamp.cast_fn(functools.partial(LATCHED[name], loop), f"{level}:float16")
    assert product_dtypes(trace(cast, W, X)) == [["float32"] * 2]


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


def dropped(w, x):
    """Layers and units that are left out at random."""

    def step(carry, key):
        h, alive = carry
        keep = jax.random.bernoulli(key, 0.9, x.shape)
        alive = alive & jax.random.bernoulli(key, 0.9)
        return (h + alive * jnp.where(keep, jnp.tanh(h @ w), 0.0), alive), None

    return lax.scan(step, (x, True), jax.random.split(jax.random.key(0), 4))[0][0]


def gated(w, x):
    """A gated recurrent unit over rows that end, with clipped and rectified increments."""

    def step(h, inputs):
        row, mask = inputs
        gate = jax.nn.sigmoid(h @ w)
        new = gate * h + (1 - gate) * jax.nn.relu(row @ w)
        change = jnp.where(jnp.abs(new - h) < 1.0, new - h, 0.0)
        return h + mask * jnp.where(change > 0, change, 0.1 * change), None

    return lax.scan(step, x[0], (x, jnp.arange(8) < 5))[0]


def rectified(w, x):
    """Euler's steps of a field that is rectified: its zeros freeze elements, which others read."""

    def step(h, _):
        change = h @ w
        return h + 0.1 * jnp.where(change > 0, change, 0.0), None

    return lax.scan(step, x, length=4)[0]


def episodes(w, x):
    """An episode that goes on as another when it ends; only the rewards of the first count."""

    def step(carry, _):
        state, going, total = carry
        state = state + jnp.tanh(state @ w)
        ended = jnp.max(jnp.abs(state)) > 3.0
        total = total + going * jnp.sum(state)
        return (jnp.where(ended, x, state), going * (1.0 - ended), total), None

    return lax.scan(step, (x, 1.0, 0.0), length=5)[0][2]


def sampled_episode(w, x):
    """An episode that stays where it ends, under a policy that draws its actions."""

    def step(carry, key):
        state, done = carry
        action = state @ w + 0.1 * jax.random.normal(key, state.shape)
        new = state + 0.1 * action
        return (jnp.where(done, state, new), done | (jnp.max(jnp.abs(new)) > 3.0)), None

    return lax.scan(step, (x, False), jax.random.split(jax.random.key(0), 5))[0][0]


def halting(w, x):
    """Adaptive computation time: a network tells how much more it has to think."""

    def step(carry, _):
        h, halted, out = carry
        h = jnp.tanh(h @ w + x)
        running = (halted < 1.0).astype(jnp.float32)
        p = jax.nn.sigmoid(h @ w[:, 0])
        ends = (halted + p * running > 0.99).astype(jnp.float32) * running
        share = p * running * (1 - ends) + ends * (1 - halted)
        return (h, halted + share, out * (1 - share[:, None]) + h * share[:, None]), None

    return lax.scan(step, (x, jnp.zeros(len(x)), x), length=4)[0][2]


def halted_at_once(w, x):
    """A gate that is told by a sigmoid, and freezes all."""

    def step(carry, _):
        h, done = carry
        new = jnp.tanh(h @ w + x)
        return (jnp.where(done[:, None], h, new), done | (jax.nn.sigmoid(new @ w[:, 0]) > 0.9)), None

    return lax.scan(step, (x, jnp.zeros(len(x), bool)), length=4)[0][0]


CHOICES = [
    best_so_far, accepted, tokens_until_the_last, watched, with_lengths, always, dropped, gated, rectified, episodes,
    sampled_episode, halting, halted_at_once,
]  # fmt: skip


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


def by_gate(w, x):
    """Speech from text: a network tells by a sigmoid that it has finished."""

    def step(carry):
        h, done, count = carry
        h = jnp.tanh(h @ w)
        return h, done | (jax.nn.sigmoid(h @ w[:, :1])[:, 0] > 0.9), count + 1

    return lax.while_loop(lambda c: ~c[1].all() & (c[2] < 9), step, (x, jnp.zeros(8, bool), 0))[0]


def by_halting(w, x):
    """Adaptive computation time, for as long as some row goes on."""

    def step(carry):
        h, halted, count = carry
        h = jnp.tanh(h @ w)
        return h, halted + jax.nn.sigmoid(h @ w[:, 0]), count + 1

    return lax.while_loop(lambda c: (c[1] < 0.99).any() & (c[2] < 9), step, (x, jnp.zeros(8), 0))[0]


def by_coin(w, x):
    """A loop that ends by a coin whose bias is computed."""

    def step(carry):
        h, key, _, count = carry
        key, now = jax.random.split(key)
        h = jnp.tanh(h @ w)
        return h, key, jax.random.bernoulli(now, jax.nn.sigmoid(h[0] @ w[:, 0])), count + 1

    return lax.while_loop(lambda c: ~c[2] & (c[3] < 9), step, (x, KEY, False, 0))[0]


def by_inverted_distribution(w, x):
    """Generation that draws tokens from the cumulated probabilities."""

    def step(carry):
        h, key, _, count = carry
        key, now = jax.random.split(key)
        h = jnp.tanh(h @ w)
        below = jnp.cumsum(jax.nn.softmax(h @ w), -1) < jax.random.uniform(now, (8, 1))
        return h, key, below.sum(-1), count + 1

    return lax.while_loop(lambda c: (c[2] != 3).any() & (c[3] < 9), step, (x, KEY, jnp.zeros(8, int), 0))[0]


def by_acceptance(w, x):
    """Proposals until ten are accepted, by the logarithm of a random number."""

    def step(carry):
        h, key, accepted, count = carry
        key, now = jax.random.split(key)
        new = jnp.tanh(h @ w)
        accept = jnp.log(jax.random.uniform(now, (8,))) < (new @ w).sum(-1) - (h @ w).sum(-1)
        return jnp.where(accept[:, None], new, h), key, accepted + accept.sum(), count + 1

    return lax.while_loop(lambda c: (c[2] < 10) & (c[3] < 9), step, (x, KEY, 0, 0))[0]


CHOSEN = [by_token, by_beam, by_count, by_gate, by_halting, by_coin, by_inverted_distribution, by_acceptance]


@pytest.mark.parametrize("fn", CHOSEN, ids=lambda fn: fn.__name__)
@mixed_levels
def test_loops_that_count_or_choose_are_half(fn, level):
    """A product of two vectors is a sum, and may be float32."""
    products = find(trace(jamp.cast_fn(fn, f"{level}:bfloat16"), W, X), "dot_general")
    found = [operand_dtypes(eqn) for eqn in products if eqn.outvars[0].aval.ndim]
    assert found
    assert all(dtypes == ["bfloat16"] * 2 for dtypes in found)


def shaken(w, x):
    """A fixed point of which some elements are left as they are, at random."""

    def step(carry):
        z, _, key, count = carry
        key, now = jax.random.split(key)
        return jnp.where(jax.random.bernoulli(now, 0.9, z.shape), jnp.tanh(z @ w + x), z), z, key, count + 1

    moves = lambda c: (jnp.max(jnp.abs(c[0] - c[1])) > 1e-6) & (c[3] < 300)  # noqa: E731
    return lax.while_loop(moves, step, (jnp.tanh(x), x, KEY, 0))[0]


def squashed(w, x):
    """A fixed point whose iterates are compared as probabilities."""

    def step(carry):
        z, _, count = carry
        return jnp.tanh(z @ w + x), z, count + 1

    def moves(carry):
        z, before, count = carry
        return (jnp.max(jnp.abs(jax.nn.sigmoid(z) - jax.nn.sigmoid(before))) > 1e-6) & (count < 300)

    return lax.while_loop(moves, step, (jnp.tanh(x), x, 0))[0]


def chosen_or_near(w, x):
    """Generation that ends at a token, or once its state no longer moves."""

    def step(carry):
        h, *_, count = carry
        new = jnp.tanh(h @ w)
        return new, h, jnp.argmax(new[0] @ w), count + 1

    def moves(carry):
        h, before, token, count = carry
        return (token != 3) & (jnp.max(jnp.abs(h - before)) > 1e-6) & (count < 300)

    return lax.while_loop(moves, step, (x, x + 1, 0, 0))[0]


@pytest.mark.parametrize("fn", [shaken, squashed, chosen_or_near], ids=lambda fn: fn.__name__)
@mixed_levels
def test_a_choice_beside_a_comparison_ends_no_loop_in_half(fn, level):
    assert ["float32"] * 2 in product_dtypes(trace(jamp.cast_fn(fn, f"{level}:bfloat16"), W, X))


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
