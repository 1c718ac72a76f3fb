"""Programs that have to mean the same after jamp took them apart and built them again, found by JAX's own tests."""

import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import jet
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.sharding import AxisType

import jamp
from tests.transforms.harness import find, product_dtypes, trace

P = jax.sharding.PartitionSpec
HALF = "O2:bfloat16"
FULL = "O2:bfloat16,full=['*']"
W = jnp.full((4, 4), 0.25)
X = jnp.arange(4.0)  # All that is computed of these is exact in half.
Y = X @ W


def cast(fn: Callable, policy: str = HALF) -> Any:
    return jamp.cast_fn(fn, policy)


# Results and references.


def test_a_nested_jit_that_returns_nothing():
    seen = []
    log = jax.jit(lambda x: jax.debug.callback(lambda x: seen.append(float(x[0])), x))

    def fn(x):
        y = x @ W
        log(y)
        return jnp.sum(y)

    np.testing.assert_array_equal(jax.jit(jax.grad(cast(fn)))(X), W.sum(1))
    jax.effects_barrier()
    assert seen == [1.5]


def test_a_nested_jit_that_writes_to_a_ref():
    put = jax.jit(lambda ref, x: ref.__setitem__(..., x))

    def fn(x):
        ref = jax.new_ref(jnp.zeros(4))
        put(ref, x @ W)
        return jax.freeze(ref)

    np.testing.assert_array_equal(cast(fn)(X), Y)


@pytest.mark.parametrize("differentiated", [False, True])
def test_a_branch_that_writes_to_a_ref(differentiated):
    def fn(x):
        ref = jax.new_ref(jnp.zeros(4))
        lax.cond(x[1] > 0, lambda ref: ref.__setitem__(..., x @ W), lambda ref: ref.__setitem__(..., x), ref)
        return jax.freeze(ref)

    if differentiated:
        np.testing.assert_array_equal(jax.grad(lambda x: cast(fn)(x).sum())(X), W.sum(1))
    else:
        np.testing.assert_array_equal(cast(fn)(X), Y)


def test_a_rule_with_a_ref_argument():
    @jax.custom_vjp
    def product(ref, x):
        return x @ W

    def backward(residuals, g):
        residuals[0][...] = g
        return None, g @ W.T

    product.defvjp(lambda ref, x: (x @ W, (ref,)), backward)
    ref = jax.new_ref(jnp.zeros(4))
    gradient = jax.grad(cast(lambda x, ref: jnp.sum(3 * product(ref, x))))(X, ref)
    np.testing.assert_array_equal(gradient, 3 * W.sum(1))
    np.testing.assert_array_equal(ref[...], jnp.full(4, 3.0))


def test_a_ref_that_is_freed_twice():
    def fn(x):
        ref = jax.new_ref(x @ W)
        jax.free_ref(ref)
        jax.free_ref(ref)
        return x

    # JAX has no error of its own for it, but does not compile it.
    with pytest.raises(KeyError):
        jax.jit(fn)(X)
    with pytest.raises(KeyError):
        jax.jit(cast(fn))(X)


def test_a_token_as_a_result():
    token, y = jax.jit(cast(lambda x: (lax.create_token(x), x @ W)))(X)
    assert not isinstance(token, jax.core.Tracer)
    np.testing.assert_array_equal(y, Y)


def test_a_shape_as_a_result():
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    assert cast(lambda x: (shape, x @ W))(X)[0] == shape


def test_a_weak_type_stays():
    assert jax.eval_shape(lambda x: 2 * x, 1.0).weak_type
    assert jax.eval_shape(cast(lambda x: 2 * x), 1.0).weak_type


# Products.


def test_a_product_with_a_number():
    def fn(x):  # JAX multiplies with the cotangent, the number 1, by a product without dimensions.
        return jax.grad(lambda z: x @ z)(x)

    np.testing.assert_array_equal(cast(fn)(X), X)


# Custom rules.


def with_constant():
    @jax.custom_vjp
    def product(x):
        return x @ W

    product.defvjp(lambda x: (x @ W, ()), lambda _, g: (g @ W.T,))
    return product


def looped(fn):
    return lambda x: lax.scan(lambda h, _: (fn(h), None), x, length=2)[0]


