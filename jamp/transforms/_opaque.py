"""Results that are no pytrees: JAX does not see the arrays in them, which would be traced values after the call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from types import FunctionType, GeneratorType, MethodType, ModuleType

from jax.core import Tracer

from jamp._compat import ClosedJaxpr, jit_tracer, open_jaxpr, traced_variable

# Functions are returned as they are, as others may hold what belongs to a trace around this one. The rest holds none.
_PASSED = (FunctionType, MethodType, ModuleType, type, str, bytes)


def refuse_opaque(results: Iterable[object], jaxpr: ClosedJaxpr) -> None:
    """Refuses results that are no arrays and hold values of the trace.

    Args:
        results: The leaves of a function's result that are no arrays.
        jaxpr: The function, as it was traced.
    """
    for result in results:
        tracers = [x for x in _held(result) if isinstance(x, Tracer)]
        if tracers and _own(tracers, jaxpr):
            raise TypeError(_message(result))


def _own(tracers: list[Tracer], jaxpr: ClosedJaxpr) -> bool:
    """Whether some of them are values of the trace; those of a trace around it live on."""
    inner = open_jaxpr(jaxpr)
    own = {*inner.invars, *inner.constvars, *(var for eqn in inner.eqns for var in eqn.outvars)}
    return any(traced_variable(jit_tracer(x)) in own for x in tracers)


def _held(value: object) -> Iterator[object]:
    """What an object holds in its attributes, containers and the frames of generators; the object is the first."""
    seen: set[int] = set()
    remaining = [value]
    while remaining:
        value = remaining.pop()
        if id(value) in seen or isinstance(value, _PASSED):
            continue
        seen.add(id(value))
        yield value
        if not isinstance(value, Tracer):
            remaining += _parts(value)


def _parts(value: object) -> list[object]:
    if isinstance(value, dict):
        return [*value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return [*value]
    if isinstance(value, GeneratorType):
        return [] if value.gi_frame is None else [*value.gi_frame.f_locals.values()]
    # Those with slots have no dictionary.
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, field.name, None) for field in fields)]


def _message(result: object) -> str:
    name = type(result).__qualname__.rpartition(".")[2]
    write = "Return its arrays in a tuple or a dictionary, or register it: jax.tree_util.register_pytree_node."
    if isinstance(result, GeneratorType):
        write = "Return a list of what it yields."
    elif dataclasses.is_dataclass(result):
        write = f"Register it where it is defined:\n    jax.tree_util.register_dataclass({name})"
    return (
        f"The function that `jamp.cast_fn` casts returns a {name} with arrays in it, which is no pytree: they would be "
        f"traced values after the call, as in `jax.jit`. {write}"
    )
