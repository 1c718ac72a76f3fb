"""Models of Flax, Equinox and Haiku, and losses of optax, in the ways that these libraries have for half precision."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.numerics._networks import F32, mlp, mlp_weights
from tests.numerics._program import Program

BATCH, TIME, WIDTH, CLASSES = 16, 10, 16, 5


class Block(nn.Module):
    """A pre-norm transformer block of Flax, its attention masked by the caller."""

    dtype: jnp.dtype = F32

    @nn.compact
    def __call__(self, x, mask):
        h = nn.LayerNorm(dtype=self.dtype)(x)
        h = x + nn.MultiHeadDotProductAttention(2, dtype=self.dtype, deterministic=True)(h, mask=mask)
        g = nn.gelu(nn.Dense(32, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(h)))
        return nn.Dense(CLASSES, dtype=self.dtype)(h + nn.Dense(WIDTH, dtype=self.dtype)(g)).astype(F32)


class Convolutions(nn.Module):
    """A small Flax network with batch normalization."""

    dtype: jnp.dtype = F32

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.Conv(8, (3, 3), use_bias=False, dtype=self.dtype)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        return nn.Dense(CLASSES, dtype=self.dtype)(x.mean((1, 2))).astype(F32)


def flax_transformer(params, x, present, labels, *, dtype=F32):
    """Left-padded sequences: rows of padding may look at nothing."""
    mask = nn.make_causal_mask(present) * nn.make_attention_mask(present > 0, present > 0)
    logits = Block(dtype).apply(params, x, mask)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.where(present > 0, losses, 0.0)


def flax_convolutions(variables, x, labels, *, dtype=F32):
    """Batch statistics of images of brightness around 100."""
    logits, _ = Convolutions(dtype).apply(variables, x, mutable=["batch_stats"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels, axis=-1)


def equinox_recurrent(cell, x, lengths, *, dtype=F32):
    """A gated unit of Equinox in a scan, its arrays cast; a loss of lengths in the hundreds by optax."""
    cell, head = jax.tree.map(lambda p: p.astype(dtype), cell)

    def run(xs):
        h, _ = jax.lax.scan(lambda h, x: (cell(x.astype(dtype), h), None), jnp.zeros(WIDTH, dtype), xs)
        return head(h)[0].astype(F32)

    return optax.huber_loss(250.0 + jax.vmap(run)(x), lengths)


def _haiku_net(x, dtype):
    core = hk.LSTM(WIDTH)
    policy = lambda next_f, value, _: next_f(value.astype(dtype))
    with hk.custom_getter(policy):
        state = jax.tree.map(lambda s: s.astype(dtype), core.initial_state(x.shape[1]))
        h, _ = hk.dynamic_unroll(core, x.astype(dtype), state)
        return hk.Linear(CLASSES)(h).astype(F32)


def haiku_tagger(params, x, labels, *, dtype=F32):
    """A Haiku LSTM that tags each step."""
    logits = hk.without_apply_rng(hk.transform(lambda x: _haiku_net(x, dtype))).apply(params, x)
    return optax.losses.poly_loss_cross_entropy(logits, jax.nn.one_hot(labels, CLASSES))


def focal(params, x, labels, *, dtype=F32):
    """Optax's focal loss of rare positives."""
    return optax.sigmoid_focal_loss(4.0 * mlp(params, x, dtype), labels, alpha=0.25).mean(-1)


def cosines(params, x, target, *, dtype=F32):
    """Optax's cosine distance, rows of zeros among the targets."""
    return optax.cosine_distance(mlp(params, x, dtype), target, epsilon=1e-8)


def divergence(params, x, target, *, dtype=F32):
    """Optax's generalized divergence of a distribution in logarithms."""
    return optax.kl_divergence(jax.nn.log_softmax(2.0 * mlp(params, x, dtype)), target)


