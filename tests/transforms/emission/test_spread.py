"""Operands that many elements read are broadcast before they are rounded, and nothing else is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import jamp
from tests.transforms.harness import mixed_levels

WIDTH, ROWS = 4, 1000  # bfloat16 adds a thousand ones up to 256, or in a tree to what is near a thousand.
EYE = jnp.eye(WIDTH)
X = jnp.ones((3, ROWS, WIDTH))
ROW = jnp.arange(1.0, WIDTH + 1)

READ_BY_ALL = {
    "a bias": lambda b, x: x @ EYE + b,
    "a bias taken off": lambda b, x: x @ EYE - b,
    "a gate": lambda b, x: (x @ EYE) * b,
    "a computed condition": lambda b, x: x @ EYE + (b[None] @ EYE)[0],
    "a computed gate": lambda b, x: (x @ EYE) * (b[None] @ EYE)[0],
    "a limit": lambda b, x: jnp.maximum(x @ EYE - 9, b),
    "in a loop": lambda b, x: lax.scan(lambda h, _: (h @ EYE + b, None), x, None, length=1)[0],
    "by vmap": lambda b, x: jax.vmap(jax.vmap(lambda x: x @ EYE + b))(x),
}


@pytest.mark.parametrize("program", READ_BY_ALL.values(), ids=READ_BY_ALL)
@mixed_levels
def test_the_gradient_of_what_all_read_is_a_whole_sum(program, level):
    def gradient(fn):
        return jax.jit(jax.grad(lambda b, x: fn(b, x).sum()))(ROW, X)

    np.testing.assert_array_equal(gradient(jamp.cast_fn(program, f"{level}:float16")), gradient(program))


ASSEMBLED = {
    "concatenated": lambda h, row: jnp.concatenate([row, h], 0),
    "written": lambda h, row: lax.dynamic_update_slice(h, row, (2, 0)),
    "set": lambda h, row: h.at[5:6].set(row),
    "padded with": lambda h, row: jnp.pad(row, ((0, 63), (0, 0))) + h,
    "chosen": lambda h, row: jnp.where(jnp.arange(64)[:, None] > 9, h, row),
}


@pytest.mark.parametrize("assemble", ASSEMBLED.values(), ids=ASSEMBLED)
@mixed_levels
def test_what_is_assembled_keeps_its_shape_and_values(assemble, level):
    def program(row, x):
        return assemble(x @ EYE, row @ EYE)

    x, row = jnp.arange(64.0 * WIDTH).reshape(64, WIDTH), ROW[None]
    for half in ("bfloat16", "float16"):
        np.testing.assert_array_equal(jamp.cast_fn(program, f"{level}:{half}")(row, x), program(row, x))


def layers(params, x):
    for p in params:
        x = x + jax.nn.gelu(x @ p["w"] + p["b"])
    return x


def test_layers_that_repeat_meet_other_shapes():
    params = [{"w": EYE, "b": ROW}] * 6
    cast = jamp.cast_fn(layers, "O2:bfloat16")
    gradient = jax.grad(lambda params, x: cast(params, x).sum())
    for shape in ((9,), (65,), (4, 7)):
        made = gradient(params, jnp.ones((*shape, WIDTH)))
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(made))
    rows = jax.ShapeDtypeStruct(export.symbolic_shape(f"rows,{WIDTH}"), jnp.float32)
    called = export.export(jax.jit(cast))(params, rows).call
    assert called(params, jnp.ones((33, WIDTH))).shape == (33, WIDTH)
