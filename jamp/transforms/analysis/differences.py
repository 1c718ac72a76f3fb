"""Constant matrices that take differences: Laplacians, derivatives, what centres data."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jamp._compat import Atom, Eqn, Jaxpr, Literal, inner_jaxprs, open_jaxpr
from jamp._dtypes import Pair
from jamp._primitives import Trait, has

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
    return np.asarray(value, np.float32)


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
