"""Any callable, any arguments, any results: what the transform does not understand it hands on as it is."""

import dataclasses
import functools
import gc
import inspect
import pickle
import re
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.transforms.harness import assert_close, o2, product_dtypes, trace

W = jax.random.normal(jax.random.key(0), (4, 4)) / 2
X = jax.random.normal(jax.random.key(1), (2, 4))


class Pair(NamedTuple):
    first: object
    second: object


class Dense:
    def __init__(self, w):
        self.w = w

    @jamp.cast_fn(policy="O2:bfloat16")
    def apply(self, x):
        """Applies the layer."""
        return x @ self.w

    def plain(self, x):
        return x @ self.w

    def __call__(self, x):
        return x @ self.w


def in_half(fn, *args, **kwargs):
    """Whether all products of a call run in bfloat16; at least one does."""
    dtypes = product_dtypes(trace(lambda: fn(*args, **kwargs)))
    return bool(dtypes) and all(set(of_one) == {"bfloat16"} for of_one in dtypes)


class TestCallables:
    def test_a_function(self):
        assert in_half(o2(lambda w, x: x @ w), W, X)

    def test_a_bound_method(self):
        assert in_half(o2(Dense(W).plain), X)

    def test_a_decorated_method(self):
        layer = Dense(W)
        assert in_half(layer.apply, X)
        assert Dense.apply.__doc__ == "Applies the layer."
        assert_close(layer.apply(X), X @ W)

    def test_a_decorated_method_called_on_the_class(self):
        assert in_half(Dense.apply, Dense(W), X)

    def test_a_class_method_and_a_static_method(self):
        class Model:
            scale = 2.0

            @classmethod
            @jamp.cast_fn(policy="O2:bfloat16")
            def of_class(cls, w, x):
                return x @ w * cls.scale

            @staticmethod
            @jamp.cast_fn(policy="O2:bfloat16")
            def static(w, x):
                return x @ w

        assert in_half(Model.of_class, W, X)
        assert in_half(Model.static, W, X)

    def test_a_callable_object(self):
        assert in_half(o2(Dense(W)), X)

    def test_a_partial(self):
        assert in_half(o2(functools.partial(jnp.dot, X)), W)
        assert in_half(o2(functools.partial(lambda x, *, w: x @ w, w=W)), X)

    def test_a_jax_partial(self):
        assert in_half(o2(jax.tree_util.Partial(jnp.dot, X)), W)

    def test_a_jitted_function(self):
        assert in_half(o2(jax.jit(lambda w, x: x @ w)), W, X)

    def test_a_jitted_function_with_static_arguments(self):
        fn = jax.jit(lambda w, x, twice: (x @ w) @ w if twice else x @ w, static_argnames="twice")
        assert in_half(o2(fn), W, X, twice=True)

    def test_a_builtin(self):
        assert o2(max)(3, 4) == 4

    @pytest.mark.parametrize("decorate", [jamp.cast_fn, jamp.autocast], ids=lambda f: f.__name__)
    def test_decorator_forms(self, decorate):
        @decorate
        def bare(w, x):
            return x @ w

        @decorate(policy="O2:bfloat16")
        def called(w, x):
            return x @ w

        @decorate()
        def empty(w, x):
            return x @ w

        for fn in (bare, called, empty, decorate(lambda w, x: x @ w, "O2:bfloat16")):
            assert in_half(fn, W, X)

    def test_name_documentation_and_signature_are_kept(self):
        def model(w, x, *, train: bool = False):
            """Runs the model."""

        cast = o2(model)
        assert (cast.__name__, cast.__doc__, cast.__wrapped__) == ("model", "Runs the model.", model)
        assert inspect.signature(cast) == inspect.signature(model)

    def test_the_policy_is_checked_when_the_function_is_made(self):
        with pytest.raises(ValueError, match="O4"):
            jamp.cast_fn(lambda x: x, "O4")
        with pytest.raises(ValueError, match="nonsense"):
            jamp.autocast(policy="nonsense")

    @pytest.mark.parametrize("wrong", ["O2", 3, {"w": W}])
    def test_what_is_not_callable_is_refused_with_the_code_to_write(self, wrong):
        with pytest.raises(TypeError, match=r"(?s)takes a function first.*jamp\.cast_fn\(fn, policy="):
            jamp.cast_fn(wrong)


