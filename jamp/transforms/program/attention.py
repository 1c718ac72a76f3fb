"""What an attention consists of, wherever a program has its axes: `softmax(scale * q @ k.T + bias, mask) @ v`.

Scores may be capped: `cap * tanh(scale * q @ k.T / cap)` in their place.

Each axis of an operand is a row of *labels*, from the slowest to the fastest. A label stands for the same index in all
operands. An axis of one element has none, and an axis that a program merged of two (batch and heads, say) has two.
Kernels are told all this, and what they cannot do is a reason in words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from jamp._compat import Eqn, Var
from jamp._dtypes import is_half

_LARGEST_MASK = 1 << 26  # Queries times keys, of which a kernel for TPUs is told one by one which count.
# What is added to all scores of a query and is less than this leaves nothing of them: such float32 numbers lie 8 apart.
ABSORBS = -1e8
Size = int  # Or a polynomial of unknowns, in a program that is exported for any size.
Labels = tuple[int, ...]
Layout = tuple[Labels, ...]  # The labels of each axis.


class Operand(NamedTuple):
    """An operand of an attention.

    Attributes:
        place: Which of the operands it is.
        layout: The labels of its axes.
    """

    place: int
    layout: Layout


class Factor(NamedTuple):
    """What scores are multiplied with, or divided by, without labels of the keys."""

    operand: Operand
    divides: bool


class Mask(NamedTuple):
    """What an operand says of scores.

    Attributes:
        operand: The operand.
        keeps: Whether scores count where it is not zero, or where it is.
        added: Whether keys are hidden by adding a number: a query that sees no key for that sees all of them.
    """

    operand: Operand
    keeps: bool
    added: bool


class Place(NamedTuple):
    """That `sum(slope * index) + offset >= 0` of the indices of labels.

    Attributes:
        slopes: Labels, and the slope of each.
        offset: The offset.
    """

    slopes: tuple[tuple[int, int], ...]
    offset: int


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Some equations of a jaxpr, and what goes in and comes out: to planning and emission, a jaxpr.

    Attributes:
        eqns: The equations, in order.
        invars: What they read that others make.
        outvars: What of theirs others read.
        constvars: None: constants of the whole go in.
    """

    eqns: tuple[Eqn, ...]
    invars: tuple[Var, ...]
    outvars: tuple[Var, ...]
    constvars: tuple[Var, ...] = ()


@dataclasses.dataclass(frozen=True)
class Attention:
    """What a kernel has to be told of an attention, for operands as the program has them.

    Attributes:
        sizes: Of each label, by its number. (Unknown ones of an exported program are no numbers.)
        batch: Labels that all operands may have.
        heads: Labels of the heads that keys and values have.
        groups: Labels of the queries' heads beyond these: in each group they share keys and values.
        queries: Labels of the queries.
        keys: Labels of the keys, which the softmax adds up.
        depth: Labels of what queries and keys are multiplied over.
        width: Labels of the values' features.
        query: The queries, with `batch`, `queries`, `heads`, `groups` and `depth`.
        key: The keys, with `batch`, `keys`, `heads` and `depth`.
        value: The values, with `batch`, `keys`, `heads` and `width`.
        result: The layout of the result.
        scale: What scores are multiplied with.
        cap: What they stay below, by way of a `tanh`; None where nothing caps them.
        causal: Whether a query sees only keys that do not come after it.
        window: How many keys before its own position a query sees; None for all.
        places: What else the places of scores that count fulfil.
        factors: What scores are multiplied with beside `scale`.
        weighted: What weights are multiplied with after the softmax, without labels of the keys.
        biases: What is added to the scores, each times a number.
        masks: Which scores count, as operands say.
        near_added: Whether `causal`, `window`, `places` and `same` hide keys by adding a number.
        same: Which scores count: where two operands, mostly one of queries and one of keys, are equal.
        half: The dtype in which queries, keys and values are multiplied, where it is known.
    """

    sizes: tuple[Size, ...]
    batch: Labels
    heads: Labels
    groups: Labels
    queries: Labels
    keys: Labels
    depth: Labels
    width: Labels
    query: Operand
    key: Operand
    value: Operand
    result: Layout
    scale: float
    cap: float | None
    causal: bool
    window: int | None
    places: tuple[Place, ...]
    factors: tuple[Factor, ...]
    weighted: tuple[Operand, ...]
    biases: tuple[tuple[Operand, float], ...]
    masks: tuple[Mask, ...]
    near_added: bool
    same: tuple[tuple[Operand, Operand], ...]
    half: np.dtype | None

    def is_repeated(self, operand: Operand) -> bool:
        """Whether the queries, keys or values are given once for several heads or members of the batch."""
        present = {label for axis in operand.layout for label in axis}
        shared = {*self.batch, *self.heads, *self.groups} - present
        return any(self.sizes[label] != 1 for label in shared)

    @property
    def may_see_none(self) -> bool:
        """Whether a query may see no key, whatever the operands are."""
        within = self.window is None or self.size(self.queries) <= self.size(self.keys) + self.window
        return bool(self.masks or self.places or self.same) or not within

    @property
    def lifts_near(self) -> bool:
        """Whether a query that sees no key sees such that places hide, and what is the same."""
        return self.near_added and self.may_see_none

    def size(self, labels: Labels) -> Size:
        """How many elements an axis of these labels has."""
        product = 1
        for label in labels:
            product = product * self.sizes[label]
        return product

    def is_of_one_side(self, operand: Operand) -> bool:
        """Whether an operand, of any batch, is of keys alone or of queries alone: padding, which ids can say."""
        return self.is_of(self.keys, operand) or self.is_of(self.queries, operand)

    def is_of(self, side: Labels, operand: Operand) -> bool:
        """Whether an operand has no axes but those of a side, and of the batch."""
        return {label for axis in operand.layout for label in axis} <= {*self.batch, *side}

    def seen(self) -> np.ndarray:
        """Which keys each query sees, as far as the places of the two tell: `bool[queries, keys]`."""
        rows, columns = self._indices(self.queries), self._indices(self.keys)
        orders = [*self.places]
        if self.causal:
            (query,), (key,) = self.queries, self.keys
            orders.append(Place(((query, 1), (key, -1)), 0))
            orders += [Place(((query, -1), (key, 1)), self.window)] if self.window is not None else []
        seen = np.ones((self.size(self.queries), self.size(self.keys)), bool)
        for slopes, offset in orders:
            of_query = sum((slope * rows[label] for label, slope in slopes if label in rows), np.asarray(offset))
            of_key = sum((slope * columns[label] for label, slope in slopes if label in columns), np.asarray(0))
            seen &= of_query[..., None] >= -of_key
        return seen

    def _indices(self, labels: Labels) -> dict[int, np.ndarray]:
        """By label, its index at each element of an axis of all of them."""
        indices = np.indices([self.sizes[label] for label in labels]).reshape(len(labels), -1)
        return dict(zip(labels, indices, strict=True))


