"""Random well-typed programs, as data: a list of instructions on a pool of (3, 4) matrices.

An instruction names an operation, the pool entries that it reads, and for combinators (jit, scan, cond, grad, …) a
program of its own. Every operation keeps values of the order of one and has a slope of that order too, so that whatever
a program computes, its rounding errors stay within a modest multiple of the half dtype's.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

import jamp
from tests.transforms.delicate_programs import (
    COLUMNS,
    DELICATE_COMBINATORS,
    DELICATE_OPERATIONS,
    INDEX,
    ROWS,
    SHAPE,
    Body,
)
from tests.transforms.library_programs import LIBRARY_OPERATIONS

Program = Sequence[tuple]

_MASK = np.arange(ROWS * COLUMNS).reshape(SHAPE) % 3 == 0


def _normalize(m: jax.Array) -> jax.Array:
    return (m - m.mean(-1, keepdims=True)) * lax.rsqrt(m.var(-1, keepdims=True) + 1.0)


def _attend(m: jax.Array, n: jax.Array) -> jax.Array:
    scores = jnp.where(np.tril(np.ones((ROWS, ROWS), bool)), m @ n.T / 4, -1e9)
    return jax.nn.softmax(scores) @ n


def _attend_to_positions(m: jax.Array, n: jax.Array, w: jax.Array) -> jax.Array:
    """Weights of a softmax over the results of a convolution, which is no `dot_general`."""
    return jax.nn.softmax(_convolve(m, w) / 2, 0) * n * 2


def _attend_in_heads(m: jax.Array, n: jax.Array, w: jax.Array) -> jax.Array:
    """Attention of two heads with scaled, capped and masked scores."""
    q, k, v = (x.reshape(ROWS, 2, 2) for x in (m @ w, n, n @ w))
    scores = 2.0 * jnp.tanh(jnp.einsum("qhd,khd->hqk", q, k) / 4)
    scores = jnp.where(np.tril(np.ones((ROWS, ROWS), bool)), scores, -jnp.inf)
    return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), v).reshape(SHAPE)


def _route(m: jax.Array, n: jax.Array, w: jax.Array) -> jax.Array:
    """A softmax over the results of a grouped product, and a grouped product of what it weighs."""
    sizes = np.array([1, 2], np.int32)
    weights = jax.nn.softmax(lax.ragged_dot(m, jnp.stack([w, w.T]), sizes))
    return lax.ragged_dot(weights * n, jnp.stack([w.T, w]), sizes) * 2


def _check_dtype(x: Any, dtype: Any) -> None:
    assert x.dtype == dtype, f"the callback was traced with {dtype} and got {x.dtype}"


def _callback(m: jax.Array, n: jax.Array) -> jax.Array:
    def on_host(x: Any) -> Any:
        _check_dtype(x, m.dtype)
        return np.tanh(x)

    return n + 0.5 * jax.pure_callback(on_host, jax.ShapeDtypeStruct(SHAPE, m.dtype), lax.stop_gradient(m))


def _print(m: jax.Array) -> jax.Array:
    jax.debug.callback(functools.partial(_check_dtype, dtype=m.dtype), m)
    return -m


def _drop(m: jax.Array, n: jax.Array) -> jax.Array:
    mask = jax.random.bits(jax.random.key(1), SHAPE, np.uint32) < np.uint32(2**31)
    noise = jax.random.normal(jax.random.key(2), SHAPE, np.float32).astype(m.dtype)
    return jnp.where(mask, m, 0.0) + 0.1 * noise * n


def _solve(m: jax.Array, w: jax.Array) -> jax.Array:
    """`custom_linear_solve` of a matrix near 2 with a few steps of Jacobi's method."""

    def solve(matvec: Any, b: jax.Array) -> jax.Array:
        x = b / 2
        for _ in range(4):
            x = x + (b - matvec(x)) / 2
        return x

    return lax.custom_linear_solve(lambda x: 2 * x + 0.25 * x @ w, m, solve, solve)


def _root(m: jax.Array, w: jax.Array) -> jax.Array:
    """`custom_root` of a contraction, by iteration."""

    def solve(f: Any, x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 6, lambda i, x: x - f(x), x)

    def tangent_solve(g: Any, y: jax.Array) -> jax.Array:
        x = y
        for _ in range(4):
            x = x + y - g(x)
        return x

    return lax.custom_root(lambda x: x - 0.25 * jnp.tanh(x @ w) - m, m, solve, tangent_solve)