def contrast(params, x, labels, *, dtype=F32):
    """Optax's normalized temperature-scaled loss of labelled pairs."""
    z = mlp(params, x, dtype).reshape(4, 4, -1)
    return jax.vmap(lambda z, labels: optax.ntxent(z, labels, temperature=0.1))(z, labels)


def perceptron(params, x, target, *, dtype=F32):
    """A step of Adam inside of the loss, as in learning to optimize: second moments of 1e-8."""
    loss = lambda p: jnp.mean(jnp.square(mlp(p, x, dtype) - target)) * 1e-3
    tx = optax.adam(1e-2)
    updates, _ = tx.update(jax.lax.stop_gradient(jax.grad(loss)(params)), tx.init(params), params)
    return jnp.square(mlp(optax.apply_updates(params, updates), x, dtype) - target).mean(-1)


def _weights(rng, init, *args):
    """Weights of a library's model, without running its initializers."""

    def draw(path, shape):
        if len(shape.shape) > 1:
            return rng.normal(size=shape.shape) / np.sqrt(np.prod(shape.shape[:-1]))
        ones = any(name in jax.tree_util.keystr(path) for name in ("scale", "var"))
        return 1.0 * ones + 0.1 * np.abs(rng.normal(size=shape.shape))

    shapes = jax.eval_shape(init, *args)
    return jax.tree_util.tree_map_with_path(draw, shapes)


def _like(*shape):
    return jax.ShapeDtypeStruct(shape, F32)


def _padded(rng):
    x = rng.normal(size=(4, TIME, WIDTH))
    present = 1.0 * (np.arange(TIME) >= np.array([0, 3, 5, 7])[:, None])
    params = _weights(rng, Block().init, jax.random.key(0), _like(*x.shape), _like(4, 1, TIME, TIME))
    return params, x, present, rng.integers(0, CLASSES, (4, TIME))


def _images(rng):
    x = 100.0 + 20.0 * rng.normal(size=(BATCH, 8, 8, 3))
    return _weights(rng, Convolutions().init, jax.random.key(0), _like(*x.shape)), x, rng.integers(0, CLASSES, BATCH)


def _cells(rng):
    key = jax.random.key(0)
    cell = _weights(rng, lambda: (eqx.nn.GRUCell(8, WIDTH, key=key), eqx.nn.Linear(WIDTH, 1, key=key)))
    return cell, rng.normal(size=(BATCH, TIME, 8)), 250.0 + rng.normal(size=BATCH)


def _tagged(rng):
    x = rng.normal(size=(TIME, 4, 8))
    params = _weights(rng, hk.transform(lambda x: _haiku_net(x, F32)).init, jax.random.key(0), _like(*x.shape))
    return params, x, rng.integers(0, CLASSES, (TIME, 4))


def _targets(make):
    def inputs(rng):
        return mlp_weights(rng, WIDTH, 32, 8), rng.normal(size=(BATCH, WIDTH)), make(rng)

    return inputs


def _with_zeros(rng):
    return np.where(np.arange(BATCH)[:, None] % 5 == 0, 0.0, rng.normal(size=(BATCH, 8)))


LIBRARIES = "libraries"
PROGRAMS = (
    Program(flax_transformer, _padded, (0, 1), "masks"),
    Program(flax_convolutions, _images, (0,), LIBRARIES),
    Program(equinox_recurrent, _cells, (0, 1), LIBRARIES),
    Program(haiku_tagger, _tagged, (0, 1), LIBRARIES),
    Program(focal, _targets(lambda rng: 1.0 * (rng.random((BATCH, 8)) < 0.1)), (0, 1), LIBRARIES),
    Program(cosines, _targets(_with_zeros), (0, 1), "epsilons"),
    Program(divergence, _targets(lambda rng: rng.dirichlet(np.ones(8), BATCH)), (0, 1), LIBRARIES),
    Program(contrast, _targets(lambda rng: np.tile([0, 0, 1, 1], (4, 1))), (0, 1), LIBRARIES),
    Program(perceptron, _targets(lambda rng: rng.normal(size=(BATCH, 8))), (0, 1), "range"),
)
