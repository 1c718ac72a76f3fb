"""What is compiled: the four models of the step-time benchmark, a GPT and a ViT whose layers are scanned.

At their published widths with few layers, so that float32 fits into 16 GB and a compiler is done in a minute or two;
where layers are scanned, their number costs it nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import optax

from benchmarks.models import Model, first_class
from benchmarks.steptime.workloads import (
    GPT,
    GPT_2,
    LSTM,
    Block,
    ResNet50,
    Workload,
    image_model,
    scanned_gpt,
    simple_net,
    token_model,
    workloads,
)


class ViT(nn.Module):
    """Vision transformer: a convolution makes patches of an image, scanned blocks read them."""

    width: int
    layers: int
    patch: int = 16
    dtype: Any = None

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(self.width, (self.patch,) * 2, (self.patch,) * 2, dtype=self.dtype)(images)
        x = x.reshape(x.shape[0], -1, self.width)
        x = x + self.param("places", nn.initializers.normal(0.02), x.shape[1:]).astype(x.dtype)
        scan = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
        x, _ = scan(self.width, self.dtype, causal=False)(x, None)
        return nn.Dense(1000, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x).mean(1))


def compiled_workloads(published: bool = False, scale: int = 1) -> list[Workload]:
    """Returns what is compiled.

    Args:
        published: The sizes of the step-time benchmark, and the scanned GPT alone beside them.
        scale: What to divide widths, lengths and batches by.
    """
    if published:
        return [*workloads(True), scanned_gpt()]
    width, length, words = GPT_2["width"] // scale, GPT_2["length"] // scale, GPT_2["vocabulary"] // scale
    gpt = partial(GPT, width=width, vocabulary=words, length=length)
    lstm = partial(LSTM, 1024 // scale, 10_000 // scale)
    resnet = partial(ResNet50, 64 // scale, blocks=(1, 1, 1, 1))
    image, batch, adam = 224 // scale, 64 // scale, optax.adamw(3e-4)
    return [
        Workload("SimpleNet", 512 // scale, partial(simple_net, 4096 // scale), optax.sgd(1e-4), "3 layers of 4096"),
        Workload("ResNet", batch, partial(image_model, resnet, image), optax.sgd(0.01, momentum=0.9), "4 bottlenecks"),
        Workload(
            "LSTM",
            256 // scale,
            partial(token_model, lstm, 10_000 // scale, 64 // scale),
            optax.adam(1e-3),
            "2 layers of 1024",
        ),
        Workload("GPT", 8, partial(token_model, partial(gpt, layers=2), words, length), adam, "2 layers of 768"),
        Workload(
            "GPT, scanned",
            4,
            partial(token_model, partial(gpt, layers=12, scanned=True), words, length),
            adam,
            "12 layers of 768",
        ),
        Workload("ViT, scanned", 32 // scale, partial(_vit, width, image), adam, "12 layers of 768"),
    ]


def _vit(width: int, image: int, dtype: Any, batch: int) -> Model:
    module = ViT(width, 12, dtype=dtype)
    images = jax.random.normal(jax.random.key(1), (batch, image, image, 3))
    return Model(module.apply, jax.jit(module.init)(jax.random.key(0, impl="rbg"), images[:1]), (images,), first_class)
