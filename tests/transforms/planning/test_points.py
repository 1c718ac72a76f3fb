"""Points that a network moves stay float32, and so do their moments; what a call raises is raised outside of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from jamp._compat import open_jaxpr
from tests.transforms.harness import both_halves, mixed_levels, product_dtypes, run, trace

KEYS = jax.random.split(jax.random.key(0), 4)
POINTS = jax.random.normal(KEYS[0], (32, 3)) + 1000.0
W_IN, W_OUT = jax.random.normal(KEYS[1], (3, 16)), jax.random.normal(KEYS[2], (16, 3)) / 4


def shift(w_in, w_out, points):
    return jnp.tanh((points - 1000.0) @ w_in) @ w_out


def moved(w_in, w_out, points):
    return points + shift(w_in, w_out, points)


def moved_back(w_in, w_out, points):
    return points - jax.nn.relu(shift(w_in, w_out, points))


def moved_twice(w_in, w_out, points):
    return moved(w_in, w_out, moved(w_in, w_out, points))


@both_halves
@mixed_levels
@pytest.mark.parametrize("move", [moved, moved_back, moved_twice], ids=lambda move: move.__name__)
def test_what_is_left_of_moved_points_has_all_digits(move, level, half):
    """In bfloat16 points around 1000 are multiples of 4, and their deviations from the mean are of the order of one."""

    def centred(w_in, w_out, points):
        placed = move(w_in, w_out, points)
        return (placed - placed.mean(0)) @ jnp.asarray(W_IN)

    expected = run(centred, W_IN, W_OUT, POINTS)
    found = run(jamp.cast_fn(centred, f"{level}:{half}"), W_IN, W_OUT, POINTS)
    assert jnp.linalg.norm(found - expected) < 0.02 * jnp.linalg.norm(expected)


@both_halves
@mixed_levels
def test_moments_of_points_are_exact(level, half):
    def inertia(points):
        centred = points - points.mean(0)
        return centred.T @ centred

    points = jnp.arange(96.0).reshape(32, 3) ** 2
    np.testing.assert_array_equal(run(jamp.cast_fn(inertia, f"{level}:{half}"), points), run(inertia, points))


def frame(quaternions):
    w, x, y, z = jnp.moveaxis(quaternions / jnp.linalg.norm(quaternions, axis=-1, keepdims=True), -1, 0)
    entries = [
        1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w),
        2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w),
        2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y),
    ]  # fmt: skip
    return jnp.stack(entries, -1).reshape(*w.shape, 3, 3)


def placed(w_in, quaternions, origins):
    """Points that a network places in frames."""
    local = jnp.tanh(origins @ w_in)[:, :3]
    return jnp.einsum("nij,nj->ni", frame(quaternions), local) + origins[:, None]


@mixed_levels
def test_points_in_frames_are_float32(level):
    products = product_dtypes(trace(jamp.cast_fn(placed, f"{level}:bfloat16"), W_IN, POINTS[:, [0, 1, 2, 0]], POINTS))
    assert sorted(products) == [["bfloat16"] * 2, ["float32"] * 2]


@mixed_levels
def test_layers_of_three_features_are_half(level):
    def layers(w_in, w_out, x):
        for _ in range(3):
            x = jnp.tanh(jnp.tanh(x @ w_in) @ w_out)
        return x @ w_in[:, :3]

    products = product_dtypes(trace(jamp.cast_fn(layers, f"{level}:bfloat16"), W_IN, W_OUT, POINTS))
    assert all(dtypes == ["bfloat16"] * 2 for dtypes in products)


def test_features_that_are_added_to_an_argument_are_half():
    """A residual stream has more columns than space."""

    def block(w, head, x):
        return (x + jnp.tanh(x @ w)) @ head

    w = jnp.ones((16, 16))
    jaxpr = trace(jamp.cast_fn(block, "O2:bfloat16,residuals=all"), w, w, jnp.ones((8, 16)))
    adds = (eqn for eqn in open_jaxpr(jaxpr).eqns if eqn.primitive.name == "add")
    assert {eqn.outvars[0].aval.dtype.name for eqn in adds} == {"bfloat16"}


@both_halves
def test_cotangents_of_what_a_call_raises_add_up_in_float32(half):
    """The derivative of a direction is the difference of two that are nearly the same: `norm` is jitted, and raises."""

    def direction(w, x):
        y = x @ w
        return jnp.sum((y / jnp.linalg.norm(y, axis=-1, keepdims=True)) * jnp.linspace(1.0, 1.1, 16))

    w, x = jax.random.normal(KEYS[1], (8, 16)), jax.random.normal(KEYS[3], (64, 8))
    gradient = jax.grad(direction, 1)
    expected = run(gradient, w, x)
    error = jnp.linalg.norm(run(jax.grad(jamp.cast_fn(direction, f"O2:{half}"), 1), w, x) - expected)
    careful = jnp.linalg.norm(run(gradient, w.astype(half).astype(w.dtype), x.astype(half).astype(x.dtype)) - expected)
    assert error < 3 * careful


@both_halves
@mixed_levels
def test_scores_of_three_tokens_are_no_moments(level, half):
    def attend(tokens):
        return jax.nn.softmax(tokens @ tokens.T / 4) @ tokens

    found = product_dtypes(trace(jamp.cast_fn(attend, f"{level}:{half}"), jnp.ones((3, 16))))
    assert found == [[half, half]] * 2
