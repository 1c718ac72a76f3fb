"""Gradients of half-precision parameters in float32, without the rounding at their end.

JAX gives a cotangent the dtype of its primal. So the product that makes the gradient of a bfloat16 weight ends in
bfloat16, though it was summed in float32. Once the gradient function is traced, its whole program is there. From each
gradient, this file goes back through the operations that only move or add, to those that had float32 in their hands (a
product, a sum, a cast), and has them return it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jamp._compat import (
    Atom,
    Aval,
    ClosedJaxpr,
    Eqn,
    Jaxpr,
    Literal,
    Var,
    bind,
    called_jaxpr,
    called_jaxpr_name,
    equation_context,
    jaxpr_consts,
    open_jaxpr,
    scan_counts,
)
from jamp._dtypes import FLOAT32
from jamp._primitives import PRODUCTS, Trait, has
from jamp.transforms._gradient_paths import CALLS, all_wanted, is_half, is_polymorphic, is_real, wanted_of_call
from jamp.transforms.emission.blocks import blocks_p
from jamp.transforms.emission.functions import scatter
from jamp.transforms.emission.tangents import ruled_p
from jamp.transforms.emission.wide_products import accumulator

P = ParamSpec("P")
R = TypeVar("R")


def float32_gradients(grad_fn: Callable[P, R]) -> Callable[P, R]:
    """Makes the gradients of half-precision parameters float32, without rounding them to half on the way.

    `jax.grad` returns gradients in the dtypes of the parameters, so that of a bfloat16 weight has 8 bits, although the
    product that made it was summed in float32. With this the last product, sum or cast returns its float32. That is of
    use where gradients are added afterwards, over microbatches or devices, or meet a small second moment. Everything
    before stays as it is, and no float32 copy of the weights is made, as there is when one differentiates with respect
    to the weights cast to float32.

    What the function traces is looked at, so it works for every model and under `jamp.cast_fn`, `jax.jit`, `vmap`,
    `jax.checkpoint`, `lax.scan` over layers or time, and `lax.cond`. A gradient that comes out of something else (a
    `while` loop, `shard_map`, a kernel) is made there in half, and cast. A gradient that is float32 already, but was
    cast from half, is not rounded on the way either: `jamp.value_and_grad` unscales in float32, and a float32 weight
    that is cast in front of a product has such a gradient too.

    Args:
        grad_fn: What `jax.value_and_grad`, `jamp.value_and_grad` or `jamp.scaled_value_and_grad` returns: a function
            that returns `(value, grads)`, or `((value, aux), grads)`.

    Returns:
        A function with the arguments of `grad_fn` and the same answer, half-precision gradients as float32. It goes
        inside `jax.jit`, and inside `jamp.accumulate_gradients`.

    Raises:
        TypeError: If `grad_fn` cannot be called; when called, if it does not answer with a pair.

    Example:
        >>> import jamp, jax, jax.numpy as jnp
        >>> loss_fn = lambda w, x: (x @ w).sum()
        >>> w, x = jnp.ones(1, jnp.bfloat16), jnp.ones((257, 1), jnp.bfloat16)
        >>> jax.value_and_grad(loss_fn)(w, x)[1]  # 257 is no bfloat16.
        Array([256], dtype=bfloat16)
        >>> jamp.float32_gradients(jax.value_and_grad(loss_fn))(w, x)[1]
        Array([257.], dtype=float32)
    """
    if not callable(grad_fn):
        raise TypeError(f"`grad_fn` is {grad_fn!r}: expected a function. Write jax.value_and_grad(loss_fn).")
    differentiate: Callable[..., Any] = grad_fn

    @wraps(grad_fn)
    def float32_grad_fn(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        arrays, merge = _without_others(leaves)
        answer: list[Any] = []

        def traced(*arrays: Array) -> list[Array]:
            args, kwargs = treedef.unflatten(merge(arrays))
            value, grads = _checked(differentiate(*args, **kwargs))
            value_arrays, merge_value = _without_others(jax.tree.leaves(value))
            raised = [False] * len(value_arrays) + [is_real(g) for g in jax.tree.leaves(grads)]
            answer[:] = jax.tree.structure((value, grads)), merge_value, raised
            return [*value_arrays, *jax.tree.leaves(grads)]

        closed = jax.make_jaxpr(traced)(*arrays)
        structure, merge_value, raised = answer
        out = _evaluate(open_jaxpr(closed), jaxpr_consts(closed), arrays, raised)
        num_grads = structure.children()[1].num_leaves
        split = len(out) - num_grads
        return structure.unflatten([*merge_value(out[:split]), *out[split:]])

    return cast("Callable[P, R]", float32_grad_fn)


def _checked(answer: Any) -> tuple[Any, Any]:
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise TypeError(
            f"`grad_fn` returned {type(answer).__name__}: expected `(value, grads)`, as jax.value_and_grad and "
            "jamp.scaled_value_and_grad return it. jax.grad does not."
        )
    return answer


def _without_others(leaves: list[Array]) -> tuple[list[Array], Callable[[Sequence[Array]], list[Array]]]:
    """The arrays and numbers among leaves, and a function that puts such among the names and functions again."""
    is_array = [isinstance(x, (jax.Array, np.ndarray, np.generic, float, int, complex)) for x in leaves]

    def merge(arrays: Sequence[Array]) -> list[Array]:
        values = iter(arrays)
        return [next(values) if array else x for x, array in zip(leaves, is_array, strict=True)]

    return [x for x, array in zip(leaves, is_array, strict=True) if array], merge


class _Env:
    """Values of variables as they were traced, and in float32 for those half ones that have it."""

    def __init__(self) -> None:
        self.traced: dict[Atom, Array] = {}
        self.raised: dict[Atom, Array] = {}

    def read(self, atom: Atom) -> Array:
        if isinstance(atom, Literal):
            return atom.val
        if atom not in self.traced:
            self.traced[atom] = self.raised[atom].astype(atom.aval.dtype)
        return self.traced[atom]

    def read_raised(self, atom: Atom) -> Array:
        if not isinstance(atom, Literal) and atom in self.raised:
            return self.raised[atom]
        value = self.read(atom)
        return jnp.asarray(value, FLOAT32) if is_half(atom.aval) else value

    def write(self, var: Var, value: Array) -> None:
        raised = is_half(var.aval) and value.dtype == FLOAT32  # Of another dtype than it was traced in.
        (self.raised if raised else self.traced)[var] = value


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Array], args: Sequence[Array], raised: Sequence[bool]) -> list[Array]:
    """Runs a program, those results in float32 that are to be. Of half arguments, float32 values may be passed."""
    env = _Env()
    for var, value in zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True):
        env.write(var, value)
    wanted = {v for v, r in zip(jaxpr.outvars, raised, strict=True) if r and not isinstance(v, Literal)}
    wanted = all_wanted(jaxpr, wanted)
    for eqn in jaxpr.eqns:
        with equation_context(eqn):
            out = _run(eqn, env, wanted)
        for var, value in zip(eqn.outvars, out, strict=True):
            env.write(var, value)
    read = lambda v, r: env.read_raised(v) if r else env.read(v)  # noqa: E731
    return [read(v, r) for v, r in zip(jaxpr.outvars, raised, strict=True)]


def _run(eqn: Eqn, env: _Env, wanted: Container[Atom]) -> list[Array]:
    raised = [var in wanted for var in eqn.outvars]
    if not any(raised):
        return bind(eqn, [env.read(v) for v in eqn.invars])
    if has(eqn, Trait.CONVERTS):
        return [env.read_raised(eqn.invars[0]).astype(FLOAT32)]
    if has(eqn, PRODUCTS) and is_half(eqn.outvars[0].aval):
        return [accumulator(eqn, [env.read(v) for v in eqn.invars], FLOAT32)]
    if eqn.primitive is blocks_p:
        return [blocks_p.bind(*map(env.read, eqn.invars), **{**eqn.params, "dtype": FLOAT32})]
    if is_polymorphic(eqn):
        return bind(eqn, [env.read_raised(v) for v in eqn.invars])
    if has(eqn, Trait.SCATTERS):
        return scatter(eqn, [env.read_raised(v) for v in eqn.invars])
    if has(eqn, CALLS):
        of_operands = wanted_of_call(eqn, wanted)
        args = [env.read_raised(v) if r else env.read(v) for v, r in zip(eqn.invars, of_operands, strict=True)]
        return bind(eqn, args, _with_jaxpr(eqn, _retraced(called_jaxpr(eqn.params), args, raised)))
    if eqn.primitive is ruled_p:
        args, derivative = [env.read(v) for v in eqn.invars], eqn.params["derivative"]
        raised_too = lambda *moved: derivative(*moved).astype(FLOAT32)  # noqa: E731
        return [ruled_p.bind(*args, jaxpr=_retraced(eqn.params["jaxpr"], args, raised), derivative=raised_too)]
    if has(eqn, Trait.BRANCHES):
        args = [env.read(v) for v in eqn.invars]
        branches = tuple(_retraced(branch, args[1:], raised) for branch in eqn.params["branches"])
        return bind(eqn, args, {**eqn.params, "branches": branches})
    if has(eqn, Trait.LOOPS) and "jaxpr" in eqn.params:  # A `scan`.
        return _scan(eqn, env, raised)
    return bind(eqn, [env.read(v) for v in eqn.invars])


def _scan(eqn: Eqn, env: _Env, raised: list[bool]) -> list[Array]:
    """Results of each iteration, and carries that add up: these are float32 from the first to the last."""
    consts, carries = scan_counts(eqn.params)
    is_carry = [consts <= i < consts + carries and raised[i - consts] for i in range(len(eqn.invars))]
    args = [env.read_raised(v) if c else env.read(v) for v, c in zip(eqn.invars, is_carry, strict=True)]
    body = eqn.params["jaxpr"]
    slices = [v.aval.update(dtype=x.dtype) for v, x in zip(open_jaxpr(body).invars, args, strict=True)]
    return bind(eqn, args, _with_jaxpr(eqn, _retraced(body, slices, raised)))


def _retraced(jaxpr: ClosedJaxpr, args: Sequence[Array | Aval], raised: list[bool]) -> ClosedJaxpr:
    """A jaxpr with some of its results in float32."""
    run = lambda *args: _evaluate(open_jaxpr(jaxpr), jaxpr_consts(jaxpr), args, raised)  # noqa: E731
    return jax.make_jaxpr(run)(*args)


def _with_jaxpr(eqn: Eqn, closed: ClosedJaxpr) -> dict[str, Any]:
    name = called_jaxpr_name(eqn.params)
    was_open = open_jaxpr(eqn.params[name]) is eqn.params[name]
    return {**eqn.params, name: open_jaxpr(closed) if was_open else closed}
