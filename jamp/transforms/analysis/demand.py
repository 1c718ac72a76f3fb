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
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from jamp._compat import (
    Atom,
    ClosedJaxpr,
    Eqn,
    Jaxpr,
    Literal,
    Var,
    called_jaxpr,
    jaxpr_consts,
    open_jaxpr,
)  # fmt: skip
from jamp._dtypes import Pair
from jamp._primitives import PRODUCTS, Rule, Trait, acts, has, is_outer, rule_of
from jamp.transforms.analysis.apart import Apart
from jamp.transforms.analysis.axes import (
    free_sizes,
    has_one_channel,
    is_reduction,
    makes_one_channel,
    num_contracted,
    operators,
)
from jamp.transforms.analysis.bounds import wanted_near
from jamp.transforms.analysis.cancelling import cancelling
from jamp.transforms.analysis.carries import Carries, positions
from jamp.transforms.analysis.chains import Constants, is_mask
from jamp.transforms.analysis.diagonals import diagonals
from jamp.transforms.analysis.differences import differences
from jamp.transforms.analysis.dividends import dividends
from jamp.transforms.analysis.gates import NO_GATES, NO_STATES, Gates, States, gates
from jamp.transforms.analysis.moments import means
from jamp.transforms.analysis.patterns import Finder, Matches, Pattern, find_patterns
from jamp.transforms.analysis.regimes import Elementwise, Regime, Regimes, Ruled
from jamp.transforms.analysis.starts import Starts
from jamp.transforms.program.heuristics import Heuristics
from jamp.transforms.program.want import Want, Wants, combine


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
    """The backward pass, remembered per jaxpr for as long as its planner lives."""

    def __init__(self, regimes: Regimes, pair: Pair, heuristics: Heuristics, finders: Sequence[Finder]) -> None:
        self._regimes = regimes
        self._pair = pair
        self._heuristics = heuristics
        self._finders = finders
        self._known: dict[tuple[int, Wants, Regime, str, frozenset[int], States], Wanted] = {}
        self._matches: dict[int, Matches] = {}
        self.carries = Carries(self._of_inputs)
        self.differences: set[Atom] = set()  # Of the jaxprs looked at, the constants that take differences.
        self.diagonals: set[Var] = set()  # Of these, the diagonal matrices.
        self.means: set[Var] = set()  # Of these, weighted means.
        self.cancelling: set[Atom] = set()  # Of these, the results of products that cancel with others.
        self.solved: set[Atom] = set()  # And those of products of solutions with what was solved.
        self.dividends: set[tuple[int, int]] = set()  # Of these, operands that are products, to be divided.

    def __call__(
        self,
        jaxpr: ClosedJaxpr,
        out_wants: Wants,
        regime: Regime,
        scope: str,
        fixed: frozenset[int] = frozenset(),
        states: States = NO_STATES,
    ) -> Wanted:
        """Variables of `jaxpr` that are read at all, and what is wanted of them by everything that reads them.

        Args:
            jaxpr: The jaxpr.
            out_wants: What is wanted of its results.
            regime: Its regime.
            scope: Its scope path.
            fixed: Positions of inputs that depend on no argument of the program.
            states: The inputs that are float32 states of a recurrence.
        """
        key = (id(jaxpr), out_wants, regime, scope if self._regimes.scope_matters else "", fixed, states)
        if key not in self._known:
            self._known[key] = self._analyse(jaxpr, out_wants, regime, scope, fixed, states)
        return self._known[key]

    def _analyse(
        self,
        closed: ClosedJaxpr,
        out_wants: Wants,
        regime: Regime,
        scope: str,
        fixed: frozenset[int],
        states: States,
    ) -> Wanted:
        jaxpr = open_jaxpr(closed)
        votes: dict[Var, Want] = {}
        live: set[Var] = set()
        carried: dict[int, Wants] = {}
        ruled: dict[int, Ruled] = {}
        if id(jaxpr) not in self._matches:
            self._matches[id(jaxpr)] = find_patterns(jaxpr, self._finders)
        matches = self._matches[id(jaxpr)]
        constants = _constants(jaxpr, fixed)
        if regime.delicate:
            self.differences |= differences(jaxpr, jaxpr_consts(closed), constants, self._pair)
            self.diagonals |= diagonals(jaxpr, jaxpr_consts(closed))
            delicate = cancelling(jaxpr)
            self.cancelling |= delicate.cancelling
            self.solved |= delicate.solved
            self.means |= means(jaxpr)
            if self._pair.lacks_range:
                self.dividends |= dividends(jaxpr)
        scaling = gates(jaxpr, states) if states.inputs and regime.delicate else NO_GATES
        starts, apart = Starts(jaxpr, out_wants), Apart(jaxpr, self._heuristics.part)
        quotients: dict[int, Var] = {}
        powers = set[int]()  # What a tree multiplies with itself, it takes apart before.
        for eqn in jaxpr.eqns:
            match = matches.get(id(eqn))
            if match is not None and match.pattern is Pattern.SOFTMAX:
                quotients[id(match.eqns[0])] = eqn.outvars[0]
            elif match is not None and match.pattern is Pattern.TREE and has(eqn, Trait.SLICES):
                powers.add(id(eqn))

        def vote(atom: Atom, want: Want) -> None:
            if not isinstance(atom, Literal):
                live.add(atom)
                before = votes.get(atom, want)
                votes[atom] = want if before is want else combine(before, want)

        for atom, want in zip(jaxpr.outvars, out_wants, strict=True):
            vote(atom, want)
        for eqn in reversed(jaxpr.eqns):
            if live.isdisjoint(eqn.outvars) and not acts(eqn):
                continue
            settled = starts.settle(eqn, votes)
            entered = ruled[id(eqn)] = self._regimes.enter(eqn, regime, scope)
            wants = self._operand_wants(eqn, votes, carried, entered, scope, constants, scaling)
            if entered.regime.delicate:
                wants = apart.passed_on(eqn, votes, wants)
            if settled is None:
                starts.add(eqn, wants)
            else:
                wants = starts.passed_on(eqn, wants, settled)
            if id(eqn) in quotients and not votes.get(quotients[id(eqn)], Want.NONE).full:
                wants = [want if want.decides else Want.SCORE for want in wants]
            if id(eqn) in powers and entered.regime.delicate:
                wants = [_of_gate(want) for want in wants]
            if id(eqn) in scaling.scaled:
                wants = [_of_gate(want) if i in scaling.scaled[id(eqn)] else want for i, want in enumerate(wants)]
            for atom, want in zip(eqn.invars, wants, strict=True):
                vote(atom, want)
        return Wanted(frozenset(live), votes, carried, matches, ruled)

    def _operand_wants(
        self,
        eqn: Eqn,
        votes: dict[Var, Want],
        carried: dict[int, Wants],
        ruled: Ruled,
        scope: str,
        constants: Constants,
        scaling: Gates,
    ) -> Sequence[Want]:
        regime = ruled.regime
        rule = Rule.PROMOTE if ruled.promotes or is_outer(eqn) else rule_of(eqn)
        count = len(eqn.invars)
        wants = [votes.get(var, Want.NONE) for var in eqn.outvars]
        want = _of_all_results(wants)
        if rule is Rule.RECURSE and not regime.untouched:
            return self._inner_wants(eqn, wants, carried, regime, scope, constants, scaling)
        if want.decides and regime.delicate and (want is Want.AGAIN or not has(eqn, Trait.CHOOSES)):
            # Whether a number is finite is no close call: solvers ask it of all that they compute.
            return [Want.NONE if has(eqn, Trait.COMPARES) and count == 1 else want] * count
        if regime.delicate and (self.reads_phase(eqn) or self.makes_phase(eqn, wants, constants)):
            return [Want.PHASE] * count
        if want is Want.SCORE and _on_scores(eqn, rule):
            return [want] * count
        if regime.delicate and (near := wanted_near(eqn, want, constants, self._heuristics.part)) is not None:
            return [near] * count
        if regime.all_full or rule in (Rule.FULL, Rule.NO_HALF, Rule.OPAQUE, Rule.TRACED):
            divides = has(eqn, Trait.SINGULAR | Trait.SOLVES) and regime.delicate
            return [Want.DIVISOR if divides else Want.FULL] * count
        is_product = regime.delicate and has(eqn, PRODUCTS)
        if is_product and (is_reduction(eqn) or _is_stencil(eqn, constants) or self._weighs(eqn, constants)):
            return [Want.FULL] * count
        if is_product and (eqn.outvars[0] in self.cancelling or eqn.outvars[0] in self.means):
            return [Want.FULL] * count
        if rule is Rule.HALF and not (regime.delicate and self._takes_differences(eqn)):
            return [Want.HALF] * count
        if regime.elementwise is Elementwise.HALF:
            return [Want.HALF] * count
        if has(eqn, Trait.CHOOSES) and not (has(eqn, Trait.SORTS) and count == 1):
            return [Want.FULL] * count
        if has(eqn, Trait.COMPARES):
            return [Want.NONE] * count
        if want is Want.LEFT or (want is Want.GATE and has(eqn, Trait.OF_RESULT | Trait.COUNTS)):
            return [Want.HALF] * count  # A sigmoid makes a good gate of half numbers, and a sign is exact.
        # Of what goes into a divisor half will do, if others read it in half: it is added up in float32.
        weakens = want in (Want.DIVISOR, Want.DIVISOR_APART) and rule is not Rule.FOLLOW
        passed = Want.FULL if weakens or want is Want.BOUND else want
        asked = [Want.FULL if self._is_dividend(eqn, i, passed) else passed for i in range(count)]
        if has(eqn, Trait.DIVIDES):
            return [*asked[:-1], want if want is Want.PHASE else Want.DIVISOR]
        return asked

    def _inner_wants(
        self,
        eqn: Eqn,
        wants: list[Want],
        carried: dict[int, Wants],
        regime: Regime,
        scope: str,
        constants: Constants,
        scaling: Gates,
    ) -> Sequence[Want]:
        fixed = [isinstance(atom, Literal) or atom in constants for atom in eqn.invars]
        if has(eqn, Trait.LOOPS):
            carried[id(eqn)], operands = self.carries.of_loop(eqn, wants, regime, scope, fixed)
            return operands
        if has(eqn, Trait.BRANCHES):
            inside = positions(fixed[1:])
            states = scaling.given(eqn, 1)
            branches = [self._of_inputs(each, wants, regime, scope, inside, states) for each in eqn.params["branches"]]
            decides = combine(*(want for want in wants if want.decides))
            return [decides, *(combine(*of_branches) for of_branches in zip(*branches, strict=True))]
        states = scaling.given(eqn)
        return self._of_inputs(called_jaxpr(eqn.params), wants, regime, scope, positions(fixed), states)

    def _of_inputs(
        self,
        jaxpr: ClosedJaxpr,
        wants: Sequence[Want],
        regime: Regime,
        scope: str,
        fixed: frozenset[int] = frozenset(),
        states: States = NO_STATES,
    ) -> list[Want]:
        wanted = self(jaxpr, tuple(wants), regime, scope, fixed, states)
        return [wanted.of(var) for var in open_jaxpr(jaxpr).invars]

    def _is_dividend(self, eqn: Eqn, index: int, want: Want) -> bool:
        """Whether an operand that might be half is a product that the narrow dtype may have no range for."""
        return bool(self.dividends) and want in (Want.HALF, Want.HALF_APART) and (id(eqn), index) in self.dividends

    def _weighs(self, eqn: Eqn, constants: Constants) -> bool:
        """Whether an operation is a product with few columns that depend on no argument, and are no one-hot rows."""
        return any(
            atom in constants and size <= self._heuristics.short and not is_mask(constants, atom)
            for atom, size in zip(eqn.invars, free_sizes(eqn), strict=False)
            if not isinstance(atom, Literal)
        )

    def _takes_differences(self, eqn: Eqn) -> bool:
        """Whether an operation is a product with a constant matrix that subtracts, as careful as a subtraction."""
        return any(
            not isinstance(atom, Literal) and atom in self.differences
            for atom in operators(eqn, self._heuristics.tallest)
        )

    def reads_phase(self, eqn: Eqn) -> bool:
        """Whether an operation takes its operand modulo something, or makes an index of it."""
        if has(eqn, Trait.CONVERTS):
            return self._pair.flows(eqn.invars[0].aval) and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.integer)
        return has(eqn, Trait.PHASE)

    def makes_phase(self, eqn: Eqn, wants: Sequence[Want], constants: Constants) -> bool:
        """Whether an operation is a product read as a phase: a short one of positions, or one that adds up frequencies.

        The first gives angles or coordinates. The other has a matrix that the program makes, as `tril(ones)`.
        """
        if Want.PHASE not in wants or not has(eqn, Trait.MATRIX):
            return False
        made = (not isinstance(atom, Literal) and constants.get(atom) is not None for atom in eqn.invars)
        return num_contracted(eqn) <= self._heuristics.short_phase or any(made)


