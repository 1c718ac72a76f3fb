"""Every page of the documentation: its code runs and prints what the page says, its links lead somewhere."""

import os
import runpy

import jax
import jax.numpy as jnp
import pytest

from tests.docs.pages import NOTEBOOKS, PAGES, ROOT, blocks, headings, links, run, tabs

os.environ["KERAS_BACKEND"] = "jax"  # Keras reads it at its first import, in whatever test that is.
os.environ.setdefault("MPLBACKEND", "agg")


def name_of(path) -> str:
    return str(path.relative_to(ROOT))


@pytest.fixture(autouse=True)
def quick_compilation():
    """Compiles without most optimizations: each of the many small programs runs a few times."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def check_readme(names: dict) -> None:
    assert jnp.isfinite(names["loss"])
    assert {x.dtype for x in jax.tree.leaves(names["params"])} == {jnp.dtype("float32")}
    assert "bf16[32,64] = dot_general" in str(jax.make_jaxpr(names["apply_fn"])(names["params"], names["x"]))


def check_training(names: dict) -> None:
    assert jnp.isfinite(names["loss"])
    assert {x.dtype for x in jax.tree.leaves(names["params"])} == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(names["half"])} == {jnp.dtype("float16")}


# What more than running the code of a page has to give.
CHECKS = {"README.md": check_readme, "docs/training.md": check_training}


# Their code takes up to a minute each, and what it calls has tests of its own.
LONG = "docs/faq.md", "docs/float8.md", "docs/inspect.md", "docs/libraries.md"


@pytest.mark.each_case
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # The libraries' own, at their import.
@pytest.mark.parametrize(
    ("page", "tab"),
    [
        pytest.param(path, tab, marks=[pytest.mark.nightly] if name_of(path) in LONG else [])
        for path in PAGES
        if blocks(path.read_text())
        for tab in tabs(path.read_text())
    ],
    ids=lambda value: value if isinstance(value, str) or value is None else name_of(value),
)
def test_the_code_of_a_page_runs(page, tab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = run(page.read_text(), name_of(page), tab)
    CHECKS.get(name_of(page), lambda names: None)(names)


@pytest.mark.nightly  # The site is built of their output, so `make docs` runs them too.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_a_notebook_runs(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(notebook))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    dangling = []
    for file, anchor in links(page.read_text()):
        target = (page.parent / file).resolve() if file else page
        ours = target.suffix == ".md" and target.exists()
        if not target.exists() or (anchor and ours and anchor not in headings(target.read_text())):
            dangling.append(f"{file}#{anchor}")
    assert dangling == []


def test_the_readme_keeps_the_markers_of_its_tables():
    text = (ROOT / "README.md").read_text()
    assert text.count("<!-- demo-table -->") == text.count("<!-- demo-picture -->") == 1


class TestTheMechanism:
    """A page that lies must fail."""

    def test_blocks_share_names_and_fragments_are_left_out(self):
        fragment = "<!-- not run: PyTorch -->\n```python\nraise\n```\n\n"
        text = f"```python\na = 1\n```\n\n{fragment}    ```python\n    b = a\n    ```\n"
        assert [bool(block.reason_not_run) for block in blocks(text)] == [False, True, False]
        assert run(text)["b"] == 1

    def test_each_tab_runs_with_what_stands_in_none(self):
        tab = '=== "{0}"\n\n    Words.\n\n    ```python\n    x = "{0}"\n    ```\n\n'
        text = "```python\nstart = 1\n```\n\n" + tab.format("A") + tab.format("B") + "```python\nend = x, start\n```\n"
        assert tabs(text) == ["A", "B"]
        assert [run(text, tab=tab)["end"] for tab in tabs(text)] == [("A", 1), ("B", 1)]

    def test_output_is_compared(self):
        text = "```python\nprint(1 + 1)\n```\n\n```text\n{}\n```\n"
        run(text.format(2))
        with pytest.raises(AssertionError, match="line 2"):
            run(text.format(3))

    def test_code_that_fails_names_its_line(self):
        with pytest.raises(ZeroDivisionError) as error:
            run("# Title\n\n```python\n1 / 0\n```\n", "some.md")
        assert (error.traceback[-1].path, error.traceback[-1].lineno) == ("some.md", 3)

    def test_anchors_and_links(self):
        text = "## What `cast_fn` does: a *test*\n\n[a](other.md#b) [c](#d) [e](https://f.org/g)\n```python\nx[0](y)\n```\n"
        assert headings(text) == {"what-cast_fn-does-a-test"}
        assert links(text) == [("other.md", "b"), ("", "d")]
