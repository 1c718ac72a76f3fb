"""The attentions of a plan, for the report: which are fused, and why the others are not."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from jamp.inspect._as_traced import inner_plans
from jamp.inspect._operations import Place
from jamp.transforms.program.attention import KERNELS, refusals
from jamp.transforms.program.plan import Plan
from jamp.transforms.program.rewrites import FusedAttention


@dataclasses.dataclass(frozen=True)
class FoundAttention:
    """Attentions of the program that are alike.

    Attributes:
        scope: Path of named scopes; empty where the model names none.
        line: `file:line` of the user's code where the last product is.
        function: Name of the function there.
        kernels: By platform, the kernel that it is fused to; empty where it stays as written.
        reasons: By platform, why it is not; by `""` where that has nothing to do with platforms.
        count: Number of them in the program; one in a loop body counts once.
    """

    scope: str
    line: str
    function: str
    kernels: Mapping[str, str]
    reasons: Mapping[str, str]
    count: int = 1

    @property
    def fused(self) -> bool:
        """Whether it is fused on some platform."""
        return bool(self.kernels)


def attentions(plan: Plan) -> tuple[FoundAttention, ...]:
    """All attentions of a plan and of the plans inside of it, alike ones as one."""
    alike: list[FoundAttention] = []
    for found in _walk(plan, Place()):
        places = [i for i, other in enumerate(alike) if dataclasses.replace(other, count=found.count) == found]
        if places:
            alike[places[0]] = dataclasses.replace(found, count=alike[places[0]].count + 1)
        else:
            alike.append(found)
    return tuple(alike)


def _walk(plan: Plan, outer: Place) -> Iterator[FoundAttention]:
    for step in plan.steps:
        place = outer.enter(step.eqn)
        if isinstance(step.rewrite, FusedAttention):
            refused = refusals(step.rewrite.attention)
            kernels = {name: kernel.name for name, kernel in KERNELS.items() if name not in refused}
            yield FoundAttention(place.scope, place.line, place.function, kernels, refused)
            continue
        if step.declined:
            yield FoundAttention(place.scope, place.line, place.function, {}, {"": step.declined})
        for inner in inner_plans(step):
            yield from _walk(inner, place)


def summaries(found: Iterable[FoundAttention]) -> list[str]:
    """A line for each way in which attentions are fused, or are not."""
    counts: Counter[str] = Counter()
    for each in found:
        counts[_summary(each)] += each.count
    return [f"{count} {summary}" for summary, count in counts.items()]


def _summary(found: FoundAttention) -> str:
    reasons = [f"{platform}: {reason}" if platform else reason for platform, reason in found.reasons.items()]
    if not found.fused:
        return f"as written: {'; '.join(reasons)}"
    return "; ".join([f"fused: {_kernels(found)}", *reasons])


def offers(found: Iterable[FoundAttention]) -> list[str]:
    """A line for each set of kernels that attentions could be fused to."""
    counts: Counter[str] = Counter()
    for each in found:
        counts[_kernels(each)] += each.count
    return [f"{count}, at attention=fused {kernels}" for kernels, count in counts.items()]


def _kernels(found: FoundAttention) -> str:
    return ", ".join(f"{kernel} ({platform})" for platform, kernel in found.kernels.items())
