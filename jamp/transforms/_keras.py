"""Keras models that are cast whole: what they update while they run would be lost, and is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jax.core import Tracer

_MESSAGE = (
    "This Keras model updates variables while it runs ({names}), and a traced call cannot: they would hold traced "
    "values afterwards. Cast the pure function of the model, which takes variables and returns them:\n"
    "    apply_fn = jamp.cast_fn(model.stateless_call, policy)\n"
    "    outputs, non_trainable = apply_fn(trainable, non_trainable, x, training=True)\n"
    "For `fit`, `evaluate` and `predict` write `model.stateless_call = jamp.cast_fn(model.stateless_call, policy)` "
    "before `model.compile`."
)

_WHOLE = (
    "`jamp.{name}` takes a function of arrays, and `{method}` of a Keras model is a whole program. Cast what it runs, "
    "and call it as it is:\n"
    "    model.stateless_call = jamp.{name}(model.stateless_call, policy)\n"
    "    model.compile(…)\n"
    "    model.{method}(…)"
)
_PROGRAMS = ("compile", "fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


def refuse_programs(name: str, fn: Any) -> None:
    """Refuses the methods of a Keras model that train or evaluate it."""
    model = getattr(sys.modules.get("keras"), "Model", None)
    method = getattr(fn, "__name__", "")
    if model is not None and isinstance(getattr(fn, "__self__", None), model) and method in _PROGRAMS:
        raise TypeError(_WHOLE.format(name=name, method=method))


@contextmanager
def refuse_updates(fn: Any) -> Iterator[None]:
    """Raises, with the variables as they were, if a Keras model leaves traced values in them.

    Args:
        fn: The function that runs inside: a model, a method of one, or a function that refers to one.
    """
    # Looked up, not imported: a program that has not imported Keras has no models of it.
    layer = getattr(sys.modules.get("keras"), "Layer", None)
    models = [] if layer is None else [value for value in _references(fn) if isinstance(value, layer)]
    before = [(variable, _held(variable)) for model in models for variable in model.variables]
    names = []
    try:
        yield
    finally:
        for variable, old in before:
            if isinstance(_held(variable), Tracer) and _held(variable) is not old:
                variable.assign(old)
                names.append(variable.path)
    if names:
        raise TypeError(_MESSAGE.format(names=", ".join(names[:3]) + (", …" if len(names) > 3 else "")))


def _references(fn: Any) -> list[Any]:
    """What a function is, is bound to, closes over, or finds among the globals of its module."""
    function = getattr(fn, "__func__", fn)
    code = getattr(function, "__code__", None)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if not _is_empty(cell)]
    names = code.co_names if code is not None else ()
    found = [getattr(function, "__globals__", {}).get(name) for name in names]
    return [fn, getattr(fn, "__self__", None), *cells, *found]


def _held(variable: Any) -> Any:
    """What a variable holds; None in `fit`, where Keras takes the arrays out of the model, and `value` would fail.

    While `stateless_call` runs, as in the steps of `fit`, a scope of Keras holds it for the variable.
    """
    scopes = sys.modules.get("keras.src.backend.common.stateless_scope")
    scope = None if scopes is None else scopes.get_stateless_scope()
    value = None if scope is None else scope.get_current_value(variable)
    return getattr(variable, "_value", None) if value is None else value


def _is_empty(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return True
    return False
