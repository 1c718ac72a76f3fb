"""What holds for all of a jaxpr that is planned, and what its equations ask of the planner."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple, Protocol

from jamp._compat import Atom, ClosedJaxpr, Var
from jamp.transforms.analysis.demand import Demand
from jamp.transforms.analysis.loops.gates import States
from jamp.transforms.analysis.regimes import Elementwise, Regime
from jamp.transforms.planning.reads import Reads
from jamp.transforms.program.flow import Flow, Flows
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import Mark
from jamp.transforms.program.plan import Plan, Replan
from jamp.transforms.program.scale import Range
from jamp.transforms.program.setting import Setting
from jamp.transforms.program.want import Wants


class Context(NamedTuple):
    """What holds for all of a jaxpr that is planned.

    Attributes:
        regime: Its regime.
        scope: Its scope path, where that matters for rules.
        in_rule: Whether it is, or is called by, a rule that is given tangents.
        in_attention: Whether it is the written form of an attention, which holds no other.
        replays: Whether it is of a function with loops and a reverse-mode rule, which may go through their steps again.
        apart: Whether it is of one of whose result a reader takes something as large off, and so of its cotangents.
    """

    regime: Regime
    scope: str = ""
    in_rule: bool = False
    in_attention: bool = False
    replays: bool = False
    apart: bool = False


class Planning(Protocol):
    """What sites ask of the planner."""

    setting: Setting
    demand: Demand
    scope_matters: bool
    in_eight_bits: bool
    precision: Any
    captured: frozenset[Var]
    samples: Container[Atom]
    reads: Reads
    takes_gradients: Callable[[ClosedJaxpr], bool]

    def plan(
        self, jaxpr: ClosedJaxpr, ins: Flows, wants: Wants, context: Context, numbers: tuple[Range | None, ...] = ()
    ) -> Plan:
        """Plans a jaxpr."""
        ...

    def magnitude(self, atom: Atom) -> float:
        """How large an array is that the program has at hand."""
        ...

    def replan(self, context: Context) -> Replan:
        """What plans jaxprs when the program is emitted."""
        ...


def constants_of(ins: Sequence[Flow | None]) -> frozenset[int]:
    """Positions of the inputs of a jaxpr that depend on no argument of the program."""
    return frozenset(index for index, flow in enumerate(ins) if flow is None or not flow.has(Mark.TRAINED))


def states_of(ins: Sequence[Flow | None], regime: Regime) -> States:
    """The inputs of a jaxpr that are float32 states of a loop, and stay so in each iteration."""
    stays = set(Kind) - {Kind.WEAK, Kind.HALF} if regime.elementwise is Elementwise.WIDEST else {Kind.FULL}
    return States(
        frozenset(
            index
            for index, flow in enumerate(ins)
            if flow is not None and flow.kind in stays and any(root.role == "carry" for root in flow.roots)
        )
    )
