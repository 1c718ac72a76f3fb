"""Soft caps and masks of places under `attention=fused`: JAX's splash attention for TPUs is told what is written."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import jamp
from jamp.transforms.emission.kernels import splash
from tests.transforms.planning.test_attention import FUSED, WRITTEN, assert_close, fused_equations

LENGTH, HEADS, DEPTH = 128, 2, 16
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))
WINDOW = CAUSAL & ~np.tril(CAUSAL, -33)


def scores(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)


def attend(scores, v, mask=CAUSAL):
    scores = scores if mask is None else jnp.where(mask, scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


def gemma(q, k, v):
    """Gemma 2: scaled queries, a cap, then a mask; groups share keys and values."""
    q = q.reshape(1, LENGTH, 1, HEADS, DEPTH) * 0.25
    capped = jnp.tanh(jnp.einsum("bqkgd,bskd->bkgqs", q, k[:, :, :1]) / 2.0) * 2.0
    weights = jax.nn.softmax(jnp.where(WINDOW, capped, -2.3e38), axis=-1)
    return jnp.einsum("bkgqs,bskd->bqkgd", weights, v[:, :, :1]).reshape(1, LENGTH, HEADS, DEPTH)


PLACES = jnp.arange(LENGTH)
FROM = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
UNLIKE = (FROM <= 40) & (FROM >= -8)
PLACED = {
    "closed-over places": lambda q, k, v: attend(scores(q, k) / 4, v, PLACES[:, None] >= PLACES),
    "their window": lambda q, k, v: attend(
        scores(q, k) / 4, v, (PLACES[:, None] >= PLACES) & (PLACES[:, None] - PLACES < 33)
    ),
    "distances": lambda q, k, v: attend(scores(q, k) / 4, v, jnp.abs(jnp.asarray(FROM)) <= 32),
    "both sides": lambda q, k, v: attend(scores(q, k) / 4, v, jnp.abs(jnp.arange(LENGTH)[:, None] - PLACES) < 32),
    "not further": lambda q, k, v: attend(
        scores(q, k) / 4, v, jnp.greater_equal(32, jnp.abs(PLACES - PLACES[:, None]))
    ),
    "not outside": lambda q, k, v: attend(scores(q, k) / 4, v, ~(jnp.abs(PLACES - PLACES[:, None]) > 32)),
    "unlike sides": lambda q, k, v: attend(scores(q, k) / 4, v, UNLIKE),
    "written ends": lambda q, k, v: attend(
        scores(q, k) / 4, v, (PLACES[:, None] - 40 <= PLACES) & (PLACES[:, None] + 8 >= PLACES)
    ),
    "later keys alone": lambda q, k, v: attend(scores(q, k) / 4, v, PLACES[:, None] <= PLACES),
    "capped": lambda q, k, v: attend(2 * jnp.tanh(scores(q, k) / 8), v, jnp.abs(PLACES[:, None] - PLACES) <= 32),
}
FORMS = {
    "divided": lambda q, k, v: attend(2 * jnp.tanh(scores(q, k) / 4 / 2), v),
    "multiplied": lambda q, k, v: attend(jnp.tanh(scores(q / 4, k) * 0.5) * 2, v),
    "negative": lambda q, k, v: attend(-2 * jnp.tanh(scores(q, k) / -8), v),
    "other slope": lambda q, k, v: attend(3 * jnp.tanh(scores(q, k) / 2), v, WINDOW),
    "no mask": lambda q, k, v: attend(2 * jnp.tanh(scores(q, k) / 8), v, None),
    "mask is added": lambda q, k, v: attend(2 * jnp.tanh(scores(q, k) / 8) + np.where(CAUSAL, 0, -1e9), v, None),
    "gemma": gemma,
    "no cap": lambda q, k, v: attend(scores(q, k) / 4, v, WINDOW),
}  # fmt: skip
WITHOUT_CAP = {"no cap", *PLACED} - {"capped"}
FORMS |= PLACED
# What no kernel for TPUs is told: keys that are far, and queries that see nothing.
FOR_GPUS = {
    "far": lambda q, k, v: attend(scores(q, k) / 4, v, jnp.abs(PLACES[:, None] - PLACES) >= 32),
    "earlier": lambda q, k, v: attend(scores(q, k) / 4, v, PLACES[:, None] > PLACES),
    "changed": lambda q, k, v: attend(scores(q, k) / 4, v, PLACES.at[3].set(9)[:, None] >= PLACES),
}
REFUSED = {
    "masked before": lambda q, k, v: attend(2 * jnp.tanh(jnp.where(CAUSAL, scores(q, k), -1e9)), v, None),
    "shifted before": lambda q, k, v: attend(2 * jnp.tanh(scores(q, k) - scores(q, k).max(-1, keepdims=True)), v),
    "biased before": lambda q, k, v: attend(2 * jnp.tanh(scores(q, k) + 1), v),
    "capped twice": lambda q, k, v: attend(2 * jnp.tanh(jnp.tanh(scores(q, k))), v),
    "scaled by what is computed": lambda q, k, v: attend(jnp.tanh(scores(q, k)) * q[0, 0, 0, 0], v),
}


def inputs():
    return tuple(jax.random.normal(key, (1, LENGTH, HEADS, DEPTH)) for key in jax.random.split(jax.random.key(0), 3))


def fused(form):
    (eqn,) = fused_equations(jax.make_jaxpr(jamp.cast_fn(form, FUSED))(*inputs()))
    return eqn


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", FORMS)
def test_recognised(name):
    (found,) = jamp.report(FORMS[name], *inputs(), policy=FUSED).attentions
    assert "tpu" in found.kernels
    assert ("cuda" in found.kernels) == (name in WITHOUT_CAP)


@pytest.mark.parametrize(
    ("name", "cap", "scale"), [("divided", 2, 0.25), ("negative", 2, 0.25), ("other slope", 3, 1.5)]
)
def test_cap_and_scale(name, cap, scale):
    attention = fused(FORMS[name]).params["attention"]
    assert (attention.cap, attention.scale) == (cap, scale)


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("name", FORMS)
def test_the_kernel_is_told_what_is_written(name):
    """Value and gradients of the kernel itself, interpreted, for operands in half."""
    eqn = fused(FORMS[name])
    keys = jax.random.split(jax.random.key(1), len(eqn.invars))
    attention = eqn.params["attention"]
    main = attention.query.place, attention.key.place, attention.value.place
    values = [
        jax.random.normal(key, var.aval.shape).astype(var.aval.dtype) if place in main else None
        for place, (key, var) in enumerate(zip(keys, eqn.invars, strict=True))
    ]
    for place, var in enumerate(eqn.invars):  # The kernel makes masks itself.
        if place not in main:
            values[place] = mask_like(name, var.aval)

    def derived(function):
        def of_moving(*moved):
            merged = dict(enumerate(values)) | dict(zip(main, moved, strict=True))
            return function(*(merged[place] for place in range(len(values)))).astype(jnp.float32)

        out, pull = jax.vjp(of_moving, *(values[place] for place in main))
        return out, pull(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    written = jaxpr_as_fun(eqn.params["written"])
    kernel = functools.partial(splash, attention, interpret=True)
    assert_close(jax.jit(lambda: derived(kernel))(), jax.jit(lambda: derived(lambda *x: written(*x)[0]))(), 0.03)


def mask_like(name, aval):
    if np.issubdtype(aval.dtype, np.integer):  # Places themselves, or how far keys are.
        places = {1: lambda: PLACES, 2: lambda: PLACES[:, None] - PLACES}[len(aval.shape)]()
        return places.reshape(aval.shape) if places.size == np.prod(aval.shape) else PLACES.reshape(aval.shape)
    mask = WINDOW if name in ("gemma", "other slope", "no cap") else CAUSAL
    mask = UNLIKE if name == "unlike sides" else mask
    if aval.ndim < 2:
        return jnp.ones(aval.shape, aval.dtype)
    value = mask if aval.dtype == bool else np.where(mask, 0, -1e9)
    return jnp.broadcast_to(jnp.asarray(value, aval.dtype), aval.shape)


@pytest.mark.parametrize("name", FOR_GPUS)
def test_other_masks_of_places_are_none_for_tpus(name):
    (found,) = jamp.report(FOR_GPUS[name], *inputs(), policy=FUSED).attentions
    assert set(found.kernels) == {"cuda"}


def test_places_go_into_loops():
    def layers(q, k, v):
        places = jnp.arange(LENGTH)

        def layer(x, _):
            return jnp.sin(attend(scores(x, k) / 4, v, jnp.abs(places[:, None] - places) <= 32)), None

        return jax.lax.scan(layer, q, length=2)[0]

    (found,) = jamp.report(layers, *inputs(), policy=FUSED).attentions
    assert "tpu" in found.kernels


@pytest.mark.parametrize("name", REFUSED)
def test_stays_as_written(name):
    found = jamp.report(REFUSED[name], *inputs(), policy=FUSED).attentions
    assert [each.fused for each in found] == [False]


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", FORMS)
def test_each_platform_is_lowered_for_with_its_own_kernel(name):
    def loss(q, k, v):
        return jnp.sum(jamp.cast_fn(FORMS[name], FUSED)(q, k, v) ** 2)

    traced = jax.jit(jax.grad(loss)).trace(*inputs())
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "custom_call" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_elsewhere_as_written():
    def result(policy):
        def loss(*args):
            return jnp.sum(jnp.sin(jamp.cast_fn(gemma, policy)(*map(jnp.sin, args)).astype(jnp.float32)))

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*inputs())

    assert_close(result(FUSED), result(WRITTEN), 2**-7)


def test_queries_that_see_no_key_are_left_as_written():
    q = jax.ShapeDtypeStruct((1, 2 * LENGTH, HEADS, DEPTH), jnp.float32)
    k = jax.ShapeDtypeStruct((1, LENGTH, HEADS, DEPTH), jnp.float32)
    tall = np.tril(np.ones((2 * LENGTH, LENGTH), bool))
    mask = tall & ~np.tril(tall, -33)
    (found,) = jamp.report(lambda q, k, v: attend(scores(q, k) / 4, v, mask), q, k, k, policy=FUSED).attentions
    assert "tpu" not in found.kernels
