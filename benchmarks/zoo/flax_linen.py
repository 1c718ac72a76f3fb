"""Flax linen models. ``dtype=None`` is what a user writes who never thought of precision."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import Model, first_class, initial, mean_square, next_token, normal, tokens
from benchmarks.zoo._entries import Zoo

ZOO = Zoo("linen")
VOCABULARY, WIDTH, HEADS, LENGTH = 256, 128, 4, 64


class Block(nn.Module):
    """Transformer block, with the norm before or after each half."""

    dtype: Any = None
    post_norm: bool = False
    causal: bool = True
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2])) if self.causal else None

        def attend(h: jax.Array) -> jax.Array:
            return nn.MultiHeadDotProductAttention(HEADS, dtype=self.dtype, name="attention")(h, mask=mask)

        def feed_forward(h: jax.Array) -> jax.Array:
            h = nn.gelu(nn.Dense(4 * WIDTH, dtype=self.dtype, name="up")(h))
            return nn.Dense(WIDTH, dtype=self.dtype, name="down")(h)

        for name, half in (("first", attend), ("second", feed_forward)):
            norm = nn.LayerNorm(dtype=self.dtype, name=f"{name}_norm")
            drop = nn.Dropout(self.dropout, deterministic=self.dropout == 0)
            x = norm(x + drop(half(x))) if self.post_norm else x + drop(half(norm(x)))
        return x


class LanguageModel(nn.Module):
    """Causal language model of pre-norm blocks: unrolled, scanned, or rematerialised."""

    dtype: Any = None
    depth: int = 4
    layers: str = "unrolled"

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)(ids)
        x = x + nn.Embed(LENGTH, WIDTH, dtype=self.dtype)(jnp.arange(ids.shape[1]))
        if self.layers == "scanned":
            scan = nn.scan(
                lambda block, x, _: (block(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.depth,
            )
            x, _ = scan(Block(self.dtype), x, None)
        else:
            block = nn.remat(Block) if self.layers == "remat" else Block
            for i in range(self.depth):
                x = block(self.dtype, name=f"block_{i}")(x)
        return nn.Dense(VOCABULARY, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))


def _language_model(dtype: Any, layers: str, depth: int = 4) -> Model:
    module = LanguageModel(dtype, depth, layers)
    ids = tokens(4, LENGTH, VOCABULARY)
    params = initial(module.init, dtype, jax.random.key(0), ids)
    return Model(module.apply, params, (ids,), next_token)


@ZOO.add()
def lm(dtype: Any) -> Model:
    """Four pre-norm blocks, unrolled."""
    return _language_model(dtype, "unrolled")


@ZOO.add()
def lm_scanned(dtype: Any) -> Model:
    """The same under ``nn.scan``."""
    return _language_model(dtype, "scanned")


@ZOO.add()
def lm_remat(dtype: Any) -> Model:
    """The same under ``nn.remat``."""
    return _language_model(dtype, "remat")


def lm_deep(dtype: Any, depth: int) -> Model:
    """Unrolled blocks for trace times: ``params`` are shapes only, so that nothing is run to build them."""
    module = LanguageModel(dtype, depth)
    ids = tokens(1, LENGTH, VOCABULARY)
    return Model(module.apply, jax.eval_shape(module.init, jax.random.key(0), ids), (ids,), next_token)


class Encoder(nn.Module):
    """Post-norm encoder with dropout and a classifier on the mean token."""

    dtype: Any = None

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH, dtype=self.dtype)(ids)
        for _ in range(3):
            x = Block(self.dtype, post_norm=True, causal=False, dropout=0.1)(x)
        return nn.Dense(10, dtype=self.dtype)(x.mean(axis=1))


@ZOO.add()
def encoder_post_norm(dtype: Any) -> Model:
    """Post-norm transformer encoder, dropout on."""
    module, ids = Encoder(dtype), tokens(4, LENGTH, VOCABULARY)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(3)}
    params = initial(module.init, dtype, keys, ids)

    def apply(params: Any, ids: jax.Array, key: jax.Array) -> jax.Array:
        return module.apply(params, ids, rngs={"dropout": key})

    return Model(apply, params, (ids, jax.random.key(4)), first_class)


class ViT(nn.Module):
    """Vision transformer on 4x4 patches with a class token."""

    dtype: Any = None

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        x = nn.Conv(WIDTH, (4, 4), (4, 4), dtype=self.dtype)(image)
        x = x.reshape(x.shape[0], -1, WIDTH)
        cls = self.param("cls", nn.initializers.normal(0.02), (1, 1, WIDTH))
        x = jnp.concatenate([jnp.tile(cls, (x.shape[0], 1, 1)).astype(x.dtype), x], axis=1)
        position = self.param("position", nn.initializers.normal(0.02), (1, x.shape[1], WIDTH))
        x = x + position.astype(x.dtype)
        for _ in range(3):
            x = Block(self.dtype, causal=False)(x)
        return nn.Dense(10, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)[:, 0])


def _classifier(module: Any, *shape: int) -> Model:
    image = normal(*shape)
    return Model(module.apply, initial(module.init, module.dtype, jax.random.key(0), image), (image,), first_class)


@ZOO.add()
def vit(dtype: Any) -> Model:
    """Vision transformer."""
    return _classifier(ViT(dtype), 4, 32, 32, 3)


class MixerBlock(nn.Module):
    """MLP-Mixer block."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def mlp(h: jax.Array, hidden: int) -> jax.Array:
            out = h.shape[-1]
            return nn.Dense(out, dtype=self.dtype)(nn.gelu(nn.Dense(hidden, dtype=self.dtype)(h)))

        h = jnp.swapaxes(nn.LayerNorm(dtype=self.dtype)(x), 1, 2)
        x = x + jnp.swapaxes(mlp(h, 64), 1, 2)
        return x + mlp(nn.LayerNorm(dtype=self.dtype)(x), 256)


