"""Steps that are emitted again are found in JAX's cache, and no others are taken for them."""

import gc
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from jamp._compat import code_location, inner_jaxprs, open_jaxpr
from jamp.transforms.emission import custom_rules

X, W = jnp.full((8, 16), 0.5), jnp.full((16, 16), 0.25)


def layer(
    w: Any,
    x: Any,
    scale: Any = 2.0,
    axis: int = 0,
    swapped: bool = False,
    scope: str = "layer",
    function: Callable[..., Any] = jnp.sin,
    moved: int = 0,
    constant: Any = 0.0,
) -> Any:
    """A layer of which each argument changes one thing alone."""
    with jax.named_scope(scope):
        y = function(x @ w * scale) + constant
        y = y + jnp.roll(y, moved, axis=1)
        a, b = jnp.exp(y), jnp.cos(y)
        return jnp.mean((b - a if swapped else a - b) @ w, axis=axis).sum()


def checkpoints(jaxpr: Any) -> Iterator[Any]:
    """The checkpoints in a jaxpr."""
    for eqn in open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name in ("checkpoint", "remat2"):
            yield eqn
        else:
            for inner in inner_jaxprs(eqn):
                yield from checkpoints(inner)


def emitted(function: Callable[..., Any], policy: str = "O2:bfloat16", x: Any = X) -> Any:
    """The jaxpr of a function that nobody has seen before."""
    return jax.make_jaxpr(lambda w, x: jamp.cast_fn(lambda *args: function(*args), policy)(w, x))(W, x)


def printed(function: Callable[..., Any], policy: str = "O2:bfloat16") -> str:
    jaxpr = emitted(lambda *args: jax.grad(jamp.cast_fn(function, policy))(*args), policy)
    return open_jaxpr(jaxpr).pretty_print(name_stack=True)


def test_the_same_steps_are_emitted_once() -> None:
    (first,), (again,) = (list(checkpoints(emitted(layer))) for _ in range(2))
    assert first.params["jaxpr"] is again.params["jaxpr"]


def test_the_cache_is_that_of_jax() -> None:
    (first,) = checkpoints(emitted(layer))
    jax.clear_caches()
    (again,) = checkpoints(emitted(layer))
    assert first.params["jaxpr"] is not again.params["jaxpr"]


def test_the_body_of_a_loop_is_emitted_once() -> None:
    def scanned(w: Any, x: Any) -> Any:
        return lax.scan(lambda x, _: (jnp.cos(jnp.sin(x @ w)), None), x, length=3)[0].sum()

    found = [[eqn.params["jaxpr"] for eqn in checkpoints(emitted(scanned))] for _ in range(2)]
    assert found[0]
    assert [id(jaxpr) for jaxpr in found[0]] == [id(jaxpr) for jaxpr in found[1]]


@jax.custom_jvp
def doubled(x: Any) -> Any:
    return x * 2.0


@doubled.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[0] * 2.0, tangents[0] * SLOPE


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def powered(x: Any, power: Any) -> Any:
    return x * 2.0


@powered.defjvp
def _(power: Any, primals: Any, tangents: Any) -> Any:
    return primals[0] * 2.0, tangents[0] * power


SLOPE: Any = 2.0

