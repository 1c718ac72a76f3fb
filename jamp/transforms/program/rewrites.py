"""What equations are emitted as, where binding a primitive to cast operands is not enough: data, no code."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jamp._compat import Eqn
from jamp.transforms.program.attention import Attention
from jamp.transforms.program.flow import Flows
from jamp.transforms.program.plan import Casts, Inside, Replan, Rewrite
from jamp.transforms.program.setting import EightBits, Scaling


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward(Rewrite):
    """Nothing is emitted: the operand, brought to its dtype, is the result."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retyped(Rewrite):
    """The primitive with parameters that follow the new dtypes, and results that are cast.

    Attributes:
        params: The parameters; None for those of the equation.
        out_casts: Casts of the results.
        spread: For each operand, what it is cast to once it has the shape of the result; None leaves it.
    """

    params: dict[str, Any] | None = None
    out_casts: Casts = ()
    spread: Casts = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideProduct(Rewrite):
    """A product of half operands that gives its float32 accumulator, with a derivative in half."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float8Product(Rewrite):
    """A product of operands in 8 bits, whose derivatives are such products too.

    Attributes:
        half: What is multiplied in where 8 bits are not: tangents in forward mode.
        out: Dtype of the result.
        options: How it is made.
        scalings: Which elements of each operand share a scale.
        in_half: For each operand, whether its gradient is a product in half, of the other operand as it is.
        wide_gradients: Whether operands that are float32, such as weights, have gradients that never were half.
    """

    half: np.dtype
    out: np.dtype
    options: EightBits
    scalings: tuple[Scaling, Scaling]
    in_half: tuple[bool, bool] = (False, False)
    wide_gradients: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideGradient(Rewrite):
    """A product with the gradients of its weights in float32. The emission reads the weights once more, as they are.

    Attributes:
        product: What the product is emitted as otherwise; None binds the primitive.
        weights: Which operands are weights.
        out_casts: Casts of its result.
    """

    product: Rewrite | None
    weights: tuple[int, ...]
    out_casts: Casts = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scatter(Rewrite):
    """A scatter of half data in float32: its parameters hold a function that was traced in half.

    Attributes:
        out_casts: Casts of its result.
    """

    out_casts: Casts = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Softmax(Rewrite):
    """A softmax, found at its division: its half result is all that the derivative needs.

    Attributes:
        axes: What it sums over.
        half: Dtype of its result.
        views: What the program does with the exponentials before it divides them: transposes and the like.
    """

    axes: tuple[int, ...]
    half: np.dtype
    views: tuple[Eqn, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledSum(Rewrite):
    """A float32 sum of scaled half terms, which are scaled in float32.

    Attributes:
        terms: For each term, the equations that scale it, each with the position of the operand that it scales. The
            emission reads, for each term, what is scaled and the other operands of these equations.
    """

    terms: tuple[tuple[tuple[Eqn, int], ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rectified(Rewrite):
    """`x > 0` as `max(x, 0) > 0`, which the next layer keeps, so that `x` need not be kept."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pinned(Rewrite):
    """An extremum whose float32 operand is rounded first, for this step and all later readers alike.

    Attributes:
        digits: The dtype whose number of digits is kept; exponents stay those of float32.
    """

    digits: np.dtype


class Call(Inside):
    """A `jit` or its like, bound again with another jaxpr."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Remat(Inside):
    """A `jax.checkpoint` of the user's.

    Attributes:
        raised: Operands in float32 that are half where the checkpoint keeps them: they follow the operands.
    """

    raised: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedAttention(Inside):
    """An attention, found at its last product: one kernel where there is one, and elsewhere as it is written.

    Attributes:
        attention: What a kernel has to be told. The plan inside is that of the equations as they are written.
    """

    attention: Attention


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizedRemat(Inside):
    """A forward rule with `optimize_remat`, in whose place JAX runs the function where nobody reads its residuals.

    Attributes:
        replan: Plans the function, which is known only then.
    """

    replan: Replan


class Branches(Inside):
    """A `cond`."""


class ShardMap(Inside):
    """A `jax.shard_map`."""


class While(Inside):
    """A `while`: the plans of its condition and of its body."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scan(Inside):
    """A `scan`.

    Attributes:
        shared: Half constants whose cotangents add up in float32. What has these, in float32, follows the operands.
        raised: Operands in float32 that are half where the loop keeps them: they come last.
        states_may_be_half: Whether the backward pass may be given what the loop carries in half.
    """

    shared: tuple[int, ...] = ()
    raised: tuple[int, ...] = ()
    states_may_be_half: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomRule(Inside):
    """A function with a rule of its own.

    Attributes:
        replan: Plans a jaxpr of the rule, which is known only once the function is differentiated.
        converges: Whether a loop in the function ends by what products compute.
        loops: Whether there is any loop in the function.
        solves: Whether the function solves an equation by linear algebra.
        halves: For each result, the cast in which its backward part would be given it, and it is handed over as well.
    """

    replan: Replan
    converges: bool
    loops: bool
    solves: bool
    halves: Casts

    def residual(self, states: Flows) -> Flows:
        """In which states a reverse-mode rule keeps values.

        A rule may go through the steps of a loop again, or solve with the same matrix, and has to be given what the
        function was given.
        """
        return states if self.loops or self.solves else self.replan.residual(states)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CustomBatching(Inside):
    """A `custom_vmap`: a function with a rule for batches.

    Attributes:
        replan: Plans a jaxpr of the rule, which is known only once the function is mapped.
    """

    replan: Replan


class CustomTranspose(Rewrite):
    """A `linear_call`, as it was traced, whose transpose closes over values of the program."""
