"""ResNet version 1 with 18, 34 or 50 layers in Flax linen, and its train step in mixed precision.

The model is written in float32 and without a word about precision: what `jamp.cast_fn` takes is an ordinary function.

He et al., "Deep Residual Learning for Image Recognition", https://arxiv.org/abs/1512.03385. As in the paper, the first
convolution of a block takes the stride. Images have their channels last, the layout that tensor cores like.
"""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jamp

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}


class Block(nn.Module):
    """A residual block: two 3 x 3 convolutions, or 1 x 1, 3 x 3, 1 x 1 with `bottleneck`."""

    features: int
    stride: int
    bottleneck: bool

    @nn.compact
    def __call__(self, x, train: bool):
        conv = partial(nn.Conv, use_bias=False)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        out_features = self.features * (4 if self.bottleneck else 1)
        kernels = (1, 3, 1) if self.bottleneck else (3, 3)
        y = x
        for i, kernel in enumerate(kernels):
            last = i == len(kernels) - 1
            stride = self.stride if i == 0 else 1
            y = conv(out_features if last else self.features, (kernel, kernel), (stride, stride), padding=kernel // 2)(
                y
            )
            y = norm(scale_init=nn.initializers.zeros if last else nn.initializers.ones)(y)
            y = y if last else nn.relu(y)
        if x.shape != y.shape:
            x = norm()(conv(out_features, (1, 1), (self.stride, self.stride))(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A ResNet for images of shape `(batch, height, width, channels)`; `width` shrinks it for a CPU."""

    depth: int = 50
    classes: int = 1000
    width: int = 64

    @nn.compact
    def __call__(self, images, train: bool):
        x = nn.Conv(self.width, (7, 7), (2, 2), padding=3, use_bias=False)(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
        for stage, blocks in enumerate(BLOCKS[self.depth]):
            for i in range(blocks):
                stride = 2 if stage > 0 and i == 0 else 1
                x = Block(self.width * 2**stage, stride, bottleneck=self.depth >= 50)(x, train)
        return nn.Dense(self.classes, name="head")(x.mean((1, 2)))


def train_forward(model: ResNet) -> Callable:
    """Returns `forward(params, stats, images) -> (logits, new stats)`, the pure function that `jamp.cast_fn` takes."""

    def forward(params, stats, images):
        variables = {"params": params, "batch_stats": stats}
        logits, changed = model.apply(variables, images, train=True, mutable=["batch_stats"])
        return logits, changed["batch_stats"]

    return forward


def init(model: ResNet, seed: int, size: int):
    """Returns float32 params and running statistics for images of `size` x `size` pixels and 3 channels."""

    @jax.jit
    def init_variables(key):
        return model.init(key, jnp.zeros((1, size, size, 3)), train=False)

    # The default generator's code for every leaf takes longer to compile than the whole network.
    variables = init_variables(jax.random.key(seed, impl="rbg"))
    return variables["params"], variables["batch_stats"]


def make_step(model: ResNet, policy: jamp.Policy | str, tx: optax.GradientTransformation) -> Callable:
    """Returns the compiled `step(params, stats, opt_state, images, labels) -> (params, stats, opt_state, loss)`."""
    forward = jamp.cast_fn(train_forward(model), policy=policy)

    def loss_fn(params, stats, images, labels):
        logits, stats = forward(params, stats, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), stats

    def train_step(params, stats, opt_state, images, labels):
        value_and_grad = jamp.scaled_value_and_grad(loss_fn, opt_state, has_aux=True)
        (loss, new_stats), grads = value_and_grad(params, stats, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        stats = jamp.select_tree(opt_state.grads_finite, new_stats, stats)  # a skipped step leaves them alone
        return optax.apply_updates(params, updates), stats, opt_state, loss

    return jax.jit(train_step, donate_argnums=(0, 1, 2))
