"""Where the error comes from, drawn: bars that add up, and what there is nothing to draw of."""

import jax
import jax.numpy as jnp
import pytest

import jamp
from jamp.inspect._sources_picture import _by_scope


def loss(x):
    for letter in "abcdefghijklmnopqrst":
        with jax.named_scope(f"_{letter}"):
            x = x + jnp.tanh(x @ x.T) / 16
    with jax.named_scope("culprit"):
        return (jamp.half_precision(lambda x: (x + 100) - 100)(x) ** 2).mean()


@pytest.mark.nightly  # It measures a whole program.
def test_bars_add_up_to_the_prediction(tmp_path):
    """Each is a part of the error in the direction of all of it, and not a length, which would add in squares."""
    found = jamp.error_sources(loss, jnp.sin(jnp.arange(16.0)).reshape(4, 4), policy="O2:bfloat16")
    scopes = _by_scope(found, found.operations)
    assert sum(part for _, part in scopes) == pytest.approx(found.gradient_predicted)
    assert scopes[-1][0] == "culprit" and scopes[0][0].endswith(" others")
    found.plot(tmp_path / "sources.svg")
    picture = (tmp_path / "sources.svg").read_text()
    assert "all bars add up to the prediction" in picture and f"{found.gradient_error:.1e}" in picture


def test_all_curves_have_names_that_are_whole(tmp_path):
    """Matplotlib leaves out of a legend what begins with an underscore."""

    def looped(ws, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0].sum()

    ws = jax.random.normal(jax.random.key(0), (4, 8, 8)) / 4
    found = jamp.error_sources(looped, ws, ws[0] + 1, policy="O2:bfloat16")
    found.plot(tmp_path / "loop.svg")
    picture = (tmp_path / "loop.svg").read_text()
    in_loop = [op for op in found.operations if any(op.iterations)]
    assert len(in_loop) > 2
    assert all(f"{op.operation}, tests/inspect/test_sources_picture.py:" in picture for op in in_loop[:5])


@pytest.mark.parametrize("policy", ["O1:bfloat16", "O3:float16"])  # In float32; and what overflows.
def test_what_has_no_numbers(policy, tmp_path):
    fn = jnp.sin if policy == "O1:bfloat16" else (lambda x: jnp.sqrt(x @ x.T) @ x)
    found = jamp.error_sources(fn, jnp.full((4, 4), 300.0), policy=policy, gradient=False)
    found.plot(tmp_path / "empty.svg")
    text = "no operation rounds" if policy == "O1:bfloat16" else "not finite"
    assert text in (tmp_path / "empty.svg").read_text()
