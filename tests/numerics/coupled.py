"""States that move each other, written out: by gradients of an energy, by those of a loss, and step by step."""

import functools

import jax
import jax.numpy as jnp

from tests.numerics._networks import F32, mlp, mlp_weights
from tests.numerics._program import Program

BATCH, WIDTH = 16, 8


def _energy(params, q, dtype):
    """A network's energy in a bowl."""
    return jnp.sum(mlp(params, q, dtype, jnp.tanh)) + 0.5 * jnp.sum(jnp.square(q))


def leapfrog_of_a_network(params, q, m, target, *, dtype=F32):
    """Leapfrog steps of Hamiltonian Monte Carlo: positions and momenta move each other."""
    force = jax.grad(functools.partial(_energy, params, dtype=dtype))
    for _ in range(8):
        m = m - 0.05 * force(q)
        q = q + 0.1 * m
        m = m - 0.05 * force(q)
    return jnp.square(q - target)


def hamiltonian_steps(params, q, m, target, *, dtype=F32):
    """The same by a step that is jitted and checkpointed, which returns both."""

    @jax.jit
    @jax.checkpoint
    def step(q, m):
        m = m - 0.1 * jax.grad(functools.partial(_energy, params, dtype=dtype))(q)
        return q + 0.1 * m, m

    for _ in range(8):
        q, m = step(q, m)
    return jnp.square(q - target)


def langevin(params, q, noise, target, *, dtype=F32):
    """Steps along a score that is the gradient of an energy, and noise."""
    for i in range(8):
        q = q - 0.05 * jax.grad(functools.partial(_energy, params, dtype=dtype))(q) + 0.3 * noise[i]
    return jnp.square(q - target)


def forward_euler(params, q, v, target, *, dtype=F32):
    """A second-order equation by explicit steps: each state is moved by the last value of the other."""
    for _ in range(12):
        q, v = q + 0.1 * v, v - 0.1 * mlp(params, q, dtype, jnp.tanh)
    return jnp.square(q - target)


def predators(params, x, y, target, *, dtype=F32):
    """Two populations, each of which grows at a rate that a network makes of the other."""
    for _ in range(12):
        x, y = (
            x + 0.05 * mlp(params[0], jnp.concatenate([x, y], -1), dtype, jnp.tanh),
            y - 0.05 * mlp(params[1], jnp.concatenate([y, x], -1), dtype, jnp.tanh),
        )
    return jnp.square(x + y - target)


def hand_written_adjoint(params, x, target, *, dtype=F32):
    """A neural ODE forwards, and its adjoint backwards beside the state, as torchdiffeq does it."""
    field = functools.partial(mlp, params, dtype=dtype, activation=jnp.tanh)
    for _ in range(8):
        x = x + 0.05 * field(x)
    a = x - target
    for _ in range(8):
        rate, pull = jax.vjp(field, x)
        x, a = x - 0.05 * rate, a + 0.05 * pull(a)[0]
    return jnp.square(a)


def _loss(params, x, y, dtype):
    return jnp.mean(jnp.square(mlp(params, x, dtype, jnp.tanh) - y))


def inner_momentum(params, x, y, x_test, y_test, *, dtype=F32):
    """Meta-learning: inner steps of descent with momentum."""
    speed = jax.tree.map(jnp.zeros_like, params)
    for _ in range(6):
        g = jax.grad(_loss)(params, x, y, dtype)
        speed = jax.tree.map(lambda v, g: 0.9 * v + g, speed, g)
        params = jax.tree.map(lambda p, v: p - 0.02 * v, params, speed)
    return jnp.square(mlp(params, x_test, dtype, jnp.tanh) - y_test)


def inner_nesterov(params, x, y, x_test, y_test, *, dtype=F32):
    """Inner steps by Nesterov's rule, in a jitted function."""

    @jax.jit
    def step(params, speed):
        ahead = jax.tree.map(lambda p, v: p - 0.02 * v, params, speed)
        speed = jax.tree.map(lambda v, g: 0.8 * v + g, speed, jax.grad(_loss)(ahead, x, y, dtype))
        return jax.tree.map(lambda p, v: p - 0.02 * v, params, speed), speed

    speed = jax.tree.map(jnp.zeros_like, params)
    for _ in range(5):
        params, speed = step(params, speed)
    return jnp.square(mlp(params, x_test, dtype, jnp.tanh) - y_test)


