"""Weighted means of points in space are float32, and their weights add up to one: space has no origin."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.transforms.harness import both_halves, mixed_levels, product_dtypes, trace

rng = np.random.default_rng(0)
N, C = 16, 32
X = np.float32(rng.standard_normal((N, C)))
PLACES = np.float32(rng.standard_normal((N, 3)))
WEIGHTS = {name: np.float32(rng.standard_normal(shape) / C**0.5) for name, shape in
           {"q": (C, C), "k": (C, C), "v": (C, C), "points": (C, 12), "out": (C + 12, C)}.items()}  # fmt: skip


def softmax(scores):
    return jax.nn.softmax(scores, 1)


def normalized(scores):
    weights = jax.nn.relu(scores) + 0.1
    return weights / (weights.sum(1, keepdims=True) + 1e-8)


def at_least(scores):
    weights = jnp.exp(-(scores**2))
    return weights / jnp.maximum(weights.sum(1, keepdims=True), 1e-6)


def masked(scores):
    return softmax(jnp.where(jnp.tri(N, dtype=bool), scores, -1e9))


def by_einsum(shares, points):
    return jnp.einsum("ij,jpx->ipx", shares, points)


def by_vmap(shares, points):
    return jax.vmap(lambda points: shares @ points, 1, 1)(points)


def each(shares, points):
    return jnp.stack([shares @ points[:, p] for p in range(4)], 1)


def attended(shares_of, mean, w, x, places):
    """What a layer of invariant point attention makes of points around places."""
    shares = shares_of((x @ w["q"]) @ (x @ w["k"]).T)
    points = (x @ w["points"]).reshape(N, 4, 3) + places[:, None]
    seen = mean(shares, points) - places[:, None]
    return jnp.concatenate([shares @ (x @ w["v"]), seen.reshape(N, -1)], 1) @ w["out"]


SHARES = [softmax, normalized, at_least, masked]
SUMS = [by_einsum, by_vmap, each]


@both_halves
@mixed_levels
@pytest.mark.parametrize("mean", SUMS)
@pytest.mark.parametrize("shares_of", SHARES)
def test_space_has_no_origin(shares_of, mean, level, half):
    def loss(w, places):
        return (attended(shares_of, mean, w, X, places) ** 2).mean()

    cast = jax.jit(jax.value_and_grad(jamp.cast_fn(loss, f"{level}:{half}")))
    (here, d_here), (far, d_far) = cast(WEIGHTS, PLACES), cast(WEIGHTS, PLACES + 1024)  # In bfloat16 1025 is 1024.
    np.testing.assert_allclose(np.float32(here), np.float32(far), rtol=4e-3)
    for one, other in zip(jax.tree.leaves(d_here), jax.tree.leaves(d_far), strict=True):
        assert np.linalg.norm(np.float32(one) - np.float32(other)) < 0.02 * np.linalg.norm(np.float32(one))


def exponentials(scores):
    return jnp.exp(-((scores / 8) ** 2))


def total(weights):
    return weights.sum(1, keepdims=True)


@jax.jit
def in_a_function(weights):
    return weights / total(weights)


def of_weights(weights):
    """Means that are divided last, of weights that do not add up to one."""
    return {
        "divided": lambda points: (weights @ points) / total(weights),
        "by more": lambda points: (weights @ points) / (total(weights) + 1e-8),
        "by at least": lambda points: (weights @ points) / jnp.clip(total(weights), 1e-8),
        "by what is there": lambda points: (weights @ points) / jnp.where(total(weights) > 0, total(weights), 1.0),
        "times the inverse": lambda points: (weights @ points) * (1 / total(weights)),
        "times the reciprocal": lambda points: jnp.reciprocal(total(weights)) * (weights @ points),
        "times inverses": lambda points: (weights * (1 / total(weights))) @ points,
        "by an einsum": lambda points: jnp.einsum("ij,jk->ik", weights, points) / jnp.einsum("ij->i", weights)[:, None],
        "by the same, written twice": lambda points: (jnp.exp(weights) @ points) / total(jnp.exp(weights)),
        "row by row": lambda points: jax.vmap(lambda row: (row @ points) / row.sum())(weights),
        "in a function": lambda points: jax.jit(jnp.matmul)(weights, points) / total(weights),
        "a function's": lambda points: in_a_function(weights) @ points,
        "by log_softmax": lambda points: jnp.exp(jax.nn.log_softmax(weights, 1)) @ points,
        "by logsumexp": lambda points: jnp.exp(weights - jax.nn.logsumexp(weights, 1, keepdims=True)) @ points,
        "where": lambda points: jax.nn.softmax(weights, 1, where=jnp.tri(N, dtype=bool)) @ points,
        "of marginals": lambda points: jax.nn.softmax(weights.reshape(N, 4, 4), (1, 2)).sum(2) @ points[:4],
    }


@both_halves
@mixed_levels
@pytest.mark.parametrize("name", of_weights(X))
def test_nor_has_it_where_means_are_divided_last(name, level, half):
    def loss(w, places):
        seen = of_weights(exponentials((X @ w["q"]) @ (X @ w["k"]).T))[name](places + (X @ w["points"])[:, :3])
        return ((seen - places) ** 2).mean()

    cast = jax.jit(jax.value_and_grad(jamp.cast_fn(loss, f"{level}:{half}")))
    (here, d_here), (far, d_far) = cast(WEIGHTS, PLACES), cast(WEIGHTS, PLACES + 1024)
    np.testing.assert_allclose(np.float32(here), np.float32(far), rtol=4e-3)
    for one, other in zip(jax.tree.leaves(d_here), jax.tree.leaves(d_far), strict=True):
        assert np.linalg.norm(np.float32(one) - np.float32(other)) <= 0.02 * np.linalg.norm(np.float32(one))


@both_halves
@mixed_levels
@pytest.mark.parametrize("inside", [jax.checkpoint, jax.jit], ids=["checkpoint", "jit"])
def test_nor_has_it_inside(inside, level, half):
    layer = inside(lambda w, x, places: attended(softmax, by_einsum, w, x, places))

    def fn(w, places):
        return jax.lax.scan(lambda x, _: (jnp.tanh(layer(w, x, places)), None), X, length=3)[0]

    cast = jax.jit(jamp.cast_fn(fn, f"{level}:{half}"))
    here, far = np.float32(cast(WEIGHTS, PLACES)), np.float32(cast(WEIGHTS, PLACES + 1024))
    assert np.linalg.norm(here - far) < 0.02 * np.linalg.norm(here)


@both_halves
@pytest.mark.parametrize("shares_of", SHARES)
def test_layers_beside_points_are_half(shares_of, half):
    def fn(w):
        return attended(shares_of, by_einsum, w, X, PLACES)

    dtypes = [tuple(each[:2]) for each in product_dtypes(trace(jamp.cast_fn(fn, f"O2:{half}"), WEIGHTS))]
    assert sorted(set(dtypes)) == sorted({(half, half), ("float32", "float32")})
    assert dtypes.count(("float32", "float32")) == 1


DEPTHS = {
    "one each": lambda shares, places: shares @ places[:, 0],
    "a column": lambda shares, places: shares @ places[:, :1],
    "of a plane": lambda shares, places: shares @ places[:, :2],
    "in rows": lambda shares, places: (places.T[:, None] @ shares.T[None])[:, 0].T,
    "moved before": lambda shares, places: shares.reshape(1, N, N)[0] @ places,
}


@both_halves
@mixed_levels
@pytest.mark.parametrize("mean", DEPTHS.values(), ids=DEPTHS)
def test_means_of_what_a_network_places_are_float32(mean, level, half):
    def fn(w):
        shares = softmax(X @ w["q"])[:, :N]
        shares = shares / shares.sum(1, keepdims=True)
        return mean(shares, X @ w["points"][:, :3] + 1024) - 1024

    dtypes = product_dtypes(trace(jamp.cast_fn(fn, f"{level}:{half}"), WEIGHTS))
    assert dtypes[-1][:2] == ["float32", "float32"]
    np.testing.assert_allclose(np.float32(jamp.cast_fn(fn, f"{level}:{half}")(WEIGHTS)), fn(WEIGHTS), atol=0.05)


@both_halves
@mixed_levels
def test_attention_over_many_channels_is_half(level, half):
    def fn(q, k, v):
        return softmax(q @ k.T) @ v

    for channels in (4, 5, 16):
        values = np.float32(rng.standard_normal((N, channels)))
        dtypes = product_dtypes(trace(jamp.cast_fn(fn, f"{level}:{half}"), X, X, values))
        assert {dtype for each in dtypes for dtype in each[:2]} == {half}
