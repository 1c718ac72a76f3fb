"""Looks into traced programs, and evaluates them without compiling them.

Most of what the transform promises is a matter of dtypes, which a jaxpr shows. Where values are needed, `run` evaluates
a jaxpr one primitive at a time: loops and calls in Python, common primitives in NumPy, the others compiled alone.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.tree_util import keystr, tree_leaves_with_path

import jamp
from jamp._compat import Literal, bind, called_jaxpr, inner_jaxprs, jaxpr_consts, open_jaxpr, scan_counts
from tests.transforms import numpy_primitives

HALVES = (jnp.bfloat16, jnp.float16)
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
LEVELS = ("OD", "O1", "O2", "O3")

SIZE = 16
EYE = jnp.eye(SIZE)
W = jax.random.normal(jax.random.key(0), (SIZE, SIZE)) / 4
X = jax.random.normal(jax.random.key(1), (4, SIZE))
FINE = 1 + 2**-14  # Neither half dtype holds it.

both_halves = pytest.mark.parametrize("half", ["bfloat16", "float16"])
mixed_levels = pytest.mark.parametrize("level", ["O1", "O2"])


def trace(fn: Callable, *args: Any, **kwargs: Any) -> Any:
    """The jaxpr of a call."""
    return jax.make_jaxpr(fn)(*args, **kwargs)


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, those of the jaxprs inside included."""
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from equations(inner)


def find(jaxpr: Any, *names: str) -> list[Any]:
    """The equations of some primitives, those in inner jaxprs included."""
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name in names]


def operand_dtypes(eqn: Any) -> list[str]:
    """Dtypes of an equation's floating operands."""
    return [var.aval.dtype.name for var in eqn.invars if jnp.issubdtype(var.aval.dtype, jnp.floating)]


def product_dtypes(jaxpr: Any) -> list[list[str]]:
    """Dtypes of the operands of each matrix product and convolution."""
    return [operand_dtypes(eqn) for eqn in find(jaxpr, *PRODUCTS)]


def casts_to(jaxpr: Any, dtype: Any) -> list[Any]:
    """The conversions to a dtype from another floating one."""
    casts = [eqn for eqn in find(jaxpr, "convert_element_type") if operand_dtypes(eqn)]
    return [eqn for eqn in casts if eqn.outvars[0].aval.dtype == dtype and eqn.invars[0].aval.dtype != dtype]


def out_dtypes(jaxpr: Any, *names: str) -> set[str]:
    """Dtypes of the results of all equations of some primitives."""
    return {eqn.outvars[0].aval.dtype.name for eqn in find(jaxpr, *names)}


def run(fn: Callable, *args: Any) -> Any:
    """Calls `fn` by way of its jaxpr, evaluated operation by operation."""
    jaxpr, shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    outs = evaluate(jaxpr, *(_concrete(leaf) for leaf in jax.tree.leaves(args)))
    return jax.tree.unflatten(jax.tree.structure(shape), outs)


def evaluate(jaxpr: Any, *args: Any) -> list[Any]:
    """Results of a jaxpr, with loops, branches and calls done in Python."""
    inner = open_jaxpr(jaxpr)
    values = dict(zip([*inner.constvars, *inner.invars], [*map(_concrete, jaxpr_consts(jaxpr)), *args], strict=True))

    def read(atom: Any) -> Any:
        return np.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else values[atom]

    for eqn in inner.eqns:
        outs = _EVALUATE.get(eqn.primitive.name, _primitive)(eqn, [read(atom) for atom in eqn.invars])
        values.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in inner.outvars]


def _primitive(eqn: Any, args: list[Any]) -> list[Any]:
    outs = numpy_primitives.evaluate(eqn, args)
    return [_concrete(out) for out in bind(eqn, args)] if outs is None else outs


def _concrete(x: Any) -> Any:
    if isinstance(x, jax.Ref) or jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended):
        return x
    return np.asarray(x)


def _call(eqn: Any, args: list[Any]) -> list[Any]:
    return evaluate(called_jaxpr(eqn.params), *args)


def _cond(eqn: Any, args: list[Any]) -> list[Any]:
    branches = eqn.params["branches"]
    return evaluate(branches[min(max(int(args[0]), 0), len(branches) - 1)], *args[1:])


def _scan(eqn: Any, args: list[Any]) -> list[Any]:
    consts, carries = scan_counts(eqn.params)
    fixed, carry, xs = args[:consts], args[consts : consts + carries], args[consts + carries :]
    steps = range(eqn.params["length"])
    stacked = []
    for i in reversed(steps) if eqn.params["reverse"] else steps:
        outs = evaluate(eqn.params["jaxpr"], *fixed, *carry, *(x[i] for x in xs))
        carry = outs[:carries]
        stacked.append(outs[carries:])
    stacked = stacked[::-1] if eqn.params["reverse"] else stacked
    return [*carry, *(_stack(values) for values in zip(*stacked, strict=True))]


def _stack(values: Any) -> Any:
    return np.stack(values) if isinstance(values[0], np.ndarray) else jnp.stack(values)