class TestArguments:
    def test_trees_of_every_kind(self):
        def fn(tree, pair):
            return tree["w"][0] @ pair.first + tree["b"][1]

        assert in_half(o2(fn), {"w": [W], "b": (None, W[0])}, Pair(W, None))

    def test_keyword_arguments(self):
        assert in_half(o2(lambda *, w, x: x @ w), w=W, x=X)

    def test_static_arguments_steer_python(self):
        def fn(w, x, train, mode, sizes, activation, nothing):
            assert nothing is None
            out = activation(x @ w) if train and mode == "relu" else x
            return out.reshape(sizes)

        assert in_half(o2(fn), W, X, True, "relu", [4, 2], jax.nn.relu, None)

    def test_python_numbers_stay_static_and_weak(self):
        def fn(w, x, axis, scale):
            return jnp.sum(x @ w * scale, axis)

        assert in_half(o2(fn), W, X, 1, 0.5)

    def test_numpy_integers_stay_concrete(self):
        def fn(w, x, index, size):
            assert isinstance(index, np.ndarray)
            return (x @ w)[index].reshape(size, -1)

        assert in_half(o2(fn), W, X, np.array([0, 1]), np.int64(2))

    def test_numpy_arrays_are_arguments_like_jax_arrays(self):
        assert in_half(o2(lambda w, x: x @ w), np.asarray(W), np.asarray(X))

    def test_a_model_that_returns_without_arrays(self):
        assert o2(lambda: "done")() == "done"
        assert o2(lambda: None)() is None

    def test_default_arguments(self):
        assert in_half(o2(lambda w, x=X, n=2: x @ w * n), W)

    def test_errors_of_the_function_are_its_own(self):
        def fn(x):
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            o2(fn)(X)

    def test_an_argument_is_not_changed(self):
        tree = {"w": W}

        def fn(tree, x):
            tree["w"] = tree["w"] * 2
            return x @ tree["w"]

        o2(fn)(tree, X)
        assert tree["w"] is W

    def test_half_arguments_run_in_half(self):
        cast = o2(lambda w, x: x @ w)
        assert in_half(cast, W.astype(jnp.bfloat16), X)
        assert cast(W.astype(jnp.bfloat16), X).dtype == jnp.float32

    def test_abstract_arguments(self):
        shape = jax.eval_shape(o2(lambda w, x: {"y": x @ w, "name": jnp.argmax(x)}), W, X)
        assert shape["y"].dtype == jnp.float32

    def test_donated_arguments(self):
        step = jax.jit(o2(lambda w, x: w - 0.1 * x.T @ (x @ w)), donate_argnums=0)
        w = jnp.array(W)
        step(w, X)
        assert w.is_deleted()


@dataclasses.dataclass
class Out:
    logits: object
    name: str = "out"


@dataclasses.dataclass(slots=True)
class Slotted:
    logits: object


class Plain:
    def __init__(self, logits):
        self.of_heads = {"first": [logits]}


class TestResults:
    @pytest.mark.parametrize(
        ("make", "write"),
        [
            (Out, "jax.tree_util.register_dataclass(Out)"),
            (Slotted, "jax.tree_util.register_dataclass(Slotted)"),
            (Plain, "jax.tree_util.register_pytree_node"),
            (lambda x: {"heads": (Out(Plain(x)), "name")}, "jax.tree_util.register_dataclass(Out)"),
        ],
    )
    @pytest.mark.parametrize("level", ["OD", "O1", "O2", "O3"])
    def test_results_that_are_no_pytrees_are_refused(self, make, write, level):
        for fn in (lambda x: make(x), lambda x: make(x * 2)):
            with pytest.raises(TypeError, match=re.escape(write)):
                jamp.cast_fn(fn, f"{level}:bfloat16")(X)

    @pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")  # Of JAX.
    def test_generators_are_refused(self):
        with pytest.raises(TypeError, match="Return a list"):
            o2(lambda x: (x + i for i in range(2)))(X)

    def test_results_that_are_no_pytrees_and_hold_nothing_of_the_call(self):
        given, numbers = Out(X), Out(np.ones(2))
        assert o2(lambda x, out: out)(X, given) is given
        assert o2(lambda x: numbers)(X) is numbers
        closed = o2(lambda x: lambda: x)(X)  # A function is no data.
        assert callable(closed)

        @jax.jit
        def around(x):
            given = Out(x)  # Of the trace around the call.
            assert o2(lambda y: given)(x) is given
            assert o2(lambda y, out: (y @ y.T, out))(x, given)[1] is given
            return x

        around(X)

    def test_results_that_are_not_arrays_come_back_as_they_are(self):
        def marker(x):
            return x

        out = o2(lambda w, x: {"y": x @ w, "name": "model", "n": 3, "fn": marker, "none": None, "flag": True})(W, X)
        assert (out["name"], out["n"], out["fn"], out["none"], out["flag"]) == ("model", 3, marker, None, True)
        assert out["y"].dtype == jnp.float32

    def test_trees_keep_their_structure(self):
        out = o2(lambda w, x: Pair((x @ w, [x]), {"a": jnp.int32(1)}))(W, X)
        assert jax.tree.structure(out) == jax.tree.structure(Pair((0, [0]), {"a": 0}))

    def test_numpy_results(self):
        table = np.arange(3.0, dtype=np.float32)
        np.testing.assert_array_equal(o2(lambda x: (x, table))(X)[1], table)

    def test_the_same_array_twice(self):
        out = o2(lambda x: (x, x, 2 * x))(X)
        np.testing.assert_array_equal(out[0], out[1])

    def test_a_constant_result(self):
        assert_close(o2(lambda x: (jnp.zeros(3), 1.0, jnp.float32(2)))(X), (jnp.zeros(3), 1.0, jnp.float32(2)), 0)

    def test_results_have_no_weak_type(self):
        out = jax.eval_shape(o2(lambda x: (x * 2.0, jnp.sum(x), x @ x.T)), X)
        assert not any(leaf.weak_type for leaf in jax.tree.leaves(out))

    def test_keys_and_integers(self):
        key, n = o2(lambda key, n: (jax.random.split(key)[0], n + 1))(jax.random.key(0), jnp.int8(3))
        assert (n, n.dtype) == (4, jnp.int8)
        assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


