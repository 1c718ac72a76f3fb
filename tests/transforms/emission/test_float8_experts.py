"""Grouped products in 8 bits: experts of very different magnitude have scales of their own, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp

FLOAT8 = "O2:bfloat16,matmul=float8"
EACH = f"{FLOAT8},float8=['ragged_dot_general', 'dot_general']"
SIZES, WIDTH = (16, 0, 48, 16), 32
ROWS = sum(SIZES) + 8  # The last belong to nobody.
MAGNITUDES = np.float32([1, 1, 1e-3, 1e-6])
OF_ROW = np.repeat(MAGNITUDES, [*SIZES[:3], ROWS - sum(SIZES[:3])])[:, None]


def experts(w, x):
    return lax.ragged_dot(x, w["up"], jnp.asarray(SIZES, jnp.int32))


def both(w, x):
    return lax.ragged_dot(jnp.tanh(experts(w, x)), w["down"], jnp.asarray(SIZES, jnp.int32))


def one_by_one(fn, w, x):
    """The same of each expert alone, by plain products; rows of nobody are zeros."""
    found, start = [], 0
    for i, size in enumerate(SIZES):
        found += [fn(jax.tree.map(lambda a, i=i: a[i], w), x[start : start + size])] if size else []
        start += size
    return jnp.concatenate([*found, jnp.zeros((ROWS - start, found[0].shape[1]))])


def plain(w, x):
    return (x @ w["up"]).astype(jnp.bfloat16)


def arguments():
    draw = np.random.default_rng(0)
    of = lambda *shape: np.float32(draw.normal(size=shape))  # noqa: E731
    w = {"up": of(len(SIZES), WIDTH, 48) * MAGNITUDES[::-1, None, None], "down": of(len(SIZES), 48, WIDTH)}
    return w, of(ROWS, WIDTH) * OF_ROW, of(ROWS, 48) * OF_ROW[::-1], of(ROWS, WIDTH) * OF_ROW[::-1]


def results(fn, w, x, c):
    weighed = lambda w, x: (fn(w, x) * c).sum()  # noqa: E731
    return jax.jit(lambda w, x: (fn(w, x), jax.grad(weighed, (0, 1))(w, x)))(w, x)


def by_expert(tree):
    """All arrays of a tree, one for each expert."""
    for leaf in jax.tree.leaves(tree):
        parts = np.split(leaf, np.cumsum(SIZES)[:-1]) if len(leaf) == ROWS else leaf
        yield from (np.asarray(part, np.float64) for part in parts)


def worst(found, expected):
    """The relative error of the worst expert of the worst result."""
    pairs = [pair for pair in zip(by_expert(found), by_expert(expected), strict=True) if pair[1].any()]
    assert len(pairs) > 8
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


@pytest.mark.parametrize("more", ["", ",grad_dtype=e5m2", ",weight_grad=half"])
def test_experts_are_as_each_of_them_alone(more):
    w, x, c, _ = arguments()
    found = results(jamp.cast_fn(lambda w, x: experts(w, x).astype(jnp.bfloat16), EACH + more), w, x, c)
    alone = functools.partial(one_by_one, jamp.cast_fn(plain, EACH + more))
    # In half a sum over rows is added up in another order.
    assert worst(found, results(alone, w, x, c)) < (4e-3 if "half" in more else 1e-6)
    assert worst(found, results(experts, w, x, c)) < (0.12 if more else 0.06)


@pytest.mark.parametrize("wrapped", ["bare", "remat", "scan"])
def test_layers_of_experts_under_what_jax_wraps_around_them(wrapped):
    w, x, _, c = arguments()
    cast = jamp.cast_fn(both, EACH)
    fn = {
        "bare": cast,
        "remat": jax.checkpoint(cast),
        "scan": lambda w, x: lax.scan(lambda i, w: (i, cast(w, x)), 0, jax.tree.map(lambda a: a[None], w))[1][0],
    }[wrapped]  # fmt: skip
    assert worst(results(fn, w, x, c), results(both, w, x, c)) < 0.1


def test_numbers_of_rows_that_belong_to_nobody_do_not_matter():
    w, x, c, _ = arguments()
    cast = jamp.cast_fn(experts, EACH)
    expected = results(cast, w, x, c)
    for value in (0.0, 1e30):
        changed = x.copy()
        changed[sum(SIZES) :] = value
        for found, other in zip(jax.tree.leaves(results(cast, w, changed, c)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(found, other)


def test_sizes_may_be_computed_and_differ_for_the_same_rows():
    w, x, _, _ = arguments()
    other = jnp.asarray(SIZES[::-1], jnp.int32)

    def twice(w, x, sizes):
        return lax.ragged_dot(x, w["up"], sizes), lax.ragged_dot(x, w["up"], sizes[::-1])

    found = jax.jit(jamp.cast_fn(twice, EACH))(w, x, other)
    for y, expected in zip(found, twice(w, x, other), strict=True):
        rows = np.linalg.norm(y - expected, axis=1), np.linalg.norm(expected, axis=1)
        assert (rows[0][: sum(SIZES)] < 1e-1 * rows[1][: sum(SIZES)]).mean() > 0.4
    np.testing.assert_allclose(found[1], jamp.cast_fn(experts, EACH)(w, x), rtol=1e-6)


def test_directions_and_second_derivatives():
    w, x, _, c = arguments()
    cast = jamp.cast_fn(both, EACH)
    exact, found = (jax.jvp(functools.partial(fn, w), (x,), (c,))[1] for fn in (both, cast))
    assert worst([found] * 3, [exact] * 3) < 0.1
    twice = lambda fn: jax.grad(lambda x: (jax.grad(lambda x: jnp.sin(fn(w, x)).sum())(x) * c).sum())  # noqa: E731
    assert worst([twice(cast)(x)] * 3, [twice(both)(x)] * 3) < 0.3


def test_bytes_of_experts_and_an_exponent_of_each_row_are_kept():
    w, x, _, _ = arguments()
    kept = jamp.report(lambda w, x: jnp.tanh(experts(w, x)).sum(), w, x, policy=EACH).residual_bytes
    assert kept["uint8"] <= x.size + ROWS + w["up"].size + len(SIZES)
