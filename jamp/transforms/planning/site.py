"""The site that a planner looks at: an equation, the states of its operands, and what its readers want."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jamp._compat import Atom, Aval, ClosedJaxpr, Eqn, Literal, Var, closed_over
from jamp._dtypes import Pair
from jamp._primitives import Trait, has, traits_as_computed
from jamp.transforms.analysis.deciders import loops
from jamp.transforms.analysis.demand import Demand
from jamp.transforms.analysis.gates import States
from jamp.transforms.analysis.numbers import Ranges, of_literal, of_results
from jamp.transforms.analysis.patterns import Match
from jamp.transforms.analysis.recurrences import Sums
from jamp.transforms.analysis.regimes import Elementwise, Regime
from jamp.transforms.program.closures import HAS_RULES
from jamp.transforms.program.flow import (
    NO_MARKS,
    Flow,
    Flows,
    Kind,
    Mark,
    continued,
    inside,
    num_elements,
    transmit,
    united,
)  # fmt: skip
from jamp.transforms.program.heuristics import Heuristics
from jamp.transforms.program.plan import Cast, Casts, Plan, Replan, Rewrite, Step
from jamp.transforms.program.rewrites import Retyped
from jamp.transforms.program.scale import Range
from jamp.transforms.program.setting import Setting
from jamp.transforms.program.want import Want, Wants

_BEQUEATHED = Mark.TANGENT | Mark.GIVEN | Mark.TRAINED
_CHANGES_SIGN = Trait.SUBTRACTS | Trait.NEGATES
_OWN_DTYPES = "preferred_element_type", "out_dtype"


class Context(NamedTuple):
    """What holds for all of a jaxpr that is planned.

    Attributes:
        regime: Its regime.
        scope: Its scope path, where that matters for rules.
        in_rule: Whether it is, or is called by, a rule that is given tangents.
        in_attention: Whether it is the written form of an attention, which holds no other.
        replays: Whether it is of a function with loops and a reverse-mode rule, which may go through their steps again.
    """

    regime: Regime
    scope: str = ""
    in_rule: bool = False
    in_attention: bool = False
    replays: bool = False


class Planning(Protocol):
    """What sites ask of the planner."""

    setting: Setting
    demand: Demand
    scope_matters: bool
    in_eight_bits: bool
    precision: Any
    captured: frozenset[Var]

    def plan(
        self, jaxpr: ClosedJaxpr, ins: Flows, wants: Wants, context: Context, numbers: tuple[Range | None, ...] = ()
    ) -> Plan:
        """Plans a jaxpr."""
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


def rounded(flow: Flow, pair: Pair) -> Flow:
    """A state in half."""
    half = flow._replace(kind=Kind.HALF, dtype=pair.narrow, scale=0, number=None)
    return half.without(Mark.HUGE | Mark.QUOTIENT | Mark.SOLUTION | Mark.FRAME)


@dataclasses.dataclass(eq=False)
class Site:
    """An equation and all that its planner may look at."""

    planner: Planning
    eqn: Eqn
    ins: Flows
    wants: Wants
    context: Context
    here: str
    made_by: Mapping[Var, Step]
    sums: Sums  # Sums over the iterations of a loop written out.
    match: Match | None
    around: Context  # That of the jaxpr, whatever the regime of the equation.
    states: Mapping[Var, Flow | None]  # Of all variables that were made before.
    numbers: Mapping[Var, Range]  # Of what has no state: integers.

    @property
    def regime(self) -> Regime:
        """The regime of the equation."""
        return self.context.regime

    @property
    def pair(self) -> Pair:
        """The precisions of the policy."""
        return self.planner.setting.pair

    @property
    def wide(self) -> np.dtype:
        """The dtype that the program was written in."""
        return self.planner.setting.pair.wide

    @property
    def heuristics(self) -> Heuristics:
        """The thresholds."""
        return self.planner.setting.heuristics

    @property
    def name(self) -> str:
        """Name of the primitive, for dispatch."""
        return self.eqn.primitive.name

    @property
    def traits(self) -> int:
        """Traits of the equation."""
        return traits_as_computed(self.eqn)

    @functools.cached_property
    def inner_context(self) -> Context:
        """The context of the jaxprs inside of the equation; only scope rules need its scope."""
        scope = f"{self.context.scope}/{self.here}".strip("/") if self.planner.scope_matters else ""
        replays = self.context.replays or (has(self.eqn, Trait.CUSTOM_VJP) and loops(self.eqn.params["call_jaxpr"]))
        return self.context._replace(scope=scope, replays=replays)

    @property
    def replan(self) -> Replan:
        """What plans jaxprs inside of the equation that are known only when the program is emitted."""
        return self.planner.replan(self.inner_context)

    @functools.cached_property
    def half(self) -> np.dtype:
        """The half dtype of this site: the user's own where all operands already have one, else the policy's."""
        dtypes = {flow.dtype for flow in self.ins if flow is not None and flow.kind == Kind.HALF}
        strong = [flow for flow in self.ins if flow is not None and flow.kind != Kind.WEAK]
        if len(dtypes) == 1 and all(flow.kind == Kind.HALF for flow in strong):
            return dtypes.pop()
        return self.pair.narrow

    @functools.cached_property
    def strong(self) -> list[Flow]:
        """Operands that have an opinion about the dtype; positions have none where all is half, and stay exact."""
        floating = [flow for flow in self.ins if flow is not None and flow.kind != Kind.WEAK]
        return [flow for flow in floating if flow.has(Mark.GIVEN)] if self.regime.all_half else floating

    @property
    def want_full(self) -> bool:
        """Whether readers want a result in float32, and the regime listens to them."""
        if not self.regime.demand:
            return False
        return any(want.full or (want is Want.LEFT and has(self.eqn, Trait.OF_RESULT)) for want in self.wants)

    @functools.cached_property
    def operand_marks(self) -> Mark:
        """The marks of all operands. Complex values and float64, which have no state to tell, may have any."""
        marks = united(self.ins)
        if self.is_given_other_inexact:
            marks |= Mark.GIVEN | Mark.TRAINED | Mark.FRACTION
            marks |= Mark.TANGENT if self.context.in_rule else NO_MARKS
        return marks & ~Mark.HUGE if marks & Mark.TANGENT else marks

    @property
    def is_given_other_inexact(self) -> bool:
        """Whether an operand is complex, or of another floating dtype than those that flow."""
        return not all(self.ins) and any(self.pair.is_other_inexact(var.aval) for var in self.eqn.invars)

    @functools.cached_property
    def is_scaled(self) -> bool:
        """Whether an operand is a number beyond the half range, or data that such numbers scale."""
        return any(flow is not None and flow.scale for flow in self.ins)

    @functools.cached_property
    def ranges(self) -> Ranges:
        """What the results are, where the program computes them from numbers that it writes."""
        if not self.pair.lacks_range or any(flow is not None and flow.number is None for flow in self.ins):
            return (None,) * len(self.eqn.outvars)
        operands = [
            flow.number if flow else self.integer(atom) for atom, flow in zip(self.eqn.invars, self.ins, strict=True)
        ]
        return of_results(self.eqn, operands, self.wide)

    def integer(self, atom: Atom) -> Range | None:
        """What an operand without a state is, where that is known."""
        return of_literal(atom.val) if isinstance(atom, Literal) else self.numbers.get(atom)

    def maker(self, atom: Atom) -> Step | None:
        """The step of this jaxpr that makes an operand; None for literals and arguments."""
        return None if isinstance(atom, Literal) else self.made_by.get(atom)

    def behind(self, atom: Atom, passes: Callable[[Eqn], bool]) -> tuple[Step | None, Atom]:
        """The step that makes a value, and the value, before equations that hand on their first operand."""
        step = self.maker(atom)
        while step is not None and passes(step.eqn):
            atom = step.operands[0]
            step = self.maker(atom)
        return step, atom

    @functools.cached_property
    def captures(self) -> tuple[Var, ...]:
        """Which of the captured variables of the program the rule of the equation closes over."""
        if not self.planner.captured or not has(self.eqn, HAS_RULES):
            return ()
        return tuple(var for var in closed_over([self.eqn]) if var in self.planner.captured)

    def leaves(self, flow: Flow) -> bool:
        """Whether an island is read outside the scope it was born in; one that half cannot hold stays."""
        return flow.kind == Kind.ISLAND and not flow.scale and not inside(self.here, flow.scope)

    def rounded(self, flow: Flow) -> Flow:
        """A state in half."""
        return rounded(flow, self.pair)

    def cast(self, flow: Flow | None, dtype: np.dtype | None, may_be_huge: bool = False) -> Cast | None:
        """The cast that brings an operand to a dtype; None where it has that.

        Args:
            flow: State of the operand.
            dtype: The dtype; None leaves it.
            may_be_huge: Whether an argument may be a mask of huge numbers.

        What depends on a tangent is cast plainly, because JAX cannot transpose a cast that saturates.
        """
        if flow is None or dtype is None or flow.dtype == dtype:
            return None
        huge = flow.has(Mark.HUGE) or (may_be_huge and flow.kind == Kind.LAZY)
        return Cast(dtype, huge and not flow.has(Mark.TANGENT) and self.pair.is_narrow(dtype))

    def casts(self, dtype: np.dtype | None, may_be_huge: bool = False) -> Casts:
        """The casts that bring all floating operands to a dtype."""
        return tuple(self.cast(flow, dtype, may_be_huge) for flow in self.ins)

    def step(
        self,
        rule: str,
        dtype: np.dtype,
        kind: Kind,
        rewrite: Rewrite | None = None,
        rounded: bool = False,
        may_be_huge: bool = False,
    ) -> Step:
        """A step that brings every floating operand to `dtype` and whose results are `kind`.

        Args:
            rule: The name of what decided.
            dtype: The dtype of the operation.
            kind: Kind of the results.
            rewrite: What to emit; left out, the primitive, with parameters that follow the dtype.
            rounded: Whether the results are half, after an operation in float32.
            may_be_huge: Whether an argument may be a mask of huge numbers.
        """
        result = self.half if rounded else dtype
        out = tuple(self.result(var.aval, result, kind) for var in self.eqn.outvars)
        params = self.retyped(dtype)
        if rewrite is None and (params is not None or rounded):
            out_casts = tuple(flow and Cast(result) for flow in out) if rounded else ()
            rewrite = Retyped(params=params, out_casts=out_casts)
        return Step(self.eqn, self.ins, self.casts(dtype, may_be_huge), out, rule, rewrite)

    def inheriting(self, step: Step) -> Step:
        """The step with what any operand bequeaths to all results. Plans of inner jaxprs see to it themselves."""
        if step.plans or all(flow is None for flow in step.out):
            return step
        always = self.operand_marks & _BEQUEATHED
        never = Mark.HUGE if always & Mark.TANGENT else NO_MARKS
        if all(flow is None or flow.with_marks(always, never) is flow for flow in step.out):
            return step
        return dataclasses.replace(step, out=tuple(flow and flow.with_marks(always, never) for flow in step.out))

    def result(self, aval: Aval, dtype: np.dtype, kind: Kind) -> Flow | None:
        """State of a result of elementwise or selecting operations on the operands."""
        if not self.pair.flows(aval):
            return None
        traits, size = self.traits, num_elements(aval)
        operands = [flow for flow in self.ins if flow is not None]
        if operands and not traits & Trait.ASSEMBLES:
            size = min(size, max([flow.size for flow in operands]))
        roots = continued(operands, traits)
        if kind == Kind.FULL and not roots:
            kind = Kind.ISLAND
        marks = transmit(self.operand_marks, traits, kind)
        if traits & Trait.ASSEMBLES and kind != Kind.HALF and self._builds(aval):
            marks |= Mark.BUILT
        if traits & _CHANGES_SIGN and not marks & Mark.GIVEN:
            marks |= Mark.SIGNED
        if traits & Trait.ADDS and marks & Mark.FRAME:
            marks = self._of_frame(aval, kind, marks)
        return Flow(dtype, kind, size, self.here, marks, roots)

    def _of_frame(self, aval: Aval, kind: Kind, marks: Mark) -> Mark:
        """The marks of what is added to a frame: none, in half; of a difference, those of what takes differences."""
        if kind == Kind.HALF or not self.adds_to_frame:
            return marks & ~Mark.FRAME
        return marks | Mark.SIGNED if has(self.eqn, Trait.SUBTRACTS) else marks

    @property
    def adds_to_frame(self) -> bool:
        """Whether an equation adds a matrix to a diagonal one, or to what was added to one."""
        if not has(self.eqn, Trait.ADDS) or not self.operand_marks & Mark.FRAME:
            return False
        shape = self.eqn.outvars[0].aval.shape
        return (
            len(shape) > 1
            and shape[-1] == shape[-2]
            and all(flow is not None and (flow.size > 1 or flow.has(Mark.FRAME)) for flow in self.ins)
        )

    def _builds(self, aval: Aval) -> bool:
        """Whether operands are put together with numbers, or side by side.

        Not so the weights of layers that are stacked, nor rows that are written to a buffer.
        """
        replaces = has(self.eqn, Trait.REPLACES)
        axes = slice(-1 if replaces else -2, None)
        return any(
            flow is not None
            and (
                flow.has(Mark.BUILT)
                or atom.aval.shape[axes] != aval.shape[axes]
                or not (replaces or flow.has(Mark.GIVEN))
            )
            for atom, flow in zip(self.eqn.invars, self.ins, strict=True)
        )

    def retyped(self, dtype: np.dtype | None) -> dict[str, object] | None:
        """Parameters of the equation whose own dtype parameters follow a new operand dtype; None where none does."""
        params = self.eqn.params
        own = [name for name in _OWN_DTYPES if params.get(name) is not None] if dtype is not None and params else []
        if not own or not self.pair.flows(self.eqn.outvars[0].aval):
            return None
        return {**params, **dict.fromkeys(own, dtype)}
