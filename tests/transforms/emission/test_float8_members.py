"""Products in 8 bits of a batch: members of an ensemble, of very different magnitude, have scales of their own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp

FLOAT8 = "O2:bfloat16,matmul=float8"
MEMBERS, SIZE = 3, 64
MAGNITUDES = np.float32([1, 1e-3, 1e-6])[:, None, None]


def member(params, x):
    h = jnp.tanh(1.0 * x) @ params["a"]
    return h @ params["b"] @ jnp.eye(SIZE)


def weighed(fn, c, params, x):
    return (fn(params, x) * c).sum()


def ensemble(shared=False):
    draw = np.random.default_rng(0)
    of = lambda: np.float32(draw.normal(size=(MEMBERS, SIZE, SIZE)))  # noqa: E731
    params = {"a": of() * MAGNITUDES, "b": of()}
    c = of() * MAGNITUDES[::-1] ** 2
    return params, of()[0] if shared else of() * MAGNITUDES, c


def results(fn, params, x, c):
    """What a function returns, and its gradients."""
    return jax.jit(lambda *args: (fn(*args), jax.grad(functools.partial(weighed, fn, c), (0, 1))(*args)))(params, x)


def one_by_one(policy, params, x, c, dims):
    """The same of each member alone."""
    found = [
        results(
            jamp.cast_fn(member, policy),
            jax.tree.map(lambda p, i=i: p[i], params),
            x if dims[1] is None else x[i],
            c[i],
        )
        for i in range(MEMBERS)
    ]
    return jax.tree.map(lambda *each: np.stack(each), *found)


def worst(found, expected):
    """The relative error of the worst member of the worst result."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.linalg.norm(a[i] - b[i]) / np.linalg.norm(b[i])) for a, b in pairs for i in range(MEMBERS))


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("more", ["", ",grad_dtype=e5m2", ",float8_scales=row", ",weight_grad=half"])
def test_a_batch_is_as_its_members_one_by_one(more):
    args, policy = ensemble(), FLOAT8 + more
    fns = jamp.cast_fn(jax.vmap(member), policy), jax.vmap(jamp.cast_fn(member, policy))
    expected = one_by_one(policy, *args, (0, 0))
    exact = results(jax.vmap(member), *args)
    for fn in fns:
        found = results(fn, *args)
        assert worst(found, expected) < 1e-6
        assert worst(found, exact) < 0.1


def test_members_that_share_what_they_are_given():
    """Then `vmap` makes no batch of the product, but their weights and cotangents differ as much."""
    params, x, c = ensemble(shared=True)
    fn = jax.vmap(jamp.cast_fn(member, FLOAT8), (0, None))
    expected = one_by_one(FLOAT8, params, x, c, (0, None))
    found = jax.jit(jax.grad(functools.partial(weighed, fn, c)))(params, x)
    assert worst(found, expected[1][0]) < 1e-6


def test_members_of_members():
    params, x, c = jax.tree.map(lambda a: np.stack([a, a[::-1]]), ensemble())
    fn = jax.vmap(jax.vmap(jamp.cast_fn(member, FLOAT8)))
    found = jax.jit(jax.grad(functools.partial(weighed, fn, c), (0, 1)))(params, x)
    for i in range(2):
        each = [jax.tree.map(lambda a, i=i: a[i], tree) for tree in (params, x, c)]
        expected = one_by_one(FLOAT8, *each, (0, 0))[1]
        assert worst(jax.tree.map(lambda a, i=i: a[i], found), expected) < 1e-6


def test_the_bytes_and_an_exponent_of_each_member_are_kept():
    params, x, _ = ensemble()

    def summed(params, x):
        return jax.vmap(member)(params, x).sum()

    kept = jamp.report(summed, params, x, policy=FLOAT8).residual_bytes
    assert kept["uint8"] == 2 * 2 * MEMBERS * (SIZE * SIZE + 1)  # Two products of two operands.
