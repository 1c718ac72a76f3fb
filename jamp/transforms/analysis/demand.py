"""Which values their readers want in float32: demand runs backwards through a jaxpr.

A value that only sums, exponentials and their like read is computed in float32 where it is made: the conversion fuses
with the reader and costs nothing, and `sum(x * x)` of float16 data does not overflow in the square. Divisors are wanted
in float32 too, or an epsilon in them would be zero.

Phases (angles, coordinates) are wanted more strongly. What matters of them is the absolute error, and position 3001 is
3008 in bfloat16: rotary embeddings and sampling grids fall apart where their products are half.

Most strongly wanted is what decides when a loop ends. An iteration to convergence ends when two floating values are
close. Where products in it are half they never are, since each iteration rounds differently: a deep equilibrium model
that takes 12 iterations in float32 never ended, and an adaptive solver took 18 times the steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from functools import cache

from jamp._compat import Atom, ClosedJaxpr, Eqn, Literal, Var, open_jaxpr
from jamp._dtypes import Pair
from jamp._primitives import Rule, Trait, acts, has, rule_of
from jamp.transforms.analysis.apart import Apart
from jamp.transforms.analysis.carries import Carries
from jamp.transforms.analysis.facts import Facts
from jamp.transforms.analysis.loops.gates import NO_GATES, NO_STATES, GateFinder, Gates, States
from jamp.transforms.analysis.loops.starts import Starts
from jamp.transforms.analysis.patterns import Finder, Matches, Pattern, find_patterns
from jamp.transforms.analysis.readers import Readers
from jamp.transforms.analysis.reading.chains import find_constants
from jamp.transforms.analysis.reading.fixed import FixedInputs, positions
from jamp.transforms.analysis.reading.flat import called_jaxprs
from jamp.transforms.analysis.regimes import Regime, Regimes, Ruled
from jamp.transforms.program.heuristics import Heuristics
from jamp.transforms.program.want import Want, Wants, combine, raised


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Result of the backward pass over one jaxpr: the live variables, and what their readers want."""

    live: frozenset[Var]
    wants: Mapping[Var, Want]
    carried: Mapping[int, Wants]  # By loop equation, what is wanted of its results, by the next iteration too.
    matches: Matches
    ruled: Mapping[int, Ruled]  # By live equation, its regime.

    def of(self, var: Atom) -> Want:
        """What the readers of a variable want."""
        return self.wants.get(var, Want.NONE)

    def of_results(self, eqn: Eqn) -> Wants:
        """What the readers of an equation's results want; a carry is read by the next iteration as well."""
        return self.carried.get(id(eqn)) or tuple(map(self.of, eqn.outvars))

    def is_live(self, eqn: Eqn) -> bool:
        """Whether anything reads a result of `eqn`, or it does more than make results."""
        return not self.live.isdisjoint(eqn.outvars) or acts(eqn)


class Demand:
    """The backward pass, remembered per jaxpr for as long as its planner lives.

    Args:
        regimes: What scopes, marks and rules of the policy say.
        pair: The wide and the narrow dtype.
        heuristics: The thresholds.
        finders: The patterns to look for.
    """

    def __init__(self, regimes: Regimes, pair: Pair, heuristics: Heuristics, finders: Sequence[Finder]) -> None:
        self.regimes = regimes
        self.heuristics = heuristics
        self.carries = Carries(self.of_inputs)
        self.facts = Facts(pair, heuristics)
        self.readers = Readers(self.facts, pair, heuristics)
        self._fixed = FixedInputs()
        self._gates = GateFinder()
        self.matches = cache(lambda jaxpr: find_patterns(jaxpr, finders))
        self._known: dict[Hashable, Wanted] = {}

    def __call__(
        self,
        jaxpr: ClosedJaxpr,
        out_wants: Wants,
        regime: Regime,
        scope: str,
        fixed: frozenset[int] = frozenset(),
        states: States = NO_STATES,
        small: frozenset[int] = frozenset(),
    ) -> Wanted:
        """Variables of `jaxpr` that are read at all, and what is wanted of them by everything that reads them.

        Args:
            jaxpr: The jaxpr.
            out_wants: What is wanted of its results.
            regime: Its regime.
            scope: Its scope path.
            fixed: Positions of inputs that depend on no argument of the program.
            states: The inputs that are float32 states of a recurrence.
            small: Positions of inputs that are numbers too small to be taken off anything.
        """
        fixed = self._fixed.that_matter(jaxpr, fixed)
        gates = self._gates.of(jaxpr, states) if states.inputs and regime.delicate else NO_GATES
        key = (id(jaxpr), out_wants, regime, scope if self.regimes.scope_matters else "", fixed, gates.known_by, small)
        if key not in self._known:
            self._known[key] = _Pass(self, jaxpr, regime, scope, fixed, gates, small).wanted(out_wants)
        return self._known[key]

    def of_inputs(
        self,
        jaxpr: ClosedJaxpr,
        wants: Sequence[Want],
        regime: Regime,
        scope: str,
        fixed: frozenset[int] = frozenset(),
        states: States = NO_STATES,
        small: frozenset[int] = frozenset(),
    ) -> list[Want]:
        """What a jaxpr wants of its inputs; the arguments are as above."""
        wanted = self(jaxpr, tuple(wants), regime, scope, fixed, states, small)
        return [wanted.of(var) for var in open_jaxpr(jaxpr).invars]


