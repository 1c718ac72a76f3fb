"""What a plan is made of: the site that a planner looks at, and the step that it answers with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jamp._compat import Literal, open_jaxpr
from jamp.transforms._demand import Wants
from jamp.transforms._flow import FLOAT32, Flow, Kind, flows, inside, num_elements
from jamp.transforms._rules import ACCUMULATING, FOLLOW, KEEPS_SMALL, SPREADS

Flows = tuple[Flow | None, ...]


@dataclasses.dataclass
class Step:
    """What to do with one equation.

    Attributes:
        eqn: The equation as it was traced.
        ins: State of each operand.
        casts: Dtype to bring each operand to; None leaves it as it is carried.
        out: State of each result; None for what is not floating.
        rule: Name of the rule that decided, for the report.
        params: Parameters of the primitive, where they differ from the traced ones.
        out_casts: Dtype to bring each result to after the operation; None leaves it.
        emit: Emits the operation where binding the primitive is not enough.
        plans: Plans of the jaxprs inside.
        atoms: What the emission reads, where that is not the operands of the equation.
        pins: Precision to round the first operand to, for this step and all later readers alike.
    """

    eqn: Any
    ins: Flows
    casts: tuple[np.dtype | None, ...]
    out: Flows
    rule: str
    params: dict[str, Any] | None = None
    out_casts: tuple[np.dtype | None, ...] | None = None
    emit: Callable[..., list[Any]] | None = None
    plans: tuple[Plan, ...] = ()
    atoms: tuple[Any, ...] | None = None
    pins: np.dtype | None = None

    @property
    def operands(self) -> Sequence[Any]:
        """Variables and literals that the emission reads."""
        return self.eqn.invars if self.atoms is None else self.atoms

    @property
    def unchanged(self) -> bool:
        """Whether the equation runs exactly as it was traced."""
        return not (self.emit or self.params or any(self.casts) or any(self.out_casts or ()))

    def making(self, **changes: Any) -> Step:
        """The step with results that are new data: of their own size (`size=`) or dtype, and without a history."""
        out = tuple(flow and flow._replace(roots=frozenset(), **changes) for flow in self.out)
        return dataclasses.replace(self, out=out)


@dataclasses.dataclass
class Plan:
    """A planned jaxpr: its live equations in order, and the state of what goes in and comes out.

    Of a loop's body, the first inputs are `constants` and the next are `carries`; elsewhere there are none of either.
    The backward pass is given its `half_states`, which are float32 carries, in half.
    `emitted` holds what was built from the plan (traced jaxprs, functions with custom rules), so that a sub-jaxpr that
    repeats with the same dtypes is built once. It lives as long as the plan: for one call of the transformed function.
    """

    jaxpr: Any
    consts: Sequence[Any]
    steps: list[Step]
    ins: Flows
    outs: Flows
    constants: int = 0
    carries: int = 0
    half_states: frozenset[Any] = frozenset()
    emitted: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def out_dtypes(self) -> list[np.dtype | None]:
        """The dtype that each result is carried in; None for what is not floating."""
        return [flow and flow.dtype for flow in self.outs]

    @property
    def loop_constants(self) -> frozenset[Any]:
        """Inputs that are the same in all iterations of a loop."""
        return frozenset(open_jaxpr(self.jaxpr).invars[: self.constants])

    @property
    def weights(self) -> frozenset[Any]:
        """Inputs that may be weights, cast anew in each iteration of a loop: of its body what it scans over."""
        inner = open_jaxpr(self.jaxpr)
        fixed = self.constants + self.carries
        return frozenset(inner.invars[fixed:] if fixed else [*inner.invars, *inner.constvars])

    @functools.cached_property
    def asks_what_moves(self) -> bool:
        """Whether a rule inside depends on which operands are differentiated, so that each call needs its own trace.

        JAX remembers what one trace of a rule says about its residuals, and calls of one jaxpr share it.
        """
        return any(
            asks_what_moves(step.eqn) or any(inner.asks_what_moves for inner in step.plans) for step in self.steps
        )

    @property
    def unchanged(self) -> bool:
        """Whether the jaxpr runs exactly as it was traced."""
        arrives = all(
            f is None or f.dtype == v.aval.dtype for f, v in zip(self.ins, open_jaxpr(self.jaxpr).invars, strict=True)
        )
        return arrives and all(step.unchanged for step in self.steps)


@dataclasses.dataclass(frozen=True)
class Site:
    """An equation and all that its planner may look at."""

    planner: Any
    eqn: Any
    ins: Flows
    wants: Wants
    mode: str
    here: str
    scope: str
    made_by: dict[Any, Step]
    rectified: dict[Any, Any]  # By variable `x`, one that holds max(x, 0).
    sums: dict[Any, int | None]  # Sums over the iterations of an unrolled loop: see `UnrolledLoops.sums`.

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return self.eqn.primitive.name

    @property
    def base(self) -> str:
        """Scope path of the jaxprs inside the equation; only scope rules need it."""
        return f"{self.scope}/{self.here}".strip("/") if self.planner.modes.scope_matters else ""

    @property
    def half(self) -> np.dtype:
        """The half dtype of this site: the user's own where all operands already have one, else the policy's."""
        dtypes = {flow.dtype for flow in self.ins if flow is not None and flow.kind == Kind.HALF}
        strong = [flow for flow in self.ins if flow is not None and flow.kind != Kind.WEAK]
        if len(dtypes) == 1 and all(flow.kind == Kind.HALF for flow in strong):
            return dtypes.pop()
        return self.planner.half

    @property
    def strong(self) -> list[Flow]:
        """Operands that have an opinion about the dtype; positions have none where all is half, and stay exact."""
        floating = [flow for flow in self.ins if flow is not None and flow.kind != Kind.WEAK]
        return [flow for flow in floating if flow.given] if self.mode == "O3" else floating

    def maker(self, atom: Any) -> Step | None:
        """The step of this jaxpr that makes an operand; None for literals and arguments."""
        return None if isinstance(atom, Literal) else self.made_by.get(atom)

    def leaves(self, flow: Flow) -> bool:
        """Whether an island is read outside the scope it was born in, and half can hold it."""
        return flow.kind == Kind.ISLAND and not flow.tiny and not inside(self.here, flow.scope)

    def step(self, rule: str, dtype: np.dtype | None, kind: Kind, **changes: Any) -> Step:
        """A step that brings every floating operand to `dtype` and whose results are `kind`."""
        casts = tuple(None if flow is None or dtype is None or flow.dtype == dtype else dtype for flow in self.ins)
        out = tuple(self.result(var.aval, dtype or FLOAT32, kind) for var in self.eqn.outvars)
        return Step(self.eqn, self.ins, casts, out, rule, **{"params": retyped(self.eqn, dtype), **changes})

    def result(self, aval: Any, dtype: np.dtype, kind: Kind) -> Flow | None:
        """State of a result of elementwise or selecting operations on the operands."""
        if not flows(aval):
            return None
        operands = [flow for flow in self.ins if flow is not None]
        size = max((flow.size for flow in operands), default=num_elements(aval))
        keeps = self.name in ACCUMULATING or self.name in FOLLOW
        roots = frozenset().union(*(flow.roots for flow in operands)) if keeps else frozenset()
        huge = any(flow.huge for flow in operands) and kind in (Kind.WEAK, Kind.LAZY) and self.name in SPREADS
        if kind == Kind.FULL and not roots:
            kind = Kind.ISLAND
        tiny = dtype == FLOAT32 and self._makes_tiny(operands)
        return Flow(dtype, kind, min(size, num_elements(aval)), self.here, huge, roots, tiny=tiny)

    def _makes_tiny(self, operands: Sequence[Flow]) -> bool:
        """Whether a result may be a number that float16 takes for zero, or the reciprocal of one."""
        if not any(flow.tiny for flow in operands):
            return False
        return self.name in KEEPS_SMALL or (self.name == "div" and operands[0].kind == Kind.WEAK)


def asks_what_moves(eqn: Any) -> bool:
    """Whether an equation has a reverse-mode rule that is told which operands are differentiated."""
    return eqn.primitive.name == "custom_vjp_call" and bool(eqn.params["symbolic_zeros"])


def retyped(eqn: Any, dtype: np.dtype | None) -> dict[str, Any] | None:
    """Parameters of an equation whose own dtype parameters follow a new operand dtype."""
    changes = {
        name: dtype
        for name in ("preferred_element_type", "out_dtype")
        if dtype is not None and eqn.params.get(name) is not None and flows(eqn.outvars[0].aval)
    }
    return {**eqn.params, **changes} if changes else None
