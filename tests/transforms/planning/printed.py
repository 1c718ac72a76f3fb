"""Plans as text, to be read and to be compared."""

from collections.abc import Iterator

from jamp._compat import Literal
from jamp.transforms.program.flow import Flow
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.plan import Cast, Inside, Plan, Step

_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64"}
_SAME = {"pjit": "jit"}  # Names that differ between the supported versions of JAX.


def printed(plan: Plan) -> str:
    """A plan, one line a step: `primitive: operands -> results  # rule, rewrite`, with inner plans indented.

    An operand is its kind and dtype, followed by the dtype it is cast to; literals are left out, and `-` is what does
    not flow.
    """
    return "\n".join(_lines(plan, "")) + "\n"


def _lines(plan: Plan, indent: str) -> Iterator[str]:
    yield f"{indent}in   {_states(plan.ins)}"
    for step in plan.steps:
        rewrite = f", {type(step.rewrite).__name__}" if step.rewrite else ""
        as_traced = " as traced" if isinstance(step.rewrite, Inside) and step.rewrite.as_traced else ""
        name = step.eqn.primitive.name
        moved = f"{_SAME.get(name, name)}: {_operands(step)} -> {_results(step)}"
        yield f"{indent}{moved}  # {step.rule}{rewrite}{as_traced}"
        for inner in step.plans:
            yield from _lines(inner, indent + "    ")
    yield f"{indent}out  {_states(plan.outs)}"


def _state(flow: Flow | None) -> str:
    return "-" if flow is None else f"{Kind(flow.kind).name.lower()} {_SHORT[flow.dtype.name]}"


def _states(flows: tuple[Flow | None, ...]) -> str:
    return ", ".join(map(_state, flows))


def _cast(cast: Cast | None) -> str:
    return "" if cast is None else f" to {_SHORT[cast.dtype.name]}{' saturating' if cast.saturate else ''}"


def _operands(step: Step) -> str:
    operands = zip(step.operands, step.ins, step.casts, strict=True)
    return ", ".join(_state(flow) + _cast(cast) for atom, flow, cast in operands if not isinstance(atom, Literal))


def _results(step: Step) -> str:
    casts = step.out_casts or (None,) * len(step.out)
    return ", ".join(_state(flow) + (" rounded" if cast else "") for flow, cast in zip(step.out, casts, strict=True))
