"""What a caller may write to take a rounding out: a rule that was tried, or what to change where no rule does it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jamp.inspect._target import Target
from jamp.inspect.roundings.program import value_and_gradient
from jamp.inspect.roundings.sites import Rounding, Row, entries_for, roundings
from jamp.policy import Policy
from jamp.transforms._traced import Traced

# A rule is tried by planning and tracing the program once more. Of a large one only the dearest are tried one by one,
# and the others all together.
_FEWEST_TRIALS = 8
_MOST_ROUNDINGS = 4000


class Remedy(NamedTuple):
    """What takes a row out.

    Attributes:
        entry: The entry of `with_rules(full=[…])`; empty if no rule does it.
        instead: What to change in that case; else empty.
    """

    entry: str
    instead: str = ""


def remedies(target: Target, gradient: bool, rows: Mapping[Row, Sequence[Rounding]]) -> dict[Row, Remedy]:
    """What takes each row out: the rule for its scope, or that for its source line or that of a loop around it.

    A loop rounds its carry by itself. Where none of these does, another row's may.

    Args:
        target: The function at a policy.
        gradient: Whether the rows are of the gradient too.
        rows: The roundings of each row, the dearest row first.
    """
    places = {row: sites[0].place for row, sites in rows.items()}
    loops = {row: reversed(sites[0].around) for row, sites in rows.items()}
    candidates = {
        row: [e for e in (*entries_for(at), *loops[row]) if takes_rule(target.policy, e)] for row, at in places.items()
    }
    firsts = tuple(dict.fromkeys(entries[0] for entries in candidates.values() if entries))
    most = max(_FEWEST_TRIALS, _MOST_ROUNDINGS // (1 + sum(map(len, rows.values()))))
    tried: dict[tuple[str, ...], Counter[Row]] = {}

    def left(trial: tuple[str, ...]) -> Counter[Row]:
        if trial not in tried:
            tried[trial] = _left(target, gradient, trial)
        return tried[trial]

    def takes_out(entry: str, row: Row) -> bool:
        alone = (entry,)
        if alone not in tried and len(tried) >= most and entry not in firsts:
            return False
        return not left(alone if alone in tried or len(tried) < most else firsts)[row]

    found: dict[Row, Remedy] = {}
    for row, entries in candidates.items():
        # What adds cotangents up is in half because of their readers, which are elsewhere.
        readers = (trial[0] for trial in list(tried) if len(trial) == 1)
        works = next((entry for entry in (*entries, *readers) if takes_out(entry, row)), "")
        found[row] = Remedy(works)
    if not all(remedy.entry for remedy in found.values()):
        own = _roundings_of(target, target.traced, gradient) if target.policy is not None else Counter()
        written = {row[:2] for row in own}  # By scope and line: what follows a cast in half may round for it.
        for row in (row for row in rows if not found[row].entry):
            found[row] = Remedy("", _instead(target, rows[row][0], row[:2] in written))
    return found


def takes_rule(policy: Policy | None, entry: str) -> bool:
    """Whether a policy takes a rule for float32: it may contradict one of its own."""
    try:
        return policy is None or bool(policy.with_rules(full=[entry]))
    except ValueError:
        return False


def _left(target: Target, gradient: bool, entries: tuple[str, ...]) -> Counter[Row]:
    """How many roundings of each row are left with rules added."""
    ruled = target.with_rules(entries)
    return _roundings_of(ruled, ruled.program(), gradient)


def _roundings_of(target: Target, program: Traced, gradient: bool) -> Counter[Row]:
    return Counter(site.row for site in roundings(value_and_gradient(target, program, gradient).jaxpr))


def _instead(target: Target, site: Rounding, written: bool) -> str:
    """What to change.

    Args:
        target: The function at a policy.
        site: One of the roundings.
        written: Whether the program rounds there without the policy too.
    """
    if site.place.label == "decided otherwise":
        return "float32 for what this mask or index is made of"
    if target.policy is not None and site.policy in map(str, target.inner):
        return f"a rule for the policy of the `cast_fn` inside, {site.policy}"
    if site.marked:
        return "no `jamp.half_precision` around it, which no rule overrules"
    if written:
        return "a float32 dtype where the program itself asks for half"
    if site.place.line == "?" and site.operation == "convert_element_type" and target.policy is not None:
        return "results in float32, by policy.with_output_dtype('float32')"
    if target.policy is not None and target.policy.level is None:
        return f"a policy with a level, such as 'O2': {target.policy} casts whole arguments, and takes no rules"
    if target.policy is not None and target.policy.half:
        return f"none of the policy's own rules half={list(target.policy.half)}"
    return "a rule for what reads it"
