"""What lies near a number: probabilities near 1, and what is infinite there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp


def in_scope(fn):
    def scoped(*args):
        with jax.named_scope(f"scope_of_{id(fn)}"):
            return fn(*args)

    return scoped


GATED = {
    "sigmoid": jax.nn.sigmoid,
    "tanh": lambda x: 0.5 + 0.5 * jnp.tanh(x / 2),
    "exp": lambda x: jnp.exp(-jax.nn.softplus(-x)),
}


WRAPPED = {"alone": lambda fn: fn, "jit": jax.jit, "scope": in_scope, "remat": jax.checkpoint}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("policy", ["O1:bfloat16", "O2:bfloat16", "O2:float16"])
@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("gate", GATED.values(), ids=GATED)
def test_what_a_gate_leaves_of_a_number(gate, wrap, policy):
    """A gate of 0.9975 is 0.996 in bfloat16, or 1: what it leaves was off by more than half of itself."""
    x, w = jax.random.normal(jax.random.key(1), (2, 8, 8))

    def left(x, w):
        opened = wrap(lambda x: gate(x @ w / 8 + 6))(x)
        return wrap(lambda opened, data: (1 - opened) * data)(opened, wrap(lambda x: x @ w)(x))

    expected = left(x, w)
    np.testing.assert_allclose(
        jamp.cast_fn(left, policy)(x, w), expected, rtol=0, atol=0.03 * float(jnp.abs(expected).max())
    )


def squashed_gaussian(w, q, x):
    """The loss of an actor: the density of an action, which a critic reads."""
    action = jnp.tanh(x @ w)
    return -jnp.log(1 - action**2 + 1e-6).mean() + ((action @ q) ** 2).mean()


def inverted(w, q, x):
    action = jnp.tanh(x @ w)
    return (jnp.arctanh(jnp.clip(action, -1 + 1e-6, 1 - 1e-6)) ** 2).mean() + ((action @ q) ** 2).mean()


def cross_entropy(w, q, x):
    p = jnp.clip(jax.nn.sigmoid(3 * (x @ w)), 1e-6, 1 - 1e-6)
    return -jnp.where(x > 0, jnp.log(p), jnp.log(1 - p)).mean() + ((p @ q) ** 2).mean()


def odds(w, q, x):
    p = jax.nn.sigmoid(2 * (x @ w))
    return jnp.log(p / (1 - p + 1e-6) + 1e-6).mean() + ((p @ q) ** 2).mean()


def scores(w, q, x):
    """Of a copula: `ndtri` takes the smaller of both sides, for its logarithm and for a polynomial."""
    return ((jax.scipy.special.ndtri(jax.nn.sigmoid(2 * (x @ w))) @ q) ** 2).mean()


def rare(w, q, x):
    """Probabilities of 1e-12, which are 0 in float16."""
    p = jax.nn.softmax(2 * (x @ w))
    return -jnp.log(p).mean() / 8 + ((p @ q) ** 2).mean()


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
@pytest.mark.parametrize("fn", [squashed_gaussian, inverted, cross_entropy, odds, scores, rare])
def test_losses_of_probabilities_near_1_that_products_read_too(fn, level, half):
    """At O2 and bfloat16 these were 50 to 100 % off, or not numbers."""
    keys = jax.random.split(jax.random.key(3), 3)
    x = jax.random.normal(keys[0], (256, 32))
    w, q = jax.random.normal(keys[1], (32, 32)) / 3, jax.random.normal(keys[2], (32, 32)) / 6
    scale = 256.0 if half == "float16" else 1.0
    cast = jamp.cast_fn(lambda *args: scale * fn(*args), f"{level}:{half}")
    loss, gradients = jax.jit(jax.value_and_grad(cast, (0, 1)))(w, q, x)
    expected = jax.value_and_grad(fn, (0, 1))(w, q, x)
    np.testing.assert_allclose(loss / scale, expected[0], rtol=2e-3)
    for gradient, exact in zip(gradients, expected[1], strict=True):
        assert np.linalg.norm(gradient / scale - exact) <= 0.02 * np.linalg.norm(exact)