def _convolve(m: jax.Array, w: jax.Array) -> jax.Array:
    kernel = jnp.stack([w, 0.5 * w.T, 0.25 * w])
    return lax.conv_general_dilated(m[None], kernel, (1,), "SAME", dimension_numbers=("NHC", "HIO", "NHC"))[0] / 2


# From two matrices `m` and `n`, a vector `v` and a square matrix `w` to a matrix.
OPERATIONS: dict[str, Callable[..., jax.Array]] = {
    "abs": lambda m, n, v, w: jnp.abs(m + 4.0) - 4.0,
    "add": lambda m, n, v, w: 0.5 * (m + n),
    "argument": lambda m, n, v, w: m + 0.5 * v,
    "astype": lambda m, n, v, w: m.astype(jnp.float16).astype(m.dtype),
    "attend": lambda m, n, v, w: _attend(m, n),
    "attend_in_heads": lambda m, n, v, w: _attend_in_heads(m, n, w),
    "attend_to_positions": lambda m, n, v, w: _attend_to_positions(m, n, w),
    "broadcast": lambda m, n, v, w: jnp.broadcast_to(m.mean(0), SHAPE),
    "callback": lambda m, n, v, w: _callback(m, n),
    "clip": lambda m, n, v, w: jnp.clip(m, -9.0, jnp.inf),
    "compare": lambda m, n, v, w: jnp.where(m > 9.0, 0.0, n),
    "complex": lambda m, n, v, w: jnp.real(jnp.exp(1j * m) * n),
    "concatenate": lambda m, n, v, w: jnp.concatenate([m[:, 2:], n[:, :2]], 1),
    "convolve": lambda m, n, v, w: _convolve(m, w),
    "cumlogsumexp": lambda m, n, v, w: n - lax.cumlogsumexp(m, 1) / 2,
    "cummax": lambda m, n, v, w: n + 0.5 * lax.stop_gradient(lax.cummax(m, 1)),
    "cumsum": lambda m, n, v, w: jnp.cumsum(m, 1) / 4,
    "dot": lambda m, n, v, w: m @ w,
    "dot_general": lambda m, n, v, w: jnp.einsum("ij,kj->ki", w, m),
    "dot_highest": lambda m, n, v, w: jnp.dot(m, w, precision="highest"),
    "dot_transposed": lambda m, n, v, w: jnp.tanh(m @ n.T / 4) @ jnp.tanh(n),
    "dot_vector": lambda m, n, v, w: n * jnp.tanh(m @ v)[:, None],
    "drop": lambda m, n, v, w: _drop(m, n),
    "dynamic_slice": lambda m, n, v, w: lax.dynamic_slice(jnp.concatenate([m, n]), (np.int32(1), np.int32(0)), SHAPE),
    "dynamic_update": lambda m, n, v, w: lax.dynamic_update_slice(m, n[:2], (1, 0)),
    "embed": lambda m, n, v, w: m + w[INDEX],
    "erf": lambda m, n, v, w: lax.erf(m),
    "exp": lambda m, n, v, w: jnp.exp(jnp.tanh(m)) - 1.0,
    "fft": lambda m, n, v, w: jnp.fft.irfft(jnp.fft.rfft(m) * jnp.array([0.5, 1j, 0.5]), 4) + 0.5 * n,
    "flip": lambda m, n, v, w: m[::-1, ::-1],
    "gather": lambda m, n, v, w: m[INDEX],
    "gelu": lambda m, n, v, w: jax.nn.gelu(m),
    "integer": lambda m, n, v, w: m + (jnp.arange(ROWS) @ jnp.arange(ROWS)) / 8,
    "integer_matmul": lambda m, n, v, w: m * (jnp.ones(SHAPE, int) @ jnp.eye(4, dtype=int))[:, :1],
    "integer_pow": lambda m, n, v, w: jnp.tanh(m) ** 2 - jnp.tanh(n) ** 3,
    "lgamma": lambda m, n, v, w: lax.lgamma(2.5 + jnp.tanh(m)) + 0.5 * n,
    "literals": lambda m, n, v, w: m * (1.0 / jnp.sqrt(jnp.float32(4))) + jnp.ones(4) * 0.25,
    "log": lambda m, n, v, w: jnp.log(1.5 + jnp.tanh(m)),
    "log_softmax": lambda m, n, v, w: jax.nn.log_softmax(m) / 2,
    "logsumexp": lambda m, n, v, w: n - jax.nn.logsumexp(m, -1, keepdims=True) / 2,
    "max": lambda m, n, v, w: n - lax.stop_gradient(m.max(-1, keepdims=True)),
    "mean": lambda m, n, v, w: n - m.mean(),
    "mul": lambda m, n, v, w: jnp.tanh(m) * n,
    "neg": lambda m, n, v, w: -m,
    "norm": lambda m, n, v, w: n / (1.0 + jnp.sqrt(1.0 + jnp.sum(m * m))),
    "normalize": lambda m, n, v, w: _normalize(m) * v,
    "one_hot": lambda m, n, v, w: m * jax.nn.one_hot(jnp.array([1, 0, 3]), 4),
    "outer": lambda m, n, v, w: jnp.outer(m[:, 0], jnp.tanh(v)),
    "optimization_barrier": lambda m, n, v, w: sum(lax.optimization_barrier((m, 0.5 * n))) / 2,
    "pad": lambda m, n, v, w: jnp.pad(m, 1)[1:-1, :-2] + n,
    "pool": lambda m, n, v, w: lax.reduce_window(m, 0.0, lax.add, (1, 2), (1, 1), "SAME") / 2,
    "power": lambda m, n, v, w: (1.5 + jnp.tanh(m)) ** 0.5,
    "print": lambda m, n, v, w: _print(m),
    "ragged_dot": lambda m, n, v, w: lax.ragged_dot(m, jnp.stack([w, w.T]), np.array([2, 1], np.int32)),
    "relu": lambda m, n, v, w: jax.nn.relu(m + 4.0) - 4.0,
    "reshape": lambda m, n, v, w: jnp.reshape(m, (4, 3)).T,
    "root": lambda m, n, v, w: _root(m, w),
    "route": lambda m, n, v, w: _route(m, n, w),
    "rsqrt": lambda m, n, v, w: m * lax.rsqrt(1.0 + n * n),
    "scale": lambda m, n, v, w: 0.5 * m,
    "scatter_add": lambda m, n, v, w: jnp.zeros(SHAPE).at[INDEX].add(m) / 2,
    "segment_sum": lambda m, n, v, w: jax.ops.segment_sum(m, INDEX, ROWS) / 2,
    "select": lambda m, n, v, w: jnp.where(_MASK, m, n),
    "set": lambda m, n, v, w: m.at[0].set(n[1]),
    "sigmoid": lambda m, n, v, w: jax.nn.sigmoid(m),
    "silu": lambda m, n, v, w: jax.nn.silu(m),
    "sin": lambda m, n, v, w: jnp.sin(m),
    "softmax": lambda m, n, v, w: jax.nn.softmax(m, 0) * n,
    "solve": lambda m, n, v, w: _solve(m, w),
    "sort": lambda m, n, v, w: n + 0.5 * lax.stop_gradient(jnp.sort(m, 1)),
    "sqrt": lambda m, n, v, w: jnp.sqrt(1.0 + m * m),
    "stack": lambda m, n, v, w: jnp.stack([m, n], 1)[:, 1] + jnp.stack([v, v])[0],
    "sub": lambda m, n, v, w: 0.5 * (m - n),
    "sum": lambda m, n, v, w: n + m.sum(-1, keepdims=True) / 4,
    "take": lambda m, n, v, w: jnp.take_along_axis(m, jnp.array([[3, 2, 0, 0]] * ROWS), 1),
    "tanh": lambda m, n, v, w: jnp.tanh(m),
    "top_k": lambda m, n, v, w: lax.stop_gradient(lax.top_k(m, 4)[0]) + n,
    "transpose": lambda m, n, v, w: jnp.tile(m.T[:3], (1, 2))[:, :4],
    "variance": lambda m, n, v, w: n / (1.0 + m.var()),
    **DELICATE_OPERATIONS,
    **LIBRARY_OPERATIONS,
}


