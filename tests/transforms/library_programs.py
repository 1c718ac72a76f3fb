"""Parts of random programs as libraries have them: linear algebra, special functions, norms, phases, places, averages.

As in `programs.py` every operation keeps values and slopes of the order of one. What some of them go by way of is much
larger or smaller, or has more digits than half.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy import special

from tests.transforms.delicate_programs import COLUMNS, INDEX, ROWS, SHAPE, keys

_ORDER = np.array([1, 3, 0, 2])  # The largest is not the first, which wins where half makes a tie.
_NUMBERS = ("NHWC", "HWIO", "NHWC")


def _near_two(m: Any) -> Any:
    """A symmetric matrix with eigenvalues around 2, which data move a little."""
    a = 0.1 * jnp.tanh(m.T @ m / 4)
    return 2.0 * jnp.eye(COLUMNS, dtype=m.dtype) + a + a.T


def _apart(m: Any) -> Any:
    """The same with eigenvalues that lie apart."""
    return _near_two(m) + np.diag(np.arange(4, dtype=np.float32))


def _image(m: Any) -> Any:
    return jnp.stack([m, 0.5 * m, -m, m], -1).reshape(1, ROWS, COLUMNS, 4)


def _conv2d(m: Any, w: Any) -> Any:
    kernel = jnp.stack([w, w.T, 0.5 * w, -w]).reshape(2, 2, 4, 4)
    return lax.conv_general_dilated(_image(m), kernel, (1, 1), "SAME", dimension_numbers=_NUMBERS)[0].mean(-1)


def _depthwise(m: Any, w: Any) -> Any:
    options = {"dimension_numbers": _NUMBERS, "feature_group_count": 4}
    return lax.conv_general_dilated(_image(m), w.reshape(2, 2, 1, 4), (1, 1), "SAME", **options)[0].sum(-1) / 2


def _conv_transpose(m: Any, w: Any) -> Any:
    kernel, numbers = jnp.stack([w, w.T]), ("NHC", "HIO", "NHC")
    return lax.conv_transpose(m[None], kernel, (2,), "SAME", dimension_numbers=numbers)[0, :3]


def _max_pool(m: Any) -> Any:
    return lax.reduce_window(m, -jnp.inf, lax.max, (1, 2), (1, 1), "SAME")


def _top_p(m: Any, n: Any) -> Any:
    of_m = keys(m, _ORDER)
    return jnp.where(of_m >= jnp.sort(of_m, 1)[:, 1:2], n, 0.0)


def _positions(m: Any) -> Any:
    """Rows that are taken at places that are counted in float32."""
    places = jnp.cumsum(jnp.ones(2051, m.dtype))[-ROWS:] - 2049.0
    return m[places.astype(jnp.int32)]


def _rotate(m: Any) -> Any:
    """Rotary embeddings at positions around 5,000."""
    angles = (5000.0 + jnp.arange(ROWS, dtype=m.dtype))[:, None] * (10000.0 ** -(jnp.arange(2, dtype=m.dtype) / 2))
    a, b = m[:, :2], m[:, 2:]
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)], 1)


def _embed_time(m: Any, n: Any) -> Any:
    times = jnp.linspace(0.0, 1.0, ROWS, dtype=m.dtype) * 1000.0
    frequencies = jnp.exp(-np.log(10000.0) * jnp.arange(2, dtype=m.dtype) / 2)
    angles = times[:, None] * frequencies
    return n + 0.5 * jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], 1)


def _layer_norm_offset(m: Any, v: Any) -> Any:
    x = m + 300.0
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1.0) * v


def _moments_offset(m: Any, n: Any) -> Any:
    x = m + 4.0
    return n / (1.0 + (x * x).mean() - x.mean() ** 2)


def _cross_entropy(m: Any, n: Any) -> Any:
    losses = -jnp.take_along_axis(jax.nn.log_softmax(4 * m), INDEX[:, None], 1)
    return n - losses / 8


def _transmittance(m: Any, n: Any) -> Any:
    alpha = 1.0 - jnp.exp(-jax.nn.softplus(m))
    through = jnp.cumprod(1.0 - alpha + 1e-10, -1)
    return (alpha * jnp.concatenate([jnp.ones((ROWS, 1), m.dtype), through[:, :-1]], -1)) * n


def _decay(m: Any) -> Any:
    """An average over 50 steps with the bias of its start taken out."""

    def step(mean: Any, _: Any) -> Any:
        return 0.999 * mean + 0.001 * m, None

    return lax.scan(step, jnp.zeros_like(m), None, length=50)[0] / (1.0 - 0.999**50)


def _decay_counted(m: Any) -> Any:
    def step(carry: Any, _: Any) -> Any:
        mean, power = carry
        return (0.999 * mean + 0.001 * m, power * 0.999), None

    mean, power = lax.scan(step, (jnp.zeros_like(m), jnp.ones((), m.dtype)), None, length=50)[0]
    return mean / (1.0 - power)


def _count_up(m: Any, n: Any) -> Any:
    total = lax.fori_loop(0, 60, lambda i, t: t + 0.01 * jnp.tanh(m), jnp.full(SHAPE, 1000.0, m.dtype))
    return n + 0.5 * (total - 1000.0)


def _straight_through(m: Any) -> Any:
    return m + lax.stop_gradient(0.5 * m - m)


def _distances(m: Any, n: Any) -> Any:
    d = (m**2).sum(-1)[:, None] + (n**2).sum(-1)[None] - 2 * m @ n.T
    return jnp.exp(-jnp.maximum(d, 0.0) / 8) @ n


def _distances_apart(m: Any, n: Any) -> Any:
    a, b = m + 100.0, n + 100.0
    d = ((a[:, None] - b[None]) ** 2).sum(-1)
    return jnp.exp(-d / 8) @ n


def _sinkhorn(m: Any, n: Any) -> Any:
    f = g = jnp.zeros(ROWS, m.dtype)
    cost = jnp.tanh(m @ n.T / 4)
    for _ in range(3):
        f = -jax.nn.logsumexp(g[None] - cost, axis=1)
        g = -jax.nn.logsumexp(f[:, None] - cost, axis=0)
    return jnp.exp(f[:, None] + g[None] - cost) @ n


def _bits(m: Any, n: Any) -> Any:
    sign = lax.bitcast_convert_type(m, jnp.int32 if m.dtype == jnp.float32 else jnp.int64)
    return n + 0.0 * lax.stop_gradient(lax.bitcast_convert_type(sign, m.dtype)) + 0.5 * m


def _crf(m: Any, w: Any) -> Any:
    def step(alpha: Any, x: Any) -> Any:
        alpha = jax.nn.logsumexp(alpha[:, None] + 0.5 * jnp.tanh(w), axis=0) + x
        return alpha, alpha

    alpha, all_ = lax.scan(step, m[0], m)
    return all_ - jax.nn.logsumexp(alpha)


def _count_marked(m: Any, n: Any) -> Any:
    mask = (jnp.arange(600) % 2 == 0).astype(m.dtype)
    return n * (mask.sum() / 300.0) + 0.5 * m


def _linear_time(m: Any, n: Any) -> Any:
    t = 1000.0 + 0.01 * jnp.arange(COLUMNS, dtype=m.dtype)
    return n * ((t[1:] - t[:-1]) / 0.01)[:1] + 0.5 * m


LIBRARY_OPERATIONS: dict[str, Callable[..., jax.Array]] = {
    "acos": lambda m, n, v, w: jnp.arccos(0.5 * jnp.tanh(m)) * 0.5 + 0.5 * n,
    "argmax": lambda m, n, v, w: jnp.take_along_axis(n, jnp.argmax(keys(m, _ORDER), 1)[:, None], 1) + 0.5 * m,
    "atan2": lambda m, n, v, w: jnp.arctan2(m, 4.0 + jnp.tanh(n)),
    "bits": lambda m, n, v, w: _bits(m, n),
    "cbrt": lambda m, n, v, w: jnp.cbrt(4.0 + jnp.tanh(m)),
    "cholesky": lambda m, n, v, w: n @ jnp.linalg.cholesky(_near_two(m)) / 2,
    "clip_norm": lambda m, n, v, w: m / jnp.maximum(1.0, jnp.sqrt(jnp.sum(jnp.square(m)))),
    "conv2d": lambda m, n, v, w: _conv2d(m, w),
    "conv_transpose": lambda m, n, v, w: _conv_transpose(m, w) / 2,
    "cosine": lambda m, n, v, w: n * (m + 8.0) / jnp.linalg.norm(m + 8.0, axis=-1, keepdims=True),
    "count_marked": lambda m, n, v, w: _count_marked(m, n),
    "count_up": lambda m, n, v, w: _count_up(m, n),
    "crf": lambda m, n, v, w: _crf(m, w) / 2,
    "cross_entropy": lambda m, n, v, w: _cross_entropy(m, n),
    "cummin": lambda m, n, v, w: n + 0.5 * lax.stop_gradient(lax.cummin(m, 1)),
    "cumprod": lambda m, n, v, w: jnp.cumprod(1.0 - 0.2 * jax.nn.sigmoid(m), 1),
    "decay": lambda m, n, v, w: _decay(m),
    "decay_counted": lambda m, n, v, w: _decay_counted(m),
    "depthwise": lambda m, n, v, w: _depthwise(m, w),
    "det": lambda m, n, v, w: n * jnp.linalg.det(_near_two(m) / 2),
    "digamma": lambda m, n, v, w: special.digamma(3.0 + jnp.tanh(m)) + 0.5 * n,
    "distances": lambda m, n, v, w: _distances(m, n),
    "distances_apart": lambda m, n, v, w: _distances_apart(m, n),
    "eigh": lambda m, n, v, w: n + 0.5 * jnp.linalg.eigh(_apart(m))[0],
    "embed_time": lambda m, n, v, w: _embed_time(m, n),
    "entropy": lambda m, n, v, w: n + special.entr(jax.nn.softmax(m)).sum(-1, keepdims=True) / 2,
    "equal": lambda m, n, v, w: jnp.where(keys(m, _ORDER) == keys(m, _ORDER).max(-1, keepdims=True), n, m),
    "erf_inv": lambda m, n, v, w: special.erfinv(0.5 * jnp.tanh(m)) + 0.5 * n,
    "expm": lambda m, n, v, w: n @ jax.scipy.linalg.expm(0.1 * jnp.tanh(w)),
    "expm1": lambda m, n, v, w: jnp.expm1(1e-6 * m) * 1e6,
    "histogram": lambda m, n, v, w: n + jnp.zeros(COLUMNS, m.dtype).at[jnp.arange(600) % 3].add(1.0)[:3, None] / 200,
    "hypot": lambda m, n, v, w: jnp.hypot(m, 1.0 + jnp.tanh(n)),
    "i0e": lambda m, n, v, w: n * special.i0e(m),
    "igamma": lambda m, n, v, w: n * special.gammainc(2.0, 1.5 + jnp.tanh(lax.stop_gradient(m))),
    "inv": lambda m, n, v, w: 2 * n @ jnp.linalg.inv(_near_two(m)),
    "layer_norm_offset": lambda m, n, v, w: _layer_norm_offset(m, v),
    "linear_time": lambda m, n, v, w: _linear_time(m, n),
    "log1p": lambda m, n, v, w: jnp.log1p(1e-6 * m) * 1e6,
    "logaddexp": lambda m, n, v, w: jnp.logaddexp(m, n) / 2,
    "logsumexp_shifted": lambda m, n, v, w: n + (jax.nn.logsumexp(m - 1000.0, -1, keepdims=True) + 1000.0) / 2,
    "lstsq": lambda m, n, v, w: jnp.linalg.lstsq(lax.stop_gradient(_near_two(m)), n.T)[0].T,
    "lu": lambda m, n, v, w: jax.scipy.linalg.lu_solve(jax.scipy.linalg.lu_factor(_near_two(m)), n.T).T,
    "matrix_power": lambda m, n, v, w: n @ jnp.linalg.matrix_power(w, 3),
    "max_pool": lambda m, n, v, w: n + 0.5 * lax.stop_gradient(_max_pool(m)),
    "median": lambda m, n, v, w: n + 0.5 * lax.stop_gradient(jnp.median(m, axis=-1, keepdims=True)),
    "modulo": lambda m, n, v, w: n * ((jnp.arange(3, dtype=m.dtype) * 1001.0) % 7.0)[:, None] / 7,
    "moments_offset": lambda m, n, v, w: _moments_offset(m, n),
    "norm_large": lambda m, n, v, w: n + jnp.sqrt(jnp.sum((m * 3e3) ** 2, -1, keepdims=True) + 9e6) / 6e3,
    "norm_small": lambda m, n, v, w: n + jnp.sqrt(jnp.sum((m * 1e-5) ** 2, -1, keepdims=True) + 1e-10) * 5e4,
    "positions": lambda m, n, v, w: _positions(m),
    "qr": lambda m, n, v, w: n @ jnp.linalg.qr(lax.stop_gradient(_near_two(m)))[0],
    "rms_norm": lambda m, n, v, w: m * lax.rsqrt((m * m).mean(-1, keepdims=True) + 1.0) * v,
    "rotate": lambda m, n, v, w: _rotate(m),
    "round": lambda m, n, v, w: n * (jnp.round(jnp.arange(3, dtype=m.dtype) * 341.3) / 700.0)[:, None],
    "searchsorted": lambda m, n, v, w: n[jnp.searchsorted(jnp.array([0.5, 1001.5]), 1000.0 + jnp.arange(3.0))],
    "shift_off": lambda m, n, v, w: n + 0.5 * ((m + 1000.0) - 1000.0),
    "sinkhorn": lambda m, n, v, w: _sinkhorn(m, n),
    "slogdet": lambda m, n, v, w: n + 0.25 * jnp.linalg.slogdet(_near_two(m))[1],
    "softplus": lambda m, n, v, w: jax.nn.softplus(m),
    "solve_dense": lambda m, n, v, w: 2 * jnp.linalg.solve(_near_two(m), n.T).T,
    "std": lambda m, n, v, w: n / (1.0 + jnp.sqrt(m.var(-1, keepdims=True) + 1.0)),
    "straight_through": lambda m, n, v, w: _straight_through(m),
    "svd": lambda m, n, v, w: n + 0.25 * jnp.linalg.svd(_apart(m), compute_uv=False),
    "three_operands": lambda m, n, v, w: jnp.einsum("ij,jk,lk->il", jnp.tanh(m), w, w),
    "top_p": lambda m, n, v, w: _top_p(m, n),
    "transmittance": lambda m, n, v, w: _transmittance(m, n),
    "triangular": lambda m, n, v, w: lax.linalg.triangular_solve(_near_two(m), n, lower=True),
    "xlogy": lambda m, n, v, w: special.xlogy(jax.nn.sigmoid(m), jax.nn.sigmoid(n) + 1e-12),
}
