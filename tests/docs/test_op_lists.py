"""The lists of operations on the site are those of the interpreter's table, all of them."""

import importlib.util
import re

import pytest

import jamp
from tests.docs.pages import ROOT


@pytest.fixture
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "tools" / "docs_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_primitive_of_the_table_is_listed_once(hooks):
    listed = re.findall(r"`([\w-]+)`", hooks.classes_table())
    assert sorted(listed) == sorted(hooks.primitive_classes())


def test_a_class_without_words_is_an_error(hooks, monkeypatch):
    monkeypatch.setattr(hooks, "primitive_classes", lambda: {"new": "unheard of"})
    with pytest.raises(ValueError, match="unheard of"):
        hooks.classes_table()


def test_every_preset_is_listed(hooks):
    table = hooks.presets_table()
    assert set(re.findall(r"^### (\w+)", table, re.MULTILINE)) == set(hooks.preset_lists())
    assert all(f"`{entry}`" in table for entry in jamp.Policy.preset("mxnet").full)


def test_the_page_gets_its_tables(hooks):
    page = (ROOT / "docs" / "oplists.md").read_text()
    made = hooks.on_page_markdown(page)
    assert "<!-- op-lists" in page and "<!-- op-lists" not in made and "`dot_general`" in made
