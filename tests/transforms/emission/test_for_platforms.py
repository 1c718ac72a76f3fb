"""What a program for a TPU or a GPU computes otherwise; elsewhere nothing changes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from jamp.transforms.emission.for_platforms import held_apart, laid_out, left_out, written
from tests.transforms.harness import o2

SIZE = 16
as_a_matrix = functools.partial(laid_out, contracted=1, free=1)


def lowered(function, *args, platform="tpu"):
    return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("operator", [held_apart, written, left_out])
def test_elsewhere_an_identity_whatever_is_done_to_it(operator):
    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(jax.jit(operator)(x), x)
    np.testing.assert_array_equal(jax.vmap(operator)(x), x)
    np.testing.assert_array_equal(jax.jvp(operator, (x,), (2 * x,))[1], 2 * x)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.vdot(operator(x), x))(x), 2 * x)
    exported = jax.export.export(jax.jit(operator), platforms=("cpu", "tpu"))(x)
    np.testing.assert_array_equal(exported.call(x), x)


@pytest.mark.parametrize("operator", [held_apart, written, left_out])
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


def test_an_operand_that_is_laid_out_is_itself():
    x = jnp.arange(24, dtype=jnp.int8).reshape(2, 3, 4)
    for at in range(4):
        batch = jnp.stack([x, x + 1], at)
        np.testing.assert_array_equal(jax.jit(jax.vmap(as_a_matrix, at, at))(batch), batch)
    exported = jax.export.export(jax.jit(as_a_matrix), platforms=("cpu", "cuda"))(x)
    np.testing.assert_array_equal(exported.call(x), x)


def test_on_a_gpu_it_is_a_matrix_behind_a_barrier():
    x = jnp.zeros((2, 3, 4, 5), jnp.int8)
    text = lowered(functools.partial(laid_out, contracted=1, free=2), x, platform="cuda")
    assert re.search(r"optimization_barrier %\w+ : tensor<2x12x5xi8>", text)
    assert lowered(as_a_matrix, x).count("stablehlo.") == 0


def test_devices_that_share_it_gather_nothing():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    x = jax.device_put(jnp.zeros((4, 8), jnp.int8), jax.NamedSharding(mesh, jax.P(None, "data")))
    assert "optimization_barrier" not in lowered(as_a_matrix, x, platform="cuda")
    on_each = jax.shard_map(as_a_matrix, mesh=mesh, in_specs=jax.P(None, "data"), out_specs=jax.P(None, "data"))
    assert "optimization_barrier" in lowered(on_each, x, platform="cuda")


def test_nor_does_a_mesh_with_explicit_axes_of_one_device():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((8, 128, 256)), jax.NamedSharding(mesh, jax.P(None, "data")))
        w = jax.device_put(jnp.ones((256, 256)), jax.NamedSharding(mesh, jax.P()))
        cast = jamp.cast_fn(lambda w, x: jnp.tanh(x @ w) @ w, "O2:bfloat16,matmul=float8")
        text = lowered(jax.grad(lambda w, x: jnp.tanh(cast(w, x)).sum(), (0, 1)), w, x, platform="cuda")
    assert "f8E4M3FN" in text


@pytest.mark.parametrize("spec", ["bsd,df->bsf", "bsd,dhk->bshk", "bshk,hkd->bsd", "ebd,edf->ebf"])
def test_products_in_8_bits_contract_what_comes_last(spec):
    sizes = dict(zip("bsdfhke", (16, 32, 64, 128, 4, 16, 2), strict=True))
    x, w = (jnp.ones([sizes[name] for name in names]) for names in spec.split("->")[0].split(","))
    loss = lambda w, x: jnp.sum(jnp.sin(jnp.einsum(spec, x, w)) ** 2)  # noqa: E731
    policy = jamp.get_policy("O2:bfloat16,matmul=float8").with_rules(float8=["*"])
    text = lowered(jax.grad(jamp.cast_fn(loss, policy), (0, 1)), w, x, platform="cuda")
    found = re.findall(r"contracting_dims = \[(.*?)\] x \[(.*?)\].*?\(tensor<([\dx]+)xf8\w+>, tensor<([\dx]+)xf8", text)
    assert len(found) == 3
    for *contracted, left, right in found:
        for axes, shape in zip(contracted, (left, right), strict=True):
            axes, rank = [int(axis) for axis in axes.split(",")], shape.count("x") + 1
            assert axes == list(range(rank - len(axes), rank))
    moved = re.findall(r"stablehlo.transpose .*f8E4M3FN", text)
    assert moved and len(re.findall("optimization_barrier .*f8E4M3FN", text)) == len(moved)
