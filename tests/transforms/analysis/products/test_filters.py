"""Filters, smoothers and regulators whose matrices are arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import both_halves, find, operand_dtypes, product_dtypes, trace

rng = np.random.default_rng(0)
SIZE, SEEN, STEPS = 6, 3, 30
MOVES = np.float32(np.eye(SIZE) + 0.1 * np.eye(SIZE, k=SEEN))
SHOWS = np.float32(rng.standard_normal((SEEN, SIZE)))
NOISE, ERROR = np.float32(1e-3 * np.eye(SIZE)), np.float32(0.1 * np.eye(SEEN))
SIGNALS = np.float32(3 * np.cumsum(0.3 * rng.standard_normal((STEPS, SEEN)), 0))
START = np.zeros(SIZE, np.float32), np.float32(10 * np.eye(SIZE))
GIVEN = (MOVES, SHOWS, SIGNALS)


def predict(f, mean, cov):
    return f @ mean, f @ cov @ f.T + NOISE


def correct(h, mean, cov, seen):
    gain = jnp.linalg.solve(h @ cov @ h.T + ERROR, h @ cov).T
    return mean + gain @ (seen - h @ mean), cov - gain @ h @ cov


def kalman(f, h, signals):
    def step(state, seen):
        state = correct(h, *predict(f, *state), seen)
        return state, state

    return lax.scan(step, START, signals)[1]


def likelihood(f, h, signals):
    def step(state, seen):
        mean, cov = predict(f, *state)
        rest, spread = seen - h @ mean, h @ cov @ h.T + ERROR
        logdet = jnp.linalg.slogdet(spread)[1]
        return correct(h, mean, cov, seen), -0.5 * (rest @ jnp.linalg.solve(spread, rest) + logdet)

    return lax.scan(step, START, signals)[1].sum()


def symmetric(f, h, signals):
    """By einsum, a Cholesky factor, and a batch of signals."""

    def step(state, seen):
        mean, cov = state
        mean, cov = jnp.einsum("ij,j->i", f, mean), jnp.einsum("ij,jk,lk->il", f, cov, f) + NOISE
        factor = jnp.linalg.cholesky(jnp.einsum("ij,jk,lk->il", h, cov, h) + ERROR)
        gain = jax.scipy.linalg.solve_triangular(factor, h @ cov, lower=True)
        rest = jax.scipy.linalg.solve_triangular(factor, seen - h @ mean, lower=True)
        state = mean + gain.T @ rest, cov - gain.T @ gain
        return state, state

    return jax.vmap(lambda signals: lax.scan(step, START, signals)[1])(jnp.stack([signals, -signals]))


def extended(f, h, signals):
    """A filter of what is not linear."""
    move, show = lambda x: f @ x + 0.05 * jnp.sin(x), lambda x: 10 * jnp.tanh(h @ x / 10)

    def step(state, seen):
        mean, cov = state
        slope = jax.jacfwd(move)(mean)
        mean, cov = move(mean), slope @ cov @ slope.T + NOISE
        slope = jax.jacfwd(show)(mean)
        gain = cov @ slope.T @ jnp.linalg.inv(slope @ cov @ slope.T + ERROR)
        state = mean + gain @ (seen - show(mean)), (jnp.eye(SIZE) - gain @ slope) @ cov
        return state, state

    return lax.scan(step, START, signals)[1]


def extended_by_a_quotient(f, h, signals):
    """A filter of what is not linear, which sees one number at a time."""
    move, show = lambda x: f @ x + 0.05 * jnp.sin(x), lambda x: 10 * jnp.tanh(h[0] @ x / 10)

    def step(state, seen):
        mean, cov = state
        slope = jax.jacfwd(move)(mean)
        mean, cov = move(mean), slope @ cov @ slope.T + NOISE
        slope = jax.grad(show)(mean)
        gain = cov @ slope / (slope @ cov @ slope + 0.1)
        state = mean + gain * (seen - show(mean)), cov - jnp.outer(gain, slope @ cov)
        return state, state

    return lax.scan(step, START, signals[:, 0])[1]


def extended_and_linear(jacobian):
    """A filter of what is linear but for a little: its slopes are products with an identity."""

    def filtered(f, h, signals):
        move, show = lambda x: f @ x + 0.1 * jnp.tanh(x), lambda x: h @ x + 0.1 * jnp.sin(h @ x)

        def step(state, seen):
            mean, cov = state
            slope = jacobian(move)(mean)
            mean, cov = move(mean), slope @ cov @ slope.T + NOISE
            slope = jacobian(show)(mean)
            spread = slope @ cov @ slope.T + ERROR
            gain = jnp.linalg.solve(spread, slope @ cov).T
            state = mean + gain @ (seen - show(mean)), cov - gain @ spread @ gain.T
            return state, state

        return lax.scan(step, START, signals)[1]

    return filtered


def in_turn(f, h, signals):
    """What is seen at a time is seen in turn, by a loop in the loop."""

    def see(state, one):
        (mean, cov), (row, seen) = state, one
        gain = cov @ row / (row @ cov @ row + 0.1)
        return (mean + gain * (seen - row @ mean), cov - jnp.outer(gain, row @ cov)), None

    def step(state, seen):
        state, _ = lax.scan(see, predict(f, *state), (h, seen))
        return state, state

    return lax.scan(step, START, signals)[1]


def one_step(f, h, signals):
    """A step of a filter alone, whose covariance is given."""
    return correct(h, *predict(f, *START), signals[0])


def written_out(f, h, signals):
    state = START
    for seen in signals[:4]:
        state = correct(h, *predict(f, *state), seen)
    return state


def smoother(f, h, signals):
    """Rauch, Tung and Striebel's, of what a filter has stacked."""

    def forth(state, seen):
        expected = predict(f, *state)
        state = correct(h, *expected, seen)
        return state, (*state, *expected)

    def back(state, stacked):
        mean, cov, expected, spread = stacked
        gain = jnp.linalg.solve(spread, f @ cov).T
        state = mean + gain @ (state[0] - expected), cov + gain @ (state[1] - spread) @ gain.T
        return state, state

    last, (mean, cov, expected, spread) = lax.scan(forth, START, signals)
    return lax.scan(back, last, (mean[:-1], cov[:-1], expected[1:], spread[1:]), reverse=True)[1]


