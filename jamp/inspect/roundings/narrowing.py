"""Rules for fewer operations in place of rules for many.

For a scope or a loop that is lines, for a helper its calls from one line, and for a line that multiplies and adds its
primitives.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from jamp._policy.rule import parse_rule
from jamp._primitives import PRODUCTS, TABLE
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
        self._primitives: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._dear: set[str] = set()  # Lines whose rules are for products too.
        for site in found.sites:
            self._stacks[site.place.line].add(site.lines)
            self._calls[site.place.line].add(site.call)
            if not site.backward:  # What is of the derivative is ruled with what it is the derivative of.
                self._primitives[site.place.line][site.operation] = None
            if _multiplies(site.operation):
                self._dear |= {site.place.line, *site.around, site.call}

    def of(self, entry: str, depth: int) -> list[str]:
        """Entries that together take out what `entry` does, each narrower by so many steps at most.

        First come those for what `entry` was found for, and not for all else that it is a rule for. The entry itself,
        if there is nothing narrower for a part of it, as for the carry of a loop, is the last.
        """
        shares: Counter[str] = Counter()
        meant: set[str] = set()
        for site, share in self._sites:
            is_meant = self._entry_of.get(site.row) == entry
            if is_meant or _rules(entry, site):
                steps = [(entry,), *(finer for finer in self._steps(site) if finer != (entry,))]
                found = steps[: depth + 1][-1]
                shares.update(dict.fromkeys(found, share))
                meant.update(found if is_meant else ())
        return sorted(shares, key=lambda found: (found == entry, found not in meant, -shares[found]))

    def _steps(self, site: Rounding) -> list[tuple[str, ...]]:
        """Rules for a rounding, each for fewer others than the one before.

        The first is its own line. It is followed by those that call it, from inside to outside, which not all of its
        calls have in common. A line in a function in `jax.jit` is the same for all of its callers; so there it is that
        of the call. The last are the primitives of a line that multiplies too: the one that rounds, or any that it is a
        derivative of.
        """
        line, alike = site.place.line, self._stacks[site.place.line]
        if line == "?":
            return []
        steps = [line]
        for caller in site.lines[1:]:
            step = f"{steps[-1]} from {caller}"
            fewer = {lines for lines in alike if lines_match(step, lines, site.operation)}
            if len(fewer) < len(alike):
                steps, alike = [*steps, step], fewer
        found: list[tuple[str, ...]] = [(step,) for step in steps]
        if len(steps) == 1 and len(self._calls[line]) > 1 and site.call not in ("", "?"):
            return [*found, (site.call,)]
        of_line = self._primitives[line]
        if line in self._dear and len(of_line) > 1:
            mine = of_line if site.backward or site.operation not in of_line else [site.operation]
            found.append(tuple(f"{name} at {steps[-1]}" for name in mine))
        return found


def _multiplies(primitive: str) -> bool:
    return primitive in TABLE and bool(TABLE[primitive].traits & PRODUCTS)


def _rules(entry: str, site: Rounding) -> bool:
    """Whether an entry for a scope or a line is one for a rounding: that of a loop is one for all that is in it."""
    if _is_line(entry):
        return entry in site.around or site.place.line == entry or lines_match(entry, site.lines, site.operation)
    return scope_matches(entry, site.place.scope)


def _is_line(entry: str) -> bool:
    return parse_rule(entry, "full").kind == "line"
