"""Generative models: diffusion, flow matching, normalizing flows, variational bounds, adversaries."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.numerics._networks import F32, mlp, mlp_weights
from tests.numerics._program import Program
from tests.numerics.flows import _plain, _with_noise

BATCH, WIDTH = 64, 8


STEPS = 1000


ALPHAS = np.cumprod(1.0 - np.linspace(1e-4, 0.02, STEPS)).astype(np.float32)


def _time_features(t):
    angles = t[:, None] * jnp.exp(-jnp.log(10000.0) * jnp.arange(8) / 8)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)


def _denoiser(params, x, t, dtype):
    """Predicts noise from a noised vector and a time in [0, 1000)."""
    return mlp(params, jnp.concatenate([x, _time_features(t)], -1), dtype)


def denoising(params, x, t, noise, *, dtype=F32):
    """The simple loss of DDPM, noise levels by a gather from a table."""
    alpha = jnp.asarray(ALPHAS)[t][:, None]
    noised = jnp.sqrt(alpha) * x + jnp.sqrt(1.0 - alpha) * noise
    return jnp.sum((_denoiser(params, noised, t.astype(F32), dtype) - noise) ** 2, -1)


def signal_weighted(params, x, t, noise, *, dtype=F32):
    """The bound's weights: ratios of signal to noise, of which two neighbours are subtracted."""
    ratio = jnp.asarray(ALPHAS) / (1.0 - jnp.asarray(ALPHAS))
    weight = 0.5 * (ratio[t - 1] - ratio[t])
    alpha = jnp.asarray(ALPHAS)[t][:, None]
    noised = jnp.sqrt(alpha) * x + jnp.sqrt(1.0 - alpha) * noise
    predicted = (noised - jnp.sqrt(1.0 - alpha) * _denoiser(params, noised, t.astype(F32), dtype)) / jnp.sqrt(alpha)
    return weight * jnp.sum((predicted - x) ** 2, -1)


def ancestral_sampler(params, x, noise, target, *, dtype=F32):
    """DDPM's sampler in a scan, differentiated as in fine-tuning by a reward."""
    times = jnp.arange(STEPS - 1, 0, -50)

    def step(x, inputs):
        t, noise = inputs
        alpha, before = jnp.asarray(ALPHAS)[t], jnp.asarray(ALPHAS)[jnp.maximum(t - 50, 0)]
        beta = 1.0 - alpha / before
        predicted = _denoiser(params, x, jnp.full(len(x), t, F32), dtype)
        mean = (x - beta / jnp.sqrt(1.0 - alpha) * predicted) / jnp.sqrt(1.0 - beta)
        return mean + jnp.sqrt(beta) * noise, None

    x, _ = lax.scan(step, x, (times, noise))
    return jnp.mean((x - target) ** 2, -1)


def multistep_sampler(params, x, target, *, dtype=F32):
    """A second-order multistep sampler (DPM-Solver++), written out: two terms, from this step and the last."""
    times = np.linspace(STEPS - 1, 20, 6).astype(int)
    alphas, sigmas = np.sqrt(ALPHAS[times]), np.sqrt(1.0 - ALPHAS[times])
    lambdas = np.log(alphas / sigmas)
    last = None
    for i in range(5):
        predicted = _denoiser(params, x, jnp.full(len(x), float(times[i])), dtype)
        clean = jnp.clip((x - sigmas[i] * predicted) / alphas[i], -5.0, 5.0)
        h = lambdas[i + 1] - lambdas[i]
        direction = clean if last is None else 1.5 * clean - 0.5 * last
        x = sigmas[i + 1] / sigmas[i] * x - alphas[i + 1] * np.expm1(-h) * direction
        last = clean
    return jnp.mean((x - target) ** 2, -1)


def preconditioned(params, x, noise, log_sigma, *, dtype=F32):
    """EDM: noise levels from 0.002 to 80, scalings that divide and multiply by them."""
    sigma = jnp.exp(log_sigma)[:, None]
    noised = x + sigma * noise
    norm = jnp.sqrt(sigma**2 + 0.25)
    out = _denoiser(params, noised / norm, 250.0 * log_sigma, dtype)
    denoised = 0.25 / norm**2 * noised + sigma * 0.5 / norm * out
    return jnp.sum((sigma**2 + 0.25) / (sigma * 0.5) ** 2 * (denoised - x) ** 2, -1)


def flow_matching(params, x, noise, t, *, dtype=F32):
    """Rectified flow: a velocity along a line."""
    between = (1.0 - t[:, None]) * noise + t[:, None] * x
    return jnp.sum((_denoiser(params, between, 1000.0 * t, dtype) - (x - noise)) ** 2, -1)


def euler_of_a_flow(params, x, target, *, dtype=F32):
    """Rectified flow's sampler, written out with guidance between two fields."""
    for i in range(4):
        t = jnp.full(len(x), 250.0 * i)
        strong, weak = _denoiser(params, x, t, dtype), _denoiser(params, 0.5 * x, t, dtype)
        x = x + 0.25 * (weak + 1.5 * (strong - weak))
    return jnp.mean((x - target) ** 2, -1)


def consistency(params, averages, x, noise, t, *, dtype=F32):
    """Consistency training: a student at one noise level, its average at the next, close to each other."""
    student = _denoiser(params, x + 0.05 * t[:, None] * noise, 10.0 * t, dtype)
    teacher = _denoiser(averages, x + 0.05 * (t[:, None] - 0.1) * noise, 10.0 * (t - 0.1), dtype)
    d = x + student - lax.stop_gradient(x + teacher)
    return jnp.sqrt(jnp.sum(d**2, -1) + 3e-4**2) - 3e-4


