"""What is decided about ten small programs, as text beside this file: a change of a decision shows in the diff.

`JAMP_UPDATE_PLANS=1 python -m pytest tests/transforms/planning/test_plans.py` writes the files anew; read the diff
before you commit it.
"""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from jamp.transforms._traced import Traced
from tests.transforms.planning.printed import printed

# A result in float32 would be wanted in float32.
POLICY = jamp.get_policy("O2:bfloat16,o=bfloat16")
FOLDER = Path(__file__).parent / "plans"

X = jnp.ones((4, 16))
W = jnp.ones((16, 16))
STACK = jnp.ones((3, 16, 16))


def softmax(x, w):
    z = x @ w
    e = lax.exp(z - lax.reduce_max(z, (1,))[:, None])
    return e / lax.reduce_sum(e, (1,))[:, None]


def norm(x, w):
    h = x @ w
    centred = h - lax.reduce_sum(h, (1,))[:, None] / 16
    variance = lax.reduce_sum(centred * centred, (1,))[:, None] / 16
    return centred * lax.rsqrt(variance + 1e-5)


def recurrence(x, w):
    """What a carry adds up over time is float32."""
    return lax.scan(lambda h, t: (h + lax.tanh(t * h), None), x, w)[0]


def layers(x, stack):
    """A carry that goes through layers is a stream of half data."""
    return lax.scan(lambda h, w: (h + lax.tanh(h @ w), None), x, stack)[0]


def scan(x, w):
    return lax.scan(lambda h, _: (lax.tanh(h @ w), None), x, None, length=3)[0]


def cond(x, w):
    return lax.cond(x[0, 0] > 0, lambda h: h @ w, lambda h: lax.exp(h), x)


@jax.custom_jvp
def squared(x):
    return x * x


@squared.defjvp
def _rule(primals, tangents):
    return squared(*primals), 2 * primals[0] * tangents[0]


def custom_rule(x, w):
    return squared(x @ w)


def attention(x, w):
    queries, keys, values = ((x @ w).reshape(1, 4, 16) for _ in range(3))
    scores = jnp.einsum("bqd,bkd->bqk", queries, keys) * 0.25
    e = lax.exp(scores - lax.reduce_max(scores, (2,))[..., None])
    return jnp.einsum("bqk,bkd->bqd", e / lax.reduce_sum(e, (2,))[..., None], values)


def relu(x, w):
    return lax.max(x @ w, 0.0) @ w


def remat(x, w):
    return jax.checkpoint(lambda h: lax.exp(h @ w) @ w)(x)


PROGRAMS = {
    softmax: (X, W), norm: (X, W), scan: (X, W), cond: (X, W), custom_rule: (X, W),
    attention: (X, W), relu: (X, W), layers: (X, STACK), recurrence: (X[0], W), remat: (X, W),
}  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_plan(program):
    plan = Traced(program, PROGRAMS[program], {}).plan(POLICY)
    path, text = FOLDER / f"{program.__name__}.txt", printed(plan)
    if os.environ.get("JAMP_UPDATE_PLANS"):
        path.write_text(text)
    assert text == path.read_text()


def test_there_is_a_program_for_each_file():
    assert sorted(path.stem for path in FOLDER.glob("*.txt")) == sorted(program.__name__ for program in PROGRAMS)
