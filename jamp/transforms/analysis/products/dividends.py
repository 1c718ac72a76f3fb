"""Products that are divided by what is not made of them, as in linear attention, and those that are divided by.

The former, as in `(q @ s) / (q @ z)`, are sums that the divisor brings down to size. float16 ends at 65504, which such
a sum over some thousand positions passes. Where the divisor is made of the product (a norm, a softmax), or is a number,
it is a layer's activation.

The latter are products with a vector, as in a Sinkhorn iteration `a / (k @ v + eps)`. No matrix unit makes these
faster, and half has no range for kernels such as `exp(-cost / 0.1)`, nor for an epsilon beside their sums.

Of the former, those of kernels are products that float16 has no range for either: in `k @ y / k.sum(1)` a row may be as
small as the distance of a point from all others is large; so in `log(k @ y)`. Nor has it for `k @ exp(f / 0.1)`, nor
for decays, `(q * a) @ (k / a).T` with `a = cumprod(g)`. A softmax takes the maximum off first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from jamp._compat import Eqn, Jaxpr, Var
from jamp._primitives import MOVED, PRODUCTS, Trait, has, is_outer
from jamp.transforms.analysis.products.means import products_in
from jamp.transforms.analysis.reading.axes import free_sizes
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source, Value
from jamp.transforms.analysis.reading.walks import back, makers_behind
from jamp.transforms.program.flow import num_elements

_ON_THE_WAY = (
    MOVED | Trait.NEGATES | Trait.MULTIPLIES | Trait.ADDS | Trait.SELECTS | Trait.LIMITS
)  # fmt: skip
_FACTORS = MOVED | Trait.NEGATES | Trait.MULTIPLIES


def dividends(jaxpr: Jaxpr) -> frozenset[tuple[int, int]]:
    """Operands, each by its equation and position, that are such products, or the other factor of `x * (1 / y)`.

    Args:
        jaxpr: The jaxpr; calls in it are looked into.
    """
    if not any(has(eqn, Trait.DIVIDES) for eqn in jaxpr.eqns):
        return frozenset()
    opened = Opened(jaxpr)
    found: set[tuple[int, int]] = set()
    for flat in opened.eqns:
        for position, divisor in divided(opened, flat):
            products = set(_products(opened, flat.ins[position]))
            if products and not _is_made_of(opened, divisor, products):
                found.add((id(flat.eqn), position))
                found.update({(id(flat.eqn), 1 - position)} if has(flat.eqn, Trait.MULTIPLIES) else ())
    return frozenset(found)


def divisors(jaxpr: Jaxpr) -> frozenset[Var]:
    """Products with a vector that something is divided by, or a logarithm or a root is of, beside other terms.

    Args:
        jaxpr: The jaxpr; calls in it are looked into.
    """
    if not any(map(_is_with_vector, products_in(jaxpr))):
        return frozenset()
    opened = Opened(jaxpr)
    ends = [flat for flat in opened.eqns if has(flat.eqn, Trait.DIVIDES | Trait.SINGULAR)]
    products = {value for flat in ends for value in _products(opened, flat.ins[-1])}
    return frozenset(value.var for value in products if _is_with_vector(opened.made[value].eqn))


def kernels(jaxpr: Jaxpr) -> frozenset[Var]:
    """Products with exponentials that a logarithm is of, or that are divided by what the same exponentials make.

    And those of exponentials with exponentials, as of a kernel and the scalings that transport has by it, or of powers
    and cumulated products.

    Args:
        jaxpr: The jaxpr; calls in it are looked into.
    """
    opened = Opened(jaxpr)
    if not any(has(flat.eqn, Trait.DIVIDES | Trait.LOGARITHM | Trait.VAST) for flat in opened.eqns):
        return frozenset()
    found: set[Var] = set()
    for flat in opened.eqns:
        if has(flat.eqn, PRODUCTS) and all(_is_scaling(opened, side) for side in flat.ins):
            found.add(flat.outs[0].var)
        ends = [*divided(opened, flat), *([(0, None)] if has(flat.eqn, Trait.LOGARITHM) else [])]
        for position, divisor in ends:
            for product in _products(opened, flat.ins[position]):
                exponentials = set(_exponentials(opened, opened.made[product].ins))
                if exponentials and (divisor is None or _is_made_of(opened, divisor, exponentials)):
                    found.add(product.var)
    return frozenset(found)


def _is_scaling(opened: Opened, side: Source) -> bool:
    """Whether a value is multiplied with, or divided by, what may be vast: no learned scale, nor shares of a sum."""
    size = num_elements(side.aval)
    factors = [*makers_behind(opened, [side], _FACTORS | Trait.DIVIDES)]
    vast = {value for flat in factors if _is_vast(opened, flat, size) for value in flat.outs}
    small = (flat.outs[0] for flat in factors if num_elements(flat.outs[0].aval) < size)
    return bool(vast) and not any(_is_made_of(opened, total, vast) for total in small if total not in vast)


def _is_vast(opened: Opened, flat: Flat, size: int) -> bool:
    """Whether an equation computes an exponential of so many elements, or of what is computed, or the like of one."""
    if not has(flat.eqn, Trait.VAST) or _is_less(opened, flat.ins[0], Trait.TAKES_EXTREMUM | Trait.LOGARITHM):
        return False
    is_given = not any(True for _ in makers_behind(opened, flat.ins[-1:], _FACTORS | Trait.DIVIDES | Trait.LIMITS))
    if has(flat.eqn, Trait.POWER) and is_given:
        return False
    return num_elements(flat.outs[0].aval) >= size or has(flat.eqn, Trait.REDUCES) or not is_given


def _exponentials(opened: Opened, sources: Iterable[Source]) -> Iterator[Value]:
    """The exponentials that values are sums or products of, but for those of what a maximum was taken off."""
    for maker in makers_behind(opened, sources, _ON_THE_WAY | Trait.POWER):
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


def _is_with_vector(eqn: Eqn) -> bool:
    return 1 in free_sizes(eqn)


def divided(opened: Opened, flat: Flat) -> Iterator[tuple[int, Source]]:
    """What an equation divides an operand by, with the position of that operand."""
    if has(flat.eqn, Trait.DIVIDES) and len(flat.ins) == 2:
        yield 0, flat.ins[1]
    elif has(flat.eqn, Trait.MULTIPLIES) and len(flat.ins) == 2:
        for position, other in enumerate(reversed(flat.ins)):
            maker = opened.maker(other)
            while maker is not None and has(maker.eqn, MOVED):
                maker = opened.maker(maker.ins[0])
            if maker is not None and has(maker.eqn, Trait.DIVIDES) and _is_reciprocal(opened, maker):
                yield position, maker.ins[-1]


def _is_reciprocal(opened: Opened, flat: Flat) -> bool:
    """Whether a division is of a number, or of the one that `rsqrt` divides."""
    return len(flat.ins) == 1 or opened.number(flat.ins[0]) is not None


def _products(opened: Opened, source: Source) -> Iterator[Value]:
    """The products that a value is a sum or a multiple of."""
    for maker in makers_behind(opened, [source], _ON_THE_WAY):
        if has(maker.eqn, PRODUCTS) and not is_outer(maker.eqn):
            yield from maker.outs


def _is_made_of(opened: Opened, source: Source, values: set[Value]) -> bool:
    """Whether a divisor is made of some values, or of nothing that the program is given."""
    sought = set(map(opened.first, values))
    given = False
    for value, flat in back(opened, [source], lambda flat, _: flat.values):
        if opened.first(value) in sought:
            return True
        given |= flat is None
    return not given