def _refused_by_cudnn(attention: Attention) -> str:
    """What `jax.nn.dot_product_attention(..., implementation="cudnn")` raises on all GPUs, and where it is slow."""
    depth, width = attention.size(attention.depth), attention.size(attention.width)
    if attention.cap is not None:
        return "its scores are capped by `tanh`"
    if depth != width:
        return f"its queries have {depth} features, its values {width}"
    if depth % 8 or depth > 128:
        return f"its heads have {depth} features: not at most 128, and a multiple of 8"
    # Its scores take less memory than its keys. On an H100, of 1,024 keys, a gradient takes 0.36 ms; 0.12 as written.
    return "it has one query" if attention.size(attention.queries) == 1 else ""


def _refused_by_flash(attention: Attention) -> str:
    """What JAX's kernels for TPUs cannot do."""
    depth, width = attention.size(attention.depth), attention.size(attention.width)
    if depth != width:
        return f"its queries have {depth} features, its values {width}"
    queries, keys = attention.size(attention.queries), attention.size(attention.keys)
    if queries % 128 or keys % 128:
        return f"it has {queries} queries and {keys} keys: not multiples of 128"
    if attention.biases:
        return "it adds a bias to its scores"
    if len(attention.same) > 1 or not all(
        attention.is_of(attention.queries, one) and attention.is_of(attention.keys, other)
        for one, other in attention.same
    ):
        return "it compares its queries with its keys twice, or by heads"
    if not all(attention.is_of_one_side(mask.operand) for mask in attention.masks):
        return (
            "it has a mask for each query and key that is not known, while a program is traced, to be causal or a "
            "window: it is, where it is made inside of the function by jnp.tril or of positions, or is closed over, "
            "and not where it is an argument"
        )
    if attention.window is not None and queries > keys:
        return f"it has a window of {attention.window + 1} keys, and queries that may see none"
    if not attention.places:
        return ""
    if attention.masks or attention.same:
        return "its mask depends on places, and is not the causal one, and on the program's data"
    if {label for place in attention.places for label, _ in place.slopes} - {*attention.queries, *attention.keys}:
        return "its mask depends on places in other axes than those of queries and keys"
    if queries * keys > _LARGEST_MASK:
        return f"its mask depends on places, and is not the causal one, of {queries} x {keys} queries and keys"
    return "" if attention.seen().any(axis=1).all() else "its mask depends on places, and queries may see no key"


class Kernel(NamedTuple):
    """A kernel.

    Attributes:
        name: Its name.
        refuses: Why it cannot do an attention; empty where it can.
        divides: Whether XLA can divide it over devices.
    """

    name: str
    refuses: Callable[[Attention], str]
    divides: bool


# By the name of the platform that a program is lowered for.
KERNELS: Mapping[str, Kernel] = {
    "cuda": Kernel("cuDNN", _refused_by_cudnn, divides=True),
    "tpu": Kernel("flash attention", _refused_by_flash, divides=False),
}


def refusals(attention: Attention) -> dict[str, str]:
    """By platform, why its kernel cannot do an attention."""
    if any(type(size) is not int for size in attention.sizes):
        return dict.fromkeys(KERNELS, "its sizes are not known")
    if attention.half is not None and not is_half(attention.half):
        return dict.fromkeys(KERNELS, f"its products are {attention.half}")
    return {platform: reason for platform, kernel in KERNELS.items() if (reason := kernel.refuses(attention))}


def refused_everywhere(attention: Attention) -> str:
    """Why no kernel can do an attention; empty where one can."""
    found = refusals(attention)
    if len(found) < len(KERNELS):
        return ""
    return "; ".join(dict.fromkeys(f"{platform}: {reason}" for platform, reason in found.items()))