class _Pass:
    """The backward pass over one jaxpr."""

    def __init__(
        self,
        demand: Demand,
        closed: ClosedJaxpr,
        regime: Regime,
        scope: str,
        fixed: frozenset[int],
        gates: Gates,
        small: frozenset[int],
    ) -> None:
        self._demand = demand
        self._jaxpr = open_jaxpr(closed)
        self._regime = regime
        self._scope = scope
        self._constants = find_constants(self._jaxpr, fixed)
        self._matches = demand.matches(self._jaxpr)
        if regime.delicate:
            demand.facts.look_at(closed, self._constants)
        self._apart = Apart(self._jaxpr, demand.heuristics.part, small)
        self._gates = gates
        self._live: set[Var] = set()
        self._votes: dict[Var, Want] = {}
        self._carried: dict[int, Wants] = {}

    def wanted(self, out_wants: Wants) -> Wanted:
        """What is wanted of everything, by what is wanted of the results."""
        jaxpr, votes = self._jaxpr, self._votes
        starts = Starts(jaxpr, out_wants)
        ruled: dict[int, Ruled] = {}
        quotients, powers = self._of_patterns()
        for atom, want in zip(jaxpr.outvars, out_wants, strict=True):
            self._vote(atom, want)
        for eqn in reversed(jaxpr.eqns):
            if self._live.isdisjoint(eqn.outvars) and not acts(eqn):
                continue
            settled = starts.settle(eqn, votes)
            entered = ruled[id(eqn)] = self._demand.regimes.enter(eqn, self._regime, self._scope)
            wants = self._wanted_by(eqn, entered)
            if entered.regime.delicate:
                wants = self._apart.passed_on(eqn, votes, wants)
            if settled is None:
                starts.add(eqn, wants)
            else:
                wants = starts.passed_on(eqn, wants, settled)
            if id(eqn) in quotients:
                of_weights = votes.get(quotients[id(eqn)], Want.NONE)
                if not (of_weights.full or of_weights.apart):
                    wants = [want if want.decides else Want.SCORE for want in wants]
            if id(eqn) in powers and entered.regime.delicate:
                wants = [_of_gate(want) for want in wants]
            if scaled := self._gates.scaled.get(id(eqn)):
                wants = [_of_gate(want) if index in scaled else want for index, want in enumerate(wants)]
            for atom, want in zip(eqn.invars, wants, strict=True):
                self._vote(atom, want)
        # Only now: what they are made of may be half.
        terms = {var: raised(votes[var]) for var in self._demand.facts.terms.intersection(votes)}
        return Wanted(frozenset(self._live), votes | terms, self._carried, self._matches, ruled)

    def _of_patterns(self) -> tuple[dict[int, Var], set[int]]:
        """By the first equation of a softmax, its result; and the slices that a tree multiplies with one another."""
        quotients: dict[int, Var] = {}
        powers = set[int]()
        for eqn in self._jaxpr.eqns:
            match = self._matches.get(id(eqn))
            if match is not None and match.pattern is Pattern.SOFTMAX:
                quotients[id(match.eqns[0])] = eqn.outvars[0]
            elif match is not None and match.pattern is Pattern.TREE and has(eqn, Trait.SLICES):
                powers.add(id(eqn))
        return quotients, powers

    def _vote(self, atom: Atom, want: Want) -> None:
        if not isinstance(atom, Literal):
            self._live.add(atom)
            before = self._votes.get(atom, want)
            self._votes[atom] = want if before is want else combine(before, want)

    def _wanted_by(self, eqn: Eqn, ruled: Ruled) -> Sequence[Want]:
        """What an equation wants of its operands."""
        wants = [self._votes.get(var, Want.NONE) for var in eqn.outvars]
        if rule_of(eqn) is not Rule.RECURSE or ruled.promotes or ruled.regime.untouched:
            return self._demand.readers.wanted_by(eqn, wants, ruled, self._constants)
        fixed = [isinstance(atom, Literal) or atom in self._constants for atom in eqn.invars]
        regime, scope = ruled.regime, self._scope
        if has(eqn, Trait.LOOPS):
            self._carried[id(eqn)], operands = self._demand.carries.of_loop(eqn, wants, regime, scope, fixed)
            return operands
        branches, first = called_jaxprs(eqn)
        inside, states = positions(fixed[first:]), self._gates.given(eqn, first)
        small = positions([self._apart.is_small(atom) for atom in eqn.invars[first:]])
        read = [self._demand.of_inputs(each, wants, regime, scope, inside, states, small) for each in branches]
        chooses = combine(*(want for want in wants if want.decides))
        if len(branches) > 2 and regime.delicate:  # Between two by a flag, as in `where`; of more by an index.
            chooses = combine(chooses, Want.PHASE)
        return [*[chooses] * first, *(combine(*of_branches) for of_branches in zip(*read, strict=True))]


def _of_gate(want: Want) -> Want:
    """What is wanted of a gate, by what would be: where that is float32, others that read it change nothing."""
    return combine(want, Want.DIVISOR if want.full else Want.GATE)
