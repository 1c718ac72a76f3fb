"""What planning answers with and emission reads: plans of frozen steps, whose rewrites are data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jamp._compat import Atom, ClosedJaxpr, Eqn, Var, open_jaxpr
from jamp._dtypes import Pair
from jamp._primitives import Trait, has
from jamp.transforms.program.flow import Flows, Root
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import Mark
from jamp.transforms.program.setting import Setting
from jamp.transforms.program.want import Wants


class Cast(NamedTuple):
    """A conversion in front of or behind an operation.

    Attributes:
        dtype: The dtype to convert to.
        saturate: Whether finite values beyond its range become its largest number, and not infinity.
    """

    dtype: np.dtype
    saturate: bool = False


Casts = tuple[Cast | None, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rewrite:
    """What an equation is emitted as, where binding its primitive to cast operands is not enough.

    Attributes:
        reads: What the emission reads, where that is not the operands of the equation.
        plans: Plans of the jaxprs inside.
    """

    reads: tuple[Atom, ...] | None = None
    plans: tuple[Plan, ...] = ()


class Replan(Protocol):
    """Plans what is known only when a program is emitted. It is data: equal to others that plan alike."""

    def __hash__(self) -> int: ...

    @property
    def stacks_matter(self) -> bool:
        """Whether it asks which functions an equation was traced in."""
        ...

    def plan(self, jaxpr: ClosedJaxpr, ins: Flows, wants: Wants) -> Plan:
        """Plans a jaxpr, as `ins` arrive in it, and `wants` says of its results."""
        ...

    def residual(self, states: Flows) -> Flows:
        """The states in which values are kept for the backward pass."""
        ...

    def of_forward_part(self, jaxpr: ClosedJaxpr, residuals: int) -> Wants:
        """What is wanted of the results of the forward part of a rule, of which some are residuals, and come first."""
        ...

    def of_derivative(
        self, jaxpr: ClosedJaxpr, values: Flows, tangents: Flows, of_solution: bool, linear: bool
    ) -> tuple[Flows, Flows]:
        """The states in which a rule is given values, and tangents, in which it is linear, or cotangents."""
        ...

    def cotangents(self, jaxpr: ClosedJaxpr, converges: bool) -> Wants:
        """What is wanted of the results of a backward rule, whose function may hold a loop to convergence."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inside(Rewrite):
    """An equation whose jaxprs were planned.

    Attributes:
        as_traced: Whether they run as they were traced, so that the equation can be bound as it is.
    """

    as_traced: bool = False