@pytest.mark.parametrize("inside", [jax.jit, jax.checkpoint, looped], ids=["jit", "checkpoint", "scan"])
def test_a_rule_with_a_constant_that_is_bound_again(inside):
    def fn(x):
        return jnp.sum(jax.vmap(inside(with_constant()))(x))

    x = jnp.stack([X, 2 * X])
    np.testing.assert_array_equal(jax.grad(cast(fn))(x), jax.grad(fn)(x))


def with_rule_closed_over(scale, where):
    """A product whose rule, in one of its parts, reads a value that is no operand."""
    if where == "jvp":
        op = jax.custom_jvp(lambda x: x @ W)
        op.defjvp(lambda primals, tangents: (op(*primals), tangents[0] @ W * scale))
        return op
    op = jax.custom_vjp(lambda x: x @ W)
    forward, backward = (scale if where == part else 1.0 for part in ("forward", "backward"))
    op.defvjp(lambda x: (x @ W * forward, jnp.sin(x) * 0 + 1), lambda ones, g: ((g * ones) @ W.T * backward,))
    return op


def chosen(op):
    return lambda x: lax.cond(x[0, 0] < 9, op, jnp.sin, x)


# Under `jit` around the gradient, JAX itself refuses such a rule in a loop, a branch or a jitted function.
PLACES = {
    "alone": (lambda op: op, jax.jit, HALF),
    "checkpoint": (jax.checkpoint, jax.jit, HALF),
    "vmap": (jax.vmap, jax.jit, FULL),
    "jit": (jax.jit, lambda fn: fn, "O3:float16"),
    "scan": (looped, lambda fn: fn, HALF),
    "cond": (chosen, lambda fn: fn, HALF),
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("where", ["forward", "backward", "jvp"])
@pytest.mark.parametrize("place", PLACES)
def test_a_rule_that_closes_over_a_computed_value(place, where):
    called, compiled, policy = PLACES[place]

    def fn(x, a):
        h = x * 2  # An elementwise operation beside it, which is computed again for the backward pass.
        return jnp.sum(called(with_rule_closed_over(jnp.max(a) * 2, where))(h) * h)

    x, a = jnp.stack([X, 2 * X]), jnp.arange(3.0)
    np.testing.assert_array_equal(compiled(jax.grad(cast(fn, policy)))(x, a), jax.grad(fn)(x, a))


def test_what_a_process_holds_does_not_hide_what_a_rule_closes_over():
    class Node: ...

    many = [object() for _ in range(30_000)]
    jax.tree_util.register_pytree_node(Node, lambda node: (many, None), lambda _, children: Node())  # For good.

    def fn(x, a):
        return jnp.sum(with_rule_closed_over(jnp.max(a) * 2, "forward")(x))

    a = jnp.arange(3.0)
    np.testing.assert_array_equal(jax.jit(jax.grad(cast(fn)))(X, a), jax.grad(fn)(X, a))


def test_a_rule_that_closes_over_a_number_of_a_trace():
    def fn(x):  # JAX holds what a `while` is given as a tracer of a number.
        return lax.fori_loop(0, 2, lambda i, x: with_rule_closed_over(i * 0 + 2.0, "forward")(x), x)

    np.testing.assert_array_equal(cast(fn)(X[None]), fn(X[None]))


def test_a_rule_that_closes_over_a_value_of_what_is_differentiated():
    def fn(x):  # Not stopped, JAX refuses it, with jamp and without.
        return jnp.sum(with_rule_closed_over(lax.stop_gradient(jnp.max(x)), "forward")(x))

    np.testing.assert_array_equal(jax.grad(cast(fn))(X), jax.grad(fn)(X))


def test_a_rule_that_closes_over_a_value_of_a_nested_cast_fn():
    def inner(x, a):
        return with_rule_closed_over(jnp.max(a), "forward")(x)

    def fn(x, a):
        return jnp.sum(cast(inner)(x, a * 2))

    x, a = X[None], jnp.arange(3.0)
    np.testing.assert_array_equal(jax.grad(cast(fn, "O1:bfloat16"))(x, a), jax.grad(fn)(x, a))


def test_a_forward_rule_runs_its_callback_once():
    seen = []

    @jax.custom_vjp
    def product(x):
        return x @ W

    def forward(x):
        jax.debug.callback(lambda x: seen.append(float(x[1])), x)
        return x @ W, ()

    product.defvjp(forward, lambda _, g: (g @ W.T,))
    jax.jit(jax.grad(cast(lambda x: jnp.sum(product(x)))))(X)
    jax.effects_barrier()
    assert seen == [1.0]


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_a_forward_rule_whose_residuals_nobody_reads(inside):
    @jax.custom_vjp
    def product(x):
        return x @ W

    # The number gives away whether the rule or the function ran.
    product.defvjp(lambda x: (2 * x @ W, x), lambda x, g: (g * x,), optimize_remat=True)

    def primal(fn):
        return lambda x: jax.vjp(fn, x)[0]

    np.testing.assert_array_equal(jax.jit(primal(product))(X), Y)
    fn = cast(primal(product)) if inside else primal(cast(product))
    np.testing.assert_array_equal(jax.jit(fn)(X), Y)


def test_symbolic_zeros_reach_a_backward_rule():
    seen = []

    @jax.custom_vjp
    def both(x):
        return x @ W, jnp.sin(x)

    def backward(_, cotangents):
        seen.append([type(g).__name__ == "SymbolicZero" for g in cotangents])
        return (cotangents[0] @ W.T,)

    both.defvjp(lambda x: (both(x.value), ()), backward, symbolic_zeros=True)
    jax.grad(cast(lambda x: jnp.sum(both(x)[0])))(X)
    assert seen[-1] == [False, True]


def callback_product(x, w):
    return jax.pure_callback(lambda x, w: np.asarray(x) @ np.asarray(w), jax.ShapeDtypeStruct((4, 4), x.dtype), x, w)


def int8_product(x, w):
    x, w = (jnp.round(8 * v).astype(jnp.int8) for v in (x, w))
    return lax.dot(x, w, preferred_element_type=jnp.int32).astype(jnp.float32) / 64


@pytest.mark.parametrize("product", [callback_product, int8_product])
def test_a_backward_rule_is_in_half_whatever_the_forward_is(product):
    op = jax.custom_vjp(product)
    op.defvjp(lambda x, w: (op(x, w), (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    jaxpr = trace(jax.grad(cast(lambda x, w: jnp.sum(op(x, w) ** 2)), (0, 1)), W, W)
    assert [dtypes for dtypes in product_dtypes(jaxpr) if dtypes] == [["bfloat16"] * 2] * 2


@pytest.mark.parametrize("policy", ["O1:bfloat16", "O2:bfloat16", "O3:bfloat16"])
def test_a_forward_rule_closed_over_a_differentiated_value(policy):
    def fn(x):
        @jax.custom_jvp
        def scaled(y):
            return jnp.dot(y, y) * x

        scaled.defjvp(lambda primals, tangents: (scaled(*primals), 2 * jnp.dot(primals[0], tangents[0]) * x))
        return scaled(X)

    # Half a gradient is none: JAX does not know how the rule depends on x.
    with pytest.raises(Exception):  # noqa: B017 (JAX raises UnexpectedTracerError)
        jax.grad(fn)(3.0)
    with pytest.raises(Exception):  # noqa: B017
        jax.grad(cast(fn, policy))(3.0)


# Devices.


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_a_rule_in_a_shard_map_that_checks_what_varies(inside, compiled):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))

    @jax.custom_vjp
    def product(x, w):
        return x @ w, jnp.sin(x)

    product.defvjp(lambda x, w: (product(x, w), (x, w)), lambda kept, g: (g[0] @ kept[1].T, kept[0].T @ g[0]))

    def loss(x, w):
        return jnp.sum(product(x, w)[0] ** 2)

    def gradients(loss):
        def local(x, w):
            return [g[None] for g in jax.grad(loss, (0, 1))(x, lax.pcast(w, "d", to="varying"))]

        return jax.shard_map(local, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))

    def gradients_around(cast):
        def local(x, w):
            return lax.psum(loss(x, lax.pcast(w, "d", to="varying")), "d")

        return jax.grad(cast(jax.shard_map(local, mesh=mesh, in_specs=(P("d"), P()), out_specs=P())), (0, 1))

    x = jnp.ones((8, 4))
    fn = gradients(cast(loss)) if inside else gradients_around(cast)
    expected = gradients(loss)(x, W) if inside else gradients_around(lambda fn: fn)(x, W)
    for found, wanted in zip((jax.jit(fn) if compiled else fn)(x, W), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_result_that_nobody_reads_on_an_explicit_mesh():
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))

    @jax.custom_vjp
    def both(x):
        return x @ W, jnp.sin(x)

    both.defvjp(lambda x: (both(x), ()), lambda _, g: (g[0] @ W.T + g[1],))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((8, 4)), jax.NamedSharding(mesh, P("d")))
        gradient = jax.jit(jax.grad(cast(lambda x: jnp.sum(both(x)[0]))))(x)
    assert gradient.sharding.is_equivalent_to(x.sharding, 2)
    np.testing.assert_array_equal(gradient, jnp.ones((8, 4)))


