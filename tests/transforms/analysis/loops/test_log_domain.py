"""Carries that are logarithms of sums of their exponentials are float32, whatever reads them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.special import logsumexp

import jamp
from tests.transforms.harness import both_halves, find, mixed_levels, trace

STEPS, STATES = 200, 16
# All states are alike but for what is emitted, so that logarithms grow to hundreds and differ by less than one.
WEIGHTS = jnp.zeros((STATES, STATES))
EMISSIONS = jnp.ones((STEPS, 1, STATES)) + jnp.arange(STATES) / 32  # Which half holds.
READER = jnp.eye(STATES)  # Given as an argument: products with few columns that the program makes are float32.


def scores(step, e, weights, reader):
    """Differences of the logarithms of all steps, read by a product."""
    states = lax.scan(lambda a, x: (step(a, x, weights),) * 2, jnp.zeros((1, STATES)), e)[1]
    return (states - states[..., :1]) @ reader


def summed(a, x, weights):
    return logsumexp(a[:, :, None] + weights, axis=1) + x


def by_product(a, x, weights):
    top = a.max(1, keepdims=True)
    return jnp.log(jnp.exp(a - top) @ jnp.exp(weights)) + top + x


def emitted_inside(a, x, weights):
    return logsumexp(a[:, :, None] + weights + x[:, None], axis=1)


def alternatives(a, x, weights):
    return jnp.logaddexp(a + weights[0], jnp.roll(a, 1, 1)) + x


def in_a_checkpoint(e, weights, reader):
    return scores(jax.checkpoint(summed), e, weights, reader)


def both_in_a_checkpoint(e, weights, reader):
    step = jax.checkpoint(lambda a, x: (summed(a, x, weights),) * 2)
    states = lax.scan(step, jnp.zeros((1, STATES)), e)[1]
    return (states - states[..., :1]) @ reader


def before_each_step(e, weights, reader):
    states = lax.scan(lambda a, x: (summed(a, x, weights), a), jnp.zeros((1, STATES)), e)[1]
    return (states - states[..., :1]) @ reader


def in_a_loop(e, weights, reader):
    def step(a, x):
        a = lax.fori_loop(0, 2, lambda _, a: summed(a, x, weights), a)
        return a, a

    states = lax.scan(step, jnp.zeros((1, STATES)), e)[1]
    return (states - states[..., :1]) @ reader


def padded(e, weights, reader):
    return scores(lambda a, x, weights: jnp.where(x > -10, summed(a, x, weights), a), e, weights, reader)


def at_the_end(e, weights, reader):
    a = lax.scan(lambda a, x: (summed(a, x, weights), None), jnp.zeros((1, STATES)), e)[0]
    return (a - a[:, :1]) @ reader


ALGORITHMS = {
    "summed": lambda e, weights, reader: scores(summed, e, weights, reader),
    "by a product": lambda e, weights, reader: scores(by_product, e, weights, reader),
    "emitted inside": lambda e, weights, reader: scores(emitted_inside, e, weights, reader),
    "emitted inside, in a checkpoint": lambda e, weights, reader: scores(
        jax.checkpoint(emitted_inside), e, weights, reader
    ),
    "alternatives": lambda e, weights, reader: scores(alternatives, e, weights, reader),
    "in a checkpoint": in_a_checkpoint,
    "both in a checkpoint": both_in_a_checkpoint,
    "before each step": before_each_step,
    "in a loop": in_a_loop,
    "padded": padded,
    "at the end": at_the_end,
    "mapped": lambda e, weights, reader: jax.vmap(lambda e: scores(summed, e, weights, reader), 1)(e[:, None]),
}


@both_halves
@mixed_levels
@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_logarithms_that_grow_keep_their_digits(algorithm, level, half):
    """Their readers take differences of what has grown to hundreds."""
    of_a_network = lambda e, weights, reader: algorithm(e @ reader, weights, reader)  # noqa: E731
    expected = of_a_network(EMISSIONS, WEIGHTS, READER)
    actual = jax.jit(jamp.cast_fn(of_a_network, f"{level}:{half}"))(EMISSIONS, WEIGHTS, READER)
    error = 2.0 ** (-8 if half == "bfloat16" else -10)
    np.testing.assert_allclose(np.asarray(actual, np.float32), expected, rtol=2 * error, atol=error)


def test_gradients_are_those_of_the_logarithms():
    """Each step's emissions move the result by what they are in it."""

    def loss(fn):
        return lambda e, weights, reader: jnp.sum(fn(e @ reader, weights, reader)[-1] ** 2)

    program = loss(ALGORITHMS["summed"])
    expected = jax.grad(program)(EMISSIONS, WEIGHTS, READER)
    actual = jax.jit(jax.grad(jamp.cast_fn(program, "O2:bfloat16")))(EMISSIONS, WEIGHTS, READER)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=0.02 * float(jnp.abs(expected).max()))


def test_what_a_step_makes_of_a_logarithm_is_one():
    """Of Sinkhorn's two potentials the first goes on to no step, and a product may read it."""

    def potentials(x, w):
        costs = x @ w

        def step(potentials, _):
            f = -logsumexp(costs + potentials[1], axis=1)
            return (f, -logsumexp(costs + f[:, None], axis=0)), None

        return jnp.stack(lax.scan(step, (jnp.zeros(16), jnp.zeros(16)), length=9)[0]) @ w

    jaxpr = trace(jamp.cast_fn(potentials, "O2:bfloat16"), jnp.ones((16, 16)), jnp.eye(16))
    (loop,) = find(jaxpr, "scan")
    assert {str(var.aval.dtype) for var in (*loop.invars, *loop.outvars)} == {"float32"}


def logarithm_of_a_layer(h, w):
    """A state that is a logarithm, of what a layer makes of it: no log-probability goes on."""
    return jnp.log1p(jnp.exp(h @ w))


def layer_of_probabilities(h, w):
    return jax.nn.log_softmax(jnp.tanh(jnp.exp(h) @ w) @ w)


@pytest.mark.parametrize("layer", [logarithm_of_a_layer, layer_of_probabilities])
def test_what_layers_bend_stays_half(layer):
    program = lambda x, w: lax.scan(lambda h, _: (layer(h, w), None), x, None, length=9)[0] @ w  # noqa: E731
    (loop,) = find(trace(jamp.cast_fn(program, "O2:bfloat16"), jnp.ones((4, 8)), jnp.eye(8)), "scan")
    assert loop.outvars[0].aval.dtype == jnp.bfloat16


def test_the_backward_pass_of_a_loop_reads_what_it_read():
    """Of Sinkhorn's iteration, weights that add up to one in the forward pass do in the backward pass too."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, v = (jax.random.normal(key, (16, 16)) for key in keys)

    def transported(w):
        costs = 5 * (x @ w) / 4

        def step(potentials, _):
            f, g = potentials
            f = -logsumexp(costs + g, axis=1)
            return (f, -logsumexp(costs + f[:, None], axis=0)), None

        (f, g), _ = lax.scan(step, (jnp.zeros(16), jnp.zeros(16)), length=100)
        return jnp.sum((jnp.exp(costs + f[:, None] + g) @ v) ** 2)

    expected = jax.grad(transported)(w)
    for level in ("O1", "O2"):
        actual = jax.jit(jax.grad(jamp.cast_fn(transported, f"{level}:bfloat16")))(w)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=0.1 * float(jnp.abs(expected).max()))
