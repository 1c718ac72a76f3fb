"""Models in plain JAX, without a library and without scopes; their native mixed precision is written by hand.

A careful author's: products, activations and the residual stream in half, weights cast where they are used, statistics
and the softmax in float32. Without a dtype there are no casts.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.models import Model, first_class, next_token, normal, tokens
from benchmarks.zoo._entries import Zoo

ZOO = Zoo("plain")
VOCABULARY, WIDTH, HEADS, GROUPS, LENGTH, DEPTH = 256, 128, 4, 2, 64, 4
HEAD_WIDTH = WIDTH // HEADS


def _weights(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, jax.Array]:
    """Normal weights scaled by the square root of the fan-in (the axis before the last)."""
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: jax.random.normal(key, shape) / jnp.sqrt(shape[-2] if len(shape) > 1 else 1)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _to(dtype: Any, x: jax.Array) -> jax.Array:
    return x if dtype is None else x.astype(dtype)


def _full(dtype: Any, x: jax.Array) -> jax.Array:
    return x if dtype is None else x.astype(jnp.float32)


def _dense(x: jax.Array, w: jax.Array, dtype: Any) -> jax.Array:
    return _to(dtype, x) @ _to(dtype, w)


@ZOO.add()
def mlp(dtype: Any) -> Model:
    """Three layers and a tanh approximation of GELU."""
    params = _weights({"w0": (64, 256), "b0": (256,), "w1": (256, 256), "b1": (256,), "w2": (256, 10), "b2": (10,)})

    def apply(params: Any, x: jax.Array) -> jax.Array:
        for i in range(2):
            x = jax.nn.gelu(_dense(x, params[f"w{i}"], dtype) + _to(dtype, params[f"b{i}"]))
        return _dense(x, params["w2"], dtype) + _to(dtype, params["b2"])

    return Model(apply, params, (normal(64, 64),), first_class)


def _rms_norm(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    x = _full(dtype, x)
    return _to(dtype, x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale)


def _rotate(x: jax.Array, dtype: Any) -> jax.Array:
    """Rotary positions on ``[batch, time, heads, width]``."""
    frequency = 10_000.0 ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    first, second = jnp.split(x, 2, axis=-1)
    rotated = [first * jnp.cos(angle) - second * jnp.sin(angle), second * jnp.cos(angle) + first * jnp.sin(angle)]
    return _to(dtype, jnp.concatenate(rotated, axis=-1))


def _attend(block: dict[str, jax.Array], x: jax.Array, dtype: Any) -> jax.Array:
    """Grouped-query causal attention with rotary positions."""
    batch, time, _ = x.shape
    query = _rotate(_dense(x, block["query"], dtype).reshape(batch, time, HEADS, HEAD_WIDTH), dtype)
    key = _rotate(_dense(x, block["key"], dtype).reshape(batch, time, GROUPS, HEAD_WIDTH), dtype)
    value = _dense(x, block["value"], dtype).reshape(batch, time, GROUPS, HEAD_WIDTH)
    query = query.reshape(batch, time, GROUPS, HEADS // GROUPS, HEAD_WIDTH)
    scores = _full(dtype, jnp.einsum("btgqh,bsgh->bgqts", query, key)) / jnp.sqrt(HEAD_WIDTH)
    scores = jnp.where(jnp.tril(jnp.ones((time, time), bool)), scores, -1e9)
    mixed = jnp.einsum("bgqts,bsgh->btgqh", _to(dtype, jax.nn.softmax(scores)), value)
    return _dense(mixed.reshape(batch, time, WIDTH), block["out"], dtype)


def _block(block: dict[str, jax.Array], x: jax.Array, dtype: Any) -> jax.Array:
    x = x + _attend(block, _rms_norm(x, block["attention_norm"], dtype), dtype)
    h = _rms_norm(x, block["feed_norm"], dtype)
    return x + _dense(
        jax.nn.silu(_dense(h, block["gate"], dtype)) * _dense(h, block["up"], dtype), block["down"], dtype
    )


def _transformer(dtype: Any, mode: str, depth: int = DEPTH) -> Model:
    """Llama-like language model; its blocks are a list, or stacked on a leading axis to be scanned."""
    grouped = GROUPS * HEAD_WIDTH
    shapes = {"query": (WIDTH, WIDTH), "key": (WIDTH, grouped), "value": (WIDTH, grouped), "out": (WIDTH, WIDTH)}
    shapes |= {"gate": (WIDTH, 3 * WIDTH), "up": (WIDTH, 3 * WIDTH), "down": (3 * WIDTH, WIDTH)}
    norms = {"attention_norm": jnp.ones(WIDTH), "feed_norm": jnp.ones(WIDTH)}
    blocks = [_weights(shapes, seed) | norms for seed in range(depth)]
    params = {
        "embed": _weights({"embed": (VOCABULARY, WIDTH)}, depth)["embed"],
        "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks) if mode == "scanned" else blocks,
        "norm": jnp.ones(WIDTH),
        "head": _weights({"head": (WIDTH, VOCABULARY)}, depth + 1)["head"],
    }

    def apply(params: Any, ids: jax.Array) -> jax.Array:
        x = _to(dtype, params["embed"][ids])
        one = partial(_block, dtype=dtype)
        block = jax.checkpoint(one) if mode == "remat" else one
        if mode == "scanned":
            x, _ = lax.scan(lambda x, weights: (block(weights, x), None), x, params["blocks"])
        else:
            for weights in params["blocks"]:
                x = block(weights, x)
        return _dense(_rms_norm(x, params["norm"], dtype), params["head"], dtype)

    return Model(apply, params, (tokens(4, LENGTH, VOCABULARY),), next_token)


@ZOO.add()
def transformer(dtype: Any) -> Model:
    """Llama-like transformer: RMSNorm, rotary, grouped queries, SwiGLU."""
    return _transformer(dtype, "unrolled")


@ZOO.add()
def transformer_scanned(dtype: Any) -> Model:
    """The same under ``lax.scan``."""
    return _transformer(dtype, "scanned")


@ZOO.add()
def transformer_remat(dtype: Any) -> Model:
    """The same under ``jax.checkpoint``."""
    return _transformer(dtype, "remat")


def transformer_deep(dtype: Any, depth: int) -> Model:
    """Unrolled blocks for trace times."""
    model = _transformer(dtype, "unrolled", 1)
    return Model(model.apply, model.params | {"blocks": model.params["blocks"] * depth}, model.inputs, model.loss)


@ZOO.add()
def gnn(dtype: Any) -> Model:
    """Graph network: gather, messages, ``segment_sum`` and ``segment_softmax`` over 1,024 edges."""
    nodes, edges = 128, 1024
    sender, receiver = jax.random.randint(jax.random.key(1), (2, edges), 0, nodes)
    params = _weights({f"{name}{i}": (64, 64) for i in range(3) for name in ("message", "update", "self")})
    params |= _weights({f"score{i}": (64, 1) for i in range(3)}, 1)

    def apply(params: Any, x: jax.Array, sender: jax.Array, receiver: jax.Array) -> jax.Array:
        x = _to(dtype, x)
        for i in range(3):
            score = jax.nn.leaky_relu(_full(dtype, _dense(x[sender] + x[receiver], params[f"score{i}"], dtype)))
            weight = jnp.exp(score - jax.ops.segment_max(score, receiver, nodes)[receiver])
            weight = weight / jax.ops.segment_sum(weight, receiver, nodes)[receiver]
            message = jax.nn.relu(_dense(x[sender], params[f"message{i}"], dtype))
            gathered = jax.ops.segment_sum(weight * message, receiver, nodes)
            update = _dense(gathered, params[f"update{i}"], dtype)
            x = jax.nn.relu(_dense(x, params[f"self{i}"], dtype) + update)
        return x

    return Model(apply, params, (normal(nodes, 64), sender, receiver))


@ZOO.add()
def cnn(dtype: Any) -> Model:
    """Convolutions through ``lax`` with a hand-written BatchNorm and average pooling."""
    params = _weights({"stem": (3, 3, 3, 32), "second": (3, 3, 32, 64), "head": (64, 10)})
    params |= {"scale0": jnp.ones(32), "shift0": jnp.zeros(32), "scale1": jnp.ones(64), "shift1": jnp.zeros(64)}

    def apply(params: Any, x: jax.Array) -> jax.Array:
        for i, name in enumerate(("stem", "second")):
            axes = ("NHWC", "HWIO", "NHWC")
            x, weight = _to(dtype, x), _to(dtype, params[name])
            x = _full(dtype, lax.conv_general_dilated(x, weight, (1, 1), "SAME", dimension_numbers=axes))
            mean, variance = x.mean(axis=(0, 1, 2)), x.var(axis=(0, 1, 2))
            x = (x - mean) / jnp.sqrt(variance + 1e-5) * params[f"scale{i}"] + params[f"shift{i}"]
            x = jax.nn.relu(_to(dtype, x))
            x = lax.reduce_window(x, x.dtype.type(0), lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
        return _dense(x.mean(axis=(1, 2)), params["head"], dtype)

    return Model(apply, params, (normal(8, 32, 32, 3),), first_class)


@ZOO.add()
def rnn_while(dtype: Any) -> Model:
    """Elman cell under ``fori_loop`` with a ``cond`` inside and a float32 accumulator beside a half state."""
    params = _weights({"inside": (64, 64), "outside": (64, 64), "head": (64, 10)})

    def apply(params: Any, x: jax.Array) -> jax.Array:
        x, inside, outside = (_to(dtype, value) for value in (x, params["inside"], params["outside"]))

        def step(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            state, total = carry
            state = jnp.tanh(x[:, i] @ inside + state @ outside)
            state = lax.cond(i % 2 == 0, lambda s: s, lambda s: s * 0.5, state)
            return state, total + jnp.sum(_full(dtype, state) ** 2, axis=-1)

        start = (_to(dtype, jnp.zeros((x.shape[0], 64))), jnp.zeros(x.shape[0]))
        state, total = lax.fori_loop(0, x.shape[1], step, start)
        return _dense(state, params["head"], dtype) + total[:, None]

    return Model(apply, params, (normal(8, 16, 64),), first_class)
