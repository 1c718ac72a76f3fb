"""The page of model libraries: every snippet trains, in half precision."""

import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "libraries.md"
SHARED, *SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
LIBRARIES = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
os.environ["KERAS_BACKEND"] = "jax"  # Keras reads it at its first import, in whatever test that is.


def test_there_is_a_snippet_for_each_library():
    assert LIBRARIES == ["Flax linen", "Flax NNX", "Haiku", "Equinox", "Keras"]
    assert len(SNIPPETS) == len(LIBRARIES)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # The libraries' own, at their import.
@pytest.mark.parametrize("snippet", SNIPPETS, ids=LIBRARIES)
def test_the_snippet_trains_in_half(snippet):
    names: dict = {}
    exec(compile(SHARED, "libraries.md, shared", "exec"), names)
    train, jaxprs = names["train"], []

    def watched_train(forward, params):
        cast = names["jamp"].cast_fn(forward, policy="O2:float16")
        jaxprs.append(str(jax.make_jaxpr(cast)(params, names["x"])))
        return train(forward, params)

    names["train"] = watched_train
    exec(compile(snippet, "libraries.md", "exec"), names)
    products = re.findall(r"(\w+)\[[^\]]*\] = dot_general", jaxprs[0])
    assert len(products) == 2 and products[0] == "f16"
    assert names["losses"][-1] < 0.7 * names["losses"][0]
    assert jnp.isfinite(jnp.array(names["losses"])).all()
