import optax

from jamp._policy.known_names import _OPTAX_LOSSES, function_names, primitives
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
