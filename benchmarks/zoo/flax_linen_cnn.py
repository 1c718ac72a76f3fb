"""Flax linen convolutional networks, one for every norm."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.models import Model, first_class, initial, normal
from benchmarks.zoo._entries import Zoo

ZOO = Zoo("linen")


class ResidualBlock(nn.Module):
    """Two convolutions with a shortcut, widened where the stride asks for it."""

    features: int
    stride: int
    norm: Callable[..., nn.Module]
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        strides = (self.stride, self.stride)
        h = nn.relu(self.norm()(conv(self.features, (3, 3), strides)(x)))
        h = self.norm()(conv(self.features, (3, 3))(h))
        if x.shape != h.shape:
            x = self.norm()(conv(self.features, (1, 1), strides)(x))
        return nn.relu(x + h)


class ResNet(nn.Module):
    """Residual network of two stages."""

    norm: Callable[..., nn.Module]
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(self.norm()(nn.Conv(32, (3, 3), use_bias=False, dtype=self.dtype)(x)))
        for features, stride in ((32, 1), (32, 1), (64, 2), (64, 1)):
            x = ResidualBlock(features, stride, self.norm, self.dtype)(x)
        return nn.Dense(10, dtype=self.dtype)(x.mean(axis=(1, 2)))


@ZOO.add()
def resnet_batchnorm(dtype: Any) -> Model:
    """Residual network with BatchNorm, whose running statistics are mutable."""
    module, image = ResNet(partial(nn.BatchNorm, use_running_average=False, dtype=dtype), dtype), normal(8, 32, 32, 3)
    variables = initial(module.init, dtype, jax.random.key(0), image)

    def apply(params: Any, batch_stats: Any, image: jax.Array) -> Any:
        return module.apply({"params": params, "batch_stats": batch_stats}, image, mutable=["batch_stats"])

    return Model(apply, variables["params"], (variables["batch_stats"], image), first_class)


class NormedCNN(nn.Module):
    """Plain stack of convolutions with a norm after each."""

    norm: Callable[..., nn.Module]
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features, stride in ((32, 1), (32, 1), (64, 2), (64, 1)):
            x = nn.Conv(features, (3, 3), (stride, stride), dtype=self.dtype)(x)
            x = nn.relu(self.norm(dtype=self.dtype)(x))
        return nn.Dense(10, dtype=self.dtype)(nn.max_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1))


def _cnn(norm: Callable[..., nn.Module], dtype: Any) -> Model:
    module, image = NormedCNN(norm, dtype), normal(8, 32, 32, 3)
    return Model(module.apply, initial(module.init, dtype, jax.random.key(0), image), (image,), first_class)


@ZOO.add()
def cnn_groupnorm(dtype: Any) -> Model:
    """Convolutions with GroupNorm."""
    return _cnn(partial(nn.GroupNorm, num_groups=8), dtype)


@ZOO.add()
def cnn_layernorm(dtype: Any) -> Model:
    """Convolutions with LayerNorm."""
    return _cnn(nn.LayerNorm, dtype)


@ZOO.add()
def cnn_instancenorm(dtype: Any) -> Model:
    """Convolutions with InstanceNorm."""
    return _cnn(nn.InstanceNorm, dtype)


@ZOO.add()
def cnn_rmsnorm(dtype: Any) -> Model:
    """Convolutions with RMSNorm."""
    return _cnn(nn.RMSNorm, dtype)


class UNet(nn.Module):
    """Encoder and decoder with skips; GroupNorm and transposed convolutions, as in diffusion models."""

    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def double(x: jax.Array, features: int) -> jax.Array:
            for _ in range(2):
                x = nn.Conv(features, (3, 3), dtype=self.dtype)(x)
                x = nn.swish(nn.GroupNorm(num_groups=8, dtype=self.dtype)(x))
            return x

        skips = []
        for features in (16, 32):
            x = double(x, features)
            skips.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = double(x, 64)
        for features, skip in zip((32, 16), reversed(skips), strict=True):
            x = nn.ConvTranspose(features, (2, 2), (2, 2), dtype=self.dtype)(x)
            x = double(jnp.concatenate([x, skip], axis=-1), features)
        return nn.Conv(3, (1, 1), dtype=self.dtype)(x)


@ZOO.add()
def unet(dtype: Any) -> Model:
    """U-Net."""
    module, image = UNet(dtype), normal(4, 32, 32, 3)
    return Model(module.apply, initial(module.init, dtype, jax.random.key(0), image), (image,))
