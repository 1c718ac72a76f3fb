"""Reinforcement learning: returns, advantages, distributional critics, policies."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.numerics._networks import F32, dense, mlp, mlp_weights
from tests.numerics._program import Program

TIME, ENVS, WIDTH, ACTIONS = 64, 4, 8, 5


def huber_of_returns(params, x, rewards, *, dtype=F32):
    """Temporal differences of values around 400, clipped by Huber's loss."""
    value = 400.0 + mlp(params, x, dtype)[..., 0]
    target = rewards[:-1] + 0.99 * lax.stop_gradient(value[1:])
    e = target - value[:-1]
    return jnp.where(jnp.abs(e) < 1.0, 0.5 * e * e, jnp.abs(e) - 0.5)


def generalized_advantages(params, x, rewards, done, *, dtype=F32):
    """GAE by a reverse scan, returns as targets of the critic."""
    value = 100.0 + mlp(params, x, dtype)[..., 0]
    fixed = lax.stop_gradient(value)

    def step(advantage, inputs):
        reward, done, now, after = inputs
        delta = reward + 0.99 * after * (1.0 - done) - now
        advantage = delta + 0.99 * 0.95 * (1.0 - done) * advantage
        return advantage, advantage

    inputs = rewards[:-1], done[:-1], fixed[:-1], fixed[1:]
    _, advantages = lax.scan(step, jnp.zeros(ENVS), inputs, reverse=True)
    return jnp.square(value[:-1] - (advantages + fixed[:-1]))


def returns_written_out(params, x, rewards, *, dtype=F32):
    """Lambda returns by a Python loop with decay, differentiated as in Dreamer."""
    value = 50.0 + mlp(params, x, dtype)[:9, :, 0]
    total, losses = value[-1], []
    for t in reversed(range(8)):
        total = rewards[t] + 0.99 * (0.05 * value[t + 1] + 0.95 * total)
        losses.append(jnp.square(total - 70.0))
    return jnp.stack(losses)


def returns_by_product(params, x, rewards, *, dtype=F32):
    """Discounted sums of rewards by a product with a triangular matrix of powers."""
    t = jnp.arange(TIME)
    discount = jnp.where(t[None] >= t[:, None], 0.99 ** jnp.maximum(t[None] - t[:, None], 0), 0.0)
    return jnp.square(60.0 + mlp(params, x, dtype)[..., 0] - discount @ rewards)


def proximal_policy(params, x, actions, old, advantages, *, dtype=F32):
    """PPO: a clipped ratio, advantages normalized, an entropy, and how many were clipped."""
    logits = jax.nn.log_softmax(mlp(params, x, dtype))
    chosen = jnp.take_along_axis(logits, actions[..., None], -1)[..., 0]
    ratio = jnp.exp(chosen - old)
    a = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped = jnp.mean(jnp.abs(ratio - 1.0) > 0.2)
    entropy = -jnp.sum(jnp.exp(logits) * logits, -1)
    surrogate = jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
    return -surrogate - 0.01 * entropy + 1e-6 * clipped


def v_trace(params, x, actions, old, rewards, *, dtype=F32):
    """V-trace: truncated ratios in a reverse scan, the policy and the critic in one network."""
    out = mlp(params, x, dtype)
    logits, value = jax.nn.log_softmax(out[..., 1:]), 30.0 + out[..., 0]
    chosen = jnp.take_along_axis(logits, actions[..., None], -1)[..., 0]
    rho = jnp.minimum(1.0, jnp.exp(lax.stop_gradient(chosen) - old))
    after = jnp.concatenate([value[1:], value[-1:]])
    delta = rho * (rewards + 0.97 * after - value)
    step = lambda total, inputs: (inputs[0] + 0.97 * inputs[1] * total,) * 2
    _, correction = lax.scan(step, jnp.zeros(ENVS), (delta, rho), reverse=True)
    target = lax.stop_gradient(value + correction)
    advantage = lax.stop_gradient(rho * (rewards + 0.97 * jnp.concatenate([target[1:], after[-1:]]) - value))
    return 0.5 * (target - value) ** 2 - chosen * advantage


def categorical_critic(params, x, rewards, *, dtype=F32):
    """C51: a distribution on 51 atoms up to 500, projected onto its own atoms after a reward."""
    logits = mlp(params, x, dtype)
    atoms = jnp.linspace(0.0, 500.0, 51)
    p = lax.stop_gradient(jax.nn.softmax(logits[1:]))
    moved = jnp.clip(rewards[:-1, :, None] + 0.99 * atoms, 0.0, 500.0)
    weight = jnp.clip(1.0 - jnp.abs(moved[..., None] - atoms) / 10.0, 0.0, 1.0)
    target = jnp.einsum("tea,teab->teb", p, weight)
    return -jnp.sum(target * jax.nn.log_softmax(logits[:-1]), -1)