@pytest.mark.parametrize("keywords", [{"tpu": True}, {"default": True}], ids=["tpu", "default"])
def test_a_branch_for_another_platform(keywords):
    def kernel(x):
        copy = pl.pallas_call(lambda i, o: o.__setitem__(..., i[...]), out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))
        return copy(x)

    branches = dict.fromkeys(keywords, kernel)
    fn = cast(lambda x: lax.platform_dependent(x @ W, cpu=lambda x: 2 * x, **branches))
    np.testing.assert_array_equal(jax.jit(fn)(X), 2 * Y)


# Other transforms of JAX.


def test_taylor_mode():
    def fn(x):
        return jnp.sum((x @ W) * x)

    (value, terms), expected = (jet.jet(f, (X,), ((jnp.ones(4), jnp.zeros(4)),)) for f in (cast(fn), fn))
    np.testing.assert_array_equal(value, expected[0])
    np.testing.assert_array_equal(terms, expected[1])


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="the private table of such rules has another form since")
def test_a_primitive_with_a_linearize_rule_alone():
    from jax._src.interpreters import ad, mlir  # No public way to give a primitive such a rule.

    double = Primitive("double")
    double.def_impl(lambda x: 2 * x)
    double.def_abstract_eval(lambda x: x)
    mlir.register_lowering(double, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))
    ad.primitive_linearizations[double] = lambda _, nonzero, x: (
        double.bind(x), nonzero[0], None, lambda x, t: 2 * t
    )  # fmt: skip

    def fn(x):
        return jnp.sum(double.bind(x @ W))

    np.testing.assert_array_equal(jax.grad(fn)(X), 2 * W.sum(1))
    np.testing.assert_array_equal(jax.grad(cast(fn))(X), 2 * W.sum(1))