class Mixer(nn.Module):
    """MLP-Mixer."""

    dtype: Any = None

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        x = nn.Conv(WIDTH, (4, 4), (4, 4), dtype=self.dtype)(image)
        x = x.reshape(x.shape[0], -1, WIDTH)
        for _ in range(3):
            x = MixerBlock(self.dtype)(x)
        return nn.Dense(10, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x).mean(axis=1))


@ZOO.add()
def mixer(dtype: Any) -> Model:
    """MLP-Mixer."""
    return _classifier(Mixer(dtype), 4, 32, 32, 3)


class Recurrent(nn.Module):
    """Embedding, LSTM, GRU, vocabulary."""

    dtype: Any = None

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = nn.Embed(VOCABULARY, 64, dtype=self.dtype)(ids)
        x = nn.RNN(nn.OptimizedLSTMCell(64, dtype=self.dtype))(x)
        x = nn.RNN(nn.GRUCell(64, dtype=self.dtype))(x)
        return nn.Dense(VOCABULARY, dtype=self.dtype)(x)


@ZOO.add()
def lstm_gru(dtype: Any) -> Model:
    """Recurrent language model."""
    module, ids = Recurrent(dtype), tokens(4, 32, VOCABULARY)
    return Model(module.apply, initial(module.init, dtype, jax.random.key(0), ids), (ids,), next_token)


class VAE(nn.Module):
    """Variational autoencoder; returns reconstruction, mean and log variance."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        h = nn.relu(nn.Dense(256, dtype=self.dtype)(x))
        mean, log_variance = jnp.split(nn.Dense(64, dtype=self.dtype)(h), 2, axis=-1)
        # Drawn in float32, because a half draw has other random bits and would not be the same model.
        noise = jax.random.normal(self.make_rng("noise"), mean.shape).astype(mean.dtype)
        h = nn.relu(nn.Dense(256, dtype=self.dtype)(mean + jnp.exp(0.5 * log_variance) * noise))
        return nn.Dense(x.shape[-1], dtype=self.dtype)(h), mean, log_variance


def _evidence(outputs: tuple[jax.Array, jax.Array, jax.Array], x: jax.Array, key: jax.Array) -> jax.Array:
    del key
    reconstruction, mean, log_variance = outputs
    divergence = jnp.mean(jnp.exp(log_variance) + mean**2 - 1 - log_variance)
    return mean_square(reconstruction - x) + 0.5 * divergence


@ZOO.add()
def vae(dtype: Any) -> Model:
    """Variational autoencoder with sampling inside."""
    module, x = VAE(dtype), normal(64, 196)
    params = initial(module.init, dtype, {"params": jax.random.key(0), "noise": jax.random.key(3)}, x)

    def apply(params: Any, x: jax.Array, key: jax.Array) -> Any:
        return module.apply(params, x, rngs={"noise": key})

    return Model(apply, params, (x, jax.random.key(4)), _evidence)
