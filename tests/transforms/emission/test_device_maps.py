"""Functions mapped over devices or a named axis: specs and shardings as they were, around bodies in half."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.transforms.harness import assert_close, assert_products_in, check, find, o2, product_dtypes, total, trace

P = jax.sharding.PartitionSpec
W = jax.random.normal(jax.random.key(0), (4, 4)) / 2
X = jax.random.normal(jax.random.key(1), (2, 4))


def mesh():
    return jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def over_rows():
    return jax.sharding.NamedSharding(mesh(), P("d"))


def shard_map(w, x):
    def body(w, x):
        h = lax.scan(lambda h, _: (jax.checkpoint(lambda h: jax.nn.gelu(h @ w))(h), None), x, length=2)[0]
        h = jax.nn.softmax(h) @ w
        count = lax.scan(lambda n, y: (n + y.sum(), None), lax.pcast(jnp.float32(0), "d", to="varying"), h)[0]
        return h, lax.psum(count, "d")

    return jax.shard_map(body, mesh=mesh(), in_specs=(P(), P("d")), out_specs=(P("d"), P()))(w, x)


def unchecked_shard_map(w, x):
    def body(w, x):
        h = lax.cond(lax.axis_index("d") > 0, lambda h: h @ w, lambda h: jnp.zeros_like(h) + h, x)
        return lax.all_gather(h @ w, "d").sum(0), lax.pmax(h, "d")

    return jax.shard_map(body, mesh=mesh(), in_specs=(P(), P("d")), out_specs=(P("d"), P()), check_vma=False)(w, x)


def pmap(w, x):
    return jax.pmap(lambda x: lax.pmean(jnp.tanh(x @ w), "i") + x @ w, axis_name="i")(x.reshape(2, 1, 4))


def sharded_jit(w, x):
    return jax.jit(lambda w, x: jnp.tanh(x @ w), in_shardings=(None, over_rows()), out_shardings=over_rows())(w, x) @ w


def sharding_constraint(w, x):
    return lax.with_sharding_constraint(jnp.tanh(x @ w), over_rows()) @ w


@pytest.mark.parametrize(
    "fn", [shard_map, unchecked_shard_map, pmap, sharded_jit, sharding_constraint], ids=lambda fn: fn.__name__
)
def test_a_device_map_runs_in_half_and_differentiates(fn):
    jaxpr = trace(o2(fn), W, X)
    assert product_dtypes(jaxpr)
    assert_products_in(jaxpr, jnp.bfloat16)
    assert_close(jax.jit(o2(fn))(W, X), jax.jit(fn)(W, X))
    if fn is not unchecked_shard_map:  # A maximum passes its whole gradient to one device, which rounding may choose.
        assert_close(jax.jit(jax.grad(total(o2(fn))))(W, X), jax.jit(jax.grad(total(fn)))(W, X), 0.08)


@pytest.mark.parametrize("fn", [shard_map, unchecked_shard_map, pmap], ids=lambda fn: fn.__name__)
def test_a_shard_map_keeps_its_mesh_and_specs(fn):
    ((before,), (after,)) = (find(trace(f, W, X), "shard_map") for f in (fn, o2(fn)))
    for name in ("mesh", "in_specs", "out_specs", "check_vma"):
        assert after.params[name] == before.params[name]


def test_a_jit_keeps_its_shardings():
    ((before,), (after,)) = (find(trace(f, W, X), "jit") for f in (sharded_jit, o2(sharded_jit)))
    for name in ("in_shardings", "out_shardings"):
        assert after.params[name] == before.params[name]


def test_collectives_over_a_vmapped_axis():
    def fn(w, x):
        def row(r):
            return lax.psum(jnp.tanh(r @ w), "b") + lax.pmean(r, "b") @ w + lax.axis_index("b")

        return jax.vmap(row, axis_name="b")(x)

    check(fn, W, X)


def test_a_collective_moves_half_data_in_half():
    def fn(w, x):
        return jax.shard_map(
            lambda w, x: lax.all_gather(x @ w, "d") @ w, mesh=mesh(), in_specs=(P(), P("d")), out_specs=P("d")
        )(w, x)

    (gather,) = find(trace(o2(fn), W, X), "all_gather")
    assert gather.outvars[0].aval.dtype == jnp.bfloat16


def test_results_keep_their_sharding():
    x = jax.device_put(X, over_rows())
    assert jax.jit(o2(lambda w, x: x @ w))(W, x).sharding.is_equivalent_to(over_rows(), 2)
    np.testing.assert_allclose(jax.jit(o2(lambda w, x: x @ w))(W, x), X @ W, atol=0.03)
