"""Means, covariances and cross moments: of the data, of features, of two parts of one array, of a path."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.numerics._networks import F32, dense, matmul, mlp, mlp_weights
from tests.numerics._program import Program

BATCH, WIDTH = 48, 16


def mean_by_factor(params, x, *, dtype=F32):
    """Pooled features: the sum over the rows, times one over how many there are."""
    h = jnp.tanh(dense(params[0], x, dtype)).astype(F32).reshape(-1, 6, WIDTH)
    pooled = h.sum(1) * (1 / 6)
    return jnp.square(h - pooled[:, None]).sum(1) @ jnp.ones(WIDTH) * (1 / 96)


def weighted_mean(params, x, weights, *, dtype=F32):
    """Means by given weights, and how far from these the features are."""
    h = 3 + mlp(params, x, dtype)
    share = weights / weights.sum()
    mean = share @ h
    return jnp.sum(share[:, None] * (h - mean) ** 2, 0)


def mean_of_products(params, x, *, dtype=F32):
    """A Gram matrix of features over a number that half does not hold, as in style losses."""
    h = mlp(params, x, dtype)
    gram = matmul(h.T, h, dtype) * (1 / 48)
    return jnp.square(gram - jnp.diag(jnp.diag(gram))).sum(1)


def parts_of_one(params, x, *, dtype=F32):
    """The covariance of two parts of one array of features, as a mean of products less the product of means."""
    h = 3 + 0.3 * mlp(params, x, dtype)
    a, b = h[:, :4], h[:, 4:]
    cross = a.T @ b / len(h) - jnp.outer(a.mean(0), b.mean(0))
    return jnp.sum(cross**2, 1)


def parts_of_data(params, x, *, dtype=F32):
    """The same of data that is weighted, through a jitted function: the projection that is most correlated."""

    @jax.jit
    def covariance(a, b):
        return jnp.einsum("ni,nj->ij", a, b) * (1 / len(a)) - a.mean(0)[:, None] * b.mean(0)

    z = x + 4
    a, b = z[:, :8] * params["scale"], z[:, 8:]
    u, v = params["u"], params["v"]
    cross = covariance(a, b)
    return (u @ (cross @ v)) / jnp.sqrt((u @ (covariance(a, a) @ u)) * (v @ (covariance(b, b) @ v)))


def lagged(params, x, *, dtype=F32):
    """Autocovariances of a path at several lags: slices of one array, shifted."""
    path = 5 + 0.2 * jnp.tanh(mlp(params, x, dtype))

    def at(lag):
        early, late = path[: len(path) - lag], path[lag:]
        return early.T @ late / len(early) - early.mean(0)[:, None] * late.mean(0)

    return jnp.stack([jnp.sum(at(lag) ** 2) for lag in range(1, 6)])


def by_scan(params, x, *, dtype=F32):
    """First and second moments of batches, added up in a scan, and the covariance from them."""
    h = 3 + 0.3 * mlp(params, x, dtype)

    def add(state, rows):
        first, second = state
        return (first + rows.sum(0), second + rows.T @ rows), None

    width = h.shape[1]
    (first, second), _ = lax.scan(add, (jnp.zeros(width), jnp.zeros((width, width))), h.reshape(6, 8, width))
    mean = first / len(h)
    return jnp.sum((second / len(h) - jnp.outer(mean, mean)) ** 2, 1)


def canonical(params, x, *, dtype=F32):
    """Correlation alignment: the covariances of two sets of features, centred by what both are made of."""
    a, b = jnp.split(2 + 0.5 * mlp(params, x, dtype), 2, axis=0)
    n = len(a)

    def covariance(a):
        total = a.sum(0, keepdims=True)
        return (a.T @ a - total.T @ total / n) / (n - 1)

    return jnp.sum((covariance(a) - covariance(b)) ** 2, 1)


def mixture(params, x, *, dtype=F32):
    """The covariances of a mixture's components, by the share that each has of each row: a step of its fit."""
    h = 2 + 0.5 * mlp(params[0], x, dtype)
    share = jax.nn.softmax(dense(params[1], jnp.tanh(x), dtype).astype(F32), -1)

    def moments(share):
        mean = share @ h / share.sum()
        return (h * share[:, None]).T @ h / share.sum() - jnp.outer(mean, mean)

    spread = jax.vmap(moments, 1)(share) + 0.1 * jnp.eye(h.shape[1])
    return jnp.linalg.slogdet(spread)[1]


def windowed(params, x, *, dtype=F32):
    """Cross-correlations of two signals within windows, by vmap."""
    signals = 2 + 0.2 * mlp(params, x, dtype)
    a, b = signals[:, 0].reshape(6, 8), signals[:, 1].reshape(6, 8)

    def one(a, b):
        cross = jnp.dot(a, b) / 8 - a.mean() * b.mean()
        return cross / jnp.sqrt((jnp.dot(a, a) / 8 - a.mean() ** 2) * (jnp.dot(b, b) / 8 - b.mean() ** 2) + 1e-6)

    return jax.vmap(one)(a, b)