def regulator(f, h, signals):
    """Riccati's equation, by iteration."""
    control = h.T

    def step(cost, _):
        gain = jnp.linalg.solve(ERROR + control.T @ cost @ control, control.T @ cost @ f)
        return NOISE + f.T @ cost @ f - f.T @ cost @ control @ gain, gain

    return lax.scan(step, START[1], None, length=STEPS)


def roots(f, h, signals):
    """A filter that carries the root of its covariance."""

    def step(state, seen):
        mean, root = f @ state[0], state[1]
        root = jnp.linalg.qr(jnp.concatenate([(f @ root).T, NOISE]))[1].T
        block = jnp.block([[ERROR, h @ root], [jnp.zeros((SIZE, SEEN)), root]])
        whole = jnp.linalg.qr(block.T)[1].T
        mean = mean + whole[SEEN:, :SEEN] @ jnp.linalg.solve(whole[:SEEN, :SEEN], seen - h @ mean)
        return (mean, whole[SEEN:, SEEN:]), (mean, whole[SEEN:, SEEN:] @ whole[SEEN:, SEEN:].T)

    return lax.scan(step, START, signals)[1]


FILTERS = {
    "a filter": kalman,
    "its likelihood": likelihood,
    "by a factor": symmetric,
    "extended": extended,
    "extended by a quotient": extended_by_a_quotient,
    "extended, forward": extended_and_linear(jax.jacfwd),
    "extended, in reverse": extended_and_linear(jax.jacrev),
    "in turn": in_turn,
    "one step": one_step,
    "written out": written_out,
    "a smoother": smoother,
    "a regulator": regulator,
    "a root": roots,
}


def gradient(fn):
    def loss(*given):
        return sum(jnp.sin(result).sum() for result in jax.tree.leaves(fn(*given)))

    return jax.grad(loss, (0, 1, 2))


@both_halves
@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
@pytest.mark.parametrize("program", FILTERS.values(), ids=FILTERS)
def test_filters_have_the_products_of_float32(program, level, half):
    cast = jamp.cast_fn(program, f"{level}:{half}")
    forward, backward = product_dtypes(trace(cast, *GIVEN)), product_dtypes(trace(gradient(cast), *GIVEN))
    assert {dtype for operands in (*forward, *backward) for dtype in operands} == {"float32"}