def _while(body: Body, m: Any, v: Any, w: Any) -> Any:
    limit = 2 + (m[0, 0] > 1e6).astype(jnp.int32)
    return lax.while_loop(lambda s: s[0] < limit, lambda s: (s[0] + 1, body(s[1], v, w)), (0, m))[1]


def _scan_layers(body: Body, m: Any, v: Any, w: Any) -> Any:
    return lax.scan(lambda m, w: (m + 0.5 * jnp.tanh(body(m, v, w)), None), m, jnp.stack([w, w.T]))[0]


def _scan_time(body: Body, m: Any, v: Any, w: Any) -> Any:
    def cell(carry: Any, x: Any) -> Any:
        h, total = carry
        h = jnp.tanh(0.5 * h @ w + body(x, v, w))
        return (h, total + h.mean()), h

    (_, total), hs = lax.scan(cell, (jnp.zeros(SHAPE), 0.0), jnp.stack([m, -m]), reverse=True)
    return hs.mean(0) + 0.5 * total


def _scan_sum(body: Body, m: Any, v: Any, w: Any) -> Any:
    return lax.scan(lambda total, x: (total + 0.5 * body(x, v, w), None), jnp.zeros(SHAPE), jnp.stack([m, -m]))[0]


def _cond(body: Body, m: Any, v: Any, w: Any) -> Any:
    return lax.cond(m[0, 0] < 1e6, lambda m: body(m, v, w), lambda m: m * 0.5, m)


