"""What reverse mode keeps of a function under `residuals="half"`."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from jamp.inspect import bytes_by_dtype, residuals
from jamp.transforms._traced import Traced, evaluate
from jamp.transforms.program.heuristics import Heuristics
from tests.transforms.harness import EYE, SIZE, W, X, both_halves, find, layer_norm, o2, trace

INDEX = jnp.array([2, 0, 2, 1])


def running_sums(w, x):
    return jnp.tanh(jnp.cumsum(x @ w, 0) @ w) @ w


def planned_with(fn, **heuristics):
    """The function at O2 in bfloat16, with other thresholds."""
    policy = jamp.get_policy("O2:bfloat16")

    def call(*args):
        traced = Traced(fn, args, {})
        return traced.rebuild(evaluate(traced.plan(policy, heuristics=Heuristics(**heuristics)), traced.inputs, policy))

    return call


def sums_of_segments(w, x):
    return jnp.tanh(jax.ops.segment_sum(x @ w, INDEX, len(x)) @ w) @ w


def norms_and_activations(w, x):
    return jax.nn.gelu(layer_norm(x @ w) @ w) @ w


@pytest.mark.parametrize("fn", [running_sums, sums_of_segments, norms_and_activations])
def test_no_float32_of_data_size_is_kept(fn):
    """A sum that is as large as its operand is computed in float32, and kept in the half that its reader takes."""
    kept = bytes_by_dtype(residuals(lambda w, x: o2(fn)(w, x).sum(), W, X))
    assert kept.get("float32", 0) < X.size * 4
    assert kept["bfloat16"] <= 4 * X.size * 2 + W.size * 2
    assert kept["bfloat16"] >= 2 * len(X) * SIZE


class TestRelu:
    """A relu's derivative is made of its result: what comes out of the layer before need not be kept."""

    @pytest.mark.parametrize("level", ["O1", "O2", "O3"])
    @pytest.mark.parametrize("relu", [jax.nn.relu, jax.jit(jax.nn.relu)])
    def test_one_half_value_is_kept_per_unit(self, relu, level):
        def loss(w, x):
            return jamp.cast_fn(lambda w, x: relu(relu(x @ w) @ w) @ w, f"{level}:bfloat16")(w, x).sum()

        assert [r.dtype for r in residuals(loss, W, X) if r.shape == X.shape] == ["bfloat16"] * 2

    def test_in_a_loop_over_layers(self):
        def loss(ws, x):
            return o2(lambda ws, x: lax.scan(lambda h, w: (jax.nn.relu(h @ w), None), x, ws)[0])(ws, x).sum()

        kept = [r for r in residuals(loss, jnp.stack([W] * 3), X) if r.shape[-2:] == X.shape]
        assert sum(r.bytes for r in kept) <= 3 * 2 * X.size * 2  # Of each layer, what it reads and what it makes.

    @both_halves
    def test_the_derivative_is_that_of_relu(self, half):
        """At zero it is zero, and of a NaN as well."""
        fn = o2(lambda b: jax.nn.relu(EYE @ EYE * 0 + b) @ EYE, half)
        edges = jnp.array([-1.0, 0.0, -0.0, 2.0**-24, 1.0, -jnp.inf])
        values = jnp.zeros((1, SIZE)).at[0, : len(edges)].set(edges)
        gradient = jax.grad(lambda b: fn(b).sum())(values)
        assert (gradient[0, : len(edges)] / SIZE).tolist() == [0, 0, 0, 1, 1, 0]
        assert jax.grad(lambda b: o2(jax.nn.relu, half)(b.astype(half)).sum())(jnp.array(jnp.nan)) == 0

    def test_a_rule_of_the_users_own_is_kept(self):
        """Guided backpropagation, a straight-through relu: the same function with another derivative."""

        @jax.custom_jvp
        def relu(x):
            return jnp.maximum(x, 0)

        relu.defjvps(lambda dx, out, x: dx * jnp.where(x > -1, 3.0, 0.5))
        grad = jax.grad(lambda b: (o2(lambda b: relu(EYE @ EYE * 0 + b) @ EYE)(b)).sum())
        assert grad(jnp.full((1, SIZE), -0.5)).tolist() == [[3.0 * SIZE] * SIZE]
        assert grad(jnp.full((1, SIZE), -2.0)).tolist() == [[0.5 * SIZE] * SIZE]

    def test_maximum_with_zero_halves_a_tie_as_jax_does(self):
        fn = o2(lambda x: jnp.maximum(x @ EYE, 0) @ EYE)
        assert jax.grad(lambda x: fn(x).sum())(jnp.zeros((1, SIZE))).tolist() == [[0.5] * SIZE]


