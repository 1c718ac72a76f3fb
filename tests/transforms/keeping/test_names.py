"""What is kept is a variable of its own, and what is computed again is held apart where a compiler would merge it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jamp
from jamp.transforms.keeping.kept import KeepHalf
from jamp.transforms.keeping.names import hold, keep
from tests.transforms.harness import find, o2, trace

X = jnp.linspace(-1, 1, 8).reshape(2, 4)


def twice(x):
    """Reads what it keeps, forward and backward."""
    y = keep(jax.lax.erf(x))
    return (jnp.sin(y) * y).sum()


def kept(fn, barrier=False):
    return jax.checkpoint(fn, policy=KeepHalf(barrier), prevent_cse=False)


def lowered(fn, platform):
    return jax.jit(fn).trace(X).lower(lowering_platforms=(platform,)).as_text()


def test_jax_rounds_what_both_passes_read():
    """The reason for a primitive of its own: when this fails, it may not be needed any more."""

    def fn(x):
        y = checkpoint_name(jax.lax.erf(x), "name")
        return (jnp.sin(y) * y).sum()

    named = jax.checkpoint(fn, policy=jax.checkpoint_policies.save_only_these_names("name"))
    assert find(trace(jax.value_and_grad(named), X), "reduce_precision")


def test_nothing_in_the_forward_pass_reads_what_is_kept():
    jaxpr = trace(jax.value_and_grad(kept(twice)), X)
    assert not find(jaxpr, "reduce_precision")
    assert len(find(jaxpr, "erf")) == 1
    (forward,) = [eqn for eqn in find(jaxpr, "jamp_keep") if eqn.params["count"] == 2]
    reads, handed_on = forward.outvars
    others = [eqn for eqn in jaxpr.eqns if eqn.primitive.name != "remat2" and eqn.primitive.name != "checkpoint"]
    assert any(reads in eqn.invars for eqn in others)
    assert not any(handed_on in eqn.invars for eqn in others)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable], ids=["nothing", "products"])
def test_other_policies_keep_what_they_say(policy):
    jaxpr = trace(jax.grad(jax.checkpoint(twice, policy=policy)), X)
    assert len(find(jaxpr, "erf")) == 2


def test_without_a_checkpoint_it_is_an_identity():
    np.testing.assert_array_equal(keep(X), X)
    np.testing.assert_array_equal(jax.vmap(keep)(X), X)
    np.testing.assert_array_equal(jax.jvp(keep, (X,), (2 * X,))[1], 2 * X)


@pytest.mark.parametrize("transform", [jax.grad, jax.hessian, jax.jit, lambda fn: jax.grad(jax.jit(fn))])
def test_derivatives_are_those_without_it(transform):
    def plain(x):
        y = jax.lax.erf(x)
        return (jnp.sin(y) * y).sum()

    np.testing.assert_allclose(transform(kept(twice, barrier=True))(X), transform(plain)(X), rtol=1e-6)


def test_what_is_kept_twice_in_a_row_is_kept_once():
    """A rule of differentiation keeps its result, and so does what reads the function with that rule."""

    @jax.custom_jvp
    def sine(x):
        return jnp.sin(x)

    @sine.defjvp
    def rule(primals, tangents):
        y = keep(sine(primals[0]))
        return y, tangents[0] * jnp.sqrt(1 - y * y)

    def fn(x):
        y = keep(sine(x))
        return (jnp.cos(y) * y).sum()

    _, backward = jax.vjp(kept(fn), X)
    assert [leaf.shape for leaf in jax.tree.leaves(backward)].count(X.shape) == 1


@pytest.mark.parametrize(("platform", "count"), [("cpu", 1), ("cuda", 1), ("tpu", 0)])
def test_a_barrier_stands_behind_what_is_kept_where_it_is_computed_on(platform, count):
    text = lowered(jax.grad(kept(twice, barrier=True)), platform)
    assert text.count("optimization_barrier") == count
    assert "optimization_barrier" not in lowered(jax.grad(kept(twice)), platform)
    assert "optimization_barrier" not in lowered(twice, platform)


def test_what_a_checkpoint_is_given_is_held_apart_and_kept_no_second_time():
    held = kept(lambda x: jnp.sin(jnp.cos(hold(x))).sum(), barrier=True)
    _, backward = jax.vjp(held, X)
    assert len(jax.tree.leaves(backward)) == 1
    assert lowered(jax.grad(held), "cuda").count("optimization_barrier") == 1


def test_of_a_network_weights_and_cotangents_are_behind_no_barrier():
    def network(ws, x):
        for w in ws:
            x = jax.nn.gelu(x @ w)
        return x

    ws, x = [jnp.ones((6, 6))] * 3, jnp.ones((4, 6))
    step = jax.jit(jax.grad(lambda ws: o2(network)(ws, x).sum()))
    text = step.trace(ws).lower(lowering_platforms=("cuda",)).as_text()
    barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert barriers
    assert not any("6x6" in line or "," in line.split("optimization_barrier")[1] for line in barriers)
    assert "optimization_barrier" not in step.trace(ws).lower(lowering_platforms=("tpu",)).as_text()


def test_a_program_that_is_cast_again_has_it():
    grad = jax.grad(lambda w, x: jamp.cast_fn(lambda w, x: jnp.tanh(x @ w) ** 2, "O2")(w, x).sum())
    w = jnp.ones((4, 4)) / 4
    found, expected = jamp.cast_fn(grad, "O1:bfloat16")(w, X), grad(w, X)
    np.testing.assert_allclose(found, expected, rtol=0.05)


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, jax.vmap, lambda fn: lambda x: jax.lax.map(fn, x)])
def test_a_linear_function_is_transposed(wrap):
    w = jnp.arange(16.0).reshape(4, 4)

    def linear(x):
        return (2 * x @ w) @ w

    transposed = jax.linear_transpose(wrap(o2(linear)), X)
    expected = jax.linear_transpose(linear, X)
    ct = jnp.ones_like(X)
    np.testing.assert_allclose(transposed(ct)[0], expected(ct)[0], rtol=0.01)
