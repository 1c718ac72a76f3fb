"""What a program for a TPU computes otherwise; elsewhere nothing changes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jamp.transforms.emission.for_tpus import left_out, written
from tests.transforms.harness import o2

SIZE = 16


def lowered(function, *args, platform="tpu"):
    return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("operator", [written, left_out])
def test_elsewhere_an_identity_whatever_is_done_to_it(operator):
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(jax.jit(operator)(x), x)
    np.testing.assert_array_equal(jax.vmap(operator)(x), x)
    np.testing.assert_array_equal(jax.jvp(operator, (x,), (2 * x,))[1], 2 * x)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.vdot(operator(x), x))(x), 2 * x)
    exported = jax.export.export(jax.jit(operator), platforms=("cpu", "tpu"))(x)
    np.testing.assert_array_equal(exported.call(x), x)


@pytest.mark.parametrize("operator", [written, left_out])
def test_no_operation_on_a_gpu(operator):
    assert lowered(lambda x: jnp.sin(operator(x)), jnp.ones(3), platform="cuda").count("stablehlo.") == 1


def test_what_is_written_has_a_barrier_on_a_tpu():
    assert "optimization_barrier" in lowered(lambda x: jnp.sin(written(x)), jnp.ones(3))


def test_what_is_left_out_is_zero_on_a_tpu():
    text = lowered(lambda x: left_out(x), jnp.ones(3))
    assert "dense<0.000000e+00>" in text
    assert "return %arg0" not in text


def attention_gradient(q, k, v):
    def loss(q, k, v):
        return jnp.sum(jnp.sin(o2(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v)(q, k, v).astype(jnp.float32)))

    return jax.grad(loss, (0, 1, 2))(q, k, v)


def operands():
    return [jax.random.normal(key, (SIZE, SIZE)) for key in jax.random.split(jax.random.key(1), 3)]


def test_sums_of_a_softmax_are_written_on_a_tpu():
    sums = re.compile(rf"optimization_barrier %\w+ : tensor<{SIZE}xf32>")
    assert sums.search(lowered(attention_gradient, *operands()))
    assert not sums.search(lowered(attention_gradient, *operands(), platform="cuda"))


@pytest.mark.parametrize("shift", [0, 64])
def test_the_gradient_of_a_softmax_is_the_same_without_the_mean(shift, monkeypatch):
    """What a TPU computes, computed here; also where all cotangents have much in common."""

    def gradient(z, g):
        return jax.vjp(o2(lambda z, w: jax.nn.softmax(z) @ w), z, jnp.eye(SIZE))[1](g)[0]

    z, g, _ = operands()
    expected = gradient(4 * z, g + shift)
    monkeypatch.setattr("jamp.transforms.emission.functions.left_out", jnp.zeros_like)
    # The cotangents come from a product in half.
    tolerance = 2**-8 * float(jnp.abs(expected).max()) + 2**-20 * shift
    np.testing.assert_allclose(gradient(4 * z, g + shift), expected, rtol=0, atol=tolerance)


def test_weights_of_an_attention_are_rounded_before_they_are_added_up():
    """XLA takes a conversion to half and back for none, and would add up what is in front of it."""
    rounded = re.compile(rf"reduce_precision %\w+, format = e8m7 : tensor<{SIZE}x{SIZE}xbf16>")
    assert rounded.search(lowered(attention_gradient, *operands(), platform="cuda"))


def head_gradient(words):
    def loss(w, v, x):
        return jnp.sum(jnp.sin(o2(lambda w, v, x: jax.nn.standardize(x @ v) @ w)(w, v, x).astype(jnp.float32)))

    return jax.grad(loss, (0, 1)), jnp.ones((SIZE, words)), jnp.ones((SIZE, SIZE)), jnp.ones((4, SIZE))


@pytest.mark.parametrize(("words", "is_written"), [(20 * SIZE, True), (SIZE, False)])
def test_what_a_head_reads_is_written_on_a_tpu(words, is_written):
    read = re.compile(rf"optimization_barrier %\w+ : tensor<4x{SIZE}xbf16>")
    assert bool(read.search(lowered(*head_gradient(words)))) == is_written
