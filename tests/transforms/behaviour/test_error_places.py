"""Errors of JAX while a model is traced name the model's line, and not jamp's."""

import functools

import jax
import jax.numpy as jnp
import pytest

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
