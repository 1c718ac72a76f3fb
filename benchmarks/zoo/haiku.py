"""Haiku models; native precision is ``hk.mixed_precision`` with norms in float32 as in Haiku's ImageNet example."""

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import jmp

from benchmarks.models import Model, first_class, initial, next_token, normal, tokens
from benchmarks.zoo._entries import Zoo

ZOO = Zoo("haiku")
VOCABULARY, WIDTH, HEADS, LENGTH = 256, 128, 4, 64
NORMS = (hk.BatchNorm, hk.LayerNorm)


def _native(apply: Callable[..., Any], top: type[hk.Module], dtype: Any) -> Callable[..., Any]:
    """Runs ``apply`` under policies for the top module and for norms; unchanged where ``dtype`` is None."""
    if dtype is None:
        return apply
    policies = [(top, jmp.Policy(jnp.float32, dtype, jnp.float32))]
    policies += [(norm, jmp.Policy(jnp.float32, jnp.float32, dtype)) for norm in NORMS]
    # Without this the float32 state of an LSTM makes all of its products float32.
    policies.append((hk.Linear, jmp.Policy(jnp.float32, dtype, dtype)))

    def apply_native(*args: Any) -> Any:
        # The policies are thread-local state, so that they are in force only while this call is traced.
        for cls, policy in policies:
            hk.mixed_precision.set_policy(cls, policy)
        try:
            return apply(*args)
        finally:
            for cls, _ in policies:
                hk.mixed_precision.clear_policy(cls)

    return apply_native


@ZOO.add()
def resnet50(dtype: Any) -> Model:
    """ResNet-50 on a small image, with its running statistics."""
    network = hk.transform_with_state(lambda x: hk.nets.ResNet50(10)(x, is_training=True))
    image = normal(4, 32, 32, 3)
    params, state = initial(network.init, dtype, jax.random.key(0), image)

    def apply(params: Any, state: Any, image: jax.Array) -> Any:
        return network.apply(params, state, None, image)

    return Model(_native(apply, hk.nets.ResNet50, dtype), params, (state, image), first_class)


class Transformer(hk.Module):
    """Causal pre-norm language model."""

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = hk.Embed(VOCABULARY, WIDTH)(ids)
        position = hk.get_parameter("position", (LENGTH, WIDTH), init=hk.initializers.RandomNormal(0.02))
        x = x + position[: ids.shape[1]]
        mask = jnp.tril(jnp.ones((1, 1, ids.shape[1], ids.shape[1])))
        for _ in range(3):
            attention = hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=hk.initializers.VarianceScaling(1.0))
            h = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.dropout(hk.next_rng_key(), 0.1, attention(h, h, h, mask=mask))
            h = jax.nn.gelu(hk.Linear(4 * WIDTH)(hk.LayerNorm(-1, True, True)(x)))
            x = x + hk.dropout(hk.next_rng_key(), 0.1, hk.Linear(WIDTH)(h))
        return hk.Linear(VOCABULARY)(hk.LayerNorm(-1, True, True)(x))


@ZOO.add()
def transformer(dtype: Any) -> Model:
    """Causal transformer with dropout."""
    network = hk.transform(lambda ids: Transformer()(ids))
    ids = tokens(4, LENGTH, VOCABULARY)
    params = initial(network.init, dtype, jax.random.key(0), ids)

    def apply(params: Any, key: jax.Array, ids: jax.Array) -> jax.Array:
        return network.apply(params, key, ids)

    return Model(_native(apply, Transformer, dtype), params, (jax.random.PRNGKey(4), ids), next_token)


class Recurrent(hk.Module):
    """LSTM language model over ``hk.dynamic_unroll``."""

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = hk.Embed(VOCABULARY, 64)(ids)
        cell = hk.LSTM(64)
        x, _ = hk.dynamic_unroll(cell, x, cell.initial_state(ids.shape[0]), time_major=False)
        return hk.Linear(VOCABULARY)(x)


@ZOO.add()
def lstm(dtype: Any) -> Model:
    """LSTM whose initial state is float32 zeros."""
    network = hk.without_apply_rng(hk.transform(lambda ids: Recurrent()(ids)))
    ids = tokens(4, 32, VOCABULARY)
    params = initial(network.init, dtype, jax.random.key(0), ids)
    return Model(_native(network.apply, Recurrent, dtype), params, (ids,), next_token)
