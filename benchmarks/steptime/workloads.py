"""The four models of the step-time benchmark, at their published sizes and at sizes for a CPU.

`build(None)` is plain float32 code and `build(jnp.bfloat16)` the mixed precision that its author would write by hand:
Flax's `dtype=` on every layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.models import Model


@dataclass(frozen=True)
class Workload:
    """A model, a batch and an optimizer.

    Attributes:
        name: Key of the workload in the results.
        batch: Examples in a step.
        build: `build(dtype, batch)` makes the model with its batch.
        optimizer: The optimizer of the training.
        sizes: What the results say about the sizes.
    """

    name: str
    batch: int
    build: Callable[[Any, int], Model]
    optimizer: optax.GradientTransformation
    sizes: str


class SimpleNet(nn.Module):
    """Three linear layers with ReLU between: the network of Paddle's tutorial."""

    size: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.Dense(self.size, dtype=self.dtype)(x))
        return nn.Dense(self.size, dtype=self.dtype)(x)


class Bottleneck(nn.Module):
    """Bottleneck block of ResNet version 1."""

    features: int
    stride: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype)
        strides = (self.stride, self.stride)
        h = nn.relu(norm()(conv(self.features, (1, 1), strides)(x)))
        h = nn.relu(norm()(conv(self.features, (3, 3))(h)))
        h = norm(scale_init=nn.initializers.zeros)(conv(4 * self.features, (1, 1))(h))  # Starts as the identity.
        if x.shape != h.shape:
            x = norm()(conv(4 * self.features, (1, 1), strides)(x))
        return nn.relu(x + h)


class ResNet50(nn.Module):
    """ResNet-50."""

    width: int
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (7, 7), (2, 2), use_bias=False, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        for stage, blocks in enumerate(self.blocks):
            for i in range(blocks):
                x = Bottleneck(self.width * 2**stage, 2 if stage and i == 0 else 1, self.dtype)(x)
        return nn.Dense(1000, dtype=self.dtype)(x.mean(axis=(1, 2)))


class LSTM(nn.Module):
    """Word-level language model: two LSTM layers and a softmax over the vocabulary."""

    width: int
    vocabulary: int
    dtype: Any = None

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(ids)
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(self.width, dtype=self.dtype))(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype)(x)


class Block(nn.Module):
    """A pre-norm transformer block, as `nn.scan` calls one: with a carry, and nothing to scan over."""

    width: int
    dtype: Any = None
    causal: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2])) if self.causal else None
        h = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + nn.MultiHeadDotProductAttention(max(self.width // 64, 1), dtype=self.dtype)(h, mask=mask)
        h = nn.gelu(nn.Dense(4 * self.width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)))
        return x + nn.Dense(self.width, dtype=self.dtype)(h), None


class GPT(nn.Module):
    """GPT-2: a vocabulary shared by the first layer and the last, and blocks one by one or under `nn.scan`."""

    width: int
    layers: int
    vocabulary: int
    length: int
    scanned: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        x = embed(ids) + nn.Embed(self.length, self.width, dtype=self.dtype)(jnp.arange(ids.shape[1]))
        if self.scanned:
            scan = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
            x, _ = scan(self.width, self.dtype)(x, None)
        else:
            for _ in range(self.layers):
                x, _ = Block(self.width, self.dtype)(x, None)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


GPT_2 = dict(width=768, layers=12, vocabulary=50_304, length=1024)  # Of its sizes, the smallest.


def workloads(full: bool) -> list[Workload]:
    """Returns the four workloads at their published sizes, or at sizes for a CPU."""
    size, batch = (4096, 512) if full else (512, 64)
    width, image, images = (64, 224, 256) if full else (8, 32, 8)
    lstm_width, lstm_words, lstm_length, lstm_batch = (1024, 10_000, 64, 256) if full else (64, 256, 16, 16)
    gpt, gpt_batch = (GPT_2, 8) if full else (dict(width=64, layers=2, vocabulary=256, length=64), 4)
    return [
        Workload("SimpleNet", batch, partial(simple_net, size), optax.sgd(1e-4), f"3 layers of {size}, batch {batch}"),
        Workload(
            "ResNet-50",
            images,
            partial(image_model, partial(ResNet50, width), image),
            optax.sgd(0.01, momentum=0.9),  # A batch of noise that is seen again and again bears no more.
            f"width {width}, {image} x {image} pixels, batch {images}",
        ),
        Workload(
            "LSTM",
            lstm_batch,
            partial(token_model, partial(LSTM, lstm_width, lstm_words), lstm_words, lstm_length),
            optax.adam(1e-3),
            f"2 layers of {lstm_width}, vocabulary {lstm_words}, length {lstm_length}, batch {lstm_batch}",
        ),
        Workload(
            "GPT",
            gpt_batch,
            partial(token_model, partial(GPT, **gpt), gpt["vocabulary"], gpt["length"]),
            optax.adamw(3e-4),
            f"{gpt['layers']} layers of {gpt['width']}, vocabulary {gpt['vocabulary']}, length {gpt['length']}, "
            f"batch {gpt_batch}",
        ),
    ]


def simple_net(size: int, dtype: Any, batch: int) -> Model:
    """The network of three layers, on random numbers."""
    module = SimpleNet(size, dtype)
    x, y = (jax.random.normal(jax.random.key(seed), (batch, size)) for seed in (1, 2))
    params = jax.jit(module.init)(_key(), x[:1])
    return Model(
        lambda params, x, y: module.apply(params, x), params, (x, y), lambda out, x, y: jnp.mean((out - y) ** 2)
    )


def image_model(make: Callable[..., nn.Module], image: int, dtype: Any, batch: int) -> Model:
    """A classifier with running statistics, on random images."""
    module = make(dtype=dtype)
    x = jax.random.normal(jax.random.key(1), (batch, image, image, 3))
    y = jnp.arange(batch, dtype=jnp.int32) % 1000
    variables = jax.jit(module.init)(_key(), x[:1])

    def apply(params: Any, stats: Any, x: jax.Array, y: jax.Array) -> Any:
        return module.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])

    def loss(outputs: Any, stats: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(outputs[0], y).mean()

    return Model(apply, variables["params"], (variables["batch_stats"], x, y), loss)


def scanned_gpt() -> Workload:
    """The full-size GPT with its layers under `nn.scan`."""
    make = partial(GPT, **GPT_2, scanned=True)
    build = partial(token_model, make, GPT_2["vocabulary"], GPT_2["length"])
    return Workload(
        "GPT, scanned", 8, build, optax.adamw(3e-4), "12 layers of 768, vocabulary 50304, length 1024, batch 8"
    )


def token_model(make: Callable[..., nn.Module], vocabulary: int, length: int, dtype: Any, batch: int) -> Model:
    """A language model on random tokens."""
    module = make(dtype=dtype)
    ids = jax.random.randint(jax.random.key(1), (batch, length + 1), 0, vocabulary)

    def loss(logits: jax.Array, ids: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()

    params = jax.jit(module.init)(_key(), ids[:1, :-1])
    return Model(lambda params, ids: module.apply(params, ids[:, :-1]), params, (ids,), loss)


def _key() -> jax.Array:
    return jax.random.key(0, impl="rbg")  # whose code compiles in a fraction of the default generator's time
