import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def names() -> dict:
    """What the README's code defines, run from top to bottom as a reader would."""
    namespace: dict = {}
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"README.md, block {number}", "exec"), namespace)
    return namespace


def test_there_is_code():
    assert len(BLOCKS) >= 5


def test_the_code_runs_and_trains(names):
    assert jnp.isfinite(names["loss"])
    assert {x.dtype for x in jax.tree.leaves(names["params"])} == {jnp.dtype("float32")}
    assert names["scale"].loss_scale == 2**15
    assert names["policy"].level == "O1"


def test_the_code_computes_in_half(names):
    params, x = names["params"], names["x"]
    jaxpr = str(jax.make_jaxpr(names["apply_fn"])(params, x))
    assert "bf16[32,64] = dot_general" in jaxpr
    assert names["apply_fn"](params, x).dtype == jnp.float32


def test_links_and_markers():
    text = README.read_text()
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    assert [target for target in targets if not (README.parent / target).exists()] == []
    assert text.count("<!-- demo-table -->") == text.count("<!-- demo-picture -->") == 1