def test_a_smoother_is_that_of_float32():
    for cast, traced in zip(jamp.cast_fn(smoother, "O2:bfloat16")(*GIVEN), smoother(*GIVEN), strict=True):
        np.testing.assert_allclose(cast, traced, rtol=0, atol=1e-4 * np.abs(traced).max())


SYSTEM = np.float32(np.cov(rng.standard_normal((24, 48))) + np.eye(24))
RIGHT = np.float32(rng.standard_normal(24))


def conjugate(matrix, right):
    """Conjugate gradients, with the squares carried along."""

    def step(state, _):
        x, left, along, square = state
        ahead = matrix @ along
        size = square / (along @ ahead + 1e-30)
        x, left = x + size * along, left - size * ahead
        after = left @ left
        return (x, left, left + after / (square + 1e-30) * along, after), None

    start = jnp.zeros_like(right), right, right, jnp.sum(right * right)
    return lax.scan(step, start, None, length=60)[0][0]


def conjugate_by_sums(matrix, right):
    def step(_, state):
        x, left, along = state
        ahead, square = matrix @ along, jnp.sum(left * left)
        size = square / jnp.maximum(jnp.sum(along * ahead), 1e-30)
        x, after = x + size * along, left - size * ahead
        return x, after, after + jnp.vdot(after, after) / jnp.maximum(square, 1e-30) * along

    return lax.fori_loop(0, 60, step, (jnp.zeros_like(right), right, right))[0]


def steepest(matrix, right):
    def step(x, _):
        left = right - matrix @ x
        size = jnp.where(left @ left > 0, (left @ left) / (left @ (matrix @ left) + 1e-30), 0.0)
        return x + size * left, None

    return lax.scan(step, jnp.zeros_like(right), None, length=40)[0]


def written_after_each_other(matrix, right):
    """Conjugate gradients without a loop, from where they start."""
    x = jnp.ones_like(right)
    left = right - matrix @ x
    along, square = left, left @ left
    for _ in range(6):
        ahead = matrix @ along
        size = square / (along @ ahead + 1e-30)
        x, left = x + size * along, left - size * ahead
        after = left @ left
        along, square = left + after / square * along, after
    return x


def of_normal_equations(matrix, right):
    """The same of a matrix that is a product, whose sums are no products."""
    x, left = jnp.zeros_like(right), right
    along = left
    for _ in range(4):
        ahead = matrix.T @ (matrix @ along)
        square = jnp.sum(left * left)
        size = square / jnp.sum(along * ahead)
        x, left = x + size * along, left - size * ahead
        along = left + jnp.sum(left * left) / square * along
    return x


def side_by_side(matrix, right):
    return jax.vmap(lambda right: conjugate_by_sums(matrix, right))(jnp.stack([right, 1e-3 * right]))[0]


@both_halves
@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
@pytest.mark.parametrize(
    "solver",
    [conjugate, conjugate_by_sums, steepest, side_by_side, written_after_each_other, of_normal_equations],
)
def test_descents_by_ratios_are_those_of_float32(solver, level, half):
    products = product_dtypes(trace(jamp.cast_fn(solver, f"{level}:{half}"), SYSTEM, RIGHT))
    assert {dtype for operands in products for dtype in operands} == {"float32"}


def recursive(matrix, right):
    """Recursive least squares, whose covariance is given."""

    def step(state, row):
        cov, weights = state
        gain = cov @ row / (0.99 + row @ cov @ row)
        error = 1.0 - weights @ row
        return ((cov - gain[:, None] * (row @ cov)[None]) / 0.99, weights + gain * error), None

    return lax.scan(step, (matrix, jnp.zeros_like(right)), matrix + right)[0]


def updated(matrix, right):
    """Sherman and Morrison's update of an inverse."""

    def step(inverse, row):
        ahead = inverse @ row
        return inverse - jnp.outer(ahead / (1 + row @ ahead), ahead), None

    return lax.scan(step, matrix, matrix + right)[0]


@both_halves
@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
@pytest.mark.parametrize("solver", [recursive, updated])
def test_gains_by_a_sum_are_those_of_float32(solver, level, half):
    products = product_dtypes(trace(jamp.cast_fn(solver, f"{level}:{half}"), SYSTEM, RIGHT))
    assert {dtype for operands in products for dtype in operands} == {"float32"}


