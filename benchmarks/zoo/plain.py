"""Models in plain JAX: no library, no scopes, no native mixed precision."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.zoo._model import Model, Zoo, first_class, next_token, normal, tokens

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


@ZOO.add(native=False)
def mlp(dtype: Any) -> Model:
    """Three layers and a tanh approximation of GELU."""
    del dtype
    params = _weights({"w0": (64, 256), "b0": (256,), "w1": (256, 256), "b1": (256,), "w2": (256, 10), "b2": (10,)})

    def apply(params: Any, x: jax.Array) -> jax.Array:
        for i in range(2):
            x = jax.nn.gelu(x @ params[f"w{i}"] + params[f"b{i}"])
        return x @ params["w2"] + params["b2"]

    return Model(apply, params, (normal(64, 64),), first_class)


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary positions on ``[batch, time, heads, width]``."""
    frequency = 10_000.0 ** (-jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * jnp.cos(angle) - second * jnp.sin(angle), second * jnp.cos(angle) + first * jnp.sin(angle)], axis=-1
    )


def _attend(block: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Grouped-query causal attention with rotary positions."""
    batch, time, _ = x.shape
    query = _rotate((x @ block["query"]).reshape(batch, time, HEADS, HEAD_WIDTH))
    key = _rotate((x @ block["key"]).reshape(batch, time, GROUPS, HEAD_WIDTH))
    value = (x @ block["value"]).reshape(batch, time, GROUPS, HEAD_WIDTH)
    query = query.reshape(batch, time, GROUPS, HEADS // GROUPS, HEAD_WIDTH)
    scores = jnp.einsum("btgqh,bsgh->bgqts", query, key) / jnp.sqrt(HEAD_WIDTH)
    scores = jnp.where(jnp.tril(jnp.ones((time, time), bool)), scores, -1e9)
    mixed = jnp.einsum("bgqts,bsgh->btgqh", jax.nn.softmax(scores), value)
    return mixed.reshape(batch, time, WIDTH) @ block["out"]


def _block(block: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    x = x + _attend(block, _rms_norm(x, block["attention_norm"]))
    h = _rms_norm(x, block["feed_norm"])
    return x + (jax.nn.silu(h @ block["gate"]) * (h @ block["up"])) @ block["down"]


def _transformer(mode: str, depth: int = DEPTH) -> Model:
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
        x = params["embed"][ids]
        block = jax.checkpoint(_block) if mode == "remat" else _block
        if mode == "scanned":
            x, _ = lax.scan(lambda x, weights: (block(weights, x), None), x, params["blocks"])
        else:
            for weights in params["blocks"]:
                x = block(weights, x)
        return _rms_norm(x, params["norm"]) @ params["head"]

    return Model(apply, params, (tokens(4, LENGTH, VOCABULARY),), next_token)


@ZOO.add(native=False)
def transformer(dtype: Any) -> Model:
    """Llama-like transformer: RMSNorm, rotary, grouped queries, SwiGLU."""
    del dtype
    return _transformer("unrolled")


@ZOO.add(native=False)
def transformer_scanned(dtype: Any) -> Model:
    """The same under ``lax.scan``."""
    del dtype
    return _transformer("scanned")


@ZOO.add(native=False)
def transformer_remat(dtype: Any) -> Model:
    """The same under ``jax.checkpoint``."""
    del dtype
    return _transformer("remat")


def transformer_deep(dtype: Any, depth: int) -> Model:
    """Unrolled blocks for trace times."""
    del dtype
    model = _transformer("unrolled", 1)
    return Model(model.apply, model.params | {"blocks": model.params["blocks"] * depth}, model.inputs, model.loss)


@ZOO.add(native=False)
def gnn(dtype: Any) -> Model:
    """Graph network: gather, messages, ``segment_sum`` and ``segment_softmax`` over 1,024 edges."""
    del dtype
    nodes, edges = 128, 1024
    sender, receiver = jax.random.randint(jax.random.key(1), (2, edges), 0, nodes)
    params = _weights({f"{name}{i}": (64, 64) for i in range(3) for name in ("message", "update", "self")})
    params |= _weights({f"score{i}": (64, 1) for i in range(3)}, 1)

    def apply(params: Any, x: jax.Array, sender: jax.Array, receiver: jax.Array) -> jax.Array:
        for i in range(3):
            score = jax.nn.leaky_relu((x[sender] + x[receiver]) @ params[f"score{i}"])
            weight = jnp.exp(score - jax.ops.segment_max(score, receiver, nodes)[receiver])
            weight = weight / jax.ops.segment_sum(weight, receiver, nodes)[receiver]
            message = jax.nn.relu(x[sender] @ params[f"message{i}"])
            gathered = jax.ops.segment_sum(weight * message, receiver, nodes)
            x = jax.nn.relu(x @ params[f"self{i}"] + gathered @ params[f"update{i}"])
        return x

    return Model(apply, params, (normal(nodes, 64), sender, receiver))


@ZOO.add(native=False)
def cnn(dtype: Any) -> Model:
    """Convolutions through ``lax`` with a hand-written BatchNorm and average pooling."""
    del dtype
    params = _weights({"stem": (3, 3, 3, 32), "second": (3, 3, 32, 64), "head": (64, 10)})
    params |= {"scale0": jnp.ones(32), "shift0": jnp.zeros(32), "scale1": jnp.ones(64), "shift1": jnp.zeros(64)}

    def apply(params: Any, x: jax.Array) -> jax.Array:
        for i, name in enumerate(("stem", "second")):
            x = lax.conv_general_dilated(x, params[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            mean, variance = x.mean(axis=(0, 1, 2)), x.var(axis=(0, 1, 2))
            x = (x - mean) / jnp.sqrt(variance + 1e-5) * params[f"scale{i}"] + params[f"shift{i}"]
            x = lax.reduce_window(jax.nn.relu(x), 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
        return x.mean(axis=(1, 2)) @ params["head"]

    return Model(apply, params, (normal(8, 32, 32, 3),), first_class)


@ZOO.add(native=False)
def rnn_while(dtype: Any) -> Model:
    """Elman cell under ``fori_loop`` with a ``cond`` inside and a float32 accumulator beside a half state."""
    del dtype
    params = _weights({"inside": (64, 64), "outside": (64, 64), "head": (64, 10)})

    def apply(params: Any, x: jax.Array) -> jax.Array:
        def step(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            state, total = carry
            state = jnp.tanh(x[:, i] @ params["inside"] + state @ params["outside"])
            state = lax.cond(i % 2 == 0, lambda s: s, lambda s: s * 0.5, state)
            return state, total + jnp.sum(state**2, axis=-1)

        start = (jnp.zeros((x.shape[0], 64)), jnp.zeros(x.shape[0]))
        state, total = lax.fori_loop(0, x.shape[1], step, start)
        return state @ params["head"] + total[:, None]

    return Model(apply, params, (normal(8, 16, 64),), first_class)
