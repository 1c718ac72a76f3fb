"""What `tx.init` and `tx.update` are given: what is wrong is an error in words, and what is right is taken."""

import functools
import re

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from flax.core import FrozenDict

import jamp

PARAMS = {"w": jnp.ones((4, 2)), "b": jnp.ones(2)}
GRADS = jax.tree.map(jnp.ones_like, PARAMS)
HALF = jax.tree.map(lambda p: p.astype("bfloat16"), PARAMS)
KEY = jax.random.key(0)
WRAPPERS = {
    "mixed_precision": lambda inner: jamp.mixed_precision(inner, "O2:float16"),
    "loss_scaled": lambda inner: jamp.loss_scaled(jamp.DynamicLossScale(), inner),
    "master_weights": jamp.master_weights,
    "stochastic_rounding": lambda inner: jamp.stochastic_rounding(inner, KEY),
    "low_precision_state": jamp.low_precision_state,
}
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
each_optimizer = pytest.mark.parametrize("inner", [optax.adam(0.1), optax.sgd(0.1)], ids=["adam", "sgd"])
ADAM = WRAPPERS["mixed_precision"](optax.adam(0.1))
SGD = WRAPPERS["mixed_precision"](optax.sgd(0.1))
STATE = ADAM.init(PARAMS)


def refuses(error, *texts):
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, texts)))


# ---------------------------------------------------------------- init


@each_wrapper
@each_optimizer
def test_a_module_with_functions_in_it(wrap, inner):
    model = eqx.nn.MLP(2, 2, 2, 1, key=KEY)
    with refuses(TypeError, ".activation: ", ".final_activation: ", "eqx.filter(model, eqx.is_inexact_array)"):
        wrap(inner).init(model)
    wrap(inner).init(eqx.filter(model, eqx.is_inexact_array))


@each_wrapper
@pytest.mark.parametrize(
    "params", [None, 3, True, "params", {"w": "w"}, linen.Dense(2), linen.Dense(2).init, optax.sgd(0.1), STATE]
)
def test_what_is_no_tree_of_parameters(wrap, params):
    if params is STATE and wrap is not WRAPPERS["mixed_precision"]:
        return
    with refuses(TypeError, "`tx.init` takes the parameters", "Write `opt_state = tx.init(params)`."):
        wrap(optax.sgd(0.1)).init(params)


@each_wrapper
@pytest.mark.parametrize("leaf", [jnp.arange(3), jnp.ones(3, bool), 3], ids=["integers", "booleans", "a number"])
def test_parameters_of_which_none_is_floating(wrap, leaf):
    with refuses(TypeError, "none of these is floating", "['w']: ", "x.astype('float32')"):
        wrap(optax.sgd(0.1)).init({"w": leaf})
    wrap(optax.sgd(0.1)).init({"w": jnp.ones(3), "steps": jnp.arange(3)})


PARAMETERS = {
    "one array": jnp.ones(3),
    "a scalar": jnp.float32(1),
    "a number": 1.0,
    "an empty dict": {},
    "an empty tuple": (),
    "nothing but masks": optax.MaskedNode(),
    "nothing but None": {"a": None},
    "a list": [jnp.ones(3), (jnp.ones(2), jnp.float32(1))],
    "frozen": FrozenDict({"a": {"w": jnp.ones(3)}}),
    "of Haiku": hk.data_structures.to_haiku_dict({"linear": {"w": jnp.ones(3)}}),
    "of Equinox": eqx.filter(eqx.nn.MLP(2, 2, 2, 1, key=KEY), eqx.is_inexact_array),
    "partly of Equinox": eqx.partition(eqx.nn.MLP(2, 2, 2, 1, key=KEY), lambda x: eqx.is_array(x) and x.ndim == 2)[0],
    "of NNX": nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param),
    "of NNX, pure": nnx.to_pure_dict(nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)),
}


def gradients(params):
    return jax.tree.map(lambda p: jnp.ones_like(p) if jnp.issubdtype(jnp.result_type(p), jnp.inexact) else p, params)


