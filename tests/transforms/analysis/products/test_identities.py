"""What is added to an identity is added in float32, and products of what that gives are float32. Layers are half."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import both_halves, mixed_levels, product_dtypes, run, trace

# Products of these are multiples of 2**-10 that half holds; in half, 1 + 2**-10 is 1, or nearly.
rng = np.random.default_rng(0)
X = rng.integers(-1, 2, (4, 16)).astype(np.float32)
X[:, 2:] = 0
W = rng.integers(-1, 2, (16, 64)).astype(np.float32) / 1024
WRITTEN = np.eye(8, dtype=np.float32)
PLACES = np.arange(8)


def small(x, w):
    """What a layer gives: half at O2."""
    return (x @ w).reshape(-1, 8, 8)


def square(frame):
    return jnp.swapaxes(frame, -1, -2) @ frame - jnp.eye(8)


@jax.jit
def near_identity(s):
    return jnp.eye(8) + s


def named(s):
    with jax.named_scope("deformation"):
        return jnp.eye(8) + s


def path(s):
    turn, along = lax.scan(lambda turn, step: (turn @ (jnp.eye(8) + step), turn[0, 1:]), jnp.eye(8), s[:2])
    return turn[1:, 0], along


IDENTITIES = {
    "added to": lambda s: jnp.eye(8) + s,
    "taken from": lambda s: s - jnp.eye(8),
    "of a batch": lambda s: jnp.identity(8)[None] + s,
    "of one": lambda s: jax.vmap(lambda s: s + jnp.eye(8))(s),
    "twice": lambda s: jnp.eye(8) + s + 0.5 * jnp.swapaxes(s, 1, 2),
    "a multiple": lambda s: 2 * jnp.eye(8) - s,
    "closed over": lambda s: WRITTEN + s,
    "of ones": lambda s: jnp.diag(jnp.ones(8)) + s,
    "of numbers": lambda s: jnp.diag(jnp.arange(1.0, 9.0)) + s,
    "compared": lambda s: (jnp.arange(8)[:, None] == jnp.arange(8)).astype(jnp.float32) + s,
    "selected": lambda s: jnp.where(jnp.eye(8, dtype=bool), 1.0, 0.0) + s,
    "set by index": lambda s: jnp.zeros((8, 8)).at[jnp.diag_indices(8)].set(1.0) + s,
    "added by index": lambda s: s.at[:, jnp.arange(8), jnp.arange(8)].add(1.0),
    "by an index at hand": lambda s: s.at[:, PLACES, PLACES].add(jnp.float32(1.0)),
    "by index, of one": lambda s: jax.vmap(lambda s: s.at[jnp.diag_indices(8)].add(1.0))(s),
    "by index, in a function": lambda s: jax.jit(lambda s, i: s.at[:, i, i].add(1.0))(s, jnp.arange(8)),
}
FRAMES = {
    "the strain": lambda s: 0.5 * square(jnp.eye(8) + s),
    "that of a function": lambda s: square(near_identity(s)),
    "that of a checkpoint": lambda s: square(jax.checkpoint(near_identity)(s)),
    "that of a scope": lambda s: square(named(s)),
    "that of a loop": lambda s: square(lax.map(near_identity, s)),
    "that of a branch": lambda s: square(lax.cond(s[0, 0, 0] > -9, near_identity, lambda s: jnp.eye(8) - s, s)),
    "all in a map": lambda s: jax.vmap(lambda s: square(jnp.eye(8) + s))(s),
    "of a product": lambda s: jnp.einsum("nij,njk->nik", jnp.eye(8) + s, jnp.eye(8) - s) - jnp.eye(8),
    "a path": path,
    "a Laplacian": lambda s: (jnp.eye(8) * jnp.sum(s, -1, keepdims=True) - s) @ jnp.full((8, 3), 1.0),
    "another": lambda s: jax.vmap(lambda s: (jnp.diag(s.sum(0)) - s).T @ jnp.full((8, 3), 1.0))(s),
}


def strain(frame):
    def program(s):
        built = frame(s)
        return jnp.swapaxes(built, -1, -2) @ built

    return program


@both_halves
@mixed_levels
@pytest.mark.parametrize("frame", [*map(strain, IDENTITIES.values()), *FRAMES.values()], ids=[*IDENTITIES, *FRAMES])
def test_what_is_added_to_an_identity_keeps_its_digits(frame, level, half):
    def program(x, w):
        return frame(small(x, w))

    cast, traced = run(jamp.cast_fn(program, f"{level}:{half}"), X, W), run(program, X, W)
    jax.tree.map(np.testing.assert_array_equal, cast, traced)


@mixed_levels
def test_doubling_an_exponential_loses_nothing(level):
    def exponential(w):
        first = jnp.eye(8) + w[:8, :8]
        return lax.fori_loop(0, 3, lambda _, turn: turn @ turn, first) - jnp.eye(8)

    with jax.default_matmul_precision("highest"):
        cast, traced = run(jamp.cast_fn(exponential, f"{level}:bfloat16"), W), run(exponential, W)
    np.testing.assert_array_equal(cast, traced)


def attention(x, w):
    q, k, v = x @ w, x @ w.T, x @ w
    return (jax.nn.softmax(q @ k.T) + jnp.eye(16)) @ v


def convolved(x, w):
    a = jnp.eye(16) + (x > 0.5)
    root = lax.rsqrt(a.sum(-1))
    h = jax.nn.relu((root[:, None] * a * root) @ (x @ w))
    return (root[:, None] * a * root) @ (h @ w)


def by_laplacian(x, w):
    h = jax.nn.relu(x @ w)
    a = jax.nn.softmax(h @ h.T)
    return (jnp.eye(16) - a).astype(jnp.float32) @ jax.nn.relu(h @ w) @ w


LAYERS = {
    "attention to itself": attention,
    "a graph with loops": convolved,
    "near an identity": lambda x, w: jax.nn.relu(x @ w) @ (jnp.eye(16) + w) @ (jnp.eye(16) + 0.1 * w),
    "a mixing": lambda x, w: (x @ w) @ (jnp.eye(16) + jnp.tanh(w) @ w),
    "learned by a network": lambda x, w: jnp.tanh((x @ w) @ (jnp.eye(16) + jnp.tanh(x @ w))) @ w,
    "low rank": lambda x, w: jnp.tanh(x @ w) @ (jnp.eye(16) - w[:, :4] @ w[:4]),
    "a residual stream": lambda x, w: x + jnp.tanh(x @ w) @ w,
    "a row of numbers set": lambda x, w: jnp.tanh((x @ w).at[3].add(1.0)) @ (w @ w).at[jnp.arange(16), 2].add(1.0),
}


@both_halves
@mixed_levels
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_layers_are_half(layer, level, half):
    x, w = rng.standard_normal((2, 16, 16)).astype(np.float32)
    products = product_dtypes(trace(jamp.cast_fn(layer, f"{level}:{half}"), x, w))
    assert {str(dtype) for dtypes in products for dtype in dtypes} == {half}


def test_report_tells_why():
    report = str(jamp.report(jamp.cast_fn(lambda w: square(jnp.eye(8) + w), "O2:bfloat16"), W[:8, :8]))
    assert "frame" in report


@mixed_levels
def test_choices_of_complex_numbers_are_no_identities(level):
    def fn(x):
        return jnp.where(jnp.arange(3) == jnp.arange(3)[:, None], x * (1 + 2j), 0j).real.sum() + (x**2.0).sum()

    assert jamp.cast_fn(fn, f"{level}:bfloat16")(jnp.arange(3.0)) == 3 + 5


@mixed_levels
def test_rows_that_are_written_beside_a_counter_are_no_diagonals(level):
    def fn(x):
        places = jnp.arange(4)
        return lax.dynamic_update_slice(x, jnp.ones(1), (places[2],)) + x.at[places].set(1.0) + places

    np.testing.assert_array_equal(jax.jit(jamp.cast_fn(fn, f"{level}:bfloat16"))(jnp.zeros(4)), [1, 2, 4, 4])


def damped(gram):
    return gram + 1e-3 * jnp.trace(gram) / len(gram) * jnp.eye(len(gram))


def fourth_root(matrix):
    """The inverse fourth root by a coupled Newton iteration, as in Shampoo: https://arxiv.org/abs/2002.09018."""
    identity = jnp.eye(len(matrix))
    scale = 2.5 / jnp.linalg.norm(matrix)
    matrix, root = matrix * scale, identity * scale**0.25
    for _ in range(12):
        step = 1.25 * identity - 0.25 * matrix
        root = root @ step
        squared = step @ step
        matrix = squared @ squared @ matrix
    return root


def inverse(matrix):
    """The inverse by the iteration of Schulz, written with an identity."""
    found = matrix.T / jnp.linalg.norm(matrix) ** 2
    for _ in range(30):
        found = found @ (2 * jnp.eye(len(matrix)) - matrix @ found)
    return found


@both_halves
@mixed_levels
@pytest.mark.parametrize("solve", (fourth_root, inverse))
def test_gram_matrices_are_not_rounded_below_what_is_added_to_their_diagonal(solve, level, half):
    data = np.float32(rng.standard_normal((32, 12)) @ rng.standard_normal((12, 32)))

    def program(x):
        return solve(damped(x @ x.T))

    expected = program(data)
    error = jnp.linalg.norm(jamp.cast_fn(program, f"{level}:{half}")(data) - expected)
    assert error < 0.05 * jnp.linalg.norm(expected)
