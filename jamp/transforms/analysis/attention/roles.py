"""Which labels of an attention are its batch, heads, queries, keys and features, and what its masks say of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jamp._compat import Literal
from jamp._primitives import SCALES, Trait, has
from jamp.transforms.analysis.attention.conditions import Condition, Leaf, Same, plain
from jamp.transforms.analysis.attention.trail import Trail
from jamp.transforms.analysis.reading.flat import Flat, Source, Value
from jamp.transforms.program.attention import Labels, Layout, Place

Seen = tuple[Source, Layout]


class RefusedError(Exception):
    """Raised where something is an attention, but not one that a kernel computes."""


class Products:
    """The two products of an attention, and the layouts of what they read.

    Attributes:
        trail: The search.
        first: The product of queries and keys.
        scores: The layout of its result.
        last: The product of weights and values.
        side: Which operand of the last product the weights are.
        weights: Their layout.
        depth: Labels of what queries and keys are multiplied over.
        width: Labels of the values' features.
    """

    def __init__(self, trail: Trail, first: Flat, scores: Layout, last: Flat, side: int, weights: Layout) -> None:
        self.trail, self.first, self.scores = trail, first, scores
        self.last, self.side, self.weights = last, side, weights
        self.depth: Labels = ()
        self.width: Labels = ()
        for product in (first, last):
            trail.inside[id(product)] = product

    def queries_and_keys(self) -> tuple[Seen, Seen, float]:
        """Queries, keys, and what the program has multiplied them with."""
        contracted, batch = self.first.eqn.params["dimension_numbers"]
        axes = self.trail.axes
        depth = [axes.new(self.first.ins[0].aval.shape[axis]) for axis in contracted[0]]
        self.depth = tuple(label for labels in depth for label in labels)
        place, found = len(batch[0]), list[Seen]()
        for source, bound, together in zip(self.first.ins, contracted, batch, strict=True):
            at: list[Labels] = [()] * source.aval.ndim
            for number, axis in enumerate(together):
                at[axis] = self.scores[number]
            for labels, axis in zip(depth, bound, strict=True):
                at[axis] = labels
            for axis in range(source.aval.ndim):
                if axis not in (*bound, *together):
                    at[axis] = self.scores[place]
                    place += 1
            found.append((source, tuple(at)))
        if any(isinstance(source, Literal) for source, _ in found):
            raise RefusedError("its queries or keys are numbers")
        if set(axes.whole(self.trail.keys)) <= set(self.trail.labels(found[0][1])):
            found.reverse()
        (q, of_q), (k, of_k) = (self._unscaled(*seen) for seen in found)
        return q, k, of_q * of_k

    def _unscaled(self, source: Source, layout: Layout) -> tuple[Seen, float]:
        """An operand in front of views, and of a multiplication with a number."""
        source, layout = self.trail.outermost(source, layout)
        flat = self.trail.opened.maker(source)
        if flat is None or flat.outs[0].call or not has(flat.eqn, SCALES):
            return (source, layout), 1.0
        number = self.trail.opened.number(flat.ins[-1])
        inner = flat.ins[0]
        if not number or not isinstance(inner, Value) or inner.aval.shape != flat.outs[0].aval.shape:
            return (source, layout), 1.0
        self.trail.see(flat)
        return self.trail.outermost(inner, layout), 1 / number if has(flat.eqn, Trait.DIVIDES) else number

    def values(self) -> tuple[Seen, Layout]:
        """The values, and the layout of the result."""
        contracted, batch = self.last.eqn.params["dimension_numbers"]
        mine, other = self.side, 1 - self.side
        source = self.last.ins[other]
        if isinstance(source, Literal):
            raise RefusedError("its values are numbers")
        at: list[Labels] = [()] * source.aval.ndim
        for bound in (contracted, batch):
            for axis, theirs in zip(bound[mine], bound[other], strict=True):
                at[theirs] = self.weights[axis]
        free = [axis for axis in range(source.aval.ndim) if axis not in (*contracted[other], *batch[other])]
        for axis in free:
            at[axis] = self.trail.axes.new(source.aval.shape[axis])
        self.width = tuple(label for axis in free for label in at[axis])
        rest = [axis for axis in range(len(self.weights)) if axis not in (*contracted[mine], *batch[mine])]
        sides = [[self.weights[axis] for axis in rest], [at[axis] for axis in free]]
        result = [self.weights[axis] for axis in batch[mine]]
        for each in sides if mine == 0 else reversed(sides):
            result += each
        return self.trail.outermost(source, tuple(at)), tuple(result)


class Asides(NamedTuple):
    """What lies on scores.

    Attributes:
        conditions: Which of them count.
        biases: What is added to them.
        factors: What they are multiplied with.
        result: The layout of the result.
    """

    conditions: Sequence[Condition]
    biases: Sequence[tuple[Source, Layout, float]]
    factors: Sequence[Seen]
    result: Layout


class Roles(NamedTuple):
    """The labels of an attention, by what they are; see `program.attention.Attention`.

    Attributes:
        causal: Whether a query sees only keys that do not come after it.
        window: How many keys before its own position a query sees; None for all.
        places: What else the mask says of places; see `program.attention.Place`.
        leaves: What operands say of scores.
        near: Whether places, and what is the same, hide keys by adding a number.
        same: Operands of which one of queries and one of keys are equal where scores count.
    """

    batch: Labels
    heads: Labels
    groups: Labels
    queries: Labels
    keys: Labels
    depth: Labels
    width: Labels
    causal: bool
    window: int | None
    places: tuple[Place, ...]
    leaves: tuple[Leaf, ...]
    near: bool
    same: tuple[tuple[Seen, Seen], ...]

    def labels(self) -> dict[str, Labels]:
        """The labels by name."""
        names = ("batch", "heads", "groups", "queries", "keys", "depth", "width")
        return {name: getattr(self, name) for name in names}


def roles(trail: Trail, products: Products, q: Seen, k: Seen, v: Seen, asides: Asides) -> Roles:
    """Tells batch, heads, queries and keys apart.

    Raises:
        RefusedError: If the labels are not those of an attention.
    """
    of_q, of_k, of_v = (trail.labels(layout) for _, layout in (q, k, v))
    whole = trail.axes.whole
    keys, width, contracted = whole(trail.keys), whole(products.width), set(whole(products.depth))
    depth = tuple(label for label in of_k if label in of_q and label in contracted)
    shared = [label for label in of_q if label in of_k and label not in depth]
    own = [label for label in of_q if label not in of_k]
    if set(of_k) - {*shared, *depth, *keys} or set(of_v) - {*of_q, *keys, *width} or contracted != set(depth):
        raise RefusedError("its axes are not those of an attention")
    if not set(keys) <= set(of_v) or set(keys) & set(of_q) or not set(keys) <= set(of_k):
        raise RefusedError("its keys and values have different axes")
    conditions = [each for each in asides.conditions if not each.added or plain(each) not in asides.conditions]
    same = tuple(dict.fromkeys(_with_keys_last(trail, each) for each in conditions if isinstance(each, Same)))
    orders, leaves = _read(trail, q[1], own, keys, conditions)
    of_sides = [layout for pair in same for _, layout in pair]
    noted = [*of_sides, *(leaf.layout for leaf in leaves), *(layout for _, layout, _ in asides.biases)]
    queries = _queries(trail, own, keys, orders, noted)
    groups = tuple(label for label in own if label not in queries)
    if set(groups) & set(of_v):
        raise RefusedError("its values have more heads than its keys")
    if set(queries) & set(of_v):
        raise RefusedError("its values differ from query to query")
    beside = bool(shared) and bool(groups) and abs(shared[-1] - groups[0]) == 1
    heads = tuple(shared[-1:]) if len(shared) > 1 or beside else ()
    batch = tuple(label for label in shared if label not in heads)
    causal, window, places = _placed(orders, queries)
    near = {each.added for each in conditions if not isinstance(each, Leaf)}
    if len(near) > 1 and (leaves or same or places or window is not None):
        raise RefusedError("its mask of places is put in the place of some scores, and added to others")
    sides = batch, heads, groups, queries, keys, depth, width
    found = Roles(*sides, causal, window, places, tuple(leaves), near == {True}, same)
    _check(trail, found, asides)
    return found


def _check(trail: Trail, found: Roles, asides: Asides) -> None:
    """Raises where something has an axis that queries and keys lack, as that of a `vmap` over the mask alone."""
    rows = {*found.batch, *found.heads, *found.groups, *found.queries}
    of_scores = [*(leaf.layout for leaf in found.leaves), *(layout for _, layout, _ in asides.biases)]
    of_scores += [layout for pair in found.same for _, layout in pair]
    of_rows = [layout for _, layout in (*asides.factors, *trail.weighted)]
    result = trail.labels(asides.result)
    if (
        any(set(trail.labels(layout)) - {*rows, *found.keys} for layout in of_scores)
        or any(set(trail.labels(layout)) - rows for layout in of_rows)
        or sorted(result) != sorted({*rows, *found.width})
    ):
        raise RefusedError("its scores or its result have an axis that neither queries nor keys have")


def _with_keys_last(trail: Trail, same: Same) -> tuple[Seen, Seen]:
    first, second = (same.first, same.at), (same.second, same.beside)
    return (second, first) if trail.has_keys(same.at) else (first, second)


class _Order(NamedTuple):
    """That `sign * (query - key) + offset >= 0`, or another condition on places where there are no queries."""

    query: int | None
    sign: int
    offset: int
    place: Place


def _read(
    trail: Trail, queries: Layout, own: Sequence[int], keys: Labels, conditions: Sequence[Condition]
) -> tuple[list[_Order], list[Leaf]]:
    """Conditions on places, and what operands say."""
    orders: list[_Order] = []
    leaves: list[Leaf] = []
    for condition in conditions:
        if isinstance(condition, Leaf):
            leaves.append(Leaf(*trail.outermost(condition.source, condition.layout), *condition[2:]))
            continue
        if isinstance(condition, Same):
            continue
        known = [(label, condition.along(label, keys[0])) for label in own] if len(keys) == 1 else []
        labels = set(condition.difference.slopes)
        if not labels <= {*trail.labels(queries), *keys} or set(trail.axes.whole(tuple(labels))) != labels:
            raise RefusedError("its mask depends on places in a way that no kernel knows")
        place = Place(tuple(sorted(condition.difference.slopes.items())), condition.difference.offset)
        found = [_Order(label, *order, place) for label, order in known if order is not None]
        orders += found[:1] or [_Order(None, 0, 0, place)]
    return orders, leaves


def _queries(
    trail: Trail,
    own: Sequence[int],
    keys: Labels,
    orders: Sequence[_Order],
    beside: Sequence[Layout],
) -> Labels:
    """Which labels that keys lack are the queries; the others are heads that share keys.

    Queries are those that a mask or a bias tells apart; else, those that there are most of.
    """
    if len(own) == len(keys) > 1:
        return tuple(own)
    placed = {order.query for order in orders if order.query is not None}
    noted = {label for layout in beside for label in trail.labels(layout) if label in own}
    candidates = placed or (noted if len(noted) == 1 else set(own))
    return (max(sorted(candidates), key=lambda label: _count(trail.axes.sizes[label])),) if candidates else ()


def _count(size: object) -> int:
    return size if isinstance(size, int) else 1 << 40


def _placed(orders: Sequence[_Order], queries: Labels) -> tuple[bool, int | None, tuple[Place, ...]]:
    """Whether the mask is causal, its window, and what else it says; of another axis than the queries, all."""
    causes = [order for order in orders if (order.query,) == queries and (order.sign, order.offset) == (1, 0)]
    windows = [
        order for order in orders if causes and (order.query,) == queries and order.sign == -1 and order.offset >= 0
    ]
    others = [order.place for order in orders if order not in windows and order not in causes]
    return bool(causes), min((order.offset for order in windows), default=None), tuple(others)
