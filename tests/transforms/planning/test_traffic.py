"""What is sent to other devices: weights that products read in half go there in half, as do their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jamp
from tests.transforms.harness import find, trace

DEVICES, SIZE = 4, 16
W = jax.random.normal(jax.random.key(0), (SIZE, SIZE)) / 4
X = jax.random.normal(jax.random.key(1), (4 * DEVICES, SIZE))


def replicated(w, x):
    return jnp.tanh(x @ w)


def gathered(w, x):
    return jnp.tanh(x @ lax.all_gather(w, "d", tiled=True))


def seen_otherwise(w, x):
    """Views lie between what is gathered and the product."""
    return jnp.tanh(x @ lax.all_gather(w, "d", tiled=True).T.reshape(SIZE, SIZE))


def passed_on(w, x):
    return jnp.tanh(
        x @ lax.all_gather(lax.ppermute(w, "d", [(i, (i + 1) % DEVICES) for i in range(DEVICES)]), "d", tiled=True)
    )


def scanned(w, x):
    return lax.scan(lambda h, _: (jnp.tanh(h @ lax.all_gather(w, "d", tiled=True)), None), x, length=2)[0]


MODELS = {
    "replicated": (replicated, P()),
    "gathered": (gathered, P("d")),
    "seen otherwise": (seen_otherwise, P("d")),
    "passed on": (passed_on, P("d")),
    "in a loop": (scanned, P("d")),
}
TRAFFIC = ("psum", "psum_invariant", "all_gather", "reduce_scatter", "ppermute")


def derived(net, spec, outside, policy):
    """The gradient of a mean over devices, cast around the map or inside of it."""
    mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    inner = net if outside or policy is None else jamp.cast_fn(net, policy)

    def loss(w, x):
        value = jax.shard_map(
            lambda w, x: lax.pmean(inner(w, x).mean(), "d"), mesh=mesh, in_specs=(spec, P("d")), out_specs=P()
        )
        return value(w, x)

    return jax.grad(jamp.cast_fn(loss, policy) if outside and policy else loss)


def sent(jaxpr):
    """Dtypes of the arrays that devices send."""
    return {var.aval.dtype.name for eqn in find(jaxpr, *TRAFFIC) for var in eqn.invars if var.aval.shape}


@pytest.mark.parametrize("outside", [False, True], ids=["inside", "outside"])
@pytest.mark.parametrize("level", ["OD", "O1", "O2", "O3"])
@pytest.mark.parametrize(("net", "spec"), MODELS.values(), ids=MODELS)
def test_weights_and_their_gradients_are_sent_in_half(net, spec, level, outside):
    gradient = derived(net, spec, outside, f"{level}:bfloat16")
    assert sent(trace(gradient, W, X)) == {"bfloat16"}
    exact = derived(net, spec, outside, None)(W, X)
    np.testing.assert_allclose(gradient(W, X), exact, rtol=0, atol=0.03 * np.abs(exact).max())


@pytest.mark.parametrize(("net", "spec"), MODELS.values(), ids=MODELS)
def test_sums_in_float32_are_asked_for(net, spec):
    assert sent(trace(derived(net, spec, False, "O2:bfloat16,reduce=float32"), W, X)) == {"float32"}


def test_what_a_reader_wants_in_float32_is_sent_in_float32():
    def net(w, x):
        whole = lax.all_gather(w, "d", tiled=True)
        return jnp.tanh(x @ whole) + jnp.exp(whole).sum()

    assert "float32" in sent(trace(derived(net, P("d"), False, "O2:bfloat16"), W, X))


def test_what_is_returned_is_returned_as_it_was():
    mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def net(w, x):
        whole = lax.all_gather(w, "d", tiled=True)
        return x @ whole, whole

    mapped = jax.shard_map(net, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=(P("d"), P()), check_vma=False)
    np.testing.assert_array_equal(jamp.cast_fn(mapped, "O2:bfloat16")(W, X)[1], W)
