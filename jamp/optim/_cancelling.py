"""Which parts of a state an update subtracts from something that is nearly the same.

A centered second moment is `nu - mu ** 2`, and what L-BFGS remembers is `params - previous_params`. Rounding moves each
operand by a thousandth of itself and more, and the difference by as much, which may be all of it: the variance of a
gradient that hardly varies became negative, and its root NaN.

An update is traced, and each value in it has a `_Mix`: which parts of the state it is made of, element by element. A
difference of two such values needs those parts as they were, and so does that of a number and a ratio of such values,
as `1 - mu ** 2 / nu`. Four kinds of difference do not:

* a step, of which a written part under a half is taken: `momentum - 0.1 * gradient`;
* what is left of a state, less gradients: `0.9 * momentum - gradient` is the momentum of an ascent;
* one that is added, scaled, to what it was taken from: `mean + (gradient - mean) / n`, which moves the mean;
* one that is only compared, or of which only the sign is read.

Sums over many elements, and products of matrices, are of other numbers, and end what is known.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import tree_flatten_with_path

from jamp._compat import Atom, Eqn, Jaxpr, Literal, inner_jaxprs, open_jaxpr, scan_counts, while_parts
from jamp._primitives import MOVED, SCALES, Trait, has
from jamp.scalers._base import raise_tree

_LARGEST_PART = 0.5
_ELEMENTWISE = Trait.SPREADS | SCALES | Trait.POWER | Trait.SMOOTH | Trait.OF_RESULT
_OTHER_NUMBERS = Trait.REDUCES | Trait.LINEAR | Trait.COMPARES | Trait.COUNTS | Trait.CHOOSES
_JUDGES = Trait.COMPARES | Trait.COUNTS
_NONE = frozenset[int]()


class _Mix(NamedTuple):
    """What a value is made of.

    Attributes:
        parts: Of the state, by number.
        given: Whether it is made of the gradients or the parameters.
        negative: Whether it was negated.
        little: Whether it is a written part, under a half, of what it is made of.
        decayed: Whether it is another written part of it, or a multiple.
        ratio: The parts of which it is the ratio, by any number or power.
        differs: The parts of which it is a difference that nothing but scalings has read yet.
    """

    parts: frozenset[int] = _NONE
    given: bool = False
    negative: bool = False
    little: bool = False
    decayed: bool = False
    ratio: frozenset[int] = _NONE
    differs: frozenset[int] = _NONE

    @property
    def counts(self) -> bool:
        """Whether it is made of anything."""
        return self.given or bool(self.parts)


_NOTHING = _Mix()


def cancelled(inner: optax.GradientTransformationExtraArgs, state: optax.OptState, params: optax.Params) -> set[tuple]:
    """The paths of the leaves of a state that are to be exact: those of a difference, and those nobody reads.

    What the update itself does not read is there for others, such as the gradient that a line search leaves behind, and
    they know nothing of codes. Of an update that cannot be traced, since it takes arguments of its own, nothing is
    known.

    Args:
        inner: The optimizer.
        state: A float32 state of it.
        params: The parameters.
    """
    leaves, treedef = tree_flatten_with_path(state)
    numbers = [i for i, (_, leaf) in enumerate(leaves) if isinstance(leaf, jax.Array)]

    def update(params: Any, grads: Any, arrays: Sequence[jax.Array], search: bool) -> list[jax.Array]:
        values = [leaf for _, leaf in leaves]
        for number, array in zip(numbers, arrays, strict=True):
            values[number] = array
        extra: dict[str, Any] = {"value": np.float32(0), "grad": grads, "value_fn": optax.tree.norm} if search else {}
        made = inner.update(grads, treedef.unflatten(values), params, **extra)
        return [leaf for leaf in jax.tree.leaves(made) if isinstance(leaf, jax.Array)]

    arrays = [leaves[number][1] for number in numbers]
    program = _traced(partial(update, search=True), params, arrays) or _traced(
        partial(update, search=False), params, arrays
    )
    if program is None:
        return set()
    first = len(program.invars) - len(numbers)
    read = {atom for eqn in program.eqns for atom in eqn.invars if not isinstance(atom, Literal)}
    own = [
        _Mix(frozenset({i}) if _is_of_numbers(leaves[number][1]) else frozenset()) for i, number in enumerate(numbers)
    ]
    search = _Differences()
    search.end(search.follow(program, [*[_Mix(given=True)] * first, *own]))
    unread = {i for i, var in enumerate(program.invars[first:]) if var not in read}
    return {leaves[numbers[i]][0] for i in search.found | unread}


def _traced(update: Callable[..., Any], params: Any, arrays: Any) -> Jaxpr | None:
    try:
        with warnings.catch_warnings():  # Nothing is updated.
            warnings.simplefilter("ignore")
            return open_jaxpr(jax.make_jaxpr(update)(params, raise_tree(params), arrays))
    except Exception:  # Anything may happen to made-up arguments. The update that is meant will tell.
        return None


def _is_of_numbers(x: jax.Array) -> bool:
    return x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.floating)


class _Differences:
    """Finds the differences in an update.

    Attributes:
        found: The parts of the state that they are made of.
    """

    def __init__(self) -> None:
        self.found: set[int] = set()

    def end(self, mixes: Iterable[_Mix]) -> None:
        """Takes note of the differences among values that are read as they are."""
        for mix in mixes:
            self.found |= mix.differs

    def follow(self, jaxpr: Jaxpr, given: Sequence[_Mix]) -> list[_Mix]:
        """What the results of a jaxpr are made of."""
        known = dict(zip(jaxpr.invars, given, strict=True))

        def read(atom: Atom) -> _Mix:
            return _NOTHING if isinstance(atom, Literal) else known.get(atom, _NOTHING)

        for eqn in jaxpr.eqns:
            operands = [read(atom) for atom in eqn.invars]
            known.update(zip(eqn.outvars, self._equation(eqn, operands), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: Eqn, operands: list[_Mix]) -> list[_Mix]:
        if inner_jaxprs(eqn):
            return self._inside(eqn, operands)
        if has(eqn, Trait.ADDS):
            made = self._sum(eqn, operands)
        elif has(eqn, Trait.NEGATES):
            made = operands[0]._replace(negative=not operands[0].negative)
        elif has(eqn, SCALES) and sum(mix.counts for mix in operands) < 2:
            made = self._scaled(eqn, operands)
        elif has(eqn, MOVED | Trait.SELECTS | Trait.ASSEMBLES):
            made = _either(operands)
        else:
            self.end(operands if not has(eqn, _JUDGES) else ())
            passes = has(eqn, _ELEMENTWISE) and not has(eqn, _OTHER_NUMBERS)
            made = _NOTHING if not passes else self._made(eqn, operands)
        return [made] * len(eqn.outvars)

    def _made(self, eqn: Eqn, operands: list[_Mix]) -> _Mix:
        """What an elementwise operation makes."""
        if has(eqn, Trait.DIVIDES):
            return _quotient(operands)
        counting = [mix for mix in operands if mix.counts]
        ratio = frozenset().union(*(mix.ratio for mix in counting)) if all(mix.ratio for mix in counting) else _NONE
        negative = has(eqn, Trait.MULTIPLIES) and operands[0].negative != operands[1].negative
        return _union(operands)._replace(negative=negative, ratio=ratio)

    def _sum(self, eqn: Eqn, operands: list[_Mix]) -> _Mix:
        """A sum: of values that do not cancel, of those that do, or a step from one of them to the other."""
        a, b = operands
        if any(x.differs and x.differs <= y.parts and not y.differs for x, y in ((a, b), (b, a))):
            return _union(operands)
        self.end(operands)
        minus = has(eqn, Trait.SUBTRACTS) != (a.negative != b.negative)
        is_step = a.little or b.little or any(x.decayed and not y.parts for x, y in ((a, b), (b, a)))
        if not minus or is_step or not eqn.outvars[0].aval.shape:
            return _union(operands)
        if a.counts and b.counts:
            return _union(operands)._replace(differs=a.parts | b.parts)
        return _union(operands)._replace(differs=a.ratio | b.ratio)

    def _scaled(self, eqn: Eqn, operands: list[_Mix]) -> _Mix:
        """A value that is multiplied with, or divided by, what is neither of the state nor given."""
        which = next((i for i, mix in enumerate(operands) if mix.counts), int(isinstance(eqn.invars[0], Literal)))
        if has(eqn, Trait.DIVIDES) and (which or len(operands) == 1):
            self.end(operands)
            return _quotient(operands)
        made, other = operands[which], operands[1 - which]
        share, factor = 1.0, eqn.invars[1 - which]
        if isinstance(factor, Literal):
            share = float(np.max(np.real(factor.val)))
            share = 1 / share if has(eqn, Trait.DIVIDES) and share else share
        return made._replace(
            negative=(made.negative != other.negative) != (share < 0),
            little=made.little or other.little or abs(share) < _LARGEST_PART,
            decayed=made.decayed or abs(share) != 1,
        )

    def _inside(self, eqn: Eqn, operands: list[_Mix]) -> list[_Mix]:
        """The results of an equation with jaxprs inside."""
        if has(eqn, Trait.LOOPS):
            return self._loop(eqn, operands)
        taken = operands[1:] if has(eqn, Trait.BRANCHES) else operands
        bodies = [open_jaxpr(jaxpr) for jaxpr in inner_jaxprs(eqn)]
        bodies = [body for body in bodies if len(body.invars) == len(taken) and len(body.outvars) == len(eqn.outvars)]
        if bodies:
            made = [self.follow(body, taken) for body in (bodies if has(eqn, Trait.BRANCHES) else bodies[:1])]
            return [_either(mixes) for mixes in zip(*made, strict=True)]
        self.end(operands)
        return [_union(operands)] * len(eqn.outvars)

    def _loop(self, eqn: Eqn, operands: list[_Mix]) -> list[_Mix]:
        """A loop: its carries are made of what any iteration makes them of."""
        if "jaxpr" in eqn.params:
            body, (first, count) = eqn.params["jaxpr"], scan_counts(eqn.params)
            consts, carry, rest = operands[:first], operands[first : first + count], operands[first + count :]
        else:
            parts = while_parts(eqn.params)
            body, rest = parts.body, []
            consts, carry = operands[parts.cond_consts : parts.first_carry], operands[parts.first_carry :]
        while True:  # Ends: mixes grow, and there are so many parts.
            made = self.follow(open_jaxpr(body), [*consts, *carry, *rest])
            later = [_either(pair) for pair in zip(carry, made, strict=False)]
            if later == carry:
                return [*carry, *made[len(carry) :]]
            carry = later


def _union(mixes: Sequence[_Mix]) -> _Mix:
    """What is made of several values, and is no multiple of any."""
    return _Mix(frozenset().union(*(mix.parts for mix in mixes)), any(mix.given for mix in mixes))


def _quotient(mixes: Sequence[_Mix]) -> _Mix:
    """A direction, such as the first moment over the root of the second: as wrong as these, and no copy of anything."""
    above, below = (*mixes, _NOTHING)[:2]
    ratio = above.parts | below.parts if above.parts and below.parts else _NONE
    return _Mix(given=any(mix.counts for mix in mixes), negative=above.negative != below.negative, ratio=ratio)


def _either(mixes: Sequence[_Mix]) -> _Mix:
    """One of several values, of which those that are made of nothing, as zeros, say nothing."""
    counting = [mix for mix in mixes if mix.counts]
    return _union(mixes)._replace(
        negative=bool(counting) and all(mix.negative for mix in counting),
        little=bool(counting) and all(mix.little for mix in counting),
        differs=frozenset().union(*(mix.differs for mix in mixes)),
    )
