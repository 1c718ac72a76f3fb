"""The planner: decides, before anything runs, in which dtype every equation of a jaxpr takes and gives its values.

Planning is abstract (no arrays, no tracers), so that loop carries can be iterated to a fixpoint, sub-jaxprs that
repeat are planned once, and a report costs nothing. `emission` then emits what the plan says.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Container, Hashable, Sequence
from typing import Any

import jax.core
import numpy as np

from jamp._compat import (
    Atom,
    Aval,
    ClosedJaxpr,
    Eqn,
    Jaxpr,
    Literal,
    Var,
    configured_precision,
    jaxpr_consts,
    open_jaxpr,
)  # fmt: skip
from jamp._dtypes import E4M3, E5M2
from jamp._primitives import Rule, Trait, acts, has, rule_of
from jamp.policy import Policy
from jamp.transforms.analysis.attention.outside import Outside
from jamp.transforms.analysis.demand import Demand
from jamp.transforms.analysis.loops.recurrences import Recurrences, Sums
from jamp.transforms.analysis.patterns import Match, Pattern, attention_finder
from jamp.transforms.analysis.products.matrices import at_hand
from jamp.transforms.analysis.reading.numbers import matter, of_literal
from jamp.transforms.analysis.regimes import CONVERGES, Regime, Regimes, Ruled
from jamp.transforms.analysis.samples import Samples
from jamp.transforms.planning import calls, elementwise, loops, moves, operations, products, scales
from jamp.transforms.planning.compared import with_exact_values
from jamp.transforms.planning.context import Context, constants_of, states_of
from jamp.transforms.planning.reads import Reads
from jamp.transforms.planning.replanning import Options, Replanning
from jamp.transforms.planning.rewrites import REGISTRY, Declined, Registry, with_exact_scales
from jamp.transforms.planning.site import Site
from jamp.transforms.planning.traffic import with_half_traffic
from jamp.transforms.program.flow import Flow, Flows, beyond_half, literal_flow, num_elements, traced_flow
from jamp.transforms.program.heuristics import DEFAULT, Heuristics
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import NO_MARKS, Mark
from jamp.transforms.program.plan import Plan, Step
from jamp.transforms.program.rewrites import CustomTranspose
from jamp.transforms.program.scale import Range
from jamp.transforms.program.setting import EightBits, Setting
from jamp.transforms.program.want import Wants

BY_RULE: dict[Rule, Callable[[Site], Step]] = {
    Rule.HALF: products.plan_half,
    Rule.FULL: operations.plan_full,
    Rule.NO_HALF: operations.plan_no_half,
    Rule.PROMOTE: elementwise.plan_promote,
    Rule.FOLLOW: moves.plan_follow,
    Rule.TRACED: operations.plan_known_traced,
    Rule.OPAQUE: operations.plan_opaque,
}
_BY_NAME: dict[str, Callable[[Site], Step]] = {
    **dict.fromkeys(("closed_call", "composite", "core_call", "jit", "pjit"), calls.plan_call),
    "custom_vmap_call": calls.plan_custom_batching,
    "remat_opt": calls.plan_optimized_remat,
    **dict.fromkeys(("checkpoint", "remat2"), calls.plan_remat),
    **dict.fromkeys(("custom_jvp_call", "custom_vjp_call"), calls.plan_custom_rule),
    "cond": calls.plan_cond,
    "scan": loops.plan_scan,
    "shard_map": calls.plan_shard_map,
    "while": loops.plan_while,
}


class Planner:
    """Plans jaxprs under one policy. Lives for one call of a transformed function; so does what it remembers."""

    def __init__(
        self,
        policy: Policy,
        base: Regime | None = None,
        heuristics: Heuristics = DEFAULT,
        registry: Registry = REGISTRY,
        program: ClosedJaxpr | None = None,
        captured: frozenset[Var] = frozenset(),
    ) -> None:
        self._options = Options(policy, base, heuristics, tuple(registry.items()), captured, configured_precision())
        self.captured = captured
        self.setting = Setting(policy.pair, heuristics, eight_bits(policy), policy.reduce == str(policy.pair.wide))
        self.regimes = Regimes(policy, base)
        self.scope_matters = self.regimes.scope_matters
        if policy.attention != "fused":
            registry = {pattern: entry for pattern, entry in registry.items() if pattern is not Pattern.ATTENTION}
        finders = {pattern: entry.find for pattern, entry in registry.items()}
        if program is not None and Pattern.ATTENTION in finders:
            finders[Pattern.ATTENTION] = attention_finder(Outside(program).known)
        self.demand = Demand(self.regimes, policy.pair, heuristics, list(finders.values()))
        self._registry = registry
        self.samples: Container[Atom] = () if program is None else Samples(program)
        self._arrays: dict[Atom, object] = {}  # What the program closes over.
        self._magnitudes: dict[Atom, float] = {}
        self.precision = self._options.precision
        self.reads = Reads()
        self.in_eight_bits = self.regimes.in_eight_bits
        self._recurrences = Recurrences()
        # Each reads a jaxpr alone, which is planned until its carries settle.
        self._shared = functools.cache(_shared)
        self.takes_gradients = functools.cache(loops.takes_gradients)
        self._plans: dict[Hashable, Plan] = {}
        self._matter: dict[Hashable, bool] = {}
        self._replans: dict[Context, Replanning] = {}

    @classmethod
    def of(cls, options: Options) -> Planner:
        """A planner of what a program's planner was made with, without the program."""
        policy, base, heuristics, registry, captured, precision = options
        planner = cls(policy, base, heuristics, dict(registry), captured=captured)
        planner.precision = precision
        return planner

    @property
    def base(self) -> Context:
        """The context of the outermost jaxpr."""
        return Context(self.regimes.base)

    def plan(
        self, jaxpr: ClosedJaxpr, ins: Flows, wants: Wants, context: Context, numbers: tuple[Range | None, ...] = ()
    ) -> Plan:
        """Plans a jaxpr whose inputs arrive as `ins` and whose readers want full precision where `wants` says so.

        Of inputs without a state `numbers` are those that are known, if any is.
        """
        if not self.in_eight_bits:  # Nobody asks what is stored, and blocks that repeat have one plan.
            ins = tuple(flow and flow.without(Mark.STORED | Mark.REPEATED) for flow in ins)
        if self.setting.pair.lacks_range and (numbers or any(flow and flow.number for flow in ins)):
            ins, numbers = self._that_matter(jaxpr, ins, numbers)
        key = (id(jaxpr), ins, wants, context if self.scope_matters else context._replace(scope=""), numbers)
        if key not in self._plans:
            self._plans[key] = self._plan(jaxpr, ins, wants, context, numbers)
        return self._plans[key]

    def _that_matter(
        self, jaxpr: ClosedJaxpr, ins: Flows, numbers: tuple[Range | None, ...]
    ) -> tuple[Flows, tuple[Range | None, ...]]:
        """States and numbers without those that change no plan."""
        known = tuple(flow.number if flow else n for flow, n in itertools.zip_longest(ins, numbers))
        key = (id(jaxpr), known)
        if key not in self._matter:
            self._matter[key] = matter(jaxpr, known, self.setting.pair)
        if self._matter[key]:
            return ins, numbers
        return tuple(flow and (flow if flow.scale else flow._replace(number=None)) for flow in ins), ()

    def replan(self, context: Context) -> Replanning:
        """What plans jaxprs in a context when the program is emitted."""
        if context not in self._replans:
            self._replans[context] = Replanning(self._options, context, Planner.of)
        return self._replans[context]

    def _plan(
        self, jaxpr: ClosedJaxpr, ins: Flows, wants: Wants, context: Context, known: tuple[Range | None, ...]
    ) -> Plan:
        inner, consts = open_jaxpr(jaxpr), jaxpr_consts(jaxpr)
        regime, states = context.regime, states_of(ins, context.regime)
        demand = self.demand(jaxpr, wants, regime, context.scope, constants_of(ins), states)
        env: dict[Var, Flow | None] = dict(zip(inner.invars, ins, strict=True))
        numbers = {var: number for var, number in zip(inner.invars, known, strict=False) if number}
        for var, value in zip(inner.constvars, consts, strict=True):
            env[var] = self._constant(var, value)
            if env[var] is None and self.setting.pair.lacks_range and (number := of_literal(value)):
                numbers[var] = number
        sums: Sums = self._recurrences.sums(inner) if context.regime.recurrences else {}
        made_by: dict[Var, Step] = {}
        site_of = functools.partial(
            Site,
            planner=self,
            made_by=made_by,
            sums=sums,
            around=context,
            states=env,
            numbers=numbers,
            shared=self._shared(inner),
        )
        steps = []
        for eqn in inner.eqns:
            if not demand.is_live(eqn):
                continue
            operands = tuple([self._read(atom, env) for atom in eqn.invars])
            ruled, match = demand.ruled[id(eqn)], demand.matches.get(id(eqn))
            step = self._plan_equation(eqn, operands, demand.of_results(eqn), ruled, match, site_of, context)
            steps.append(step)
            for var, flow in zip(eqn.outvars, step.out, strict=True):
                env[var] = flow
                made_by[var] = step
        outs = tuple(self._read(atom, env) for atom in inner.outvars)
        plan = Plan(jaxpr, consts, _pruned(steps, inner.outvars), ins, outs, self.setting)
        return with_exact_values(with_half_traffic(plan))

    def _constant(self, var: Var, value: Any) -> Flow | None:
        """State of what a jaxpr closes over. Numbers are known while tracing; arrays may be weights."""
        pair = self.setting.pair
        if isinstance(value, jax.core.Tracer):
            return traced_flow(var.aval, Kind.LAZY if num_elements(var.aval) > 1 else Kind.WEAK, pair)
        if num_elements(var.aval) > 1 or not pair.flows(var.aval) or not getattr(value, "is_fully_addressable", True):
            of_matrix = Mark.SIGNED if var in self.demand.facts.differences else NO_MARKS
            of_matrix |= Mark.FRAME if var in self.demand.facts.diagonals else NO_MARKS
            self._arrays[var] = value
            flow = traced_flow(var.aval, Kind.LAZY, pair, marks=Mark.GIVEN | Mark.FRACTION | Mark.STORED | of_matrix)
            return flow and beyond_half(flow, at_hand(value), pair) if pair.lacks_range else flow
        return self._number(var.aval, np.asarray(value))

    def magnitude(self, atom: Atom) -> float:
        """How large half of the elements of an array are that the program has at hand; zero for what it has not."""
        if atom not in self._magnitudes:
            array = at_hand(self._arrays[atom]) if atom in self._arrays and self.setting.pair.flows(atom.aval) else None
            self._magnitudes[atom] = float(np.median(np.abs(array))) if array is not None and array.size else 0.0
        return self._magnitudes[atom]

    def _number(self, aval: Aval, value: object) -> Flow | None:
        return literal_flow(aval, value, Kind.WEAK, self.setting.pair, self.setting.heuristics.far)

    def _read(self, atom: Atom, env: dict[Var, Flow | None]) -> Flow | None:
        if isinstance(atom, Literal):
            return self._number(atom.aval, atom.val)
        return env[atom]

    def _plan_equation(
        self,
        eqn: Eqn,
        ins: Flows,
        wants: Wants,
        ruled: Ruled,
        match: Match | None,
        site_of: Callable[..., Site],
        context: Context,
    ) -> Step:
        regime = ruled.regime
        rule = Rule.PROMOTE if ruled.promotes else rule_of(eqn)
        decides = regime.delicate and rule is not Rule.RECURSE and any(want.decides for want in wants)
        if decides and not regime.all_full:
            regime = CONVERGES
        here = context if regime is context.regime else context._replace(regime=regime)
        site = site_of(eqn=eqn, ins=ins, wants=wants, context=here, here=ruled.scope)
        pair = self.setting.pair
        if pair.lacks_range and not all(pair.flows(var.aval) for var in eqn.outvars):
            site.numbers.update((var, found) for var, found in zip(eqn.outvars, site.ranges, strict=True) if found)
        # Inside a nested `cast_fn`, whose policy has been applied while tracing.
        if regime.untouched and not site.captures:
            return site.inheriting(products.at_configured_precision(site, operations.plan_known_traced(site)))
        if rule is Rule.RECURSE:
            return _capturing(site, _BY_NAME[site.name](site))
        if not any(ins) and not any(pair.flows(var.aval) for var in (*eqn.invars, *eqn.outvars)):
            return operations.plan_untouched(site)
        step = self._registry[match.pattern].answer(site, match) if match is not None else None
        declined = step.reason if isinstance(step, Declined) else ""
        if step is None or isinstance(step, Declined):
            step = products.at_configured_precision(site, with_exact_scales(site, BY_RULE[rule](site)))
            step = products.with_wide_gradients(site, step)
        step = _capturing(site, scales.with_scale(site, site.inheriting(step)))
        if not self.demand.facts.diagonals.isdisjoint(eqn.outvars):
            out = tuple(flow and flow._replace(marks=flow.marks | Mark.FRAME) for flow in step.out)
            step = dataclasses.replace(step, out=out)
        return dataclasses.replace(step, declined=declined) if declined else step


