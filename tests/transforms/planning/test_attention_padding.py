"""Padding and packed sequences under `attention=fused`: kernels are given numbers of queries and keys, or a mask.

JAX's kernels for TPUs run interpreted here, and what cuDNN's is to compute in XLA.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import jaxpr_as_fun

import jamp
from jamp.transforms.emission.kernels import dot_product, flash, splash
from tests.transforms import harness
from tests.transforms.planning.test_attention import FUSED, assert_close, fused_equations

BATCH, LENGTH, HEADS, DEPTH = 2, 128, 2, 16
Q, K, V = (jax.random.normal(key, (BATCH, LENGTH, HEADS, DEPTH)) for key in jax.random.split(jax.random.key(0), 3))
PLACES = np.arange(LENGTH)
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))


def scores(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4


def mixed(scores, v):
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def attend(q, k, v, mask):
    return mixed(jnp.where(mask, scores(q, k), -1e9), v)


def keys(ids):
    return (ids > 0)[:, None, None, :]


def queries(ids):
    return (ids > 0)[:, None, :, None]


def alike(ids):
    return ids[:, None, :, None] == ids[:, None, None, :]


def added(ids, never=-1e9):
    """Masks of numbers, as they are added to scores."""
    return jnp.where(keys(ids), 0.0, never)


def counted(ids, never):
    """The same, by numbers of which nothing says that they are zero or one."""
    return (1 - jnp.minimum(ids, 1).astype(jnp.float32))[:, None, None, :] * never


# What is said by keys alone, in one way or another. The argument tells sequences apart; zeros are padding.
OF_KEYS = {
    "put in place": lambda q, k, v, ids: attend(q, k, v, keys(ids)),
    "put in twice": lambda q, k, v, ids: mixed(
        jnp.where(CAUSAL, jnp.where(keys(ids), scores(q, k), -1e9), -1e9), v
    ),
    "not the others": lambda q, k, v, ids: mixed(jnp.where(~keys(ids), -1e9, scores(q, k)), v),
    "causal": lambda q, k, v, ids: attend(q, k, v, keys(ids) & CAUSAL),
    "window": lambda q, k, v, ids: attend(q, k, v, keys(ids) & CAUSAL & ~np.tril(CAUSAL, -20)),
    "capped": lambda q, k, v, ids: mixed(
        jnp.where(keys(ids) & CAUSAL, 2 * jnp.tanh(scores(q, k) / 2), -1e9), v
    ),
    "lengths": lambda q, k, v, ids: attend(q, k, v, ((ids > 0).sum(-1)[:, None] > PLACES)[:, None, None, :]),
    "added": lambda q, k, v, ids: mixed(scores(q, k) + added(ids), v),
    "two added": lambda q, k, v, ids: mixed(scores(q, k) + (added(ids) + jnp.where(CAUSAL, 0.0, -1e9)), v),
    "the less": lambda q, k, v, ids: mixed(scores(q, k) + jnp.minimum(added(ids), jnp.where(CAUSAL, 0.0, -1e9)), v),
    "taken off": lambda q, k, v, ids: mixed(scores(q, k) - jnp.maximum(-added(ids), jnp.where(CAUSAL, 0.0, 1e9)), v),
    "added, less": lambda q, k, v, ids: mixed(scores(q, k) + added(ids, -1e4), v),
    "added, less, causal": lambda q, k, v, ids: mixed(jnp.where(CAUSAL, scores(q, k) + added(ids, -1e4), -1e9), v),
    "all in one": lambda q, k, v, ids: mixed(scores(q, k) - 1e4 * (1 - (keys(ids) & CAUSAL)), v),
    "window in one": lambda q, k, v, ids: mixed(
        scores(q, k) - 1e4 * ~(keys(ids) & CAUSAL & ~np.tril(CAUSAL, -20)), v
    ),
    "causal added, keys put in": lambda q, k, v, ids: mixed(
        jnp.where(keys(ids), scores(q, k) - 1e4 * (1 - CAUSAL), -1e9), v
    ),
    "in place of zeros": lambda q, k, v, ids: mixed(scores(q, k) + jnp.where(CAUSAL, added(ids), -1e9), v),
}  # fmt: skip
OF_BOTH = {
    "both padded": lambda q, k, v, ids: attend(q, k, v, keys(ids) & queries(ids)),
    "packed": lambda q, k, v, ids: attend(q, k, v, alike(ids)),
    "packed, causal": lambda q, k, v, ids: attend(q, k, v, alike(ids) & CAUSAL),
    "packed and padded": lambda q, k, v, ids: attend(q, k, v, CAUSAL & alike(ids) & keys(ids) & queries(ids)),
    "not of others": lambda q, k, v, ids: attend(q, k, v, ~(ids[:, None, None, :] != ids[:, None, :, None])),
    "packed, added": lambda q, k, v, ids: mixed(scores(q, k) - 1e4 * (1 - (alike(ids) & keys(ids) & CAUSAL)), v),
    "counted inside": lambda q, k, v, ids: attend(q, k, v, alike(jnp.cumsum(ids, -1) // 40)),
}
FORMS = OF_KEYS | OF_BOTH
ROWS = PLACES // 50 + 1
IDS = {
    "right": np.stack([np.where(PLACES < 90, ROWS, 0), ROWS]),
    "left": np.stack([np.where(PLACES >= 40, ROWS, 0), ROWS]),
    "nothing": np.stack([ROWS, 0 * PLACES]),
    "holes": np.asarray(jax.random.bernoulli(jax.random.key(1), 0.3, (BATCH, LENGTH))) * ROWS,
}
# The written form of these lets a gradient through where a query sees no key: numbers are added to its scores.
ADDED = ("added", "two added", "the less", "taken off", "in place of zeros")


def derived(function, operands):
    """A result, and cotangents of queries, keys and values, which are the operands with features."""
    moving = [place for place, x in enumerate(operands) if x.ndim == 4 and x.shape[-1] == DEPTH]

    def of_moving(*moved):
        merged = dict(enumerate(operands)) | dict(zip(moving, moved, strict=True))
        return function(*(merged[place] for place in range(len(operands)))).astype(jnp.float32)

    out, pull = jax.vjp(of_moving, *(operands[place] for place in moving))
    return out, pull(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))


@pytest.fixture
def emitted(monkeypatch):
    """The attention of a form, its written form and its operands, as the program makes them."""
    found = []

    def attention(eqn, args):
        written = jaxpr_as_fun(eqn.params["written"])
        found.append((eqn.params["attention"], lambda *x: written(*x)[0], [jnp.asarray(arg) for arg in args]))
        return written(*args)

    def run(name, ids):
        harness.run(jamp.cast_fn(FORMS[name], FUSED), Q, K, V, jnp.asarray(IDS[ids]))
        (each,) = found
        return each

    monkeypatch.setitem(harness._EVALUATE, "jamp_attention", attention)
    return run


@pytest.mark.parametrize("name", FORMS)
def test_recognised(name):
    (found,) = jamp.report(FORMS[name], Q, K, V, jnp.asarray(IDS["right"]), policy=FUSED).attentions
    assert "tpu" in found.kernels
    assert ("cuda" in found.kernels) == (name != "capped")


# Where a query sees no key, a sum of two masks leaves it those that one of the two hides.
CASES = [(name, ids) for name in FORMS for ids in IDS if name != "two added" or ids == "right"]
# Numbers of keys cannot say that queries in front of padding see one another, or keys that come after them; all that
# such a query gets is finite.
FINITE = dict.fromkeys(("added, less, causal", "causal added, keys put in"), ("left", "holes"))
FINITE |= dict.fromkeys(("window in one", "packed, added"), tuple(IDS))
FINITE["all in one"] = ("left", "holes", "nothing")
ON_TPUS = [case for case in CASES if case[1] not in FINITE.get(case[0], ())]


@pytest.mark.in_turns(12)
@pytest.mark.parametrize(("name", "ids"), ON_TPUS)
def test_the_kernel_for_tpus_computes_what_is_written(emitted, name, ids):
    """Also where a query sees no key: the mean of all values, without a gradient of its scores."""
    attention, written, operands = emitted(name, ids)
    is_splash = attention.cap is not None or attention.window is not None
    kernel = functools.partial(splash, interpret=True) if is_splash else flash
    with contextlib.nullcontext() if is_splash else pltpu.force_tpu_interpret_mode():
        got = jax.jit(lambda *x: derived(functools.partial(kernel, attention), x))(*operands)
    expected = jax.jit(lambda *x: derived(written, x))(*operands)
    if name in ADDED and ids != "right":
        got, expected = got[0], expected[0]
    assert_close(got, expected, 0.03)


@pytest.mark.in_turns(12)
@pytest.mark.parametrize(("name", "ids"), [case for case in CASES if case[0] != "capped"])
def test_cudnn_is_told_what_is_written(emitted, monkeypatch, name, ids):
    """Also where a query sees no key, and what cuDNN computes is none of the written form's."""
    attention, written, operands = emitted(name, ids)
    of_jax = jax.nn.dot_product_attention

    def arbitrary_without_keys(q, k, v, *, mask, is_causal, local_window_size, **settings):
        seen = jnp.ones((q.shape[1], k.shape[1]), bool) if mask is None else mask
        near = np.tril(CAUSAL, 0) if is_causal else True
        if local_window_size is not None:
            near = near & np.triu(np.ones_like(CAUSAL), -local_window_size[0])
        settings |= {"mask": mask, "is_causal": is_causal, "local_window_size": local_window_size}
        any_key = jnp.broadcast_to(seen & near, (1, 1, LENGTH, LENGTH) if seen.ndim == 2 else seen.shape).any(-1)
        return jnp.where(jnp.swapaxes(any_key, 1, 2)[..., None], of_jax(q, k, v, **settings), 30 * (q + k.sum() + v))

    monkeypatch.setattr(jax.nn, "dot_product_attention", arbitrary_without_keys)
    kernel = functools.partial(dot_product, attention, implementation="xla")
    got = jax.jit(lambda *x: derived(kernel, x))(*operands)
    expected = jax.jit(lambda *x: derived(written, x))(*operands)
    if name in ADDED and ids != "right":
        got, expected = got[0], expected[0]
    assert_close(got, expected, 0.03)


