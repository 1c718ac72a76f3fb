"""What planning answers with and emission reads: plans of frozen steps, whose rewrites are data."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jamp._compat import Atom, ClosedJaxpr, Eqn, Var, open_jaxpr
from jamp._dtypes import E4M3, Pair
from jamp._primitives import Trait, has
from jamp.transforms.program.attention import Attention
from jamp.transforms.program.flow import Flows, Kind, Mark, Root
from jamp.transforms.program.heuristics import DEFAULT, Heuristics
from jamp.transforms.program.want import Wants


class Scaling(NamedTuple):
    """Which elements of an array in 8 bits share a scale.

    Attributes:
        axes: Axes along which all elements do; None for all axes.
        block: An axis along which blocks of 32 have a scale each, whatever `axes` says.
        ragged: An axis of rows that belong to groups, whatever `axes` says: all rows of a group share a scale.
    """

    axes: tuple[int, ...] | None = None
    block: int | None = None
    ragged: int | None = None

    BLOCK = 32


class EightBits(NamedTuple):
    """How products in 8 bits are made.

    Attributes:
        scales: What shares a scale: `"tensor"` (an operand, or each of a batch of them), `"row"` (what is contracted
            together) or `"block"`.
        grad_dtype: The float8 format of cotangents.
        weight_grad_in_half: Whether the product that makes the gradient of a weight is in half.
    """

    scales: str = "tensor"
    grad_dtype: np.dtype = E4M3
    weight_grad_in_half: bool = False

    @property
    def blocks(self) -> bool:
        """Whether each 32 elements that are contracted have a scale of their own."""
        return self.scales == "block"

    def scaling(self, contracted: tuple[int, ...], apart: tuple[int, ...], ndim: int) -> Scaling:
        """Which elements of an operand share a scale.

        Args:
            contracted: The contracted axes.
            apart: Axes along which each index has scales of its own, whatever the setting: of a batch. Members of an
                ensemble, and experts, may be of very different magnitude.
            ndim: The number of axes of the operand.
        """
        if self.blocks:
            return Scaling(block=contracted[0])
        if self.scales == "row":
            return Scaling(contracted)
        return Scaling(tuple(axis for axis in range(ndim) if axis not in apart) if apart else None)


class Setting(NamedTuple):
    """What holds for all of a plan.

    Attributes:
        pair: The precisions of the policy.
        heuristics: The thresholds.
        eight_bits: How products in 8 bits are made.
        wide_gradients: Whether products make the gradients of weights in float32, as they are reduced over devices.
    """

    pair: Pair
    heuristics: Heuristics = DEFAULT
    eight_bits: EightBits = EightBits()
    wide_gradients: bool = False


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward(Rewrite):
    """Nothing is emitted: the operand, brought to its dtype, is the result."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retyped(Rewrite):
    """The primitive with parameters that follow the new dtypes, and results that are cast."""

    params: dict[str, Any] | None = None
    out_casts: Casts = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideProduct(Rewrite):
    """A product of half operands that gives its float32 accumulator, with a derivative in half."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Product(Rewrite):
    """A product of operands in 8 bits, whose derivatives are such products too.

    Attributes:
        half: What is multiplied in where 8 bits are not: tangents in forward mode.
        out: Dtype of the result.
        options: How it is made.
        scalings: Which elements of each operand share a scale.
        in_half: For each operand, whether its gradient is a product in half, of the other operand as it is.
    """

    half: np.dtype
    out: np.dtype
    options: EightBits
    scalings: tuple[Scaling, Scaling]
    in_half: tuple[bool, bool] = (False, False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideGradient(Rewrite):
    """A product with the gradients of its weights in float32. The emission reads the weights once more, as they are.

    Attributes:
        product: What the product is emitted as otherwise; None binds the primitive.
        weights: Which operands are weights.
        out_casts: Casts of its result.
    """

    product: Rewrite | None
    weights: tuple[int, ...]
    out_casts: Casts = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scatter(Rewrite):
    """A scatter of half data in float32: its parameters hold a function that was traced in half.

    Attributes:
        out_casts: Casts of its result.
    """

    out_casts: Casts = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Softmax(Rewrite):
    """A softmax, found at its division: its half result is all that the derivative needs.

    Attributes:
        axes: What it sums over.
        half: Dtype of its result.
        views: What the program does with the exponentials before it divides them: transposes and the like.
    """

    axes: tuple[int, ...]
    half: np.dtype
    views: tuple[Eqn, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledSum(Rewrite):
    """A float32 sum of scaled half terms, which are scaled in float32.

    Attributes:
        terms: For each term, the equations that scale it, each with the position of the operand that it scales. The
            emission reads, for each term, what is scaled and the other operands of these equations.
    """

    terms: tuple[tuple[tuple[Eqn, int], ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rectified(Rewrite):
    """`x > 0` as `max(x, 0) > 0`, which the next layer keeps, so that `x` need not be kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pinned(Rewrite):
    """An extremum whose float32 operand is rounded first, for this step and all later readers alike.

    Attributes:
        digits: The dtype whose number of digits is kept; exponents stay those of float32.
    """

    digits: np.dtype


class Replan(Protocol):
    """Plans what is known only when a program is emitted. It is data: equal to others that plan alike."""

    def __hash__(self) -> int: ...

    def plan(self, jaxpr: ClosedJaxpr, ins: Flows, wants: Wants) -> Plan:
        """Plans a jaxpr, as `ins` arrive in it, and `wants` says of its results."""
        ...

    def residual(self, states: Flows) -> Flows:
        """The states in which values are kept for the backward pass."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inside(Rewrite):
    """An equation whose jaxprs were planned.

    Attributes:
        as_traced: Whether they run as they were traced, so that the equation can be bound as it is.
    """

    as_traced: bool = False


class Call(Inside):
    """A `jit` or its like, bound again with another jaxpr."""


class Remat(Inside):
    """A `jax.checkpoint` of the user's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedAttention(Inside):
    """An attention, found at its last product: one kernel where there is one, and elsewhere as it is written.

    Attributes:
        attention: What a kernel has to be told. The plan inside is that of the equations as they are written.
    """

    attention: Attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizedRemat(Inside):
    """A forward rule with `optimize_remat`, in whose place JAX runs the function where nobody reads its residuals.

    Attributes:
        replan: Plans the function, which is known only then.
    """

    replan: Replan


class Branches(Inside):
    """A `cond`."""


class ShardMap(Inside):
    """A `jax.shard_map`."""


class While(Inside):
    """A `while`: the plans of its condition and of its body."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scan(Inside):
    """A `scan`.

    Attributes:
        shared: Constants that are cast to half outside. What they are cast of follows the operands.
        states_may_be_half: Whether the backward pass may be given what the loop carries in half.
    """

    shared: tuple[int, ...] = ()
    states_may_be_half: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomRule(Inside):
    """A function with a rule of its own.

    Attributes:
        replan: Plans a jaxpr of the rule, which is known only once the function is differentiated.
    """

    replan: Replan


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomBatching(Inside):
    """A `custom_vmap`: a function with a rule for batches.

    Attributes:
        replan: Plans a jaxpr of the rule, which is known only once the function is mapped.
    """

    replan: Replan


class CustomTranspose(Rewrite):
    """A `linear_call`, as it was traced, whose transpose closes over values of the program."""


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
