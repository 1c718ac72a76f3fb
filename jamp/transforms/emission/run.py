"""How plans are emitted, and what was built already while one is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax import Array

from jamp._compat import Var, traced_variable
from jamp.transforms.emission.casts import cast
from jamp.transforms.emission.environment import Env
from jamp.transforms.emission.known_rules import KnownRules
from jamp.transforms.emission.written_rules import kept_by_rules
from jamp.transforms.keeping.kept import Keeping
from jamp.transforms.program.plan import Cast, Plan, Step
from jamp.transforms.program.signature import Signatures

Probe = Callable[[Step, list[Array], list[Array], list[Array]], None]


class Memo:
    """What was built while a program is emitted, so that a sub-jaxpr that repeats with the same dtypes is built once.

    It lives for one call of the transformed function.

    Args:
        rules: The rules that are known; of what JAX may remember, those of the program around it.
    """

    def __init__(self, rules: KnownRules | None = None) -> None:
        self.keeping = Keeping()
        self.rules = rules or KnownRules()
        self.signatures = Signatures()
        self.built: dict[Any, Any] = {}
        self.outermost: Env | None = None

    def kept_by_rules(self, plan: Plan) -> frozenset[Var]:
        """Results of a plan's steps whose half copies can be made again, for a rule keeps them in float32."""
        key = kept_by_rules, plan
        if key not in self.built:
            self.built[key] = kept_by_rules(plan)
        return self.built[key]

    def enter(self, plan: Plan, env: Env) -> None:
        """Remembers the values of the outermost plan, where rules close over some of them."""
        if self.outermost is None and plan.captures:
            self.outermost = env

    def constant(self, value: Any) -> Any:
        """What a jaxpr closes over; in place of a tracer of the program, its value, in the dtype of the trace."""
        var = traced_variable(value)
        if self.outermost is None or var is None or not self.outermost.has(var):
            return value
        found = self.outermost.read(var)
        return found if found.dtype == var.aval.dtype else cast(found, Cast(var.aval.dtype))


class Run(NamedTuple):
    """How plans are emitted.

    Attributes:
        emit: Emits the rewrite of a step. (Rewrites with plans inside execute these in turn.)
        memo: What was built already.
        keep_half: Whether to tell reverse mode what to keep (not where an enclosing checkpoint already does).
        in_loop: Whether the emission is inside a loop body, where XLA cannot merge recomputation with the original.
        asked: The policy of the user's checkpoint around it.
        keep_results: Whether the results of the plan are to be kept for the backward pass, as what a loop stacks is.
        entered: How many of the outermost scopes of the steps are entered already.
        remember: Whether to find what is made of the jaxprs inside of steps, such as loops, where it was made before.
            What is emitted under a checkpoint is found as a whole.
        probe: Called after each step of the outermost plan with the step, its operands as they were carried, the
            same as they were cast, and its results.
    """

    emit: Callable[[Step, Sequence[Array], Run], list[Array]]
    memo: Memo
    keep_half: bool = False
    in_loop: bool = False
    asked: Callable[..., object] | None = None
    keep_results: bool = False
    entered: int = 0
    remember: bool = False
    probe: Probe | None = None
