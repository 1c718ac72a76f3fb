"""Logits: their cotangents, which are as large, are computed inside of the products that read them."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from tests.transforms.harness import o2

ROWS, WIDTH, WORDS = 64, 8, 96
LOGITS = re.compile(rf"tensor<(4x16x{WORDS}|{WORDS}x4x16|{ROWS}x{WORDS})x(f32|bf16)>")


def hidden(w, x):
    return jnp.tanh(jax.nn.standardize(x @ w["in"]))


FORMS = {
    "matmul": lambda w, x: hidden(w, x) @ w["out"],
    "tied": lambda w, x: hidden(w, x) @ w["table"].T,
    "bias": lambda w, x: hidden(w, x) @ w["out"] + w["bias"],
    "einsum": lambda w, x: jnp.einsum("bld,vd->blv", hidden(w, x), w["table"]),
    "dot_general": lambda w, x: jax.lax.dot_general(hidden(w, x), w["out"], (((2,), (0,)), ((), ()))),
    "flat": lambda w, x: hidden(w, x).reshape(ROWS, WIDTH) @ w["out"],
    "first axis": lambda w, x: jnp.einsum("bld,dv->vbl", hidden(w, x), w["out"]),
    "scaled": lambda w, x: (hidden(w, x) @ w["out"]) * 0.5,
    "in a call": lambda w, x: jax.jit(lambda h: h @ w["out"])(hidden(w, x)),
    "beside others": lambda w, x: (hidden(w, x) @ w["out"] + w["bias"], hidden(w, x).mean())[0],
    "behind layers": lambda w, x: jax.lax.scan(lambda h, v: (h + jnp.tanh(h @ v), None), x, w["layers"])[0] @ w["out"],
}
READ = {  # What reads its logits inside has no cotangent of their size from outside.
    "log-probabilities": lambda w, x: jax.nn.log_softmax(hidden(w, x) @ w["out"]),
    "another product": lambda w, x: (hidden(w, x) @ w["out"]) @ w["table"],
}


def weights():
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "in": jax.random.normal(keys[0], (WIDTH, WIDTH)),
        "out": jax.random.normal(keys[1], (WIDTH, WORDS)),
        "table": jax.random.normal(keys[2], (WORDS, WIDTH)),
        "bias": jnp.ones(WORDS),
        "layers": jax.random.normal(keys[3], (2, WIDTH, WIDTH)),
    }


def data():
    return jax.random.normal(jax.random.key(9), (4, 16, WIDTH))


def gradient(apply):
    def loss(w, x):
        out = apply(w, x)
        return jnp.mean(jax.nn.logsumexp(out, axis=-1)) - 16 * out.mean(axis=range(out.ndim - 1))[0]

    return jax.grad(loss)


def barriers(step, *args):
    traced = jax.jit(step).trace(*args)
    texts = [traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "tpu")]
    return [line for text in texts for line in text.splitlines() if "optimization_barrier" in line]


@pytest.mark.parametrize("form", FORMS)
def test_no_cotangent_of_logits_goes_through_a_barrier(form):
    found = barriers(gradient(jamp.cast_fn(FORMS[form], "O2:bfloat16")), weights(), data())
    assert found or form == "behind layers"  # Whose other operations are in the loop.
    assert not any(LOGITS.search(line) for line in found)


@pytest.mark.parametrize("wrap", [jax.jit, jax.vmap], ids=["jit", "vmap"])
def test_under_transformations(wrap):
    apply = jax.jit(o2(FORMS["bias"])) if wrap is jax.jit else jax.vmap(o2(FORMS["bias"]), (None, 0))
    found = barriers(gradient(apply), weights(), data())
    assert found
    assert not any(LOGITS.search(line) for line in found)


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("form", ["tied", "bias", "in a call", "behind layers", *READ])
def test_gradients_are_those_without_checkpoints(form):
    fn, (w, x) = (FORMS | READ)[form], (weights(), data())
    policies = "O2:bfloat16", "O2:bfloat16,residuals=all"
    found, expected = (jax.jit(gradient(jamp.cast_fn(fn, policy)))(w, x) for policy in policies)
    for name in w:
        bound = 0.05 * float(jnp.abs(expected[name]).max())
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=bound)


def test_the_half_copy_of_a_weight_is_not_kept():
    """It is made again, as of weights in front of a barrier."""
    apply = o2(lambda w, x: jnp.tanh(x) @ w)
    w, x = weights()["out"], data()[0]
    shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(jax.vjp(apply, w, x)[1])]
    assert (w.shape, jnp.float32) in shapes
    assert (w.shape, jnp.bfloat16) not in shapes


def test_a_flax_head():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids):
            embed = nn.Embed(WORDS, WIDTH)
            return embed.attend(nn.LayerNorm()(embed(ids)))

    ids = jnp.arange(ROWS).reshape(4, 16) % WORDS
    params = Model().init(jax.random.key(0), ids)
    apply = jamp.cast_fn(Model().apply, "O2")

    def loss(params):
        return optax.softmax_cross_entropy_with_integer_labels(apply(params, ids), ids).mean()

    found = barriers(jax.grad(loss), params)
    assert found
    assert not any(LOGITS.search(line) for line in found)
