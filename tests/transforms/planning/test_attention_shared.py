"""Keys and values that all heads or all examples share: their many cotangents add up in float32, fused or not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import jamp
from jamp.transforms.emission.kernels import dot_product, flash
from tests.transforms.harness import find, trace

rng = np.random.default_rng(0)
HEADS, DEPTH, WRITTEN = 8, 16, "O2:bfloat16"


def normal(*shape):
    return np.float32(rng.standard_normal(shape))


def attend(q, k, v):
    scores = jnp.einsum("blhd,bshd->bhls", q, k) * DEPTH**-0.5
    return jnp.einsum("bhls,bshd->blhd", jax.nn.softmax(scores), v)


def repeated(q, k, v):
    """One head of keys for all queries'."""
    return attend(q, jnp.repeat(k, HEADS, 2), jnp.repeat(v, HEADS, 2))


def shared(q, k, v):
    """Keys that are learned, for a whole batch."""
    return attend(q, *(jnp.broadcast_to(x, (len(q), *x.shape)) for x in (k, v)))


def spread(q, k, v):
    """The same, by a product without an axis of the batch."""
    weights = jax.nn.softmax(jnp.einsum("blhd,shd->bhls", q, k) * DEPTH**-0.5)
    return jnp.einsum("bhls,shd->blhd", weights, v)


Q = normal(16, 32, HEADS, DEPTH)
FORMS = {
    "one head": (repeated, Q, normal(16, 32, 1, DEPTH), normal(16, 32, 1, DEPTH)),
    "a batch": (shared, Q, normal(32, HEADS, DEPTH), normal(32, HEADS, DEPTH)),
    "a batch, by the product": (spread, Q, normal(32, HEADS, DEPTH), normal(32, HEADS, DEPTH)),
}
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def gradients(fn, operands):
    return jax.jit(jax.grad(lambda *args: jnp.sin(1.3 * fn(*args) + 0.2).sum(), (0, 1, 2)))(*operands)


def errors(got, expected):
    return [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in zip(got, expected, strict=True)]


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@forms
def test_their_gradients_are_as_exact_as_those_of_what_is_written(form, half):
    fn, *operands = form
    reference = gradients(fn, operands)
    written, fused = (
        errors(gradients(jamp.cast_fn(fn, f"O2:{half}{setting}"), operands), reference)
        for setting in ("", ",attention=fused")
    )
    assert len(jamp.report(fn, *operands, policy=f"O2:{half},attention=fused").attentions) == 1
    assert all(one <= 1.1 * other for one, other in zip(fused, written, strict=True))


def as_bound(form):
    """The attention of a form, what it is written as, and its operands in the dtypes that they have there."""
    fn, *operands = form
    (eqn,) = find(trace(jamp.cast_fn(fn, f"{WRITTEN},attention=fused"), *operands), "jamp_attention")
    values = [jnp.asarray(x, var.aval.dtype) for x, var in zip(operands, eqn.invars, strict=True)]
    return eqn.params["attention"], eqn.params["written"], values


@forms
def test_a_kernel_computes_what_is_written(form):
    """JAX's written form stands in for cuDNN's kernel."""
    attention, written, values = as_bound(form)
    out = dot_product(attention, *values, implementation="xla")
    (expected,) = jaxpr_as_fun(written)(*values)
    assert out.dtype == jnp.bfloat16
    out, expected = np.float32(out), np.float32(expected.astype(out.dtype))
    np.testing.assert_allclose(out, expected, rtol=0, atol=0.03 * np.abs(expected).max())


@forms
def test_the_kernel_for_tpus_is_given_half(form, monkeypatch):
    given = []

    def record(q, k, v, **_):
        given.extend(x.dtype.name for x in (q, k, v))
        return q

    monkeypatch.setattr("jax.experimental.pallas.ops.tpu.flash_attention.flash_attention", record)
    attention, _, values = as_bound(form)
    flash(attention, *values)
    assert given == ["bfloat16"] * 3