def observe_one(gain_of, left_of, *, unrolled=False):
    """A filter that sees one number at a time, whose gain is a quotient, as structural time series have it."""

    def step(state, seen, f, h):
        mean, cov = state
        ahead = h @ cov
        spread = ahead @ h.T + 0.1
        gain = gain_of(ahead, spread).T
        rest = seen - h @ mean
        cov = left_of(gain, ahead, spread, cov, h)
        return (f @ (mean + gain @ rest), f @ cov @ f.T + NOISE), rest

    def run(f, h, signals):
        start, h, signals = (START[0][:, None], START[1]), h[:1], signals[:, 0]
        if not unrolled:
            return lax.scan(lambda state, seen: step(state, seen, f, h), start, signals)
        rests = []
        for seen in signals[:4]:
            start, rest = step(start, seen, f, h)
            rests.append(rest)
        return start, rests

    return run


def joseph(gain, ahead, spread, cov, h):
    left = jnp.eye(SIZE) - gain @ h
    return left @ cov @ left.T + 0.1 * gain @ gain.T


def joseph_in_place(gain, ahead, spread, cov, h):
    left = -(gain @ h)
    left = jnp.where(jnp.eye(SIZE, dtype=bool), jnp.diagonal(left)[:, None] + 1, left)
    return left @ cov @ left.T + gain @ gain.T * 0.1


GAINS = {
    "divided": lambda ahead, spread: ahead / spread,
    "by an inverse": lambda ahead, spread: ahead * (1 / spread),
}
LEFT = {
    "taken off": lambda gain, ahead, spread, cov, h: cov - gain @ ahead,
    "a square taken off": lambda gain, ahead, spread, cov, h: cov - gain @ spread @ gain.T,
    "joseph": joseph,
    "joseph in place": joseph_in_place,
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("policy", ["OD:bfloat16", "O1:bfloat16", "O2:bfloat16", "O2:float16"])
@pytest.mark.parametrize(
    ("left", "unrolled"), [*((each, False) for each in LEFT), *((each, True) for each in [*LEFT][:3])]
)
@pytest.mark.parametrize("gain", GAINS.values(), ids=GAINS)
def test_a_filter_of_one_number_at_a_time(gain, left, unrolled, policy):
    """Half of its products were half: the gradient was 125 % off, where all in bfloat16 it is by 1 %."""
    fn = observe_one(gain, LEFT[left], unrolled=unrolled)
    expected, actual = (jax.jit(gradient(each))(*GIVEN) for each in (fn, jamp.cast_fn(fn, policy)))
    for one, other in zip(expected, actual, strict=True):
        assert np.linalg.norm(other - one) <= 1e-4 * np.linalg.norm(one)


def normalized(matrix, right):
    """A recurrent layer with a layer norm."""

    def step(h, _):
        z = matrix @ h
        return jnp.tanh((z - z.mean()) / jnp.sqrt(z.var() + 1e-5) + right), None

    return lax.scan(step, right, None, length=8)[0]


def addressed(matrix, right):
    """A recurrent layer that reads a memory by the cosines of a key."""

    def step(h, _):
        key = matrix @ h
        cosines = (matrix @ key) / (jnp.linalg.norm(matrix, axis=1) * jnp.linalg.norm(key) + 1e-6)
        return jnp.tanh(jax.nn.softmax(cosines) @ matrix + h), None

    return lax.scan(step, right, None, length=8)[0]


def powers(matrix, right):
    return lax.scan(lambda v, _: (matrix @ v / jnp.linalg.norm(matrix @ v), None), right, None, length=8)[0]


def divided_by_norms(matrix, right):
    """Layers whose results are divided by their sums of squares, and by scores."""
    h = jnp.tanh(matrix @ right)
    for _ in range(3):
        z = matrix @ h
        h = z / jnp.sum(z * z) + jnp.tanh(matrix @ z)
    return h


def integrated(matrix, right):
    """A solver that carries its times, and stores what it made in between: a share of a step is no ratio of sums."""

    def field(y):
        return jax.nn.softplus(matrix @ y)

    def step(state, when):
        before, after, y, kept = state
        k = field(y)
        z = y + (after - before) * (k + field(y + (after - before) * k)) / 2
        share = (when - before) / (after - before)
        kept = jnp.where(jnp.isfinite(z).all(), (1 - share) * y + share * z, kept)
        return (after, after + 0.1, z, kept), kept

    return lax.scan(step, (jnp.float32(0), jnp.float32(0.1), right, right), jnp.linspace(0, 1, 8))[1]


def scanned(block):
    """Layers that share their weights, one after another."""

    def run(matrix, right):
        x = jnp.outer(jnp.linspace(0.5, 1, 12), right)
        return lax.scan(
            lambda x, _: (x + block(x, x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)), matrix), None), x, None, 4
        )[0]

    return run


