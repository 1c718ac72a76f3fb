"""What is decided about one operation alone, from the states of its operands."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

import jamp
from jamp._dtypes import BFLOAT16, FLOAT16, FLOAT32
from jamp._primitives import NO_TRAITS, rule_of
from jamp.transforms.analysis.loops.recurrences import Sums
from jamp.transforms.analysis.regimes import REGIMES
from jamp.transforms.planning.context import Context
from jamp.transforms.planning.planner import BY_RULE, Planner
from jamp.transforms.planning.scales import with_scale
from jamp.transforms.planning.site import Site
from jamp.transforms.program.flow import Flow, Flows, Root
from jamp.transforms.program.kind import Kind
from jamp.transforms.program.marks import Mark
from jamp.transforms.program.plan import Step
from jamp.transforms.program.want import Want

X = jnp.ones((4, 16))

DATA = Mark.GIVEN | Mark.TRAINED | Mark.FRACTION
STATES = {
    "none": None,  # Integers.
    "weak": Flow(FLOAT32, Kind.WEAK, 1),
    "huge": Flow(FLOAT32, Kind.WEAK, 1, marks=Mark.HUGE, scale=20),
    "digits": Flow(FLOAT32, Kind.WEAK, 1, marks=Mark.ROUNDS | Mark.FRACTION),
    "lazy": Flow(FLOAT32, Kind.LAZY, 64, marks=DATA),
    "scalar": Flow(FLOAT32, Kind.LAZY, 1, marks=DATA | Mark.ROUNDS),
    "constant": Flow(FLOAT32, Kind.LAZY, 64, marks=Mark.GIVEN | Mark.FRACTION),
    "position": Flow(FLOAT32, Kind.LAZY, 64),
    "half": Flow(FLOAT16, Kind.HALF, 64, marks=DATA),
    "small": Flow(FLOAT16, Kind.HALF, 4, marks=DATA),
    "other": Flow(BFLOAT16, Kind.HALF, 64, marks=DATA),
    "island": Flow(FLOAT32, Kind.ISLAND, 64, marks=DATA | Mark.HUGE),
    "left": Flow(FLOAT32, Kind.ISLAND, 64, "block", marks=DATA),
    "scaled": Flow(FLOAT32, Kind.ISLAND, 64, marks=DATA, scale=-20),
    "quotient": Flow(FLOAT32, Kind.ISLAND, 64, marks=DATA | Mark.QUOTIENT),
    "tangent": Flow(FLOAT32, Kind.ISLAND, 64, marks=DATA | Mark.TANGENT | Mark.HUGE),
    "stat": Flow(FLOAT32, Kind.STAT, 4, marks=DATA),
    "big stat": Flow(FLOAT32, Kind.STAT, 64, marks=DATA),
    "sum": Flow(FLOAT32, Kind.FULL, 64, marks=DATA, roots=frozenset({Root("carry", 1)})),
}


def equation(fn: Callable[..., Any], *args: Any) -> Any:
    """The last equation of a program: the operation itself."""
    return jax.make_jaxpr(fn)(*args).jaxpr.eqns[-1]


def decide(eqn: Any, ins: Flows, level: str = "O2", want: Want = Want.HALF, sums: Sums | None = None) -> Step:
    """What is decided about one operation alone, by the planner of its rule."""
    site = site_of(eqn, ins, level, want, sums)
    return with_scale(site, BY_RULE[rule_of(eqn)](site))


@functools.cache
def _planner() -> Planner:
    return Planner(jamp.get_policy("O2:float16"))


def site_of(eqn: Any, ins: Flows, level: str = "O2", want: Want = Want.HALF, sums: Sums | None = None) -> Site:
    """An operation alone, with states of its operands."""
    wants = (want,) * len(eqn.outvars)
    context = Context(REGIMES[level])
    ins = (*ins, *(None for _ in eqn.invars[len(ins) :]))  # Indices have no state.
    nothing = {"states": {}, "numbers": {}, "shared": set()}
    return Site(_planner(), eqn, ins, wants, context, "", {}, sums or {}, around=context, **nothing)


def own_primitive(name: str, rule: str, result: Callable[..., Any], traits: int = NO_TRAITS) -> Primitive:
    """A primitive of one's own, that says how it moves precision."""
    made = Primitive(name)
    made.def_abstract_eval(result)
    jamp.register_primitive(made, rule, traits)
    return made
