"""`jamp.report` of functions that call a `cast_fn` inside: as they are written, with the reasons of what is inside."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from tests.inspect.programs import MLP_SHAPES, mlp, rows, shape

apply_half = jamp.cast_fn(mlp, "O2:float16")


def test_a_function_with_a_cast_fn_inside_is_reported_as_it_is_written():
    found = jamp.report(lambda *args: jnp.exp(apply_half(*args)) @ jnp.ones((2, 2)), *MLP_SHAPES)
    assert (found.policy, found.inner) == (None, (jamp.get_policy("O2:float16"),))
    assert str(found).splitlines()[0] == "precision as written, with cast_fn at O2:float16 inside"
    products = [(op.scope, op.inputs[0], op.rule) for op in rows(found, "dot_general")]
    assert products == [
        ("hidden", "float16", "half"),
        ("out", "float16", "half, float32 out"),
        ("", "float32", "as traced"),
    ]
    assert [op.rule for op in rows(found, "exp")] == ["as traced"]
    assert json.loads(json.dumps(found.to_dict()))["inner"] == ["O2:float16"]


@pytest.mark.parametrize(
    "transform", [jax.jit, jax.checkpoint, lambda fn: jax.jit(jax.jit(fn)), lambda fn: fn.__call__]
)
def test_reasons_inside_are_those_of_the_cast_fn_alone(transform):
    def model(w, x):
        with jax.named_scope("body"):
            h, _ = lax.scan(lambda c, w: (jax.nn.gelu(c @ w), None), x, w)
        return jax.nn.log_softmax(lax.cond(True, lambda h: h * 2, lambda h: -h, jax.nn.relu(h)) @ w[0])

    cast = jamp.cast_fn(model, "O2:bfloat16")
    alone = jamp.report(cast, shape(3, 4, 4), shape(2, 4))
    found = jamp.report(transform(cast), shape(3, 4, 4), shape(2, 4))
    assert found.inner == (alone.policy,)
    assert (found.forward, found.casts) == (alone.forward, alone.casts)
    assert found.gradient == alone.gradient or transform is jax.checkpoint

    def reasons(report):
        shown = [op for op in report.operations if not op.casts or op.flops]
        return {(op.scope, op.primitive, op.inputs, op.outputs, op.rule) for op in shown if op.rule != "cast_fn"}

    assert reasons(found) >= {reason for reason in reasons(alone) if reason[1] not in ("jit", "scan", "cond")}
    assert sum(op.casts for op in found.operations) == found.casts


def test_reasons_inside_reach_the_gradient():
    found = jamp.report(jax.grad(lambda w, x: apply_half(w, w.T, x).sum()), shape(4, 4), shape(3, 4))
    assert {op.rule for op in rows(found, "dot_general")} == {"half", "half, float32 out"}
    assert found.forward.share == 1.0


def test_every_policy_inside_is_named_and_rules_its_part():
    def model(w, x):
        inner = jamp.cast_fn(lambda w, x: jamp.cast_fn(jnp.matmul, "O0")(x, w) @ w, "O3:float16")
        return inner(w, x) + jamp.cast_fn(jnp.matmul, "p=f32,c=bf16,o=f32")(x, w)

    found = jamp.report(model, shape(4, 4), shape(4, 4))
    assert str(found).startswith(
        "precision as written, with cast_fn at O3:float16 and O0 and p=float32,c=bfloat16,o=float32 inside\n"
    )
    products = {op.inputs[0]: op.rule for op in rows(found, "dot_general")}
    assert products == {"float32": "as traced", "float16": "half", "bfloat16": "as traced"}


def test_with_a_policy_the_heading_names_both():
    found = jamp.report(lambda *args: jnp.exp(apply_half(*args)), *MLP_SHAPES, policy="O3:bfloat16")
    assert str(found).startswith("precision at O3:bfloat16, with cast_fn at O2:float16 inside\n")
    assert [(op.inputs, op.rule) for op in rows(found, "exp")] == [(("bfloat16",), "half")]


def test_labels_stay_out_of_what_is_compiled():
    jitted = jax.jit(apply_half)
    args = [jnp.ones(s.shape) for s in MLP_SHAPES]
    jamp.report(jitted, *args)
    assert "jamp_rule" not in jitted.lower(*args).as_text(debug_info=True)
