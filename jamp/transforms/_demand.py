"""Which values their readers want in float32: demand runs backwards through a jaxpr.

A value that only sums, exponentials and their like read is computed in float32 where it is made: the conversion fuses
with the reader and costs nothing, and `sum(x * x)` of float16 data does not overflow in the square.

Phases (angles, coordinates) are wanted more strongly. What matters of them is the absolute error, and position 3001 is
3008 in bfloat16: rotary embeddings and sampling grids fall apart where their products are half.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jamp._compat import Literal, called_jaxpr, nominal_size, open_jaxpr, scan_counts
from jamp.transforms._flow import flows
from jamp.transforms._modes import Modes
from jamp.transforms._rules import FOLLOW, PHASE_READERS, PROMOTE, op_class

_COMPARISONS = frozenset({"eq", "eq_to", "ge", "gt", "is_finite", "le", "le_to", "lt", "lt_to", "ne"})
# Which token, expert or code is the best: in half, one of many is a tie, and the first of them wins.
_CHOICES = frozenset({"argmax", "argmin", "top_k"})

# What lies between the product of queries with keys and the softmax of it: scales, masks, caps, moves.
_ON_SCORES = PROMOTE | FOLLOW | {"tanh"}
# Contracted elements up to which a product may be a map of coordinates (a rotation, a projection, an outer product). A
# matrix unit takes 16 at once, so that half precision would not make it faster either.
_SHORT = 8


class Want(enum.IntEnum):
    """What the readers of a value want of it; true where that is float32."""

    HALF = 0  # Half will do.
    SCORE = 1  # All of its readers compute in float32, to make weights of it in a softmax.
    FULL = 2  # All of its readers compute in float32.
    PHASE = 3  # One of its readers takes it modulo something, or for an index.

    def __and__(self, other: int) -> Want:
        """What two readers want together: both have to want float32, but a single phase is enough."""
        if Want.PHASE not in (self, other) and Want.HALF in (self, other):
            return Want.HALF
        return Want(max(self, other))


Wants = tuple[Want, ...]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Result of the backward pass over one jaxpr: the live variables, and what their readers want."""

    live: frozenset[Any]
    wants: Mapping[Any, Want]
    carried: Mapping[int, Wants]  # By loop equation, what is wanted of its carries, by the next iteration too.

    def of(self, var: Any) -> Want:
        """What the readers of a variable want."""
        return self.wants.get(var, Want.HALF)

    def of_results(self, eqn: Any) -> Wants:
        """What the readers of an equation's results want; a carry is read by the next iteration as well."""
        carried = self.carried.get(id(eqn), ())
        return (*carried, *map(self.of, eqn.outvars[len(carried) :]))

    def is_live(self, eqn: Any) -> bool:
        """Whether anything reads a result of `eqn`, or it has an effect."""
        return bool(eqn.effects) or any(var in self.live for var in eqn.outvars)


