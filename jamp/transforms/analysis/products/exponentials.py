"""Products with exponentials that float16 has no range for.

Those of kernels: in `k @ y / k.sum(1)` a row may be as small as the distance of a point from all others is large; so in
`log(k @ y)`. Those of a kernel and scalings, `k @ exp(f / 0.1)`. And those of decays, `(q * a) @ (k / a).T` with
`a = cumprod(g)`. A softmax takes the maximum off first.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

from jamp._compat import Jaxpr, Literal, Var
from jamp._dtypes import FLOAT32
from jamp._primitives import MOVED, PRODUCTS, Trait, has, holds
from jamp.transforms.analysis.products.dividends import TO_PRODUCTS, divided, is_made_of, products_behind
from jamp.transforms.analysis.reading.flat import ONCE, Flat, Opened, Source, Value, written
from jamp.transforms.analysis.reading.numbers import of_literal, of_results
from jamp.transforms.analysis.reading.walks import back, makers_behind
from jamp.transforms.program.flow import num_elements
from jamp.transforms.program.scale import Range

_FACTORS = MOVED | Trait.NEGATES | Trait.MULTIPLIES | Trait.DIVIDES | Trait.SELECTS | Trait.ASSEMBLES
_TO_EXPONENTIALS = TO_PRODUCTS | Trait.POWER | Trait.ASSEMBLES
_Ranges = Callable[[Source], Range]
_ANY = Range(-math.inf, math.inf)
_LEARNED = Range(0.5, 2.0)
_MOST = 5.0  # Of an exponent: two such factors are 22,000 at most, where float16 ends at 65,504.
_EPSILON = 1e-3


def kernels(jaxpr: Jaxpr, consts: Sequence[object]) -> frozenset[Var]:
    """Products with exponentials that a logarithm is of, or that are divided by what the same exponentials make.

    And those of exponentials with exponentials, as of a kernel and the scalings that transport has by it, or of powers
    and cumulated products.

    Args:
        jaxpr: The jaxpr; calls in it are looked into.
        consts: Its constants.
    """
    if not holds(jaxpr.eqns, Trait.DIVIDES | Trait.LOGARITHM | Trait.VAST, ONCE | Trait.BRANCHES):
        return frozenset()
    opened = Opened(jaxpr, deep=True)
    scalings = _Scalings(opened, dict(zip(jaxpr.constvars, consts, strict=True)))
    found = set(scalings.products())
    for flat in opened.eqns:
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
        """The ranges of all values where what a program is given is in one, and results of layers if it is learned."""
        known = dict(self._consts)

        def read(source: Source) -> Range:
            return known.get(source, given) if isinstance(source, Value) else of_literal(source.val) or _ANY

        for flat in self._opened.eqns:
            is_layer = given is _LEARNED and has(flat.eqn, PRODUCTS | Trait.SUMS_AXES)
            found = (given,) if is_layer else of_results(flat.eqn, [*map(read, flat.ins)], FLOAT32)
            known.update((out, each or _ANY) for out, each in zip(flat.outs, found, strict=False))
        return read

    def products(self) -> Iterator[Var]:
        """Products both of whose sides are scaled so, one of them by what may be large, and others with such a side."""
        flats = [flat for flat in self._opened.eqns if has(flat.eqn, PRODUCTS)]
        scaled: set[Value] = set()
        for flat in flats:
            scales = list(itertools.takewhile(bool, map(self._scales, flat.ins)))
            if len(scales) == len(flat.ins) and any(high > math.exp(_MOST) for _, high, *_ in itertools.chain(*scales)):
                scaled |= self._origins(flat)
        return (flat.outs[0].var for flat in flats if scaled and not scaled.isdisjoint(self._origins(flat)))

    def _origins(self, product: Flat) -> set[Value]:
        """The sides of a product before they were moved: those of a derivative are transposed."""
        moved = back(self._opened, product.ins, lambda flat, _: flat.values if has(flat.eqn, MOVED) else ())
        return {self._opened.first(value) for value, flat in moved if flat is None or not has(flat.eqn, MOVED)}

    def _scales(self, side: Source) -> list[Range]:
        """The ranges of what a side is scaled by, as far as they are vast; of what it is divided by, of the inverse."""
        opened, size = self._opened, num_elements(side.aval)
        flats = [flat for _, flat in back(opened, [side], _factors) if flat is not None]
        vast = {opened.first(out): each for flat in flats if (each := self._vast(flat, size)) for out in flat.outs}
        if not vast:
            return []
        below = [divisor for flat in flats for _, divisor in divided(opened, flat)]
        divisors = {opened.first(value) for value, _ in back(opened, below, _factors)}
        for flat in flats:
            is_sum = num_elements(flat.outs[0].aval) < size or opened.first(flat.outs[0]) in divisors
            if is_sum and not _factors(flat) and self._adds_up(flat, vast):
                return []
        return [_inverse(each) if value in divisors else each for value, each in vast.items()]

    def _adds_up(self, flat: Flat, vast: Container[Value]) -> bool:
        """Whether a value is a sum of vast ones, as those are of which something is a share."""
        first = self._opened.first
        return first(flat.outs[0]) not in vast and any(
            first(value) in vast for value, _ in back(self._opened, flat.ins)
        )

    def _vast(self, flat: Flat, size: int) -> Range | None:
        """The range of an exponential, a power or the like that may be far from one; what is learned is smaller."""
        if not has(flat.eqn, Trait.VAST) or _is_less(self._opened, flat.ins[0], Trait.TAKES_EXTREMUM | Trait.LOGARITHM):
            return None
        if has(flat.eqn, Trait.POWER) and _magnitude(self._ranges_if_learned(flat.ins[1])) <= _MOST:
            return None
        ranges = self._ranges if num_elements(flat.outs[0].aval) >= size else self._ranges_if_learned
        result = ranges(flat.outs[0])
        return result if result.low < math.exp(-_MOST) or result.high > math.exp(_MOST) else None


def _factors(flat: Flat, _: Value | None = None) -> list[Value]:
    """What a value is a multiple of: of its parts, where it is put together, and beside an epsilon or a bound."""
    if has(flat.eqn, _FACTORS):
        return flat.values
    numbers = [written(source) for source in flat.ins if isinstance(source, Literal)]
    beside = has(flat.eqn, Trait.ADDS | Trait.EXTREMUM) and any(n is not None and abs(n) < _EPSILON for n in numbers)
    return flat.values if beside else []


def _inverse(numbers: Range) -> Range:
    return Range(0.0, math.inf if numbers.low <= 0 else 1 / numbers.low)


def _magnitude(numbers: Range) -> float:
    return max(-numbers.low, numbers.high)


def _exponentials(opened: Opened, sources: Iterable[Source]) -> Iterator[Value]:
    """The exponentials that values are sums or products of, but for those of what a maximum was taken off."""

    def onward(flat: Flat, _: Value) -> list[Value]:
        is_scaled = has(flat.eqn, Trait.DIVIDES) and len(flat.ins) == 2 and opened.number(flat.ins[1]) is not None
        return flat.values if is_scaled or has(flat.eqn, _TO_EXPONENTIALS) else []

    for _, flat in back(opened, sources, onward):
        if flat is not None and has(flat.eqn, Trait.EXPONENTIAL):
            yield from () if _is_less(opened, flat.ins[0], Trait.TAKES_EXTREMUM) else flat.outs


def _is_less(opened: Opened, exponent: Source, of: int) -> bool:
    """Whether a result of something with a trait was taken off, as the maximum is: not off a decay."""
    subtractions = (maker for maker in makers_behind(opened, [exponent], MOVED) if has(maker.eqn, Trait.SUBTRACTS))
    return any(
        has(maker.eqn, of)
        for subtraction in subtractions
        if not any(_is_running(maker) for maker in makers_behind(opened, subtraction.ins[:1], MOVED))
        for maker in makers_behind(opened, subtraction.ins[1:], MOVED | Trait.SELECTS | Trait.EXTREMUM | Trait.ADDS)
    )


def _is_running(flat: Flat) -> bool:
    return has(flat.eqn, Trait.REDUCES) and flat.outs[0].aval.shape == flat.ins[0].aval.shape
