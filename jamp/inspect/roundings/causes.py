"""What a mask or an index that half precision decided otherwise is due to.

A decision has no derivative. What it changes is handed to the roundings that moved the numbers it is made of: each has
the part of the way from the float32 numbers to the others that it is responsible for, in the sum over all that came out
differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jamp._primitives import Trait, has
from jamp.inspect.roundings.pair import Pair
from jamp.inspect.roundings.single import is_float
from jamp.transforms.analysis.reading.arithmetic import COMPARISONS

_FIRST = {"argmax": 0, "argmin": 0, "top_k": 1}  # Which result is the index.

# Zero, with a derivative: the part of a decision that is due to what it is differentiated by. None if not known.
Cause = Any


def causes_of(eqn: Any, args: Sequence[Pair], outs: Sequence[Pair], known: Sequence[Cause]) -> list[Cause]:
    """The causes of the results of an equation: of masks and indices, and of what is made of these.

    Args:
        eqn: The equation.
        args: Its operands.
        outs: Its results.
        known: The causes of its operands.
    """
    if all(is_float(out.wide) or out.wide is out.half for out in outs):
        return [None] * len(outs)
    made = _made(eqn, args, outs)
    given = [cause for cause in known if cause is not None]
    if made is None and given:
        made = sum(given) / len(given)
    return [None if is_float(out.wide) else made for out in outs]


def handed_on(value: Any, error: Any, causes: Sequence[Cause]) -> Any:
    """A float32 value whose error, which a decision makes, is that of the causes."""
    usable = jnp.where(jnp.isfinite(error), lax.stop_gradient(error), 0)
    return value + usable * (sum(causes) / len(causes))


def _made(eqn: Any, args: Sequence[Pair], outs: Sequence[Pair]) -> Cause:
    """The cause of what an equation makes of floats."""
    name = eqn.primitive.name
    if not all(is_float(arg.wide) and not jnp.iscomplexobj(arg.wide) for arg in args):
        return None  # Masks and indices have causes already.
    if name in COMPARISONS:
        left, right = args
        return _part(outs[0], left.wide - right.wide, left.half - right.half)
    if has(eqn, Trait.CONVERTS):
        return _part(outs[0], *args[0])
    if name in _FIRST:
        index, axis = outs[_FIRST[name]], -1 if name == "top_k" else eqn.params["axes"][0]

        def ahead(x: Any) -> Any:
            """How far what half takes is ahead of what float32 takes."""
            places = [i if name == "top_k" else jnp.expand_dims(i, axis) for i in index]
            taken = [jnp.take_along_axis(x, i, axis) for i in places]
            return taken[1] - taken[0]

        return _part(Pair(*map(jnp.ravel, index)), jnp.ravel(ahead(args[0].wide)), jnp.ravel(ahead(args[0].half)))
    return None


def _part(decided: Pair, wide: Any, half: Any) -> Cause:
    way = lax.stop_gradient(half - wide)
    way = jnp.where((decided.wide != decided.half) & jnp.isfinite(way), way, 0)
    moved = jnp.where(way == 0, 0, wide)
    parts = jnp.sign(way) * (moved - lax.stop_gradient(moved))
    # Those that came far count for more: of what moved by next to nothing, derivatives say little.
    return parts.sum() / jnp.maximum(jnp.abs(way).sum(), jnp.finfo(way.dtype).tiny)
