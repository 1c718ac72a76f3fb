"""What a program computes from numbers that it writes: of each value the smallest and the largest element.

A few elements are computed one by one, so that factorials and powers are what they are. Of more, arithmetic is looked
at where its operands begin and end, and at zero: all else lies between what it makes of these. What has no result
there, such as a quotient by something that may be zero, is not known, nor is what other primitives make.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jamp._compat import (
    Atom,
    ClosedJaxpr,
    Eqn,
    Literal,
    Var,
    called_jaxpr,
    inner_jaxprs,
    jaxpr_consts,
    nominal_size,
    open_jaxpr,
)  # fmt: skip
from jamp._dtypes import Pair
from jamp._primitives import FUNCTIONS, MOVED, Trait, has
from jamp.transforms.analysis.reading.arithmetic import computed, is_arithmetic
from jamp.transforms.program.scale import Range, enclosing, exponent, is_few

Ranges = Sequence[Range | None]
Params = Mapping[str, Any]

_MOST = 1024  # Elements of a constant that is looked at.


def of_literal(value: object) -> Range | None:
    """The range of what the program writes; None for what is no number."""
    if isinstance(value, Tracer) or not isinstance(value, int | float | np.ndarray | np.generic | jax.Array):
        return None
    if np.size(value) > _MOST or not getattr(value, "is_fully_addressable", True):
        return None
    is_real = isinstance(value, float) or type(value) is int or _is_real(value)
    return Range.of_array(np.asarray(value)) if is_real else None


def of_results(eqn: Eqn, operands: Ranges, wide: np.dtype) -> Ranges:
    """The ranges of what an equation makes of operands in some ranges, in a program in a wide dtype."""
    if has(eqn, Trait.CALLS) and None not in operands:
        return _of_jaxpr(called_jaxpr(eqn.params), operands, wide)
    if len(eqn.outvars) != 1 or not _is_real(eqn.outvars[0].aval):
        return (None,) * len(eqn.outvars)
    found = _one_by_one(eqn, operands) or _of_result(eqn, operands)
    return (found and found.within(wide),)


def matter(jaxpr: ClosedJaxpr, operands: Ranges, pair: Pair) -> bool:
    """Whether a jaxpr returns, or half does not hold, floating values that it computes from the numbers it is given.

    Else it has the same plan whatever they are, as a layer has that is called with another rate each time.
    """
    made = _made_within(jaxpr, operands, frozenset(i for i, each in enumerate(operands) if each), pair)
    outs = open_jaxpr(jaxpr).outvars
    return made is None or any(depends and pair.flows(var.aval) for var, (_, depends) in zip(outs, made, strict=True))


def _made_within(
    jaxpr: ClosedJaxpr, operands: Ranges, given: frozenset[int], pair: Pair
) -> list[tuple[Range | None, bool]] | None:
    """What a jaxpr returns, and whether that depends on those of its operands that are given.

    None where half does not hold something that does, or a loop reads it.
    """
    inner = open_jaxpr(jaxpr)
    places = zip((*inner.invars, *inner.constvars), (*operands, *map(of_literal, jaxpr_consts(jaxpr))), strict=True)
    env = {var: (each, index in given) for index, (var, each) in enumerate(places) if each}

    def read(atom: Atom) -> tuple[Range | None, bool]:
        return (of_literal(atom.val), False) if isinstance(atom, Literal) else env.get(atom, (None, False))

    for eqn in inner.eqns:
        if not all(isinstance(atom, Literal) for atom in eqn.invars) and not any(map(_is_in(env), eqn.invars)):
            continue
        ranges, depends = zip(*map(read, eqn.invars), strict=True) if eqn.invars else ((), ())
        if has(eqn, FUNCTIONS):
            which = frozenset(i for i, each in enumerate(depends) if each)
            made = _made_within(called_jaxpr(eqn.params), ranges, which, pair)
        elif inner_jaxprs(eqn):
            made = None if any(depends) else []
        else:
            made = [(each, any(depends)) for each in of_results(eqn, ranges, pair.wide)]
        if made is None:
            return None
        for var, (each, depends) in zip(eqn.outvars, made, strict=False):
            if each and depends and pair.flows(var.aval) and exponent(each.largest, pair):
                return None
            if each:
                env[var] = (each, depends)
    return [read(atom) for atom in inner.outvars]


def _is_in(env: Mapping[Var, object]) -> Callable[[Atom], bool]:
    return lambda atom: not isinstance(atom, Literal) and atom in env


def _is_real(value: object) -> bool:
    dtype = getattr(value, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "iuf"


def _of_jaxpr(jaxpr: ClosedJaxpr, operands: Ranges, wide: np.dtype) -> Ranges:
    inner = open_jaxpr(jaxpr)
    env: dict[Var, Range | None] = dict(zip(inner.invars, operands, strict=True))
    env.update(zip(inner.constvars, map(of_literal, jaxpr_consts(jaxpr)), strict=True))

    def read(atom: Atom) -> Range | None:
        return of_literal(atom.val) if isinstance(atom, Literal) else env.get(atom)

    for eqn in inner.eqns:
        env.update(zip(eqn.outvars, of_results(eqn, [read(atom) for atom in eqn.invars], wide), strict=True))
    return [read(atom) for atom in inner.outvars]


def _one_by_one(eqn: Eqn, operands: Ranges) -> Range | None:
    """What an equation makes of a few numbers, computed one by one; None where that is not known."""
    if not operands or not all(each and (each.elements or each.low == each.high) for each in operands):
        return None
    arrays = [each and each.array(atom.aval.shape) for each, atom in zip(operands, eqn.invars, strict=True)]
    few = [array for array in arrays if array is not None]
    shape, of_arrays = eqn.outvars[0].aval.shape, _OF_ARRAYS.get(eqn.primitive.name)
    if len(few) < len(arrays) or not is_few(shape):
        return None
    if of_arrays is not None:
        with np.errstate(all="ignore"):
            return Range.of_array(of_arrays(eqn.params, *few))
    if has(eqn, Trait.CONVERTS) or (has(eqn, Trait.VIEW) and not has(eqn, Trait.TURNS | Trait.GROWS)):
        return Range.of_array(few[0].reshape(shape))
    if not is_arithmetic(eqn):
        return None
    found = _computed(eqn, zip(*(np.broadcast_to(array, shape).ravel().tolist() for array in few), strict=True))
    return Range.of_array(np.reshape(found, shape)) if found else None


def _of_result(eqn: Eqn, operands: Ranges) -> Range | None:
    make = _STRUCTURE.get(eqn.primitive.name)
    if make is not None:
        return make(eqn, operands)
    if not operands or operands[0] is None:
        return None
    if has(eqn, MOVED | Trait.TAKES_EXTREMUM):
        return operands[0]._replace(elements=())
    known = [each for each in operands if each is not None]
    return _arithmetic(eqn, known) if len(known) == len(operands) else None


def _arithmetic(eqn: Eqn, operands: Sequence[Range]) -> Range | None:
    if eqn.primitive.name in _TURNING and any(each.low != each.high for each in operands):
        return _TURNING[eqn.primitive.name]
    points = ({each.low, each.high, *([0.0] if each.low < 0 < each.high else [])} for each in operands)
    return Range.of(found) if (found := _computed(eqn, itertools.product(*points))) else None


def _computed(eqn: Eqn, rows: Iterable[Sequence[float]]) -> list[float] | None:
    """What arithmetic makes of several rows of operands; None where it has no result for one of them."""
    found = []
    for row in rows:
        number = computed(eqn, row)
        if number is None:
            return None
        found.append(number)
    return found


def _counts(eqn: Eqn) -> Iterable[int]:
    """How many elements a reduction makes one of: at least and at most."""
    shape, params = eqn.invars[0].aval.shape, eqn.params
    if "axis" in params:  # A running one.
        return (1, nominal_size(shape[params["axis"]]))
    return (math.prod(nominal_size(shape[axis]) for axis in params["axes"]),)


def _summed(eqn: Eqn, operands: Ranges) -> Range | None:
    return operands[0] and operands[0].times(_counts(eqn))


def _multiplied(eqn: Eqn, operands: Ranges) -> Range | None:
    return operands[0] and operands[0].power(_counts(eqn))


def _product(eqn: Eqn, operands: Ranges) -> Range | None:
    """Of a product of matrices: a sum of as many products as there are elements to contract."""
    if None in operands:
        return None
    ((axes, _), _), shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    ends = itertools.product(*((each.low, each.high) for each in operands if each))
    terms = Range.of([a * b for a, b in ends])
    return terms and terms.times((math.prod(nominal_size(shape[axis]) for axis in axes),))


def _counted(eqn: Eqn, _: Ranges) -> Range | None:
    shape, axis = eqn.params["shape"], eqn.params["dimension"]
    if is_few(shape):
        return Range.of_array(np.indices(shape)[axis])
    return Range(0.0, float(max(nominal_size(shape[axis]) - 1, 0)))


def _spread(params: Params, array: np.ndarray) -> np.ndarray:
    shape, axes = params["shape"], params["broadcast_dimensions"]
    before = [1] * len(shape)
    for axis, size in zip(axes, array.shape, strict=True):
        before[axis] = size
    return np.broadcast_to(array.reshape(before), shape)


def _cut(params: Params, array: np.ndarray) -> np.ndarray:
    strides = params["strides"] or (1,) * array.ndim
    return array[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _along(params: Params, array: np.ndarray, function: np.ufunc) -> np.ndarray:
    where = slice(None, None, -1 if params["reverse"] else 1)
    turned = np.moveaxis(array, params["axis"], 0)[where]
    return np.moveaxis(function.accumulate(turned)[where], 0, params["axis"])


# Functions that turn elsewhere than at zero, and where they stay.
_TURNING = {"sin": Range(-1.0, 1.0), "cos": Range(-1.0, 1.0), "tan": None, "lgamma": None}
# What is no arithmetic on single elements, by primitive: of a few of them, and of ranges.
_OF_ARRAYS: Mapping[str, Callable[..., np.ndarray]] = {
    "broadcast_in_dim": _spread,
    "slice": _cut,
    "rev": lambda params, array: np.flip(array, params["dimensions"]),
    "transpose": lambda params, array: np.transpose(array, params["permutation"]),
    "concatenate": lambda params, *arrays: np.concatenate(arrays, params["dimension"]),
    "reduce_sum": lambda params, array: np.sum(array, tuple(params["axes"])),
    "reduce_prod": lambda params, array: np.prod(array, tuple(params["axes"])),
    "reduce_max": lambda params, array: np.max(array, tuple(params["axes"])),
    "reduce_min": lambda params, array: np.min(array, tuple(params["axes"])),
    "cumsum": lambda params, array: _along(params, array, np.add),
    "cumprod": lambda params, array: _along(params, array, np.multiply),
}
_STRUCTURE: Mapping[str, Callable[[Eqn, Ranges], Range | None]] = {
    "iota": _counted,
    "select_n": lambda _, operands: enclosing(operands[1:]),
    **dict.fromkeys(("concatenate", "pad", "stack"), lambda _, operands: enclosing(operands)),
    "dynamic_update_slice": lambda _, operands: enclosing(operands[:2]),
    "scatter": lambda _, operands: enclosing(operands[::2]),
    **dict.fromkeys(("reduce_sum", "cumsum"), _summed),
    **dict.fromkeys(("reduce_prod", "cumprod"), _multiplied),
    "dot_general": _product,
}