@pytest.mark.in_turns(3)
@each_optimizer
@pytest.mark.parametrize("params", PARAMETERS.values(), ids=PARAMETERS)
def test_trees_of_parameters(inner, params):
    tx = WRAPPERS["loss_scaled"](inner)
    state = tx.init(params)
    updates, _ = tx.update(gradients(params), state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    shapes = jax.eval_shape(tx.init, params)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)


def test_parameters_without_values():
    shapes = jax.eval_shape(lambda: PARAMS)
    state = jax.eval_shape(ADAM.init, shapes)
    updates, _ = jax.eval_shape(ADAM.update, shapes, state, shapes)
    assert updates["w"].shape == (4, 2)
    assert jax.tree.structure(ADAM.init(shapes)) == jax.tree.structure(STATE)


# ---------------------------------------------------------------- update


UPDATES = {
    "None": (TypeError, None, "got None in place of the gradients"),
    "the loss": (ValueError, jnp.float32(1), "got float32[] in place of the gradients"),
    "a Python loss": (ValueError, 1.0, "got 1.0 in place of the gradients"),
    "a function": (TypeError, lambda params: GRADS, "`tx.update` takes gradients"),
    "a name": (TypeError, "grads", "`tx.update` takes gradients"),
    "loss and gradients": (ValueError, (jnp.float32(1), GRADS), "got a pair (loss, grads)"),
    "gradients and loss": (ValueError, (GRADS, jnp.float32(1)), "got a pair (grads, loss)"),
    "a list": (ValueError, [jnp.float32(1), GRADS], "got a pair (loss, grads)"),
    "with data": (ValueError, ((jnp.float32(1), {"aux": 2}), GRADS), "got a pair (loss, grads)"),
    "three": (ValueError, (jnp.float32(1), None, GRADS), "got 3 values, gradients at 2"),
}


@each_wrapper
@pytest.mark.parametrize(("error", "updates", "text"), UPDATES.values(), ids=UPDATES)
def test_what_is_no_gradients(wrap, error, updates, text):
    tx = wrap(optax.sgd(0.1))
    step = "    loss, grads = jamp.scaled_value_and_grad(loss_fn, opt_state)(params, batch)\n    updates, opt_state = "
    with refuses(error, text, step):
        tx.update(updates, tx.init(PARAMS), PARAMS)


MISFITS = {
    "one too few": ({"w": GRADS["w"]}, ["  ['b']: no gradient, the parameter is float32[2]\n"]),
    "none at all": ({}, ["['b']: no gradient", "['w']: no gradient"]),
    "one too many": (GRADS | {"c": jnp.ones(3)}, ["  ['c']: gradient float32[3], no such parameter\n"]),
    "another name": (
        {"w": GRADS["w"], "bias": GRADS["b"]},
        ["['b']: no gradient", "['bias']: gradient float32[2], no such parameter"],
    ),
    "other shapes": (
        jax.tree.map(lambda g: g[1:], GRADS),
        [
            "  ['b']: gradient float32[1], the parameter is float32[2]\n",
            "  ['w']: gradient float32[3, 2], the parameter is float32[4, 2]\n",
        ],
    ),
    "what would be broadcast": (GRADS | {"w": jnp.ones(2)}, ["['w']: gradient float32[2], the parameter is"]),
    "another nesting": ({"params": GRADS}, ["['w']: no gradient", "['params']['w']: gradient"]),
    "a number for a tree": ({"w": {"kernel": 1.0}, "b": GRADS["b"]}, ["['w']: no gradient", "['w']['kernel']: grad"]),
}


@each_wrapper
@each_optimizer
@pytest.mark.parametrize(("grads", "texts"), MISFITS.values(), ids=MISFITS)
def test_gradients_of_something_else(wrap, inner, grads, texts):
    tx = wrap(inner)
    with refuses(ValueError, "The gradients do not fit the parameters:\n", *texts):
        tx.update(grads, tx.init(PARAMS), PARAMS)


def test_gradients_of_something_else_in_jit():
    with refuses(ValueError, "['w']: gradient float32[2, 4], the parameter is float32[4, 2]"):
        jax.jit(ADAM.update)(GRADS | {"w": jnp.ones((2, 4))}, STATE, PARAMS)


