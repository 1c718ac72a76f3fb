"""Operations of a plan, as a reader of a report sees them: where, in which dtypes, and why."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jamp._compat import Eqn, Literal, Var, inner_jaxprs, open_jaxpr, scope_path
from jamp._dtypes import E4M3, HALF_DTYPES, Pair
from jamp.inspect._as_traced import inner_plans
from jamp.inspect._endings import Endings
from jamp.inspect._flops import code_line, flops, is_cast, runs, scope_in
from jamp.transforms._labels import not_float8_label, rule_label
from jamp.transforms.keeping.kept import Keeping
from jamp.transforms.program.flow import Flow, num_elements
from jamp.transforms.program.plan import Plan, Step
from jamp.transforms.program.rewrites import Float8Product, Softmax
from jamp.transforms.program.setting import unscaled_dtype

# Equations with one jaxpr inside, which takes their operands.
CALLS = frozenset(
    """
    checkpoint closed_call core_call custom_jvp_call custom_vjp_call custom_vmap_call jit pjit remat2
    """.split()
)

# The planner's name for half because the level, a rule or a mark says so, whatever the level is.
_READ_AS = {"O3": "half"}


@dataclasses.dataclass(frozen=True)
class Operation:
    """Equations of the forward pass that are alike: same place, primitive, dtypes and rule.

    Attributes:
        scope: Path of named scopes, such as `Model/Block_0/LayerNorm_0`; empty where the model names none.
        line: `file:line` of the user's code that they come from.
        function: Name of the function there.
        primitive: Name of the JAX primitive.
        inputs: Dtype names of the operands, as the primitive takes them.
        outputs: Dtype names of the results, as they are carried on.
        rule: What decided: `"half"`, `"full"`, `"promote"`, `"follow"`, `"explicit"` (the program's own conversion),
            `"opaque"` and so on; the page on the report has them all.
        not_float8: Why a product stays out of float8, in words, at policies that have products there.
        count: Number of such equations in the program; one in a loop body counts once.
        casts: Conversions between float32 and half in front of and behind them.
        shared: Conversions that they would need if others had not made the same ones before.
        flops: FLOPs of all of them, with the iterations of scans; zero but for matrix products and convolutions.
        bytes: Size of the results, with the iterations of scans.
    """

    scope: str
    line: str
    function: str
    primitive: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rule: str
    not_float8: str = ""
    count: int = 1
    casts: int = 0
    shared: int = 0
    flops: int = 0
    bytes: int = 0


def operations(plan: Plan, output_dtype: np.dtype | None) -> tuple[Operation, ...]:
    """All operations of a plan and of the plans inside of it, alike ones as one, in the order in which they run."""
    groups: dict[Operation, list[Operation]] = defaultdict(list)
    endings = Endings(plan.pair)
    for operation in [*_walk(plan, Place(), endings), *_result_casts(plan, output_dtype)]:
        groups[dataclasses.replace(operation, casts=0, shared=0, flops=0, bytes=0)].append(operation)
    return tuple(summed(alike) for alike in groups.values())


def _result_casts(plan: Plan, output_dtype: np.dtype | None) -> Iterator[Operation]:
    """Results go back to the dtype that they were traced in, and from there to the output dtype, if there is one."""
    for atom, flow in zip(open_jaxpr(plan.jaxpr).outvars, plan.outs, strict=True):
        if flow is not None:
            traced = atom.aval.dtype
            for before, after in ((flow.dtype, traced), (traced, output_dtype or traced)):
                if plan.pair.is_cast(before, after):
                    size = num_elements(atom.aval) * after.itemsize
                    names = (str(before),), (str(after),)
                    yield Operation("", "?", "?", "convert_element_type", *names, "result", casts=1, bytes=size)


def operation_name(eqn: Eqn) -> str:
    """The name of the primitive of an equation; of what jamp emits with rules of its own, that of its product."""
    if eqn.primitive.name != "jamp_ruled":
        return eqn.primitive.name
    inside = [each.primitive.name for jaxpr in inner_jaxprs(eqn) for each in open_jaxpr(jaxpr).eqns if flops(each)]
    # Of blocks it is a primitive of jamp's own.
    return eqn.primitive.name if not inside else "dot_general" if inside[0].startswith("jamp_") else inside[0]


def summed(alike: list[Operation]) -> Operation:
    """One operation for several, with their counts, casts, FLOPs and bytes added up."""
    added = ("count", "casts", "shared", "flops", "bytes")
    totals = {name: sum(getattr(op, name) for op in alike) for name in added}
    return dataclasses.replace(alike[0], **totals)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a plan is: scope, line, function and labels of the equation that it is in, and how often it runs."""

    scope: str = ""
    line: str = "?"
    function: str = "?"
    times: int = 1
    label: str = ""
    not_float8: str = ""

    def enter(self, eqn: Any) -> Place:
        """The place of an equation of the plan."""
        line, function = code_line(eqn)
        if line == "?":
            line, function = self.line, self.function
        path = scope_path(eqn)
        labels = (rule_label(path), not_float8_label(path)) if rule_label(path) else (self.label, self.not_float8)
        return Place(scope_in(self.scope, eqn), line, function, self.times, *labels)


def _walk(plan: Plan, outer: Place, endings: Endings) -> Iterator[Operation]:
    keep = Keeping().of(plan, results_too=False).values
    seen: set[tuple[Any, Any]] = set()  # One cast a value and dtype: the second reader is given the first one's.
    for step in plan.steps:
        place = outer.enter(step.eqn)
        casts, shared = _casts(step, plan.pair, seen, keep)
        inside = inner_plans(step)
        ends = endings.rule(step)
        if casts or shared or ends or not inside or step.rule == "opaque":
            yield _operation(step, place, casts, shared, ends)
        if step.eqn.primitive.name == "cond":
            yield from _branches([list(_walk(branch, place, endings)) for branch in inside])
        else:
            inner_place = dataclasses.replace(place, times=place.times * runs(step.eqn))
            for inner in inside:
                yield from _walk(inner, inner_place, endings)


def _branches(branches: list[list[Operation]]) -> Iterator[Operation]:
    """All branches, but FLOPs of the most expensive one alone: only one of them runs."""
    dearest = max(branches, key=lambda found: sum(op.flops for op in found))
    for branch in branches:
        yield from branch if branch is dearest else (dataclasses.replace(op, flops=0) for op in branch)


def _operation(step: Step, place: Place, casts: int, shared: int, ends: str) -> Operation:
    eqn = step.eqn
    carried = [_dtype(atom, flow) for atom, flow in zip(step.operands, step.ins, strict=True)]
    inputs = tuple(_name(cast.dtype if cast else dtype) for cast, dtype in zip(step.casts, carried, strict=True))
    if isinstance(step.rewrite, Float8Product):
        inputs = (E4M3.name,) * 2 + inputs[2:]
    results = [_dtype(var, flow) for var, flow in zip(eqn.outvars, step.out, strict=True)]
    size = sum(num_elements(var.aval) * _itemsize(dtype) for var, dtype in zip(eqn.outvars, results, strict=True))
    # What a `cast_fn` inside emitted is planned no more, and labelled; so are the casts around its products.
    rule = ends or place.label or step.rule
    count = flops(eqn)
    not_float8 = step.not_float8 or (place.not_float8 if count else "")
    return Operation(
        place.scope, place.line, place.function, operation_name(eqn), inputs, tuple(map(_name, results)),
        _READ_AS.get(rule, rule), not_float8, casts=casts, shared=shared,
        flops=place.times * count, bytes=place.times * size,
    )  # fmt: skip


def _casts(step: Step, pair: Pair, seen: set[tuple[Any, Any]], keep: Set[Var]) -> tuple[int, int]:
    """Conversions that a step adds, or is, between two precisions, and those that it is given instead.

    Those of literals are made while tracing.
    """
    wanted = [
        (atom, cast.dtype)
        for atom, cast, flow in zip(step.operands, step.casts, step.ins, strict=True)
        if cast is not None and flow is not None and not isinstance(atom, Literal)
        if pair.is_cast(flow.dtype, cast.dtype)
    ]
    new = set(wanted) - seen
    seen |= new
    if step.rule == "explicit" and step.ins[0] is not None:
        seen.add((step.eqn.outvars[0], step.ins[0].dtype))
    after = sum(cast is not None for cast in step.out_casts)
    if_kept = [index for index in step.exact_if_kept if step.eqn.outvars[index] in keep]
    after += 2 * len({*step.exact, *if_kept})  # To float32, where they are rounded, and back.
    if isinstance(step.rewrite, Float8Product):
        after += _casts_of_float8(step, step.rewrite, seen)
    for inner in step.plans:  # Branches and loop bodies hand their results over in the dtypes of the equation's.
        pairs = zip(inner.outs, step.out, strict=False)
        after += sum(a is not None and b is not None and pair.is_cast(a.dtype, b.dtype) for a, b in pairs)
    itself = isinstance(step.rewrite, Softmax) or (
        step.rule == "as traced" and is_cast(step.eqn, pair)
    )  # Softmax rounds its result.
    return len(new) + after + itself, len(wanted) - len(new)


def _casts_of_float8(step: Step, rewrite: Float8Product, seen: set[tuple[Any, Any]]) -> int:
    """Conversions of half operands on their way to 8 bits, once for all readers, and of the result to half."""
    found = set()
    for atom, cast, flow, scaling in zip(step.operands, step.casts, step.ins, rewrite.scalings, strict=False):
        if flow is not None and (cast.dtype if cast else flow.dtype) in HALF_DTYPES:
            found.add((atom, scaling))
    new = found - seen
    seen |= new
    return len(new) + (rewrite.out != unscaled_dtype(rewrite.out))


def _dtype(atom: Any, flow: Flow | None) -> Any:
    return flow.dtype if flow is not None else getattr(atom.aval, "dtype", None)


def _name(dtype: Any) -> str:
    return "none" if dtype is None else str(dtype)


def _itemsize(dtype: Any) -> int:
    return 0 if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended) else dtype.itemsize


def opaque_names(found: Iterable[Operation]) -> tuple[str, ...]:
    """Primitives that ran as traced because the interpreter does not know them."""
    return tuple(sorted({op.primitive for op in found if op.rule == "opaque"}))
