"""Models of each library, unmodified: all products in half, state and random streams as the library keeps them."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.transforms.harness import (
    LEVELS,
    casts_to,
    check_gradient,
    find,
    o2,
    operand_dtypes,
    product_dtypes,
    run,
    trace,
)

X = jax.random.normal(jax.random.key(1), (4, 8))
TOKENS = jnp.array([[0, 1, 1, 3]])
EXACT = jnp.full(8, 1 + 2**-14)  # Neither half dtype holds this.


def assert_in_half(jaxpr, half="bfloat16"):
    dtypes = product_dtypes(jaxpr)
    assert dtypes
    assert {tuple(of_one) for of_one in dtypes} == {(half, half)}


def mean_loss(apply):
    return lambda *args: jnp.mean(jax.tree.leaves(apply(*args))[0] ** 2)


class TestFlaxLinen:
    nn = property(lambda self: pytest.importorskip("flax.linen"))

    def block(self):
        nn = self.nn

        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, train: bool = True):
                x = x + nn.Dense(8)(nn.relu(nn.Dense(8)(nn.LayerNorm()(x))))
                x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
                return nn.Dropout(0.5, deterministic=not train)(x)

            @nn.nowrap
            def name_of(self):
                return "block"

            def encode(self, x):
                return x * 2

        return Block()

    def variables(self, model):
        return model.init(jax.random.key(0), X, train=False)

    @pytest.mark.parametrize("level", LEVELS)
    def test_apply_with_mutable_state_and_rngs(self, level):
        model = self.block()
        variables = self.variables(model)
        rngs = {"dropout": jax.random.key(2)}
        policy = f"{level}:bfloat16"
        cast = lambda v, x: jamp.cast_fn(model.apply, policy)(v, x, rngs=rngs, mutable=["batch_stats"])  # noqa: E731
        plain = lambda v, x: model.apply(v, x, rngs=rngs, mutable=["batch_stats"])  # noqa: E731
        assert_in_half(trace(cast, variables, X))
        (y, new), (y_ref, new_ref) = jax.eval_shape(cast, variables, X), jax.eval_shape(plain, variables, X)
        assert jax.tree.structure((y, new)) == jax.tree.structure((y_ref, new_ref))
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((y, new)))

    def test_dropout_drops_what_it_drops_in_float32(self):
        model = self.block()
        variables = self.variables(model)
        args = dict(rngs={"dropout": jax.random.key(2)}, mutable=["batch_stats"])
        y = run(lambda v, x: o2(model.apply)(v, x, **args)[0], variables, X)
        np.testing.assert_array_equal(y == 0, run(lambda v, x: model.apply(v, x, **args)[0], variables, X) == 0)

    def test_running_statistics_are_not_rounded(self):
        model = self.block()
        variables = self.variables(model)
        old = jax.tree.map(lambda leaf: jnp.full_like(leaf, EXACT[0]), variables["batch_stats"])
        variables = {"params": variables["params"], "batch_stats": old}
        rngs = {"dropout": jax.random.key(2)}
        _, new = run(
            lambda v, x: o2(model.apply)(v, x, rngs=rngs, mutable=["batch_stats"]), variables, jnp.zeros((4, 8))
        )
        mean = new["batch_stats"]["BatchNorm_0"]["mean"]
        np.testing.assert_array_equal(mean, 0.5 * EXACT)

    def test_a_method_by_name_and_by_function(self):
        model = self.block()
        variables = self.variables(model)
        for method in ("encode", type(model).encode):
            assert o2(model.apply)(variables, X, method=method).dtype == jnp.float32

    def test_init_gives_the_weights_of_float32(self):
        model = self.block()
        cast = run(lambda key: o2(model.init)(key, X, train=False), jax.random.key(0))
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(cast))

    def test_gradients(self):
        model = self.block()
        variables = self.variables(model)
        cast = mean_loss(lambda v: o2(model.apply)(v, X, train=False))
        jaxpr = trace(jax.grad(cast), variables)
        assert_in_half(jaxpr)

    def test_weights_are_cast_once(self):
        model = self.block()
        jaxpr = trace(lambda v: o2(model.apply)(v, X, train=False), self.variables(model))
        kernels = [eqn for eqn in casts_to(jaxpr, jnp.bfloat16) if eqn.invars[0].aval.shape == (8, 8)]
        assert len(kernels) == 2

    def test_embedding_attention_scan_and_remat(self):
        nn = self.nn

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
                return x, None

        class Model(nn.Module):
            @nn.compact
            def __call__(self, tokens):
                embed = nn.Embed(4, 8)
                layers = nn.scan(
                    nn.remat(Layer, prevent_cse=False),
                    variable_axes={"params": 0},
                    split_rngs={"params": True},
                    length=2,
                )
                x, _ = layers()(embed(tokens), None)
                return embed.attend(x)

        model = Model()
        variables = model.init(jax.random.key(0), TOKENS)
        gradient = jax.grad(mean_loss(lambda v: o2(model.apply)(v, TOKENS)))
        jaxpr = trace(gradient, variables)
        assert_in_half(jaxpr)
        assert {tuple(operand_dtypes(eqn)) for eqn in find(jaxpr, "scatter-add")} == {("float32", "float32")}

    def test_a_recurrent_network(self):
        nn = self.nn
        model = nn.RNN(nn.OptimizedLSTMCell(8))
        x = X[None]
        variables = model.init(jax.random.key(0), x)
        assert_in_half(trace(jax.grad(mean_loss(lambda v: o2(model.apply)(v, x))), variables))

    def test_a_decorated_call_method(self):
        nn = self.nn

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                return nn.Dense(8)(x)

        model = Model()
        variables = model.init(jax.random.key(0), X)
        assert_in_half(trace(o2(lambda v, x: model.apply(v, x)), variables, X))

    def test_lifted_vmap_and_sow(self):
        nn = self.nn

        class Model(nn.Module):
            @nn.compact
            def __call__(self, x):
                heads = nn.vmap(
                    nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None, axis_size=2
                )
                y = heads(8)(x)
                self.sow("intermediates", "y", y)
                return y

        model = Model()
        variables = {"params": model.init(jax.random.key(0), X)["params"]}
        jaxpr, (y, sown) = jax.make_jaxpr(
            lambda v, x: o2(model.apply)(v, x, mutable=["intermediates"]), return_shape=True
        )(variables, X)
        assert_in_half(jaxpr)
        assert y.dtype == sown["intermediates"]["y"][0].dtype == jnp.float32


class TestHaiku:
    def model(self):
        hk = pytest.importorskip("haiku")

        def forward(x, train):
            x = hk.Linear(8)(jax.nn.relu(hk.Linear(8)(x)))
            x = hk.BatchNorm(True, True, 0.5)(x, train)
            x = hk.dropout(hk.next_rng_key(), 0.5, x) if train else x
            return hk.Linear(8)(hk.LayerNorm(-1, True, True)(x))

        return hk.transform_with_state(forward)

    def test_transform_with_state(self):
        model = self.model()
        params, state = model.init(jax.random.key(0), X, True)
        cast = lambda p, s: o2(model.apply)(p, s, jax.random.key(1), X, True)  # noqa: E731
        assert_in_half(trace(cast, params, state))
        out, reference = (
            jax.eval_shape(cast, params, state),
            jax.eval_shape(lambda: model.apply(params, state, jax.random.key(1), X, True)),
        )
        assert jax.tree.map(lambda a: (a.shape, a.dtype), out) == jax.tree.map(lambda a: (a.shape, a.dtype), reference)

    def test_gradients(self):
        model = self.model()
        params, state = model.init(jax.random.key(0), X, True)
        gradient = jax.grad(lambda p: jnp.mean(o2(model.apply)(p, state, jax.random.key(1), X, True)[0] ** 2))
        assert_in_half(trace(gradient, params))

    def test_inside_a_transform(self):
        hk = pytest.importorskip("haiku")
        model = hk.transform(lambda x: hk.Linear(8)(x))
        params = model.init(jax.random.key(0), X)
        assert_in_half(trace(o2(model.apply), params, None, X))


class TestEquinox:
    eqx = property(lambda self: pytest.importorskip("equinox"))

    def test_a_module_is_an_argument_and_a_callable(self):
        model = self.eqx.nn.MLP(8, 8, 8, 2, key=jax.random.key(0))
        assert_in_half(trace(lambda x: o2(lambda m, x: jax.vmap(m)(x))(model, x), X))
        assert_in_half(trace(lambda x: jax.vmap(o2(model))(x), X))

    def test_filtered_gradients(self):
        eqx = self.eqx
        model = eqx.nn.MLP(8, 8, 8, 2, key=jax.random.key(0))
        loss = lambda m, x: jnp.mean(o2(lambda m, x: jax.vmap(m)(x))(m, x) ** 2)  # noqa: E731
        grads = eqx.filter_eval_shape(eqx.filter_grad(loss), model, X)
        expected = eqx.filter_eval_shape(eqx.filter_grad(lambda m, x: jnp.mean(jax.vmap(m)(x) ** 2)), model, X)
        assert jax.tree.map(lambda a: a.dtype, grads) == jax.tree.map(lambda a: a.dtype, expected)
        params, static = eqx.partition(model, eqx.is_inexact_array)
        assert_in_half(trace(jax.grad(lambda p: loss(eqx.combine(p, static), X)), params))

    def test_stateful_batch_norm(self):
        eqx = self.eqx
        model, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(8, "batch", mode="batch")
        w = jnp.eye(8)

        def fn(model, state, x):
            return jax.vmap(lambda x, s: model(x @ w, s), axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
                x, state
            )

        y, new_state = o2(fn)(model, state, X)
        y_ref, new_ref = fn(model, state, X)
        np.testing.assert_allclose(y, y_ref, atol=0.05)
        for a, b in zip(jax.tree.leaves(new_state), jax.tree.leaves(new_ref), strict=True):
            assert a.dtype == b.dtype

    def test_dropout_with_a_key(self):
        eqx = self.eqx
        fn = lambda m, x, k: m(x @ jnp.eye(8), key=k)  # noqa: E731
        y = o2(fn)(eqx.nn.Dropout(0.5), X, jax.random.key(0))
        np.testing.assert_array_equal(y == 0, fn(eqx.nn.Dropout(0.5), X, jax.random.key(0)) == 0)

    def test_a_checkpointed_while_loop_differentiates(self):
        internal = pytest.importorskip("equinox.internal")
        w = jax.random.normal(jax.random.key(0), (8, 8)) / 4

        def fn(w, x):
            def step(s):
                return s[0] + 1, s[1] + 0.1 * jnp.tanh(s[1] @ w)

            return internal.while_loop(lambda s: s[0] < 3, step, (0, x), max_steps=4, kind="checkpointed")[1]

        check_compiled_gradient(fn, w)

    @pytest.mark.parametrize("level", ["O1", "O2"])
    @pytest.mark.parametrize("kind", ["lax", "checkpointed", "bounded"])
    def test_its_loops_add_up_in_float32(self, kind, level):
        """They choose what they carry by a primitive of their own."""
        internal = pytest.importorskip("equinox.internal")
        # No term reaches half of bfloat16's spacing at one.
        w = jnp.eye(8) / 2**11

        def fn(w, x):
            def step(s):
                return s[0] + 1, s[1] + s[1] @ w

            return internal.while_loop(lambda s: s[0] < 64, step, (0, x), max_steps=64, kind=kind)[1]

        x = jnp.ones((4, 8))
        result = jax.jit(jamp.cast_fn(fn, f"{level}:bfloat16"))(w, x)
        np.testing.assert_allclose(result, fn(w, x), rtol=1e-3)


def check_compiled_gradient(fn, w):
    gradients = [jax.jit(jax.grad(lambda w, f=f: jnp.sum(f(w, X) ** 2)))(w) for f in (o2(fn), fn)]
    np.testing.assert_allclose(*gradients, atol=0.05 * float(jnp.abs(gradients[1]).max()))


def test_keras_stateless_call():
    os.environ["KERAS_BACKEND"] = "jax"
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(2)])
    model.build((4, 8))
    variables = [[v.value for v in group] for group in (model.trainable_variables, model.non_trainable_variables)]
    cast = lambda t, n, x: o2(model.stateless_call)(t, n, x, training=True)  # noqa: E731
    assert_in_half(trace(cast, *variables, X))
    y, state = jax.eval_shape(cast, *variables, X)
    assert y.dtype == jnp.float32
    assert [(v.shape, v.dtype) for v in state] == [(v.shape, v.dtype) for v in variables[1]]
    assert_in_half(trace(jax.grad(lambda t: jnp.mean(cast(t, variables[1], X)[0] ** 2)), variables[0]))


def test_keras_models_that_update_variables_are_refused():
    os.environ["KERAS_BACKEND"] = "jax"
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    before = np.asarray(model.layers[1].moving_mean.value)
    for fn in (model, model.call, lambda x, training: model(x, training=training)):
        with pytest.raises(TypeError, match=r"(?s)moving_mean.*jamp\.cast_fn\(model\.stateless_call, policy\)"):
            o2(fn)(X, training=True)
        np.testing.assert_array_equal(model.layers[1].moving_mean.value, before)
    assert o2(model)(X).dtype == jnp.float32  # Nothing is updated.


def test_keras_models_that_update_variables_in_fit_are_refused():
    os.environ["KERAS_BACKEND"] = "jax"
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    model.call = o2(model.call)
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match=r"(?s)moving_mean.*jamp\.cast_fn\(model\.stateless_call, policy\)"):
        model.fit(np.asarray(X), np.ones((4, 4), np.float32), verbose=0)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_methods_of_keras_models_that_are_whole_programs_are_refused(method):
    os.environ["KERAS_BACKEND"] = "jax"
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    with pytest.raises(TypeError, match=rf"(?s)`{method}` of a Keras model.*jamp\.cast_fn\(model\.stateless_call"):
        o2(getattr(model, method))
    o2(model.call), o2(model.stateless_call)


def test_optax_losses_run_in_float32_and_differentiate():
    optax = pytest.importorskip("optax")
    labels = jnp.array([0, 3, 1, 2])

    def fn(w, x):
        return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels)

    check_gradient(fn, jnp.eye(8), X)


def test_an_ode_solver_of_jax():
    from jax.experimental.ode import odeint

    w = jax.random.normal(jax.random.key(0), (8, 8)) / 4

    def fn(w, x):
        return odeint(lambda y, t: jnp.tanh(y @ w) * 0.1, x[0], jnp.array([0.0, 0.5, 1.0]))

    check_compiled_gradient(fn, w)