def inverted(x, n, w):
    """Data, divided by the sum of its squares."""
    n = x * (1 / (jnp.sum(x * x, -1, keepdims=True) + 1))
    return jnp.tanh(n @ w) * jax.nn.silu(x @ w.T)


LAYERS = [
    scanned(lambda x, n, w: jax.nn.silu(n @ w) * (n @ w.T)),
    scanned(lambda x, n, w: jax.nn.softmax((n @ w) @ (n @ w.T).T / 5) @ (n @ w)),
    scanned(lambda x, n, w: (n * jax.nn.sigmoid(x @ w)) @ w.T),
    scanned(inverted),
]


@both_halves
@pytest.mark.parametrize("layers", LAYERS, ids=["gated", "attention", "scaled", "inverted"])
def test_layers_in_a_loop_are_half(layers, half):
    products = product_dtypes(trace(jamp.cast_fn(layers, f"O2:{half}"), SYSTEM, RIGHT))
    assert {dtype for operands in products for dtype in operands} == {half}


@both_halves
@pytest.mark.parametrize("layers", [normalized, addressed, powers, integrated, divided_by_norms])
def test_recurrent_layers_are_half(layers, half):
    products = product_dtypes(trace(jamp.cast_fn(layers, f"O2:{half}"), SYSTEM, RIGHT))
    assert {dtype for operands in products for dtype in operands} == {half}


def pooled(residual):
    """Layers that pool by what they were given."""

    def run(matrix, right):
        x = jnp.outer(jnp.linspace(0.5, 1, 12), right)
        pool = x.T @ x / 12
        for weights in (matrix, matrix.T):
            x = jax.vmap(lambda h: pool @ h / (h @ pool @ h + 1))(x) @ weights + residual * x
        return x

    return run


@both_halves
@pytest.mark.parametrize("layers", [pooled(0.0), pooled(1.0)], ids=["alone", "added"])
def test_layers_after_a_quotient_by_a_form_are_half(layers, half):
    """They divide as the gain of a filter does, and correct nothing: the products with weights were float32 too."""
    products = product_dtypes(trace(jamp.cast_fn(layers, f"O2:{half}"), SYSTEM, RIGHT))
    assert [half, half] in products


def observed(cov, rows):
    """Recursive least squares, written out: rows of one matrix, one after another."""
    for row in rows:
        gain = cov @ row / (1 + row @ cov @ row)
        cov = cov - jnp.outer(gain, row @ cov)
    return cov


def observed_at_once(cov, rows):
    for row in rows:
        ahead = cov @ row
        cov = cov - jnp.outer(ahead, ahead) / (1 + row @ ahead)
    return cov


@both_halves
@pytest.mark.parametrize("solver", [observed, observed_at_once])
def test_observations_written_after_each_other(solver, half):
    products = product_dtypes(trace(jamp.cast_fn(solver, f"O2:{half}"), SYSTEM, SYSTEM[:5]))
    assert {dtype for operands in products for dtype in operands} == {"float32"}


def guarded(size, curvature):
    return jnp.where(curvature > 0, size / jnp.where(curvature > 0, curvature, 1), 0)


STEPS_OF_DESCENT = {
    "guarded": guarded,
    "chosen": lambda size, curvature: lax.cond(curvature > 0, lambda a, b: a / b, lambda a, b: 0 * a, size, curvature),
    "by an inverse": lambda size, curvature: size * (1 / curvature),
}


@both_halves
@pytest.mark.parametrize("step", STEPS_OF_DESCENT.values(), ids=STEPS_OF_DESCENT)
def test_steps_of_a_descent_in_other_words(step, half):
    def solve(matrix, right):
        x, left, along = jnp.zeros_like(right), right, right
        for _ in range(3):
            ahead = matrix @ along
            size = step(left @ left, along @ ahead)
            x, before, left = x + size * along, left, left - size * ahead
            along = left + (left @ left) / (before @ before) * along
        return x

    products = find(trace(jamp.cast_fn(solve, f"O2:{half}"), SYSTEM, RIGHT), "dot_general")
    assert {operand_dtypes(eqn)[0] for eqn in products if eqn.outvars[0].aval.shape} == {"float32"}