RULES: dict[str, Callable[..., Any]] = {
    "relu": jax.nn.relu,
    "softmax": jax.nn.softmax,
    "softplus": jax.nn.softplus,
    "jitted": jax.jit(jax.nn.relu),
    "own": doubled,
    "with a number": lambda x: powered(x, 3),
    "mapped": jax.vmap(jax.nn.relu),
    "mapped, jitted": jax.vmap(jax.jit(lambda x: jax.nn.softplus(x) + jax.nn.relu(x))),
    "mapped twice": jax.vmap(jax.vmap(doubled, axis_name="columns"), in_axes=1, out_axes=1),
    "mapped, with a number": jax.vmap(lambda x: powered(x, 3)),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rules_are_emitted_once(rule: Callable[..., Any]) -> None:
    first, again = ([*checkpoints(emitted(lambda w, x: rule(jnp.sin(x @ w)).sum()))] for _ in range(2))
    assert [id(eqn.params["jaxpr"]) for eqn in first] == [id(eqn.params["jaxpr"]) for eqn in again]


def names(*names: str) -> Any:
    return jax.checkpoint_policies.save_only_these_names(*names)


def remat(body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return lambda w, x, scale: jax.checkpoint(lambda w, x: body(w, x, scale), **options)(w, x)


def sines(w: Any, x: Any, scale: float) -> Any:
    return jnp.cos(jnp.sin(x @ w * scale) @ w)


def chosen(w: Any, x: Any, scale: float) -> Any:
    return jnp.sin(lax.cond(x[0, 0] > 0, lambda x: jnp.sin(x @ w) * scale, jnp.cos, x)) @ w


def repeated(w: Any, x: Any, scale: float) -> Any:
    return jnp.sin(lax.fori_loop(0, x[0, 0].astype(int), lambda _, x: jnp.sin(x @ w) * scale, x)) @ w


def scanned(w: Any, x: Any, scale: float) -> Any:
    return lax.scan(lambda x, _: (jnp.cos(jnp.sin(x @ w) * scale), None), x, length=3)[0]


def rectified(w: Any, x: Any, scale: float) -> Any:
    return jax.nn.relu(sines(w, x, scale)) @ w


jitted = jax.jit(sines, static_argnums=2)


ENCLOSED: dict[str, Callable[..., Any]] = {
    "checkpoint": remat(sines),
    "checkpoint of a rule": remat(rectified),
    "checkpoint of a loop": remat(scanned),
    "checkpoint of a checkpoint": remat(remat(sines)),
    "checkpoint of a call": remat(jitted),
    "call made anew": lambda w, x, scale: jax.jit(lambda x: sines(w, x, scale))(x),
    "checkpoint of a call made anew": remat(lambda w, x, scale: jax.jit(lambda x: rectified(w, x, scale))(x)),
    "checkpoint without barrier": remat(sines, prevent_cse=False),
    "policy": remat(sines, policy=jax.checkpoint_policies.dots_saveable),
    "another policy": remat(sines, policy=jax.checkpoint_policies.everything_saveable),
    "names": lambda *args: remat(sines, policy=names("a"))(*args),
    "other names": lambda *args: remat(sines, policy=names("b"))(*args),
    "branch": chosen,
    "branch in a checkpoint": remat(chosen),
}


@pytest.mark.parametrize("enclosed", [*ENCLOSED.values(), repeated], ids=[*ENCLOSED, "loop"])
def test_what_encloses_others_is_emitted_once(enclosed: Callable[..., Any]) -> None:
    def function(scale: float) -> Callable[..., Any]:
        return lambda w, x: enclosed(w, x, scale).sum()

    found = [[id(eqn.params["jaxpr"]) for eqn in checkpoints(emitted(function(scale)))] for scale in (2.0, 3.0, 2.0)]
    assert found[0]
    assert found[0] == found[2] != found[1]


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("enclosed", ENCLOSED.values(), ids=ENCLOSED)
def test_checkpoints_that_differ_are_emitted_apart(enclosed: Callable[..., Any]) -> None:
    def function(w: Any, x: Any) -> Any:
        return enclosed(w, x, 2.0).sum()

    jax.clear_caches()
    alone = printed(function)
    jax.clear_caches()
    for other in ENCLOSED.values():
        emitted(lambda w, x, other=other: other(w, x, 2.0).sum())
    assert printed(function) == alone


def test_values_that_a_policy_reads_may_change() -> None:
    saved: list[str] = []

    def policy(primitive: Any, *_: Any, **__: Any) -> bool:
        return primitive.name in saved

    def residuals(name: str) -> str:
        saved[:] = [name]
        return printed(lambda w, x: remat(sines, policy=policy)(w, x, 2.0).sum())

    assert residuals("sin") != residuals("dot_general")
    assert residuals("sin") == residuals("sin")


def slope_of(function: Callable[..., Any]) -> float:
    """What the rule of a function of products multiplies a tangent with, in a trace of its own."""
    cast = jamp.cast_fn(lambda w, x: jnp.sum(function(x @ w)), "O2:bfloat16")
    return float(jax.jit(lambda w, x: jax.grad(cast)(w, x))(jnp.eye(4), jnp.eye(4))[0, 0])


def test_what_a_rule_reads_may_change() -> None:
    class Holder:
        slope = 2.0

        def rule(self, primals: Any, tangents: Any) -> Any:
            return primals[0] * 2.0, tangents[0] * self.slope

    def closing(cell: Any) -> tuple[Any, Callable[[Any], None]]:
        @jax.custom_jvp
        def function(x: Any) -> Any:
            return x * 2.0

        def change(value: Any) -> None:
            nonlocal cell
            cell = value

        function.defjvp(lambda primals, tangents: (primals[0] * 2.0, tangents[0] * cell))
        return function, change

    holder = Holder()
    of_holder = jax.custom_jvp(lambda x: x * 2.0)
    of_holder.defjvp(holder.rule)
    of_cell, change = closing(2.0)
    of_array, change_array = closing(jnp.array(2.0))
    for slope in (2.0, 3.0, 2.0):
        holder.slope = slope
        change(slope)
        change_array(jnp.array(slope))
        globals()["SLOPE"] = slope
        made = closing(slope)[0]
        functions = of_holder, of_cell, of_array, doubled, made, lambda x, slope=slope: powered(x, slope)
        for function in functions:
            mapped = jax.vmap(function)
            assert [slope_of(function), slope_of(mapped), slope_of(jax.vmap(mapped))] == [slope] * 3


def with_rule(
    kind: str, slope: Any = 2.0, rule: Callable[..., Any] = jnp.multiply
) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Twice its argument, with another derivative, and what changes that derivative and nothing else."""

    def change(to: Any, by: Callable[..., Any] = jnp.multiply) -> None:
        nonlocal slope, rule
        slope, rule = to, by

    if kind == "custom_jvp":
        forward = jax.custom_jvp(lambda x: x * 2.0)
        forward.defjvp(lambda primals, tangents: (primals[0] * 2.0, rule(tangents[0], slope)))
        return forward, change
    if kind == "residual":
        saving = jax.custom_vjp(lambda x: x * 2.0)
        saving.defvjp(lambda x: (x * 2.0, jnp.full_like(x, slope)), lambda saved, g: (rule(g, saved),))
        return saving, change
    if kind == "argument":
        static = jax.custom_vjp(lambda _, x: x * 2.0, nondiff_argnums=(0,))
        static.defvjp(lambda _, x: (x * 2.0, None), lambda given, _, g: (given[0](g, given[1]),))
        return lambda x: static((rule, slope), x), change
    if kind == "operand":  # The operand that a gradient is given for.
        either = jax.custom_vjp(lambda x, y: x * 2.0)
        either.defvjp(lambda x, y: (x * 2.0, None), lambda _, g: (None, g) if slope == 3.0 else (g, None))
        return lambda x: either(x * 2.0, x * 3.0), change
    reverse = jax.custom_vjp(lambda x: x * 2.0)
    reverse.defvjp(lambda x: (x * 2.0, None), lambda _, g: (rule(g, slope),))
    return reverse, change


CONSTANTS: dict[str, Callable[[float], Any]] = {
    "number": float,
    "array of NumPy's": lambda slope: np.full(4, slope, np.float32),
    "large array of NumPy's": lambda slope: np.full((512, 4, 4), slope, np.float32),
    "array": lambda slope: jnp.full(4, slope),
}


@pytest.mark.parametrize("constant", CONSTANTS.values(), ids=CONSTANTS)
def test_functions_jitted_anew_are_told_apart_by_what_they_close_over(constant: Callable[[float], Any]) -> None:
    def scaled(slope: float) -> Callable[..., Any]:
        value = constant(slope)
        return lambda x: jax.jit(lambda x: x * (value if np.ndim(value) < 3 else jnp.mean(value)))(x)

    for slope in (2.0, 3.0, 2.0):
        assert slope_of(scaled(slope)) == slope_of(jax.vmap(scaled(slope))) == slope


KINDS = ["custom_jvp", "custom_vjp", "argument", "residual", "operand"]
PLACES: dict[str, Callable[..., Any]] = {
    "as it is": lambda function: function,
    "mapped": lambda function: jax.vmap(function),
    "mapped twice": lambda function: jax.vmap(jax.vmap(function), in_axes=1, out_axes=1),
    "mapped, jitted": lambda function: jax.vmap(jax.jit(lambda x: function(x))),
    "in a checkpoint": lambda function: jax.checkpoint(lambda x: jnp.sin(function(x * 2.0)) * 0.0 + function(x)),
    "mapped, in a checkpoint": lambda function: jax.checkpoint(lambda x: jax.vmap(function)(x)),
    "in a mapped checkpoint": lambda function: jax.vmap(jax.checkpoint(lambda x: function(x))),
    "in a mapped loop": lambda function: jax.vmap(
        lambda x: lax.scan(jax.checkpoint(lambda x, _: (function(x) * 0.5, None)), x, length=1)[0] * 2.0
    ),
}


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_rules_that_change_are_emitted_apart(kind: str, place: Callable[..., Any]) -> None:
    function, change = with_rule(kind)
    assert slope_of(place(function)) == 2.0
    change(3.0)
    assert slope_of(place(function)) == 3.0
    if kind != "operand":
        change(2.0, jnp.divide)
        assert slope_of(place(function)) == 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_rules_are_emitted_once_wherever_they_are(kind: str, place: str) -> None:
    function, _ = with_rule(kind)
    found = []
    for _ in range(2):
        placed = PLACES[place](function)
        found.append([*checkpoints(emitted(lambda w, x, placed=placed: jnp.sin(placed(jnp.sin(x @ w))).sum()))])
    first, again = ([id(eqn.params["jaxpr"]) for eqn in eqns] for eqns in found)
    assert first
    assert first == again


@pytest.mark.parametrize("kind", ["custom_jvp", "custom_vjp"])
def test_axes_of_mapped_rules_are_told_apart(kind: str) -> None:
    """The function does the same along rows and columns; its rule does not."""
    function, _ = with_rule(kind, 0.0, lambda g, _: g * lax.iota(g.dtype, 4))

    def gradient(axis: int) -> Any:
        mapped = jax.checkpoint(lambda x: jax.vmap(function, in_axes=axis, out_axes=axis)(x))
        loss = jamp.cast_fn(lambda w, x: jnp.sum(mapped(x @ w)), "O2:bfloat16")
        return jax.jit(lambda w, x: jax.grad(loss, 1)(w, x))(jnp.eye(4), jnp.eye(4))

    columns = np.broadcast_to(np.arange(4.0), (4, 4))
    for axis in (0, 1, 0):
        np.testing.assert_array_equal(gradient(axis), columns.T if axis else columns)


class Node:
    """A container with something besides, which its rule multiplies tangents with."""

    def __init__(self, x: Any, besides: Any) -> None:
        self.x, self.besides = x, besides


jax.tree_util.register_pytree_node(
    Node, lambda node: ((node.x,), node.besides), lambda besides, children: Node(children[0], besides)
)


@jax.custom_jvp
def of_node(node: Any) -> Any:
    return node.x * 2.0


@of_node.defjvp
def _(primals: Any, tangents: Any) -> Any:
    besides = primals[0].besides
    besides = besides[0] if isinstance(besides, list) else besides
    return primals[0].x * 2.0, tangents[0].x * getattr(besides, "numerator", besides)


@pytest.mark.parametrize("kind", [float, lambda x: np.full(4, x), Fraction, lambda x: [Fraction(x)]])
def test_structures_are_told_apart_by_what_they_hold_besides(kind: Callable[[float], Any]) -> None:
    for slope in (2.0, 3.0, 2.0):
        assert slope_of(lambda x, slope=slope: of_node(Node(x, kind(slope)))) == slope


@pytest.mark.parametrize("besides", [2.0, Fraction(2), [Fraction(2)]], ids=["number", "object", "list"])
def test_structures_that_are_equal_are_emitted_once(besides: Any) -> None:
    def function(w: Any, x: Any) -> Any:
        return of_node(Node(jnp.sin(x @ w), besides)).sum()

    first, again = ([id(eqn.params["jaxpr"]) for eqn in checkpoints(emitted(function))] for _ in range(2))
    assert first
    assert first == again


def test_rules_of_one_function_are_told_apart() -> None:
    for slope in (2.0, 3.0):
        doubled.defjvps(lambda tangent, _, x, slope=slope: tangent * slope)
        assert slope_of(doubled) == slope


CHANGES: dict[str, dict[str, Any]] = {
    "a literal": {"scale": 3.0},
    "the type of a literal": {"scale": np.float32(2.0)},
    "the sign of zero": {"constant": -0.0},
    "an axis": {"axis": 1},
    "the order of operands": {"swapped": True},
    "a scope": {"scope": "other"},
    "a primitive": {"function": jnp.tanh},
    "a jitted function": {"function": jax.nn.silu},
    "a rule of a function's own": {"function": jax.nn.relu},
    "another rule": {"function": jax.nn.relu6},
    "a shift": {"moved": 1},
    "a constant": {"constant": np.arange(16, dtype=np.float32)},
    "another constant": {"constant": np.arange(16, dtype=np.float32)[::-1].copy()},
    "an array": {"constant": jnp.arange(16.0)},
    "another array": {"constant": jnp.arange(16.0)[::-1]},
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_steps_that_differ_are_emitted_apart(change: dict[str, Any]) -> None:
    """What is emitted after a like program is what is emitted where no cache knows anything."""
    jax.clear_caches()
    alone = printed(partial(layer, **change))
    jax.clear_caches()
    other = printed(layer)
    assert printed(partial(layer, **change)) == alone
    assert printed(layer) == other


@pytest.mark.parametrize("policy", ["O1:bfloat16", "O2:float16", "O3:bfloat16", "O2:bfloat16,residuals=all"])
def test_policies_are_told_apart(policy: str) -> None:
    jax.clear_caches()
    alone = printed(layer, policy)
    printed(layer)
    assert printed(layer, policy) == alone


def test_lines_are_told_apart() -> None:
    def one(w: Any, x: Any) -> Any:
        return jnp.sin(x @ w).sum()

    def other(w: Any, x: Any) -> Any:
        return jnp.sin(x @ w).sum()

    lines = []
    for function in (one, other):
        (eqn,) = checkpoints(emitted(function))
        lines.append({code_location(inner) for inner in open_jaxpr(eqn.params["jaxpr"]).eqns})
    assert all(lines)
    assert not lines[0] & lines[1]


def test_values_that_are_closed_over_are_not_remembered() -> None:
    for value in (1.0, 2.0, 3.0):
        array = jnp.full((16, 16), value)
        function = jamp.cast_fn(lambda x, array=array: jnp.sum(x @ array * 2.0), "O2:bfloat16")
        np.testing.assert_array_equal(jax.jit(jax.grad(function))(X), np.full(X.shape, 32 * value))


def by_array(x: Any) -> Any:
    """A function whose rule closes over an array."""
    with jax.ensure_compile_time_eval():
        array = jnp.full(x.shape[-1:], 0.125)
    ARRAYS.append(weakref.ref(array))
    function = jax.custom_jvp(lambda x: x * 2.0)
    function.defjvp(lambda primals, tangents: (primals[0] * 2.0, tangents[0] * array))
    return function(x)


ARRAYS: list[weakref.ref[jax.Array]] = []


@pytest.mark.parametrize("function", [jax.nn.silu, jax.nn.relu, by_array], ids=["a product", "a rule", "in a rule"])
def test_no_array_outlives_the_trace_for_it(function: Callable[..., Any]) -> None:
    def traced() -> None:
        array = jnp.full((16, 16), 0.125)
        ARRAYS[:] = [weakref.ref(array)]
        assert list(checkpoints(emitted(lambda w, x: jnp.sum(function(x @ w @ array)))))
        printed(lambda w, x: jnp.sum(function(x @ w @ array)))

    traced()
    gc.collect()
    assert [watched() for watched in ARRAYS] == [None] * len(ARRAYS)


DERIVATIVES: dict[str, Callable[..., Any]] = {
    "forward": jax.jacfwd,
    "second": jax.hessian,
    "of many": lambda f: jax.vmap(jax.grad(f), in_axes=(None, 0)),
    "recomputed": lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_derivatives_of_what_is_found_are_those_of_what_is_emitted(derivative: Callable[..., Any]) -> None:
    def derived() -> str:
        function = jamp.cast_fn(lambda w, x: layer(w, x, axis=-1), "O2:bfloat16")
        return str(jax.make_jaxpr(derivative(function))(W, X[:, None]))

    jax.clear_caches()
    alone = derived()
    assert derived() == alone


def layers_in_a_row(x: Any, rule: Callable[..., Any] = jax.nn.relu, scopes: str = "abc") -> Any:
    """A rule that is called in three layers, on one line."""
    for scope in scopes:
        with jax.named_scope(scope):
            x = rule(jnp.sin(x)) * 2.0
    return x.sum()


def test_a_rule_is_traced_once_for_all_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(eqn: Any, *args: Any) -> Any:
        calls.append(eqn)
        return jvp_of(eqn, *args)

    jvp_of = custom_rules._jvp_of
    monkeypatch.setattr(custom_rules, "_jvp_of", counted)
    jax.make_jaxpr(jax.grad(jamp.cast_fn(layers_in_a_row, "O2:bfloat16")))(X)
    assert len(calls) == 1


def test_rules_that_differ_are_not_taken_for_one_another() -> None:
    def sloped(slope: float) -> Callable[..., Any]:
        rule = jax.custom_jvp(lambda x: x * 2.0)
        rule.defjvp(lambda primals, tangents: (primals[0] * 2.0, tangents[0] * slope))
        return rule

    def layers(x: Any) -> Any:
        return sum(sloped(slope)(x).sum() for slope in (1.0, 4.0, 16.0))

    np.testing.assert_array_equal(jax.grad(jamp.cast_fn(layers, "O2:bfloat16"))(X), jnp.full_like(X, 21.0))


def test_a_rule_that_is_known_is_in_the_scope_of_its_call() -> None:
    found = printed(lambda w, x: layers_in_a_row(x @ w), "O2:bfloat16,residuals=all")
    selects = [line for line in found.splitlines() if " select_n" in line]
    assert len(selects) == 3
    for scope, line in zip("cba", selects, strict=True):
        assert f"/{scope})" in line or f"/{scope}/" in line or f"({scope})" in line, line


def test_checkpoints_that_differ_in_the_scope_inside_are_emitted_once() -> None:
    def function(w: Any, x: Any) -> Any:
        x = x @ w
        for scope in "abc":

            def block(w: Any, x: Any, scope: str = scope) -> Any:  # Flax enters the scopes of modules so.
                with jax.named_scope(scope):
                    return jnp.sin(x @ w) @ w

            x = jax.checkpoint(block)(w, x)
        return jnp.sin(x).sum()

    _, first, second, *_ = checkpoints(emitted(function))
    assert first.params["jaxpr"] is second.params["jaxpr"]
    lowered = jax.jit(jax.grad(jamp.cast_fn(function, "O2:bfloat16"))).lower(W, X).as_text(debug_info=True)
    for scope in "abc":
        assert re.search(rf'"[^"]*transpose[^"]*/{scope}/[^"]*cos"', lowered), scope


@pytest.mark.parametrize("state", ["array", "list"])
def test_what_a_rule_is_given_may_change_where_it_is(state: str) -> None:
    """A rule runs when it is differentiated, on what it was given: equal numbers elsewhere are none of it."""
    make: Callable[[float], Any] = {"array": lambda x: np.array([x], np.float32), "list": lambda x: [x]}[state]

    def program(slope: Any) -> Callable[..., Any]:
        function = jax.custom_jvp(lambda x: x * 2.0)
        function.defjvp(partial(lambda slope, primals, tangents: (primals[0] * 2.0, tangents[0] * slope[0]), slope))
        return jamp.cast_fn(lambda x: lax.scan(lambda c, _: (function(c), None), x, None, 1)[0].sum(), "O2:bfloat16")

    first, second = make(2.0), make(2.0)
    program(first)(jnp.ones(4))
    first[0] = 5.0
    assert float(jax.grad(program(second))(jnp.ones(4))[0]) == 2.0
    assert float(jax.grad(program(first))(jnp.ones(4))[0]) == 5.0


@pytest.mark.parametrize("name", ["code", "model"])
def test_globals_of_a_package_are_read_that_has_a_name_of_pythons(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    package = ModuleType(name)
    package.__path__ = []
    monkeypatch.setitem(sys.modules, name, package)
    module: dict[str, Any] = {"__name__": f"{name}.layers", "jax": jax}
    exec("def rule(primals, tangents):\n    return primals[0] * 2.0, tangents[0] * SLOPE", module)
    function = jax.custom_jvp(lambda x: x * 2.0)
    function.defjvp(module["rule"])
    for slope in (2.0, 3.0):
        module["SLOPE"] = slope
        assert slope_of(lambda x: lax.scan(lambda c, _: (function(c), None), x, None, 1)[0]) == slope
