"""Rules that are tried on a function: the error that is left, and the FLOPs that are float32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jamp.inspect._error_sources import ErrorSources, row_of, sources_of
from jamp.inspect._operations import Place, operations
from jamp.inspect._sources_text import NOT_IN_FLOAT32
from jamp.inspect._target import Target
from jamp.inspect._verify import are_comparable, relative
from jamp.inspect.roundings.narrowing import Narrowing
from jamp.inspect.roundings.program import check_has_results, compiled, value_and_gradient
from jamp.inspect.roundings.remedies import takes_rule
from jamp.inspect.roundings.sites import entry_for
from jamp.policy import Policy, get_policy


class Trials:
    """What lists of rules for float32 do. Each list is tried once.

    Args:
        target: The function.
        start: The policy that they are added to.
        tolerance: The relative error that is enough.
        told: Called after each trial with a line of text, and all errors so far.
    """

    def __init__(
        self, target: Target, start: Policy, tolerance: float, told: Callable[[str, list[float]], None]
    ) -> None:
        self._target, self._start, self._tolerance, self._told = target, start, tolerance, told
        self._exact = _results(target, get_policy("O0"))
        if not are_comparable(*self._exact):
            raise ValueError(f"`jamp.tune` has nothing to compare with: the function is {NOT_IN_FLOAT32}.")
        self._errors: dict[Policy, float] = {}
        self._dearest: dict[tuple[str, ...], list[str]] = {}
        self._flops: dict[tuple[str, ...], int] = {}
        self._narrowing: Narrowing | None = None

    def suffices(self, policy: Policy) -> bool:
        """Whether the error at a policy is within the tolerance."""
        return self._error_at(policy) <= self._tolerance

    def _error_at(self, policy: Policy) -> float:
        """The error of results and gradient, whichever is larger."""
        if policy not in self._errors:
            values = _results(self._target, policy)
            found = max(relative(*pair) for pair in zip(values, self._exact, strict=True) if pair[0])
            self._errors[policy] = found
            rules = len(policy.full) + len(policy.half) - len(self._start.full) - len(self._start.half)
            line = f"{rules} rules: relative error {found:.2e}, tolerance {self._tolerance:.2e}"
            self._told(line, [*self._errors.values()])
        return self._errors[policy]

    def error(self, entries: Sequence[str]) -> float:
        """The error of results and gradient with rules added, whichever is larger."""
        return self._error_at(self._ruled(entries))

    def enough(self, entries: Sequence[str]) -> bool:
        """Whether that is within the tolerance."""
        return self.suffices(self._ruled(entries))

    def dearest(self, entries: Sequence[str]) -> list[str]:
        """Rules that may help beside these, the dearest first."""
        key = tuple(entries)
        if key not in self._dearest:
            sources, roundings = sources_of(self._target._replace(policy=self._ruled(entries)))
            self._dearest[key] = _ranked(sources, entries)
            if not entries:
                self._narrowing = Narrowing(roundings, {row_of(op): op.entry for op in sources.operations})
        return self._dearest[key]

    def finer(self, entry: str, depth: int) -> list[str]:
        """Narrower rules for one, the dearest first; see `Narrowing`."""
        self.dearest(())
        found = self._narrowing.of(entry, depth) if self._narrowing else []
        return [e for e in found if takes_rule(self._start, e)]

    def flops(self, entries: Sequence[str]) -> int:
        """FLOPs of the products that are float32 with rules added."""
        key = tuple(sorted(entries))
        if key not in self._flops:
            plan = self._target._replace(policy=self._ruled(entries)).plan(self._target.program())[0]
            self._flops[key] = sum(op.flops for op in operations(plan, None) if op.inputs[:1] == ("float32",))
        return self._flops[key]

    def shortest(self, known: list[str], more: list[str]) -> list[str]:
        """What is known, and the shortest beginning of what may be added that is enough; all of it if nothing is."""
        low, high = 0, 1
        while high < len(more) and not self.enough(known + more[:high]):
            low, high = high, 2 * high
        high = min(high, len(more))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.enough(known + more[:middle]) else (middle, high)
        return known + more[:high]

    def pruned(self, entries: list[str]) -> list[str]:
        """The entries without those that are not needed, the most FLOPs first."""
        for entry in sorted(entries, key=lambda entry: -self.flops([entry])):
            fewer = [e for e in entries if e != entry]
            if fewer != entries and self.enough(fewer):
                entries = fewer
        return entries

    def _ruled(self, entries: Sequence[str]) -> Policy:
        return self._start.with_rules(full=tuple(entries))


def _results(target: Target, policy: Policy) -> tuple[list[Any], list[Any]]:
    """Floating results and gradients at a policy."""
    at = target._replace(policy=policy)
    program = value_and_gradient(at, at.program())
    check_has_results("tune", program)
    values = compiled(program)(program.inputs)
    count = len(program.outs)
    return jax.device_get(values[:count]), jax.device_get(values[count : count + len(program.grads)])


def _ranked(found: ErrorSources, known: Sequence[str]) -> list[str]:
    """Rules that may help, the dearest first. Last comes what moves nothing by itself: it may decide about a mask."""
    shares: defaultdict[str, float] = defaultdict(float)
    for op in found.operations:
        decides = not op.share or op.rule == "decided otherwise"
        entry = entry_for(Place(op.scope, op.line)) if decides else op.entry
        if entry and entry not in known and takes_rule(found.policy, entry):
            shares[entry] += op.share
    return sorted(shares, key=lambda entry: -shares[entry])
