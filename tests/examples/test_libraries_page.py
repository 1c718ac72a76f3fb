"""The page of model libraries: every snippet trains, in half precision."""

import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "libraries.md"
TOP, *SECTIONS = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
LIBRARIES = [section.split("\n", 1)[0] for section in SECTIONS]
os.environ["KERAS_BACKEND"] = "jax"  # Keras reads it at its first import, in whatever test that is.


def snippets(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_there_is_a_snippet_for_each_library():
    assert LIBRARIES == ["Flax linen", "Flax NNX", "Haiku", "Equinox", "Keras"]
    assert [len(snippets(section)) for section in (TOP, *SECTIONS)] == [1, 2, 3, 1, 1, 1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # The libraries' own, at their import.
@pytest.mark.parametrize("section", SECTIONS, ids=LIBRARIES)
def test_the_snippets_train_in_half(section):
    names: dict = {}
    exec(compile(snippets(TOP)[0], "libraries.md, shared", "exec"), names)
    train, jaxprs = names["train"], []

    def watched_train(forward, params):
        cast = names["jamp"].cast_fn(forward, policy="O2:float16")
        jaxprs.append(str(jax.make_jaxpr(cast)(params, names["x"])))
        return train(forward, params)

    names["train"] = watched_train
    first, *others = snippets(section)
    exec(compile(first, "libraries.md", "exec"), names)
    products = re.findall(r"(\w+)\[[^\]]*\] = dot_general", jaxprs[0])
    assert len(products) == 2 and products[0] == "f16"
    assert names["losses"][-1] < 0.7 * names["losses"][0]
    assert jnp.isfinite(jnp.array(names["losses"])).all()
    for other in others:  # With running statistics and dropout.
        exec(compile(other, "libraries.md", "exec"), names)
        assert names["loss"] < 0.3 * names["losses"][0]
        assert names["jamp"].loss_scale(names["opt_state"]).loss_scale == 2**15
        check_state(names)


def check_state(names: dict) -> None:
    """Statistics have moved, and so have the counts of random streams."""
    if "nnx" in names:
        means, draws = names["model"].norm.mean[...], names["model"].dropout.rngs.count[...]
        assert draws == 30
    else:
        means = names["stats"]["BatchNorm_0"]["mean"]
    assert means.dtype == jnp.float32 and (means != 0).all() and jnp.isfinite(means).all()
