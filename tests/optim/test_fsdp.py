"""Parameters sharded over devices (FSDP): what travels is the half copy of a weight, scanned layers included.

In float16, because the CPU's compiler replaces collectives of bfloat16, which it does not have, by ones of float32.
"""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jamp

LAYERS, WIDTH = 3, 128
SPECS = {"w": P(None, "data"), "norm": P(), "head": P("data")}


def layer(h, p):
    centered = h - h.mean(-1, keepdims=True)
    normed = centered * lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-5) * p["norm"]
    return h + jax.nn.gelu(normed @ p["w"])


def scanned(params, x):
    h, _ = lax.scan(lambda h, p: (layer(h, p), None), x, {"w": params["w"], "norm": params["norm"]})
    return h @ params["head"]


def looped(params, x):
    for i in range(LAYERS):
        x = layer(x, {"w": params["w"][i], "norm": params["norm"][i]})
    return x @ params["head"]


def compiled_step(model, policy):
    """The optimized HLO of a train step with parameters sharded over eight devices."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    shapes = {"w": (LAYERS, WIDTH, WIDTH), "norm": (LAYERS, WIDTH), "head": (WIDTH, 8)}
    params = {n: jax.device_put(jnp.ones(s), NamedSharding(mesh, SPECS[n])) for n, s in shapes.items()}
    x = jax.device_put(jnp.ones((16, WIDTH)), NamedSharding(mesh, P("data")))
    tx = jamp.mixed_precision(optax.sgd(1.0), policy)
    apply_fn = jamp.cast_fn(model, policy)

    def step(params, opt_state, x):
        grads = jamp.scaled_value_and_grad(lambda p: (apply_fn(p, x) ** 2).mean(), opt_state)(params)[1]
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return jax.jit(step).lower(params, tx.init(params), x).compile().as_text()


def all_gathers(hlo):
    """Type and shape of what each all-gather makes, and the place in the model that it was made for."""
    return re.findall(r"= (\w+\[[\d,]*\])\S* all-gather(?:-start)?\(.*?op_name=\"([^\"]*)\"", hlo)


@pytest.mark.parametrize("model", [scanned, looped])
def test_the_half_copy_is_gathered(model):
    gathers = all_gathers(compiled_step(model, "O2:float16"))
    weights = [kind for kind, _ in gathers if kind.endswith(f"[{WIDTH},{WIDTH}]")]
    assert len(weights) >= 2  # In the forward and in the backward pass.
    assert all(kind.startswith("f16[") for kind, _ in gathers), gathers
    if model is scanned:  # Layer by layer, inside the loop: no copy of the whole stack ever lies on a device.
        assert all("while/body" in where for kind, where in gathers if kind.endswith(f"[{WIDTH},{WIDTH}]"))
        assert not any(kind.endswith(f"[{LAYERS},{WIDTH},{WIDTH}]") for kind, _ in gathers)


def test_in_float32_the_weight_itself_is_gathered():
    """The same count sees float32 where there is some."""
    gathers = all_gathers(compiled_step(scanned, "O0"))
    assert f"f32[{WIDTH},{WIDTH}]" in [kind for kind, _ in gathers]