BIASES = {
    "numbers": lambda q, k, v, ids: mixed(scores(q, k) + counted(ids, -1e4), v),
    "large numbers": lambda q, k, v, ids: mixed(scores(q, k) + counted(ids, -1e9), v),
}


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("name", BIASES)
def test_numbers_that_are_added_to_all_scores_of_a_query(emitted, monkeypatch, name, ids):
    """The smaller change nothing, and the larger leave nothing of the scores, as in float32."""
    monkeypatch.setitem(FORMS, name, BIASES[name])
    attention, written, operands = emitted(name, ids)
    assert attention.biases
    got = dot_product(attention, *operands, implementation="xla")
    assert_close(got.astype(jnp.float32), written(*operands), 0.03)


def test_each_example_has_its_own():
    """`vmap` over ids alone, and over all."""
    one = FORMS["packed, causal"]
    ids = jnp.asarray(IDS["right"])[:, None]

    def each(q, k, v, ids):
        return jax.vmap(lambda q, k, v, ids: jamp.cast_fn(one, FUSED)(q, k, v, ids)[0])(q, k, v, ids)

    wide = [x[:, None] for x in (Q, K, V)]
    (eqn,) = fused_equations(jax.make_jaxpr(each)(*wide, ids))
    assert len(eqn.params["attention"].same) == 1
    assert_close(each(*wide, ids), one(Q, K, V, ids[:, 0]), 0.03)


OTHERS = {
    "two comparisons": lambda q, k, v, ids: attend(q, k, v, alike(ids) & alike(ids // 2)),
    "other sequences": lambda q, k, v, ids: attend(q, k, v, ~alike(ids) | np.eye(LENGTH, dtype=bool)),
    "by heads": lambda q, k, v, ids: attend(
        q, k, v, (ids[:, None, :, None] + jnp.arange(HEADS)[:, None, None]) == ids[:, None, None, :]
    ),
    "either": lambda q, k, v, ids: attend(q, k, v, keys(ids) | queries(ids)),
    "far from it, too": lambda q, k, v, ids: attend(q, k, v, keys(ids) & (np.abs(PLACES[:, None] - PLACES) < 40)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_ids_do_not_say_is_a_mask(name):
    """On GPUs alone, and as it is written."""
    ids = jnp.asarray(IDS["right"])
    (found,) = jamp.report(OTHERS[name], Q, K, V, ids, policy=FUSED).attentions
    assert set(found.kernels) == {"cuda"}
    assert_close(jamp.cast_fn(OTHERS[name], FUSED)(Q, K, V, ids), OTHERS[name](Q, K, V, ids), 0.03)
