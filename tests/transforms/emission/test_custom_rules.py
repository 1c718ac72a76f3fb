"""Rules that users give (custom_jvp, custom_vjp, custom_root, …) are kept, and run under the policy themselves."""

import functools
from contextlib import nullcontext

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.transforms.harness import LEVELS, assert_close, check, check_gradient, o2, product_dtypes, run, total, trace

W = jax.random.normal(jax.random.key(0), (4, 4)) / 2
X = jax.random.normal(jax.random.key(1), (2, 4))


@jax.custom_jvp
def sine_jvp(x, w):
    return jnp.sin(x @ w)


@sine_jvp.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return sine_jvp(x, w), 100.0 * (dx @ w + x @ dw)  # Not the derivative: whoever drops the rule is found out.


@jax.custom_vjp
def sine_vjp(x, w):
    return jnp.sin(x @ w)


def _sine_forward(x, w):
    return jnp.sin(x @ w), (x, w)


def _sine_backward(residuals, g):
    x, w = residuals
    return 100.0 * (g @ w.T), 100.0 * (x.T @ g)


sine_vjp.defvjp(_sine_forward, _sine_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scaled(factor, x, index, w):
    return (x @ w) * factor + index, index


def _scaled_forward(factor, x, index, w):
    return scaled(factor, x, index, w), (x, w)


def _scaled_backward(factor, residuals, g):
    x, w = residuals
    return 10.0 * factor * (g[0] @ w.T), None, 10.0 * factor * (x.T @ g[0])


scaled.defvjp(_scaled_forward, _scaled_backward)


@jax.custom_vjp
def swish(tree):
    return {"out": tree["x"] * jax.nn.sigmoid(tree["x"] @ tree["w"])}


def _swish_forward(tree):
    gate = jax.nn.sigmoid(tree["x"] @ tree["w"])
    return {"out": tree["x"] * gate}, (tree, gate)


def _swish_backward(residuals, g):
    tree, gate = residuals
    return ({"x": 10.0 * g["out"] * gate, "w": tree["x"].T @ g["out"]},)


swish.defvjp(_swish_forward, _swish_backward)


def forward_rule(w, x):
    return sine_jvp(x, w)


def reverse_rule(w, x):
    return sine_vjp(x, w)


def reverse_rule_with_static_argument(w, x):
    return scaled(2.0, x, jnp.arange(4), w)


def reverse_rule_of_a_tree(w, x):
    return swish({"x": x, "w": w})


def rules_in_jit(w, x):
    return jax.jit(lambda x: sine_vjp(x, w) + sine_jvp(x, w))(x)


def rules_in_scan(w, x):
    return lax.scan(lambda x, _: (0.1 * sine_vjp(x, w) + 0.1 * sine_jvp(x, w), None), x, length=2)[0]


def rules_in_vmap(w, x):
    return jax.vmap(lambda x: sine_vjp(x[None], w) + sine_jvp(x[None], w))(x)


def rules_in_remat(w, x):
    return jax.checkpoint(lambda x: sine_vjp(x, w) + sine_jvp(x, w))(x)


def rule_in_a_gradient(w, x):
    return jax.grad(lambda w: jnp.sum(sine_jvp(x, w) ** 2))(w)


def nested_rules(w, x):
    @jax.custom_jvp
    def outer(x):
        return sine_jvp(x, W) * 2

    outer.defjvp(lambda primals, tangents: (outer(*primals), 3.0 * tangents[0]))
    return outer(x) @ w


def activations_with_rules(w, x):
    h = x @ w
    return jax.nn.softplus(h) + jax.nn.gelu(h) + jax.nn.silu(h) + jax.nn.relu(h) + jax.nn.logsumexp(h)


RULES = [
    forward_rule, reverse_rule, reverse_rule_with_static_argument, reverse_rule_of_a_tree, rules_in_jit, rules_in_scan,
    rules_in_vmap, rules_in_remat, activations_with_rules, nested_rules,
]  # fmt: skip


@pytest.mark.parametrize("fn", RULES, ids=lambda fn: fn.__name__)
def test_a_rule_is_kept_and_runs_in_half(fn):
    assert product_dtypes(check(fn, W, X))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fn", [forward_rule, reverse_rule], ids=lambda fn: fn.__name__)
def test_a_rule_is_kept_at_every_level_in_float16(fn, level):
    check(fn, W, X, policy=f"{level}:float16")


def test_a_rule_in_a_gradient_inside_the_function_is_kept():
    check(rule_in_a_gradient, W, X, grad=False, tolerance=0.06)


def test_forward_mode_uses_the_forward_rule():
    cast = jamp.cast_fn(forward_rule, "O2:bfloat16")
    both = [run(lambda w, t, f=f: jax.jvp(f, (w, X), (t, jnp.zeros_like(X))), W, W) for f in (cast, forward_rule)]
    assert_close(*both)


def test_backward_products_of_a_reverse_rule_are_in_half():
    jaxpr = trace(jax.grad(total(jamp.cast_fn(reverse_rule, "O2:bfloat16")), (0, 1)), W, X)
    assert product_dtypes(jaxpr) == [["bfloat16", "bfloat16"]] * 3


def test_symbolic_zeros_reach_a_forward_rule():
    seen = []

    @jax.custom_jvp
    def fn(x, w):
        return x @ w

    def rule(primals, tangents):
        seen.append([type(t).__name__ for t in tangents])
        (x, w), (dx, _) = primals, tangents
        return fn(x, w), dx @ w

    fn.defjvp(rule, symbolic_zeros=True)
    trace(jax.grad(lambda x: jnp.sum(jamp.cast_fn(fn, "O2:bfloat16")(x, W))), X)
    assert seen[-1][1] == "SymbolicZero"


def test_symbolic_zeros_of_a_reverse_rule():
    @jax.custom_vjp
    def fn(x, w):
        return x @ w

    def forward(x, w):
        return x.value @ w.value, (x.value, w.value if x.perturbed else None)

    def backward(residuals, g):
        x, w = residuals
        return 7.0 * (g @ w.T), x.T @ g

    fn.defvjp(forward, backward, symbolic_zeros=True)
    gradient = run(jax.grad(lambda x: jnp.sum(jamp.cast_fn(fn, "O2:bfloat16")(x, W))), X)
    assert_close(gradient, jnp.broadcast_to(7.0 * W.sum(1), (2, 4)))


def test_remat_of_a_rule_with_optimize_remat():
    @jax.custom_vjp
    def fn(x, w):
        return jnp.sin(x @ w)

    fn.defvjp(_sine_forward, _sine_backward, optimize_remat=True)
    check(lambda w, x: jax.checkpoint(fn)(x, w), W, X)


def test_a_function_with_a_rule_that_closes_over_a_computed_value():
    def fn(w, x):
        scale = jnp.sum(w)

        @jax.custom_jvp
        def double(x):
            return scale * x @ W

        double.defjvp(lambda p, t: (p[0] @ W, 5.0 * t[0] @ W))
        return double(x)

    check(lambda x: fn(W, x), X)


def test_integer_operands_of_a_rule_get_no_gradient():
    @jax.custom_vjp
    def pick(table, index):
        return table[index]

    pick.defvjp(
        lambda table, index: (table[index], (table.shape, index)),
        lambda residuals, g: (jnp.zeros(residuals[0]).at[residuals[1]].add(10.0 * g), None),
    )
    gradient = run(jax.grad(total(jamp.cast_fn(pick, "O2:bfloat16"))), W, jnp.array([0, 0, 2]))
    assert gradient.dtype == jnp.float32
    assert jnp.all(gradient[jnp.array([1, 3])] == 0)


def test_keys_integers_and_nothing_may_be_residuals():
    @jax.custom_vjp
    def fn(x, w, n, key):
        return x @ w * n

    def forward(x, w, n, key):
        return x @ w * n, (x, w, n, key, None)

    def backward(residuals, g):
        x, w, n, _, _ = residuals
        return n * (g @ w.T), n * (x.T @ g), None, None

    fn.defvjp(forward, backward)
    check(lambda w, x: fn(x, w, jnp.int32(2), jax.random.key(0)), W, X)


def test_integer_results_of_a_rule_have_no_tangent():
    @functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
    def fn(x, n, i):
        return x * n + i, i

    @fn.defjvp
    def _(n, primals, tangents):
        x, i = primals
        return (x * n + i, i), (5.0 * tangents[0] * n, np.zeros(i.shape, jax.dtypes.float0))

    check(lambda w, x: fn(x @ w, 3.0, jnp.arange(4))[0] @ w, W, X)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def blockwise_attention(q, k, v, block):
    return _blockwise_forward(q, k, v, block)[0]


def _blockwise_forward(q, k, v, block):
    def step(carry, kv):
        largest, total, out = carry
        scores = q @ kv[0].T
        new = jnp.maximum(largest, scores.max(-1))
        weights, shrink = jnp.exp(scores - new[:, None]), jnp.exp(largest - new)
        return (new, total * shrink + weights.sum(-1), out * shrink[:, None] + weights @ kv[1]), None

    init = jnp.full(len(q), -jnp.inf), jnp.zeros(len(q)), jnp.zeros_like(q)
    (largest, total, out), _ = lax.scan(step, init, [y.reshape(-1, block, y.shape[1]) for y in (k, v)])
    out = out / total[:, None]
    return out, (q, k, v, out, largest + jnp.log(total))


def _blockwise_backward(block, residuals, g):
    q, k, v, out, logsumexp = residuals
    weights = jnp.exp(q @ k.T - logsumexp[:, None])
    d_scores = weights * (g @ v.T - (g * out).sum(-1, keepdims=True))
    return d_scores @ k, d_scores.T @ q, weights.T @ g


blockwise_attention.defvjp(_blockwise_forward, _blockwise_backward)


@pytest.mark.parametrize("policy", ["O1:float16", "O2:bfloat16", "O2:float16", "O3:float16"])
def test_attention_in_blocks_with_a_backward_pass_of_its_own(policy):
    check(lambda w, x: blockwise_attention(x @ w, 0.5 * x @ w, x @ w, 1) @ w, W, X, policy=policy)


def solve_linear(w, x):
    matrix = w @ w.T + 4 * jnp.eye(4)
    return lax.custom_linear_solve(
        lambda v: matrix @ v, x[0], lambda mv, b: jnp.linalg.solve(matrix, b), symmetric=True
    )


def test_custom_linear_solve():
    cast = jamp.cast_fn(solve_linear, "O2:bfloat16")
    np.testing.assert_allclose(jax.jit(cast)(W, X), jax.jit(solve_linear)(W, X), atol=0.02)
    gradients = [jax.jit(jax.grad(total(f)))(W, X) for f in (cast, solve_linear)]
    np.testing.assert_allclose(*gradients, atol=0.02)


def test_custom_root():
    def cube_root(x):
        def f(y):
            return y**3 - x

        def newton(f, y):
            return lax.fori_loop(0, 8, lambda _, y: y - f(y) / (3 * y**2), y)

        return lax.custom_root(f, jnp.float32(2.0), newton, lambda g, b: b / g(1.0))

    cast = jamp.cast_fn(cube_root, "O2:bfloat16")
    value, slope = jax.jit(jax.value_and_grad(cast))(jnp.float32(8.0))
    np.testing.assert_allclose((value, slope), (2.0, 1 / 12), rtol=1e-2)


def test_custom_vmap_keeps_its_rule():
    @jax.custom_batching.custom_vmap
    def fn(x):
        return x @ W

    @fn.def_vmap
    def _(axis_size, in_batched, x):
        return 10.0 * (x @ W), True

    cast = jamp.cast_fn(jax.vmap(fn), "O2:bfloat16")
    assert_close(run(cast, X), 10.0 * (X @ W))
    assert_close(run(jax.vmap(jamp.cast_fn(fn, "O2:bfloat16")), X), 10.0 * (X @ W))


def test_the_rule_of_a_custom_vmap_is_in_half():
    fn = jax.custom_batching.custom_vmap(lambda x, w: jnp.sin(x) @ w)
    fn.def_vmap(lambda size, in_batched, x, w: ((jnp.sin(x) @ w) @ jnp.eye(4), True))
    x = jnp.stack([X, 2 * X])
    mapped = jax.vmap(jamp.cast_fn(fn, "O2:bfloat16"), (0, None))
    assert_close(mapped(x, W), jnp.sin(x) @ W)
    assert product_dtypes(trace(mapped, x, W)) == [["bfloat16"] * 2] * 2
    assert product_dtypes(trace(jamp.cast_fn(fn, "O2:bfloat16"), X, W)) == [["bfloat16"] * 2]


def test_a_custom_vmap_says_which_results_are_batched():
    @jax.custom_batching.custom_vmap
    def fn(x, y):
        return {"sum": x + y, "y": y}

    @fn.def_vmap
    def _(axis_size, in_batched, x, y):
        assert (axis_size, in_batched) == (3, [True, False])
        return fn(x, jnp.broadcast_to(y, x.shape)) | {"y": y}, {"sum": True, "y": False}

    cast = jax.vmap(jamp.cast_fn(fn, "O3:bfloat16"), (0, None), out_axes={"sum": 0, "y": None})
    out = cast(jnp.arange(3.0), jnp.float32(2.0))
    np.testing.assert_array_equal(out["sum"], [2.0, 3.0, 4.0])
    assert out["y"] == 2.0


def test_a_custom_vmap_whose_rule_returns_something_else():
    fn = jax.custom_batching.custom_vmap(lambda x: (x, x))
    fn.def_vmap(lambda size, in_batched, x: (x, True))
    with pytest.raises(ValueError, match="tuple"):
        jax.vmap(o2(fn))(X)


def batched_product(scale):
    """A product, and the same batch by batch; both read a value that is no operand."""
    fn = jax.custom_batching.custom_vmap(lambda x: x @ W * scale)
    fn.def_vmap(lambda size, in_batched, x: (x @ W * scale, True))
    return fn


def batched_in_turn(scale):
    return jax.custom_batching.sequential_vmap(lambda x: x @ W * scale)


@pytest.mark.parametrize("make", [batched_product, batched_in_turn])
@pytest.mark.parametrize("policy", ["O1:bfloat16", "O3:bfloat16", "O2:bfloat16,full=['*']"])
def test_a_rule_for_batches_that_closes_over_a_computed_value(make, policy):
    def fn(x, a):
        return make(jnp.max(a) * 2)(x)

    x, a = jnp.stack([X, 2 * X]), jnp.arange(3.0)
    mapped = jax.vmap(jamp.cast_fn(fn, policy), (0, None))
    assert_close(mapped(x, a), x @ W * 4)
    assert_close(jax.jvp(lambda x: mapped(x, a), (x,), (x,))[1], x @ W * 4)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_transpose_that_closes_over_a_computed_value(compiled):
    def fn(x, a):
        scale = jnp.max(a) * 2
        return jnp.sum(jax.custom_derivatives.linear_call(
            lambda _, x: x @ W * scale, lambda _, y: (y * scale) @ W.T, (), x
        ))  # fmt: skip

    a, gradient = jnp.arange(3.0), jax.grad(o2(fn))
    expected = 4 * jnp.broadcast_to(W.sum(1), X.shape)
    np.testing.assert_allclose((jax.jit(gradient) if compiled else gradient)(X, a), expected, rtol=1e-5)


def test_linear_call():
    def fn(w, x):
        return jax.custom_derivatives.linear_call(lambda w, x: x @ w, lambda w, y: y @ w.T, w, x)

    cast = jamp.cast_fn(fn, "O2:bfloat16")
    np.testing.assert_allclose(jax.jit(cast)(W, X), X @ W, atol=0.03)


def test_the_tangents_of_a_rule_are_cast_linearly_in_float16():
    """Saturating a tangent as an argument's mask is saturated cannot be transposed; found by a random program."""
    function = jax.custom_jvp(jnp.abs)
    function.defjvp(lambda primals, tangents: jax.jvp(jnp.abs, primals, tangents))
    cast = jamp.cast_fn(lambda x: jamp.half_precision(function)(x).sum(), "O3:float16")
    assert jnp.array_equal(jax.grad(cast)(jnp.float32([2, -3])), jnp.float32([1, -1]))


@pytest.mark.parametrize("level", LEVELS)
def test_the_tangents_of_masked_scores_are_cast_linearly_in_float16(level):
    """What a mask of -1e9 touches is saturated where it is cast, its tangents are not; found by a random program."""

    def attend(w, x):
        return jnp.where(np.tril(np.ones((2, 2), bool)), x @ x.T, -1e9) @ x @ w

    function = jax.custom_jvp(attend)
    function.defjvp(lambda primals, tangents: jax.jvp(attend, primals, tangents))
    jaxpr = trace(jax.grad(total(jamp.cast_fn(function, f"{level}:float16")), (0, 1)), W, X)
    assert jaxpr.out_avals == [jax.typeof(W), jax.typeof(X)]


def test_tangents_that_a_loop_carries_are_cast_linearly_in_float16():
    def layers(x):
        return lax.scan(lambda h, _: (h + x, (1e9 * h @ W).sum()), jnp.zeros_like(x), length=2)[1].sum()

    function = jax.custom_jvp(layers)
    function.defjvp(lambda primals, tangents: jax.jvp(layers, primals, tangents))
    assert trace(jax.grad(jamp.cast_fn(function, "O1:float16")), X).out_avals == [jax.typeof(X)]


@pytest.mark.parametrize("policy", ["O1:bfloat16", "O2:bfloat16", "O2:bfloat16,residuals=all"])
@pytest.mark.parametrize("shape", [(4, 4), (3, 5)])
def test_a_rule_that_is_differentiated_by_other_operands_at_each_call(policy, shape):
    @jax.custom_vjp
    def product(w, x):
        return w @ x

    product.defvjp(lambda w, x: (w @ x, (w, x)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    layer = jax.jit(product)
    w, x = jnp.ones(shape), jnp.ones(shape[::-1])

    def loss(w, x):
        return layer(w, 2 * jnp.ones(shape[::-1])).sum() + layer(3 * jnp.ones(shape), x).sum()

    expected = jax.grad(loss, (0, 1))(w, x)
    for differentiate in (jax.grad, lambda *args: jax.jit(jax.grad(*args))):
        actual = differentiate(jamp.cast_fn(loss, policy), (0, 1))(w, x)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_results_that_never_are_half_have_tangents():
    @jax.custom_jvp
    def fn(x, z):
        return x @ x, z * z

    @fn.defjvp
    def _(primals, tangents):
        (x, z), (dx, dz) = primals, tangents
        return fn(x, z), (dx @ x + x @ dx, 3 * z * dz)

    def loss(x, z):
        a, b = fn(x, z)
        return a.sum() + (b * b.conj()).real.sum()

    def relu(z):
        return jax.nn.relu(z).sum()

    z = jnp.array([1 + 2j])
    np.testing.assert_allclose(
        jax.grad(o2(loss), 1)(2 * jnp.eye(3), z), jax.grad(loss, 1)(2 * jnp.eye(3), z), rtol=1e-6
    )
    with jax.enable_x64(True):
        wide = jnp.arange(-1.0, 3.0, dtype=jnp.float64)
        for f, args in ((loss, (2 * jnp.eye(3, dtype=jnp.float32), wide)), (relu, (wide,))):
            says = pytest.warns(jamp.PrecisionWarning, match="float64") if len(args) == 1 else nullcontext()
            with says:  # That it leaves all of it alone.
                cast = jax.grad(o2(f), len(args) - 1)(*args)
            np.testing.assert_array_equal(cast, jax.grad(f, len(args) - 1)(*args))


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_rule_that_asks_what_is_differentiated_is_traced_for_each_call(level):
    @eqx.filter_custom_vjp
    def layer(operands):
        return jnp.tanh(operands[0] @ operands[1])

    @layer.def_fwd
    def _(perturbed, operands):
        del perturbed
        return layer(operands), None

    @layer.def_bwd
    def _(kept, g, perturbed, operands):
        del kept
        x, w = operands
        g = g * (1 - jnp.tanh(x @ w) ** 2)
        return (g @ w.T if perturbed[0] else None, x.T @ g if perturbed[1] else None)

    call, x = jax.jit(lambda x, w: layer((x, w))), jax.random.normal(jax.random.key(2), (4, 4)) / 2
    fn = lambda w: (call(x, w) + 2 * call(w, x)).sum()  # noqa: E731
    expected = jax.grad(fn)(W)
    actual = jax.jit(jax.grad(jamp.cast_fn(fn, f"{level}:bfloat16")))(W)
    assert jnp.linalg.norm(actual - expected) < 0.02 * jnp.linalg.norm(expected)


@pytest.mark.parametrize("policy", ["O1:float16", "O2:float16", "O3:float16", "O3:bfloat16"])
def test_a_forward_rule_whose_tangents_are_complex_for_a_while(policy):
    """Complex values have no state in which to remember that a cast of them must not saturate."""

    def fn(w, x):
        spectrum = jnp.fft.rfft(x @ w) * jnp.array([1.0, 0.5, 0.25])
        return jnp.fft.irfft(spectrum, 4) * 0.5 + x @ w

    ruled = jax.custom_jvp(fn)
    ruled.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    check_gradient(ruled, W, X, policy=policy)


def helper(x):
    return jnp.tanh(x @ x)


@jax.custom_vjp
def helped_vjp(x):
    return helper(x)


def _helped_forward(x):
    return helper(x), x


def _helped_backward(x, g):
    return (helper(x) * g,)


helped_vjp.defvjp(_helped_forward, _helped_backward)


@jax.custom_jvp
def helped_jvp(x):
    return helper(x)


@helped_jvp.defjvp
def _helped_tangent(primals, tangents):
    return helper(*primals), helper(*primals) * tangents[0]


_LINE = f"test_custom_rules.py:{helper.__code__.co_firstlineno + 1}"
_FORWARD, _BACKWARD = (
    f"{_LINE} from test_custom_rules.py:{fn.__code__.co_firstlineno + 1}" for fn in (_helped_forward, _helped_backward)
)


@pytest.mark.parametrize(
    ("fn", "entry", "backward"),
    [
        (helped_vjp, "fn:helper", ["float32", "float32"]),  # Called by the function, and by both halves of its rule.
        (helped_vjp, "fn:helped_vjp", ["float32", "float32"]),
        (helped_vjp, _LINE, ["float32", "float32"]),
        (helped_vjp, _FORWARD, ["float32", "bfloat16"]),
        (helped_vjp, _BACKWARD, ["bfloat16", "float32"]),
        (helped_vjp, "fn:_helped_backward", ["bfloat16", "float32"]),
        (helped_jvp, "fn:helper", ["float32", "float32"]),
        (helped_jvp, "fn:helped_jvp", ["float32", "float32"]),
    ],
)
@pytest.mark.parametrize("derived_before", [False, True])
def test_rules_for_functions_and_lines_reach_rules(fn, entry, backward, derived_before):
    """So they do where JAX remembers the rule, which it traced for a derivative without jamp."""
    policy = jamp.get_policy("O2:bfloat16").with_rules(full=[entry])
    x = jax.random.normal(jax.random.key(0), (8, 8)) / 4

    def model(x):
        return jax.jit(fn)(x * 2.0)

    jax.clear_caches()
    if derived_before:
        jax.grad(lambda x: model(x).sum())(x)
    cast = jamp.cast_fn(model, policy)
    jaxpr = trace(jax.grad(lambda x: cast(x).sum()), x)
    assert [dtypes[0] for dtypes in product_dtypes(jaxpr)] == backward
    if entry.startswith("fn:help"):
        assert jax.value_and_grad(lambda x: cast(x).sum())(x)[0] == cast(x).sum() == model(x).sum()


@jax.custom_vjp
def stepped(t):
    return lax.fori_loop(0, 3, lambda _, y: y + jnp.cos(t), jnp.zeros_like(t))


# A rule that tells what it is given: the cotangent of `t` is `t` as the backward pass reads it.
stepped.defvjp(lambda t: (stepped(t), (t, t + 1e-3)), lambda kept, _: (kept[0] + (kept[1] - kept[0] - 1e-3),))


@pytest.mark.parametrize("level", ["OD:bfloat16", "O1:bfloat16", "O2:bfloat16", "O2:float16"])
def test_a_rule_reads_what_the_loop_of_its_function_has_read(level):
    def fn(b, x, w):
        return stepped(jnp.exp(x @ w) + b).sum()  # No half number.

    zero = jnp.zeros((2, 4))
    x, w = jnp.round(4 * X) / 4, jnp.round(4 * W) / 4  # Exact in half, as the exponents are.
    found = jax.grad(jamp.cast_fn(fn, level))(zero, x, w)
    np.testing.assert_allclose(found, jnp.exp(x @ w), rtol=1e-6)


@jax.custom_vjp
def cross_entropy(x, w, labels):
    return _cross_entropy_forward(x, w, labels)[0]


def _cross_entropy_forward(x, w, labels):
    logits = x @ w
    normalizer = jax.nn.logsumexp(logits, -1)
    hit = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return (normalizer - hit).mean(), (x, w, labels, normalizer)


def _cross_entropy_backward(kept, g):
    """Computes the probabilities again, of logits that are not kept."""
    x, w, labels, normalizer = kept
    logits = (jnp.exp(x @ w - normalizer[:, None]) - jax.nn.one_hot(labels, w.shape[1])) * g / len(x)
    return logits @ w.T, x.T @ logits, None


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


@jax.custom_jvp
def log_sum(x):
    peak = x.max(-1, keepdims=True)
    return jnp.log(jnp.exp(x - peak).sum(-1, keepdims=True)) + peak


@log_sum.defjvp
def _log_sum_tangent(primals, tangents):
    return log_sum(*primals), (jax.nn.softmax(primals[0]) * tangents[0]).sum(-1, keepdims=True)


@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
def test_a_normalizer_that_a_rule_keeps_is_that_of_what_it_computes_again(level):
    keys = jax.random.split(jax.random.key(0), 4)
    x, w0, w = (jax.random.normal(k, shape) for k, shape in zip(keys, [(64, 32), (32, 32), (32, 512)], strict=False))

    def fn(w0, w):
        h = jnp.tanh(x @ (w0 / 3))
        return cross_entropy(h, 3 * w, (h @ w).argmax(-1))

    wanted = jax.grad(fn, (0, 1))(w0, w)
    found = jax.jit(jax.grad(jamp.cast_fn(fn, f"{level}:bfloat16"), (0, 1)))(w0, w)
    for one, other in zip(found, wanted, strict=True):
        assert jnp.linalg.norm(one - other) <= 0.08 * jnp.linalg.norm(other)


@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
def test_products_whose_exponentials_a_function_with_a_rule_adds_up_are_rounded(level):
    """Its rule computes the exponentials again of what is kept."""

    def fn(x, w):
        return x + 0.5 * (log_sum(x @ w) + jnp.zeros(4)) @ w

    jaxpr = str(trace(jax.grad(lambda x, w: jamp.cast_fn(fn, f"{level}:bfloat16")(x, w).sum(), (0, 1)), X, W))
    assert "mantissa_bits=7" in jaxpr


def momentum_step(state, w):
    x, v = state
    v = 0.9 * v + 0.3 * jnp.tanh(x @ w[0]) @ w[1]
    return x + v, v


def momentum_step_back(state, w):
    x, v = state
    x = x - v
    return x, (v - 0.3 * jnp.tanh(x @ w[0]) @ w[1]) / 0.9


@jax.custom_vjp
def reversible(ws, state):
    return lax.scan(lambda s, w: (momentum_step(s, w), None), state, ws)[0]


def _reversible_backward(kept, g):
    def step(carry, w):
        before = momentum_step_back(carry[0], w)
        _, pullback = jax.vjp(momentum_step, before, w)
        g, of_w = pullback(carry[1])
        return (before, g), of_w

    (_, g), of_ws = lax.scan(step, (kept[1], g), kept[0], reverse=True)
    return of_ws, g


reversible.defvjp(lambda ws, s: ((out := reversible(ws, s)), (ws, out)), _reversible_backward)


@pytest.mark.parametrize("level", ["OD", "O1", "O2"])
def test_a_reversible_network_finds_its_states_again(level):
    """Its layers are no stream that half will do for: the inverse of 40 makes a rounding 67 times as large."""
    keys = jax.random.split(jax.random.key(0), 3)
    ws = (jax.random.normal(keys[0], (40, 8, 16)) / 5, jax.random.normal(keys[1], (40, 16, 8)) / 7)
    x = jax.random.normal(keys[2], (32, 8))

    def fn(ws, x):
        return (reversible(ws, (x, 0 * x))[0] ** 2).mean()

    wanted = jax.grad(fn)(ws, x)
    found = jax.jit(jax.grad(jamp.cast_fn(fn, f"{level}:bfloat16")))(ws, x)
    for one, other in zip(found, wanted, strict=True):
        assert jnp.linalg.norm(one - other) <= 0.03 * jnp.linalg.norm(other)
