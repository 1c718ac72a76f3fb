"""Masks that are made outside of loops, checkpoints and branches, as models hand one to all of their layers."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import jamp
from jamp._compat import open_jaxpr
from jamp.transforms.analysis.attention.inside import with_masks_inside
from tests.transforms.planning.test_attention import FUSED, assert_close

BATCH, LENGTH, HEADS, DEPTH, LAYERS = 2, 128, 2, 8, 2
WIDTH = HEADS * DEPTH
PLACES = np.arange(LENGTH)
IDS = jnp.asarray(np.stack([PLACES // 50 + 1, np.where(PLACES < 90, PLACES // 40 + 1, 0)]))


def layer(x, weights, mask):
    q, k, v = ((x @ w).reshape(BATCH, LENGTH, HEADS, DEPTH) for w in weights)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / DEPTH**0.5
    scores = mask(scores) if callable(mask) else jnp.where(mask, scores, -1e9)
    return x + jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(x.shape)


def added(x, weights, bias):
    return layer(x, weights, lambda scores: scores + bias)


def alike(ids):
    return ids[:, None, :, None] == ids[:, None, None, :]


def causal(ids):
    return alike(ids) & jnp.tril(jnp.ones((LENGTH, LENGTH), bool))


def padded(ids):
    return causal(ids) & (ids > 0)[:, None, None, :] & (ids > 0)[:, None, :, None]


# What a program makes of ids, and how its layers read that.
MASKS = {
    "packed": (alike, layer),
    "packed, causal": (causal, layer),
    "packed and padded": (padded, layer),
    "ones and zeros": (lambda ids: padded(ids).astype(jnp.float32) * causal(ids), layer),
    "added": (lambda ids: jnp.where(causal(ids), 0.0, -1e9), added),
    "taken off": (lambda ids: (1.0 - padded(ids).astype(jnp.float32)) * -1e9, added),
    "of places": (lambda ids: (jnp.arange(LENGTH)[:, None] >= jnp.arange(LENGTH)) & (ids > 0)[:, None, None], layer),
}


def scanned(one, weights, x, mask):
    return jax.lax.scan(lambda x, w: (one(x, w, mask), None), x, weights)[0]


def checkpointed(one, weights, x, mask):
    for w in weights:
        x = jax.checkpoint(one)(x, w, mask)
    return x


def nested(one, weights, x, mask):
    return jax.lax.scan(lambda x, _: (scanned(jax.checkpoint(one), weights, x, mask), None), x, None, length=2)[0]


def counted(one, weights, x, mask):
    return jax.lax.while_loop(
        lambda state: state[0] < LAYERS, lambda state: (state[0] + 1, one(state[1], weights[state[0]], mask)), (0, x)
    )[1]


def branched(one, weights, x, mask):
    return jax.lax.cond(x.sum() < 1e9, lambda x: one(x, weights[0], mask), lambda x: x + mask.mean(), x)


# Where the layers are.
BODIES = {
    "scan": scanned,
    "checkpoint": checkpointed,
    "nested": nested,
    "jit": lambda one, *operands: jax.jit(functools.partial(scanned, one))(*operands),
    "cond": branched,
    "while": counted,
}  # fmt: skip
CASES = [(mask, body) for mask in MASKS for body in BODIES]


def program(mask, body):
    make, one = MASKS[mask]
    return lambda weights, x, ids: BODIES[body](one, weights, x, make(ids))


@pytest.fixture
def operands():
    keys = jax.random.split(jax.random.key(3), 2)
    weights = jax.random.normal(keys[0], (LAYERS, 3, WIDTH, WIDTH)) / WIDTH**0.5
    return weights, jax.random.normal(keys[1], (BATCH, LENGTH, WIDTH)), IDS


@pytest.mark.in_turns(4)
@pytest.mark.parametrize(("mask", "body"), CASES)
def test_kernels_for_tpus_are_given_ids(mask, body, operands):
    found = jamp.report(program(mask, body), *operands, policy=FUSED).attentions
    assert found
    assert all("tpu" in each.kernels for each in found)


@pytest.mark.in_turns(4)
@pytest.mark.parametrize(("mask", "body"), CASES)
def test_nothing_else_changes(mask, body, operands):
    """The same numbers to the last bit, from a jaxpr in which the mask is made inside."""
    before = jax.make_jaxpr(program(mask, body))(*operands)
    after = with_masks_inside(before)
    assert after is not before
    chex.assert_trees_all_equal(*(jax.jit(jaxpr_as_fun(each))(*operands) for each in (before, after)))


@pytest.mark.in_turns(6)
@pytest.mark.parametrize(("mask", "body"), CASES)
def test_values_and_gradients(mask, body, operands):
    weights, x, ids = operands
    function = program(mask, body)

    if body == "while":  # Which has no gradient.
        assert_close(jax.jit(jamp.cast_fn(function, FUSED))(weights, x, ids), function(weights, x, ids), 0.05)
        return

    def derived(function):
        return jax.jit(jax.value_and_grad(lambda w, x: jnp.square(function(w, x, ids)).mean(), argnums=(0, 1)))(
            weights, x
        )

    got, expected = derived(jamp.cast_fn(function, FUSED)), derived(function)
    assert_close(got, expected, 0.05)


def test_the_backward_pass_is_not_given_the_mask(operands):
    function = program("packed, causal", "scan")
    weights, x, ids = operands
    for policy, given in (("O2:bfloat16", True), (FUSED, False)):
        _, pull = jax.vjp(lambda w: jamp.cast_fn(function, policy)(w, x, ids), weights)  # noqa: B023 (called here)
        shapes = [leaf.shape for leaf in jax.tree.leaves(pull) if leaf.dtype == bool]
        assert any(shape[-2:] == (LENGTH, LENGTH) for shape in shapes) is given


def test_jaxprs_that_were_one_are_one(operands):
    """JAX traces a checkpointed layer once, and a plan is made once for each jaxpr."""
    jaxpr = open_jaxpr(with_masks_inside(jax.make_jaxpr(program("packed", "checkpoint"))(*operands)))
    bodies = [eqn.params["jaxpr"] for eqn in jaxpr.eqns if "prevent_cse" in eqn.params]
    assert len(bodies) == LAYERS
    assert len({id(body) for body in bodies}) == 1


STAY = {
    "an argument": lambda w, x, mask: scanned(layer, w, x, mask),
    "joined with an argument": lambda w, x, mask: scanned(layer, w, x, mask & (jnp.arange(LENGTH) < 90)),
    "of numbers of the program": lambda w, x, _: scanned(
        layer, w, x, x[:, None, :, None, 0] > x[:, None, None, :, 0]
    ),
    "a bias of places": lambda w, x, _: scanned(
        added, w, x, -0.1 * jnp.abs(jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH))
    ),
    "of keys": lambda w, x, mask: scanned(layer, w, x, (mask[:, 0, 0] & True)[:, None, None, :]),
    "nothing multiplied": lambda w, x, _: scanned(lambda x, w, mask: x + mask.sum(), w, x, alike(IDS)),
    "donated": lambda w, x, _: jax.jit(functools.partial(scanned, layer), donate_argnums=2)(w, x, alike(IDS)),
    "none at all": lambda w, x, _: jnp.tanh(x @ w[0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", STAY)
def test_what_stays(name, operands):
    weights, x, _ = operands
    mask = jnp.broadcast_to(jax.random.bernoulli(jax.random.key(1), 0.5, (LENGTH, LENGTH)), (BATCH, 1, LENGTH, LENGTH))
    jaxpr = jax.make_jaxpr(STAY[name])(weights, x, mask)
    assert with_masks_inside(jaxpr) is jaxpr


def test_keys_of_random_numbers_are_no_masks(operands):
    weights, x, ids = operands
    keys = jax.random.split(jax.random.key(0), (LENGTH, LENGTH))

    def one(x, w, mask):
        return layer(x, w, mask) + jax.random.uniform(keys[0, 0])

    got = jamp.cast_fn(functools.partial(scanned, one), FUSED)(weights, x, alike(ids))
    assert_close(got, scanned(one, weights, x, alike(ids)), 0.03)


def test_a_long_row_of_equations_is_not_followed_to_its_end(operands):
    """Ids that are counted up a thousand times are what the mask is made of."""
    weights, x, ids = operands

    def counted_up(weights, x, ids):
        for _ in range(1000):
            ids = ids + 1
        return scanned(layer, weights, x, alike(ids))

    before = jax.make_jaxpr(counted_up)(weights, x, ids)
    chex.assert_trees_all_equal(*(jaxpr_as_fun(each)(*operands) for each in (before, with_masks_inside(before))))
