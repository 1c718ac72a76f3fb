"""Products with exponentials that float16 has no range for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import find, trace


def kernel(a, b):
    return jnp.exp(-jnp.sum((a[:, None] - b[None]) ** 2, -1) / 2)


def mean_shift(points, z, y):
    def step(points, _):
        k = kernel(points, z)
        return k @ z / k.sum(1, keepdims=True), None

    return lax.scan(step, points, None, length=3)[0]


def of_one(point, z, y):
    k = jnp.exp(-jnp.sum((point - z) ** 2, -1) / 2)
    return k @ y / k.sum()


def of_some(points, z, y):
    k = jnp.where(points[:, :1] > z[:, 0], 1.0, 0.5) * kernel(points, z)
    return k @ y * (1 / (k.sum(1)[:, None] + 1e-20))


def features(points, z, y):
    """Linear attention whose features are exponentials."""
    q, k = jnp.exp(points), jnp.exp(5 * z)
    return q @ (k.T @ y) / (q @ k.sum(0))[:, None]


def performer(points, z, y):
    def of(x):
        return (jnp.concatenate([jnp.exp(3 * x), jnp.exp(-3 * x)], 1) + 1e-6) / 4.0

    return of(points) @ (of(z).T @ y) / (of(points) @ of(z).sum(0))[:, None]


# Rows of `exp(-d / 2)` are as small as points are far from all others, where float16 has nothing.
KERNELS = {
    "a regression": lambda points, z, y: kernel(points, z) @ y / kernel(points, z).sum(1)[:, None],
    "its logarithm": lambda points, z, y: jnp.log(kernel(points, z) @ jnp.abs(y)),
    "transposed": lambda points, z, y: jnp.einsum("ij,jd->di", kernel(points, z), y) / kernel(points, z).sum(1),
    "of layers": lambda points, z, y: kernel(points, z) @ (z @ y.T @ y / 32) / kernel(points, z).sum(1)[:, None],
    "weighted": of_some,
    "mapped": lambda points, z, y: jax.vmap(of_one, (0, None, None))(points, z, y),
    "features": features,
    "features that are scaled": performer,
    "mean shift": mean_shift,
    "scalings in functions": lambda points, z, y: jnp.log1p(
        (kernel(points, z) @ jax.jit(lambda y: jnp.exp(4 * y))(y)) ** 2
    ),
    "scalings": lambda points, z, y: y[:16] * jnp.log1p((kernel(points, z) @ jnp.exp(4 * y)) ** 2),
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("policy", ["OD:float16", "O1:float16", "O2:float16"])
@pytest.mark.parametrize("program", KERNELS.values(), ids=KERNELS)
def test_products_of_kernels(program, policy):
    """Values were up to 25 % off, and gradients infinite."""
    rows, y = 1.7 * jax.random.normal(jax.random.key(0), (16, 8)), jax.random.normal(jax.random.key(1), (32, 8))
    x, w = jax.random.normal(jax.random.key(2), (32, 8)), 0.35 * jax.random.normal(jax.random.key(3), (8, 8))
    loss = lambda rows, w: jnp.sum(program(rows, x @ w, y) ** 2)  # noqa: E731
    results = [jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(rows, w) for fn in (loss, jamp.cast_fn(loss, policy))]
    for expected, actual in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.all(np.isfinite(expected))
        assert np.linalg.norm(actual - expected) <= 1e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize("take", [lambda s: s, lax.stop_gradient, jax.jit(lambda s: s)])
def test_a_softmax_that_is_divided_after_the_product_is_half(take):
    def attend(q, z, y):
        scores = q @ z.T
        e = jnp.exp(scores - take(scores.max(1, keepdims=True)))
        return e @ y / e.sum(1, keepdims=True)

    products = find(trace(jamp.cast_fn(attend, "O2:float16"), *[jnp.ones((16, 8))] * 3), "dot_general")
    assert [{str(atom.aval.dtype) for atom in eqn.invars} for eqn in products] == [{"float16"}, {"float16"}]


@pytest.mark.parametrize(
    "layer",
    [
        lambda x, w, s: (x * jnp.exp(s)) @ (w * jnp.exp(-s)),
        lambda x, w, s: jnp.exp(s[0]) * x @ (jnp.exp(s[1]) * w),
        lambda x, w, s: jnp.exp(jax.nn.log_softmax(x)) @ jnp.exp(jax.nn.log_softmax(w)),
        lambda x, w, s: (x + jnp.exp(x) * s) @ (w + jnp.exp(w) * s),
        lambda x, w, s: (jnp.exp(x) / jnp.exp(x).sum(1, keepdims=True)) @ (jnp.exp(w) / (jnp.exp(w).sum(0) + 1e-6)),
        lambda x, w, s: (jnp.exp(jnp.clip(s, -5, 5)) * x) @ (w / jnp.exp(0.5 * s)),
        lambda x, w, s: jnp.abs(x) ** s @ jnp.abs(w) ** s,
        lambda x, w, s: jnp.sqrt(jnp.abs(x)) ** 1.5 @ jnp.abs(w) ** 1.5,
        lambda x, w, s: (x * (jnp.exp(x) / (1 + jnp.exp(x)))) @ (w * (jnp.exp(w) * (1 / (1 + jnp.exp(w))))),
        lambda x, w, s: (x * jnp.exp(s - 1)) @ (w / jnp.exp(jax.nn.softplus(s))),
        lambda x, w, s: (x * jnp.exp(2 * jnp.tanh(x))) @ (w * jnp.exp(-2 * jax.nn.sigmoid(w))),
        lambda x, w, s: (x * 2.0 ** (-jnp.arange(8) / 4)) @ (w / 2.0 ** (jnp.arange(8) / 4)),
        lambda x, w, s: jnp.abs(x) ** (1 + jax.nn.softplus(s)) @ jnp.abs(w) ** jax.nn.sigmoid(s),
        lambda x, w, s: (x * jnp.exp(-jax.nn.relu(x))) @ (w * jnp.exp(w - jax.nn.logsumexp(w))),
        lambda x, w, s: (x * jnp.exp((x * s).sum(1, keepdims=True))) @ (w * jnp.exp((w * s[:, None]).sum(0))),
        lambda x, w, s: (x * jnp.exp(x)) @ w,
        lambda x, w, s: x @ (w / jnp.exp(w)),
        lambda x, w, s: jnp.exp(x) @ w / (1 + s * s),
    ],
    ids=[
        "learned scales",
        "temperatures",
        "shares",
        "samples",
        "shares by sums",
        "clipped",
        "powers",
        "written",
        "gates by hand",
        "scales of functions",
        "bounded",
        "slopes",
        "powers of functions",
        "no larger than one",
        "temperatures of each",
        "on the left alone",
        "on the right alone",
        "divided by others",
    ],
)
def test_layers_with_exponentials_are_half(layer):
    products = find(
        trace(jamp.cast_fn(layer, "O2:float16"), jnp.ones((16, 8)), jnp.ones((8, 8)), jnp.ones(8)), "dot_general"
    )
    assert [{str(atom.aval.dtype) for atom in eqn.invars} for eqn in products] == [{"float16"}]


def decayed(of_queries, of_keys):
    def attend(q, k, v, g):
        scores = (q * of_queries(g)) @ (k * of_keys(g)).T
        return jnp.tril(scores) @ v

    return attend


def sums_of(g):
    return jnp.cumsum(g, 0)


POWERS = np.arange(32)[:, None]
POSITIONS = jnp.arange(32.0)[:, None]


def kept():
    return (jnp.arange(32)[:, None] < 30).astype(jnp.float32)


# All of them reach 1e6, and its inverse: what float16 has no room for.
DECAYS = {
    "divided": decayed(lambda g: jnp.exp(-sums_of(g)), lambda g: 1 / jnp.exp(-sums_of(g))),
    "of two": decayed(lambda g: jnp.exp2(-2 * sums_of(g)), lambda g: jnp.exp2(2 * sums_of(g))),
    "of powers": decayed(lambda g: 0.6**POWERS, lambda g: 0.6**-POWERS),
    "of powers, divided": decayed(
        lambda g: 0.6 ** jnp.arange(32)[:, None], lambda g: 1 / 0.6 ** jnp.arange(32.0)[:, None]
    ),
    "of powers of constants": decayed(lambda g: 0.6**POSITIONS, lambda g: 1 / 0.6**POSITIONS),
    "multiplied up": decayed(
        lambda g: jnp.cumprod(jax.nn.sigmoid(g), 0), lambda g: 1 / jnp.cumprod(jax.nn.sigmoid(g), 0)
    ),
    "masked": decayed(lambda g: jnp.exp(-sums_of(g)) * kept(), lambda g: jnp.exp(sums_of(g)) * kept()),
    "selected": decayed(
        lambda g: jnp.where(POSITIONS < 30, jnp.exp(-sums_of(g)), 0), lambda g: jax.nn.relu(jnp.exp(sums_of(g)))
    ),
    "beside an epsilon": decayed(lambda g: jnp.exp(-sums_of(g)), lambda g: 1 / (jnp.exp(-sums_of(g)) + 1e-12)),
    "beside a bound": decayed(lambda g: jnp.exp(-sums_of(g)), lambda g: 1 / jnp.maximum(jnp.exp(-sums_of(g)), 1e-12)),
    "less their largest": decayed(
        lambda g: jnp.exp(sums_of(-g) - sums_of(-g).max(0)), lambda g: jnp.exp(sums_of(-g).max(0) - sums_of(-g))
    ),
    "put together": lambda q, k, v, g: decayed(
        lambda g: jnp.concatenate([jnp.exp(-sums_of(g)), jnp.ones_like(g)], 1),
        lambda g: jnp.concatenate([jnp.exp(sums_of(g)), jnp.ones_like(g)], 1),
    )(jnp.tile(q, 2), jnp.tile(k, 2), v, g),
    "computed again": jax.checkpoint(decayed(lambda g: jnp.exp(-sums_of(g)), lambda g: jnp.exp(sums_of(g)))),
    "of heads": decayed(lambda g: jnp.exp(-sums_of(g[:, :1])), lambda g: jnp.exp(sums_of(g[:, :1]))),
}


@pytest.mark.parametrize("policy", ["O1:float16", "O2:float16"])
@pytest.mark.parametrize("attend", DECAYS.values(), ids=DECAYS)
def test_decays_on_one_side_and_their_inverse_on_the_other(attend, policy):
    """As linear attention with gates has them: float16 had values and gradients that were no numbers."""
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v, g = (jax.random.normal(key, (32, 16)) for key in keys[:4])
    w = 0.3 * jax.random.normal(keys[4], (3, 16, 16))
    loss = lambda w, g: jnp.mean(attend(q @ w[0], k @ w[1], v @ w[2], jnp.abs(g)) ** 2)  # noqa: E731
    results = [jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))(w, g) for fn in (loss, jamp.cast_fn(loss, policy))]
    for expected, actual in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.linalg.norm(actual - expected) <= 1e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize("policy", ["O1:float16", "O2:float16"])
def test_derivatives_of_decays_inside(policy):
    """Of their products one side is a cotangent, and the other one a side of the product."""
    attend = decayed(lambda g: jnp.exp(-sums_of(g)), lambda g: jnp.exp(sums_of(g)))
    q, k, g, w = (jax.random.normal(jax.random.key(i), (32, 16)) for i in range(4))
    loss = lambda w, g: jnp.mean(attend(q @ w[:16], k @ w[16:], k, jnp.abs(g)) ** 2)  # noqa: E731
    derive = jax.grad(loss, (0, 1))
    for expected, actual in zip(derive(0.3 * w, g), jamp.cast_fn(derive, policy)(0.3 * w, g), strict=True):
        assert np.linalg.norm(actual - expected) <= 1e-2 * np.linalg.norm(expected)
