"""What a kernel is told of an attention whose operands, masks and scores are reversed, rolled, shuffled or turned.

On a CPU the equations run as they are written, so that an axis that was misread would be wrong on a GPU alone: here a
kernel is in their place.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from jamp.transforms.emission.kernels import dot_product
from tests.transforms import harness
from tests.transforms.planning.test_attention import FUSED, WRITTEN, assert_close, fused_equations

SIZE = 8
Q, K, V = (jax.random.normal(key, (2, SIZE, 4, 16)) for key in jax.random.split(jax.random.key(0), 3))
MASK = jax.random.bernoulli(jax.random.key(1), 0.6, (2, 1, SIZE, SIZE)) | jnp.eye(SIZE, dtype=bool)
PADDING = jnp.arange(SIZE) < jnp.array([5, 8])[:, None]
BIAS = jax.random.normal(jax.random.key(2), (4, SIZE, SIZE))
FACTOR = jnp.linspace(0.5, 2, SIZE)[:, None]
ORDER = np.array([3, 0, 7, 1, 6, 2, 5, 4])


def halves(x, axis):
    """An axis as two."""
    return x.reshape(*x.shape[:axis], 2, SIZE // 2, *x.shape[axis + 1 :])


MOVES = {
    "reversed": jnp.flip,
    "reversed twice": lambda x, axis: jnp.flip(jnp.flip(x, axis) * 1.0, axis).astype(x.dtype),
    "rolled": lambda x, axis: jnp.roll(x, 3, axis),
    "in another order": lambda x, axis: jnp.take(x, ORDER, axis),
    "halves swapped": lambda x, axis: jnp.flip(halves(x, axis), axis).reshape(x.shape),
    "reversed by halves": lambda x, axis: jnp.flip(halves(x, axis), axis + 1).reshape(x.shape),
    "shuffled": lambda x, axis: jnp.swapaxes(halves(x, axis), axis, axis + 1).reshape(x.shape),
    "every other first": lambda x, axis: jnp.concatenate(
        [jax.lax.slice_in_dim(x, start, SIZE, 2, axis) for start in (0, 1)], axis
    ),
    "one later": lambda x, axis: jnp.concatenate(
        [jax.lax.slice_in_dim(x, 1, SIZE, 1, axis), jax.lax.slice_in_dim(x, 0, 1, 1, axis)], axis
    ),
}


def scores(q=Q, k=K):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4


def mixed(s, v):
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v)


def causal():
    return jnp.tril(jnp.ones((SIZE, SIZE), bool))


PLACES = jnp.arange(SIZE)
# Each moves something along an axis. The axis is that of queries, of keys, or the only one.
TARGETS = {
    "queries": lambda q, k, v, move: mixed(scores(move(q, 1), k), v),
    "keys": lambda q, k, v, move: mixed(scores(q, move(k, 1)), v),
    "values": lambda q, k, v, move: mixed(scores(q, k), move(v, 1)),
    "keys and values": lambda q, k, v, move: mixed(
        jnp.where(causal(), scores(q, move(k, 1)), -1e9), move(v, 1)
    ),
    "features": lambda q, k, v, move: mixed(scores(q, k), move(v[..., :SIZE], 3)),
    "rows of a mask": lambda q, k, v, move: mixed(jnp.where(move(MASK, 2), scores(q, k), -1e9), v),
    "columns of a mask": lambda q, k, v, move: mixed(jnp.where(move(MASK, 3), scores(q, k), -1e9), v),
    "padding": lambda q, k, v, move: mixed(jnp.where(move(PADDING, 1)[:, None, None], scores(q, k), -1e9), v),
    "padding added": lambda q, k, v, move: mixed(
        scores(q, k) + move(jnp.where(PADDING, 0.0, -1e9), 1)[:, None, None], v
    ),
    "rows of a triangle": lambda q, k, v, move: mixed(jnp.where(move(causal(), 0), scores(q, k), -1e9), v),
    "columns of a triangle": lambda q, k, v, move: mixed(jnp.where(move(causal(), 1), scores(q, k), -1e9), v),
    "places of queries": lambda q, k, v, move: mixed(
        jnp.where(move(jnp.arange(SIZE), 0)[:, None] >= jnp.arange(SIZE), scores(q, k), -1e9), v
    ),
    "places of keys": lambda q, k, v, move: mixed(
        jnp.where(jnp.arange(SIZE)[:, None] >= move(jnp.arange(SIZE), 0), scores(q, k), -1e9), v
    ),
    "places closed over": lambda q, k, v, move: mixed(
        jnp.where(PLACES[:, None] >= move(PLACES, 0), scores(q, k), -1e9), v
    ),
    "rows of a bias": lambda q, k, v, move: mixed(scores(q, k) + move(BIAS, 1), v),
    "columns of a bias": lambda q, k, v, move: mixed(scores(q, k) + move(BIAS, 2), v),
    "a factor": lambda q, k, v, move: mixed(scores(q, k) * move(FACTOR, 0), v),
    "rows of scores": lambda q, k, v, move: mixed(move(scores(q, k), 2), v),
    "columns of scores": lambda q, k, v, move: mixed(move(scores(q, k), 3), v),
    "weights": lambda q, k, v, move: jnp.einsum("bhqk,bkhd->bqhd", move(jax.nn.softmax(scores(q, k)), 3), v),
    "results": lambda q, k, v, move: move(mixed(scores(q, k), v), 1),
    "a maximum": lambda q, k, v, move: (
        lambda s: mixed(s - move(s.max(3, keepdims=True), 2), v)
    )(scores(q, k)),
    "sums": lambda q, k, v, move: (
        lambda e: jnp.einsum("bhqk,bkhd->bqhd", e * move(1 / e.sum(3, keepdims=True), 2), v)
    )(jnp.exp(scores(q, k))),
}  # fmt: skip


@pytest.fixture
def kernel(monkeypatch):
    """Runs a program with a kernel where an attention is fused."""

    def attention(eqn, args):
        operands = [jnp.asarray(arg) for arg in args]
        return [np.asarray(dot_product(eqn.params["attention"], *operands, implementation="xla"))]

    monkeypatch.setitem(harness._EVALUATE, "jamp_attention", attention)


@pytest.mark.in_turns(6)
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_kernel_is_told_of_every_move(target):
    wrong = {}
    for name, move in MOVES.items():

        def program(q, k, v, move=move):
            return jnp.sin(target(jnp.sin(q), jnp.sin(k), jnp.sin(v), move))

        expected = jamp.cast_fn(program, WRITTEN)(Q, K, V)
        try:
            assert_close(harness.run(jamp.cast_fn(program, FUSED), Q, K, V), expected, 0.03)
        except AssertionError as error:
            wrong[name] = str(error)
    assert wrong == {}


@pytest.mark.nightly  # It draws many programs.
def test_what_is_moved_is_fused_mostly():
    """Or the test above would say nothing."""
    fused = {
        (name, how): len(fused_equations(jax.make_jaxpr(jamp.cast_fn(lambda *x, m=m, t=t: t(*x, m), FUSED))(Q, K, V)))
        for name, t in TARGETS.items()
        for how, m in MOVES.items()
    }
    never = {"rows of scores", "columns of scores", "weights", "a maximum", "sums", "features"}
    left = [key for key, count in fused.items() if not count and key[0] not in never]
    assert len(left) < 0.25 * len(fused), left


@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
def test_scores_of_arguments_are_float32_as_without_the_setting(policy):
    """They were rounded where nothing is fused, and gradients up to 1.28 times as wrong."""

    def program(q, k, v):
        return mixed(jnp.where(causal(), scores(q, k), -1e9), v) @ jnp.ones((16, 16))

    def derived(fn):
        return jax.jit(jax.grad(lambda *args: (fn(*args) * jnp.cos(jnp.arange(16))).sum(), (0, 1, 2)))

    def errors(setting):
        found = derived(jamp.cast_fn(program, f"O2:{policy},attention={setting}"))
        pairs = [(found(*draw), exact(*draw)) for draw in draws]
        return np.mean([[float(jnp.linalg.norm(x - y)) for x, y in zip(*pair, strict=True)] for pair in pairs], axis=0)

    exact, draws = derived(program), 2 * np.random.default_rng(0).normal(size=(8, 3, *Q.shape)).astype(np.float32)
    assert (errors("fused") < 1.05 * errors("as written")).all()


BIASES = {
    "of far keys": lambda s: s + (900 + jnp.array([0.5, 0.25, 0.0625, 1.0])[:, None, None] * PLACES),
    "of far keys, causal": lambda s: jnp.where(causal(), s + 900 + 0.5 * PLACES, -1e9),
    "in a window": lambda s: jnp.where(
        (PLACES[:, None] >= PLACES) & (PLACES[:, None] - PLACES <= 2), s + 900 - 0.5 * PLACES, -1e9
    ),
    "large where nothing counts": lambda s: jnp.where(MASK, s + jnp.where(MASK, BIAS, 5000.0), -1e9),
    "of queries": lambda s: s + 700.0 * PLACES[:, None] + BIAS,
    "two that cancel": lambda s: s + (3000 + BIAS) - 3000 * jnp.ones(SIZE),
    "that hide": lambda s: s + jnp.where(causal(), 0.0, -1e9) + 300.0 * jnp.ones(SIZE),
    "infinite": lambda s: s + jnp.where(causal(), 0.0, -jnp.inf) + 600 + PLACES,
}


@pytest.mark.in_turns(3)
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("policy", ["bfloat16", "float16"])
@pytest.mark.parametrize("biased", BIASES.values(), ids=BIASES)
def test_large_biases_are_as_exact_as_they_differ(biased, policy):
    """BLOOM's are slopes times places of keys: rounded, their differences were lost, and the result was 16 % off."""

    def program(q, k, v):
        return jnp.sin(mixed(biased(scores(jnp.sin(q), jnp.sin(k))), jnp.sin(v)))

    found = harness.run(jamp.cast_fn(program, f"O2:{policy},attention=fused"), Q, K, V)
    assert_close(found, program(Q, K, V), 0.02)
    assert fused_equations(jax.make_jaxpr(jamp.cast_fn(program, f"O2:{policy},attention=fused"))(Q, K, V))


