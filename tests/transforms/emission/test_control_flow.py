"""Every construct of JAX that holds a jaxpr runs under the policy, with its structure kept."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from jamp.transforms.emission.checkpoints import Asked
from tests.transforms.harness import LEVELS, assert_close, check, find, product_dtypes, run, trace

W = jax.random.normal(jax.random.key(0), (4, 4)) / 2
X = jax.random.normal(jax.random.key(1), (2, 4))
LAYERS = jax.random.normal(jax.random.key(2), (3, 4, 4)) / 2


def layer(x, w):
    return jnp.tanh(x @ w)


def nested_jit(w, x):
    return jax.jit(lambda w, x: jax.jit(layer)(x, w) @ w)(w, x)


def scan_over_layers(ws, x):
    return lax.scan(lambda x, w: (x + layer(x, w), None), x, ws)[0]


def scan_over_time(w, x):
    def cell(h, x):
        h = jnp.tanh(x @ w + h @ w)
        return h, h

    return lax.scan(cell, jnp.zeros((2, 4)), jnp.stack([x, 2 * x, -x]))


def scan_in_reverse(w, x):
    return lax.scan(lambda h, x: (0.5 * h + x @ w, h), jnp.zeros((2, 4)), jnp.stack([x, -x]), reverse=True)


def scan_unrolled(w, x):
    return lax.scan(lambda h, x: (0.5 * h + x @ w, h), jnp.zeros((2, 4)), jnp.stack([x, -x, x]), unroll=2)


def scan_of_scan(ws, x):
    def outer(x, ws):
        return lax.scan(lambda x, w: (layer(x, w), x.sum()), x, ws)

    return lax.scan(outer, x, jnp.stack([ws, -ws]))


def scan_without_inputs(w, x):
    return lax.scan(lambda x, _: (layer(x, w), None), x, length=3)[0]


def fori_static(w, x):
    return lax.fori_loop(0, 3, lambda i, x: x + 0.1 * i * layer(x, w), x)


def while_loop(w, x):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + 0.1 * layer(s[1], w)), (0, x))


def fori_dynamic(w, x):
    return lax.fori_loop(0, jnp.int32(3) + (x[0, 0] > 1e6), lambda i, x: layer(x, w), x)


def cond(w, x):
    return lax.cond(x.sum() > -1e6, lambda x: layer(x, w), lambda x: 2.0 * x, x)


def cond_of_unequal_branches(w, x):
    return lax.cond(x.sum() > -1e6, lambda x: (x @ w, x.sum()), lambda x: (jnp.zeros((2, 4)), jnp.float32(0)), x)


def switch(w, x):
    return lax.switch(jnp.argmax(x[0]) % 3, [lambda x: x @ w, lambda x: layer(x, w), lambda x: jnp.exp(x @ w)], x)


def remat(w, x):
    return jax.checkpoint(lambda w, x: layer(layer(x, w), w))(w, x)


def remat_in_scan(ws, x):
    body = jax.checkpoint(lambda x, w: (x + layer(x, w), None), prevent_cse=False)
    return lax.scan(body, x, ws)[0]


def associative_scan(w, x):
    return lax.associative_scan(lambda a, b: 0.5 * a + b, x @ w)


def map_over_rows(w, x):
    return lax.map(lambda row: layer(row, w), x)


def map_in_batches(w, x):
    return lax.map(lambda row: layer(row, w), x, batch_size=1)


def vmap_inside(w, x):
    return jax.vmap(lambda row: layer(row, w))(x)


def gradient_inside(w, x):
    return jax.grad(lambda w: jnp.sum(layer(x, w) ** 2))(w)


def gradient_of_remat_inside(w, x):
    return jax.grad(lambda w: jnp.sum(jax.checkpoint(lambda w: layer(layer(x, w), w))(w) ** 2))(w)


def gradient_of_scan_inside(ws, x):
    return jax.grad(lambda ws: jnp.sum(scan_over_layers(ws, x) ** 2))(ws)


def hessian_inside(w, x):
    return jax.hessian(lambda v: jnp.sum(layer(v, w)))(x[0])


def linearize_inside(w, x):
    y, tangent = jax.linearize(lambda x: layer(x, w), x)
    return y, tangent(x)


def vjp_inside(w, x):
    y, pull = jax.vjp(lambda w: layer(x, w), w)
    return pull(y)


def closed_over_array(w, x):
    table = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)
    return jax.jit(lambda x: x @ table @ w)(x)


OF_ONE_WEIGHT = [
    nested_jit, scan_over_time, scan_in_reverse, scan_unrolled, scan_without_inputs, fori_static, cond,
    cond_of_unequal_branches, switch, remat, associative_scan, map_over_rows, map_in_batches, vmap_inside,
    gradient_inside, gradient_of_remat_inside, hessian_inside, linearize_inside, vjp_inside, closed_over_array,
]  # fmt: skip
OF_LAYERS = [scan_over_layers, scan_of_scan, remat_in_scan, gradient_of_scan_inside]
CONSTRUCTS = [*((fn, W) for fn in OF_ONE_WEIGHT), *((fn, LAYERS) for fn in OF_LAYERS)]
BY_NAME = pytest.mark.parametrize(("fn", "w"), CONSTRUCTS, ids=lambda v: getattr(v, "__name__", ""))


@BY_NAME
def test_a_construct_runs_in_half_and_differentiates(fn, w):
    jaxpr = check(fn, w, X)
    assert product_dtypes(jaxpr), "no product was looked at"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fn", [scan_over_time, cond, remat, vmap_inside, nested_jit], ids=lambda fn: fn.__name__)
def test_a_construct_runs_at_every_level_in_float16(fn, level):
    check(fn, W, X, policy=f"{level}:float16")


@pytest.mark.parametrize("fn", [while_loop, fori_dynamic], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("level", LEVELS)
def test_a_while_loop_runs_in_half(fn, level):
    check(fn, W, X, policy=f"{level}:bfloat16", grad=False)


def test_a_jit_keeps_its_name_and_stays_nested():
    (outer, inner) = find(trace(jamp.cast_fn(nested_jit, "O2:bfloat16"), W, X), "jit")[:2]
    assert (outer.params["name"], inner.params["name"]) == ("<lambda>", "layer")


def test_a_remat_keeps_its_policy_and_barrier():
    policy = jax.checkpoint_policies.dots_saveable
    fn = jax.checkpoint(lambda w, x: layer(layer(x, w), w), policy=policy, prevent_cse=False)
    (eqn,) = find(trace(jamp.cast_fn(fn, "O2:bfloat16"), W, X), "remat2")
    assert not eqn.params["prevent_cse"]
    assert eqn.params["policy"] == Asked(policy)


def test_a_scan_keeps_direction_length_and_unrolling():
    (reverse,) = find(trace(jamp.cast_fn(scan_in_reverse, "O2:bfloat16"), W, X), "scan")
    (unrolled,) = find(trace(jamp.cast_fn(scan_unrolled, "O2:bfloat16"), W, X), "scan")
    assert (reverse.params["reverse"], unrolled.params["unroll"], unrolled.params["length"]) == (True, 2, 3)


def test_named_scopes_reach_the_compiler():
    def fn(w, x):
        with jax.named_scope("block"):
            return jnp.tanh(x @ w)

    lowered = jax.jit(jamp.cast_fn(fn, "O2:bfloat16")).lower(W, X).as_text(debug_info=True)
    for name in ("dot_general", "tanh"):
        assert re.search(rf'"jit[^"]*block[^"]*/{name}"', lowered)


def test_scans_of_no_iterations_return_the_initial_carry():
    empty = jnp.zeros((0, 4, 4))
    out = jamp.cast_fn(scan_over_layers, "O2:bfloat16")(empty, jnp.full((2, 4), 0.5))
    np.testing.assert_array_equal(out, np.full((2, 4), 0.5, np.float32))


@pytest.mark.parametrize(
    "transform",
    [jax.jit, jax.vmap, jax.checkpoint, functools.partial(jax.jvp, primals=(X[:, None],), tangents=(X[:, None],))],
    ids=["jit", "vmap", "checkpoint", "jvp"],
)
def test_the_transform_composes_with_those_of_jax(transform):
    cast = jamp.cast_fn(lambda x: layer(x, W), "O2:bfloat16")
    if isinstance(transform, functools.partial):
        jaxpr = trace(lambda x, t: jax.jvp(cast, (x,), (t,)), X, X)
    else:
        jaxpr = trace(transform(cast), X[:, None])
    assert {tuple(dtypes) for dtypes in product_dtypes(jaxpr)} == {("bfloat16", "bfloat16")}


def test_the_transform_runs_inside_a_scan():
    cast = jamp.cast_fn(layer, "O2:bfloat16")
    jaxpr = check_inside_scan(cast)
    assert product_dtypes(jaxpr) == [["bfloat16", "bfloat16"]]


def check_inside_scan(cast):
    jaxpr = trace(lambda ws, x: lax.scan(lambda x, w: (cast(x, w), None), x, ws), LAYERS, X)
    (scan,) = find(jaxpr, "scan")
    assert [var.aval.dtype for var in scan.outvars] == [jnp.float32]
    return jaxpr


def test_hessians_of_the_transform_are_near_those_of_float32():
    fn = lambda v: jnp.sum(layer(v, W) ** 2)  # noqa: E731
    assert_close(run(jax.hessian(jamp.cast_fn(fn, "O2:bfloat16")), X[0]), run(jax.hessian(fn), X[0]), 0.05)


def test_differentiating_twice_keeps_products_in_half():
    fn = jamp.cast_fn(lambda w: jnp.sum(layer(X, w) ** 2), "O2:bfloat16")
    jaxpr = trace(jax.grad(lambda w: jnp.sum(jax.grad(fn)(w) ** 2)), W)
    assert {tuple(dtypes) for dtypes in product_dtypes(jaxpr)} == {("bfloat16", "bfloat16")}


def until_large(x):
    return lax.while_loop(lambda c: c.sum() < 40, lambda c: c * 2 + 1, x)


def counted(x):
    return lax.fori_loop(0, x[0].astype(int), lambda i, c: c + x, x)


def until_drawn(x):
    draw = lambda c: (jax.random.split(c[0])[0], c[1] + 1)  # noqa: E731
    key = jax.random.fold_in(jax.random.key(0), x[0].astype(int))
    return lax.while_loop(lambda c: jax.random.uniform(c[0]) < 0.7, draw, (key, 0.0))[1]


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fn", [until_large, counted, until_drawn], ids=lambda fn: fn.__name__)
def test_each_member_of_a_batch_ends_its_loop_by_itself(fn, level):
    x = jnp.arange(12.0).reshape(2, 3, 2)  # Whole numbers, which half precision holds.
    batched = jax.vmap(jax.vmap(fn))
    expected = batched(x)
    np.testing.assert_array_equal(jamp.cast_fn(batched, f"{level}:bfloat16")(x), expected)
    np.testing.assert_array_equal(jax.jit(jax.vmap(jamp.cast_fn(jax.vmap(fn), f"{level}:bfloat16")))(x), expected)