@each_optimizer
def test_gradients_of_each_example(inner):
    tx = WRAPPERS["mixed_precision"](inner)
    with refuses(ValueError, "['b']: gradient float32[5, 2], the parameter is float32[2]", "Take their mean"):
        tx.update(jax.tree.map(lambda g: jnp.stack([g] * 5), GRADS), tx.init(PARAMS), PARAMS)


def test_gradients_of_each_example_where_the_optimizer_takes_them():
    private = optax.contrib.differentially_private_aggregate(1.0, 0.0, key=KEY)
    each = jax.tree.map(lambda g: jnp.stack([g, 3 * g]), GRADS)
    for tx in (jamp.loss_scaled(jamp.StaticLossScale(8.0), private), jamp.loss_scaled(jamp.StaticLossScale(8.0))):
        tx.update(each, tx.init(PARAMS), PARAMS)


def test_many_misfits_are_cut():
    params = {f"w{i}": jnp.ones(2) for i in range(50)}
    with refuses(ValueError, "  and 30 more\n"):
        SGD.update(jax.tree.map(lambda p: p[0], params), SGD.init(params), params)


@each_wrapper
def test_arguments_in_another_order(wrap):
    tx = wrap(optax.adam(0.1))
    state = tx.init(PARAMS)
    line = "    updates, opt_state = tx.update(grads, opt_state, params)"
    for args, text in (
        ((GRADS,), "got no state"),
        ((GRADS, None, PARAMS), "got no state"),
        ((GRADS, PARAMS, state), "came third"),
        ((state, GRADS, PARAMS), "came first"),
        ((PARAMS, GRADS, state), "came third"),
    ):
        with refuses(TypeError, text, line):
            tx.update(*args)


@each_wrapper
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("other", [optax.sgd(0.1), optax.adamw(0.1), optax.sgd(0.1, momentum=0.9)])
def test_the_state_of_another_optimizer(wrap, other, jit):
    tx = wrap(optax.adam(0.1))
    with refuses(TypeError, "The state is not one of this optimizer", "inner_state", "`opt_state = tx.init(params)`"):
        (jax.jit(tx.update) if jit else tx.update)(GRADS, wrap(other).init(PARAMS), PARAMS)


@each_wrapper
def test_the_state_for_other_parameters(wrap):
    tx = wrap(optax.adam(0.1))
    state = tx.init(PARAMS | {"w": jnp.ones((7, 2))})
    with refuses(TypeError, "['w']: float32[7, 2], expected float32[4, 2]"):
        tx.update(GRADS, state, PARAMS)


def test_nested_wrappers_say_it_once():
    tx = jamp.mixed_precision(optax.adam(0.1), "O3:bfloat16")
    state = jamp.mixed_precision(optax.sgd(0.1), "O3:bfloat16").init(HALF)
    with refuses(TypeError, "inner_state[0].mu['w']: nothing, expected float32[4, 2]") as told:
        tx.update(GRADS, state, HALF)
    assert not isinstance(told.value.__cause__, TypeError)


@each_wrapper
def test_the_state_of_plain_optax_or_of_a_chain(wrap):
    tx = wrap(optax.adam(0.1))
    with refuses(TypeError, "got tuple", "jamp.from_optax"):
        tx.update(GRADS, optax.adam(0.1).init(PARAMS), PARAMS)
    with refuses(TypeError, "with one at [1]", "an optimizer around this one"):
        tx.update(GRADS, optax.chain(optax.identity(), tx).init(PARAMS), PARAMS)


def test_missing_parameters():
    for inner in (optax.adamw(0.1), optax.lion(0.1, weight_decay=0.1), optax.add_decayed_weights(0.1)):
        tx = WRAPPERS["mixed_precision"](inner)
        with pytest.raises(ValueError, match="not passing `params`") as told:
            tx.update(GRADS, tx.init(PARAMS))
        assert "tx.update(grads, opt_state, params)" in "".join(told.value.__notes__)
    ADAM.update(GRADS, STATE)  # Which needs none.