def quantile_critic(params, x, rewards, *, dtype=F32):
    """QR-DQN: quantiles around 300, Huber losses weighed by the sign of their errors."""
    quantiles = 300.0 + mlp(params, x, dtype)
    target = lax.stop_gradient(rewards[:-1, :, None] + 0.99 * quantiles[1:])
    e = target[..., None, :] - quantiles[:-1, ..., None]
    huber = jnp.where(jnp.abs(e) <= 1.0, 0.5 * e**2, jnp.abs(e) - 0.5)
    tau = (jnp.arange(8) + 0.5) / 8
    return jnp.sum(jnp.abs(tau[:, None] - (e < 0)) * huber, (-1, -2))


def squashed_gaussian(params, x, noise, *, dtype=F32):
    """Soft actor-critic: a squashed Gaussian's log density, with its epsilon."""
    mean, log_scale = jnp.split(mlp(params["policy"], x, dtype), 2, -1)
    log_scale = jnp.clip(log_scale, -5.0, 2.0)
    u = mean + jnp.exp(log_scale) * noise
    a = jnp.tanh(u)
    log_density = jnp.sum(-0.5 * noise**2 - log_scale - jnp.log(1.0 - a**2 + 1e-6), -1)
    return 0.2 * log_density - mlp(params["critic"], jnp.concatenate([x, a], -1), dtype)[..., 0]


def exploration_bonus(params, x, rewards, actions, *, dtype=F32):
    """Values with a bonus for rare actions, counted along time by a cumulative sum of one-hots."""
    one_hot = jax.nn.one_hot(actions, ACTIONS)
    counts = jnp.cumsum(one_hot, 0) * 300.0 + 1.0
    seen = jnp.sum(counts * one_hot, -1)
    bonus = 10.0 / jnp.sqrt(seen) + 1e-3 * seen
    return jnp.square(mlp(params, x, dtype)[..., 0] - rewards - bonus)


def normalized_values(params, x, rewards, statistics, *, dtype=F32):
    """PopArt: values in units of a running mean and deviation, of returns in the thousands."""
    mean, square = statistics
    mean = 0.99 * mean + 0.01 * rewards.mean()
    square = 0.99 * square + 0.01 * (rewards**2).mean()
    deviation = jnp.sqrt(jnp.clip(square - mean**2, 1e-4, 1e6))
    normalized = (rewards - mean) / deviation
    return jnp.square(mlp(params, x, dtype)[..., 0] - normalized)


def symlog_twohot(params, x, rewards, *, dtype=F32):
    """Dreamer's critic: symmetric logarithms, two-hot targets on 41 bins by comparisons and gathers."""
    logits = mlp(params, x, dtype)
    bins = jnp.linspace(-10.0, 10.0, 41)
    y = jnp.sign(rewards) * jnp.log1p(jnp.abs(rewards))
    below = jnp.clip(jnp.sum(bins <= y[..., None], -1) - 1, 0, 39)
    share = (y - bins[below]) / (bins[below + 1] - bins[below])
    two_hot = jax.nn.one_hot(below, 41) * (1.0 - share)[..., None] + jax.nn.one_hot(below + 1, 41) * share[..., None]
    return -jnp.sum(two_hot * jax.nn.log_softmax(logits), -1)


def world_model(params, x, actions, *, dtype=F32):
    """A recurrent state-space model: a KL divergence with free nats, in a scan, and a reconstruction."""

    def step(h, inputs):
        x, action = inputs
        both = jnp.concatenate([h, jax.nn.one_hot(action, ACTIONS, dtype=h.dtype)], -1)
        h = h + 0.3 * jnp.tanh(mlp(params["core"], both, dtype))
        prior = jax.nn.log_softmax(dense(params["prior"], h, dtype).astype(F32))
        posterior = jax.nn.log_softmax(dense(params["posterior"], jnp.concatenate([h, x], -1), dtype).astype(F32))
        divergence = jnp.sum(jnp.exp(posterior) * (posterior - prior), -1)
        decoded = dense(params["decoder"], jnp.concatenate([h, jnp.exp(posterior)], -1), dtype).astype(F32)
        return h, jnp.maximum(divergence, 0.1) + jnp.sum((decoded - x) ** 2, -1)

    return lax.scan(step, jnp.zeros((ENVS, WIDTH)), (x, actions))[1]


