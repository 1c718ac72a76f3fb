"""Exported programs, of which some sizes are unknown while they are traced."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import jamp
from tests.transforms.harness import LEVELS, layer_norm, product_dtypes, trace

WIDTH = 16
WEIGHTS = jax.random.normal(jax.random.key(0), (4, WIDTH, WIDTH)) / 4
X = jax.random.normal(jax.random.key(1), (3, 5, WIDTH))


def transformer(ws, x):
    h = layer_norm(x)
    q, k, v = (h @ ws[i] for i in range(3))
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / 4
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e9)
    x = x + jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v)
    return jax.nn.log_softmax(x + jax.nn.gelu(layer_norm(x) @ ws[3]))


def recurrent(ws, x):
    def cell(h, x):
        h = jnp.tanh(h @ ws[0] + x @ ws[1])
        return h, h

    return lax.scan(cell, jnp.zeros((x.shape[0], WIDTH)), x.swapaxes(0, 1))[1]


def stacked(ws, x):
    return lax.scan(lambda x, w: (x + jnp.tanh(layer_norm(x) @ w), None), x, ws)[0]


def positions(ws, x):
    return (x + jnp.sin(jnp.arange(x.shape[1])[:, None] * jnp.exp(jnp.linspace(-1, 1, WIDTH)))) @ ws[0]


def dropped(ws, x):
    mask = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
    return jax.checkpoint(lambda x: jnp.where(mask, x @ ws[0], 0.0))(x) @ ws[1]


def over_time(ws, x):
    return jax.nn.softmax(x @ ws[0], axis=1) @ ws[1]


def unknown_sizes():
    batch, length = export.symbolic_shape("batch, length")
    return jax.ShapeDtypeStruct(WEIGHTS.shape, jnp.float32), jax.ShapeDtypeStruct((batch, length, WIDTH), jnp.float32)


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fn", [transformer, recurrent, stacked, positions, dropped, over_time])
def test_products_are_the_same_with_unknown_sizes(fn, level):
    cast = jamp.cast_fn(fn, f"{level}:bfloat16")
    gradient = jax.grad(lambda ws, x: jnp.sin(cast(ws, x)).sum())
    for call in (cast, gradient):
        assert product_dtypes(trace(call, *unknown_sizes())) == product_dtypes(trace(call, WEIGHTS, X))


@pytest.mark.parametrize("fn", [transformer, recurrent])
def test_an_exported_program_computes_what_it_does_without_export(fn):
    cast = jax.jit(jamp.cast_fn(fn, "O2:bfloat16"))
    exported = export.export(cast)(*unknown_sizes())
    np.testing.assert_allclose(exported.call(WEIGHTS, X), cast(WEIGHTS, X), atol=0.02)


def test_a_report_counts_unknown_sizes_as_64():
    sizes = unknown_sizes(), (WEIGHTS, jax.ShapeDtypeStruct((64, 64, WIDTH), jnp.float32))
    unknown, known = (jamp.report(transformer, *args, policy="O2:bfloat16") for args in sizes)
    assert "[batch, length, 16]" in str(unknown)
    assert (unknown.forward, unknown.gradient) == (known.forward, known.gradient)
    assert {name for kept in unknown.residuals for name in kept.shape if isinstance(name, str)} == {"batch", "length"}
    json.dumps(unknown.to_dict()["residuals"])


def blocks(w, x):
    return jnp.sin(jnp.tanh(x @ w) @ w).sum()


SQUARE = jax.random.normal(jax.random.key(2), (64, 64)) / 8


@pytest.mark.parametrize("platforms", [("cpu",), ("cpu", "cuda"), ("tpu", "cpu", "cuda")])
def test_blocks_for_several_platforms(platforms):
    gradient = jax.jit(jax.grad(jamp.cast_fn(blocks, "O2:bfloat16,float8=['dot_general'],matmul=mxfp8"), (0, 1)))
    exported = export.export(gradient, platforms=platforms)(SQUARE, SQUARE)
    assert ("scaled_dot" in exported.mlir_module()) == (len(platforms) == 1)
    for found, expected in zip(exported.call(SQUARE, SQUARE), gradient(SQUARE, SQUARE), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-6)


def test_blocks_beside_an_unknown_size():
    cast = jamp.cast_fn(blocks, "O2:bfloat16,float8=['dot_general'],matmul=mxfp8")
    beside = jax.jit(lambda w, x: cast(w, w) + x.sum())
    (length,) = export.symbolic_shape("length")
    exported = export.export(beside)(SQUARE, jax.ShapeDtypeStruct((length,), jnp.float32))
    np.testing.assert_allclose(exported.call(SQUARE, jnp.ones(3)), beside(SQUARE, jnp.ones(3)), rtol=1e-5)