def _constants(jaxpr: Jaxpr, fixed: frozenset[int]) -> Constants:
    """Variables of a jaxpr that depend on no argument of the program."""
    found: dict[Atom, Eqn | None] = dict.fromkeys([*jaxpr.constvars, *(jaxpr.invars[index] for index in fixed)])
    for eqn in jaxpr.eqns:
        if not eqn.effects and all(isinstance(atom, Literal) or atom in found for atom in eqn.invars):
            found.update(dict.fromkeys(eqn.outvars, eqn))
    return found


def _is_stencil(eqn: Eqn, constants: Constants) -> bool:
    if not has_one_channel(eqn):
        return False
    return makes_one_channel(eqn) or isinstance(eqn.invars[1], Literal) or eqn.invars[1] in constants


def _of_all_results(wants: Sequence[Want]) -> Want:
    """What is wanted of an equation as a whole: one result that is wanted in float32, as of a `split`, is enough."""
    return wants[0] if len(wants) == 1 else combine(*([want for want in wants if want.full] or wants))


def _of_gate(want: Want) -> Want:
    """What is wanted of a gate, by what would be: where that is float32, others that read it change nothing."""
    return combine(want, Want.DIVISOR if want.full else Want.GATE)


def _on_scores(eqn: Eqn, rule: Rule) -> bool:
    """What lies between the product of queries with keys and the softmax of it: scales, masks, caps, moves."""
    return rule in (Rule.PROMOTE, Rule.FOLLOW) and not has(eqn, Trait.COMPARES)