def unsigned(dtype):
    """Places of a dtype in which a difference below zero is a large number, closed over."""
    return np.arange(SIZE, dtype=dtype)


def rows(q, k, v, mask):
    """An attention whose queries have two axes."""
    s = jnp.einsum("brcd,bkd->brck", q.reshape(2, SIZE, 4, 16), k[:, :, 0]) / 4
    return jnp.einsum("brck,bkd->brcd", jax.nn.softmax(jnp.where(mask, s, -1e9)), v[:, :, 0])


R, C, J = PLACES[:, None, None], PLACES[None, :4, None], PLACES
# What is read wrongly where a rule of places, of maxima, of factors or of axes is forgotten.
MISREAD = {
    "unsigned difference": lambda q, k, v: mixed(
        jnp.where((unsigned(np.uint32)[:, None] - jnp.asarray(unsigned(np.uint32))) < 5, scores(q, k), -1e9), v
    ),
    "unsigned, never negative": lambda q, k, v: mixed(
        jnp.where((jnp.arange(SIZE, dtype=jnp.uint8)[:, None] - jnp.arange(SIZE, dtype=jnp.uint8)) >= 0,
                  scores(q, k), -1e9), v
    ),
    "beyond 8 bits": lambda q, k, v: mixed(
        jnp.where((PLACES + 252).astype(jnp.uint8)[:, None] >= PLACES.astype(jnp.uint8), scores(q, k), -1e9), v
    ),
    "sums beyond 8 bits": lambda q, k, v: mixed(
        jnp.where(
            PLACES.astype(jnp.int8)[:, None] + jnp.int8(124) >= PLACES.astype(jnp.int8) + jnp.int8(120),
            scores(q, k), -1e9), v
    ),
    "places as booleans": lambda q, k, v: mixed(
        jnp.where(PLACES.astype(bool)[:, None] >= PLACES.astype(bool), scores(q, k), -1e9), v
    ),
    "places in half": lambda q, k, v: mixed(
        jnp.where((PLACES + 300).astype(jnp.bfloat16)[:, None] >= (PLACES + 300).astype(jnp.bfloat16),
                  scores(q, k), -1e9), v
    ),
    "half of the scores taken off": lambda q, k, v: (
        lambda s: mixed(s - 0.5 * (jnp.broadcast_to(s.max(3, keepdims=True), s.shape) + s), v)
    )(scores(q, k)),
    "scores cut off": lambda q, k, v: (
        lambda s: mixed(s - jnp.maximum(jnp.broadcast_to(s.max(3, keepdims=True) - 1, s.shape), s), v)
    )(scores(q, k)),
    "a maximum where it is positive": lambda q, k, v: (
        lambda s: mixed(s - jnp.where(s.max(3, keepdims=True) > 0.5, s.max(3, keepdims=True), s), v)
    )(scores(q, k)),
    "masked, then times zero": lambda q, k, v: mixed(
        jnp.where(causal(), scores(q, k), -1e9) * jnp.sin(0.0 * q[0, 0, :, :1, None]), v
    ),
    "masked, then negated": lambda q, k, v: mixed(
        jnp.where(causal(), scores(q, k), -1e9) * (-1.0 - jnp.sin(q[0, 0, :, :1, None]) ** 2), v
    ),
    "two axes before the keys": lambda q, k, v: rows(q, k, v, (R >= J) & (C >= J)),
    "a window of another axis": lambda q, k, v: rows(q, k, v, (R >= J) & (C - J <= 1)),
    "one of two axes": lambda q, k, v: rows(q, k, v, C >= J),
    "values of each query": lambda q, k, v: jnp.einsum(
        "bhqk,bqkhd->bqhd", jax.nn.softmax(scores(q, k)), v[:, None] + q[:, :, None]
    ),
    "masks side by side": lambda q, k, v: jax.vmap(
        lambda mask: mixed(jnp.where(mask, scores(q, k), -1e9), v)
    )(jnp.stack([MASK, ~MASK | jnp.eye(SIZE, dtype=bool), MASK])),
    "biases side by side": lambda q, k, v: jax.vmap(lambda bias: mixed(scores(q, k) + bias, v))(
        jnp.stack([BIAS, 2 * BIAS, -BIAS])
    ),
    "temperatures side by side": lambda q, k, v: jax.vmap(lambda t: mixed(scores(q, k) * t, v))(
        jnp.sin(q[0, 0, :3, 0])
    ),
    "one query for all, and a bias": lambda q, k, v: mixed(
        scores(jnp.broadcast_to(q[:, :1], q.shape), k) + BIAS, v
    ),
    "axes of weights swapped": lambda q, k, v: mixed(
        scores(jnp.tile(q, (1, 1, 2, 1)), jnp.tile(k, (1, 1, 2, 1))).swapaxes(1, 2), jnp.tile(v, (1, 1, 2, 1))
    ),
    "keys repeated along features": lambda q, k, v: mixed(
        jnp.einsum("bqhde,bkhde->bhqk", q.reshape(2, SIZE, 4, 8, 2),
                   jnp.broadcast_to(k[..., :8, None], (2, SIZE, 4, 8, 2))) / 4, v
    ),
}  # fmt: skip


@pytest.mark.in_turns(3)
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("program", MISREAD.values(), ids=MISREAD)
def test_what_is_no_plain_attention_is_not_taken_for_one(program):
    def around(q, k, v):
        return jnp.sin(program(jnp.sin(q), jnp.sin(k), jnp.sin(v)))

    expected = jamp.cast_fn(around, WRITTEN)(Q, K, V)
    assert_close(harness.run(jamp.cast_fn(around, FUSED), Q, K, V), expected, 0.03)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("factor", [1e6, 1e-8])
def test_factors_far_from_one_meet_the_scale_first(factor):
    """In float16 queries times the factor were infinite, or zero, before the scale came."""

    def program(q, k, v, computed):
        return jnp.sin(mixed(scores(jnp.sin(q), jnp.sin(k)) * computed * (1 / factor), jnp.sin(v)))

    found = harness.run(jamp.cast_fn(program, "O2:float16,attention=fused"), Q, K, V, jnp.float32(factor))
    assert_close(found, program(Q, K, V, jnp.float32(factor)), 0.01)