class TestMasks:
    """A comparison is made again in the backward pass, but not with random numbers."""

    @pytest.mark.parametrize("level", ["O1", "O2", "O3"])
    def test_the_mask_of_dropout_is_kept_and_its_numbers_drawn_once(self, level):
        def loss(w, x, key):
            def fn(w, x, key):
                h = jnp.tanh(x @ w)
                return jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0) @ w

            return jamp.cast_fn(fn, f"{level}:bfloat16")(w, x, key).sum()

        kept = bytes_by_dtype(residuals(loss, W, X, jax.random.key(0)))
        assert kept["bool"] == X.size
        assert len(find(trace(jax.grad(loss), W, X, jax.random.key(0)), "random_bits")) == 1

    @pytest.mark.parametrize("activation", [jax.nn.softplus, jax.nn.leaky_relu, jax.nn.elu, jnp.abs, jax.nn.hard_tanh])
    def test_no_mask_of_data_is_kept(self, activation):
        kept = bytes_by_dtype(residuals(lambda w, x: o2(lambda w, x: activation(x @ w) @ w)(w, x).sum(), W, X))
        assert "bool" not in kept

    def test_softplus_keeps_what_it_is_computed_of(self):
        kept = bytes_by_dtype(residuals(lambda w, x: o2(lambda w, x: jax.nn.softplus(x @ w) @ w)(w, x).sum(), W, X))
        assert kept.get("float32", 0) <= X.size * 4


def values_of_data(loss, *args, shape=None):
    """Dtypes of what is kept in the shape of the data, or another."""
    return [r.dtype for r in residuals(loss, *args) if r.shape[-2:] == (shape or X.shape)]


class TestRecomputation:
    """Elementwise values are computed again from one kept value, not from two."""

    @pytest.mark.parametrize("activation", [jax.nn.gelu, jax.nn.silu, jax.nn.mish, lambda h: h * jnp.tanh(h)])
    def test_an_activation_keeps_what_it_is_made_of_and_what_a_product_reads(self, activation):
        kept = values_of_data(lambda w, x: o2(lambda w, x: activation(x @ w + 1) @ w)(w, x).sum(), W, X)
        assert kept == ["bfloat16"] * 2

    def test_a_sum_of_multiples_of_one_value_is_computed_again_of_that(self):
        kept = values_of_data(
            lambda w, x: o2(lambda w, x: (h := x @ w + 1, (h * jnp.tanh(h) + h) @ w)[1])(w, x).sum(), W, X
        )
        assert kept == ["bfloat16"]

    def test_a_residual_stream_is_kept(self):
        """Otherwise all layers would be computed again before the first is differentiated."""

        def fn(w, x):
            h = x @ w
            for scale in (1, 2, 3):  # Weights of their own: no unrolled loop, whose sums are float32.
                h = h + lax.erf(h) @ (w * scale)
            return h @ w

        kept = values_of_data(lambda w, x: o2(fn)(w, x).sum(), W, X)
        assert kept == ["bfloat16"] * 8  # The input, of four streams and three functions of them; not the products.

    def test_gates_are_kept_and_what_is_made_of_them_for_a_product(self):
        def fn(w, x):
            return (jax.nn.silu(x @ w) * (x @ (w * 2))) @ w

        assert values_of_data(lambda w, x: o2(fn)(w, x).sum(), W, X) == ["bfloat16"] * 3

    def test_a_long_row_is_cut(self):
        """Not one kernel for hundreds of operations."""

        def fn(w, x):
            h = x @ w
            for _ in range(100):
                h = jnp.tanh(h)
            return h @ w

        kept = values_of_data(lambda w, x: o2(fn)(w, x).sum(), W, X)
        assert 4 <= len(kept) <= 6

    def test_of_a_float32_stream_the_half_copies_that_products_read_are_kept(self):
        """XLA fused the whole sum into the kernel of each term: compile time grew with the square of the layers."""

        def fn(w, x):
            h = x @ w
            for _ in range(60):  # One weight: Euler steps, which are added up in float32.
                h = h + jnp.tanh(h @ w) / 100
            return h @ w

        kept = values_of_data(lambda w, x: o2(fn)(w, x).sum(), W, X)
        assert kept.count("bfloat16") >= 120  # The products, and what they read.

    def test_of_a_float32_stream_through_calls_the_stream_is_kept_now_and_then(self):
        step = jax.jit(lambda w, h: h + jnp.tanh(h @ w) / 100)

        def fn(w, x):
            h = x @ w
            for _ in range(60):
                h = step(w, h)
            return h @ w

        kept = values_of_data(lambda w, x: o2(fn)(w, x).sum(), W, X)
        assert 4 <= kept.count("float32") <= 12
        assert kept.count("bfloat16") >= 60

    def test_noise_is_drawn_once(self):
        def loss(w, x, key):
            return o2(lambda w, x: (x @ w * jax.random.normal(key, X.shape)) @ w)(w, x).sum()

        gradient = trace(jax.grad(loss), W, X, jax.random.key(0))
        assert len(find(gradient, "random_bits")) == 1


