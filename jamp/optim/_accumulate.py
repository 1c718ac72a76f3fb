"""Gradients of a batch that does not fit in memory at once."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr, tree_leaves_with_path

from jamp._calls import explains
from jamp._tree import is_number
from jamp.scalers._base import raise_tree

P = ParamSpec("P")
R = TypeVar("R")


@explains("jamp.accumulate_gradients(jamp.scaled_value_and_grad(loss_fn, opt_state), 4)")
def accumulate_gradients(grad_fn: Callable[P, R], microbatches: int) -> Callable[P, R]:
    """Computes values and gradients of a batch in several passes, accumulated in float32.

    For a loss that is a mean over the batch, the answer is that of the whole batch, to the accuracy of float32; half
    precision gradients are raised before they are added, for a sum of many in half precision stops growing. All passes
    use the same parameters and the same loss scale, and nothing outlives the call: an overflow in one of them shows in
    the gradients that come out, so `jamp.loss_scaled` skips the step once for the whole batch, and the next batch
    starts from zero.

    A batch of `n` examples is dealt out like cards: pass `i` gets the examples `i`, `i + microbatches`, …. So each
    device keeps its own examples where the batch is sharded over devices, and no example travels.

    Args:
        grad_fn: What `jamp.scaled_value_and_grad`, `jamp.value_and_grad` or `jax.value_and_grad` returns: a function
            of parameters and batch that returns `(value, grads)`, or `((value, aux), grads)`.
        microbatches: Number of passes, 1 or more. The batch size has to be a multiple of it.

    Returns:
        A function with the arguments and the answer of `grad_fn`. Positional arguments after the first are the batch:
        trees of arrays that share a leading axis. Keyword arguments go to each pass as they are. The value and the
        gradients are means, float32; `aux` has a new leading axis of length `microbatches`.

    Raises:
        TypeError: If `grad_fn` cannot be called; when called, if it does not answer as `jax.value_and_grad` does.
        ValueError: If `microbatches` is not a positive integer; when called, if an array of the batch cannot be dealt
            out. All of them are named.

    Example:
        >>> import jax, jax.numpy as jnp, jamp
        >>> grad_fn = jax.value_and_grad(lambda w, x: (w * x).mean())
        >>> jamp.accumulate_gradients(grad_fn, 4)(jnp.float32(2.0), jnp.arange(8.0))
        (Array(7., dtype=float32), Array(3.5, dtype=float32))
    """
    if not callable(grad_fn):
        raise TypeError(f"`grad_fn` is {grad_fn!r}: expected a function. Write jax.value_and_grad(loss_fn).")
    if not isinstance(microbatches, (int, np.integer)) or isinstance(microbatches, bool) or microbatches < 1:
        raise ValueError(f"`microbatches` is {microbatches!r}: expected a positive integer.")
    microbatches = int(microbatches)
    differentiate: Callable[..., Any] = grad_fn

    @wraps(grad_fn)
    def accumulated(params: Any, *batch: Any, **kwargs: Any) -> tuple[Any, Any]:
        _check_divisible(batch, microbatches)

        @jax.jit  # Traced once for both of its uses.
        def one_pass(batch: tuple) -> tuple[Any, tuple]:
            loss, aux, grads = _checked_answer(differentiate(params, *batch, **kwargs))
            return raise_tree((loss, grads)), aux

        def add_pass(sums: list, batch: tuple) -> tuple[Any, tuple]:
            terms, aux = one_pass(batch)
            return [s if s is None else s + x for s, x in zip(sums, jax.tree.leaves(terms), strict=True)], aux

        passes = jax.tree.map(lambda x: _deal(x, microbatches), batch)
        shapes, _ = jax.eval_shape(one_pass, jax.tree.map(lambda x: x[0], passes))
        leaves, treedef = jax.tree.flatten(shapes)
        sums, aux = lax.scan(add_pass, [_zeros(x) for x in leaves], passes)
        mean = lambda s, x: np.zeros(x.shape, x.dtype) if s is None else s / microbatches  # noqa: E731
        loss, grads = treedef.unflatten(map(mean, sums, leaves))
        return ((loss, *aux) if aux else loss), grads

    return cast(Callable[P, R], accumulated)


def _checked_answer(answer: Any) -> tuple[Any, tuple, Any]:
    """Loss, auxiliary data (a tuple of one, or of none), and gradients."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise TypeError(
            f"`grad_fn` returned {type(answer).__name__}: expected `(value, grads)`, as jax.value_and_grad and "
            "jamp.scaled_value_and_grad return it. jax.grad does not."
        )
    value, grads = answer
    loss, *aux = value if isinstance(value, tuple) else (value,)
    if jnp.shape(loss) or len(aux) > 1:
        raise TypeError(f"The value of `grad_fn` is {value!r}: expected a scalar loss, or `(loss, aux)`.")
    named = ((keystr(path), leaf) for tree in aux for path, leaf in tree_leaves_with_path(tree))
    if bad := [f"  aux{path}: {leaf!r}" for path, leaf in named if not is_number(leaf)]:
        raise TypeError(
            "`grad_fn` returns as `aux` what is no array, of which there would be one for each microbatch:\n"
            + "\n".join(bad)
            + "\nLeave it out of `aux`, or return it outside of `grad_fn`."
        )
    return loss, tuple(aux), grads


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array | None:
    """Where a sum starts; None for the gradient of an integer, which has no value (`allow_int=True`)."""
    return None if x.dtype == jax.dtypes.float0 else jnp.zeros_like(x)


def _deal(x: Any, microbatches: int) -> jax.Array:
    # Splitting the axis the other way round, (microbatches, n), would cut a sharded axis where the devices' shares end.
    return jnp.asarray(x).reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1)


def _check_divisible(batch: tuple, microbatches: int) -> None:
    shapes = [(f"argument {path[0].idx + 1}{keystr(path[1:])}", x) for path, x in tree_leaves_with_path(batch)]
    shapes = [(name, jnp.shape(x)) for name, x in shapes]
    if not shapes:
        raise ValueError("There is no batch: pass it in positional arguments after the parameters.")
    bad = [f"  {name}: shape {shape}" for name, shape in shapes if not shape or shape[0] % microbatches]
    if bad:
        raise ValueError(
            f"Cannot deal out to {microbatches} microbatches: expected leading axes that are multiples of it.\n"
            + "\n".join(bad)
            + "\nPass what is not part of the batch by keyword; it goes to each microbatch as it is."
        )
    if len(lengths := {shape[0] for _, shape in shapes}) > 1:
        raise ValueError(f"The arrays of the batch have different lengths {sorted(lengths)}: "
                         + ", ".join(f"{name} {shape}" for name, shape in shapes) + ".")  # fmt: skip
