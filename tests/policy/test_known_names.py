import jax
import jax.numpy as jnp
import optax
import pytest

from jamp._compat import called_name
from jamp._compat import function_names as names_on_the_stack
from jamp._policy.known_names import _OPTAX_LOSSES, _OTHER_NAMES, INLINED, function_names, in_jaxprs, primitives
from tests.helpers import run_python

# In a process of its own, because other tests import kernel languages and sparse arrays, with primitives of their own.
_LIST_PRIMITIVES = """
import gc, jax, jax.nn, jax.numpy, jax.scipy
from jax.extend.core import Primitive
print(*{p.name for p in gc.get_objects() if isinstance(p, Primitive)})
"""


def test_every_primitive_of_this_jax_is_known():
    registered = set(run_python(_LIST_PRIMITIVES).split())
    assert "dot_general" in registered
    assert registered - primitives() == set()


def test_optax_losses_exist():
    assert [name for name in sorted(_OPTAX_LOSSES) if not callable(getattr(optax.losses, name, None))] == []


def test_function_names_are_functions():
    assert {"softmax", "matmul", "norm", "logsumexp", "resize"} <= function_names()
    assert not {"float32", "ndarray", "_softmax"} & function_names()


def equations(name):
    """Those of a function of this name, of one or two arrays, and the names that jaxprs and tracebacks have for it."""
    function = getattr(jax.nn, name, None) or getattr(jnp, name)
    x = jnp.full((2, 2), 0.5)

    def program(x):
        if name == "swapaxes":
            return function(x, 0, 1)
        try:
            return function(x, x)
        except (TypeError, ValueError):
            return function(x)

    eqns = jax.make_jaxpr(program)(x).jaxpr.eqns
    return eqns, {found for eqn in eqns for found in (called_name(eqn), *names_on_the_stack(eqn))}


@pytest.mark.parametrize("name", sorted(INLINED | set(_OTHER_NAMES) - {"pjit"}))
def test_inlined_functions_leave_no_name(name):
    eqns, names = equations(name)
    assert name not in names
    if name not in INLINED:
        made = in_jaxprs(name)
        assert [eqn.primitive.name for eqn in eqns] == [made] if made in primitives() else made in names


@pytest.mark.parametrize("name", ["softmax", "einsum", "tensordot", "norm", "logsumexp", "relu", "cross", "logaddexp"])
def test_other_functions_leave_theirs(name):
    assert name not in INLINED | set(_OTHER_NAMES)
