"""Of what is read in part the part is kept, where the backward pass reads nothing else of it."""

import math

import jax
import jax.numpy as jnp
import pytest

import jamp

KEYS = jax.random.split(jax.random.key(0), 4)
W = jax.random.normal(KEYS[0], (64, 64)) / 8
X = jax.random.normal(KEYS[1], (8, 32, 64))
ACTIONS = jax.random.randint(KEYS[2], (8, 32), 0, 64)


def bytes_kept(fn, *args, policy="O2:bfloat16"):
    report = jamp.report(fn, *args, policy=policy)
    return sum(report.residual_bytes.values()), report.residuals_in_float32


def loss(logits):
    return -jax.nn.log_softmax(logits)[..., 0].mean()


def one_token(w, x):
    return ((x @ w)[:, 0] ** 2).mean()


def head_of_one_token(w, x):
    return loss(jax.nn.gelu((x @ w + w[0])[:, 0]) @ w)


def taken_action(w, x):
    values = jax.nn.relu(x @ w) @ w + w[0]
    return ((jnp.take_along_axis(values, ACTIONS[..., None], -1) - 1) ** 2).mean()


def taken_distribution(w, x):
    """As in distributional Q-learning: the product is as wide as there are actions, times the bins of each."""
    values = (jax.nn.relu(x.reshape(256, 64) @ w) @ w).reshape(256, 4, 16)
    return -jax.nn.log_softmax(values[jnp.arange(256), ACTIONS.reshape(256) % 4]).mean()


def token_of_blocks(w, x):
    block = jax.checkpoint(lambda w, x: x + jax.nn.relu(x @ w) @ w.T)
    return loss(block(w, block(w, x))[:, 0] @ w)


def last_state(w, x):
    def chunk(state, inputs):
        return jax.lax.scan(lambda h, x: (jnp.tanh(x + h @ w),) * 2, state, inputs)

    chunks = x.swapaxes(0, 1).reshape(4, 8, 8, 64)
    states = jax.lax.scan(jax.checkpoint(chunk), jnp.zeros((8, 64)), chunks)[1]
    return loss(states[-1, -1] @ w)


def taken_by_a_function(w, x):
    return loss(jax.nn.gelu(jax.jit(lambda y: y[:, 0])(x @ w)) @ w)


def taken(w, x):
    return loss(jax.nn.gelu(jnp.take(x @ w, 0, axis=1)) @ w)


def part_of_a_part(w, x):
    return ((x @ w)[:, 4:20].reshape(8, -1)[:, :8] ** 2).mean()


ALL = (
    one_token,
    head_of_one_token,
    taken_action,
    token_of_blocks,
    last_state,
    taken_by_a_function,
    taken,
    part_of_a_part,
)


@pytest.mark.parametrize("fn", ALL)
@pytest.mark.parametrize("policy", ("O1:bfloat16", "O2:bfloat16"))
def test_no_more_is_kept_than_in_float32(fn, policy):
    kept, in_float32 = bytes_kept(fn, W, X, policy=policy)
    assert kept <= 1.01 * in_float32  # Indices and sums of the softmax.


@pytest.mark.parametrize("fn", ALL)
def test_gradients_are_those_of_all_residuals(fn):
    of_parts, of_all = (
        jax.grad(jamp.cast_fn(fn, policy))(W, X) for policy in ("O2:bfloat16", "O2:bfloat16,residuals=all")
    )
    assert jnp.allclose(of_parts, of_all, rtol=0.02, atol=0.02 * jnp.abs(of_all).max())


def half_of_it(w, x):
    return ((x @ w)[:, :16] ** 2).mean()


def beside_a_sum(w, x):
    y = x @ w
    return (y[:, :16] ** 2).mean() + y.sum()


def moved_before(w, x):
    y = jnp.where(jnp.arange(64) > 3, (x @ w).reshape(256, 64), 0)
    return (jnp.concatenate([y[:64], y[192:]]) ** 2).mean()


@pytest.mark.parametrize("fn", (half_of_it, beside_a_sum, moved_before))
def test_half_of_it_is_a_part(fn):
    report = jamp.report(fn, W, X, policy="O2:bfloat16")
    sizes = [math.prod(residual.shape) for residual in report.residuals if residual.where != "copy of an argument"]
    assert sum(sizes) <= X.size // 2


def read_whole_as_well(w, x):
    y = x @ w
    return (y[:, 0] ** 2).mean() + jnp.tanh(y).mean()


def all_parts(w, x):
    one, other = jnp.split(x @ w, 2, axis=-1)
    return (one**2).mean() + (jnp.tanh(one) * other).mean()


def given_back(w, x):
    y = x @ w
    return (y[:, 0] ** 2).mean(), y


def read_by_a_function(w, x):
    y = x @ w
    return (y[:, 0] ** 2).mean() + jax.jit(lambda y: jnp.tanh(y.T).T)(y).mean()


def most_of_it(w, x):
    return ((x @ w)[:, :17] ** 2).mean()


@pytest.mark.parametrize("fn", (read_whole_as_well, all_parts, given_back, read_by_a_function, most_of_it))
def test_a_whole_that_is_needed_is_kept_alone(fn):
    report = jamp.report(lambda w, x: jax.tree.leaves(fn(w, x)), W, X, policy="O2:bfloat16")
    assert [residual.shape for residual in report.residuals if residual.shape[:1] == (8,)] == [(8, 32, 64)]