def _composite(body: Body, m: Any, v: Any, w: Any) -> Any:
    return lax.composite(lambda m, v, w: body(m, v, w), name="test.body")(m, v, w)


def _shard_map(body: Body, m: Any, v: Any, w: Any) -> Any:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    # Checked, JAX refuses a `pmean` of an axis that `vmap` names (an assertion of its own, jax 0.10 and 0.12).
    return jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(m, v, w)


def _linearize(body: Body, m: Any, v: Any, w: Any) -> Any:
    out, linear = jax.linearize(lambda m: body(m, v, w), m)
    return out + 0.25 * jnp.tanh(linear(0.5 * m))


def _hessian(body: Body, m: Any, v: Any, w: Any) -> Any:
    return jnp.tanh(jax.hessian(lambda s: jnp.tanh(body(m + 0.25 * s[:, None], v, w)).sum())(m[:, 0]) / 4) @ m


def _scan_unrolled(body: Body, m: Any, v: Any, w: Any) -> Any:
    return lax.scan(lambda x, _: (x + 0.25 * jnp.tanh(body(x, v, w)), x[0]), m, length=3, unroll=3)[0]


def _loop_written_out(body: Body, m: Any, v: Any, w: Any) -> Any:
    for _ in range(3):
        m = m + 0.25 * jnp.tanh(body(m, v, w) @ w)
    return m


def _custom_vjp_options(body: Body, m: Any, v: Any, w: Any) -> Any:
    """Arguments that are not differentiated, and a forward pass that `jax.checkpoint` optimizes."""
    function = jax.custom_vjp(lambda scale, *args: scale * body(*args), nondiff_argnums=(0,))
    function.defvjp(
        lambda scale, *args: jax.vjp(lambda *a: scale * body(*a), *args), lambda scale, pull, g: pull(g),
        optimize_remat=True,
    )  # fmt: skip
    return function(0.5, m, v, w)


def _custom_vjp_symbolic(body: Body, m: Any, v: Any, w: Any) -> Any:
    """A rule that asks which operands are differentiated."""
    function = jax.custom_vjp(lambda m, v, w, n: body(m, v, w) + n)

    def forward(m: Any, v: Any, w: Any, n: Any) -> Any:
        out, pull = jax.vjp(body, m.value, v.value, w.value)
        return out + n.value, (pull, n.value if n.perturbed else None)

    def backward(kept: Any, g: Any) -> Any:
        pull, n = kept
        return *pull(g), g if n is None else g + 0.0 * n

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function(m, v, w, jnp.ones(SHAPE, m.dtype))


def _switch(body: Body, m: Any, v: Any, w: Any) -> Any:
    index = (m[0, 0] < 1e6).astype(jnp.int32)
    return lax.switch(index, [lambda m: jnp.zeros(SHAPE), lambda m: body(m, v, w), lambda m: m @ w], m)


def _custom_jvp(body: Body, m: Any, v: Any, w: Any) -> Any:
    function = jax.custom_jvp(body)
    function.defjvp(lambda primals, tangents: jax.jvp(body, primals, tangents))
    return function(m, v, w)


def _custom_vjp(body: Body, m: Any, v: Any, w: Any) -> Any:
    function = jax.custom_vjp(body)
    function.defvjp(lambda *args: jax.vjp(body, *args), lambda pull, g: pull(g))
    return function(m, v, w)


