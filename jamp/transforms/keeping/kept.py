"""What reverse mode keeps between forward and backward: half values and small statistics, as far as possible.

The measurements behind this file are in `docs/design/residuals.md`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jamp._compat import Atom, ClosedJaxpr, Eqn, Literal, Var, called_jaxpr, inner_jaxprs, open_jaxpr
from jamp._dtypes import is_complex, is_differentiable, is_inexact
from jamp._primitives import (
    FUNCTIONS,
    MOVED,
    NO_TRAITS,
    TABLE,
    Row,
    Rule,
    Trait,
    contracts_nothing,
    has,
    holds,
    is_outer,
    rule_of,
)
from jamp.transforms.keeping.names import keep_p
from jamp.transforms.keeping.parts import parts_alone
from jamp.transforms.program.flow import num_elements
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import Mark
from jamp.transforms.program.plan import Inside, Plan, Step
from jamp.transforms.program.rewrites import Float8Product, Softmax

_CHEAP_RULES = (Rule.PROMOTE, Rule.FOLLOW, Rule.TRACED)
_UNKNOWN = Row(Rule.OPAQUE, NO_TRAITS)


def _is_cheap(row: Row | None) -> bool:
    """Whether a primitive is elementwise, or moves: cheap enough to be computed again."""
    if row is None or row.has(Trait.EXPENSIVE):
        return False
    return row.rule in _CHEAP_RULES or (row.rule is Rule.FULL and not row.has(Trait.REDUCES))


def is_cheap_move(eqn: Eqn) -> bool:
    """Whether an equation moves elements, or converts them, without traffic between devices."""
    return has(eqn, MOVED) and not has(eqn, Trait.EXPENSIVE)


class Kept(NamedTuple):
    """What reverse mode may keep of the results of a plan that are elementwise.

    Attributes:
        values: Variables to keep as they are.
        half_copies: Variables that are float32, of which to keep the half that a product reads.
        written: Of these, what XLA:TPU would otherwise compute anew for each tile of a product that reads it.
        loose: Results of the plan that are elementwise and not kept: their reader has to say whether they are.
        parts: Of the values to keep as they are, the parts of what is not.
    """

    values: frozenset[Var]
    half_copies: frozenset[Var]
    written: frozenset[Var]
    loose: frozenset[Var]
    parts: frozenset[Var]


@dataclasses.dataclass(frozen=True)
class KeepHalf:
    """A `jax.checkpoint` policy: what to keep for the backward pass; the rest is recomputed, elementwise.

    The policy keeps products, convolutions and whatever else is not elementwise, reductions, and what is named so: see
    `kept`.

    Attributes:
        barrier: Whether XLA may not merge what is recomputed with the original.
    """

    barrier: bool

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> bool:
        """Whether results of a primitive are kept; JAX asks for each."""
        row = TABLE.get(primitive.name, _UNKNOWN)
        avals = (*avals, *(params.get("result_avals") or ()))  # A callback makes what it says of anything.
        if row.has(Trait.COMPLEX) or any(is_complex(aval.dtype) for aval in avals if hasattr(aval, "dtype")):
            return False  # `jax.checkpoint` cannot keep complex residuals: it rounds them with reduce_precision.
        if row.has(Trait.NAMES):
            return primitive is keep_p
        if row.has(Trait.CUSTOM_JVP):
            return not _is_elementwise(called_jaxpr(params))
        if row.has(Trait.TAKES_EXTREMUM) and any(map(is_differentiable, avals)):
            return False  # JAX compares what it is of with it, so that both must be computed again, or none.
        if row.has(Trait.COMPARES):
            # See `mask_is_kept`. JAX's own derivatives compare by `eq`: that of a maximum of two would make two masks.
            arrays = [aval for aval in avals if aval.ndim and is_inexact(aval.dtype)]
            return len(arrays) == 2 and not row.has(Trait.EQUALS)
        return not (_is_cheap(row) or (row.has(Trait.MATRIX) and contracts_nothing(params)))


class Keeping:
    """Decides what to keep of plans, and remembers it while a program is emitted."""

    def __init__(self) -> None:
        self._known: dict[tuple[Plan, bool], Kept] = {}

    def of(self, plan: Plan, results_too: bool) -> Kept:
        """Which elementwise results of a plan the backward pass should be given, not recompute.

        An elementwise value that is made of one kept value, such as the terms of a GELU, is computed again from it, in
        the kernel that reads it. Half values that are made of two, such as a residual stream, are kept, and so are
        those that a product reads: they would have to be computed again and written to memory for its sake alone. Of a
        float32 residual stream the half copy that a product reads is kept, and now and then the stream itself.

        Args:
            plan: A plan.
            results_too: Whether to keep its own results as if a product read them.
        """
        key = (plan, results_too)
        if key not in self._known:
            self._known[key] = self._decide(plan, results_too)
        return self._known[key]

    def _decide(self, plan: Plan, results_too: bool) -> Kept:
        results: list[Var] = [atom for atom in open_jaxpr(plan.jaxpr).outvars if not isinstance(atom, Literal)]
        needed = self._read_by_products(plan.steps, results if results_too else [])
        often = set(_read_often(plan.steps, plan.setting.heuristics.tiles))
        parts = parts_alone(plan.steps, results, self._all_recomputable)
        fixed = set(plan.loop_constants)  # What is the same in all iterations.
        values, half_copies, loose = set[Var](), set[Var](), set[Var]()
        sources: dict[Atom, tuple[frozenset[Atom], int]] = {}  # What a value is made of, and in how many operations.
        pair, longest = plan.pair, plan.setting.heuristics.longest
        states = _wide_states(plan)
        for step in plan.steps:
            made_of, length = _made_of(step, sources, states, plan)
            if fixed and all(isinstance(atom, Literal) or atom in fixed for atom in step.operands):
                fixed.update(step.eqn.outvars)
            if mask_is_kept(step):
                values.update(step.eqn.outvars)
            computes, operations = _computes(step), _num_operations(step)
            for index, (var, flow) in enumerate(zip(step.eqn.outvars, step.out, strict=True)):
                if half_copy_is_kept(step, index, plan):
                    half_copies.add(var)
                if not self.recomputable(step, index):
                    if flow is not None and not flow.has(Mark.TANGENT) and not step.plans:
                        values.add(var)
                    sources[var] = frozenset({var}), 0
                    continue
                several, long, read = len(made_of) > 1, length >= longest, var in needed
                moves_on = not states.isdisjoint(made_of)
                if flow is None or flow.has(Mark.TANGENT):  # JAX transposes no name.
                    keeps = copies = False
                elif var in parts:
                    keeps, copies = True, False
                elif var in fixed:
                    keeps, copies = read and pair.is_narrow(flow.dtype), read
                elif not computes:
                    keeps, copies = False, read and moves_on and has(step.eqn, Trait.ASSEMBLES)
                elif pair.is_narrow(flow.dtype):
                    keeps, copies = several or long or read, False
                else:
                    keeps, copies = (
                        several and long,
                        (several or moves_on or var in often) and read and flow.kind > Kind.LAZY,
                    )
                if keeps:
                    values.add(var)
                    sources[var] = frozenset({var}), 0
                    continue
                sources[var] = made_of, length + operations
                loose.add(var)
                if copies:
                    half_copies.add(var)
        written = frozenset(often & (values | half_copies))
        of_results = frozenset(loose.intersection(results))
        return Kept(frozenset(values), frozenset(half_copies), written, of_results, parts)

    def _read_by_products(self, steps: Sequence[Step], results: Sequence[Var]) -> set[Atom]:
        """Variables that something reads which is not elementwise, also by way of data movement."""
        needed: set[Atom] = set(results)
        for step in reversed(steps):
            moves = not needed.isdisjoint(step.eqn.outvars) and is_cheap_move(step.eqn)
            if moves or not (has(step.eqn, Trait.LINEAR) or self._all_recomputable(step)):
                needed.update(atom for atom in read_in_half(step) if not isinstance(atom, Literal))
        return needed

    def _all_recomputable(self, step: Step) -> bool:
        return all(self.recomputable(step, index) for index in range(len(step.eqn.outvars)))

    def recomputable(self, step: Step, index: int) -> bool:
        """Whether a result is elementwise, or moved: cheap enough to be computed again."""
        if _is_cheap(TABLE.get(step.eqn.primitive.name)) or is_outer(step.eqn):
            return True
        if has(step.eqn, Trait.CUSTOM_JVP):
            return _is_elementwise(called_jaxpr(step.eqn.params))
        if has(step.eqn, Trait.CALLS) and step.plans:
            (plan,) = step.plans
            result = open_jaxpr(plan.jaxpr).outvars[index]
            return isinstance(result, Literal) or result in self.of(plan, results_too=False).loose
        return False


def read_in_half(step: Step) -> Sequence[Atom]:
    """What the derivative of a step reads as it is: not what is kept of it in 8 bits."""
    if not isinstance(step.rewrite, Float8Product):
        return step.operands
    both = zip(step.operands[:2], bytes_are_kept(step.rewrite), strict=True)
    return [*(atom for atom, as_bytes in both if not as_bytes), *step.operands[2:]]


def bytes_are_kept(rewrite: Float8Product) -> tuple[bool, bool]:
    """For each operand of a product in 8 bits, whether the backward pass is given its bytes.

    Where the gradient of one operand is made in half, of the other operand as it is, only that is read.
    """
    left, right = rewrite.in_half
    return not right, not left


def _read_often(steps: Sequence[Step], tiles: int) -> Iterator[Var]:
    """What products read whose results are much larger, such as those that make logits."""
    for step in steps:
        if rule_of(step.eqn) is Rule.HALF and has(step.eqn, Trait.MATRIX):
            size = num_elements(step.eqn.outvars[0].aval)
            for atom in step.operands:
                if not isinstance(atom, Literal) and tiles * num_elements(atom.aval) < size:
                    yield atom


def _wide_states(plan: Plan) -> frozenset[Var]:
    """The float32 states of a loop, of which nothing has to be kept where the half copy of what follows is."""
    carries = zip(open_jaxpr(plan.jaxpr).invars, plan.ins, strict=True)
    return frozenset(var for var, flow in carries if flow is not None and flow.kind is Kind.FULL)


def _made_of(
    step: Step, sources: dict[Atom, tuple[frozenset[Atom], int]], states: frozenset[Var], plan: Plan
) -> tuple[frozenset[Atom], int]:
    """Of the kept values of its size that a result is made of, two at most; and the longest row of operations."""
    size = max([num_elements(var.aval) for var in step.eqn.outvars], default=0)
    statistic = plan.setting.heuristics.statistic
    found, length = frozenset[Atom](), 0
    for atom, flow in zip(step.operands, step.ins, strict=True):
        if isinstance(atom, Literal):
            continue
        made_of, steps = sources.get(atom) or (frozenset({atom}), 0)
        # A state is stored whole in each iteration, whatever it was broadcast from.
        elements = flow.size if flow and states.isdisjoint(made_of) else num_elements(atom.aval)
        if statistic * elements <= size:
            continue
        # More than two would say no more, and be as many as there are layers, of a float32 residual stream.
        found = frozenset(itertools.islice(found | made_of, 2)) if found else made_of
        length = max(length, steps)
    return found, length


def _num_operations(step: Step) -> int:
    return max(1, sum(len(plan.steps) for plan in step.plans)) if step.plans else 1


def keeps_inside(step: Step) -> bool:
    """Whether a step keeps its results itself, where they are made."""
    if isinstance(step.rewrite, Softmax):
        return True
    if has(step.eqn, Trait.OF_RESULT):
        return not step.out_casts
    emitted = isinstance(step.rewrite, Inside) and not step.rewrite.as_traced
    return emitted and has(step.eqn, FUNCTIONS)


def _computes(step: Step) -> bool:
    eqn = step.eqn
    elementwise = rule_of(eqn) is Rule.PROMOTE and not has(eqn, Trait.COMPARES)
    return elementwise or is_outer(eqn) or has(eqn, FUNCTIONS)


def _is_elementwise(jaxpr: ClosedJaxpr) -> bool:
    """Whether a function with a rule of its own, such as relu or softplus, consists of cheap operations."""
    return all(
        _is_cheap(TABLE.get(eqn.primitive.name))
        or (has(eqn, FUNCTIONS) and all(map(_is_elementwise, inner_jaxprs(eqn))))
        for eqn in open_jaxpr(jaxpr).eqns
    )


def mask_is_kept(step: Step) -> bool:
    """Whether a step compares random numbers, as dropout does, or values with others: `h == h.max()`.

    A byte each is less than to draw the numbers again. And of values that are compared the backward pass may be given
    one as it is, and compute the other again of what was rounded to be kept: nothing is equal to its maximum then.
    """
    if not has(step.eqn, Trait.COMPARES):
        return False
    flows = [flow for flow in step.ins if flow is not None and flow.size > 1]
    return len(flows) > 1 or any(not flow.has(Mark.GIVEN) for flow in flows)


def half_copy_is_kept(step: Step, index: int, plan: Plan) -> bool:
    """Whether a result is float32 data that is not computed again, so that its cast is to be kept.

    Such are a `cumsum`, and random numbers. Otherwise `KeepHalf` would keep the float32 that the cast is made of, or
    draw again, for a reader that takes half.
    """
    flow = step.out[index]
    if flow is None or flow.dtype != plan.pair.wide:
        return False
    if not flow.has(Mark.GIVEN) and flow.size > 1 and holds([step.eqn], Trait.DRAWS):
        return True
    if flow.kind != Kind.ISLAND:
        return False
    if not has(step.eqn, Trait.CALLS):
        return has(step.eqn, Trait.REDUCES)
    if not step.plans:  # As traced, inside a nested `cast_fn`.
        return False
    (inside,) = step.plans
    result = open_jaxpr(inside.jaxpr).outvars[index]
    makers = ((inner, i) for inner in inside.steps for i, var in enumerate(inner.eqn.outvars) if var is result)
    return any(half_copy_is_kept(inner, i, inside) for inner, i in makers)
