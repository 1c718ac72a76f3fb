"""The site that a planner looks at: an equation, the states of its operands, and what its readers want."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Set

import numpy as np

from jamp._compat import Atom, Aval, Eqn, Literal, Var, closed_over
from jamp._dtypes import Pair
from jamp._primitives import MOVED, SCALES, Trait, has, holds, traits_as_computed
from jamp.transforms.analysis.loops.recurrences import Sums
from jamp.transforms.analysis.reading.chains import moved_from
from jamp.transforms.analysis.reading.numbers import Ranges, of_literal, of_results
from jamp.transforms.analysis.regimes import Regime
from jamp.transforms.planning.context import Context, Planning
from jamp.transforms.planning.frames import adds_to_frame, builds, marks_of_sum
from jamp.transforms.program.closures import HAS_RULES
from jamp.transforms.program.flow import Flow, Flows, continued, inside, num_elements, united
from jamp.transforms.program.heuristics import Heuristics
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import NO_MARKS, Mark, transmit
from jamp.transforms.program.plan import Cast, Casts, Replan, Rewrite, Step
from jamp.transforms.program.rewrites import Retyped
from jamp.transforms.program.scale import Range
from jamp.transforms.program.want import Want, Wants

_BEQUEATHED = Mark.TANGENT | Mark.GIVEN | Mark.TRAINED
_TAKES = (
    MOVED | Trait.ASSEMBLES | Trait.SELECTS | Trait.CHOOSES | Trait.NEGATES
    | Trait.LIMITS | Trait.TAKES_EXTREMUM
)  # fmt: skip
_CHANGES_SIGN = Trait.SUBTRACTS | Trait.NEGATES
_EINSUM = "->"  # In the name of a scope: "bqhd,bkhd->bhqk".
_OWN_DTYPES = "preferred_element_type", "out_dtype"


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
    around: Context  # That of the jaxpr, whatever the regime of the equation.
    states: Mapping[Var, Flow | None]  # Of all variables that were made before.
    numbers: dict[Var, Range]  # Of what has no state: integers.
    shared: Set[Var]  # What is read more than once.

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
        has_rule = has(self.eqn, Trait.CUSTOM_VJP)
        replays = self.context.replays or (has_rule and holds([self.eqn], Trait.LOOPS))
        return self.context._replace(scope=scope, replays=replays, apart=has_rule and self.wanted_apart)

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

    @property
    def wanted_apart(self) -> bool:
        """Whether a reader takes something as large off a result."""
        return any(want.apart for want in self.wants)

    @functools.cached_property
    def operand_marks(self) -> Mark:
        """The marks of all operands. Complex values and float64, which have no state to tell, may have any."""
        marks = united(self.ins)
        if marks & Mark.SAMPLED and self.traits & SCALES:
            # Rows of zeros and ones over how many there are of each are no data, though the numbers are.
            sizes = [(flow.size, flow.has(Mark.SAMPLED)) for flow in self.ins if flow is not None]
            marks = marks if max(sizes)[1] else marks & ~Mark.SAMPLED
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
        """The step that makes a value, and the value, before equations that hand on an operand."""
        step = self.maker(atom)
        while step is not None and passes(step.eqn):
            atom = step.operands[moved_from(step.eqn, atom)]
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
        return flow.kind == Kind.ISLAND and not flow.scale and not inside(self.here, _module(flow.scope))

    def adds_cotangents_up(self, atom: Atom, flow: Flow) -> bool:
        """Whether an operand may have cotangents of several readers."""
        is_shared = not isinstance(atom, Literal) and atom in self.shared
        return is_shared and flow.has(Mark.TRAINED) and not flow.has(Mark.TANGENT)

    def raised(self, flow: Flow) -> Flow:
        """The state of half data, in float32."""
        kept = Mark.RAISED if flow.dtype == self.pair.narrow else NO_MARKS
        return flow._replace(dtype=self.wide, kind=Kind.ISLAND, marks=flow.marks | kept)

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
        if traits & Trait.ASSEMBLES and kind != Kind.HALF and builds(self.eqn, self.ins, aval):
            marks |= Mark.BUILT
        marks |= self.marks_of_choice if traits & Trait.SELECTS else NO_MARKS
        if traits & _CHANGES_SIGN and not marks & Mark.GIVEN:
            marks |= Mark.SIGNED
        if kind == Kind.WEAK and marks & Mark.FRACTION and not traits & _TAKES:
            marks |= Mark.ROUNDS  # As `log(2.0)` and `1.0 / 3.0`, whatever they are computed from.
        if marks & Mark.FRAME and traits & Trait.ADDS:
            marks = marks & ~Mark.FRAME if kind == Kind.HALF else marks_of_sum(self.eqn, self.ins, marks)
        return Flow(dtype, kind, size, self.here, marks, roots)

    @property
    def marks_of_choice(self) -> Mark:
        """The marks of numbers of which data says which they are: of two, or of a table, one by one."""
        if has(self.eqn, Trait.SELECTS):
            chooses, numbers = self.eqn.invars[0], self.ins[1:]
            is_choice = all(flow is not None and flow.kind == Kind.WEAK for flow in numbers)
        else:
            chooses = self.eqn.invars[-1]
            is_choice = math.prod(self.eqn.params.get("slice_sizes", (0,))) == 1 and len(self.ins) == 2
        return Mark.SAMPLED if is_choice and chooses in self.planner.samples else NO_MARKS

    @property
    def adds_to_frame(self) -> bool:
        """Whether the equation adds a matrix to a diagonal one, or to what was added to one."""
        return bool(self.operand_marks & Mark.FRAME) and adds_to_frame(self.eqn, self.ins)

    def retyped(self, dtype: np.dtype | None) -> dict[str, object] | None:
        """Parameters of the equation whose own dtype parameters follow a new operand dtype; None where none does."""
        params = self.eqn.params
        own = [name for name in _OWN_DTYPES if params.get(name) is not None] if dtype is not None and params else []
        if not own or not self.pair.flows(self.eqn.outvars[0].aval):
            return None
        return {**params, **dict.fromkeys(own, dtype)}


def _module(scope: str) -> str:
    """A scope without those that `jnp.einsum` names by what it computes: they are no modules."""
    while scope and _EINSUM in scope.rpartition("/")[2]:
        scope = scope.rpartition("/")[0]
    return scope
