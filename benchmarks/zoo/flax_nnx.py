"""Flax NNX models, which name no scopes; ``apply`` merges, calls, and returns the state that the call has changed."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.models import Model, first_class, next_token, normal, tokens
from benchmarks.zoo._entries import Zoo

ZOO = Zoo("nnx")
VOCABULARY, WIDTH, HEADS, GROUPS, LENGTH = 256, 128, 4, 2, 64
HEAD_WIDTH = WIDTH // HEADS


def _model(module: nnx.Module, inputs: Any, loss: Any) -> Model:
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    def apply(params: Any, rest: Any, x: jax.Array) -> Any:
        merged = nnx.merge(graph, params, rest, copy=True)  # else its variables belong to an outer trace
        outputs = merged(x)
        return outputs, nnx.state(merged, nnx.Not(nnx.Param))

    def loss_of_first(outputs: Any, *inputs: Any) -> jax.Array:
        return loss(outputs[0], *inputs)

    return Model(apply, params, (rest, inputs), loss_of_first)


class ResidualBlock(nnx.Module):
    """Two convolutions with BatchNorm and a shortcut."""

    def __init__(self, wide_in: int, wide_out: int, stride: int, dtype: Any, rngs: nnx.Rngs):
        def conv(features_in: int, kernel: int, stride: int) -> nnx.Conv:
            shape = (kernel, kernel)
            return nnx.Conv(
                features_in, wide_out, shape, strides=(stride, stride), use_bias=False, dtype=dtype, rngs=rngs
            )

        def norm() -> nnx.BatchNorm:
            return nnx.BatchNorm(wide_out, dtype=dtype, rngs=rngs)

        self.first, self.first_norm = conv(wide_in, 3, stride), norm()
        self.second, self.second_norm = conv(wide_out, 3, 1), norm()
        self.shortcut = nnx.Sequential(conv(wide_in, 1, stride), norm())

    def __call__(self, x: jax.Array) -> jax.Array:
        h = nnx.relu(self.first_norm(self.first(x)))
        return nnx.relu(self.shortcut(x) + self.second_norm(self.second(h)))


class ResNet(nnx.Module):
    """Residual network of two stages."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, 32, (3, 3), dtype=dtype, rngs=rngs)
        self.first = ResidualBlock(32, 32, 1, dtype, rngs)
        self.second = ResidualBlock(32, 64, 2, dtype, rngs)
        self.head = nnx.Linear(64, 10, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.second(self.first(nnx.relu(self.stem(x))))
        return self.head(x.mean(axis=(1, 2)))


@ZOO.add()
def resnet(dtype: Any) -> Model:
    """Residual network with BatchNorm, whose running statistics change."""
    return _model(ResNet(dtype, nnx.Rngs(0)), normal(8, 32, 32, 3), first_class)


class Block(nnx.Module):
    """Pre-norm transformer block with dropout."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, dtype=dtype, rngs=rngs)
        self.feed_norm = nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, dtype=dtype, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.attention_norm(x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.feed_norm(x)))))


class Transformer(nnx.Module):
    """Causal language model."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, dtype=dtype, rngs=rngs)
        self.position = nnx.Embed(LENGTH, WIDTH, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([Block(dtype, rngs) for _ in range(3)])
        self.norm = nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, dtype=dtype, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(ids)
        x = self.embed(ids) + self.position(jnp.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


@ZOO.add()
def transformer(dtype: Any) -> Model:
    """Causal transformer whose dropout counters change."""
    return _model(Transformer(dtype, nnx.Rngs(0)), tokens(4, LENGTH, VOCABULARY), next_token)


def _rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary embedding in float32, returned in the dtype of ``x`` as Gemma does."""
    frequency = 10_000.0 ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    angle = positions[:, None, None] * frequency
    first, second = jnp.split(x, 2, axis=-1)
    rotated = (first * jnp.cos(angle) - second * jnp.sin(angle), second * jnp.cos(angle) + first * jnp.sin(angle))
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


class GemmaBlock(nnx.Module):
    """RMSNorm before and after, grouped-query attention with rotary positions, GeGLU."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        def norm() -> nnx.RMSNorm:
            return nnx.RMSNorm(WIDTH, dtype=dtype, rngs=rngs)

        def project(equation: str, *shape: int) -> nnx.Einsum:
            return nnx.Einsum(equation, shape, dtype=dtype, rngs=rngs)

        self.pre_attention, self.post_attention = norm(), norm()
        self.pre_feed, self.post_feed = norm(), norm()
        self.query = project("btd,ngdh->btngh", GROUPS, HEADS // GROUPS, WIDTH, HEAD_WIDTH)
        self.key_value = project("bsd,cndh->cbsnh", 2, GROUPS, WIDTH, HEAD_WIDTH)
        self.out = project("btngh,nghd->btd", GROUPS, HEADS // GROUPS, HEAD_WIDTH, WIDTH)
        self.gate = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(3 * WIDTH, WIDTH, use_bias=False, dtype=dtype, rngs=rngs)

    def attend(self, x: jax.Array) -> jax.Array:
        positions = jnp.arange(x.shape[1])
        query = self.query(x)
        key, value = self.key_value(x)
        flat = _rotate(query.reshape(*query.shape[:2], HEADS, HEAD_WIDTH), positions) * HEAD_WIDTH**-0.5
        query, key = flat.reshape(query.shape), _rotate(key, positions)
        logits = jnp.einsum("btngh,bsnh->bngts", query, key)
        logits = jnp.tanh(logits / 50.0) * 50.0
        logits = jnp.where(positions[:, None] >= positions, logits, -2.3819763e38)
        weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
        return self.out(jnp.einsum("bngts,bsnh->btngh", weights, value))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.post_attention(self.attend(self.pre_attention(x)))
        h = self.pre_feed(x)
        return x + self.post_feed(self.down(nnx.gelu(self.gate(h)) * self.up(h)))


class Gemma(nnx.Module):
    """Gemma-like language model: scaled and tied embedding, capped logits."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List([GemmaBlock(dtype, rngs) for _ in range(3)])
        self.norm = nnx.RMSNorm(WIDTH, dtype=dtype, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        x = x * jnp.asarray(WIDTH**0.5, x.dtype)
        for block in self.blocks:
            x = block(x)
        logits = self.embed.attend(self.norm(x))
        return jnp.tanh(logits / 30.0) * 30.0


@ZOO.add()
def gemma(dtype: Any) -> Model:
    """Gemma-like language model."""
    return _model(Gemma(dtype, nnx.Rngs(0)), tokens(4, LENGTH, VOCABULARY), next_token)


class Recurrent(nnx.Module):
    """LSTM language model; NNX's RNN scans with state in closures."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, 64, dtype=dtype, rngs=rngs)
        self.cell = nnx.RNN(nnx.LSTMCell(64, 64, dtype=dtype, rngs=rngs))
        self.head = nnx.Linear(64, VOCABULARY, dtype=dtype, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.head(self.cell(self.embed(ids)))


@ZOO.add()
def lstm(dtype: Any) -> Model:
    """LSTM language model."""
    return _model(Recurrent(dtype, nnx.Rngs(0)), tokens(4, 32, VOCABULARY), next_token)
