"""What `verify` found: errors of results and gradient, decisions, and the verdict in words."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jamp.inspect._error_sources import ErrorSource
from jamp.inspect._nonfinite import NonFinite
from jamp.inspect._sources_text import NOT_IN_FLOAT32, instead, number
from jamp.inspect._target import as_dict, heading
from jamp.policy import Policy

FLOAT32_ERROR = 1e-6  # Relative errors that float32 has by itself.


@dataclasses.dataclass(frozen=True)
class LeafError:
    """How far one array is from its float32 value.

    Attributes:
        path: Where it is: in the results, or the argument that it is the gradient of.
        gradient: Whether it is a gradient.
        error: Relative l2 error at the policy; NaN where no number is finite in float32.
        unavoidable: The same if the inputs and weights alone are rounded to half.
        nonfinite: Elements that are not finite at the policy, and are in float32; or NaN, and infinite in float32.
        share: Its l2 norm in float32, as a part of that of all results, or of the whole gradient.
    """

    path: str
    gradient: bool
    error: float
    unavoidable: float
    nonfinite: int
    share: float = 1.0

    @property
    def is_rounding(self) -> bool:
        """Whether it would be zero but for float32's roundings, as the gradient of a bias before a norm is."""
        return self.share < FLOAT32_ERROR and not self.nonfinite and not math.isnan(self.error)


@dataclasses.dataclass(frozen=True)
class Decision:
    """What half precision decides otherwise than float32.

    Attributes:
        operation: Name of the primitive: a comparison, `argmax`, `top_k`, `sort`, `cond`, or `while`.
        line: `file:line` of the user's code.
        differing: Elements that differ; of a `cond`, how often it took another branch; of a `while`, the iterations
            that it takes more (or fewer).
        size: Number of elements; of a `cond`, how often it ran, derivatives included; of a `while`, its iterations in
            float32.
    """

    operation: str
    line: str
    differing: int
    size: int


@dataclasses.dataclass(frozen=True)
class Verification:
    """A verdict. `bool(verification)` is `.ok`, and `str(verification)` is it in words.

    Attributes:
        policy: The policy; None if the function ran as it is written.
        inner: Policies of the `cast_fn`s inside.
        tolerance: Largest relative l2 error that is allowed; None for four times what rounding the inputs alone does,
            and of a few numbers at least what rounding them does.
        value: Relative l2 error of the floating results together, and what rounding the inputs alone does.
        gradient: The same of the gradient; None where there is none.
        leaves: The errors leaf by leaf.
        decisions: What was decided otherwise; comparisons, indices and loops.
        nonfinite: Where NaNs and infinities come from; None if there are none, or float32 has them too.
        sources: Where the error comes from, dearest first, if the verdict is bad.
        ok: The verdict.
        draws: How many times the function was run, with other random numbers each time.
        no_gradient: Why there is no gradient, so that the verdict is of the results alone; empty where there is one.
        skips_roundings: Whether the errors are those of the program as XLA compiles it here, with some roundings left
            out: they are where that is worse than the tolerance, and the program as it is written is not.
        comparable: Whether float32 has no NaN, and no infinities but those of a mask in the results. Of what has, there
            is nothing to say, and the verdict is bad.
    """

    policy: Policy | None
    inner: tuple[Policy, ...]
    tolerance: float | None
    value: tuple[float, float]
    gradient: tuple[float, float] | None
    leaves: tuple[LeafError, ...]
    decisions: tuple[Decision, ...]
    nonfinite: NonFinite | None
    sources: tuple[ErrorSource, ...]
    ok: bool
    draws: int = 1
    no_gradient: str = ""
    skips_roundings: bool = False
    comparable: bool = True

    def to_dict(self) -> dict[str, Any]:
        """The same in dictionaries, lists, strings and numbers, for JSON."""
        return as_dict(self)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        verdict = "as good as half precision can be" if self.tolerance is None else "within the tolerance"
        if not self.ok:
            verdict = "worse than half precision has to be" if self.tolerance is None else "beyond the tolerance"
        if any(leaf.nonfinite for leaf in self.leaves):
            verdict = "NaN or infinite"
        if not self.comparable:
            verdict = NOT_IN_FLOAT32
        lines = [f"{heading(self.policy, self.inner)}: {verdict}"]
        for name, found in (("results", self.value), ("gradient", self.gradient)):
            if found is not None:
                lines.append(f"  {name:<9} {number(found[0])}; rounding inputs and weights alone: {number(found[1])}")
        if self.gradient is None:
            lines.append(f"  gradient  none: {self.no_gradient}")
        worst = sorted((leaf for leaf in self.leaves if not leaf.is_rounding), key=_best_first, reverse=True)[:3]
        lines += [f"  worst     {leaf.path}{' (gradient)' if leaf.gradient else ''}: {number(leaf.error)}, "
                  f"inputs alone {number(leaf.unavoidable)}" for leaf in worst]  # fmt: skip
        lines += [
            f"  decided   {d.operation} {d.line}: {d.differing} of {d.size} otherwise" for d in self.decisions[:5]
        ]
        if self.nonfinite is not None:
            lines.append(f"  from      {self.nonfinite}")
        if self.skips_roundings:
            lines.append(
                "  compiled  with all roundings it is good, and XLA leaves out some here. Something is compared "
                "with itself, rounded and not: XLA_FLAGS=--xla_allow_excess_precision=false"
            )
        if entries := list(dict.fromkeys(s.entry for s in self.sources[:3] if s.entry)):
            tuned = "or let jamp.tune(fn, *args, tolerance=…) choose"
            lines.append(f"  write     policy.with_rules(full={entries}), {tuned}")
        lines += [f"  instead   {line}" for line in instead(self.sources[:3])]
        return "\n".join(lines)


def _best_first(leaf: LeafError) -> tuple[bool, float]:
    """An order of arrays, with those last of which there is nothing to compare."""
    return math.isnan(leaf.error), leaf.error
