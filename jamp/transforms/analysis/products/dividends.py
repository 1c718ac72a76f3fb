"""Products that are divided by what is not made of them, as in linear attention, and those that are divided by.

The former, as in `(q @ s) / (q @ z)`, are sums that the divisor brings down to size. float16 ends at 65504, which such
a sum over some thousand positions passes. Where the divisor is made of the product (a norm, a softmax), or is a number,
it is a layer's activation.

The latter are products with a vector, as in a Sinkhorn iteration `a / (k @ v + eps)`. No matrix unit makes these
faster, and half has no range for kernels such as `exp(-cost / 0.1)`, nor for an epsilon beside their sums.
"""

from __future__ import annotations

from collections.abc import Iterator

from jamp._compat import Eqn, Jaxpr, Var
from jamp._primitives import MOVED, PRODUCTS, Trait, has, is_outer
from jamp.transforms.analysis.products.means import products_in
from jamp.transforms.analysis.reading.axes import free_sizes
from jamp.transforms.analysis.reading.flat import Flat, Opened, Source, Value
from jamp.transforms.analysis.reading.walks import back, makers_behind

# What stands between a product and what is divided.
TO_PRODUCTS = MOVED | Trait.NEGATES | Trait.MULTIPLIES | Trait.ADDS | Trait.SELECTS | Trait.LIMITS


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
            products = set(products_behind(opened, flat.ins[position]))
            if products and not is_made_of(opened, divisor, products):
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
    products = {value for flat in ends for value in products_behind(opened, flat.ins[-1])}
    return frozenset(value.var for value in products if _is_with_vector(opened.made[value].eqn))


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


def products_behind(opened: Opened, source: Source) -> Iterator[Value]:
    """The products that a value is a sum or a multiple of."""
    for maker in makers_behind(opened, [source], TO_PRODUCTS):
        if has(maker.eqn, PRODUCTS) and not is_outer(maker.eqn):
            yield from maker.outs


def is_made_of(opened: Opened, source: Source, values: set[Value]) -> bool:
    """Whether a divisor is made of some values, or of nothing that the program is given."""
    sought = set(map(opened.first, values))
    given = False
    for value, flat in back(opened, [source], lambda flat, _: flat.values):
        if opened.first(value) in sought:
            return True
        given |= flat is None
    return not given
