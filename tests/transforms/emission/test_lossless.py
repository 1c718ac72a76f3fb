"""Programs of whole numbers that both half dtypes hold: rebuilt around half products, they give the very same numbers.

This is a quick form of `python -m tools.jax_tests`, which runs JAX's own tests so. Each program is run plain and cast:
its value, its gradient and, where it has one, its value over a batch are compared bit for bit.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jamp

# At most a few entries of 1 or -1 in each row, so that no number grows beyond 128.
W = jnp.array([[1.0, 0, 0, -1], [0, 1, 0, 0], [1, 0, -1, 0], [0, 0, 1, 0]])
X = jnp.array([1.0, -2, 3, 0])
XS = jnp.stack([X, -X, X[::-1]])

PROGRAMS: list[Callable] = []


def program(fn: Callable) -> Callable:
    PROGRAMS.append(fn)
    return fn


def relu(x):
    return jnp.maximum(x, 0)


# Calls and checkpoints.


@program
def nested_jit(w, x):
    return jax.jit(lambda x: jax.jit(lambda x: x @ w)(x) @ w)(x)


@program
def jit_with_several_results(w, x):
    first, second = jax.jit(lambda x: (x @ w, 2 * x))(x)
    return first + second


@program
def jit_with_a_constant(w, x):
    return jax.jit(lambda x: x @ W)(x @ w)


@program
def jit_with_a_static_argument(w, x):
    return jax.jit(lambda x, n: x @ w if n else x, static_argnums=1)(x, 3)


@program
def jit_that_inlines(w, x):
    return jax.jit(lambda x: x @ w, inline=True)(x)


@program
def one_jit_called_twice(w, x):
    layer = jax.jit(lambda x: relu(x @ w))
    return layer(layer(x))


@program
def checkpoint(w, x):
    return jax.checkpoint(lambda x: relu(x @ w))(x)


@program
def checkpoint_in_checkpoint(w, x):
    return jax.checkpoint(lambda x: jax.checkpoint(lambda x: relu(x @ w))(x) @ w)(x)


@program
def checkpoint_with_a_policy(w, x):
    policy = jax.checkpoint_policies.save_only_these_names("h")
    return jax.checkpoint(lambda x: checkpoint_name(x @ w, "h") @ w, policy=policy)(x)


@program
def checkpoint_of_jit(w, x):
    return jax.checkpoint(jax.jit(lambda x: relu(x @ w)))(x)


@program
def closed_over_array(w, x):
    table = jnp.arange(4.0)
    return (x @ w) * table


@program
def named_scopes(w, x):
    with jax.named_scope("block"):
        return relu(x @ w)


# Branches.


@program
def cond(w, x):
    return lax.cond(x[0] > 0, lambda x: x @ w, lambda x: -x, x)


@program
def cond_without_operands(w, x):
    return lax.cond(x[0] > 5, lambda: x @ w, lambda: 2 * x)


@program
def cond_with_several_results(w, x):
    first, (second, _) = lax.cond(x[0] > 0, lambda: (x @ w, (x, 1)), lambda: (x, (x @ w, 2)))
    return first + second


@program
def cond_in_cond(w, x):
    return lax.cond(x[0] > 0, lambda x: lax.cond(x[1] > 0, relu, lambda x: x @ w, x), relu, x)


@program
def switch(w, x):
    return lax.switch(jnp.int32(jnp.abs(x[1])), [relu, lambda x: -x, lambda x: x @ w], x)


@program
def select(w, x):
    return jnp.where(x > 0, x @ w, 2 * x)


@program
def cond_in_scan(w, x):
    def body(h, i):
        return lax.cond(i % 2 == 0, lambda h: h @ w, relu, h), h

    h, hs = lax.scan(body, x, jnp.arange(4))
    return h + hs.sum(0)


@program
def platforms(w, x):
    return lax.platform_dependent(x, cpu=lambda x: x @ w, default=lambda x: x @ w)


# Loops.


@program
def scan(w, x):
    return lax.scan(lambda h, _: (relu(h @ w), None), x, length=3)[0]


@program
def scan_over_weights(w, x):
    return lax.scan(lambda h, w: (relu(h @ w), None), x, jnp.stack([w, w.T]))[0]


@program
def scan_that_stacks(w, x):
    return lax.scan(lambda h, x: (h @ w, h + x), x, jnp.ones((3, 4)))[1].sum(0)


@program
def scan_in_reverse(w, x):
    return lax.scan(lambda h, x: (h @ w + x, None), x, jnp.eye(4)[:3], reverse=True)[0]


@program
def unrolled_scan(w, x):
    return lax.scan(lambda h, _: (h @ w, None), x, length=4, unroll=2)[0]


@program
def scan_of_nothing(w, x):
    return lax.scan(lambda h, x: (h @ w, None), x, jnp.zeros((0, 4)))[0]


@program
def scan_of_a_tree(w, x):
    carry, _ = lax.scan(lambda c, x: ({"h": c["h"] @ w, "n": c["n"] + 1}, None), {"h": x, "n": 0}, length=2)
    return carry["h"] * carry["n"]


@program
def scan_in_scan(w, x):
    def row(h, _):
        return lax.scan(lambda h, _: (h @ w, None), h, length=2)[0], h

    return lax.scan(row, x, length=2)[0]


@program
def scan_of_a_checkpoint(w, x):
    return lax.scan(jax.checkpoint(lambda h, _: (relu(h @ w), None)), x, length=3)[0]


@program
def fori_loop(w, x):
    return lax.fori_loop(0, 3, lambda i, h: relu(h @ w) + i, x)


@program
def loop_over_an_index(w, x):
    return lax.fori_loop(0, 4, lambda i, h: h.at[i].add((x @ w)[i]), x)


@program
def map_over_rows(w, x):
    return lax.map(lambda row: row @ x, w)


@program
def associative_scan(w, x):
    return lax.associative_scan(jnp.add, x @ w)


# Rules.


@jax.custom_jvp
def scaled(w, x):
    return x @ w


scaled.defjvp(lambda p, t: (scaled(*p), 2 * (t[1] @ p[0]) + p[1] @ t[0]))


@jax.custom_vjp
def product(w, x):
    return x @ w


product.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, g: (3 * jnp.outer(kept[1], g), kept[0] @ g))


@program
def forward_rule(w, x):
    return scaled(w, x)


@program
def reverse_rule(w, x):
    return product(w, x)


@program
def rules_in_jit(w, x):
    return jax.jit(scaled)(w, jax.jit(product)(w, x))


@program
def rules_in_scan(w, x):
    return lax.scan(lambda h, _: (scaled(w, product(w, h)), None), x, length=2)[0]


@program
def rules_in_a_checkpoint(w, x):
    return jax.checkpoint(lambda x: scaled(w, product(w, x)))(x)


@program
def rules_in_a_branch(w, x):
    return lax.cond(x[0] > 0, product, scaled, w, x)


@jax.custom_vjp
def two_results(w, x):
    return x @ w, 2 * x


two_results.defvjp(lambda w, x: (two_results(w, x), w), lambda w, g: (None, w @ g[0] + 2 * g[1]))


@program
def rule_with_an_unread_result(w, x):
    return two_results(w, x)[0]


@program
def rule_with_integers(w, x):
    @jax.custom_vjp
    def times(n, w, x):
        return n * (x @ w)

    times.defvjp(lambda n, w, x: (times(n, w, x), (n, w)), lambda kept, g: (None, None, kept[0] * (kept[1] @ g)))
    return times(3, w, x)


@program
def gradient_inside(w, x):
    return jax.grad(lambda x: jnp.sum((x @ w) * x))(x)


@program
def tangent_inside(w, x):
    return jax.jvp(lambda x: relu(x @ w), (x,), (x,))[1]


@program
def linear_transpose_inside(w, x):
    return jax.linear_transpose(lambda x: x @ w, x)(x)[0]


# Batches, devices, references, data movement.


@program
def vmap_inside(w, x):
    return jax.vmap(lambda row: row @ x)(w)


@program
def collective_inside(w, x):
    return jax.vmap(lambda row: lax.psum(row @ x, "rows") + row @ x, axis_name="rows")(w)


@program
def shard_map_inside(w, x):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(
        lambda w, x: lax.psum(x @ w, "d"), mesh=mesh, in_specs=(jax.P("d"), jax.P("d")), out_specs=jax.P()
    )(w, x)


@program
def references(w, x):
    ref = jax.new_ref(x)
    ref[...] = ref[...] @ w
    ref[0] += 1.0
    return jax.freeze(ref)


@program
def references_in_a_loop(w, x):
    ref = jax.new_ref(jnp.zeros(4))
    lax.fori_loop(0, 3, lambda i, _: ref.__setitem__(i, (x @ w)[i]), None)
    return jax.freeze(ref)


@program
def callback(w, x):
    jax.debug.callback(lambda h: None, x @ w)
    return x @ w


@program
def gather_and_scatter(w, x):
    return jnp.zeros(4).at[jnp.array([0, 2, 2])].add((w @ x)[jnp.array([1, 1, 3])])


@program
def sort_and_top(w, x):
    return jnp.sort(x @ w) + lax.top_k(x, 4)[0]


@program
def slices(w, x):
    h = lax.dynamic_slice(x @ w, (jnp.int32(1),), (2,))
    return jnp.concatenate([h, lax.rev(h, (0,))]) + jnp.pad(x[1:], (0, 1))


@program
def convolution(w, x):
    return jnp.convolve(x, w[0], mode="same") + jnp.correlate(x, w[2], mode="same")


@program
def einsums(w, x):
    return jnp.einsum("ij,jk,k->i", w, w, x)


POLICIES = ["O2:bfloat16", "O3:float16", "O2:bfloat16,full=['*']"]
# A batch of a program is one more: its branches are selections, and its loops and rules are bound a second time.
NO_BATCH = ("references", "references_in_a_loop", "shard_map_inside")


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_a_program_of_whole_numbers_stays_as_it_is(fn, policy):
    def all_of(fn):
        results = {"value": fn(W, X), "gradient": jax.grad(lambda w, x: jnp.sum(fn(w, x) * X), (0, 1))(W, X)}
        if fn.__name__ not in NO_BATCH:
            results["batch"] = jax.vmap(fn, (None, 0))(W, XS)
        return results

    plain, cast = jax.jit(lambda: all_of(fn))(), jax.jit(lambda: all_of(jamp.cast_fn(fn, policy)))()
    for path, expected in jax.tree.leaves_with_path(plain):
        found = cast
        for key in path:
            found = found[key.key if hasattr(key, "key") else key.idx]
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected, err_msg=jax.tree_util.keystr(path))


def test_there_are_fifty_programs():
    assert len(PROGRAMS) >= 50