@dataclasses.dataclass(frozen=True)
class Step:
    """What to do with one equation.

    Attributes:
        eqn: The equation as it was traced.
        ins: State of each operand.
        casts: What to bring each operand to; None leaves it as it is carried.
        out: State of each result; None for what is not floating.
        rule: Name of the rule that decided, for the report.
        rewrite: What it is emitted as; None binds the primitive.
        layers: Scanned weights that it multiplies with activations: the scan runs over layers, not over time.
        declined: Why what was found here is not rewritten, for the report; empty where nothing was, or it is.
        not_float8: Why a product does not run in 8 bits, for the report; empty where it does, or nobody asked for that.
        captures: Variables of the outermost program whose values a rule of the equation closes over.
        exact: Which of its half results XLA must round, because they are compared.
        exact_if_kept: Which it must round where the backward pass is given them.
    """

    eqn: Eqn
    ins: Flows
    casts: Casts
    out: Flows
    rule: str
    rewrite: Rewrite | None = None
    layers: frozenset[Root] = frozenset()
    declined: str = ""
    not_float8: str = ""
    captures: tuple[Var, ...] = ()
    exact: tuple[int, ...] = ()
    exact_if_kept: tuple[int, ...] = ()

    @property
    def operands(self) -> Sequence[Atom]:
        """Variables and literals that the emission reads."""
        reads = self.rewrite.reads if self.rewrite else None
        return self.eqn.invars if reads is None else reads

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Plans of the jaxprs inside."""
        return self.rewrite.plans if self.rewrite else ()

    @property
    def out_casts(self) -> Casts:
        """What each result is brought to after the operation."""
        return getattr(self.rewrite, "out_casts", ())

    @property
    def unchanged(self) -> bool:
        """Whether the equation runs exactly as it was traced."""
        bound = self.rewrite is None or (isinstance(self.rewrite, Inside) and self.rewrite.as_traced)
        return bound and not any(self.casts)

    def making(self, **changes: Any) -> Step:
        """The step with results that are new data: of their own size (`size=`) or dtype, and without a history."""
        changes = {"roots": frozenset(), **changes}
        out = tuple(flow and flow._replace(**changes) for flow in self.out)
        return dataclasses.replace(self, out=out)

    def marked(self, mark: Mark) -> Step:
        """The step with float32 results that have a mark besides theirs."""
        out = tuple(f if f is None or f.kind == Kind.HALF else f._replace(marks=f.marks | mark) for f in self.out)
        return dataclasses.replace(self, out=out)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A planned jaxpr: its live equations in order, and the state of what goes in and comes out.

    Of a loop's body, the first inputs are `constants` and the next are `carries`; elsewhere there are none of either.
    Inputs that are compared inside are `compared`, those of which exponentials are added up there, `exponents`, and
    those of whose differences there are exponentials, `differences`.
    A plan is equal to itself alone, so that what is built from it can be remembered by it.
    """

    jaxpr: ClosedJaxpr
    consts: Sequence[Any]
    steps: tuple[Step, ...]
    ins: Flows
    outs: Flows
    setting: Setting
    constants: int = 0
    carries: int = 0
    compared: frozenset[int] = frozenset()
    exponents: frozenset[int] = frozenset()
    differences: frozenset[int] = frozenset()

    @property
    def pair(self) -> Pair:
        """The precisions of the policy."""
        return self.setting.pair

    @property
    def out_dtypes(self) -> list[np.dtype | None]:
        """The dtype that each result is carried in; None for what is not floating."""
        return [flow and flow.dtype for flow in self.outs]

    @property
    def loop_constants(self) -> frozenset[Var]:
        """Inputs that are the same in all iterations of a loop."""
        return frozenset(open_jaxpr(self.jaxpr).invars[: self.constants])

    @property
    def weights(self) -> frozenset[Var]:
        """Inputs that may be weights, cast anew in each iteration of a loop: of its body what it scans over."""
        inner = open_jaxpr(self.jaxpr)
        fixed = self.constants + self.carries
        return frozenset(inner.invars[fixed:] if fixed else [*inner.invars, *inner.constvars])

    @functools.cached_property
    def layers(self) -> frozenset[Root]:
        """Scanned weights that products inside multiply with activations."""
        found = (root for step in self.steps for root in step.layers)
        inside = (root for step in self.steps for plan in step.plans for root in plan.layers)
        return frozenset((*found, *inside))

    @functools.cached_property
    def captures(self) -> frozenset[Var]:
        """Variables of the outermost program whose values some rule closes over."""
        found = (var for step in self.steps for var in step.captures)
        inside = (var for step in self.steps for plan in step.plans for var in plan.captures)
        return frozenset((*found, *inside))

    @functools.cached_property
    def asks_what_moves(self) -> bool:
        """Whether a rule inside depends on which operands are differentiated, so that each call needs its own trace.

        JAX remembers what one trace of a rule says about its residuals, and calls of one jaxpr share it.
        """
        return any(
            asks_what_moves(step.eqn) or any(inner.asks_what_moves for inner in step.plans) for step in self.steps
        )

    @functools.cached_property
    def unchanged(self) -> bool:
        """Whether the jaxpr runs exactly as it was traced."""
        arrives = all(
            f is None or f.dtype == v.aval.dtype for f, v in zip(self.ins, open_jaxpr(self.jaxpr).invars, strict=True)
        )
        return arrives and all(step.unchanged for step in self.steps)


def asks_what_moves(eqn: Eqn) -> bool:
    """Whether an equation has a reverse-mode rule that is told which operands are differentiated."""
    return has(eqn, Trait.CUSTOM_VJP) and bool(eqn.params["symbolic_zeros"])


def loop_dtypes(step: Step) -> list[np.dtype | None]:
    """Dtypes in which a branch or a loop's body hands its results over."""
    return [flow and flow.dtype for flow in step.out]
