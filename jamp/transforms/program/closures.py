"""What functions close over and read: values of the program, and what else they do, as data.

JAX runs a rule when the function is differentiated, transposed or mapped, which is when the program is emitted. What
the rule then reads of the program is a tracer of a trace that is over, and stands for a variable whose value emission
knows.

JAX remembers what it traced of a jitted function by the function, an object, which may read nothing that changes. A
rule of differentiation is run again where the program around it is traced again: nobody had to promise as much of it.
So what a function reads is told as data, without arrays, and two that are equal do the same.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Hashable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import jax
import numpy as np

from jamp._compat import ClosedJaxpr, Eqn, Var, closed_over, inner_jaxprs, is_jitted, open_jaxpr
from jamp._primitives import Trait, has

HAS_RULES = Trait.CUSTOM_JVP | Trait.CUSTOM_VJP | Trait.CUSTOM_BATCHING | Trait.CUSTOM_TRANSPOSE


def captured(jaxpr: ClosedJaxpr) -> tuple[Var, ...]:
    """Variables of a jaxpr, its own and not those of jaxprs inside, whose values some rule closes over."""
    inner = open_jaxpr(jaxpr)
    own = {*inner.invars, *inner.constvars, *(var for eqn in inner.eqns for var in eqn.outvars)}
    return tuple(dict.fromkeys(var for var in closed_over([*with_rules(jaxpr)]) if var in own))


def with_rules(jaxpr: ClosedJaxpr) -> Iterator[Eqn]:
    """The equations with rules of their own, also of jaxprs inside."""
    for eqn in open_jaxpr(jaxpr).eqns:
        if has(eqn, HAS_RULES):
            yield eqn
        for inside in inner_jaxprs(eqn):
            yield from with_rules(inside)


# What stands in their modules stays as it is, and in those of Python's own.
_SETTLED = frozenset({"jax", "jaxlib", "numpy"})
_OF_PYTHON = sysconfig.get_paths()["stdlib"]
_PLAIN = (str, bytes, bool, int, type(None), np.dtype)
# Attributes of functions with a rule of their own, which have all attributes of the function besides.
_RULES = {
    jax.custom_jvp: ("fun", "jvp", "nondiff_argnums", "symbolic_zeros"),
    jax.custom_vjp: ("fun", "fwd", "bwd", "nondiff_argnums", "nondiff_argnames", "symbolic_zeros", "optimize_remat"),
}
_LARGEST = 64  # Elements of a constant that is compared by its numbers.


class UnsignedError(Exception):
    """There is something that has no signature."""


def of_numbers(value: np.ndarray | np.generic) -> Hashable:
    """The signature of a small array of NumPy's."""
    if value.size > _LARGEST or value.dtype.hasobject:
        raise UnsignedError
    return value.dtype, value.shape, value.tobytes()


class _Itself:
    """What may change where it is held: equal to itself alone."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __hash__(self) -> int:
        return id(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self._value is other._value


class Reader:
    """Reads one function: itself, and all that it has at hand when it is called."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def value(self, value: object) -> Hashable:
        """The signature of what a function reads.

        Raises:
            UnsignedError: It holds more than data and functions: an array, a tracer, an object of the user's.
        """
        if isinstance(value, float | complex):
            return type(value), repr(value)
        if isinstance(value, np.generic):
            return of_numbers(value)
        if isinstance(value, np.ndarray):
            return of_numbers(value), _Itself(value)
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, jax.tree_util.PyTreeDef):
            return self._structure(value)
        if isinstance(value, ModuleType):
            return self._settled(value, value.__name__)
        if isinstance(value, type | BuiltinFunctionType | np.ufunc):
            return self._settled(value, getattr(value, "__module__", None) or "builtins")
        if id(value) in self._seen:
            return "seen", self._seen[id(value)]
        self._seen[id(value)] = len(self._seen)
        return self._compound(value)

    def _compound(self, value: object) -> Hashable:
        kind = type(value)
        if kind is list:
            return kind, _Itself(value), *map(self.value, value)  # pyright: ignore[reportArgumentType]
        if kind is tuple:
            return kind, *map(self.value, value)  # pyright: ignore[reportArgumentType]
        if kind in (set, frozenset) and all(isinstance(item, str) for item in value):  # pyright: ignore[reportGeneralTypeIssues]
            return kind, frozenset(value)  # pyright: ignore[reportArgumentType]
        if kind is dict:
            return kind, *((self.value(name), self.value(item)) for name, item in value.items())  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, functools.partial):
            return kind, self.value(value.func), self.value(value.args), self.value(value.keywords)
        if is_jitted(value):
            return value, self.value(value.__wrapped__)
        if kind in _RULES:
            return kind, *(self.value(getattr(value, name, None)) for name in _RULES[kind])
        if kind.__module__.startswith("jax.") and callable(value) and hasattr(value, "__dict__"):
            return kind, self.value(vars(value))  # A policy of `jax.checkpoint`.
        raise UnsignedError

    def _function(self, function: FunctionType) -> Hashable:
        """A function that is made anew has cells of its own, which the one that was there may see change."""
        cells = tuple(self.value(cell) for cell in _contents(function))
        given = self.value(function.__defaults__), self.value(function.__kwdefaults__)
        if _is_settled(function.__globals__.get("__name__")):
            return function.__code__, cells, given
        names = sorted({*_names(function.__code__)} & function.__globals__.keys())
        return function, cells, given, *((name, self.value(function.__globals__[name])) for name in names)

    def _structure(self, tree: Any) -> Hashable:
        """The nodes of a structure. What they hold besides children may be arrays, which JAX cannot compare."""
        node = tree.node_data()
        return node and (node[0], self._metadata(node[1]), *map(self._structure, tree.children()))

    def _metadata(self, value: object) -> Hashable:
        """What a node holds besides children: JAX wants it to be comparable, and to stay as it is."""
        if isinstance(value, tuple | list):
            return type(value), *map(self._metadata, value)
        try:
            return self.value(value)
        except UnsignedError:
            try:
                hash(value)
            except TypeError as error:
                raise UnsignedError from error
            return type(value), value

    def _settled(self, value: Hashable, module: str) -> Hashable:
        if not _is_settled(module):
            raise UnsignedError
        return value


def _is_settled(module: str | None) -> bool:
    name = (module or "").partition(".")[0]
    return name in _SETTLED or (name in sys.stdlib_module_names and name != "__main__" and _is_of_python(name))


def _is_of_python(name: str) -> bool:
    """Whether a module is Python's, and no package of the user's that has its name, such as `code`."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None:
        return not hasattr(module, "__path__")
    return file.startswith(_OF_PYTHON) and "-packages" not in file[len(_OF_PYTHON) :]


def _contents(function: FunctionType) -> Iterator[object]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError as error:  # It is not set yet.
            raise UnsignedError from error


def _names(code: CodeType) -> Iterator[str]:
    """Names of what code looks up, in functions inside of it as well: globals, and attributes, which cannot be told."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)
