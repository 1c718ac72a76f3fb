"""Which values their readers want in float32: demand runs backwards through a jaxpr.

A value that only sums, exponentials and their like read is computed in float32 where it is made: the conversion fuses
with the reader and costs nothing, and `sum(x * x)` of float16 data does not overflow in the square.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jamp._compat import Literal, called_jaxpr, open_jaxpr, scan_counts
from jamp.transforms._modes import Modes
from jamp.transforms._rules import op_class

_COMPARISONS = frozenset(
    {"argmax", "argmin", "eq", "eq_to", "ge", "gt", "is_finite", "le", "le_to", "lt", "lt_to", "ne"}
)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Result of the backward pass over one jaxpr: the live variables, and those that all readers want in float32."""

    live: frozenset[Any]
    full: frozenset[Any]

    def is_live(self, eqn: Any) -> bool:
        """Whether anything reads a result of `eqn`, or it has an effect."""
        return bool(eqn.effects) or any(var in self.live for var in eqn.outvars)


class Demand:
    """The backward pass, remembered per jaxpr for as long as its planner lives."""

    def __init__(self, modes: Modes) -> None:
        self._modes = modes
        self._known: dict[Any, Wanted] = {}

    def __call__(self, jaxpr: Any, out_wants: tuple[bool, ...], mode: str, scope: str) -> Wanted:
        """Variables of `jaxpr` that are read at all, and that are wanted in float32 by everything that reads them."""
        key = (id(jaxpr), out_wants, mode, scope if self._modes.scope_matters else "")
        if key not in self._known:
            self._known[key] = self._analyse(open_jaxpr(jaxpr), out_wants, mode, scope)
        return self._known[key]

    def _analyse(self, jaxpr: Any, out_wants: tuple[bool, ...], mode: str, scope: str) -> Wanted:
        votes: dict[Any, bool] = {}  # True while every reader so far wants float32; absent without a reader that cares.
        live: set[Any] = set()

        def vote(atom: Any, want: bool | None) -> None:
            if isinstance(atom, Literal):
                return
            live.add(atom)
            if want is not None:
                votes[atom] = votes.get(atom, True) and want

        for atom, want in zip(jaxpr.outvars, out_wants, strict=True):
            vote(atom, want)
        for eqn in reversed(jaxpr.eqns):
            if not eqn.effects and not any(var in live for var in eqn.outvars):
                continue
            for atom, want in zip(eqn.invars, self._operand_wants(eqn, votes, mode, scope), strict=True):
                vote(atom, want)
        return Wanted(frozenset(live), frozenset(var for var, want in votes.items() if want))

    def _operand_wants(self, eqn: Any, votes: dict[Any, bool], mode: str, scope: str) -> list[bool | None]:
        mode, override = self._modes.enter(eqn, mode, scope)
        group = override or op_class(eqn.primitive.name)
        count = len(eqn.invars)
        if mode in ("full", "traced") or group in ("full", "no_half", "opaque", "traced"):
            return [True] * count
        if group == "half" or mode == "O3":
            return [False] * count
        wants = [votes.get(var, False) for var in eqn.outvars]
        if group == "recurse":
            return self._inner_wants(eqn, wants, mode, scope)
        if eqn.primitive.name in _COMPARISONS:
            return [None] * count
        return [any(wants)] * count

    def _inner_wants(self, eqn: Any, wants: list[bool], mode: str, scope: str) -> list[bool | None]:
        name, params = eqn.primitive.name, eqn.params
        if name == "while":
            return [False] * len(eqn.invars)
        if name == "cond":
            branches = [self._of_inputs(branch, wants, mode, scope) for branch in params["branches"]]
            return [None, *(None if None in votes else all(votes) for votes in zip(*branches, strict=True))]
        if name == "scan":
            consts, carries = scan_counts(params)
            inner = self._of_inputs(params["jaxpr"], [False] * carries + wants[carries:], mode, scope)
            return [*inner[:consts], *[False] * carries, *inner[consts + carries :]]
        return self._of_inputs(called_jaxpr(params), wants, mode, scope)

    def _of_inputs(self, jaxpr: Any, wants: list[bool], mode: str, scope: str) -> list[bool | None]:
        wanted = self(jaxpr, tuple(wants), mode, scope)
        return [(var in wanted.full) if var in wanted.live else None for var in open_jaxpr(jaxpr).invars]