def test_equal_cast_functions():
    count = 0

    def fn(x):
        nonlocal count
        count += 1
        return x @ W

    first, second = cast(fn), cast(fn)
    assert first == second and hash(first) == hash(second)
    assert first != cast(fn, "O1:bfloat16") and first != cast(lambda x: x)
    for apply in (first, second):
        jax.jit(apply)(X)
    assert count == 1


def test_jamp_is_not_in_tracebacks():
    fn = jax.jit(cast(lambda x: jax.jit(lambda x: x @ W @ jnp.ones((3, 3)))(x)))
    with pytest.raises(TypeError, match="dot_general") as caught:
        fn(X)
    frames = traceback.extract_tb(caught.value.__traceback__)
    assert [frame for frame in frames if "/jamp/transforms/" in frame.filename] == []


@pytest.mark.parametrize("policy", ["OD:bfloat16", "O1:bfloat16", "O2:bfloat16"])
def test_a_precision_that_no_call_site_wrote(policy):
    fn = cast(lambda x, w: x @ w, policy)
    with jax.default_matmul_precision("highest"):
        assert product_dtypes(trace(fn, W, W)) == [["bfloat16"] * 2]


def test_a_precision_that_a_call_site_wrote():
    def written(x, w):
        return jnp.dot(x, w, precision="highest")

    def around(x, w):
        with jax.default_matmul_precision("highest"):
            return x @ w

    for fn in (written, around):
        assert product_dtypes(trace(cast(fn), W, W)) == [["float32"] * 2]
    with jax.default_matmul_precision("highest"):
        assert product_dtypes(trace(cast(written), W, W)) == [["float32"] * 2]
        (product,) = find(trace(cast(lambda x, w: x @ w, FULL), W, W), "dot_general")
    assert product.params["precision"] == (lax.Precision.HIGHEST,) * 2
