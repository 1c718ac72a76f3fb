"""Products with exponentials that float16 has no range for.

Those of kernels: in `k @ y / k.sum(1)` a row may be as small as the distance of a point from all others is large; so in
`log(k @ y)`. Those of a kernel and scalings, `k @ exp(f / 0.1)`. And those of decays, `(q * a) @ (k / a).T` with
`a = cumprod(g)`. A softmax takes the maximum off first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from jamp._compat import Jaxpr, Var
from jamp._dtypes import FLOAT32
from jamp._primitives import MOVED, PRODUCTS, Trait, has
from jamp.transforms.analysis.products.dividends import TO_PRODUCTS, divided, is_made_of, products_behind
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source, Value
from jamp.transforms.analysis.reading.numbers import of_literal, of_results
from jamp.transforms.analysis.reading.walks import back, makers_behind
from jamp.transforms.program.flow import num_elements
from jamp.transforms.program.scale import Range

_FACTORS = MOVED | Trait.NEGATES | Trait.MULTIPLIES | Trait.DIVIDES
_Ranges = Callable[[Source], Range]
_ANY = Range(-math.inf, math.inf)
_LEARNED = Range(0.5, 2.0)
_MOST = 4.0  # Of an exponent: two such factors are 3,000 at most, where float16 ends at 65,504.


def kernels(jaxpr: Jaxpr, consts: Sequence[object]) -> frozenset[Var]:
    """Products with exponentials that a logarithm is of, or that are divided by what the same exponentials make.

    And those of exponentials with exponentials, as of a kernel and the scalings that transport has by it, or of powers
    and cumulated products.

    Args:
        jaxpr: The jaxpr; calls in it are looked into.
        consts: Its constants.
    """
    opened = Opened(jaxpr)
    if not any(has(flat.eqn, Trait.DIVIDES | Trait.LOGARITHM | Trait.VAST) for flat in opened.eqns):
        return frozenset()
    scalings = _Scalings(opened, dict(zip(jaxpr.constvars, consts, strict=False)))
    found: set[Var] = set()
    for flat in opened.eqns:
        if has(flat.eqn, PRODUCTS) and all(map(scalings.may_be_vast, flat.ins)):
            found.add(flat.outs[0].var)
        ends = [*divided(opened, flat), *([(0, None)] if has(flat.eqn, Trait.LOGARITHM) else [])]
        for position, divisor in ends:
            found.update(_of_kernels(opened, flat.ins[position], divisor))
    return frozenset(found)


def _of_kernels(opened: Opened, dividend: Source, divisor: Source | None) -> Iterator[Var]:
    """Products with exponentials that a divisor is made of too, and such that these multiply: `q @ (k.T @ v)`."""
    ahead = [*products_behind(opened, dividend)]
    while ahead:
        product = ahead.pop()
        sides = opened.made[product].ins
        exponentials = set(_exponentials(opened, sides))
        if exponentials and (divisor is None or is_made_of(opened, divisor, exponentials)):
            yield product.var
            ahead += (each for side in sides for each in products_behind(opened, side))


class _Scalings:
    """What is multiplied with, or divided by, what float16 has no range for: no learned scale, nor shares of a sum.

    Args:
        opened: The program.
        consts: Its constants.
    """

    def __init__(self, opened: Opened, consts: Mapping[Var, object]) -> None:
        self._opened = opened
        self._consts = {Value(0, var): of_literal(const) or _ANY for var, const in consts.items()}

    @functools.cached_property
    def _ranges(self) -> _Ranges:
        return self._given(_ANY)

    @functools.cached_property
    def _ranges_if_learned(self) -> _Ranges:
        return self._given(_LEARNED)

    def _given(self, given: Range) -> _Ranges:
        """The ranges of all values where what the program is given is in one."""
        known = dict(self._consts)

        def read(source: Source) -> Range:
            return known.get(source, given) if isinstance(source, Value) else of_literal(source.val) or _ANY

        for flat in self._opened.eqns:
            found = of_results(flat.eqn, [*map(read, flat.ins)], FLOAT32)
            known.update((out, each or _ANY) for out, each in zip(flat.outs, found, strict=False))
        return read

    def may_be_vast(self, side: Source) -> bool:
        """Whether a side of a product is such."""
        opened, size = self._opened, num_elements(side.aval)
        walked = back(opened, [side], lambda flat, _: flat.values if has(flat.eqn, _FACTORS) else ())
        flats = [flat for _, flat in walked if flat is not None]
        factors = [flat for flat in flats if not has(flat.eqn, _FACTORS)]
        vast = {value for flat in factors if self._is_vast(flat, size) for value in flat.outs}
        if not vast:
            return False
        divisors = [divisor for flat in flats for _, divisor in divided(opened, flat)]
        sums = [flat for flat in factors if num_elements(flat.outs[0].aval) < size]
        sums += makers_behind(opened, divisors, _FACTORS)
        return not any(is_made_of(opened, flat.outs[0], vast) for flat in sums if flat.outs[0] not in vast)

    def _is_vast(self, flat: Flat, size: int) -> bool:
        """Whether an exponential, a power or the like may be far from one: what is as large as the side is no scale."""
        if not has(flat.eqn, Trait.VAST) or _is_less(self._opened, flat.ins[0], Trait.TAKES_EXTREMUM | Trait.LOGARITHM):
            return False
        if has(flat.eqn, Trait.POWER) and _magnitude(self._ranges_if_learned(flat.ins[1])) <= _MOST:
            return False
        ranges = self._ranges if num_elements(flat.outs[0].aval) >= size else self._ranges_if_learned
        result = ranges(flat.outs[0])
        return result.low < math.exp(-_MOST) or result.high > math.exp(_MOST)


def _magnitude(numbers: Range) -> float:
    return max(-numbers.low, numbers.high)


def _exponentials(opened: Opened, sources: Iterable[Source]) -> Iterator[Value]:
    """The exponentials that values are sums or products of, but for those of what a maximum was taken off."""
    for maker in makers_behind(opened, sources, TO_PRODUCTS | Trait.POWER):
        if has(maker.eqn, Trait.EXPONENTIAL) and not _is_less(opened, maker.ins[0], Trait.TAKES_EXTREMUM):
            yield from maker.outs


def _is_less(opened: Opened, exponent: Source, of: int) -> bool:
    """Whether a result of something with a trait was taken off, as the maximum is."""
    subtractions = (maker for maker in makers_behind(opened, [exponent], MOVED) if has(maker.eqn, Trait.SUBTRACTS))
    return any(
        has(maker.eqn, of)
        for subtraction in subtractions
        for maker in makers_behind(opened, subtraction.ins[1:], MOVED | Trait.SELECTS | Trait.EXTREMUM)
    )
