"""Attention in a jaxpr, however it is written: `softmax(scale * q @ k.T + bias, mask) @ v`.

The search begins at a product and goes backwards: through what may lie on weights to a softmax (`weights`), through
what may lie on scores to another product (`scores`). What a kernel computes inside must be of no use to anyone else, so
every value on the way has to be read on the way alone. Whatever is not understood stays as it is written.
"""

from __future__ import annotations

from typing import NamedTuple

from jamp._compat import Atom, Eqn, Jaxpr, Literal, Var
from jamp._primitives import Trait, acts, has
from jamp.transforms.analysis.attention.conditions import Knows, plain
from jamp.transforms.analysis.attention.near_misses import near_miss
from jamp.transforms.analysis.attention.roles import Asides, Products, RefusedError, Roles, Seen, roles
from jamp.transforms.analysis.attention.scores import Scores
from jamp.transforms.analysis.attention.trail import Trail
from jamp.transforms.analysis.attention.weights import Weights
from jamp.transforms.analysis.reading.flat import Flat, Opened, Value
from jamp.transforms.program.attention import Attention, Factor, Layout, Mask, Operand, Part


class Found(NamedTuple):
    """An attention, and what it consists of.

    Attributes:
        eqn: The equation that makes its result.
        attention: What a kernel has to be told of it; None where it has to stay as written.
        reason: Why it has to; empty where it has not.
        written: The equations that it consists of.
    """

    eqn: Eqn
    attention: Attention | None = None
    reason: str = ""
    written: Part | None = None


def find_attention(jaxpr: Jaxpr, known: Knows) -> list[Found]:
    """The attentions of a jaxpr whose last product is one of its own equations, not one of a jaxpr inside.

    Args:
        jaxpr: The jaxpr.
        known: What is known of its inputs and constants.
    """
    if not any(has(eqn, Trait.MATRIX) for eqn in jaxpr.eqns):
        return []
    opened = Opened(jaxpr)
    found = []
    for flat in opened.eqns:
        (result, *_) = flat.outs or (None,)
        if has(flat.eqn, Trait.MATRIX) and result is not None and result.call == 0 and opened.is_live(result):
            sides = (_Search(jaxpr, opened, flat, side, known).found() for side in (0, 1))
            whole = [one for one in sides if one is not None]
            if not whole and (reason := near_miss(opened, flat, known)):
                whole = [Found(flat.eqn, reason=reason)]
            found += whole[:1]
    return found