class Demand:
    """The backward pass, remembered per jaxpr for as long as its planner lives."""

    def __init__(self, modes: Modes) -> None:
        self._modes = modes
        self._known: dict[Any, Wanted] = {}

    def __call__(self, jaxpr: Any, out_wants: Wants, mode: str, scope: str) -> Wanted:
        """Variables of `jaxpr` that are read at all, and what is wanted of them by everything that reads them."""
        key = (id(jaxpr), out_wants, mode, scope if self._modes.scope_matters else "")
        if key not in self._known:
            self._known[key] = self._analyse(open_jaxpr(jaxpr), out_wants, mode, scope)
        return self._known[key]

    def _analyse(self, jaxpr: Any, out_wants: Wants, mode: str, scope: str) -> Wanted:
        votes: dict[Any, Want] = {}  # Absent without a reader that cares.
        live: set[Any] = set()
        carried: dict[int, Wants] = {}
        exponentials = _exponentials_of_softmax(jaxpr)

        def vote(atom: Any, want: Want | None) -> None:
            if isinstance(atom, Literal):
                return
            live.add(atom)
            if want is not None:
                votes[atom] = votes.get(atom, want) & want

        for atom, want in zip(jaxpr.outvars, out_wants, strict=True):
            vote(atom, want)
        for eqn in reversed(jaxpr.eqns):
            if not eqn.effects and not any(var in live for var in eqn.outvars):
                continue
            wants = self._operand_wants(eqn, votes, carried, mode, scope)
            if id(eqn) in exponentials and votes.get(exponentials[id(eqn)], Want.HALF) is Want.HALF:
                wants = [Want.SCORE]
            for atom, want in zip(eqn.invars, wants, strict=True):
                vote(atom, want)
        return Wanted(frozenset(live), votes, carried)

    def _operand_wants(
        self, eqn: Any, votes: dict[Any, Want], carried: dict[int, Wants], mode: str, scope: str
    ) -> Sequence[Want | None]:
        mode, override = self._modes.enter(eqn, mode, scope)
        group = override or op_class(eqn.primitive.name)
        count = len(eqn.invars)
        wants = [votes.get(var, Want.HALF) for var in eqn.outvars]
        if mode != "O3" and (reads_phase(eqn) or makes_phase(eqn, wants)):
            return [Want.PHASE] * count
        if wants == [Want.SCORE] and eqn.primitive.name in _ON_SCORES:
            return wants * count
        if mode in ("full", "traced") or group in ("full", "no_half", "opaque", "traced"):
            return [Want.FULL] * count
        if mode != "O3" and is_reduction(eqn):
            return [Want.FULL] * count
        if group == "half" or mode == "O3":
            return [Want.HALF] * count
        if eqn.primitive.name in ("scan", "while") and group == "recurse":
            carried[id(eqn)], operands = self._loop_wants(eqn, [votes.get(v) for v in eqn.outvars], mode, scope)
            return operands
        if group == "recurse":
            return self._inner_wants(eqn, wants, mode, scope)
        if eqn.primitive.name in _CHOICES:
            return [Want.FULL] * count
        if eqn.primitive.name in _COMPARISONS:
            return [None] * count
        return [max(wants, default=Want.HALF)] * count

    def _inner_wants(self, eqn: Any, wants: list[Want], mode: str, scope: str) -> Sequence[Want | None]:
        if eqn.primitive.name == "cond":
            branches = [self._of_inputs(branch, wants, mode, scope) for branch in eqn.params["branches"]]
            return [None, *map(_in_all_branches, *branches)]
        return self._of_inputs(called_jaxpr(eqn.params), wants, mode, scope)

    def _loop_wants(
        self, eqn: Any, after: list[Want | None], mode: str, scope: str
    ) -> tuple[Wants, Sequence[Want | None]]:
        """What is wanted of the carries of a loop, and of all of its operands.

        A carry is read after the loop and by the next iteration, which wants of it what it needs for the carries that
        it makes: the largest fixpoint, from all in float32 on. Forward algorithms and Viterbi's add log-probabilities
        up for hundreds of steps; in half they would take another path.
        """
        scans = eqn.primitive.name == "scan"
        carries = scan_counts(eqn.params)[1] if scans else len(eqn.outvars)
        stacked = [want or Want.HALF for want in after[carries:]]
        carried = [Want.FULL if want is None else want for want in after[:carries]]
        read_by = self._read_by_scan if scans else self._read_by_while
        while True:
            before, reads, behind = read_by(eqn, carried, stacked, mode, scope)
            again = [want if read is None else want & read for want, read in zip(carried, reads, strict=True)]
            if again == carried:
                return tuple(carried), [*before, *carried, *behind]
            carried = again

    def _read_by_scan(self, eqn: Any, carried: list[Want], stacked: list[Want], mode: str, scope: str) -> Any:
        consts, carries = scan_counts(eqn.params)
        inner = self._of_inputs(eqn.params["jaxpr"], carried + stacked, mode, scope)
        return inner[:consts], inner[consts : consts + carries], inner[consts + carries :]

    def _read_by_while(self, eqn: Any, carried: list[Want], stacked: list[Want], mode: str, scope: str) -> Any:
        for_cond, for_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        cond = self._of_inputs(eqn.params["cond_jaxpr"], [Want.HALF], mode, scope)
        body = self._of_inputs(eqn.params["body_jaxpr"], carried + stacked, mode, scope)
        reads = map(_both, cond[for_cond:], body[for_body:])
        return [*cond[:for_cond], *body[:for_body]], list(reads), []

    def _of_inputs(self, jaxpr: Any, wants: list[Want], mode: str, scope: str) -> list[Want | None]:
        wanted = self(jaxpr, tuple(wants), mode, scope)
        return [wanted.wants.get(var) for var in open_jaxpr(jaxpr).invars]


def _both(a: Want | None, b: Want | None) -> Want | None:
    return b if a is None else a if b is None else a & b


def _in_all_branches(*wants: Want | None) -> Want | None:
    return None if None in wants else functools.reduce(operator.and_, wants)


def exponential_of_softmax(eqn: Any, made_by: Callable[[Any], Any]) -> tuple[Any, Any] | None:
    """The exponential and the sum of a division that is `exp(z) / sum(exp(z))`, however it is written.

    Args:
        eqn: An equation.
        made_by: Gives the equation that an atom is the result of, None for literals and arguments.
    """
    if eqn.primitive.name != "div":
        return None
    exponential, total = map(made_by, eqn.invars)
    while total is not None and total.primitive.name in ("broadcast_in_dim", "reshape", "stop_gradient"):
        total = made_by(total.invars[0])
    if exponential is None or total is None or exponential.primitive.name != "exp":
        return None
    same = total.primitive.name == "reduce_sum" and total.invars[0] is eqn.invars[0]
    return (exponential, total) if same else None


def _exponentials_of_softmax(jaxpr: Any) -> dict[int, Any]:
    """By exponential, the result of the softmax that it is part of."""
    divisions = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "div"]
    if not divisions or not any(eqn.primitive.name == "exp" for eqn in jaxpr.eqns):
        return {}
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def made_by(atom: Any) -> Any:
        return None if isinstance(atom, Literal) else makers.get(atom)

    found = ((eqn.outvars[0], exponential_of_softmax(eqn, made_by)) for eqn in divisions)
    return {id(parts[0]): result for result, parts in found if parts}


def reads_phase(eqn: Any) -> bool:
    """Whether an operation takes its operand modulo something, or makes an index of it."""
    if eqn.primitive.name == "convert_element_type":
        return flows(eqn.invars[0].aval) and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer)
    return eqn.primitive.name in PHASE_READERS


def is_reduction(eqn: Any) -> bool:
    """A product without free axes on either side is a sum, and belongs with the reductions."""
    if eqn.primitive.name != "dot_general":
        return False
    (contract, _), (batch, _) = eqn.params["dimension_numbers"]
    return all(var.aval.ndim == len(contract) + len(batch) for var in eqn.invars)


def makes_phase(eqn: Any, wants: Sequence[Want]) -> bool:
    """Whether an operation is a short matrix product read as a phase: of positions, it gives angles or coordinates."""
    return eqn.primitive.name == "dot_general" and Want.PHASE in wants and num_contracted(eqn) <= _SHORT


def num_contracted(eqn: Any) -> int:
    """Number of products that a matrix product adds up for each element."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return nominal_size(math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted))
