"""Half copies of weights: behind no barrier, and gathered once where weights are sharded."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jamp
from tests.transforms.harness import o2

SIZE, LAYERS = 64, 4


def net(weights, x):
    for w in weights:
        x = jax.nn.relu(x @ w)
    return x


def by_hand(weights, x):
    return net([w.astype(jnp.bfloat16) for w in weights], x.astype(jnp.bfloat16)).astype(jnp.float32)


def gradient(apply):
    return jax.grad(lambda weights, x: jnp.mean(apply(weights, x) ** 2))


def weights(count=LAYERS):
    return [jax.random.normal(jax.random.key(i), (SIZE, SIZE)) for i in range(count)]


@pytest.mark.parametrize("rows", [2, 64 * SIZE], ids=["weights are cast inside", "half copies are kept"])
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, jax.vmap], ids=["alone", "jit", "vmap"])
def test_no_weight_is_read_behind_a_barrier(platform, rows, wrap):
    """A TPU makes half copies inside of products, unless a barrier lies between."""
    ws, x = weights(), jnp.ones((rows, SIZE))
    if wrap is jax.vmap:
        ws, x = [jnp.stack([w, w]) for w in ws], jnp.stack([x, x])
        step = jax.vmap(gradient(o2(net)))
    else:
        step = gradient(wrap(o2(net)))
    text = jax.jit(step).trace(ws, x).lower(lowering_platforms=(platform,)).as_text()
    shape = "x".join(map(str, ws[0].shape))
    found = re.findall(r"stablehlo.optimization_barrier .* : (.*)", text)
    assert not any(shape in types for types in found)
    assert bool(found) == (platform != "tpu")


@pytest.mark.parametrize("rows", [2, 64 * SIZE])
def test_gradients_are_those_of_code_that_casts_by_hand(rows):
    ws, x = weights(2), jax.random.normal(jax.random.key(9), (rows, SIZE))
    found, expected = (jax.jit(gradient(apply))(ws, x) for apply in (o2(net), by_hand))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=0.02 * float(jnp.abs(b).max()))
    tangents = jax.jvp(lambda ws: o2(net)(ws, x).sum(), (ws,), (ws,))[1]
    assert np.isclose(tangents, 2 * o2(net)(ws, x).sum(), rtol=0.02)  # Of degree two in the weights.


def test_one_program_for_several_platforms():
    step = jax.jit(gradient(o2(net)))
    exported = jax.export.export(step, platforms=("cpu", "cuda", "tpu"))(weights(), jnp.ones((2, SIZE)))
    for a, b in zip(exported.call(weights(), jnp.ones((2, SIZE))), step(weights(), jnp.ones((2, SIZE))), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_product_with_two_free_axes_is_lowered_for_the_platform_at_hand():
    """What a CPU needs (see `wide_product`) is no part of a program for a TPU that is written on a CPU."""

    def logits(w, x):
        return jnp.einsum("bk,kpq->bpq", x, w)

    traced = jax.jit(o2(logits)).trace(jnp.ones((SIZE, 4, 8)), jnp.ones((2, SIZE)))
    for_tpu, for_cpu = (traced.lower(lowering_platforms=(name,)).as_text() for name in ("tpu", "cpu"))
    assert "tensor<64x32xbf16>" in for_cpu
    assert "tensor<64x32xbf16>" not in for_tpu


MODES = {
    "data parallel": ([P()] * LAYERS, P("d", None)),
    "fully sharded": ([P("d", None)] * LAYERS, P("d", None)),
    "tensor parallel": ([P(None, "d"), P("d", None)] * (LAYERS // 2), P()),
}


def collectives(compiled):
    """How many arrays each kind of collective moves, by dtype and shape."""
    pattern = r"= (.*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    lines = (match for line in compiled.as_text().splitlines() if (match := re.search(pattern, line)))
    return Counter((match[2], *array) for match in lines for array in re.findall(r"(\w+)\[([\d,]*)\]", match[1]))


@pytest.mark.parametrize("rows", [2 * SIZE, 32 * SIZE])
@pytest.mark.parametrize("mode", MODES)
def test_collectives_are_those_of_code_that_casts_by_hand(mode, rows):
    """Above all, a weight is gathered once. (XLA:CPU raises what it moves to float32, by hand or not.)"""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    specs, data = MODES[mode]
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    ws = [jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32, sharding=sharding) for sharding in shardings]
    x = jax.ShapeDtypeStruct((rows, SIZE), jnp.float32, sharding=NamedSharding(mesh, data))

    def compiled(apply):
        def step(ws, x):
            return [w - 0.1 * g for w, g in zip(ws, gradient(apply)(ws, x), strict=True)]

        return jax.jit(step, out_shardings=shardings, donate_argnums=0).lower(ws, x).compile()

    found = collectives(compiled(jamp.cast_fn(net, "O2:bfloat16")))
    assert found == collectives(compiled(by_hand))
    if mode == "fully sharded":
        gathered = sum(n for (kind, _, shape), n in found.items() if (kind, shape) == ("all-gather", f"{SIZE},{SIZE}"))
        assert gathered == LAYERS
