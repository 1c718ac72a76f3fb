"""The policy of a user's checkpoint says what is kept of what the user wrote, whatever stands for it now."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jamp
from tests.transforms.harness import find

SIZE = 128
KEYS = jax.random.split(jax.random.key(0), 4)
W = jax.random.normal(KEYS[0], (3, SIZE, SIZE)) / 11
X = jax.random.normal(KEYS[1], (SIZE, SIZE))
Policy = Callable[..., Any]
Model = Callable[[Policy, jax.Array, jax.Array], jax.Array]
SAVEABLE = jax.checkpoint_policies


def layer(h: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(h @ w) + h


def scanned(policy: Policy, w: jax.Array, x: jax.Array) -> jax.Array:
    body = jax.checkpoint(lambda h, w: (layer(h, w), None), policy=policy)
    return jax.lax.scan(body, x, w)[0]


def unrolled(policy: Policy, w: jax.Array, x: jax.Array) -> jax.Array:
    for each in w:
        x = jax.checkpoint(layer, policy=policy)(x, each)
    return x


def logits(policy: Policy, w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda w, x: jax.nn.log_softmax(layer(x, w[0]) @ w[1]), policy=policy)(w, x)


def in_a_function(policy: Policy, w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.checkpoint(jax.jit(lambda w, x: layer(layer(x, w[0]), w[1])), policy=policy)(w, x)


def attention(policy: Policy, w: jax.Array, x: jax.Array) -> jax.Array:
    def attend(w: jax.Array, x: jax.Array) -> jax.Array:
        q, k, v = ((x @ each).reshape(2, SIZE // 2, 4, SIZE // 4) for each in w)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 6)
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(SIZE, SIZE) @ w[0]

    return jax.checkpoint(attend, policy=policy)(w, x)


def convolution(policy: Policy, w: jax.Array, x: jax.Array) -> jax.Array:
    def convolve(w: jax.Array, x: jax.Array) -> jax.Array:
        kernel, images = w[0].reshape(-1)[: 9 * 256].reshape(3, 3, 16, 16), x.reshape(4, 16, 16, 16)
        images = jax.lax.conv_general_dilated(
            images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.nn.relu(images).reshape(SIZE, SIZE) @ w[1]

    return jax.checkpoint(convolve, policy=policy)(w, x)


MODELS = [scanned, unrolled, logits, in_a_function, attention, convolution]
LEVELS = ["O1:bfloat16", "O2:bfloat16", "O2:bfloat16,reduce=float32", "O2:bfloat16,matmul=float8"]


def products_of_gradient(model: Model, policy: Policy, level: str) -> int:
    """How often the gradient multiplies."""
    cast = jamp.cast_fn(lambda w, x: jnp.mean(model(policy, w, x) ** 2), level)
    lowered = jax.jit(jax.grad(cast, argnums=(0, 1))).lower(W, X).as_text()
    return lowered.count("stablehlo.dot_general") + lowered.count("stablehlo.convolution")


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model", MODELS)
def test_products_are_multiplied_as_often_as_in_float32(model: Model, level: str) -> None:
    policies = [SAVEABLE.everything_saveable, SAVEABLE.dots_saveable, SAVEABLE.nothing_saveable]
    expected = [products_of_gradient(model, policy, "O0") for policy in policies]
    assert expected[1] < expected[2]
    assert [products_of_gradient(model, policy, level) for policy in policies] == expected


def test_a_fused_attention_that_is_kept_is_not_computed_again() -> None:
    level = "O2:bfloat16,attention=fused"
    everything, dots, nothing = (
        products_of_gradient(attention, policy, level)
        for policy in (SAVEABLE.everything_saveable, SAVEABLE.dots_saveable, SAVEABLE.nothing_saveable)
    )
    assert everything == dots < nothing


def test_products_in_blocks_are_kept() -> None:
    def kept(policy: Policy) -> int:
        return sum(jamp.report(lambda w, x: scanned(policy, w, x), W, X, policy=level).residual_bytes.values())

    level = "O2:bfloat16,matmul=mxfp8"
    assert kept(SAVEABLE.dots_saveable) - kept(SAVEABLE.nothing_saveable) == 2 * W.size  # In half, of each layer.


def test_a_policy_that_sees_numbers_of_dimensions_sees_those_that_were_written() -> None:
    """A product of matrices in a batch is none without, in whatever order its axes are multiplied."""
    seen: list[tuple[str, Any]] = []

    def policy(primitive: Any, *_: Any, **params: Any) -> bool:
        seen.append((primitive.name, params.get("dimension_numbers")))
        return False

    def model(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.checkpoint(lambda w, x: jnp.einsum("bij,bkj->bik", x[None], w), policy=policy)(w[:1], x))

    written = jax.make_jaxpr(model)(W, X)
    (product,) = find(written, "dot_general")
    jax.make_jaxpr(jax.grad(jamp.cast_fn(model, "O2:bfloat16,reduce=float32")))(W, X)
    assert ("dot_general", product.params["dimension_numbers"]) in seen


def test_what_is_offloaded_by_name_is_offloaded_once() -> None:
    policy = SAVEABLE.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["h"], offload_src="device", offload_dst="pinned_host"
    )

    def model(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return layer(checkpoint_name(h, "h"), w), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(body, policy=policy), x, w)[0])

    def moved(level: str) -> int:
        return len(find(jax.make_jaxpr(jax.grad(jamp.cast_fn(model, level)))(W, X), "device_put"))

    assert moved("O2:bfloat16,matmul=float8") == moved("O0") > 0
