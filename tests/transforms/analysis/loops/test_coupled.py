"""States of a loop that is written out and move each other: all of them add up in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jamp._compat import open_jaxpr
from jamp.transforms.analysis.loops.recurrences import Recurrences
from tests.transforms.harness import find, o2, trace

WIDTH, STEPS = 8, 6
KEYS = jax.random.split(jax.random.key(0), 6)
Q, M = (jax.random.normal(key, (4, WIDTH)) for key in KEYS[:2])
NET = {"w": jax.random.normal(KEYS[2], (WIDTH, 12)) / 3, "b": jnp.zeros(12), "v": jax.random.normal(KEYS[3], (12, 1))}
Y = jax.random.normal(KEYS[4], (4, 1))


def network(net, x):
    return jnp.tanh(x @ net["w"] + net["b"]) @ net["v"]


def energy(net, q):
    return jnp.sum(network(net, q))


def leapfrog(net, q, m):
    force = jax.grad(lambda q: energy(net, q))
    for _ in range(STEPS):
        m = m - 0.05 * force(q)
        q = q + 0.125 * m
        m = m - 0.05 * force(q)
    return q, m


def euler(net, q, m):
    force = jax.grad(lambda q: energy(net, q))
    for _ in range(STEPS):
        m = m - 0.05 * force(q)
        q = q + 0.125 * m
    return q, m


def forward_euler(net, q, m):
    """Each state is moved by the last value of the other, and so by its own last but one."""
    force = jax.grad(lambda q: energy(net, q))
    for _ in range(STEPS):
        q, m = q + 0.125 * m, m - 0.05 * force(q)
    return q, m


def exchange(net, x, y):

    def field(x):
        return jnp.tanh(x @ net["w"] + net["b"]) @ net["w"].T

    for _ in range(STEPS):
        x, y = x + 0.1 * field(jnp.sin(y)), y - 0.1 * field(jnp.sin(x))
    return x, y


def calls_of_a_step(net, q, m):
    @jax.jit
    def step(net, q, m):
        m = m - 0.05 * jax.grad(lambda q: energy(net, q))(q)
        return q + 0.125 * m, m

    for _ in range(STEPS):
        q, m = step(net, q, m)
    return q, m


def adjoint(net, x, a):
    """The state goes back along its path, and the adjoint beside it."""

    def field(x):
        return jnp.tanh(jnp.tanh(x @ net["w"] + net["b"]) @ net["w"].T)

    for _ in range(STEPS):
        rate, pull = jax.vjp(field, x)
        x, a = x - 0.05 * rate, a + 0.05 * pull(a)[0]
    return x, a


def loss(net, x, y):
    return jnp.mean(jnp.square(network(net, x) - y))


def descent(net, x, _):
    for _ in range(STEPS):
        net = jax.tree.map(lambda p, g: p - 0.02 * g, net, jax.grad(loss)(net, x, Y))
    return net


def descent_with_momentum(net, x, _):
    speed = jax.tree.map(jnp.zeros_like, net)
    for _ in range(STEPS):
        speed = jax.tree.map(lambda v, g: 0.9 * v + g, speed, jax.grad(loss)(net, x, Y))
        net = jax.tree.map(lambda p, v: p - 0.02 * v, net, speed)
    return net, speed


def descent_in_checkpoints(net, x, _):
    step = jax.checkpoint(lambda net: jax.tree.map(lambda p, g: p - 0.02 * g, net, jax.grad(loss)(net, x, Y)))
    for _ in range(STEPS):
        net = step(net)
    return net


def calls_that_hold_their_data(net, _, __):
    step = jax.jit(lambda net: jax.tree.map(lambda p, g: p - 0.02 * g, net, jax.grad(loss)(net, np.ones_like(Q), Y)))
    for _ in range(STEPS):
        net = step(net)
    return net


# By program, how many sums, or results of calls, its states are.
WRITTEN = {
    leapfrog: 3 * STEPS, euler: 2 * STEPS, forward_euler: 2 * STEPS - 1, exchange: 2 * STEPS,
    calls_of_a_step: 2 * STEPS, adjoint: 2 * STEPS,
    descent: 3 * STEPS, descent_with_momentum: 6 * STEPS, descent_in_checkpoints: 3 * STEPS,
    calls_that_hold_their_data: 3 * STEPS,
}  # fmt: skip


@pytest.mark.parametrize("fn", WRITTEN, ids=lambda fn: fn.__name__)
def test_all_sums_of_all_states_are_found(fn):
    jaxpr = open_jaxpr(trace(fn, NET, Q, M))
    sums = Recurrences().sums(jaxpr)
    assert sums.keys() >= set(jaxpr.outvars)
    shapes = {var.aval.shape for var in jaxpr.outvars}  # Results of layers go on from adapted biases.
    assert len([var for var in sums if var.aval.shape in shapes]) == WRITTEN[fn]


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("fn", WRITTEN, ids=lambda fn: fn.__name__)
def test_states_are_never_rounded_and_products_are_half(fn, half):
    """Where weights are zeros, nothing but momenta moves states: each has all of its digits."""
    still = NET | {"v": jnp.zeros((12, 1)), "w": jnp.zeros((WIDTH, 12))}
    args = jax.tree.map(lambda x: x + 2.0**-20, Q), jax.tree.map(lambda x: x + 2.0**-20, M)
    expected = jax.jit(fn)(still, *args)
    actual = jax.jit(o2(fn, half))(still, *args)
    if fn not in (descent, descent_with_momentum, descent_in_checkpoints, calls_that_hold_their_data):
        assert jax.tree.all(jax.tree.map(jnp.array_equal, actual, expected))
    products = find(trace(o2(fn, half), NET, Q, M), "dot_general")
    assert {var.aval.dtype.name for eqn in products for var in eqn.invars} == {half}


def reversible_layers(layers, x, y):
    """Two streams that move each other, each layer with weights of its own."""
    for first, second in layers:
        x = x + jnp.tanh(y @ first)
        y = y + jnp.tanh(x @ second)
    return x, y


def parallel_layers(layers, x, y):
    """Two terms in a layer that read one product, beside what was there a layer before."""
    before = x
    for first, second in layers:
        u = x @ first
        x, before = x + jnp.tanh(u) + jnp.sin(u) + jnp.tanh(before @ second), x
    return x


def layers_of_moved_weights(layers, x, y):
    """Weights that were all moved from the same ones by something else."""
    weights = [layers[0][0] + jnp.outer(*v) for v in zip(x, y, strict=True)]
    for w in weights:
        x = x + jnp.tanh(x @ w)
    return x


def training_of_layers(layers, x, y):
    """A step of descent of a residual network; the cotangents make a chain too."""

    def loss(layers):
        return jnp.mean(jnp.square(reversible_layers(layers, x, y)[0] - Y))

    return jax.tree.map(lambda p, g: p - 0.1 * g, layers, jax.grad(loss)(layers))


@pytest.mark.parametrize(
    "fn", [reversible_layers, parallel_layers, layers_of_moved_weights, training_of_layers], ids=lambda fn: fn.__name__
)
def test_layers_are_no_loop(fn):
    layers = [tuple(jax.random.normal(key, (2, WIDTH, WIDTH))) for key in KEYS]
    assert Recurrences().sums(open_jaxpr(trace(fn, layers, Q, M))) == {}
