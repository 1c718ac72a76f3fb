"""The evaluation in two precisions in pieces: what layers have in common is compiled once, and numbers are the same."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from jamp.inspect._target import resolve
from jamp.inspect.roundings.pair import Pair
from jamp.inspect.roundings.pieces import pieces
from jamp.inspect.roundings.program import value_and_gradient
from jamp.inspect.roundings.raised import Evaluation
from jamp.inspect.roundings.steps import in_line
from jamp.transforms.program.signature import Signatures


def model(params, x):
    for i, w in enumerate(params):
        with jax.named_scope(f"layer{i}"):
            x = x + jax.nn.silu(x @ w)
    return (x**2).mean()


def weights(layers, width=4):
    return [jnp.sin(jnp.arange(float(width * width)) + i).reshape(width, width) for i in range(layers)]


def program_of(layers):
    target = resolve("error_sources", model, (weights(layers), jnp.ones((2, 4))), {}, "O2:bfloat16")
    return value_and_gradient(target, target.program())


def compiled(layers, caplog):
    caplog.clear()
    with jax.log_compiles():
        jamp.error_sources(model, weights(layers), jnp.ones((2, 4)), policy="O2:bfloat16", gradient=False)
    return sum(bool(re.match(r"Finished XLA compilation of jit\(run\)", r.getMessage())) for r in caplog.records)


def test_more_layers_compile_no_more_pieces(caplog):
    few = compiled(3, caplog)
    assert 0 < compiled(6, caplog) <= few


def test_more_layers_have_no_more_pieces_with_their_gradient():
    def kinds(layers):
        steps = in_line(program_of(layers).jaxpr)
        signatures = Signatures(places=False)
        return {
            signatures.of_equations([step[1:] for step in piece.steps], piece.ins, piece.outs)
            for piece in pieces(steps.steps, [value for value in steps.outs if isinstance(value, int)])
        }

    assert None not in kinds(4)
    assert len(kinds(8)) == len(kinds(4)) < len(kinds(2)) * 2


@pytest.mark.parametrize("layers", [1, 3])
def test_pieces_are_the_program(layers):
    program = program_of(layers)
    steps = in_line(program.jaxpr)
    outs = [value for value in steps.outs if isinstance(value, int)]
    found = list(pieces(steps.steps, outs))
    assert len(found) == 3 * layers  # One forward, two backward.
    assert sorted(step.key for piece in found for step in piece.steps) == [step.key for step in steps.steps]
    known = {*steps.ins, *steps.consts}
    for piece in found:
        assert known.issuperset(piece.ins)
        known |= {*piece.outs}
        known -= {*piece.last}
    assert known.issuperset(outs)


def test_calls_in_line_are_the_calls():
    @jax.jit
    def twice(x):
        return jnp.where(x > 0, 2 * x, jnp.float32(3))

    jaxpr = jax.make_jaxpr(lambda x: (twice(twice(x)), x, 1.0))(jnp.ones(2))
    x = np.float32([-1, 2])
    (outs, _) = Evaluation().run(jaxpr, [Pair(x, x)])
    assert [np.asarray(out.wide).tolist() for out in outs] == [[6, 8], [-1, 2], 1]
