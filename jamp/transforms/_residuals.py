"""What reverse mode keeps between forward and backward: half values and small statistics, as far as possible.

The measurements behind this file are in `docs/design/residuals.md`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jamp._compat import Literal, called_jaxpr, inner_jaxprs, open_jaxpr
from jamp.transforms._emit import KEEP, OF_RESULT
from jamp.transforms._flow import FLOAT32, STATISTIC, Kind, is_half, num_elements
from jamp.transforms._rules import CALLS, FOLLOW, FULL_ELEMENTWISE, FULL_REDUCTION, PROMOTE, TRACED
from jamp.transforms._steps import Plan, Step

COMPARISONS = frozenset({"eq", "ge", "gt", "le", "lt", "ne"})
# Reads of a whole array for each result, or traffic between devices: never done twice.
_EXPENSIVE_MOVES = frozenset({
    "all_gather", "all_gather_invariant", "all_gather_reduced", "all_to_all", "argmax", "argmin", "cummax", "cummin",
    "device_put", "pmax", "pmin", "ppermute", "psum", "psum_invariant", "reduce_max", "reduce_min", "reduce_scatter",
    "reduce_window_max", "reduce_window_min", "sort", "top_k", "unreduced_psum",
})  # fmt: skip
_CHEAP = (FULL_ELEMENTWISE | PROMOTE | FOLLOW | TRACED) - _EXPENSIVE_MOVES
CHEAP_MOVES = (FOLLOW | {"convert_element_type", "copy"}) - _EXPENSIVE_MOVES
LINEAR = frozenset(
    {"cumsum", "reduce_sum", "reduce_window_sum", "psum", "psum_invariant"}
)  # Their derivative reads nothing.


# Elementwise operations in a row that are computed again from kept values. More of them would be long kernels, and in a
# float32 sum over layers or time steps a kernel for each term that adds all terms before it once more.
_LONGEST = 32


class Kept(NamedTuple):
    """What reverse mode may keep of the results of a plan that are elementwise.

    Attributes:
        values: Variables to keep as they are.
        half_copies: Variables that are float32, of which to keep the half that a product reads.
        loose: Results of the plan that are elementwise and not kept: their reader has to say whether they are.
    """

    values: frozenset[Any]
    half_copies: frozenset[Any]
    loose: frozenset[Any]


def keep_half(primitive: Any, *avals: Any, **params: Any) -> bool:
    """A `jax.checkpoint` policy: what to keep for the backward pass; the rest is recomputed, elementwise.

    Kept are products, convolutions and whatever else is not elementwise, reductions, and what is named so: see `kept`.
    """
    name = primitive.name
    if name in ("complex", "fft") or any(
        jnp.issubdtype(aval.dtype, jnp.complexfloating) for aval in avals if hasattr(aval, "dtype")
    ):
        return False  # `jax.checkpoint` cannot keep complex residuals: it rounds them with reduce_precision.
    if name == "name":
        return params["name"] == KEEP
    if name == "custom_jvp_call":
        return not _is_elementwise(called_jaxpr(params)) or _keeps_result(called_jaxpr(params))
    return name not in _CHEAP


def _keeps_result(jaxpr: Any) -> bool:
    """Whether a jaxpr names its last value as one to keep, itself or in a call."""
    if not open_jaxpr(jaxpr).eqns:
        return False
    last = open_jaxpr(jaxpr).eqns[-1]
    return (
        last.params.get("name") == KEEP
        if last.primitive.name == "name"
        else any(map(_keeps_result, inner_jaxprs(last)))
    )


def kept(plan: Plan, results_too: bool) -> Kept:
    """Which elementwise results of a plan the backward pass should be given, not recompute.

    An elementwise value that is made of one kept value, such as the terms of a GELU, is computed again from it, in the
    kernel that reads it. Kept are half values that are made of two, such as a residual stream, and those that a product
    reads: what would have to be computed again and written to memory for its sake alone. Of a float32 residual stream
    that is the half copy which a product reads, and now and then the stream itself.

    Args:
        plan: A plan.
        results_too: Whether to keep its own results as if a product read them.

    Returns:
        What to keep; remembered in the plan.
    """
    key = ("kept", results_too)
    if key not in plan.emitted:
        plan.emitted[key] = _kept(plan, results_too)
    return plan.emitted[key]


def _kept(plan: Plan, results_too: bool) -> Kept:
    results = [atom for atom in open_jaxpr(plan.jaxpr).outvars if not isinstance(atom, Literal)]
    needed = _read_by_products(plan.steps, results if results_too else [])
    fixed = set(plan.loop_constants)  # What is the same in all iterations.
    values, half_copies, loose = set[Any](), set[Any](), set[Any]()
    sources: dict[Any, tuple[frozenset[Any], int]] = {}  # What a value is made of, and in how many operations.
    for step in plan.steps:
        made_of, length = _made_of(step, sources)
        if fixed and all(isinstance(atom, Literal) or atom in fixed for atom in step.operands):
            fixed.update(step.eqn.outvars)
        for index, (var, flow) in enumerate(zip(step.eqn.outvars, step.out, strict=True)):
            if mask_is_kept(step):
                values.add(var)
            if half_copy_is_kept(step, index):
                half_copies.add(var)
            if not _recomputable(step, index):
                sources[var] = frozenset({var}), 0
                continue
            several, long, read = len(made_of) > 1, length >= _LONGEST, var in needed
            if flow is None or flow.tangent:  # JAX transposes no name.
                keeps = copies = False
            elif var in fixed:
                keeps, copies = read and is_half(flow.dtype), read
            elif not _computes(step):
                keeps = copies = False
            elif is_half(flow.dtype):
                keeps, copies = several or long or read, False
            else:
                keeps, copies = several and long, several and read and flow.kind > Kind.LAZY
            if keeps:
                values.add(var)
                sources[var] = frozenset({var}), 0
                continue
            sources[var] = made_of, length + _num_operations(step)
            loose.add(var)
            if copies:
                half_copies.add(var)
    return Kept(frozenset(values), frozenset(half_copies), frozenset(loose.intersection(results)))


def _made_of(step: Step, sources: dict[Any, tuple[frozenset[Any], int]]) -> tuple[frozenset[Any], int]:
    """Of the kept values of its size that a result is made of, two at most; and the longest row of operations."""
    size = max((num_elements(var.aval) for var in step.eqn.outvars), default=0)
    found, length = frozenset[Any](), 0
    for atom, flow in zip(step.operands, step.ins, strict=True):
        if isinstance(atom, Literal) or STATISTIC * (flow.size if flow else num_elements(atom.aval)) <= size:
            continue
        made_of, steps = sources.get(atom, (frozenset({atom}), 0))
        # More than two would say no more, and be as many as there are layers, of a float32 residual stream.
        found, length = frozenset(itertools.islice(found | made_of, 2)), max(length, steps)
    return found, length


def _num_operations(step: Step) -> int:
    return max(1, sum(len(plan.steps) for plan in step.plans))


def _read_by_products(steps: Sequence[Step], results: Sequence[Any]) -> set[Any]:
    """Variables that something reads which is not elementwise, also by way of data movement."""
    needed = set(results)
    for step in reversed(steps):
        moves = step.eqn.primitive.name in CHEAP_MOVES and any(var in needed for var in step.eqn.outvars)
        if moves or not (_recomputable(step, 0) or step.eqn.primitive.name in LINEAR):
            needed.update(atom for atom in step.operands if not isinstance(atom, Literal))
    return needed


def _recomputable(step: Step, index: int) -> bool:
    """Whether a result is elementwise, or moved: cheap enough to be computed again."""
    name = step.eqn.primitive.name
    if name in _CHEAP:
        return True
    if name == "custom_jvp_call":
        return _is_elementwise(called_jaxpr(step.eqn.params))
    if name in CALLS and step.plans:
        (plan,) = step.plans
        result = open_jaxpr(plan.jaxpr).outvars[index]
        return isinstance(result, Literal) or result in kept(plan, results_too=False).loose
    return False


def tags_inside(step: Step) -> bool:
    """Whether a step keeps its results itself, where they are made."""
    name = step.eqn.primitive.name
    if name in OF_RESULT:
        return step.out_casts is None
    return step.emit is not None and name in CALLS | {"custom_jvp_call"}


def _computes(step: Step) -> bool:
    name = step.eqn.primitive.name
    return (name in PROMOTE and name not in COMPARISONS) or name == "custom_jvp_call" or name in CALLS


def _is_elementwise(jaxpr: Any) -> bool:
    """Whether a function with a rule of its own, such as relu or softplus, consists of cheap operations."""
    return all(
        eqn.primitive.name in _CHEAP
        or (eqn.primitive.name in CALLS | {"custom_jvp_call"} and all(map(_is_elementwise, inner_jaxprs(eqn))))
        for eqn in open_jaxpr(jaxpr).eqns
    )


def mask_is_kept(step: Step) -> bool:
    """Whether a step compares random numbers, as dropout does: a byte each is less than to draw them again."""
    drawn = any(flow is not None and flow.size > 1 and not flow.given for flow in step.ins)
    return drawn and step.eqn.primitive.name in COMPARISONS


def half_copy_is_kept(step: Step, index: int) -> bool:
    """Whether a result is float32 data that is not computed again, so that its cast is to be kept.

    Such are a `cumsum`, and random numbers. Otherwise `keep_half` would keep the float32 that the cast is made of, or
    draw again, for a reader that takes half.
    """
    flow = step.out[index]
    if flow is None or flow.dtype != FLOAT32:
        return False
    if not flow.given and flow.size > 1 and _draws(step.eqn):
        return True
    if flow.kind != Kind.ISLAND:
        return False
    if step.eqn.primitive.name not in CALLS:
        return step.eqn.primitive.name in FULL_REDUCTION
    if not step.plans:  # As traced, inside a nested `cast_fn`.
        return False
    (plan,) = step.plans
    result = open_jaxpr(plan.jaxpr).outvars[index]
    makers = ((inner, i) for inner in plan.steps for i, var in enumerate(inner.eqn.outvars) if var is result)
    return any(half_copy_is_kept(inner, i) for inner, i in makers)


def _draws(eqn: Any) -> bool:
    """Whether a call, such as that of `jax.random.normal`, draws random numbers."""
    return eqn.primitive.name == "random_bits" or any(
        _draws(inner) for jaxpr in inner_jaxprs(eqn) for inner in open_jaxpr(jaxpr).eqns
    )