class TestWhereWeightsAreCast:
    """Half copies of weights are kept where they are little beside the data."""

    def kept_copies(self, w, x):
        def fn(w, x):
            for _ in range(16):
                x = jnp.tanh(x @ w)
            return x @ w

        return values_of_data(lambda w, x: o2(fn)(w, x).sum(), w, x, shape=w.shape)

    def test_small_beside_the_data(self):
        assert self.kept_copies(W, jnp.ones((64 * SIZE, SIZE))) == ["bfloat16"]

    def test_large_beside_the_data(self):
        assert self.kept_copies(jnp.ones((8 * SIZE, 8 * SIZE)), jnp.ones((2, 8 * SIZE))) == []

    @pytest.mark.parametrize("rows", [1, 64 * SIZE])
    @pytest.mark.parametrize("small_beside", [0, 2**40])
    def test_gradients_do_not_depend_on_it(self, small_beside, rows):
        """Six readers of a weight: their cotangents add up in float32 as well."""
        w, x = jnp.eye(SIZE) * 2.0**-8, jnp.ones((rows, SIZE))
        cast = planned_with(lambda w: sum(x @ w for _ in range(6)) * x, small_beside=small_beside)
        sums = jax.grad(lambda w: cast(w).sum())(w)
        assert jnp.array_equal(sums, jnp.full_like(w, 6.0 * rows))


def test_a_loop_over_layers_is_recomputed_layer_by_layer():
    """The checkpoint is inside of the loop: no loop that recomputes all layers before the backward pass."""

    def loss(ws, x):
        return o2(lambda ws, x: lax.scan(lambda h, w: (h + jax.nn.gelu(h @ w), None), x, ws)[0])(ws, x).sum()

    assert len(find(trace(jax.grad(loss), jnp.stack([W] * 3), X), "scan")) == 2


class TestFunctionsOfTheirResults:
    """The derivatives of tanh and the logistic function are made of their results, which the next product reads."""

    @pytest.mark.parametrize("fn", [jnp.tanh, lax.logistic, jax.nn.sigmoid])
    def test_one_half_value_is_kept_per_unit(self, fn):
        kept = residuals(lambda w, x: o2(lambda w, x: fn(fn(x @ w) @ w) @ w)(w, x).sum(), W, X)
        assert [r.dtype for r in kept if r.shape == X.shape] == ["bfloat16"] * 2

    @both_halves
    @pytest.mark.parametrize("fn", [jnp.tanh, lax.logistic])
    def test_derivatives_are_those_of_jax(self, fn, half):
        x = jnp.linspace(-6, 6, SIZE)[None]
        found = jax.grad(lambda x: o2(lambda x: fn(x @ EYE) @ EYE, half)(x).sum())(x)
        expected = jax.grad(lambda x: fn(x).sum().astype(jnp.float32))(x.astype(half)).astype(jnp.float32)
        assert jnp.allclose(found, expected, rtol=0, atol=2 * float(jnp.finfo(half).eps))  # XLA may round less often.

    @pytest.mark.parametrize("fn", [jnp.tanh, lax.logistic])
    def test_they_have_derivatives_of_their_own(self, fn):
        x = jnp.linspace(-2, 2, SIZE)[None]
        found = jax.hessian(lambda x: o2(lambda x: fn(x @ EYE) @ EYE)(x).sum())(x)
        assert jnp.allclose(found, jax.hessian(lambda x: fn(x).sum())(x), atol=0.02)


def by_hand(z):
    e = jnp.exp(z - lax.stop_gradient(z.max(-1, keepdims=True)))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("softmax", [jax.nn.softmax, jax.jit(lambda z: jax.nn.softmax(z)), by_hand])
