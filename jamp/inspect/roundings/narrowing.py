"""Rules for fewer operations in place of rules for many: lines for a scope, calls from one line for a helper."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from jamp._policy.rule import parse_rule
from jamp.inspect.roundings.derivatives import Measured
from jamp.inspect.roundings.sites import Rounding, Row
from jamp.transforms.analysis.regimes import lines_match, scope_matches


class Narrowing:
    """Finds narrower rules, the dearest first.

    Args:
        found: What the roundings do at the policy without the rules.
        entry_of: The entry that takes each row out.
    """

    def __init__(self, found: Measured, entry_of: dict[Row, str]) -> None:
        self._entry_of = entry_of
        lengths = [np.fmax(np.abs(s), spread) for s, spread in zip(found.signed, found.spread, strict=True)]
        finite = [np.where(np.isfinite(length), length, np.finfo(np.float32).max) for length in lengths]
        shares = np.max([length / max(length.sum(), 1e-30) for length in finite], axis=0)
        self._sites = [*zip(found.sites, shares, strict=True)]
        self._stacks: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)
        self._calls: defaultdict[str, set[str]] = defaultdict(set)
        for site in found.sites:
            self._stacks[site.place.line].add(site.lines)
            self._calls[site.place.line].add(site.call)

    def of(self, entry: str, depth: int) -> list[str]:
        """Entries that together take out what `entry` does, each narrower by so many steps at most."""
        shares: Counter[str] = Counter()
        for site, share in self._sites:
            if _rules(entry, site) or self._entry_of.get(site.row) == entry:
                steps = [entry, *(finer for finer in self._steps(site) if finer != entry)]
                shares[steps[: depth + 1][-1]] += share
        return [found for found, _ in shares.most_common()]

    def _steps(self, site: Rounding) -> list[str]:
        """Lines for a rounding, each for fewer others than the one before.

        The first is its own. It is followed by those that call it, from inside to outside, which not all of its calls
        have in common. A line in a function in `jax.jit` is the same for all of its callers; so there it is that of the
        call.
        """
        line, alike = site.place.line, self._stacks[site.place.line]
        if line == "?":
            return []
        steps = [line]
        for caller in site.lines[1:]:
            step = f"{steps[-1]} from {caller}"
            fewer = {lines for lines in alike if lines_match(step, lines)}
            if len(fewer) < len(alike):
                steps, alike = [*steps, step], fewer
        if len(steps) == 1 and len(self._calls[line]) > 1 and site.call not in ("", "?"):
            steps.append(site.call)
        return steps


def _rules(entry: str, site: Rounding) -> bool:
    """Whether an entry for a scope or a line is one for a rounding."""
    if _is_line(entry):
        return site.place.line == entry or lines_match(entry, site.lines)
    return scope_matches(entry, site.place.scope)


def _is_line(entry: str) -> bool:
    return parse_rule(entry, "full").kind == "line"