class TestTraces:
    def test_a_train_step_compiles_once(self):
        traces = []

        def loss(w, x):
            traces.append(None)
            return jnp.sum(o2(lambda w, x: jnp.tanh(x @ w))(w, x) ** 2)

        @jax.jit
        def step(w, x):
            return w - 0.1 * jax.grad(loss)(w, x)

        w = W
        for _ in range(3):
            w = step(w, X)
        assert len(traces) == 1

    @pytest.mark.parametrize("own", [lambda fn: fn, lambda fn: functools.partial(fn, W)], ids=["function", "partial"])
    def test_a_function_that_is_cast_anew_compiles_once(self, own):
        traces = []

        def layer(w, x=X):
            traces.append(None)
            return jnp.tanh(x @ w)

        fn = own(layer)
        for _ in range(3):
            jax.jit(jamp.cast_fn(fn, "O2:bfloat16"))(W)
            gc.collect()
        assert len(traces) == 1
        jax.jit(jamp.cast_fn(fn, "O1:bfloat16"))(W)
        assert len(traces) == 2

    @pytest.mark.parametrize(
        ("spelled", "also"),
        [
            ("O2:bf16", "O2:bfloat16"),
            ("mixed_float16", "O2:float16"),
            ("O2:fp16,reduce=float32,attention=fused", "O2:float16,attention=fused,reduce=float32"),
        ],
    )
    def test_a_policy_makes_one_function_however_it_is_spelled(self, spelled, also):
        def layer(x):
            return x @ W

        made = [jamp.cast_fn(layer, policy) for policy in (spelled, also, jamp.get_policy(also))]
        assert made[0] is made[1] is made[2]
        methods = [jamp.cast_fn(layer.__call__, policy) for policy in (spelled, also)]
        assert methods[0] == methods[1] and hash(methods[0]) == hash(methods[1])

    def test_a_policy_that_names_no_half_dtype_takes_that_of_the_device_at_each_call(self):
        def layer(x):
            return x @ W

        assert jamp.cast_fn(layer, "O2") is not jamp.cast_fn(layer, f"O2:{jamp.half_dtype()}")
        assert "policy='O2'" in repr(jamp.cast_fn(layer, "O2"))

    def test_what_wraps_a_function_is_cast_itself(self):
        def layer(x):
            return x @ W

        @functools.wraps(layer)
        def twice(x):
            return 2 * layer(x)

        assert jamp.cast_fn(layer, "O2:bfloat16")(X).shape == (2, 4)
        wrapped = functools.wraps(layer)(twice)  # With what `layer` has by now.
        assert jamp.cast_fn(wrapped, "O2:bfloat16").__wrapped__ is twice

    def test_a_function_that_was_cast_is_not_kept_alive(self):
        def layer(x):
            return x @ W

        jamp.cast_fn(layer, "O2:bfloat16")(X)
        gone = weakref.ref(layer)
        del layer
        gc.collect()
        assert gone() is None

    def test_the_transform_of_the_transform_keeps_the_inner_policy(self):
        inner = jamp.cast_fn(lambda w, x: x @ w, "O2:float16")
        dtypes = product_dtypes(trace(o2(lambda w, x: inner(w, x) @ w), W, X))
        assert dtypes == [["float16"] * 2, ["bfloat16"] * 2]


def test_a_cast_function_is_pickled_whatever_its_annotations():
    cast = pickle.loads(pickle.dumps(jamp.cast_fn(annotated, "O2:float16")))
    assert str(cast.policy) == "O2:float16" and cast(jnp.ones((2, 2))).dtype == jnp.float32


def annotated(x: jax.Array) -> jax.Array:
    return x @ x


def test_numpy_scalars_are_settings_and_numpy_constants_come_back_as_arrays():
    cast = jamp.cast_fn(lambda x, rate: (x if rate == 0 else x @ x, np.arange(3.0)), "O2:bfloat16")
    out, constant = cast(jnp.ones((2, 2)), np.float64(0.1))
    assert (out == 2).all() and isinstance(constant, jax.Array) and constant.tolist() == [0, 1, 2]


def test_an_array_for_a_function_does_not_fill_the_screen():
    for wrong in (jamp.cast_fn, jamp.full_precision, jamp.report):
        with pytest.raises(TypeError) as info:
            wrong(jnp.ones((100, 100)))
        assert len(str(info.value)) < 300