def test_other_containers_are_named():
    tx = WRAPPERS["loss_scaled"](optax.adam(0.1))
    with pytest.raises(ValueError) as told:
        tx.update(FrozenDict(GRADS), tx.init(PARAMS), PARAMS)
    assert "gradients: PyTreeDef(CustomNode(FrozenDict" in "".join(told.value.__notes__)
    SGD.update(FrozenDict(GRADS), SGD.init(PARAMS), PARAMS)  # Taken, as by optax.


# ---------------------------------------------------------------- what fits


@each_optimizer
def test_parts_that_have_no_gradients(inner):
    tx = WRAPPERS["mixed_precision"](inner)
    model = eqx.nn.MLP(2, 2, 2, 1, key=KEY)
    loss = lambda model, x: jax.vmap(model)(x).sum()  # noqa: E731
    arrays = eqx.filter(model, eqx.is_inexact_array)
    state = tx.init(arrays)
    grads = eqx.filter_grad(loss)(model, jnp.ones((3, 2)))
    for params in (arrays, model, None):  # The whole model, as Equinox's documentation once had it.
        tx.update(grads, state, params)
    weights, _ = eqx.partition(model, lambda x: eqx.is_array(x) and x.ndim == 2)
    few = jax.tree.map(lambda p, g: g, weights, eqx.filter(grads, lambda x: eqx.is_array(x) and x.ndim == 2))
    tx.update(few, tx.init(weights), model)
    with refuses(ValueError, ".layers[0].bias: gradient float32[2], no such parameter"):
        tx.update(grads, tx.init(weights), weights)


@each_optimizer
def test_integers_have_gradients_without_a_value(inner):
    params = {"w": jnp.ones(3), "n": jnp.arange(2), "flag": jnp.array(True), "k": 3}
    tx = WRAPPERS["loss_scaled"](optax.masked(inner, {"w": True, "n": False, "flag": False, "k": False}))
    grads = jax.grad(lambda p: p["w"].sum(), allow_int=True)(params)
    tx.update(grads, tx.init(params), params)
    tx.update(grads | {"n": params["n"]}, tx.init(params), params)


@each_optimizer
def test_masks_and_groups(inner):
    for tx in (
        WRAPPERS["loss_scaled"](optax.masked(inner, {"w": True, "b": False})),
        optax.masked(WRAPPERS["loss_scaled"](inner), {"w": True, "b": False}),
        optax.partition({"a": WRAPPERS["loss_scaled"](inner), "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}),
        WRAPPERS["loss_scaled"](optax.partition({"a": inner, "b": optax.set_to_zero()}, {"w": "a", "b": "b"})),
    ):
        tx.update(GRADS, tx.init(PARAMS), PARAMS)
    masked = {"w": GRADS["w"], "b": optax.MaskedNode()}
    tx = WRAPPERS["loss_scaled"](optax.sgd(0.1))
    tx.update(masked, tx.init(masked), PARAMS)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


@each_optimizer
def test_modules_of_nnx(inner):
    model = Net(nnx.Rngs(0))
    tx = WRAPPERS["mixed_precision"](inner)
    params = nnx.state(model, nnx.Param)
    state = tx.init(params)
    grads = nnx.grad(lambda model: model(jnp.ones((4, 2))).sum())(model)
    for given in (params, model, None):
        tx.update(grads, state, given)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, grads)


def test_states_are_mapped_over():
    doubled = optax.tree_map_params(SGD, lambda x: 2 * x, SGD.init(PARAMS))
    assert jax.tree.structure(doubled) == jax.tree.structure(SGD.init(PARAMS))


def test_an_error_of_the_optimizer_stays_its_own():
    def fails(updates, state, params=None):
        raise ValueError("its own")

    tx = jamp.loss_scaled(jamp.NoOpLossScale(), optax.GradientTransformation(optax.init_empty_state, fails))
    with pytest.raises(ValueError, match=r"^its own(\n|$)"):
        tx.update(GRADS, tx.init(PARAMS), PARAMS)


def test_one_program_for_all_steps():
    step = jax.jit(functools.partial(ADAM.update))
    state = STATE
    for _ in range(3):
        _, state = step(GRADS, state, PARAMS)
    assert step._cache_size() == 1