def nearest_features(params, x, y, *, dtype=F32):
    """Distances between features of two sets by a product: a soft nearest neighbour."""
    a, b = 3 + mlp(params, x, dtype), 3 + mlp(params, y, dtype)
    square = jnp.sum(a * a, 1)[:, None] + jnp.sum(b * b, 1) - 2 * a @ b.T
    return jax.nn.logsumexp(-square, 1)


def radial_basis(params, x, target, *, dtype=F32):
    """Radial features of data far from zero: learned centres and widths."""
    centres, scales, weights = params["centres"], jnp.exp(params["scales"]), params["weights"]
    z, c = (x + 4) * scales, (centres + 4) * scales
    square = jnp.sum(z**2, 1, keepdims=True) - 2 * jnp.einsum("nd,md->nm", z, c) + jnp.sum(c**2, 1)
    return jnp.square(matmul(jnp.exp(-square / 16), weights, dtype) - target)


def regression(params, x, target, *, dtype=F32):
    """Ridge regression on features: the prediction's error."""
    h = jnp.tanh(mlp(params, x, dtype))
    weights = jnp.linalg.solve(h.T @ h + 0.1 * jnp.eye(h.shape[1]), h.T @ target)
    return jnp.square(h @ weights - target)


def process(params, x, target, *, dtype=F32):
    """The likelihood of a Gaussian process whose kernel is of distances between features."""
    h = 2 + mlp(params, x, dtype)
    square = jnp.sum(h * h, 1)[:, None] + jnp.sum(h * h, 1) - 2 * h @ h.T
    factor = jnp.linalg.cholesky(jnp.exp(-square) + 0.1 * jnp.eye(len(x)))
    left = jax.scipy.linalg.solve_triangular(factor, target, lower=True)
    return left**2 + jnp.log(jnp.diag(factor))


def whitening(params, x, *, dtype=F32):
    """Features made white by their own covariance, and their kurtosis."""
    h = mlp(params, x, dtype)
    mean = h.mean(0)
    covariance = h.T @ h / len(h) - jnp.outer(mean, mean) + 0.01 * jnp.eye(h.shape[1])
    white = jax.scipy.linalg.solve_triangular(jnp.linalg.cholesky(covariance), (h - mean).T, lower=True)
    return jnp.mean(white**4, 1)


def _features(out):
    return lambda rng: (mlp_weights(rng, WIDTH, 32, out), rng.normal(size=(BATCH, WIDTH)))


def _with_target(out, *shape):
    return lambda rng: (*_features(out)(rng), rng.normal(size=shape))


def _projected(rng):
    params = {"scale": 1 + 0.1 * rng.normal(size=8), "u": rng.normal(size=8), "v": rng.normal(size=8)}
    shared = rng.normal(size=(BATCH, 8))
    return params, 0.3 * np.concatenate([shared, shared + 0.5 * rng.normal(size=(BATCH, 8))], 1)


def _mixed(rng):
    params = mlp_weights(rng, WIDTH, 32, 4), mlp_weights(rng, WIDTH, 6)[0]
    return params, rng.normal(size=(BATCH, WIDTH))


def _basis(rng):
    params = {"centres": rng.normal(size=(24, 8)), "scales": 0.1 * rng.normal(size=8), "weights": rng.normal(size=24)}
    return params, rng.normal(size=(BATCH, 8)), rng.normal(size=BATCH)


MEANS, MOMENTS, DISTANCES, SYSTEMS = "means", "moments", "distances by products", "Gram systems"

PROGRAMS = (
    Program(mean_by_factor, _features(8), (0, 1), MEANS),
    Program(weighted_mean, lambda rng: (*_features(8)(rng), rng.uniform(0.5, 1.5, size=BATCH)), (0, 1), MEANS),
    Program(mean_of_products, _features(8), (0, 1), MEANS),
    Program(parts_of_one, _features(8), (0, 1), MOMENTS),
    Program(parts_of_data, _projected, (0, 1), MOMENTS),
    Program(lagged, _features(6), (0, 1), MOMENTS),
    Program(by_scan, _features(8), (0, 1), MOMENTS),
    Program(canonical, _features(8), (0, 1), MOMENTS),
    Program(mixture, _mixed, (0, 1), MOMENTS),
    Program(windowed, _features(2), (0, 1), MOMENTS),
    Program(nearest_features, _with_target(8, 20, WIDTH), (0, 1, 2), DISTANCES),
    Program(radial_basis, _basis, (0, 1), DISTANCES),
    Program(regression, _with_target(8, BATCH), (0, 1), SYSTEMS),
    Program(process, _with_target(4, BATCH), (0, 1), SYSTEMS),
    Program(whitening, _features(6), (0, 1), SYSTEMS),
)