def _shard_map(eqn: Any, args: list[Any]) -> list[Any]:
    if eqn.params["mesh"].size > 1:
        return _primitive(eqn, args)
    return evaluate(eqn.params["jaxpr"], *args)  # Compiling it takes seconds.


def _on_one_device(eqn: Any, args: list[Any]) -> list[Any]:
    axes = tuple(axis for axis in eqn.params.get("axes", ()) if isinstance(axis, int))  # Those that `vmap` named.
    return [np.sum(x, axes, x.dtype) for x in args] if axes else args


def _while(eqn: Any, args: list[Any]) -> list[Any]:
    params = eqn.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    carry = args[second:]
    # Under `vmap` the condition is one for each member of a batch.
    while np.any(going := evaluate(params["cond_jaxpr"], *args[:first], *carry)[0]):
        after = evaluate(params["body_jaxpr"], *args[first:second], *carry)
        carry = [
            np.where(np.reshape(going, going.shape + (1,) * (np.ndim(new) - going.ndim)), new, old)
            for new, old in zip(after, carry, strict=True)
        ]
    return carry


_CALLS = (
    "checkpoint", "closed_call", "composite", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call",
    "jit", "remat2", "remat_opt",
)  # fmt: skip
_COLLECTIVES = ("psum", "psum_invariant", "pvary")  # Met in a `shard_map` alone, and there on one device.
_EVALUATE = {
    **dict.fromkeys(_CALLS, _call), **dict.fromkeys(_COLLECTIVES, _on_one_device),
    "cond": _cond, "scan": _scan, "shard_map": _shard_map, "while": _while,
}  # fmt: skip


def o2(fn: Callable, half: str = "bfloat16") -> Callable:
    """The function at O2."""
    return jamp.cast_fn(fn, f"O2:{half}")


def layer_norm(h: jax.Array, scale: Any = 1.0, bias: Any = 0.0) -> jax.Array:
    """Layer normalization of the last axis."""
    centered = h - h.mean(-1, keepdims=True)
    return centered * lax.rsqrt((centered * centered).mean(-1, keepdims=True) + 1e-6) * scale + bias


def half_of(policy: str) -> Any:
    """The half dtype that a policy's string names."""
    return jamp.get_policy(policy).compute_dtype


def assert_close(actual: Any, expected: Any, tolerance: float = 0.04) -> None:
    """Asserts that two trees agree: structure, dtypes, and values to a share of the largest magnitude."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert jnp.result_type(a) == jnp.result_type(e), keystr(path)
        if jnp.issubdtype(jnp.result_type(a), jax.dtypes.prng_key):
            a, e = jax.random.key_data(a), jax.random.key_data(e)
        a, e = np.asarray(a), np.asarray(e)
        if not jnp.issubdtype(e.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, e, err_msg=keystr(path))
            continue
        scale = float(np.max(np.abs(e), initial=0.0)) or 1.0
        np.testing.assert_allclose(a / scale, e / scale, rtol=0, atol=tolerance, err_msg=keystr(path))


def check(fn: Callable, *args: Any, policy: str = "O2:bfloat16", grad: bool = True, tolerance: float = 0.04) -> Any:
    """Checks a function under a policy against itself in float32: results, dtypes, products in half, gradients.

    Args:
        fn: A function of arrays, all of whose products should be in half.
        *args: Its arguments; floating ones are differentiated.
        policy: The policy.
        grad: Whether to check gradients too.
        tolerance: Largest difference, as a share of the largest magnitude of the same array.

    Returns:
        The jaxpr of the function under the policy.
    """
    cast = jamp.cast_fn(fn, policy)
    jaxpr = trace(cast, *args)
    assert_products_in(jaxpr, half_of(policy))
    assert_close(run(cast, *args), run(fn, *args), tolerance)
    if grad:
        check_gradient(fn, *args, policy=policy, tolerance=2 * tolerance)
    return jaxpr


def check_gradient(fn: Callable, *args: Any, policy: str = "O2:bfloat16", tolerance: float = 0.08) -> None:
    """Checks gradients under a policy against float32's, and that they have the arguments' dtypes."""
    floating = tuple(i for i, arg in enumerate(args) if jnp.issubdtype(jnp.result_type(arg), jnp.floating))
    gradient = jax.grad(total(jamp.cast_fn(fn, policy)), floating)
    assert_products_in(trace(gradient, *args), half_of(policy))
    assert_close(run(gradient, *args), run(jax.grad(total(fn), floating), *args), tolerance)


def assert_products_in(jaxpr: Any, dtype: Any) -> None:
    """Asserts that every floating matrix product and convolution takes operands of one dtype."""
    wrong = [dtypes for dtypes in product_dtypes(jaxpr) if dtypes and set(dtypes) != {jnp.dtype(dtype).name}]
    assert not wrong, f"{wrong}\n{jaxpr}"


def total(fn: Callable) -> Callable:
    """A scalar function of all floating results of `fn`, linear, in which every element matters differently."""

    def loss(*args: Any) -> jax.Array:
        leaves = [x for x in jax.tree.leaves(fn(*args)) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
        return sum((jnp.sum(x.ravel() * np.cos(np.arange(x.size), dtype=np.float32)) for x in leaves), jnp.float32(0))

    return loss