def inner_adam(params, x, y, x_test, y_test, *, dtype=F32):
    """Inner steps by Adam."""
    m = s = jax.tree.map(jnp.zeros_like, params)
    for i in range(1, 6):
        g = jax.grad(_loss)(params, x, y, dtype)
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        s = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, s, g)
        mean, square = (jax.tree.map(lambda z, d=1 - decay**i: z / d, z) for z, decay in ((m, 0.9), (s, 0.99)))
        params = jax.tree.map(lambda p, m, s: p - 0.01 * m / jnp.sqrt(s + 1e-4), params, mean, square)
    return jnp.square(mlp(params, x_test, dtype, jnp.tanh) - y_test)


def inner_step_sizes(params, x, y, x_test, y_test, *, dtype=F32):
    """Inner steps with learned step sizes, of a checkpoint each."""
    params, rates = params

    @jax.checkpoint
    def step(params):
        gradients = jax.grad(_loss)(params, x, y, dtype)
        return jax.tree.map(lambda p, r, g: p - 0.02 * jnp.exp(r) * g, params, rates, gradients)

    for _ in range(5):
        params = step(params)
    return jnp.square(mlp(params, x_test, dtype, jnp.tanh) - y_test)


def two_players(params, x, noise, *, dtype=F32):
    """Unrolled steps of a critic and of the generator that it judges."""
    maker, critic = params

    def game(maker, critic):
        made = mlp(maker, noise, dtype, jnp.tanh)
        real, fake = (mlp(critic, z, dtype, jnp.tanh) for z in (x, made))
        return jnp.mean(jax.nn.softplus(-real)) + jnp.mean(jax.nn.softplus(fake))

    for _ in range(5):
        ups, downs = jax.grad(game, (0, 1))(maker, critic)
        maker = jax.tree.map(lambda p, g: p + 0.05 * g, maker, ups)
        critic = jax.tree.map(lambda p, g: p - 0.05 * g, critic, downs)
    return jnp.square(mlp(maker, noise, dtype, jnp.tanh) - x)


def _particles(rng):
    params = mlp_weights(rng, WIDTH, 16, 1)
    return params, *(rng.normal(size=(BATCH, WIDTH)) for _ in range(3))


def _driven(rng):
    return *_particles(rng)[:2], rng.normal(size=(8, BATCH, WIDTH)), rng.normal(size=(BATCH, WIDTH))


def _pair(rng):
    params = [mlp_weights(rng, 2 * WIDTH, 16, WIDTH) for _ in range(2)]
    return params, *(rng.normal(size=(BATCH, WIDTH)) for _ in range(3))


def _field(rng):
    return mlp_weights(rng, WIDTH, 16, WIDTH), *(rng.normal(size=(BATCH, WIDTH)) for _ in range(2))


def _tasks(rng):
    data = [rng.normal(size=(2 * BATCH, width)) for width in (WIDTH, 1, WIDTH, 1)]
    return mlp_weights(rng, WIDTH, 16, 1), *data


def _tasks_with_rates(rng):
    params, *data = _tasks(rng)
    return (params, jax.tree.map(lambda p: 0.1 * rng.normal(size=p.shape), params)), *data


def _game(rng):
    players = mlp_weights(rng, WIDTH, 16, WIDTH), mlp_weights(rng, WIDTH, 16, 1)
    return players, *(rng.normal(size=(BATCH, WIDTH)) for _ in range(2))


COUPLED, ADAPTED = "states that move each other", "weights adapted inside of a loss"
PROGRAMS = (
    Program(leapfrog_of_a_network, _particles, (0,), COUPLED),
    Program(hamiltonian_steps, _particles, (0,), COUPLED),
    Program(langevin, _driven, (0,), COUPLED),
    Program(forward_euler, lambda rng: (mlp_weights(rng, WIDTH, 16, WIDTH), *_particles(rng)[1:]), (0,), COUPLED),
    Program(predators, _pair, (0,), COUPLED),
    Program(hand_written_adjoint, _field, (0,), COUPLED),
    Program(inner_momentum, _tasks, (0, 1, 3), ADAPTED),
    Program(inner_nesterov, _tasks, (0, 1, 3), ADAPTED),
    Program(inner_adam, _tasks, (0, 1, 3), ADAPTED),
    Program(inner_step_sizes, _tasks_with_rates, (0, 1, 3), ADAPTED),
    Program(two_players, _game, (0, 1, 2), ADAPTED),
)
