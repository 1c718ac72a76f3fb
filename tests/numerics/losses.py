"""Losses that are robust, rank, or compare: of targets that are large numbers, of boxes, of lists."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.numerics._networks import F32, cross_entropy, mlp, mlp_weights
from tests.numerics._program import Program

BATCH, WIDTH = 64, 16


def expectile_of_prices(params, x, prices, *, dtype=F32):
    """Asymmetric squares; prices in thousands."""
    e = prices - (mlp(params, x, dtype)[:, 0] + 2500.0)
    return jnp.where(e > 0, 0.9, 0.1) * e**2


def insensitive_of_kelvins(params, x, kelvins, *, dtype=F32):
    """A support vector regression: errors below a tenth of a degree are none."""
    e = 293.15 + mlp(params, x, dtype)[:, 0] - kelvins
    return jnp.maximum(jnp.abs(e) - 0.1, 0.0)


def biweight_of_depths(params, x, depths, *, dtype=F32):
    """Tukey's biweight, that outliers do not reach, of depths in millimetres."""
    e = (1500.0 + mlp(params, x, dtype)[:, 0] - depths) / 2.0
    return jnp.where(jnp.abs(e) <= 1.0, 1.0 - (1.0 - jnp.minimum(e * e, 1.0)) ** 3, 1.0)


def wing_of_landmarks(params, x, landmarks, *, dtype=F32):
    """Wing loss of points in pixels, around a mean face."""
    mean = jnp.linspace(80.0, 400.0, 10)
    e = jnp.abs(mlp(params, x, dtype) + mean - landmarks)
    return jnp.where(e < 2.0, 2.0 * jnp.log1p(e / 0.5), e - (2.0 - 2.0 * jnp.log1p(4.0)))


def huber_by_clip(params, x, years, *, dtype=F32):
    """Huber's loss as optax writes it: by a minimum and no select."""
    e = jnp.abs(mlp(params, x, dtype)[:, 0] + 1998.0 - years)
    quadratic = jnp.minimum(e, 1.0)
    return 0.5 * quadratic**2 + (e - quadratic)


def overlap_of_boxes(params, x, boxes, *, dtype=F32):
    """Generalized intersection over union of boxes in pixels, predicted as offsets of anchors."""
    anchors = jnp.array([200.0, 150.0, 420.0, 360.0])
    b = anchors + mlp(params, x, dtype)
    low, high = jnp.maximum(b[:, :2], boxes[:, :2]), jnp.minimum(b[:, 2:], boxes[:, 2:])
    inner = jnp.prod(jnp.clip(high - low, 0.0), -1)
    area = lambda b: jnp.prod(b[:, 2:] - b[:, :2], -1)
    union = area(b) + area(boxes) - inner
    hull = jnp.prod(jnp.maximum(b[:, 2:], boxes[:, 2:]) - jnp.minimum(b[:, :2], boxes[:, :2]), -1)
    return 1.0 - inner / union + (hull - union) / hull


def survival(params, x, days, observed, *, dtype=F32):
    """Cox's partial likelihood: a cumulative log-sum over patients sorted by time."""
    risk = mlp(params, x, dtype)[:, 0]
    order = jnp.argsort(-days)
    risk, observed = risk[order], observed[order]
    return jnp.where(observed, lax.cumlogsumexp(risk) - risk, 0.0)


def accelerated_failure(params, x, days, observed, *, dtype=F32):
    """A log-normal model of censored times."""
    z = (jnp.log(days) - (mlp(params, x, dtype)[:, 0] + 6.0)) / 0.5
    return jnp.where(observed, 0.5 * z**2 + jnp.log(days), -jax.scipy.stats.norm.logsf(z))


def list_mle(params, x, relevance, *, dtype=F32):
    """Likelihood of a ranking: scores in the order of relevance."""
    scores = mlp(params, x, dtype)[..., 0]
    scores = jnp.take_along_axis(scores, jnp.argsort(-relevance, -1), -1)
    return lax.cumlogsumexp(scores, 1, reverse=True) - scores


