"""Gates of recurrences: what a float32 state is multiplied with for hundreds of steps is float32 too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from jamp.transforms.analysis.loops.gates import States
from jamp.transforms.analysis.regimes import REGIMES
from jamp.transforms.planning.planner import Planner
from jamp.transforms.program.want import Want
from tests.transforms.harness import equations
from tests.transforms.programs import COLUMNS, COMBINATORS, SHAPE

R, ONES = jnp.eye(4) * 0.1, jnp.ones(4)
STEPS = 400


def gate(h):
    return jax.nn.sigmoid(h @ R + 6.0)


def cell(h):
    return gate(h) * h


def steps(step, h, length=STEPS):
    return jax.lax.scan(lambda h, _: (step(h), None), h, None, length=length)[0]


FORMS = {
    "gate": lambda h: steps(cell, h),
    "of tanh": lambda h: steps(lambda h: (0.5 + 0.5 * jnp.tanh(h @ R + 3.0)) * h, h),
    "of softmax": lambda h: steps(lambda h: jax.nn.softmax(jnp.stack([h @ R + 6.0, 0 * h]), 0)[0] * h, h),
    "limited": lambda h: steps(lambda h: jnp.clip(h @ R * 0.01 + 0.99, 0, 0.998) * h, h),
    "near one": lambda h: steps(lambda h: (1 - 0.002 * jax.nn.sigmoid(h @ R)) * h, h),
    "divides": lambda h: steps(lambda h: h / (1 + jnp.exp(-(h @ R) - 6.0)), h),
    "moves on": lambda h: steps(lambda h: gate(h) * h + (1 - gate(h)), 0 * h),
    "taken off": lambda h: steps(lambda h: h - (1 - gate(h)) * (h - 1), 0 * h),
    "jit": lambda h: steps(jax.jit(cell), h),
    "checkpoint": lambda h: steps(jax.checkpoint(cell), h),
    "vmap": lambda h: jax.vmap(functools.partial(steps, cell))(h[None])[0],
    "nested": lambda h: steps(lambda h: steps(cell, h, 20), h, 20),
    "chosen": lambda h: jax.lax.scan(lambda h, on: (jnp.where(on, cell(h), h), None), h, jnp.arange(800) % 2 == 0)[0],
    "branch": lambda h: steps(lambda h: jax.lax.cond(h.sum() < 1e9, cell, lambda h: h, h), h),
    "several states": lambda h: jax.lax.scan(
        lambda c, _: ((cell(c[0]), gate(c[0]) * c[1]), None), (h, h), None, length=STEPS
    )[0][1],
    "while": lambda h: jax.lax.fori_loop(0, jnp.int32(100 * h.size), lambda _, h: cell(h), h),
}


@pytest.mark.parametrize("policy", ["O1:bfloat16", "O2:bfloat16", "O2:float16"])
@pytest.mark.parametrize("form", FORMS)
def test_a_state_decays_as_in_float32(form, policy):
    """In half the number below 1 is 0.996 or 0.9995: the state stayed as it was, or was gone in half of the time."""
    cast = jamp.cast_fn(FORMS[form], policy)
    np.testing.assert_allclose(cast(ONES), FORMS[form](ONES), rtol=1e-3)
    if form != "while":
        got, expected = (jax.grad(lambda h, f=f: f(h).sum())(ONES) for f in (cast, FORMS[form]))
        np.testing.assert_allclose(got, expected, rtol=1e-3)


TIMES, FEATURES = 300, 4


def gates_and_data(w, x):
    return jax.nn.sigmoid(6 + 0.3 * x @ w["gate"]), x @ w["data"]


def along(step, *arrays):
    return jax.lax.scan(lambda s, t: (step(s, *t),) * 2, jnp.zeros(FEATURES), arrays)[1]


def mix(s, g, h):
    return g * s + (1 - g) * h


def in_tree(g, h):
    return jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (g, h))[1]


def outer(s, g, h):
    """A gate of each row of a matrix that adds up outer products."""
    return jnp.einsum("i,ij->ij", g, s) + jnp.einsum("i,j->ij", (1 - g) * h, h)


def matrices(step, g, h):
    return jax.lax.scan(lambda s, t: (step(s, *t), t[1] @ s), jnp.zeros((FEATURES,) * 2), (g, h))[1]


# Gates are made outside of the loop, for all steps at once.
OUTSIDE = {
    "scanned": lambda g, h: along(mix, g, h),
    "what is left, too": lambda g, h: along(lambda s, g, u: g * s + u, g, (1 - g) * h),
    "read by position": lambda g, h: jax.lax.fori_loop(0, TIMES, lambda i, s: mix(s, g[i], h[i]), jnp.zeros(FEATURES)),
    "jit inside": lambda g, h: along(jax.jit(mix), g, h),
    "loop in jit": lambda g, h: jax.jit(functools.partial(along, mix))(g, h),
    "checkpoint": lambda g, h: jax.checkpoint(functools.partial(along, mix))(g, h),
    "branch": lambda g, h: along(lambda s, g, h: jax.lax.cond(h[0] < 1e9, mix, lambda s, g, h: s, s, g, h), g, h),
    "in chunks": lambda g, h: jax.lax.scan(
        lambda s, t: jax.lax.scan(lambda s, t: (mix(s, *t),) * 2, s, t),
        jnp.zeros(FEATURES), [a.reshape(10, -1, FEATURES) for a in (g, h)],
    )[1].reshape(h.shape),
    "the same for all steps": lambda g, h: along(lambda s, h: mix(s, g[0], h), h),
    "a tree": lambda g, h: in_tree(g, (1 - g) * h),
    "a tree without what is left": lambda g, h: in_tree(g, 0.02 * h),
    "einsum": lambda g, h: matrices(outer, g, h),
}  # fmt: skip


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("policy", ["O1:bfloat16", "O2:bfloat16", "O2:float16"])
@pytest.mark.parametrize("form", OUTSIDE)
def test_gates_that_are_made_outside_of_a_loop(form, policy):
    """In half they kept everything or nothing: results were off by 40 to 90 %, gradients by twice themselves."""
    keys = jax.random.split(jax.random.key(2), 4)
    x = jax.random.normal(keys[0], (TIMES, FEATURES))
    names = zip(("gate", "data", "out"), keys[1:], strict=True)
    w = {name: jax.random.normal(key, (FEATURES,) * 2) / 2 for name, key in names}

    def net(w, x):
        return OUTSIDE[form](*gates_and_data(w, x)) @ w["out"]

    def loss(fn):
        return jax.jit(jax.value_and_grad(lambda w: jnp.mean(fn(w, x) ** 2)))(w)

    found, expected = loss(jamp.cast_fn(net, policy)), loss(net)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=0.03 * float(jnp.abs(want).max()))


def test_what_scales_a_result_of_a_loop_alone_is_half():
    def net(x, w):
        g, h = jax.nn.sigmoid(x @ w), x @ w
        return jax.lax.scan(lambda s, t: (s + t[1], t[0] * s), jnp.zeros(FEATURES), (g, h))[1] @ w

    found = equations(jax.make_jaxpr(jamp.cast_fn(net, "O2:bfloat16"))(jnp.ones((3, FEATURES)), R))
    assert {str(eqn.outvars[0].aval.dtype) for eqn in found if eqn.primitive.name == "logistic"} == {"bfloat16"}


def in_dtype(name, fn, *args):
    """Of what dtype the results of a primitive are in the body of a loop."""
    (loop,) = [eqn for eqn in equations(jax.make_jaxpr(fn)(*args)) if eqn.primitive.name == "scan"]
    return {str(eqn.outvars[0].aval.dtype) for eqn in equations(loop.params["jaxpr"]) if eqn.primitive.name == name}


def test_products_and_what_is_added_to_a_state_stay_half():
    """So that the backward pass is given half numbers."""

    def lstm(h, c):
        def step(state, _):
            h, c = state
            forget, keep, out, new = jnp.split(h @ jnp.tile(R, 4), 4, -1)
            c = jax.nn.sigmoid(forget + 1) * c + jax.nn.sigmoid(keep) * jnp.tanh(new)
            return (jax.nn.sigmoid(out) * jnp.tanh(c), c), None

        return jax.lax.scan(step, (h, c), None, length=3)[0]

    assert in_dtype("dot_general", jamp.cast_fn(lstm, "O2:bfloat16"), ONES, ONES) == {"bfloat16"}


def test_layers_that_are_scanned_have_no_states():
    """A stream that is scaled by a gate in each layer is half, and so is the gate."""

    def net(w, x):
        return jax.lax.scan(lambda x, w: (jax.nn.sigmoid(x @ w) * x + jnp.tanh(x @ w), None), x, w)[0]

    assert in_dtype("logistic", jamp.cast_fn(net, "O2:bfloat16"), jnp.stack([R] * 3), ONES[None]) == {"bfloat16"}


def test_a_reset_gate_is_half():
    """What is multiplied with a state for a product alone does not go on to the next step."""

    def net(h):
        return jax.lax.scan(lambda h, _: (h + 0.01 * jnp.tanh((jax.nn.sigmoid(h @ R) * h) @ R), None), h, None, 3)[0]

    assert in_dtype("logistic", jamp.cast_fn(net, "O2:bfloat16"), ONES) == {"bfloat16"}


def test_what_is_added_may_be_many_products_of_itself():
    """Sixty squares are as many equations, and 2 ** 60 ways from the first to the last."""

    def step(h):
        power = jnp.tanh(h @ R)
        for _ in range(60):
            power = power * power
        return gate(h) * h + power

    np.testing.assert_allclose(
        jamp.cast_fn(lambda h: steps(step, h, 3), "O2:bfloat16")(ONES), steps(step, ONES, 3), rtol=1e-3
    )


def demand_of(closed, *inputs):
    """What one planner says is wanted in a jaxpr, by the positions of its states."""
    planner, outs = Planner(jamp.get_policy("O2")), (Want.HALF,) * len(closed.jaxpr.outvars)
    given = [States(frozenset(each)) for each in inputs]
    return [planner.demand(closed, outs, REGIMES["O2"], "", frozenset(), each) for each in given]


def test_states_without_gates_make_no_difference():
    closed = jax.make_jaxpr(lambda h, x: (h + jnp.tanh(x @ R), jnp.tanh(x)))(ONES, ONES)
    none, of_sum, of_both = demand_of(closed, [], [0], [0, 1])
    assert none is of_sum is of_both


@pytest.mark.parametrize("call", [lambda f: f, jax.jit, jax.checkpoint])
def test_states_with_gates_make_one(call):
    closed = jax.make_jaxpr(lambda h, x: call(lambda h, x: jax.nn.sigmoid(x @ R) * h)(h, x))(ONES, ONES)
    none, gated = demand_of(closed, [], [0])
    assert none is not gated


@pytest.mark.parametrize("name", sorted(COMBINATORS))
def test_what_was_asked_before_changes_nothing(name):
    def body(m, v, w):
        return m * jax.nn.sigmoid(m @ w + v) + (1 - jax.nn.sigmoid(v)) * m

    args = jnp.ones(SHAPE), jnp.ones(COLUMNS), jnp.ones((COLUMNS, COLUMNS))
    closed = jax.make_jaxpr(lambda m, v, w: COMBINATORS[name](body, m, v, w))(*args)
    inputs = [[], [0], [1], [0, 1], [0, 1, 2], [2]]
    for states, wanted in zip(inputs, demand_of(closed, *inputs), strict=True):
        (alone,) = demand_of(closed, states)
        assert (wanted.wants, wanted.carried) == (alone.wants, alone.carried)