class _Search:
    """Looks at one product, one of whose operands may be weights."""

    def __init__(self, jaxpr: Jaxpr, opened: Opened, last: Flat, side: int, known: Knows) -> None:
        self.jaxpr, self.opened, self.last, self.side = jaxpr, opened, last, side
        self.trail = Trail(opened, known)

    def found(self) -> Found | None:
        """The attention; None if there is none."""
        weights = self.last.ins[self.side]
        if isinstance(weights, Literal):
            return None
        layout = self.trail.axes.fresh(weights.aval.shape)
        contracted, _ = self.last.eqn.params["dimension_numbers"]
        self.trail.keys = tuple(label for axis in contracted[self.side] for label in layout[axis])
        logits = Weights(self.trail).logits(weights, layout)
        if logits is None:
            return None
        try:
            return self._described(layout, logits)
        except RefusedError as refused:
            return Found(self.last.eqn, reason=str(refused))

    def _described(self, weights: Layout, logits: Seen) -> Found:
        """The attention, once both products are known."""
        scores = Scores(self.trail)
        product = scores.product(*logits)
        if self.trail.reason or product is None:
            raise RefusedError(self.trail.reason or "its scores are no product of queries and keys")
        products = Products(self.trail, *product, self.last, self.side, weights)
        q, k, scale = products.queries_and_keys()
        v, result = products.values()
        axes = self.trail.axes
        asides = Asides(scores.conditions, scores.biases, [seen for seen, _ in scores.factors], result)
        found = roles(self.trail, products, q, k, v, asides)
        self._check_masked(scores, found)
        operands: dict[Var, int] = {}

        def operand(seen: Seen) -> Operand:
            source, layout = seen
            var = None if isinstance(source, Literal) else self.opened.outer(source)
            if var is None:
                raise RefusedError("an operand is made inside of a call")
            return Operand(operands.setdefault(var, len(operands)), axes.layout(layout))

        attention = Attention(
            sizes=tuple(axes.sizes),
            **found.labels(),
            query=operand(q),
            key=operand(k),
            value=operand(v),
            result=axes.layout(result),
            scale=scores.scale * scale * (1.0 if scores.cap is None else scores.cap),
            cap=scores.cap,
            causal=found.causal,
            window=found.window,
            places=found.places,
            factors=tuple(Factor(operand(seen), divides) for seen, divides in scores.factors),
            weighted=tuple(map(operand, self.trail.weighted)),
            biases=tuple((operand((source, layout)), sign) for source, layout, sign in scores.biases),
            masks=tuple(Mask(operand((leaf.source, leaf.layout)), leaf.keeps, leaf.added) for leaf in found.leaves),
            near_added=found.near,
            same=tuple((operand(first), operand(second)) for first, second in found.same),
            half=None,
        )
        self._check_alone()
        return Found(self.last.eqn, attention, "", self._written(operands))

    def _check_masked(self, scores: Scores, found: Roles) -> None:
        """Raises where weights are masked otherwise than scores, or a query may see no key, so that it gets zero."""
        for which, layout, keeps in self.trail.masked:
            conditions = scores.masks.conditions(which, layout, keeps)
            known = [*map(plain, scores.conditions)]
            if conditions is None or not all(plain(each) in known for each in conditions):
                raise RefusedError("its weights are masked after the softmax")
        sees_itself = found.causal and found.window is None and not (found.leaves or found.same or found.places)
        if self.trail.masked and not sees_itself:
            raise RefusedError(
                "its weights are masked after the softmax too, so that a query without a key gets zero: write "
                "jax.nn.softmax(jnp.where(mask, scores, -1e30))"
            )

    def _check_alone(self) -> None:
        """Raises where somebody else reads what the kernel computes inside."""
        inside = self.trail.inside
        result = self.last.outs[0]
        for flat in inside.values():
            if acts(flat.eqn):
                raise RefusedError(f"`{flat.eqn.primitive.name}` inside has an effect")
            for value in flat.outs:
                if value == result:
                    continue
                if value in self.opened.results or any(id(each) not in inside for each in self.opened.readers[value]):
                    raise RefusedError("its scores or weights are read elsewhere")

    def _written(self, operands: dict[Var, int]) -> Part:
        """The equations of the jaxpr between the operands and the result."""
        known = {**self.trail.inside, **self.trail.seen}
        tops = {flat.top for flat in known.values()}
        for flat in self.opened.eqns:
            if flat.top in tops and id(flat) not in known and not _is_cheap(flat.eqn):
                raise RefusedError(f"a call that it is in does `{flat.eqn.primitive.name}` too")
        makers = {var: top for top, eqn in enumerate(self.jaxpr.eqns) for var in eqn.outvars}
        result = self.last.outs[0].var
        needed: set[int] = set()
        left: list[Atom] = [result]
        while left:
            atom = left.pop()
            if isinstance(atom, Literal) or (atom in operands and atom is not result):
                continue
            top = makers.get(atom)
            if top is None or (top not in tops and self.opened.number(Value(0, atom)) is None):
                operands.setdefault(atom, len(operands))
            elif top not in needed:
                needed.add(top)
                left += self.jaxpr.eqns[top].invars
        if any(makers.get(var) in needed for var in operands):
            raise RefusedError("an operand is made inside of a call")
        return Part(tuple(self.jaxpr.eqns[top] for top in sorted(needed)), tuple(operands), (result,))


def _is_cheap(eqn: Eqn) -> bool:
    return not has(eqn, Trait.MATRIX | Trait.CONVOLVES | Trait.LOOPS | Trait.REDUCES | Trait.EXPENSIVE) and not acts(
        eqn
    )
