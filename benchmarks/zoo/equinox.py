"""Equinox models, which have no mixed precision of their own; `eqx.partition` splits off what is differentiated."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.models import Model, next_token, normal, tokens
from benchmarks.zoo._entries import Zoo

ZOO = Zoo("equinox")
VOCABULARY, WIDTH, HEADS, LENGTH = 256, 128, 4, 64


def _model(module: Any, inputs: jax.Array, loss: Any = None) -> Model:
    params, static = eqx.partition(module, eqx.is_inexact_array)

    def apply(params: Any, batch: jax.Array) -> Any:
        return jax.vmap(eqx.combine(params, static))(batch)

    return Model(apply, params, (inputs,), loss) if loss else Model(apply, params, (inputs,))


@ZOO.add(native=False)
def mlp(dtype: Any) -> Model:
    """Multilayer perceptron under vmap."""
    del dtype
    return _model(eqx.nn.MLP(64, 10, 256, 3, key=jax.random.key(0)), normal(64, 64))


class Block(eqx.Module):
    """Pre-norm block on one sequence."""

    attention_norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    feed_norm: eqx.nn.LayerNorm
    feed: eqx.nn.MLP

    def __init__(self, key: jax.Array):
        first, second = jax.random.split(key)
        self.attention_norm, self.feed_norm = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=first)
        self.feed = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=second)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jax.vmap(self.attention_norm)(x)
        x = x + self.attention(h, h, h, mask=jnp.tril(jnp.ones((len(x), len(x)), bool)))
        return x + jax.vmap(self.feed)(jax.vmap(self.feed_norm)(x))


class Transformer(eqx.Module):
    """Causal language model on one sequence; the batch is a vmap outside."""

    embed: eqx.nn.Embedding
    position: jax.Array
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        keys = jax.random.split(key, 6)
        self.embed = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.position = 0.02 * jax.random.normal(keys[1], (LENGTH, WIDTH))
        self.blocks = [Block(k) for k in keys[2:5]]
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[5])

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


@ZOO.add(native=False)
def transformer(dtype: Any) -> Model:
    """Causal transformer under vmap."""
    del dtype
    return _model(Transformer(jax.random.key(0)), tokens(4, LENGTH, VOCABULARY), next_token)


class CNN(eqx.Module):
    """Convolutions with GroupNorm and pooling, channels first."""

    layers: list[Any]

    def __init__(self, key: jax.Array):
        first, second, last = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(3, 32, 3, padding=1, key=first),
            eqx.nn.GroupNorm(8, 32),
            jax.nn.relu,
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Conv2d(32, 64, 3, padding=1, key=second),
            eqx.nn.GroupNorm(8, 64),
            jax.nn.silu,
            eqx.nn.AdaptiveAvgPool2d(1),
            jnp.ravel,
            eqx.nn.Linear(64, 10, key=last),
        ]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


@ZOO.add(native=False)
def cnn(dtype: Any) -> Model:
    """Convolutional network under vmap."""
    del dtype
    return _model(CNN(jax.random.key(0)), normal(8, 3, 32, 32))