def _shared(jaxpr: Jaxpr) -> set[Var]:
    """What is read more than once, by equations or as a result."""
    seen, shared = set[Var](), set[Var]()
    for atoms in (*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars):
        for atom in atoms:
            if not isinstance(atom, Literal):
                (shared if atom in seen else seen).add(atom)
    return shared


def _capturing(site: Site, step: Step) -> Step:
    """The step with what the rules of its equation close over."""
    if not site.planner.captured or not site.captures:
        return step
    transposes = has(site.eqn, Trait.CUSTOM_TRANSPOSE)
    rewrite = CustomTranspose() if transposes else step.rewrite
    return dataclasses.replace(step, captures=site.captures, rewrite=rewrite)


def eight_bits(policy: Policy) -> EightBits:
    """How a policy has products in 8 bits made."""
    scales = "block" if policy.matmul == "mxfp8" else policy.float8_scales or "tensor"
    return EightBits(scales, E5M2 if policy.grad_dtype == "e5m2" else E4M3, policy.weight_grad == "half")


def _pruned(steps: Sequence[Step], outvars: Sequence[Atom]) -> tuple[Step, ...]:
    """The steps without those that only fed an operation which is emitted as something else, such as softmax."""
    live = {atom for atom in outvars if not isinstance(atom, Literal)}
    kept = []
    for step in reversed(steps):
        if not live.isdisjoint(step.eqn.outvars) or acts(step.eqn):
            kept.append(step)
            live.update(atom for atom in step.operands if not isinstance(atom, Literal))
    return tuple(kept[::-1])