def discounted_gain(params, x, relevance, *, dtype=F32):
    """LambdaRank: pairs weighed by the change of their discounts, which come from ranks of scores."""
    scores = 20.0 + mlp(params, x, dtype)[..., 0]
    ranks = jnp.argsort(jnp.argsort(-lax.stop_gradient(scores), -1), -1)
    discount = 1.0 / jnp.log2(2.0 + ranks)
    weight = jnp.abs((relevance[:, :, None] - relevance[:, None]) * (discount[:, :, None] - discount[:, None]))
    better = relevance[:, :, None] > relevance[:, None]
    return jnp.sum(jnp.where(better, weight * jax.nn.softplus(scores[:, None] - scores[:, :, None]), 0.0), -1)


def worst_tail(params, x, y, *, dtype=F32):
    """Conditional value at risk: the mean of the worst quarter, by a sort of losses with their weights."""
    e = jnp.square(mlp(params, x, dtype)[:, 0] + 100.0 - y)
    sorted_e, weights = lax.sort((e, jnp.linspace(0.5, 1.5, e.size)), num_keys=1)
    return (sorted_e * weights)[-e.size // 4 :]


def triplets(params, x, positive, negative, *, dtype=F32):
    """A margin between distances."""
    a, p, n = (mlp(params, v, dtype) for v in (x, positive, negative))
    distance = lambda u, v: jnp.sqrt(jnp.sum((u - v) ** 2, -1) + 1e-12)
    return jax.nn.relu(distance(a, p) - distance(a, n) + 1.0)


def simclr(params, x, *, dtype=F32):
    """Contrastive loss at a low temperature, the example itself masked by the least number."""
    z = mlp(params, x, dtype)
    z = z / (jnp.linalg.norm(z, axis=-1, keepdims=True) + 1e-8)
    scores = (z.astype(dtype) @ z.T.astype(dtype)).astype(F32) / 0.07
    scores = jnp.where(jnp.eye(len(z), dtype=bool), jnp.finfo(F32).min, scores)
    return cross_entropy(scores, jnp.arange(len(z)) ^ 1)


def barlow_twins(params, x, y, *, dtype=F32):
    """Cross correlation of features, normalized over the batch."""
    a, b = (mlp(params, v, dtype) for v in (x, y))
    a, b = ((v - v.mean(0)) / (v.std(0) + 1e-9) for v in (a, b))
    c = (a.astype(dtype).T @ b.astype(dtype)).astype(F32) / len(a)
    off = c - jnp.eye(len(c))
    return jnp.sum(jnp.where(jnp.eye(len(c), dtype=bool), off**2, 5e-3 * off**2), 0)


def vicreg(params, x, y, *, dtype=F32):
    """Invariance, a hinge on deviations, and covariances."""
    a, b = (mlp(params, v, dtype) for v in (x, y))
    a, b = a - a.mean(0), b - b.mean(0)
    hinge = sum(jax.nn.relu(1.0 - jnp.sqrt(v.var(0) + 1e-4)) for v in (a, b))
    cov = [(v.astype(dtype).T @ v.astype(dtype)).astype(F32) / (len(v) - 1) for v in (a, b)]
    off = sum(jnp.sum(jnp.where(jnp.eye(len(c), dtype=bool), 0.0, c**2), 0) for c in cov)
    return 25.0 * jnp.mean((a - b) ** 2, 0) + 25.0 * hinge + off


def dice(params, x, mask, *, dtype=F32):
    """Overlap of masks, an epsilon in numerator and denominator."""
    p = jax.nn.sigmoid(mlp(params, x, dtype))
    return 1.0 - (2.0 * jnp.sum(p * mask, -1) + 1e-8) / (jnp.sum(p, -1) + jnp.sum(mask, -1) + 1e-8)


def mixture_density(params, x, y, *, dtype=F32):
    """A mixture of Gaussians around years."""
    logits, means, log_scales = jnp.split(mlp(params, x, dtype), 3, -1)
    z = (y[:, None] - 1990.0 - means) * jnp.exp(-log_scales)
    return -jax.nn.logsumexp(jax.nn.log_softmax(logits) - 0.5 * z**2 - log_scales, -1)


def poisson_counts(params, x, counts, exposure, *, dtype=F32):
    """A count model with an offset: means in the thousands."""
    rate = mlp(params, x, dtype)[:, 0] * 0.1 + jnp.log(exposure)
    return jnp.exp(rate) - counts * rate + lax.lgamma(counts + 1.0)


def _regression(center, spread=3.0, out=1):
    def inputs(rng):
        targets = center + spread * rng.normal(size=(BATCH, out) if out > 1 else BATCH)
        return mlp_weights(rng, WIDTH, 32, out), rng.normal(size=(BATCH, WIDTH)), targets

    return inputs


def _landmarks(rng):
    params, x, _ = _regression(0.0, out=10)(rng)
    return params, x, np.linspace(80.0, 400.0, 10) + 3 * rng.normal(size=(BATCH, 10))


def _boxes(rng):
    params, x, noise = _regression(0.0, 6.0, out=4)(rng)
    return params, x, np.array([200.0, 150.0, 420.0, 360.0]) + noise


def _patients(rng):
    params, x, _ = _regression(0.0)(rng)
    return params, x, np.exp(6 + 0.6 * rng.normal(size=BATCH)), rng.random(BATCH) < 0.6


def _lists(rng):
    return mlp_weights(rng, WIDTH, 32, 1), rng.normal(size=(16, 24, WIDTH)), rng.normal(size=(16, 24))


def _views(n):
    def inputs(rng):
        x = rng.normal(size=(BATCH, WIDTH))
        near = [x + 0.3 * rng.normal(size=x.shape) for _ in range(n - 1)]
        return mlp_weights(rng, WIDTH, 32, 24), x, *near

    return inputs


def _pairs(rng):
    x = np.repeat(rng.normal(size=(BATCH // 2, WIDTH)), 2, 0)
    return mlp_weights(rng, WIDTH, 32, 24), x + 0.3 * rng.normal(size=x.shape)


def _masks(rng):
    params, x, _ = _regression(0.0, out=48)(rng)
    return params, x, rng.random((BATCH, 48)) < 0.1


def _mixture(rng):
    return mlp_weights(rng, WIDTH, 32, 15), rng.normal(size=(BATCH, WIDTH)), 1990 + rng.normal(size=BATCH)


def _counts(rng):
    exposure = np.exp(7 + rng.normal(size=BATCH))
    return mlp_weights(rng, WIDTH, 32, 1), rng.normal(size=(BATCH, WIDTH)), rng.poisson(exposure) * 1.0, exposure


COMPARED, SORTED = "what only comparisons read", "keys of sorts"
PROGRAMS = (
    Program(expectile_of_prices, _regression(2500.0), (0, 1), COMPARED),
    Program(insensitive_of_kelvins, _regression(293.15), (0, 1), COMPARED),
    Program(biweight_of_depths, _regression(1500.0, 1.5), (0, 1), COMPARED),
    Program(wing_of_landmarks, _landmarks, (0, 1), COMPARED),
    Program(huber_by_clip, _regression(1998.0), (0, 1), COMPARED),
    Program(overlap_of_boxes, _boxes, (0, 1), COMPARED),
    Program(survival, _patients, (0, 1), SORTED),
    Program(accelerated_failure, _patients, (0, 1), COMPARED),
    Program(list_mle, _lists, (0, 1), SORTED),
    Program(discounted_gain, _lists, (0, 1), SORTED),
    Program(worst_tail, _regression(100.0, 1.0), (0, 1), SORTED),
    Program(triplets, _views(3), (0, 1, 2), "epsilons"),
    Program(simclr, _pairs, (0, 1), "masks"),
    Program(barlow_twins, _views(2), (0, 1, 2), "epsilons"),
    Program(vicreg, _views(2), (0, 1, 2)),
    Program(dice, _masks, (0, 1), "epsilons"),
    Program(mixture_density, _mixture, (0, 1)),
    Program(poisson_counts, _counts, (0, 1)),
)