def pendulum(params, start, *, dtype=F32):
    """Analytic policy gradients through a simulator: a pendulum under a learned torque, 60 small steps."""

    def step(state, _):
        angle, speed = state
        seen = jnp.stack([jnp.cos(angle), jnp.sin(angle), speed], -1)
        torque = 2.0 * jnp.tanh(mlp(params, seen, dtype)[:, 0])
        speed = speed + 0.02 * (9.8 * jnp.sin(angle) + torque)
        angle = angle + 0.02 * speed
        return (angle, speed), (angle**2 + 0.1 * speed**2 + 0.001 * torque**2)

    return lax.scan(step, (start[:, 0], start[:, 1]), length=60)[1].sum(0)


def _net(out):
    return lambda rng: (mlp_weights(rng, WIDTH, 32, out), rng.normal(size=(TIME, ENVS, WIDTH)))


def _rewarded(out=1, size=1.0):
    return lambda rng: (*_net(out)(rng), size * rng.normal(size=(TIME, ENVS)) + size)


def _episodes(rng):
    return *_rewarded()(rng), (rng.random((TIME, ENVS)) < 0.05) * 1.0


def _acted(out, *shapes):
    def inputs(rng):
        params, x = _net(out)(rng)
        old = -np.log(ACTIONS) + 0.3 * rng.normal(size=(TIME, ENVS))
        return params, x, rng.integers(0, ACTIONS, (TIME, ENVS)), old, rng.normal(size=(TIME, ENVS))

    return inputs


def _clipped(rng):
    """Ratios that are clipped, or are not, and none at the edge of that."""
    params, x, actions, _, advantages = _acted(ACTIONS)(rng)
    chosen = np.take_along_axis(np.asarray(jax.nn.log_softmax(mlp(params, x))), actions[..., None], -1)[..., 0]
    moves = rng.choice([-0.5, -0.1, 0.1, 0.5], size=chosen.shape) + 0.02 * rng.normal(size=chosen.shape)
    return params, x, actions, chosen - moves, advantages


def _squashed(rng):
    params = {"policy": mlp_weights(rng, WIDTH, 32, 6), "critic": mlp_weights(rng, WIDTH + 3, 32, 1)}
    return params, _net(1)(rng)[1], rng.normal(size=(TIME, ENVS, 3))


def _explored(rng):
    return *_rewarded()(rng), rng.integers(0, ACTIONS, (TIME, ENVS))


def _scaled(rng):
    params, x, rewards = _rewarded(1, 30.0)(rng)
    return params, x, rewards + 2000.0, (np.float32(2000.0), np.float32(2000.0**2 + 900.0))


def _world(rng):
    params = {
        "core": mlp_weights(rng, WIDTH + ACTIONS, 32, WIDTH), "prior": mlp_weights(rng, WIDTH, 6)[0],
        "posterior": mlp_weights(rng, 2 * WIDTH, 6)[0], "decoder": mlp_weights(rng, WIDTH + 6, WIDTH)[0],
    }  # fmt: skip
    return params, _net(1)(rng)[1], rng.integers(0, ACTIONS, (TIME, ENVS))


def _angles(rng):
    return mlp_weights(rng, 3, 32, 1), 0.3 * rng.normal(size=(32, 2))


COMPARED, SCANNED = "what only comparisons read", "accumulators in loops"
PROGRAMS = (
    Program(huber_of_returns, _rewarded(), (0, 1), COMPARED),
    Program(generalized_advantages, _episodes, (0, 1), SCANNED),
    Program(returns_written_out, _rewarded(), (0, 1), "loops written out"),
    Program(returns_by_product, _rewarded(), (0, 1), "positions"),
    Program(proximal_policy, _clipped, (0, 1), COMPARED),
    Program(v_trace, _acted(ACTIONS + 1), (0, 1), SCANNED),
    Program(categorical_critic, _rewarded(51, 5.0), (0, 1), "positions"),
    Program(quantile_critic, _rewarded(8), (0, 1), COMPARED),
    Program(squashed_gaussian, _squashed, (0, 1), "epsilons"),
    Program(exploration_bonus, _explored, (0, 1), "counts by products"),
    Program(normalized_values, _scaled, (0, 1), "differences"),
    Program(symlog_twohot, _rewarded(41, 20.0), (0, 1), COMPARED),
    Program(world_model, _world, (0, 1), SCANNED),
    Program(pendulum, _angles, (0,), SCANNED),
)