def score_matching(params, x, *, dtype=F32):
    """Hyvärinen's score matching: the trace of a Jacobian."""
    score = lambda x: mlp(params, x, dtype, jnp.tanh)
    trace = lambda x: jnp.trace(jax.jacfwd(score)(x))
    return jax.vmap(trace)(x) + 0.5 * jnp.sum(jax.vmap(score)(x) ** 2, -1)


def variational(params, x, noise, *, dtype=F32):
    """A variational autoencoder of brightness in [0, 255], discretized logistic likelihood."""
    mean, log_scale = jnp.split(mlp(params["encoder"], x / 127.5 - 1.0, dtype), 2, -1)
    z = mean + jnp.exp(0.5 * log_scale) * noise
    predicted = mlp(params["decoder"], z, dtype)
    centered = x / 127.5 - 1.0 - predicted
    upper, lower = (jax.nn.sigmoid(8.0 * (centered + d / 255.0)) for d in (1.0, -1.0))
    bits = -jnp.log(jnp.maximum(upper - lower, 1e-12))
    return jnp.sum(bits, -1) + 0.5 * jnp.sum(jnp.exp(log_scale) + mean**2 - 1.0 - log_scale, -1)


def gradient_penalty(params, x, noise, *, dtype=F32):
    """A Wasserstein critic with a penalty on the norm of its slope, and a factor that makes it large."""
    critic = lambda x: mlp(params, x, dtype, jax.nn.softplus)[..., 0]
    slope = jax.grad(lambda x: jnp.sum(critic(x)))(0.5 * (x + noise))
    return critic(noise) - critic(x) + 10.0 * (jnp.sqrt(jnp.sum(slope**2, -1) + 1e-12) - 1.0) ** 2


def energy_by_langevin(params, x, start, noise, *, dtype=F32):
    """An energy-based model: negative samples by Langevin dynamics in a loop that counts."""
    energy = lambda z: mlp(params, z, dtype, jax.nn.softplus)[..., 0] + 0.5 * jnp.sum(z**2, -1)
    slope = jax.grad(lambda z: jnp.sum(energy(z)))
    walk = lambda i, z: z - 0.005 * slope(z) + 0.1 * noise[i]
    sample = lax.stop_gradient(lax.fori_loop(0, len(noise), walk, start))
    return energy(x) - energy(sample)


def conditional_branch(params, x, noise, t, *, dtype=F32):
    """A loss with branches that read different things, as of curricula: a `cond` on the step."""

    def early(x, noise, t):
        return jnp.sum((mlp(params, x + noise, dtype) - 1000.0 * jnp.sin(t)[:, None]) ** 2, -1) / 1e3

    def late(x, noise, t):
        return jnp.sum((mlp(params, x, dtype) - noise) ** 2, -1)

    return lax.cond(t[0] > 2.0, late, early, x, noise, 900.0 + t) + lax.switch(
        (t[1] > 2.0).astype(jnp.int32), [lambda v: jnp.sin(500.0 * v), lambda v: jnp.zeros_like(v)], x[:, 0]
    )


def _denoising(rng):
    params = mlp_weights(rng, WIDTH + 16, 32, 32, WIDTH)
    return params, rng.normal(size=(BATCH, WIDTH)), rng.integers(1, STEPS, BATCH), rng.normal(size=(BATCH, WIDTH))


def _sampled(steps):
    def inputs(rng):
        params, x, _, target = _denoising(rng)
        return (params, x, rng.normal(size=(steps, BATCH, WIDTH)), target) if steps else (params, x, target)

    return inputs


def _levels(rng):
    params, x, _, noise = _denoising(rng)
    return params, x, noise, -1.2 + 1.2 * rng.normal(size=BATCH)


def _fractions(rng):
    return *_levels(rng)[:3], rng.random(BATCH)


def _consistent(rng):
    params, x, noise, t = _fractions(rng)
    averages = jax.tree.map(lambda p: p + 0.05 * rng.normal(size=p.shape), params)
    return params, averages, x, noise, 1.0 + t


def _brightness(rng):
    params = {"encoder": mlp_weights(rng, WIDTH, 32, 8), "decoder": mlp_weights(rng, 4, 32, WIDTH)}
    return params, rng.integers(0, 256, (BATCH, WIDTH)) * 1.0, rng.normal(size=(BATCH, 4))


def _walk(rng):
    params, x = _plain(1)(rng)
    return params, x, rng.normal(size=(BATCH, WIDTH)), rng.normal(size=(20, BATCH, WIDTH))


def _curriculum(rng):
    return *_plain()(rng), rng.normal(size=(BATCH, WIDTH)), rng.random(BATCH)


WRITTEN_OUT, SCANNED = "loops written out", "accumulators in loops"

PROGRAMS = (
    Program(denoising, _denoising, (0, 1)),
    Program(signal_weighted, _denoising, (0,), "differences"),
    Program(ancestral_sampler, _sampled(20), (0,), SCANNED, 2.0**-8),
    Program(multistep_sampler, _sampled(0), (0,), WRITTEN_OUT),
    Program(preconditioned, _levels, (0,)),
    Program(flow_matching, _fractions, (0,)),
    Program(euler_of_a_flow, _sampled(0), (0,), WRITTEN_OUT),
    Program(consistency, _consistent, (0, 1), "epsilons"),
    Program(score_matching, _plain(), (0,), "second derivatives"),
    Program(variational, _brightness, (0,)),
    Program(gradient_penalty, _with_noise(_plain(1)), (0,), "second derivatives"),
    Program(energy_by_langevin, _walk, (0,), SCANNED),
    Program(conditional_branch, _curriculum, (0,), "branches"),
)