def _gradient(body: Body, m: Any, v: Any, w: Any) -> Any:
    return jnp.tanh(jax.grad(lambda m: jnp.tanh(body(m, v, w)).sum())(m))


def _jvp(body: Body, m: Any, v: Any, w: Any) -> Any:
    return sum(jax.jvp(lambda m: jnp.tanh(body(m, v, w)), (m,), (0.5 * m,)))


def _named_scope(body: Body, m: Any, v: Any, w: Any) -> Any:
    with jax.named_scope("Block_0"):
        return body(m, v, w)


def _remat_policy(body: Body, m: Any, v: Any, w: Any) -> Any:
    return jax.checkpoint(body, policy=jax.checkpoint_policies.dots_saveable)(m, v, w)


COMBINATORS: dict[str, Callable[[Body, Any, Any, Any], Any]] = {
    "associative_scan": lambda f, m, v, w: lax.associative_scan(lambda a, b: 0.5 * (a + b), f(m, v, w)),
    "cast_fn": lambda f, m, v, w: jamp.cast_fn(f, "O1:float16")(m, v, w).astype(m.dtype),
    "composite": _composite,
    "cond": _cond,
    "custom_jvp": _custom_jvp,
    "custom_vjp": _custom_vjp,
    "custom_vjp_options": _custom_vjp_options,
    "custom_vjp_symbolic": _custom_vjp_symbolic,
    "fori": lambda f, m, v, w: lax.fori_loop(0, 2, lambda i, m: m + 0.5 * jnp.tanh(f(m, v, w)), m),
    "full_precision": lambda f, m, v, w: jamp.full_precision(f)(m, v, w),
    "gradient": _gradient,
    "half_precision": lambda f, m, v, w: jamp.half_precision(f)(m, v, w),
    "hessian": _hessian,
    "jit": lambda f, m, v, w: jax.jit(f)(m, v, w),
    "jvp": _jvp,
    "linearize": _linearize,
    "loop_written_out": _loop_written_out,
    "map": lambda f, m, v, w: lax.map(lambda m: f(m, v, w), jnp.stack([m, 0.5 * m])).sum(0) / 2,
    "named_scope": _named_scope,
    "remat": lambda f, m, v, w: jax.checkpoint(f)(m, v, w),
    "remat_policy": _remat_policy,
    "scan_layers": _scan_layers,
    "scan_sum": _scan_sum,
    "scan_time": _scan_time,
    "scan_unrolled": _scan_unrolled,
    "shard_map": _shard_map,
    "switch": _switch,
    "vmap": lambda f, m, v, w: jax.vmap(f, (0, None, None))(jnp.stack([m, 0.5 * m]), v, w).sum(0) / 2,
    "vmap_named": lambda f, m, v, w: jax.vmap(
        lambda m: f(m - 0.5 * lax.pmean(m, "b"), v, w), axis_name="b", out_axes=1
    )(jnp.stack([m, -m])).mean(1),
    "while": _while,
    **DELICATE_COMBINATORS,
}


def programs(depth: int = 2) -> st.SearchStrategy[Program]:
    """Programs whose combinators nest to a depth."""
    entry = st.integers(0, 3)
    instruction = st.tuples(st.sampled_from(sorted(OPERATIONS)), entry, entry)
    if depth:
        instruction |= st.tuples(st.sampled_from(sorted(COMBINATORS)), entry, programs(depth - 1))
    return st.lists(instruction, min_size=1, max_size=depth + 2)


def as_body(program: Program) -> Body:
    """The function of a matrix, a vector and a square matrix that a program describes."""

    def body(m: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
        pool = [m]
        for name, i, argument in program:
            value = pool[-1 - i % len(pool)]
            if name in OPERATIONS:
                out = OPERATIONS[name](value, pool[-1 - argument % len(pool)], v, w)
            else:
                out = COMBINATORS[name](as_body(argument), value, v, w)
            pool.append(out)
        return pool[-1]

    return body


def as_function(program: Program) -> Callable[..., dict[str, jax.Array]]:
    """The program as a user's function, with results of several shapes."""

    def function(m: jax.Array, v: jax.Array, w: jax.Array) -> dict[str, jax.Array]:
        out = as_body(program)(m, v, w)
        return {"matrix": out, "mean": out.mean(), "of_weights": out @ w}

    return function
