"""What is known of matrices that a program writes or makes: constants that take differences, and diagonals.

Laplacians, derivatives and what centres data take differences of what they are multiplied with. Of a matrix with a
diagonal (an identity, a multiple of it, numbers put on a diagonal, one changed in place) all else may be small.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer

from jamp._compat import Atom, Eqn, Jaxpr, Literal, Var, called_jaxpr, inner_jaxprs, open_jaxpr
from jamp._dtypes import Pair
from jamp._primitives import Trait, has, holds
from jamp.transforms.analysis.reading.flat import written
from jamp.transforms.analysis.reading.freezing import is_a

_MOST = 2**20  # Elements that are looked at. Larger constants are weights as a rule.
_NEARLY = 1e-3  # What is left of a row, of the sum of its magnitudes: its numbers may be rounded to half.


def takes_differences(matrix: np.ndarray) -> bool:
    """Whether products with an array cancel: it is sparse and of both signs, or half its rows or columns sum to zero.

    Of a random matrix neither holds, and learned ones look random.

    Args:
        matrix: Numbers. Rows and columns are the last two axes.
    """
    if matrix.size < 2 or not matrix.min() < 0 < matrix.max():
        return False
    is_sparse = 2 * int(np.count_nonzero(matrix)) <= matrix.size
    return is_sparse or any(_cancels(matrix, axis) for axis in range(-min(matrix.ndim, 2), 0))


def _cancels(numbers: np.ndarray, axis: int) -> bool:
    left, all_of_it = np.abs(numbers.sum(axis)), np.abs(numbers).sum(axis)
    nonzero = int(np.count_nonzero(all_of_it))
    return 0 < nonzero <= 2 * int(np.count_nonzero((left <= _NEARLY * all_of_it) & (all_of_it > 0)))


def differences(jaxpr: Jaxpr, consts: Sequence[object], constants: Container[Atom], pair: Pair) -> frozenset[Atom]:
    """Variables of a jaxpr that take differences: by their values, or made of numbers by subtracting.

    Args:
        jaxpr: The jaxpr.
        consts: What it closes over.
        constants: Its variables that depend on no argument of the program.
        pair: The precisions of the policy.
    """
    found: set[Atom] = set()
    for var, value in zip(jaxpr.constvars, consts, strict=True):
        matrix = at_hand(value) if pair.flows(var.aval) else None
        if matrix is not None and takes_differences(matrix):
            found.add(var)
    for eqn in jaxpr.eqns:
        made = [var for var in eqn.outvars if var in constants and pair.flows(var.aval)]
        if made and (_subtracts(eqn, pair) or any(_is_negative(atom, found) for atom in eqn.invars)):
            found.update(made)
    return frozenset(found)


def at_hand(value: object) -> np.ndarray | None:
    """The numbers of a constant, if they are real and not too many: a random key has none."""
    if isinstance(value, Tracer) or not isinstance(value, np.ndarray | jax.Array):
        return None
    if not any(jnp.issubdtype(value.dtype, kind) for kind in (np.bool_, np.integer, np.floating)):
        return None
    if value.size > _MOST or not getattr(value, "is_fully_addressable", True):
        return None
    return np.asarray(value, np.promote_types(value.dtype, np.float32))


def _is_negative(atom: Atom, differences: Container[Atom]) -> bool:
    return bool(np.any(np.asarray(atom.val) < 0)) if isinstance(atom, Literal) else atom in differences


def _subtracts(eqn: Eqn, pair: Pair) -> bool:
    """Whether an equation subtracts floating values, or calls what does: not to make numbers of random bits."""
    called = [*_called(eqn)]
    subtracting = (each for each in called if has(each, Trait.SUBTRACTS | Trait.NEGATES))
    return any(pair.flows(each.outvars[0].aval) for each in subtracting) and not any(
        has(each, Trait.DRAWS) for each in called
    )


def _called(eqn: Eqn) -> Iterator[Eqn]:
    """An equation, or those that it calls."""
    if not has(eqn, Trait.CALLS):
        yield eqn
        return
    for jaxpr in inner_jaxprs(eqn):
        for inner in open_jaxpr(jaxpr).eqns:
            yield from _called(inner)


class _Is(enum.Enum):
    """What is known of a value. An axis, counted from the last, is that along which it counts."""

    DIAGONAL = enum.auto()  # Whether a row is that of the column.
    PLACES = enum.auto()  # The indices of the elements on a diagonal.
    ZERO = enum.auto()


_Known = _Is | int | None


def diagonals(jaxpr: Jaxpr, consts: Sequence[object]) -> frozenset[Var]:
    """Variables of a jaxpr, and of the calls that it tells where the diagonal is, whose diagonal is apart.

    They are zero everywhere else, or the diagonal of a matrix was changed in place, as by `a.at[i, i].add(1.0)`. So are
    constants near a multiple of the identity.

    Args:
        jaxpr: The jaxpr.
        consts: What it closes over.
    """
    closed_over = [*zip(jaxpr.constvars, consts, strict=True)]
    found = {var for var, value in closed_over if _has_diagonal(var, value)}
    if _tells_places(jaxpr):
        counters: dict[Atom, _Known] = {var: -1 for var, value in closed_over if _is_counter(var, value)}
        _look(jaxpr, counters, found)
    return frozenset(found)


def _tells_places(jaxpr: Jaxpr) -> bool:
    """Whether rows may be compared with columns in a jaxpr and its calls, or elements changed in place."""
    return holds(jaxpr.eqns, Trait.EQUALS | Trait.REPLACES, Trait.CALLS)


def _look(jaxpr: Jaxpr, given: Mapping[Atom, _Known], found: set[Var]) -> None:
    known = dict(given)
    for eqn in jaxpr.eqns:
        if not any(isinstance(var.aval, ShapedArray) for var in eqn.outvars[:1]):
            continue
        if not (known or has(eqn, Trait.COUNTS | Trait.GROWS | Trait.CALLS)):
            continue
        operands = [_of(atom, known) for atom in eqn.invars]
        if has(eqn, Trait.CALLS):
            inner = open_jaxpr(called_jaxpr(eqn.params))
            if any(operand is not None for operand in operands) or _tells_places(inner):
                _look(inner, dict(zip(inner.invars, operands, strict=False)), found)
        elif _makes_diagonal(eqn, operands) or _scales_one(eqn, found):
            found.update(eqn.outvars)
        elif (result := _result(eqn, operands)) is not None:
            known[eqn.outvars[0]] = result


def _of(atom: Atom, known: Mapping[Atom, _Known]) -> _Known:
    if isinstance(atom, Literal):
        return _Is.ZERO if written(atom) == 0 else None
    return known.get(atom)


def _makes_diagonal(eqn: Eqn, operands: Sequence[_Known]) -> bool:
    """Whether numbers are made of where the diagonal is, or selected there, and zero elsewhere; or changed in place."""
    if has(eqn, Trait.REPLACES) and len(operands) == 3 and operands[1] is _Is.PLACES:
        axes = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
        ndim = eqn.invars[0].aval.ndim
        # What is set, and not added, takes the place of what was there.
        return axes == (ndim - 2, ndim - 1) and (has(eqn, Trait.SCATTERS) or operands[0] is _Is.ZERO)
    if not operands or operands[0] is not _Is.DIAGONAL:
        return False
    if has(eqn, Trait.CONVERTS):
        return eqn.outvars[0].aval.dtype.kind != "b"
    return has(eqn, Trait.SELECTS) and operands[1] is _Is.ZERO


def _scales_one(eqn: Eqn, diagonals: Container[Atom]) -> bool:
    """Whether a diagonal matrix is scaled."""
    scaled = eqn.invars[:1] if has(eqn, Trait.DIVIDES) else eqn.invars if has(eqn, Trait.MULTIPLIES) else []
    return any(not isinstance(atom, Literal) and atom in diagonals for atom in scaled)


def _result(eqn: Eqn, operands: Sequence[_Known]) -> _Known:
    if not eqn.invars and has(eqn, Trait.COUNTS):
        return eqn.params["dimension"] - len(eqn.params["shape"]) if "dimension" in eqn.params else None
    if has(eqn, Trait.SELECTS) and len(operands) == 3:  # As an index is where it is not negative.
        return operands[1] if isinstance(operands[1], int) else None
    if not operands or operands[0] is None:
        return None
    shape = eqn.outvars[0].aval.shape
    if has(eqn, Trait.ASSEMBLES):  # The rows and the columns of a diagonal, side by side.
        return _Is.PLACES if operands == [-2, -2] and shape[-1] == 2 else None
    if has(eqn, Trait.EQUALS) and len(operands) == 2:
        is_square = len(shape) > 1 and shape[-1] == shape[-2] != 1
        return _Is.DIAGONAL if is_square and {*operands} == {-1, -2} else None
    if has(eqn, Trait.ADDS):
        return operands[0] if operands[1] is _Is.ZERO else None
    if has(eqn, Trait.CONVERTS):
        return operands[0]
    if not has(eqn, Trait.GROWS) or "broadcast_dimensions" not in eqn.params:
        return None
    if isinstance(operands[0], _Is):
        return operands[0] if operands[0] is _Is.ZERO or shape[-2:] == eqn.invars[0].aval.shape[-2:] else None
    return eqn.params["broadcast_dimensions"][operands[0]] - len(shape)


def _is_counter(var: Var, value: object) -> bool:
    if not is_a(np.integer, var) or var.aval.ndim != 1 or (numbers := at_hand(value)) is None:
        return False
    return np.array_equal(numbers, np.arange(numbers.size))


def _has_diagonal(var: Var, value: object) -> bool:
    shape = getattr(var.aval, "shape", ())
    if len(shape) < 2 or shape[-1] != shape[-2] or shape[-1] == 1 or (matrix := at_hand(value)) is None:
        return False
    diagonal = np.diagonal(matrix, axis1=-2, axis2=-1)
    with np.errstate(invalid="ignore", over="ignore"):  # A mask may have infinities, or next to it.
        beside = np.abs(matrix).sum(-1) - np.abs(diagonal)
    if not beside.any():
        return True
    # Near a multiple of the identity, as what moves the state of a filter on: learned numbers are not all the same.
    return bool(np.all(diagonal == diagonal.flat[0]) and np.all(beside < np.abs(diagonal)))