def test_the_weights_of_an_attention_are_handed_to_the_backward_pass_once(softmax):
    """Of all values of a transformer they are the largest, and XLA does not see that two copies are the same."""

    def attention(w, x):
        return softmax((x @ w) @ (x @ w).T) @ (x @ w) @ w

    x = jnp.ones((3 * SIZE, SIZE))
    gradient = trace(jax.grad(lambda w: o2(attention)(w, x).sum()), W)
    (backward,) = (eqn for eqn in find(gradient, "remat2") if eqn.params["differentiated"])
    given = [atom.aval.dtype for atom in backward.invars if atom.aval.shape == (len(x), len(x))]
    assert given == [jnp.bfloat16]


@jax.custom_vjp
def softmax_with_a_rule(z):
    return jnp.exp(z - jax.nn.logsumexp(z, -1, keepdims=True))


def _softmax_forward(z):
    p = softmax_with_a_rule(z)
    return p, p


softmax_with_a_rule.defvjp(_softmax_forward, lambda p, g: (p * (g - (p * g).sum(-1, keepdims=True)),))


class TestResultsThatARuleKeeps:
    """What a reverse-mode rule keeps of its own result is what the product behind it keeps as well: one array."""

    @staticmethod
    def kept(fn, half, x):
        """The distinct arrays that the backward pass is handed, of the size of the weights of an attention."""
        _, backward = jax.vjp(lambda w: jamp.cast_fn(fn, half)(w, x).sum(), W)
        arrays = {array.unsafe_buffer_pointer(): array for array in jax.tree.leaves(backward)}
        return [array.dtype for array in arrays.values() if array.shape[-2:] == (len(x), len(x))]

    X = jnp.ones((3 * SIZE, SIZE))

    @both_halves
    def test_in_half(self, half):
        def attention(w, x):
            return softmax_with_a_rule((x @ w) @ x.T) @ (x @ w)

        assert self.kept(attention, f"O2:{half}", self.X) == [half]

    @both_halves
    def test_in_half_in_a_loop(self, half):
        def attention(w, x):
            return lax.scan(lambda h, _: (softmax_with_a_rule(h @ x.T) @ (h @ w), None), x, length=2)[0]

        assert self.kept(attention, f"O2:{half}", self.X) == [half]

    @both_halves
    @pytest.mark.parametrize("level", ["O1", "OD"])
    def test_in_float32_where_the_rule_keeps_float32(self, level, half):
        """The half copy is made again, of what is kept anyway."""

        def attention(w, x):
            return softmax_with_a_rule((x @ w) @ x.T) @ (x @ w)

        def in_a_loop(w, x):
            return lax.scan(lambda h, _: (softmax_with_a_rule(h @ x.T) @ (h @ w), None), x, length=2)[0]

        assert self.kept(attention, f"{level}:{half}", self.X) == ["float32"]
        assert self.kept(in_a_loop, f"{level}:{half}", self.X) == ["float32"]

    def test_of_a_rule_that_fails(self):
        """A function that refuses to be differentiated runs all the same."""

        @jax.custom_vjp
        def refusing(x):
            return jnp.exp2(x)

        def refuses(x):
            raise NotImplementedError("No gradient.")

        refusing.defvjp(refuses, lambda residuals, g: (g,))
        fn = jamp.cast_fn(lambda x: refusing(x) @ EYE, "O1:bfloat16")
        assert jnp.array_equal(jax.jit(fn)(jnp.zeros((2, SIZE))), jnp.ones((2, SIZE)))
        with pytest.raises(NotImplementedError, match="No gradient"):
            jax.grad(lambda x: fn(x).sum())(jnp.zeros((2, SIZE)))

    @both_halves
    def test_cotangents_of_the_result_and_of_its_half_copy_add_up_in_float32(self, half):
        """A quarter of an ulp of half from each of two readers of the float32, and one from a product."""

        @jax.custom_vjp
        def twice(x):
            return jnp.exp2(x)

        twice.defvjp(lambda x: (jnp.exp2(x),) * 2, lambda y, g: (g,))
        small = float(jnp.finfo(half).eps) / 4

        def fn(x):
            y = twice(x)
            return (y @ EYE).sum() + small * y.sum() + small * y.sum()

        x = jnp.zeros((2, SIZE))
        assert jnp.array_equal(jax.grad(o2(fn, half))(x), jnp.full_like(x, 1 + 2 * small))
