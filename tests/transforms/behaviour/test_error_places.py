"""Errors of JAX while a model is traced name the model's line, and not jamp's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jamp


def model(params, x):
    return x * float(params["w"].sum())


class Model:
    def __call__(self, params, x):
        return model(params, x)

    def method(self, params, x):
        return model(params, x)


@jamp.cast_fn(policy="O1")
def decorated(params, x):
    return model(params, x)


MODELS = [model, functools.partial(model), lambda p, x: model(p, x), Model(), Model().method, jax.jit(model)]


@pytest.mark.parametrize("fn", [*map(jamp.cast_fn, MODELS), decorated])
def test_float_of_a_traced_value_names_the_model(fn):
    with pytest.raises(jax.errors.ConcretizationTypeError) as error:
        fn({"w": jnp.ones(3)}, jnp.ones(3))
    assert "test_error_places.py" in str(error.value) and "/jamp/" not in str(error.value).replace("/jamp/tests", "")


def chooses(params, x, *more, scale=1.0, **settings):
    (array,) = [leaf for leaf in jax.tree.leaves((params, more, scale, settings)) if leaf.size == 2]
    return x if array.sum() > 0 else -x


TWO, ONE = jnp.ones(2), jnp.ones(1)
NAMES = {
    "params['w'][0]": (({"w": [TWO]}, ONE), {"scale": ONE}),
    "more[1]": ((ONE, ONE, ONE, TWO), {"scale": ONE}),
    "scale": ((ONE, ONE), {"scale": TWO}),
    "mask": ((ONE,), {"x": ONE, "scale": ONE, "mask": TWO}),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_arguments_have_the_names_of_the_function(name, jit):
    args, kwargs = NAMES[name]
    fn = jamp.cast_fn(chooses, "O2:bfloat16")
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        (jax.jit(fn) if jit else fn)(*args, **kwargs)
    assert f"the value of the argument {name}." in str(error.value)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x * float(x[0]),
        np.asarray,
        lambda x: x[x > 0],
        lambda x: [1][x[0].astype(int)],
    ],
)
def test_the_error_says_that_functions_are_traced(fn):
    fn = jamp.cast_fn(jamp.cast_fn(fn, "O2:bfloat16"), "O1:bfloat16")
    with pytest.raises((TypeError, IndexError)) as error:
        fn(jnp.ones(3))
    (note,) = [note for note in error.value.__notes__ if "jamp" in note]
    assert "as `jax.jit` does" in note and "jax.lax.cond" in note


def test_errors_of_the_function_itself_have_no_note():
    with pytest.raises(TypeError) as error:
        jamp.cast_fn(lambda x: x + "1", "O2:bfloat16")(jnp.ones(3))
    assert not any("jamp" in note for note in getattr(error.value, "__notes__", ()))


def test_the_function_of_a_module_is_named():
    layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    with pytest.raises(jax.errors.ConcretizationTypeError, match=r"function <lambda> at .*test_error_places\.py"):
        jamp.cast_fn(lambda layer, x: float(layer(x).sum()), "O2:bfloat16")(layer, jnp.ones(3))
